"""Quadratures for ``Tr f(H)`` from random starts, in which eigenvalues that were found count once.

From a vector v of random signs, ``E vᵀf(H)v = Tr f(H)``, and a Krylov space gives a quadrature of the left side. The
largest Ritz values are eigenvalues after a few products. v's share in such an eigenvector q is ``(vᵀq)²``, of mean 1
and variance about 2: the mean is put in its place. That leaves the estimate unbiased and takes this part of its
variance away, most of it where few eigenvalues carry f.

An eigenvalue of multiplicity m counts m times. One vector cannot show that; the Ritz vectors of several starts span the
eigenspace, and show m where there are more starts than that. Where there are not, or where rounding has begun to add
copies, the weights stay as they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from whence.errors import VectorError
from whence.operators import LinearOperator
from whence.progress import ticker
from whence.spectrum.krylov import Krylov, krylov_spaces
from whence.spectrum.lanczos import BASIS_BUDGET
from whence.vectors import ParamVector

__all__ = ["counted_once", "multiplicities", "starting_spaces"]

#: A Ritz value is an eigenvalue when its residual is less than this part of the distance to its neighbours; its vector
#: is then off by about as much.
_FOUND = 0.02
#: Shares of a Gram matrix of such vectors above this are directions of their own.
_DIRECTION = 0.005


def starting_spaces(operator: LinearOperator, starts: ParamVector, products: int) -> Iterator[Krylov]:
    """Lanczos from each column: with bases where at least two fit in memory (or there is one alone), else without."""
    columns = starts.unstack()
    if min(2, len(columns)) * products * columns[0].nbytes <= BASIS_BUDGET:
        yield from krylov_spaces(operator, starts, max_products=products, budget=BASIS_BUDGET)
    else:
        yield from (_without_basis(operator, column, products) for column in columns)


def _without_basis(operator: LinearOperator, start: ParamVector, products: int) -> Krylov:
    """Lanczos by its recurrence. Copies of eigenvalues, which rounding breeds, share a weight: quadratures stand."""
    current = ParamVector.stack([start])
    norm = current.norm()
    current.scale_(1 / norm)
    previous = current.zeros_like()
    diagonal: list[Tensor] = []
    off_diagonal: list[Tensor] = []
    beta = torch.zeros_like(norm)
    with ticker("spectral density", products) as tick:
        for _ in range(min(products, current.numel)):
            following = operator.matvec(current).axpy_(-beta, previous)
            diagonal.append(current.dot(following))
            following.axpy_(-diagonal[-1], current)
            beta = following.norm()
            off_diagonal.append(beta)
            tick()
            if not float(beta) > 1e-7 * float(diagonal[0].abs()):
                break
            previous, current = current, following.scale_(1 / beta)
    T = torch.stack(diagonal, 1).cpu(), torch.stack(off_diagonal, 1).cpu()
    if not all(bool(torch.isfinite(part).all()) for part in T):
        raise VectorError("a product holds NaN or infinity; check the model's outputs and its precision")
    return Krylov((), *T, norm.cpu())


def multiplicities(space: Krylov) -> list[int]:
    """Multiplicities of the eigenvalues that every column has found, from the largest on."""
    columns, k = space.diagonal.shape
    if columns < 2 or not space.basis:
        return []  # one vector cannot show a multiplicity
    values, vectors = (part.flip(-1) for part in torch.linalg.eigh(space.tridiagonal()))
    smallest = max(torch.finfo(tensor.dtype).eps for tensor in space.basis[0].values())
    residuals = space.off_diagonal[:, -1:] * vectors[:, -1].abs() + smallest * values[:, :1].abs()
    gaps = torch.nn.functional.pad(-values.diff(dim=1), (1, 1), value=math.inf)
    apart = torch.minimum(gaps[:, 1:], gaps[:, :-1])
    counts: list[int] = []
    for i in range(k):
        differ, room = values[:, i].max() - values[:, i].min(), _FOUND * apart[:, i]
        if not bool((residuals[:, i] < room).all()) or float(differ) > 2 * float(room.min()):
            break
        ritz = space.basis[0].zeros_like()
        for step, part in enumerate(space.basis):
            ritz.axpy_(vectors[:, step, i], part)
        shares = torch.linalg.eigvalsh(ritz.gram(ritz).cpu()) / columns
        directions = int((shares > _DIRECTION).sum())
        if directions == columns:
            break  # as many as there are starts, or more
        counts.append(directions)
    return counts


def counted_once(nodes: Tensor, weights: Tensor, counts: list[int]) -> tuple[Tensor, Tensor]:
    """A rule, largest node first, in which an eigenvalue that was found m times over is m nodes of weight 1."""
    nodes, weights = nodes.flip(1), weights.flip(1)
    if not counts:
        return nodes, weights
    found, rest = nodes[:, : len(counts)], weights[:, len(counts) :]
    ones = weights.new_ones(len(weights), sum(counts))
    left = (weights.sum(1, keepdim=True) - sum(counts)).clamp_min(0.0)
    rest = rest * (left / rest.sum(1, keepdim=True).clamp_min(torch.finfo(rest.dtype).tiny))
    repeated = found.repeat_interleave(torch.tensor(counts), dim=1)
    return torch.cat([repeated, nodes[:, len(counts) :]], dim=1), torch.cat([ones, rest], dim=1)
