"""Deflation: the top eigenpairs as Lanczos finds them, those that have converged.

A Ritz pair ``(θ, u)`` is kept if its residual is at most ``tolerance·√(θλ)``. Beside Nyström, as many products give
fewer but more accurate eigenpairs. The products come one after another, and do not share passes over the data; of an
eigenvalue that H has several times, a single start sees one. What this proves, and how the error of products enters, is
derived in docs/math.md, "Deflation by Lanczos".

Memory: a copy of the model for each product and for each pair kept, while it is made; then one for each pair.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from whence.errors import OptionError, SolverError
from whence.operators import LinearOperator
from whence.preconditioners.blocks import combine, mix_
from whence.preconditioners.low_rank import (
    NO_CURVATURE,
    LowRank,
    check_rank,
    drawn_terms,
    orthonormal_correction,
)
from whence.spectrum.krylov import krylov_space
from whence.vectors import ParamVector

__all__ = ["deflation"]

_SAFETY = 2.0  # on the measured error of products
_LEAST_SHARE = 100.0  # of the precision times θ₁: what is smaller may be rounding


def deflation(
    operator: LinearOperator,
    damping: float,
    *,
    rank: int,
    products: int,
    generator: torch.Generator,
    terms: int | None = None,
    tolerance: float = 0.3,
) -> LowRank:
    """A low-rank preconditioner from the Ritz pairs of Lanczos that have converged, at most ``rank`` of them.

    Args:
        operator: H, undamped.
        damping: λ.
        rank: k: copies of the model kept, at most.
        products: Lanczos' products. Three times the rank is a start; a spectrum that falls slowly needs more.
        generator: draws the start, and the subset.
        terms: how many terms of the data to work on, of different examples (unless they are drawn by importance); None:
            all of them.
        tolerance: largest ``r/√(θλ)`` of a Ritz pair that counts as converged; infinity keeps them all, and
            `measure_quality` will notice.
    """
    check_rank(operator, damping, rank)
    if products < 1:
        raise OptionError(
            f"products is {products}; Lanczos needs at least one, and about three times the rank to find it"
        )
    if not tolerance > 0:
        raise OptionError(
            f"tolerance is {tolerance}; give a positive number, infinity to keep every Ritz pair"
        )
    used, exact_for_terms, share = drawn_terms(operator, terms, generator)
    basis, values, rotation, residuals = _ritz_pairs(used, operator.zeros().randn_like(generator), products)
    spent = len(basis) + 1
    real = values > _LEAST_SHARE * basis[0].rounding * values[0].abs()
    if not bool(real.any()):
        raise SolverError(NO_CURVATURE)
    relative = residuals.abs() / (values.clamp_min(0.0) * damping).sqrt()
    kept = (real & (relative <= tolerance)).nonzero().flatten()[:rank]
    if not len(kept):
        raise SolverError(
            f"no Ritz pair has converged in {len(basis)} products: the best residual is "
            f"{float(relative[real].min()):.2g} of √(θλ), the tolerance {tolerance:g}. Use more products, a larger "
            "damping, or Nyström"
        )
    vectors = combine(basis, rotation[:, kept])
    del basis  # one copy of the model for each product
    values, residuals, correction = values[kept], residuals[kept], orthonormal_correction(vectors)
    error = _error(used, vectors, correction, values, residuals, generator)
    clear = values > 4 * error
    if not bool(clear.any()):
        raise SolverError(
            f"products are too inaccurate for a preconditioner: an error of {error:.2g} beside a largest eigenvalue of "
            f"{float(values[0]):.2g}. Use exact products or a higher precision"
        )
    if not bool(clear.all()):
        vectors = mix_(vectors, correction[:, clear])
        values, residuals, correction = values[clear], residuals[clear], orthonormal_correction(vectors)
    known = float((residuals.square() / values).sum().sqrt())
    return LowRank(
        vectors=vectors,
        eigenvalues=values + error,
        damping=float(damping),
        correction=correction,
        slack=(known + 2 * error / math.sqrt(float(values[-1]))) ** 2,
        settled=len(values),
        terms=used.num_terms,
        exact_for_terms=exact_for_terms,
        num_products=spent,
        share=share,
    )


def _ritz_pairs(
    operator: LinearOperator, start: ParamVector, products: int
) -> tuple[Sequence[ParamVector], Tensor, Tensor, Tensor]:
    """Lanczos: the basis Q, θ falling, the columns s of ``u = Qs``, and the residuals ``βs_m`` with their signs."""
    krylov = krylov_space(operator, start, max_products=products)
    values, rotation = torch.linalg.eigh(krylov.tridiagonal()[0])
    values, rotation = values.flip(0), rotation.flip(1)
    return krylov.basis, values, rotation, krylov.off_diagonal[0, -1] * rotation[-1]


def _error(
    operator: LinearOperator,
    vectors: ParamVector,
    correction: Tensor,
    values: Tensor,
    residuals: Tensor,
    generator: torch.Generator,
) -> float:
    """‖F‖: what ``HUξ - UΘξ`` has beyond the residual that the recurrence knows of, or rounding where that is more."""
    bits = torch.randint(0, 2, (len(values),), generator=generator, device=generator.device)
    signs = bits.cpu().double() * 2 - 1
    pair = combine(vectors.unstack(), correction @ torch.stack([signs, values * signs], 1))  # Uξ and UΘξ
    left = operator.matvec(pair.column(0)).axpy_(-1.0, pair.column(1))
    beyond = float(left.gram(left, exact=True).cpu()) - float(residuals @ signs) ** 2
    rounding = vectors.rounding * math.sqrt(len(values)) * float(values[0])
    return _SAFETY * max(math.sqrt(max(beyond, 0.0)), rounding)
