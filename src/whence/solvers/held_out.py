"""What fresh batches show of a stochastic solution: its residual, and the parts of its error.

*Residual.* With ``r_i = (H̃_i + λ)u - g`` on m independent batches, ``(‖Σr_i‖² - Σ‖r_i‖²) / (m(m-1))`` has expectation
``‖r‖²``: only products of different batches enter, so their noise does not add up to a norm. It may come out negative
when the residual is below what the batches resolve.

*Bias.* The mean of averaged steps from a start u⁰ is off by at most ``mean_t (1 - ημ)^t · ‖u⁰ - u*‖_A``, with μ below
the eigenvalues of P⁻¹A. More is known of the default start; see docs/math.md, "What is left of LiSSA's start".
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from whence.operators import Damped
from whence.solvers.base import ErrorParts
from whence.solvers.plan import Plan
from whence.vectors import ParamVector

__all__ = ["error_parts", "left_of_default_start", "left_of_start", "residual_norm", "residual_square"]

_TINY = torch.finfo(torch.float64).tiny


def residual_norm(square: Tensor, error: Tensor) -> tuple[Tensor, Tensor]:
    """Of a `residual_square` and its error, the roots; zero where it is not resolved."""
    norm = square.clamp_min(0.0).sqrt()
    # d√x = dx/2√x, or √dx where x is lost in its error
    return norm, torch.minimum(error / (2 * norm).clamp_min(1e-30), error.sqrt())


def residual_square(
    A: Damped,
    solution: ParamVector,
    rhs: ParamVector,
    batches: int,
    batch_size: int,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """Unbiased estimate of ``‖(H + λ)u - g‖² / ‖g‖²``, possibly negative, and its standard error, per column.

    The error is the most that the batches' noise can cause, when it is all in one direction:
    ``√(2 / m(m-1))`` times the mean of ``‖r_i‖²``.
    """
    total = rhs.zeros_like()
    squares = torch.zeros_like(rhs.norm())
    for _ in range(batches):
        residual = A.sample(batch_size, generator).matvec(solution).axpy_(-1.0, rhs)
        squares += residual.dot(residual)
        total.axpy_(1.0, residual)
        del residual  # or it would be held while the next one is computed
    pairs = batches * (batches - 1)
    scale = rhs.dot(rhs).clamp_min(_TINY)
    square = (total.dot(total) - squares) / pairs / scale
    return square, math.sqrt(2 / pairs) * squares / batches / scale


def left_of_start(plan: Plan, averaged: range) -> float:
    """``mean_t (1 - ημ)^t`` over the averaged steps: the part of a start's error that is left, at most."""
    return _mean([(1 - plan.step_size * plan.damping) ** t for t in averaged])


def left_of_default_start(plan: Plan, averaged: range, *, preconditioned: bool) -> float:
    """What is left of ``u⁰ = P⁻¹g``, at most, as a part of ``‖u*‖_A`` (without P: of ``‖u*‖_H``)."""
    step, smallest = plan.step_size, plan.damping
    if not preconditioned:
        step, smallest = step * plan.damping, 1.0
    steep = [(1 - step) / step * ((1 - step) * t / (t + 1)) ** t / (t + 1) for t in averaged]
    flat = [(1 - smallest) * (1 - step * smallest) ** t for t in averaged]
    return _mean([max(*pair) for pair in zip(steep, flat, strict=True)])


def error_parts(
    A: Damped,
    value: ParamVector,
    chains: Sequence[ParamVector],
    *,
    left: float,
    start: ParamVector | None,
    in_energy: bool,
    terms: int,
    generator: torch.Generator,
) -> ErrorParts:
    """Bias and sampling error of the chains' mean, from quadratic forms on terms drawn anew: forwards alone.

    Of the start's error, or of the solution where no start was given, a part of ``left`` is left: in the norm of A if
    ``in_energy``, else in that of H.
    """
    held_out = A.operator.subset(terms, generator)
    size = held_out.quadratic_form(value).clamp_min(_TINY).sqrt()
    distance = value if start is None else value.clone().axpy_(-1.0, start)
    bias = held_out.quadratic_form(distance)
    if in_energy:
        bias = bias + A.damping * distance.dot(distance)
    sampling, m = torch.full_like(size, math.nan), len(chains)
    if m > 1:
        apart = [held_out.quadratic_form(chain.clone().axpy_(-1.0, value)) for chain in chains]
        sampling = (torch.stack(apart).sum(0) / (m * (m - 1))).sqrt() / size
    return ErrorParts(
        bias=left * bias.clamp_min(0.0).sqrt() / size,
        sampling=sampling,
        certificate=torch.full_like(size, math.nan),
    )


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)
