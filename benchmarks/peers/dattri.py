"""dattri's influence functions by conjugate gradients and by LiSSA, and its TRAK.

    python -m benchmarks.peers.dattri [--check] [--peer NAME] [NAME …]

All data are in one batch, since dattri adds up `H_b⁻¹ v` over the batches of the loader, which is right only for
one. The Hessian is the loss's own, not Gauss and Newton's. Grids are in multiples of its largest eigenvalue, found
by its own Hessian-vector products.

- `dattri`: `IFAttributorCG`, ten iterations, its default, everywhere. Settings of its own: "default" is no damping
  at all; "example" is the 5e-3 of its example that computes LDS.
- `dattri-lissa`: `IFAttributorLiSSA`. "default" are its defaults: 5,000 steps of one example each, a scaling of 50,
  no damping. The grid takes 500 steps of 50 examples, which are five times as many; its `damping` is that of
  H/scaling, and is given so that λ is as said. A series that diverges ends in no number.
- `dattri-trak`: `TRAKAttributor` of the one trained model, with 512 random projections, its default, and the
  log-odds of the right label, as in its examples; classification alone. Its `regularization` is none by default.
  The grid is in multiples of the mean eigenvalue of the matrix that it is added to.

Left out is `IFAttributorEKFAC`: it multiplies by the transposes of the matrices of eigenvectors, and lays out a
layer's weights and biases one after the other where its factors have a bias at the end of every row. `--check` says
how far it is from EK-FAC written out densely.

`--check` compares with the dense Hessian, and, at a damping that outgrows the curvature, with dot products of
gradients, also of a convolution. There conjugate gradients stop after two iterations: their `tol` is not read, and
going on after convergence divides zero by zero. LiSSA is compared on a linear model, with all examples in every
step. TRAK is compared without projection.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

os.environ["TQDM_DISABLE"] = "1"

import torch
from dattri.algorithm.influence_function import (
    IFAttributorCG,
    IFAttributorEKFAC,
    IFAttributorLiSSA,
)
from dattri.algorithm.trak import TRAKAttributor
from dattri.func.hessian import hvp_at_x
from dattri.task import AttributionTask
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.peers import tiny
from benchmarks.peers.asking import Peer, main
from benchmarks.works import mean_loss_of
from whence import Classification, Regression
from whence.tasks import Task

QUERIES_AT_ONCE = 10  # what vmap holds in memory at once; the scores do not depend on it
PROJECTED_AT_ONCE = 500  # likewise, of training examples


class Influence:
    """dattri with a model and all of its training data in one batch.

    Attributes:
        scale: the largest eigenvalue of the Hessian, in absolute value.
    """

    def __init__(self, model: nn.Module, task: Task, train: Sequence[Tensor]) -> None:
        def loss(parameters: dict[str, Tensor], data: tuple[Tensor, Tensor]) -> Tensor:
            targets = (
                data[1] if isinstance(task, Regression) else data[1].long()
            )  # LiSSA makes labels real numbers
            return mean_loss_of(functional_call(model, parameters, data[0]), targets, task)

        self.task = AttributionTask(loss_func=loss, model=model, checkpoints=model.state_dict())
        self.train = _loader(train, len(train[0]))
        self.scale = self._largest_eigenvalue(tuple(train))

    def _largest_eigenvalue(self, train: tuple[Any, ...], iterations: int = 30) -> float:
        parameters, _ = self.task.get_param(0)
        loss = self.task.get_loss_func()
        product = hvp_at_x(lambda values: loss(values, train), x=(parameters,))
        vector, size = torch.randn(len(parameters), generator=torch.Generator().manual_seed(0)), 0.0
        for _ in range(iterations):
            vector = product(vector / vector.norm()).detach()
            size = float(vector.norm())
        return size

    def by(self, attributor: Any, queries: Sequence[Tensor]) -> Tensor:
        attributor.cache(self.train)
        with torch.no_grad():
            scores: Tensor = attributor.attribute(self.train, _loader(queries, QUERIES_AT_ONCE)).T
        return scores


class ConjugateGradients(Influence):
    """`IFAttributorCG`."""

    def scores(self, queries: Sequence[Tensor], damping: float | None, iterations: int = 10) -> Tensor:
        return self.by(IFAttributorCG(self.task, regularization=damping, max_iter=iterations), queries)


class Lissa(Influence):
    """`IFAttributorLiSSA`."""

    scaling = 50.0  # its default

    def scores(
        self, queries: Sequence[Tensor], damping: float | None, steps: int = 500, batch: int = 50
    ) -> Tensor:
        torch.manual_seed(0)  # batches are drawn at random
        if damping is None:
            return self.by(IFAttributorLiSSA(self.task), queries)
        damped = damping / self.scaling
        lissa = IFAttributorLiSSA(self.task, damping=damped, recursion_depth=steps, batch_size=batch)
        return self.by(lissa, queries)


class Trak:
    """`TRAKAttributor` of one model.

    Attributes:
        scale: the mean eigenvalue of the projected gradients' second moment, summed over examples.
    """

    def __init__(
        self, model: nn.Module, task: Task, train: Sequence[Tensor], projection: dict[str, Any] | None = None
    ) -> None:
        def loss(parameters: dict[str, Tensor], data: tuple[Tensor, Tensor]) -> Tensor:
            return F.cross_entropy(
                functional_call(model, parameters, data[0].unsqueeze(0)), data[1].unsqueeze(0)
            )

        def log_odds(parameters: dict[str, Tensor], data: tuple[Tensor, Tensor]) -> Tensor:
            logits = functional_call(model, parameters, data[0].unsqueeze(0)).squeeze(0)
            right = torch.arange(len(logits)) == data[1]
            return logits.where(right, 0).sum() - logits.where(~right, -torch.inf).logsumexp(0)

        self.attributor: Any = TRAKAttributor(
            AttributionTask(loss_func=log_odds, model=model, checkpoints=model.state_dict()),
            correct_probability_func=lambda parameters, data: (-loss(parameters, data)).exp(),
            projector_kwargs=projection,
        )
        # It keeps (X'X + λ)⁻¹X' and not X. With a huge λ that is X'/λ, so that other λ need no other gradients.
        self.attributor.regularization = huge = 1e12
        with torch.no_grad():
            self.attributor.cache(_loader(train, PROJECTED_AT_ONCE))
        self.rows = self.attributor.inv_XTX_XT_list[0] * huge
        self.scale = float(self.rows.square().sum(1).mean())

    def scores(self, queries: Sequence[Tensor], damping: float | None) -> Tensor:
        moment = self.rows @ self.rows.T
        moment.diagonal().add_(damping)
        try:
            self.attributor.inv_XTX_XT_list = [torch.linalg.solve(moment, self.rows)]
        except torch.linalg.LinAlgError:  # fewer examples than projections, and no λ: it ends so itself
            return torch.full((len(queries[0]), self.rows.shape[1]), torch.nan)
        with torch.no_grad():
            scores: Tensor = self.attributor.attribute(_loader(queries, len(queries[0]))).T
        return scores.contiguous()


def _loader(tensors: Sequence[Tensor], batch: int) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*tensors), batch_size=batch, shuffle=False)


_GRID = tuple(10 ** (i / 2 - 4) for i in range(10))
_CG = Peer(
    "dattri",
    "dattri",
    settings={"default": 0.0, "example": 5e-3},
    prepare=ConjugateGradients,
    unit="largest eigenvalue of the Hessian",
    multiples=_GRID,
)
_LISSA = Peer(
    "dattri-lissa",
    "dattri",
    settings={"default": None},
    prepare=Lissa,
    unit="largest eigenvalue of the Hessian",
    multiples=_GRID,
)
_TRAK = Peer(
    "dattri-trak",
    "dattri",
    settings={"default": 0.0},
    prepare=Trak,
    unit="mean eigenvalue of the projected gradients' second moment",
    multiples=tuple(10 ** (2 * i / 3 - 2) for i in range(10)),
)
PEERS = (_CG, _LISSA, _TRAK)


def check() -> None:
    huge = 1e4
    for problem in (tiny.network, tiny.picture_network):
        model, train, queries = problem()
        expected = tiny.dot_products(model, train, queries)
        found = ConjugateGradients(model, Classification(), train).scores(queries, huge, iterations=2) * huge
        tiny.agree(f"CG, {problem.__name__}, damping {huge:g}, dot products", found, expected)
    model, train, queries = tiny.network()
    for damping in (1.0, 3.0):  # less, and the untrained Hessian is not positive definite
        expected = tiny.dense_hessian(model, train, queries, damping)
        found = ConjugateGradients(model, Classification(), train).scores(queries, damping)
        tiny.agree(f"CG, network, damping {damping:g}, dense Hessian", found, expected)
    model, train, queries = tiny.linear()
    for damping in (0.5, 1.0):
        expected = tiny.dense_hessian(model, train, queries, damping)
        lissa = Lissa(model, Classification(), train)
        found = lissa.scores(queries, damping, steps=1500, batch=len(train[0]))
        tiny.agree(f"LiSSA, linear model, damping {damping:g}, dense Hessian", found, expected)
    for problem in (tiny.network, tiny.picture_network):
        model, train, queries = problem()
        parameters = sum(p.numel() for p in model.parameters())
        trak = Trak(model, Classification(), train, {"proj_type": "identity", "proj_dim": parameters})
        for damping in (1e-3, 1e-1):
            expected = tiny.dense_trak(model, train, queries, damping * parameters)
            found = trak.scores(queries, damping)
            tiny.agree(f"TRAK, {problem.__name__}, damping {damping:g}, dense", found, expected)
    for bias in (True, False):
        model, train, queries = tiny.network(bias=bias)
        expected = tiny.dense_ekfac(model, train, queries, 1e-2)
        ekfac = IFAttributorEKFAC(Influence(model, Classification(), train).task, damping=1e-2)
        ekfac.cache(_loader(train, len(train[0])))
        found = ekfac.attribute(_loader(train, len(train[0])), _loader(queries, len(queries[0]))).T.detach()
        print(f"EK-FAC (left out), biases {bias}: relative difference {tiny.difference(found, expected):.1e}")


if __name__ == "__main__":
    main(PEERS, check)
