"""Deflation: the top eigenpairs as Lanczos finds them, those that have converged.

After m products from a random start, ``HQ = QT + βqeₘᵀ``. With ``Ts = θs``, the Ritz vector ``u = Qs`` has the
residual ``Hu - θu = βs_m q``. All residuals point along the same q. With ``r = βs_m`` for each pair that is kept,

    E = HU - UΘ = q rᵀ,       ‖EΘ^(-1/2)‖² = Σ r_i²/θ_i = s

is the `slack` that `whence.preconditioners.low_rank` needs. ``P ≼ H + λ`` does not hold as it does for Nyström, but
nearly, where s is small beside λ. So a Ritz pair is kept if ``|r| ≤ tolerance·√(θλ)``; what then couples u to the
rest of the preconditioned operator, ``r/√((θ+λ)λ)``, is below the tolerance.

**Rounding.** Products come with errors: ``E = q rᵀ + F``. One more product, with ``Uξ`` and random signs ξ, shows F,
as what its residual has beyond ``rᵀξ`` along q: the mean square of that is ``‖F‖²``, over all entries. ``BBᵀ ≼ H``
needs ``Θ ≽ UᵀHU``, which F may spoil, so Θ is raised by ‖F‖; to √s this adds at most ``2‖F‖/√θ_k``. Pairs that F could
have made are dropped.

*Beside Nyström*: for as many products, fewer but more accurate eigenpairs. The products come one after another, and do
not share passes over the data; of an eigenvalue that H has several times, a single start sees one.

Memory: a copy of the model for each product and for each pair kept, while it is made; then one for each pair.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from whence.errors import OptionError, SolverError
from whence.operators import LinearOperator
from whence.preconditioners.blocks import combine, inner, mix_, precision
from whence.preconditioners.low_rank import (
    NO_CURVATURE,
    LowRank,
    check_rank,
    drawn_terms,
    orthonormal_correction,
)
from whence.spectrum.krylov import Krylov, krylov_space
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
    krylov = krylov_space(used, operator.zeros().randn_like(generator), max_products=products)
    values, rotation = _ritz(krylov)
    residuals = krylov.off_diagonal[0, -1] * rotation[-1]  # with their signs along q
    real = values > _LEAST_SHARE * precision(krylov.basis[0]) * values[0].abs()
    if not bool(real.any()):
        raise SolverError(NO_CURVATURE)
    relative = residuals.abs() / (values.clamp_min(0.0) * damping).sqrt()
    kept = (real & (relative <= tolerance)).nonzero().flatten()[:rank]
    if not len(kept):
        raise SolverError(
            f"no Ritz pair has converged in {krylov.num_products} products: the best residual is "
            f"{float(relative[real].min()):.2g} of √(θλ), the tolerance {tolerance:g}. Use more products, a larger "
            "damping, or Nyström"
        )
    vectors = combine(krylov.basis, rotation[:, kept])
    spent = krylov.num_products + 1
    del krylov  # its basis is one copy of the model for each product
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
        num_term_products=spent * used.num_terms,
        share=share,
    )


def _ritz(krylov: Krylov) -> tuple[Tensor, Tensor]:
    """θ, falling, and s, a column for each."""
    beside = torch.diag(krylov.off_diagonal[0, :-1], 1)
    values, rotation = torch.linalg.eigh(torch.diag(krylov.diagonal[0]) + beside + beside.T)
    return values.flip(0), rotation.flip(1)


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
    columns = vectors.unstack()
    probe = combine(columns, (correction @ signs).unsqueeze(1)).column(0)
    left = operator.matvec(probe)
    left.axpy_(-1.0, combine(columns, (correction @ (values * signs)).unsqueeze(1)).column(0))
    beyond = float(inner(left, left)) - float(residuals @ signs) ** 2
    rounding = precision(vectors) * math.sqrt(len(values)) * float(values[0])
    return _SAFETY * max(math.sqrt(max(beyond, 0.0)), rounding)
