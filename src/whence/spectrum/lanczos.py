"""The top of the spectrum by Lanczos.

After k products from a random start in dimension p, the largest Ritz value θ is a rigorous lower bound of
λmax, with ``P(λmax - θ > ε·λmax) ≤ 1.648·√p·exp(-√ε(2k-1))``; and an eigenvalue lies within the Ritz pair's
residual of θ. Twenty to forty products settle what a sketch needs thousands for.

Where the basis fits in memory it is kept and reorthogonalised, and Ritz values are eigenvalues. Otherwise
three vectors suffice, and the copies that lost orthogonality breeds are recognised by the test of Cullum
and Willoughby: they are also eigenvalues of the tridiagonal matrix without its first row and column.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from whence.errors import OptionError
from whence.operators import LinearOperator
from whence.progress import ticker
from whence.spectrum.estimate import Estimate
from whence.vectors import ParamVector

__all__ = ["LanczosResult", "lanczos"]

#: The basis is kept while it takes less than this.
BASIS_BUDGET = 2 * 2**30
_FEWEST_PRODUCTS = 8
#: A Ritz value whose residual is less than this part of the distance to its neighbours is an eigenvalue.
_FOUND = 0.02


@dataclass(frozen=True)
class LanczosResult:
    """What k products showed of the spectrum.

    Attributes:
        lambda_max: largest Ritz value, with the residual-based bound of its error as standard error.
        eigenvalues: Ritz values, largest first, spurious copies left out.
        residuals: an eigenvalue lies within ``residuals[i]`` of ``eigenvalues[i]``.
        weights: how many eigenvalues each of them stands for, adding up to the dimension of the space: the start's
            share in its vector, or 1 for those that were found (their residual is a fraction of the distance to the
            next).
        num_products: products spent.
        top_vector: unit Ritz vector of the largest, where the basis was kept or the vector asked for.
    """

    lambda_max: Estimate
    eigenvalues: Tensor
    residuals: Tensor
    weights: Tensor
    num_products: int
    top_vector: ParamVector | None = None


def lanczos(
    operator: LinearOperator,
    *,
    generator: torch.Generator,
    max_products: int = 40,
    tolerance: float = 0.005,
    keep_basis: bool | None = None,
    want_vector: bool = False,
) -> LanczosResult:
    """Run Lanczos until the top Ritz value is known to ``tolerance`` (relative), or the products are spent.

    The error of θ is estimated as ``min(r, r²/gap)``, with r the Ritz residual and gap the distance to the
    next Ritz value: the standard bounds for a symmetric operator.

    Args:
        operator: a deterministic operator: the whole data or a fixed subset.
        generator: draws the start.
        max_products: budget.
        tolerance: relative accuracy of λmax to stop at.
        keep_basis: keep and reorthogonalise the basis; by default where it fits in memory.
        want_vector: return the top Ritz vector even if the basis is not kept, by running twice.
    """
    if max_products < 1:
        raise OptionError(f"max_products is {max_products}; Lanczos needs at least one product")
    replay = generator.clone_state()
    current = operator.zeros().randn_like(generator)
    max_products = min(max_products, current.numel)
    current.scale_(1 / float(current.norm()))
    if keep_basis is None:
        keep_basis = current.nbytes * max_products <= BASIS_BUDGET
    basis: list[ParamVector] = []
    previous: ParamVector | None = None
    diagonal: list[float] = []
    off_diagonal: list[float] = []
    tops: list[float] = []
    with ticker("largest eigenvalue", max_products) as tick:
        while True:
            following = operator.matvec(current)
            tick()
            diagonal.append(float(current.dot(following)))
            following.axpy_(-diagonal[-1], current)
            if previous is not None:
                following.axpy_(-off_diagonal[-1], previous)
            if keep_basis:
                basis.append(current)
                for _ in range(2):  # twice is enough
                    for kept in basis:
                        following.axpy_(-float(kept.dot(following)), kept)
            beta = float(following.norm())
            values, vectors = torch.linalg.eigh(_tridiagonal(diagonal, off_diagonal))
            error = _top_error(values, beta * vectors[-1].abs())
            steps, top_value = len(diagonal), float(values[-1])
            tops.append(top_value)
            done = _settled(tops, beta * float(vectors[-1, -1].abs()), error, tolerance)
            if done or steps >= max_products or beta <= 1e-7 * max(abs(top_value), 1e-300):
                break
            off_diagonal.append(beta)
            previous, current = current, following.scale_(1 / beta)
    genuine = torch.ones_like(values, dtype=torch.bool)
    if not keep_basis:
        genuine = _not_spurious(diagonal, off_diagonal, values)
    residuals = (beta * vectors[-1].abs())[genuine].flip(0)
    weights = _weights(
        values[genuine].flip(0), residuals, vectors[0].square()[genuine].flip(0), current.numel
    )
    products, top = len(diagonal), None
    if keep_basis:
        top = _combine(basis, vectors[:, -1])
    elif want_vector:
        top = _second_pass(operator, replay, diagonal, off_diagonal, vectors[:, -1])
        products *= 2
    return LanczosResult(
        Estimate(top_value, error), values[genuine].flip(0), residuals, weights, products, top
    )


def _weights(values: Tensor, residuals: Tensor, shares: Tensor, dimension: int) -> Tensor:
    """How many eigenvalues each Ritz value stands for; those from the top that were found count once."""
    gaps = torch.nn.functional.pad(-values.diff(), (1, 1), value=math.inf)
    found = (residuals < _FOUND * torch.minimum(gaps[1:], gaps[:-1])).long().cumprod(0).bool()
    rest = shares.masked_fill(found, 0.0)
    left = max(dimension - int(found.sum()), 0)
    return torch.where(found, 1.0, rest * (left / max(float(rest.sum()), 1e-300)))


def _tridiagonal(diagonal: list[float], off_diagonal: list[float]) -> Tensor:
    matrix = torch.diag(torch.tensor(diagonal, dtype=torch.float64))
    for i, beta in enumerate(off_diagonal[: len(diagonal) - 1]):
        matrix[i, i + 1] = matrix[i + 1, i] = beta
    return matrix


def _top_error(values: Tensor, residuals: Tensor) -> float:
    residual = float(residuals[-1])
    if len(values) < 2:
        return residual
    gap = float(values[-1] - values[-2])
    return min(residual, residual**2 / gap) if gap > 0 else residual


def _settled(tops: list[float], residual: float, error: float, tolerance: float) -> bool:
    """Whether the top Ritz value can be believed.

    A small ``error`` alone cannot: with few products θ may sit on the second eigenvalue, the first not yet in
    sight. So θ must also have stood still for a while, and its plain residual must be small.
    """
    if len(tops) < _FEWEST_PRODUCTS:
        return False
    risen = tops[-1] - tops[-4]
    return error <= tolerance * tops[-1] and risen <= tolerance * tops[-1] and residual <= 0.05 * tops[-1]


def _not_spurious(diagonal: list[float], off_diagonal: list[float], values: Tensor) -> Tensor:
    """Cullum-Willoughby: keep one of several copies, drop simple values of the trimmed matrix."""
    if len(values) < 2:
        return torch.ones_like(values, dtype=torch.bool)
    trimmed = torch.linalg.eigvalsh(_tridiagonal(diagonal[1:], off_diagonal[1:]))
    close = 1e-8 * max(float(values.abs().max()), 1e-300) * math.sqrt(len(values))
    keep = torch.ones_like(values, dtype=torch.bool)
    for i in range(len(values) - 1):  # ascending: of a cluster of copies, the largest stays
        if float(values[i + 1] - values[i]) < close:
            keep[i] = False
    copies = ~keep | torch.cat([torch.tensor([False]), ~keep[:-1]])
    spurious: Tensor = (values.unsqueeze(1) - trimmed).abs().amin(1) < close
    return keep & (copies | ~spurious)


def _second_pass(
    operator: LinearOperator,
    generator: torch.Generator,
    diagonal: list[float],
    off_diagonal: list[float],
    weights: Tensor,
) -> ParamVector:
    """Repeat the recurrence from the same start, adding up ``Σ s_i q_i`` on the way."""
    current = operator.zeros().randn_like(generator)
    current.scale_(1 / float(current.norm()))
    previous: ParamVector | None = None
    total = current.zeros_like()
    for i, weight in enumerate(weights.tolist()):
        total.axpy_(weight, current)
        if i == len(weights) - 1:
            break
        following = operator.matvec(current).axpy_(-diagonal[i], current)
        if previous is not None:
            following.axpy_(-off_diagonal[i - 1], previous)
        previous, current = current, following.scale_(1 / off_diagonal[i])
    return total.scale_(1 / float(total.norm()))


def _combine(basis: list[ParamVector], weights: Tensor) -> ParamVector:
    total = basis[0].zeros_like()
    for weight, vector in zip(weights.tolist(), basis, strict=True):
        total.axpy_(weight, vector)
    return total.scale_(1 / float(total.norm()))
