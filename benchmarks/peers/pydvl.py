"""pyDVL's influence functions by a Nyström approximation of the Hessian.

    python -m benchmarks.peers.pydvl [--check] [NAME …]

`NystroemSketchInfluence` of rank 10, as its documentation has it. There is no default regularization, and the 0 of
that example is refused: so there is the grid alone, in multiples of the largest eigenvalue that the approximation
finds. The Hessian is the loss's own: what pyDVL calls Gauss-Newton is the gradients' second moment. Data are pairs
of inputs and targets; language models it cannot do. It wants numpy 1.

`--check` compares with the dense Hessian of a model where that is positive semidefinite, with a rank that is its
size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from pydvl.influence.torch import NystroemSketchInfluence
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.peers import tiny
from benchmarks.peers.asking import Peer, main
from benchmarks.works import mean_loss_of
from whence import Classification
from whence.tasks import Task

RANK = 10
GRID = tuple(10 ** (i / 2 - 4) for i in range(10))


class Nystroem:
    """pyDVL with the Hessian of a model approximated.

    Attributes:
        scale: its largest eigenvalue.
    """

    def __init__(self, model: nn.Module, task: Task, train: Sequence[Tensor], rank: int = RANK) -> None:
        def loss(outputs: Tensor, targets: Tensor) -> Tensor:
            return mean_loss_of(outputs, targets, task)

        self.train = train
        torch.manual_seed(0)  # the sketch is random
        self.influence = NystroemSketchInfluence(model, loss, regularization=1.0, rank=rank)
        self.influence.fit(DataLoader(TensorDataset(*train), batch_size=len(train[0])))
        (block,) = self.influence.block_mapper.composable_block_dict.values()
        self.scale = float(block.op.low_rank_representation.eigen_vals.max())

    def scores(self, queries: Sequence[Tensor], damping: float | None) -> Tensor:
        influence = self.influence.with_regularization(damping)
        scores: Tensor = influence.influences(*queries, *self.train)
        return scores.detach()

    def self_scores(self) -> Tensor:
        """In the middle of the grid, as there is no default."""
        influence = self.influence.with_regularization(self.scale * GRID[4])
        factors = influence.influence_factors(*self.train)
        scores: Tensor = influence.influences_from_factors(factors, *self.train)
        return scores.detach().diagonal().clone()


PEERS = (
    Peer(
        "pydvl",
        "pydvl",
        settings={},
        prepare=Nystroem,
        unit="largest eigenvalue of the approximated Hessian",
        multiples=GRID,
        mislabels=True,
    ),
)


def check() -> None:
    model, train, queries = tiny.linear()
    influence = Nystroem(model, Classification(), train, sum(p.numel() for p in model.parameters()))
    for damping in (1e-2, 1.0):
        expected = tiny.dense_hessian(model, train, queries, damping)
        found = influence.scores(queries, damping)
        tiny.agree(f"linear model, damping {damping:g}, dense Hessian", found, expected)


if __name__ == "__main__":
    main(PEERS, check)
