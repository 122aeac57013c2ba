"""`SampledGaussNewton`: the Gauss-Newton Hessian over drawn examples, and how it lies beside that of all of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from whence.model.exact import tangent_only
from whence.model.inspection import check_finite
from whence.model.slopes import Slopes
from whence.operators import LinearOperator
from whence.tasks import Batch
from whence.vectors import ParamVector

if TYPE_CHECKING:
    from whence.model.gauss_newton import GaussNewton

__all__ = ["SampledGaussNewton", "curvatures"]


class SampledGaussNewton(LinearOperator):
    """``H̃``: the operator over some drawn examples, weighted so that its expectation is ``H``.

    Args:
        parent: H.
        positions: the examples, as often as they were drawn.
        weights: what each draw counts for; None: all the same.
        sign: of one-sided differences; None for central ones. Exact products have none.
    """

    def __init__(
        self,
        parent: GaussNewton,
        positions: Tensor,
        weights: Tensor | None = None,
        sign: int | None = None,
    ) -> None:
        self._parent, self._positions, self._weights, self._sign = parent, positions, weights, sign
        self._num_terms = max(1, round(len(positions) * parent.terms.terms_per_example))

    @property
    def num_terms(self) -> int:
        return self._num_terms

    @property
    def share_of_whole(self) -> float:
        return self._parent.terms.share_of_whole(self._positions, self._weights)

    def zeros(self, columns: int | None = None) -> ParamVector:
        return self._parent.zeros(columns)

    def matvec(self, vector: ParamVector) -> ParamVector:
        network = self._parent.network
        self._parent.check_vector(vector)
        result = network.blank(vector.columns)
        self._add(result, network.opened(vector), 1.0)
        return network.closed(result)

    def matvec_with_slopes(self, vector: ParamVector) -> tuple[ParamVector, Tensor]:
        """``H̃ v``, and the slopes of all of the parent's examples: those outside H̃ take a pass without a backward."""
        parent, positions = self._parent, self._positions
        parent.check_vector(vector)
        network, vector = parent.network, parent.network.opened(vector)
        result, slopes = network.blank(vector.columns), Slopes(parent.terms, vector.columns or 1)
        weight = parent.terms.weight(len(positions))
        for batch in parent.shares(positions, parent.examples_at_once(vector), self._weights):
            parent._product(batch, vector, result, weight, slopes=slopes)
        outside = torch.ones(len(parent.terms), dtype=torch.bool)
        outside[positions] = False
        for batch in parent.shares(outside.nonzero().flatten(), parent.examples_at_once(vector)):
            for number, outputs, tangent in tangents_of(parent, batch, vector):
                slopes.note(outputs, tangent, parent.curved(outputs, tangent, batch), batch, number)
        return network.closed(result), slopes.values(network.ranks)

    def add_matvec_(self, out: ParamVector, vector: ParamVector, scale: float) -> None:
        parent, positions = self._parent, self._positions
        parent.check_vector(vector)
        # added to the vector itself only once that is no longer needed, and what several processes add up apart
        several = len(positions) > parent.micro_batch or vector.columns is not None
        if parent.network.shards is not None or (out is vector and several):
            out.axpy_(scale, self.matvec(vector))
            return
        self._add(out, vector, scale)

    def _add(self, out: ParamVector, vector: ParamVector, scale: float) -> None:
        """The same for this process's shares of the examples."""
        parent, positions = self._parent, self._positions
        weight = scale * parent.terms.weight(len(positions))
        for batch in parent.shares(positions, parent.examples_at_once(vector), self._weights):
            parent._product(batch, vector, out, weight, sign=self._sign)

    def quadratic_form(self, vector: ParamVector) -> Tensor:
        """``vᵀ H̃ v = w Σ_i t_iᵀ S_i t_i``."""
        parent = self._parent
        parent.check_vector(vector)
        found = curvatures(parent, vector, self._positions, self._sign, self._weights)
        total = sum(
            (values.sum(1) for _, values in found), torch.zeros(vector.columns or 1, dtype=torch.float64)
        )
        total = parent.network.ranks.sum(total)
        total *= parent.terms.weight(len(self._positions))
        return total[0] if vector.columns is None else total

    def heaviest_term(self, vector: ParamVector) -> tuple[str, float]:
        parent = self._parent
        most = torch.zeros(int(parent.terms.indices.max()) + 1, dtype=torch.float64)
        for indices, values in curvatures(parent, vector, self._positions.unique()):
            most[indices] = values[0]
        most = parent.network.ranks.sum(most)
        return f"training example {int(most.argmax())}", float(most.max()) * parent.terms.weight(1)


def curvatures(
    parent: GaussNewton,
    vector: ParamVector,
    positions: Tensor,
    sign: int | None = None,
    weights: Tensor | None = None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """``t_iᵀ S_i t_i`` with ``t = J v`` for every example i, summed over its terms: forwards only, no backward.

    Of this process's share of the examples. Yields, micro-batch by micro-batch, the examples' indices and their
    ``[columns, examples]`` in float64.
    """
    vector = parent.network.opened(vector)
    for batch in parent.shares(positions, parent.micro_batch, weights):
        found = []
        for _, outputs, tangent in tangents_of(parent, batch, vector, sign):
            curved = parent.curved(outputs, tangent, batch).mul_(tangent)
            found.append(curved.reshape(batch.size, -1).sum(1, dtype=torch.float64).cpu())
        assert batch.indices is not None  # fetched from the data
        yield batch.indices[: batch.held].cpu(), torch.stack(found)[:, : batch.held]


def tangents_of(
    parent: GaussNewton, batch: Batch, vector: ParamVector, sign: int | None = None
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Of every column: its number, the outputs and their tangent ``J v``, without a graph."""
    base = None if parent.product == "exact" else parent.differences(batch).base(batch, graph=False)
    for number, column in enumerate(vector.unstack()):
        if base is None:
            outputs, tangent = tangent_only(parent.network, batch, column)
        else:
            outputs = base.outputs
            tangent = parent.differences(batch).tangent(base, batch, column, sign)
        check_finite(outputs)
        yield number, outputs, tangent
