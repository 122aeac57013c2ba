"""Captum's TracIn: dot products of gradients at checkpoints of the training, weighted by the learning rates there.

    python -m benchmarks.peers.captum [--check] [--peer NAME] [NAME …]

Five checkpoints as far from each other as can be, the trained model the last of them; all other peers are given
that one alone. There is no damping.

- `captum`: `TracInCP`, all parameters, with `sample_wise_grads_per_batch`, which does linear and convolutional
  layers.
- `captum-fast`: `TracInCPFast`, the weights of the last linear layer alone, without its bias.

It wants losses from outputs and labels, and is not given language models. `--check` compares with dense dot
products.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from captum.influence import TracInCP, TracInCPFast
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.peers import tiny
from benchmarks.peers.asking import Peer, main
from benchmarks.works import Checkpoint, mean_loss_of
from whence import Classification
from whence.tasks import Task


class TracIn:
    """One of Captum's two ways, with a model and its checkpoints."""

    scale = 1.0  # there is no grid

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        train: Sequence[Tensor],
        checkpoints: Sequence[Checkpoint],
        *,
        fast: bool,
    ) -> None:
        def loss(outputs: Tensor, targets: Tensor) -> Tensor:
            return mean_loss_of(outputs, targets, task)

        loss.reduction = "mean"  # type: ignore[attr-defined]  # it asks the loss
        shared: dict[str, Any] = {
            "train_dataset": DataLoader(TensorDataset(*train), batch_size=256),
            "checkpoints": list(checkpoints),
            "checkpoints_load_func": load,
            "loss_fn": loss,
        }
        if fast:
            *_, last = (module for module in model.modules() if isinstance(module, nn.Linear))
            self.tracin = TracInCPFast(model, last, **shared)
        else:
            self.tracin = TracInCP(model, sample_wise_grads_per_batch=True, **shared)

    def scores(self, queries: Sequence[Tensor], damping: float | None) -> Tensor:
        scores: Tensor = self.tracin.influence(tuple(queries))
        return scores.detach()

    def self_scores(self) -> Tensor:
        scores: Tensor = self.tracin.self_influence()
        return scores.detach()


def load(model: nn.Module, checkpoint: Checkpoint) -> float:
    """As Captum asks: load a checkpoint into a model, and return its learning rate."""
    state, rate = checkpoint
    model.load_state_dict(state)
    return rate


_ALL, _FAST = (
    Peer(
        name,
        "captum",
        settings={"default": None},
        prepare=partial(TracIn, fast=fast),
        mislabels=True,
        checkpoints=True,
    )
    for name, fast in (("captum", False), ("captum-fast", True))
)
PEERS = (_ALL, _FAST)


def check() -> None:
    for problem in (tiny.network, tiny.picture_network):
        model, train, queries = problem()
        other, _, _ = problem()
        for parameter in other.parameters():
            parameter.data *= 1.5
        rates = {model: 0.1, other: 0.2}
        checkpoints = [
            ({k: v.clone() for k, v in at.state_dict().items()}, rate) for at, rate in rates.items()
        ]
        expected = sum(rate * tiny.dot_products(at, train, queries) for at, rate in rates.items())
        head = sum(rate * tiny.dot_products(at, train, queries, last=True) for at, rate in rates.items())
        for fast, dense in ((False, expected), (True, head)):
            found = TracIn(model, Classification(), train, checkpoints, fast=fast).scores(queries, None)
            tiny.agree(f"{problem.__name__}, fast {fast}, two checkpoints, dot products", found, dense)


if __name__ == "__main__":
    main(PEERS, check)
