"""`SampledGaussNewton`: the Gauss-Newton Hessian over drawn examples, and how it lies beside that of all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from whence.operators import LinearOperator
from whence.vectors import ParamVector

if TYPE_CHECKING:
    from whence.gauss_newton import GaussNewton

__all__ = ["SampledGaussNewton"]


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
        return self._parent._matvec(vector, self._positions, self._sign, self._weights)

    def add_matvec_(self, out: ParamVector, vector: ParamVector, scale: float) -> None:
        self._parent._add_matvec(out, vector, scale, self._positions, self._sign, self._weights)

    def quadratic_form(self, vector: ParamVector) -> Tensor:
        return self._parent._quadratic_form(vector, self._positions, self._sign, self._weights)
