"""``‖(H + λ)u - g‖`` without bias, from batches that the solver did not see.

With residuals ``r_i = (H̃_i + λ)u - g`` on m independent batches, ``(‖Σr_i‖² - Σ‖r_i‖²) / (m(m-1))`` has expectation
``‖r‖²``: only products of *different* batches enter, so their noise does not add up to a norm. It may come out
negative when the residual is below what the batches resolve; then it is reported as zero, with its error.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from whence.operators import Damped
from whence.vectors import ParamVector

__all__ = ["residual_norm", "residual_square"]


def residual_norm(
    A: Damped,
    solution: ParamVector,
    rhs: ParamVector,
    batches: int,
    batch_size: int,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """Relative residual ``‖(H + λ)u - g‖ / ‖g‖`` and its standard error, per column."""
    square, error = residual_square(A, solution, rhs, batches, batch_size, generator)
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
    """Unbiased estimate of the squared relative residual, possibly negative, and its standard error.

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
    scale = rhs.dot(rhs).clamp_min(torch.finfo(torch.float64).tiny)
    square = (total.dot(total) - squares) / pairs / scale
    return square, math.sqrt(2 / pairs) * squares / batches / scale
