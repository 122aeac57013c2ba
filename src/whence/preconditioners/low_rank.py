"""`LowRank`: a preconditioner that inverts the top of the spectrum and leaves the rest of it to λ.

    P = λ + UΛUᵀ,       P⁻¹v = (v - U Λ/(Λ+λ) Uᵀv) / λ

with k orthonormal columns U and eigenvalues Λ > 0. Where they are H's own top k, ``P⁻¹(H + λ)`` is the identity on U
and at most (λ_{k+1} + λ)/λ elsewhere; this is the condition number in place of (λ₁ + λ)/λ. `nystrom` makes one. Memory:
k copies of the model, for as long as P is needed.

``v - U D Uᵀv`` keeps λ/(Λ + λ) of v along a column of U, and an error of the inner products is magnified by (Λ + λ)/λ.
So every sum here is in float64: a few thousand coordinates of all columns at a time, never more than a few megabytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from whence.errors import OptionError, VectorError
from whence.operators import Damped, LinearOperator
from whence.preconditioners.base import Preconditioner, check_damping
from whence.vectors import ParamVector

__all__ = ["LowRank", "check_rank", "mix_"]

_NUMBERS_AT_ONCE = 2**19  # of all columns: 4 MB in float64, which stay in the cache


@dataclass(frozen=True, eq=False)
class LowRank(Preconditioner):
    """``P = λ + UΛUᵀ`` with k orthonormal columns U, as `nystrom` makes it.

    What is proven of it rests on ``U√Λ = B + D`` with ``BBᵀ ≼ H`` and a known ``s ≥ ‖D‖²``. See docs/math.md,
    "Low-rank preconditioners".

    Attributes:
        vectors: U, a block of k columns, orthonormal but for the rounding of its entries.
        eigenvalues: Λ, ``[k]`` in float64, falling and positive: those of P, less λ.
        damping: λ.
        correction: ``(UᵀU)^(-1/2)`` in float64, the identity but for rounding: ``U·correction`` is the formulas' U.
        slack: s, in the units of Λ; infinite where nothing is known of it.
        settled: how many eigenvalues, from the top, can be taken for H's own: half of the products behind P. The others
            are too small, and used as well.
        terms: how many terms the products went over.
        exact_for_terms: number of terms of the operator that ``slack`` and ``share`` hold for, or None where nothing is
            proven for the one that P is used on: see `for_operator`.
        num_products: products spent on making it.
        share: c, in [0, 1]: so much of what P was made from is part of the operator that it is for. 1 where these are
            one and the same, 0 where nothing is known.
        scale: θ: Λ is so many times what was found. 1 unless P is `shrunk`.

    Example:
        >>> from whence import Dense
        >>> from whence.preconditioners import nystrom
        >>> H = Dense(torch.diag(torch.tensor([99.0, 9.0, 0.0, 0.0], dtype=torch.float64)))
        >>> P = nystrom(H, 1.0, rank=3, generator=torch.Generator().manual_seed(0))
        >>> P.rank, P.eigenvalues
        (2, tensor([99.0000,  9.0000], dtype=torch.float64))
        >>> P.solve(ParamVector({"x": torch.ones(4, dtype=torch.float64)}))["x"]
        tensor([0.0100, 0.1000, 1.0000, 1.0000], dtype=torch.float64)
    """

    vectors: ParamVector
    eigenvalues: Tensor
    damping: float
    correction: Tensor
    slack: float
    settled: int
    terms: int
    exact_for_terms: int | None
    num_products: int
    share: float = 1.0
    scale: float = 1.0

    def __post_init__(self) -> None:
        rank, values = self.vectors.columns, self.eigenvalues
        if rank is None or values.shape != (rank,) or self.correction.shape != (rank, rank):
            raise VectorError(
                f"a low-rank preconditioner needs a block of k vectors, k eigenvalues and a k × k correction; got "
                f"{self.vectors!r}, {tuple(values.shape)} and {tuple(self.correction.shape)}"
            )
        if not bool((values.isfinite() & (values > 0)).all()) or bool((values.diff() > 0).any()):
            raise VectorError(f"eigenvalues must be positive and falling, got {values.tolist()}")
        check_damping(self.damping)
        for name, fits, what in (
            ("slack", self.slack >= 0, "bounds the square of a norm"),
            ("settled", 1 <= self.settled <= rank, f"is a number of eigenvalues, of {rank}"),
            ("share", 0 <= self.share <= 1, "is a part of an operator, from 0 to 1 (its `share_of_whole`)"),
            ("scale", 0 < self.scale <= 1, "is what eigenvalues were multiplied by, in (0, 1]"),
        ):
            if not fits:
                raise OptionError(f"{name} is {getattr(self, name)}; it {what}")
        for name in ("eigenvalues", "correction"):  # k × k algebra is done there, wherever U is
            object.__setattr__(self, name, getattr(self, name).cpu())

    # --- the preconditioner ------------------------------------------------------------------------------

    def solve(self, vector: ParamVector) -> ParamVector:
        kept = self.eigenvalues / (self.eigenvalues + self.damping)
        return self._shrink(vector, kept, 1 / self.damping)

    def root_solve(self, vector: ParamVector) -> ParamVector:
        kept = 1 - (self.damping / (self.eigenvalues + self.damping)).sqrt()
        return self._shrink(vector, kept, self.damping**-0.5)

    def _shrink(self, vector: ParamVector, shares: Tensor, scale: float) -> ParamVector:
        """``scale · (v - U diag(shares) Uᵀv)``, with the corrected U."""
        along = self.correction @ (
            shares.unsqueeze(1) * (self.correction.T @ self.vectors.gram(vector, exact=True).cpu())
        )
        return _subtract_and_scale_(vector.clone(), self.vectors, along, scale)

    @property
    def smallest(self) -> float:
        """A proven lower bound of the eigenvalues of ``P⁻¹(H + λ)``; `for_operator` says for which H.

        For the operator that P was made from, or from a part of, it is ``c/(1+t)`` with c the `share` and t the
        positive root of ``t² + (1 - c - cs/λ)t = cs/λ``; for any other it is ``λ/(Λ₁+λ)``. Both are lowered by what
        k × k algebra in float64 may lose, some kΛ₁/λ of its last digit.
        """
        top = float(self.eigenvalues[0]) / self.damping
        lost = 1 + 4 * self.rank * torch.finfo(torch.float64).eps * top
        bound = 1 / (1 + top)
        if self.exact_for_terms is not None:
            ratio = self.share * self.slack / self.damping
            linear = 1 - self.share - ratio
            t = 0.5 * (math.hypot(linear, 2 * math.sqrt(ratio)) - linear)
            bound = max(bound, self.share / (1 + t))
        return bound / lost

    # --- others like it ----------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """How many eigenpairs: k."""
        return len(self.eigenvalues)

    @property
    def num_term_products(self) -> int:
        """Terms gone through in the products that it was made from."""
        return self.num_products * self.terms

    @property
    def promised_largest(self) -> float:
        """``(h_j + λ)/λ``, j = `settled`: about the largest eigenvalue of ``P⁻¹(H + λ)``, if U is what it should be.

        ``h = Λ/θ`` is what was found. Where θ < 1, ``(h₁ + λ)/(θh₁ + λ)`` may be larger.
        """
        top, last = (float(self.eigenvalues[i]) / self.scale for i in (0, self.settled - 1))
        return max(last / self.damping + 1, (top + self.damping) / (self.scale * top + self.damping))

    def with_damping(self, damping: float) -> LowRank:
        """The same U and Λ for another λ: no products, no copies."""
        return replace(self, damping=damping)

    def shrunk(self, factor: float | None = None) -> LowRank:
        """The same U with θΛ: for conjugate gradients with a P made from a small part of the terms. No copies.

        Over few terms the top eigenvalues come out too large; at θ = c, the default, `smallest` is 1 again but for the
        slack. It pays as long as the share is well above λ/λmax. Derived and measured in docs/math.md, "Low-rank
        preconditioners".
        """
        theta = self.share if factor is None else factor
        if not 0 < theta <= 1:
            raise OptionError(
                f"the factor is {theta}; give a number in (0, 1]"
                + (", as nothing is known of the share" if factor is None else "")
            )
        return replace(
            self,
            eigenvalues=theta * self.eigenvalues,
            slack=theta * self.slack,
            share=min(1.0, self.share / theta),
            scale=theta * self.scale,
        )

    def for_operator(self, operator: LinearOperator) -> LowRank:
        """The same, with a `smallest` that is proven for this operator.

        Operators are told apart by their number of terms: all of the data from a subset of it, but not one subset
        from another of the same size.
        """
        self.vectors.check_same_space(operator.zeros(), "operator's space")
        exact = self.exact_for_terms == operator.num_terms
        return replace(self, exact_for_terms=operator.num_terms if exact else None)


def check_rank(operator: LinearOperator, damping: float, rank: int) -> None:
    """Refuse what no low-rank preconditioner can be made with, before any product."""
    if isinstance(operator, Damped):
        raise OptionError("a preconditioner is made from the operator itself; pass `damped.operator` and λ")
    check_damping(damping)
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise OptionError(
            f"rank is {rank!r}; give a whole number of at least 1: so many copies of the model are kept"
        )


# --- blocks times small matrices, in float64 -----------------------------------------------------------------------


def mix_(block: ParamVector, weights: Tensor) -> ParamVector:
    """The block times ``weights``, written over it; at most as many columns as there were.

    Returns the block to go on with: the given one's storage is overwritten, or given up for a smaller one.
    """
    columns = weights.shape[1]
    for name in block:
        rows = _rows(block, name)
        turned = weights.T.to(rows.device)
        for piece in _pieces(rows.shape[1], len(rows) + columns):
            rows[:columns, piece] = (turned @ rows[:, piece].double().contiguous()).to(rows.dtype)
    return block if columns == block.columns else block.part(0, columns).clone()


def _subtract_and_scale_(
    vector: ParamVector, block: ParamVector, weights: Tensor, scale: float
) -> ParamVector:
    """``v ← scale · (v - block · weights)``, per column of v, each entry rounded once."""
    for name in vector:
        mine, theirs = _rows(vector, name), block[name].reshape(len(weights), -1)
        turned = weights.T.to(mine.device)
        for piece in _pieces(mine.shape[1], len(mine) + len(theirs)):
            left = mine[:, piece].double().sub_(turned @ theirs[:, piece].double())
            mine[:, piece] = left.mul_(scale).to(mine.dtype)
    return vector


def _rows(vector: ParamVector, name: str) -> Tensor:
    return vector[name].view(vector.columns or 1, -1)


def _pieces(length: int, rows: int) -> Iterator[slice]:
    step = max(1, _NUMBERS_AT_ONCE // max(rows, 1))
    return (slice(start, start + step) for start in range(0, length, step))
