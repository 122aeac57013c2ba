"""How many iterations block conjugate gradients will take: they are run, on a small diagonal matrix of like spectrum.

From zero, the error of an iterate depends on the eigenvalues of H and on the right-hand sides' parts along the
eigenvectors, on nothing else. Gradients have covariance H: for the forecast their parts are ``√eigenvalue · normal``.
What remains is a spectrum of a few hundred values, read off a quadrature:

* ``M(c)``, the sum of the c largest eigenvalues, is known at the ends of a quadrature's weights, and interpolated
  (monotone cubics, in ``log(1 + c)``) between them. Its increments are eigenvalues: one by one at the top, where an
  eigenvalue of weight 1 comes back as it is, then in cells whose ends grow by a twentieth. The trace is kept.
* Values whose sums with λ differ by less than 5% are one value with a multiplicity: conjugate gradients of a few
  iterations cannot tell them apart.
* In the space of one value of multiplicity m, a block of b normal columns matters only through its Gram matrix,
  which is Wishart's with m degrees of freedom. Bartlett's triangle draws it with b rows, whatever m.

**With a preconditioner** P, iterates are ``P^(-1/2)`` times those of plain conjugate gradients on ``P^(-1/2)AP^(-1/2)``
with the right-hand sides ``P^(-1/2)g``, and ``‖e‖_A`` is the same for both. The ideal P of rank r, which is ``θh + λ``
along the r largest eigenvalues and λ along the others, is diagonal where H is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.interpolate import PchipInterpolator
from torch import Tensor

from whence.errors import OptionError

__all__ = [
    "Iterations",
    "block_cg_iterations",
    "check_forecast",
    "ideal_preconditioner",
    "representative_spectrum",
]

Array = NDArray[np.float64]

#: Eigenvalues that are represented one by one.
_SINGLE = 128
#: Cells further down grow by this factor, and are joined where the values differ by less than this in ``log(θ + λ)``.
_GROWTH, _WIDTH = 1.05, 0.05
#: More columns than this are simulated as this many.
MOST_COLUMNS = 64


@dataclass(frozen=True)
class Iterations:
    """A forecast of a number of iterations.

    Attributes:
        mean: over draws of right-hand sides.
        spread: standard deviation over the draws.
        most: in any draw.
        reached: whether every draw reached the tolerance; where not, `mean` is too small.
    """

    mean: float
    spread: float
    most: int
    reached: bool

    def __str__(self) -> str:
        number = f"{self.mean:.1f}".removesuffix(".0") if self.mean < 20 else f"{self.mean:.0f}"
        return number if self.reached else f"> {number}"


def representative_spectrum(
    rules: Sequence[tuple[Tensor, Tensor]], damping: float
) -> tuple[Array, NDArray[np.int64]]:
    """Eigenvalues with multiplicities, falling, that stand for those of H in ``H + λ``; zeros are left out.

    Args:
        rules: nodes and weights of quadratures, one for each probe, ``[probes, k]``; no node is negative, and every row
            of weights adds up to the dimension of the space. All count alike.
        damping: λ.
    """
    size = round(float(rules[0][1][0].sum()))
    ends = list(range(min(_SINGLE, size) + 1))
    while ends[-1] < size:
        ends.append(min(size, math.ceil(_GROWTH * ends[-1])))
    probes = [row for rule in rules for row in zip(*rule, strict=True)]
    sums = np.mean([_partial_sums(nodes, weights, np.array(ends)) for nodes, weights in probes], axis=0)
    counts = np.diff(ends)
    values = np.diff(sums).clip(min=0.0) / counts
    place = -np.log(values + damping)
    place[_SINGLE:] = np.floor(place[_SINGLE:] / _WIDTH) * _WIDTH
    cell = np.arange(len(values))
    cell[_SINGLE:] = _SINGLE + np.unique(place[_SINGLE:], return_inverse=True)[1]
    joined = np.bincount(cell, counts).astype(np.int64)
    mean = np.bincount(cell, counts * values) / joined
    kept = mean > 1e-14 * mean.max()
    return mean[kept], joined[kept]


def ideal_preconditioner(
    values: Array, counts: NDArray[np.int64], damping: float, rank: int, scale: float = 1.0
) -> tuple[Array, NDArray[np.int64], Array]:
    """The ideal P of this rank on eigenvalues with multiplicities.

    Args:
        values: eigenvalues of H, falling.
        counts: their multiplicities.
        damping: λ.
        rank: r: P is ``θh + λ`` along so many of the largest, and λ along the others.
        scale: θ.

    Returns:
        The eigenvalues and multiplicities again, one of them in two parts where the rank ends within it; and P along
        each.
    """
    known = np.clip(rank - (np.cumsum(counts) - counts), 0, counts)
    parts = np.stack([known, counts - known], axis=1)
    P = np.stack([scale * values + damping, np.full_like(values, damping)], axis=1)
    there = parts > 0
    return np.repeat(values, there.sum(1)), parts[there], P[there]


def block_cg_iterations(
    values: Array,
    counts: NDArray[np.int64],
    damping: float,
    *,
    columns: int,
    tolerance: float,
    draws: int,
    max_iterations: int,
    generator: torch.Generator,
    deflated: int = 0,
    scale: float = 1.0,
) -> Iterations:
    """Run block conjugate gradients on eigenvalues with multiplicities, from zero, until ``‖e‖_A ≤ ε‖u‖_H``.

    The mean of the squared relative errors of the columns has to be within ``tolerance²``.

    Args:
        values: eigenvalues of H.
        counts: their multiplicities.
        damping: λ, of ``A = H + λ``.
        columns: right-hand sides that share a space; more than 64 count as 64, which is no fewer iterations.
        tolerance: ε.
        draws: of right-hand sides.
        max_iterations: a draw that takes more is given up.
        generator: draws them.
        deflated: rank of the ideal preconditioner.
        scale: its θ.
    """
    seed = int(torch.randint(2**62, (), generator=generator, device=generator.device))
    random = np.random.default_rng(seed)
    block = min(columns, MOST_COLUMNS)
    values, counts, P = ideal_preconditioner(values, counts, damping, deflated, scale)
    P = np.repeat(P, np.minimum(counts, block))
    taken = [
        _iterations(*_right_hand_sides(values, counts, block, random), damping, P, tolerance, max_iterations)
        for _ in range(draws)
    ]
    found = np.array([max_iterations if number is None else number for number in taken])
    return Iterations(float(found.mean()), float(found.std()), int(found.max()), None not in taken)


def _partial_sums(nodes: Tensor, weights: Tensor, ends: Array) -> Array:
    """M(c) at the given c, from one quadrature."""
    order = nodes.argsort(descending=True)
    counted = np.concatenate([[0.0], weights[order].cumsum(0).numpy()])
    counted[-1] = ends[-1]
    added = np.concatenate([[0.0], (weights * nodes)[order].cumsum(0).numpy()])
    place = np.log1p(counted)
    apart = np.diff(place) > 1e-12 * place[-1]  # a node without weight gives no point
    kept = np.concatenate([[True], apart])
    kept[-1] = True
    if not apart[-1]:
        kept[np.flatnonzero(kept[:-1])[-1]] = False
    known: Array = PchipInterpolator(place[kept], added[kept])(np.log1p(ends))
    return known


def _right_hand_sides(
    values: Array, counts: NDArray[np.int64], columns: int, random: np.random.Generator
) -> tuple[Array, Array]:
    """Eigenvalue of each row, and rows of ``√eigenvalue · normal``; Bartlett's triangle for multiplicities above b."""
    rows = np.minimum(counts, columns)
    value, count = np.repeat(values, rows), np.repeat(counts, rows)
    place = np.arange(len(value)) - np.repeat(np.cumsum(rows) - rows, rows)
    normal = random.standard_normal((len(value), columns))
    many = count > columns
    normal[many] = np.where(np.arange(columns) < place[many, None], 0.0, normal[many])
    normal[many, place[many]] = np.sqrt(random.chisquare(count[many] - place[many]))
    return value, np.sqrt(value)[:, None] * normal


def _iterations(value: Array, g: Array, damping: float, P: Array, tolerance: float, most: int) -> int | None:
    """Iterations of block conjugate gradients, with residuals kept orthonormal so that no column is lost.

    From here on A, g and u are ``P^(-1/2)AP^(-1/2)``, ``P^(-1/2)g`` and ``P^(1/2)u``.
    """
    A, g = ((value + damping) / P)[:, None], g / np.sqrt(P)[:, None]
    exact = g / A
    scale = np.sum((value / P)[:, None] * exact**2, axis=0)  # ‖u*‖²_H
    u = np.zeros_like(g)
    residual, factor = _orthonormal(g)  # g - Au is residual @ factor throughout
    direction = residual
    for number in range(1, most + 1):
        product = A * direction
        step = np.linalg.inv(direction.T @ product)
        u += direction @ (step @ factor)
        if np.mean(np.sum(A * (u - exact) ** 2, axis=0) / scale) <= tolerance**2:
            return number
        residual, change = _orthonormal(residual - product @ step)
        factor = change @ factor
        direction = residual + direction @ change.T
    return None


def _orthonormal(block: Array) -> tuple[Array, Array]:
    """``Q, R`` of a tall block, by Cholesky of its Gram matrix, twice for the digits: much faster than Householder."""
    orthonormal, factor = block, np.eye(block.shape[1])
    try:
        for _ in range(2):
            upper = np.linalg.cholesky(orthonormal.T @ orthonormal).T
            orthonormal, factor = orthonormal @ np.linalg.inv(upper), upper @ factor
    except np.linalg.LinAlgError:  # columns too nearly dependent for a Gram matrix
        return np.linalg.qr(block)
    return orthonormal, factor


def check_forecast(
    columns: int, tolerance: float, draws: int, max_iterations: int, deflated: int = 0, scale: float = 1.0
) -> None:
    """Refuse what cannot be simulated."""
    if deflated < 0:
        raise OptionError(f"deflated is {deflated}; it is a number of eigenvalues, 0 for no preconditioner")
    if not 0 < scale <= 1:
        raise OptionError(
            f"scale is {scale}; it is what a preconditioner's eigenvalues are multiplied by, in (0, 1]"
        )
    if columns < 1 or draws < 1 or max_iterations < 1:
        raise OptionError(
            f"columns, draws and max_iterations must be at least 1, got {columns}, {draws} and {max_iterations}"
        )
    if not 1e-8 <= tolerance < 1:
        raise OptionError(
            f"tolerance is {tolerance}; it is an error relative to the solution's norm, from 1e-8 to 1"
        )
