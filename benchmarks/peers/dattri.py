"""dattri's influence function by conjugate gradients (`IFAttributorCG`), all data in one batch.

    python -m benchmarks.peers.dattri [--check] [NAME …]

One batch, since dattri adds up `H_b⁻¹ v` over the batches of the loader, which is right only for one. Ten iterations,
its default, everywhere; the Hessian is the loss's own, not Gauss and Newton's. Settings of its own: "default" is no
damping at all; "example" is the 5e-3 of its example that computes LDS. The grid is in multiples of the Hessian's
largest eigenvalue, found by its own Hessian-vector products.

`--check` compares with the dense Hessian, and, at a damping that outgrows the curvature, with dot products of
gradients, also of a convolution. There it stops after two iterations: its `tol` is not read, and going on after
convergence divides zero by zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from dattri.algorithm.influence_function import IFAttributorCG
from dattri.func.hessian import hvp_at_x
from dattri.task import AttributionTask
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.peers import tiny
from benchmarks.peers.asking import Peer, main
from whence import Classification, Regression
from whence.tasks import Task

QUERIES_AT_ONCE = 10  # what vmap holds in memory at once; the scores do not depend on it


class ConjugateGradients:
    """dattri with a model and all of its training data in one batch.

    Attributes:
        scale: the largest eigenvalue of the Hessian, in absolute value.
    """

    def __init__(self, model: nn.Module, task: Task, train: Sequence[Tensor]) -> None:
        def loss(parameters: dict[str, Tensor], data: tuple[Tensor, Tensor]) -> Tensor:
            outputs = functional_call(model, parameters, data[0])
            if isinstance(task, Regression):
                return (outputs - data[1]).square().sum(-1).mean() / (2 * task.variance)
            return F.cross_entropy(outputs, data[1])

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

    def scores(self, queries: Sequence[Tensor], damping: float | None, iterations: int = 10) -> Tensor:
        attributor = IFAttributorCG(self.task, regularization=damping, max_iter=iterations)
        attributor.cache(self.train)
        with torch.no_grad():
            return attributor.attribute(self.train, _loader(queries, QUERIES_AT_ONCE)).T


def _loader(tensors: Sequence[Tensor], batch: int) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*tensors), batch_size=batch, shuffle=False)


PEER = Peer(
    "dattri",
    unit="largest eigenvalue of the Hessian",
    settings={"default": 0.0, "example": 5e-3},
    multiples=tuple(10 ** (i / 2 - 4) for i in range(10)),
    prepare=ConjugateGradients,
    tasks=(Classification, Regression),
)


def check() -> None:
    huge = 1e4
    for problem in (tiny.network, tiny.picture_network):
        model, train, queries = problem()
        expected = tiny.dot_products(model, train, queries)
        found = ConjugateGradients(model, Classification(), train).scores(queries, huge, iterations=2) * huge
        tiny.agree(f"{problem.__name__}, damping {huge:g}, dot products", found, expected)
    model, train, queries = tiny.network()
    for damping in (1.0, 3.0):  # less, and the untrained Hessian is not positive definite
        expected = tiny.dense_hessian(model, train, queries, damping)
        found = ConjugateGradients(model, Classification(), train).scores(queries, damping)
        tiny.agree(f"network, damping {damping:g}, dense Hessian", found, expected)


if __name__ == "__main__":
    main(PEER, check)
