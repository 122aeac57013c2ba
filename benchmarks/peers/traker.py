"""TRAK by its authors' package, of the one trained model.

    python -m benchmarks.peers.traker [--check] [NAME …]

`TRAKer` at its defaults for `image_classification`, 2,048 random projections and no regularization, but in single
precision: half precision is for GPUs. Its authors average ten and more models trained on parts of the data; here it
has the one model, as all others. The grid is of `lambda_reg`, in multiples of the mean eigenvalue of the projected
gradients' second moment; with fewer training examples than projections that matrix cannot be inverted without. It
knows classification only.

`--check` compares, up to a factor, since it scales what it inverts, with TRAK written out densely without
projection.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Sequence

os.environ["TQDM_DISABLE"] = "1"

import torch
from torch import Tensor, nn
from trak import TRAKer
from trak.projectors import AbstractProjector, NoOpProjector

from benchmarks.peers import tiny
from benchmarks.peers.asking import Peer, main
from whence import Classification
from whence.tasks import Task

AT_ONCE = 500  # projections are drawn anew for every batch


class Trak:
    """TRAK with a model's gradients projected.

    Attributes:
        scale: the mean eigenvalue of their second moment, summed over examples.
    """

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        train: Sequence[Tensor],
        projector: AbstractProjector | None = None,
    ) -> None:
        self.model, self.asked = model, 0
        self.directory = tempfile.TemporaryDirectory()
        self.traker = TRAKer(
            model, "image_classification", len(train[0]), save_dir=self.directory.name, device="cpu",
            projector=projector, use_half_precision=False, logging_level=logging.ERROR,
        )  # fmt: skip
        self.traker.load_checkpoint(model.state_dict(), model_id=0)
        for batch in zip(*(tensor.split(AT_ONCE) for tensor in train), strict=True):
            self.traker.featurize(batch, num_samples=len(batch[0]))
        rows = torch.as_tensor(self.traker.saver.current_store["grads"])
        self.scale = float(rows.square().sum() / rows.shape[1])

    def scores(self, queries: Sequence[Tensor], damping: float | None) -> Tensor:
        self.traker.score_computer.lambda_reg = damping
        self.traker.saver.model_ids[0]["is_finalized"] = 0  # of another damping
        self.traker.finalize_features()
        self.asked += 1
        name = f"queries {self.asked}"
        self.traker.start_scoring_checkpoint(name, self.model.state_dict(), 0, len(queries[0]))
        self.traker.score(list(queries), num_samples=len(queries[0]))
        return torch.tensor(self.traker.finalize_scores(name)).T.contiguous()


PEERS = (
    Peer(
        "traker",
        "traker",
        settings={"default": 0.0},
        prepare=Trak,
        unit="mean eigenvalue of the projected gradients' second moment",
        multiples=tuple(10 ** (2 * i / 3 - 2) for i in range(10)),
    ),
)


def check() -> None:
    for problem in (tiny.network, tiny.picture_network):
        model, train, queries = problem()
        parameters = sum(p.numel() for p in model.parameters())
        trak = Trak(model, Classification(), train, NoOpProjector(device="cpu"))
        for damping in (1e-3, 1e-1):
            expected = tiny.dense_trak(model, train, queries, damping * parameters)
            found = trak.scores(queries, damping)
            tiny.agree(
                f"{problem.__name__}, damping {damping:g}, dense, up to a factor",
                found / found.norm(),
                expected / expected.norm(),
            )


if __name__ == "__main__":
    main(PEERS, check)
