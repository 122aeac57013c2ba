"""Krylov spaces from given vectors: solutions of ``(H + λ)u = g`` for every λ, and quadratures, from the same products.

H and H + λ span the same space. From g, after k products,

    H Q = Q T + β q eₖᵀ,      u_λ ≈ ‖g‖ Q (T + λ)⁻¹ e₁,      (H + λ)u_λ - g = ‖g‖ β (eₖᵀ(T + λ)⁻¹e₁) q

with Q orthonormal and T tridiagonal: solutions for all λ and their residuals. Scores need ``wᵀQ`` only. T is also a
Gauss quadrature of g's spectral measure: ``Σ weight·f(node) ≈ gᵀf(H)g``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from whence.errors import OptionError, VectorError
from whence.operators import LinearOperator
from whence.progress import ticker
from whence.spectrum.lanczos import BlockLanczos, as_block, tridiagonal
from whence.vectors import ParamVector

__all__ = ["Krylov", "are_found", "counted_once", "krylov_space", "krylov_spaces", "nonzero_norms"]

#: A Ritz value is an eigenvalue when its residual is less than this part of the distance to its neighbours; its vector
#: is then off by about as much.
_FOUND = 0.02
#: Shares of a Gram matrix of such vectors above this are directions of their own.
_DIRECTION = 0.005


@dataclass(frozen=True)
class Krylov:
    """Krylov spaces of one operator from the columns of a block, each of k orthonormal vectors.

    Attributes:
        basis: Q: k blocks, one column for each start; empty where it was not kept. Quadratures do without.
        diagonal: of T, ``[columns, k]`` in float64.
        off_diagonal: ``[columns, k]``; the last one is β, the way out of the space.
        norms: ‖g‖ of the starts, ``[columns]``.
    """

    basis: tuple[ParamVector, ...]
    diagonal: Tensor
    off_diagonal: Tensor
    norms: Tensor

    @property
    def num_products(self) -> int:
        """Products spent, all columns together."""
        return self.diagonal.numel()

    def tridiagonal(self) -> Tensor:
        """T, ``[columns, k, k]``."""
        return tridiagonal(self.diagonal, self.off_diagonal)

    # --- solutions ---------------------------------------------------------------------------------------

    def coefficients(self, dampings: Tensor) -> Tensor:
        """``‖g‖ (T + λ)⁻¹ e₁``: u_λ in the basis, ``[dampings, columns, k]``."""
        values, vectors = torch.linalg.eigh(self.tridiagonal())
        shifted = vectors[:, 0] / (values + dampings.reshape(-1, 1, 1))
        return self.norms.unsqueeze(1) * torch.einsum("cki,lci->lck", vectors, shifted)

    def residuals(self, dampings: Tensor) -> Tensor:
        """``‖(H + λ)u_λ - g‖ / ‖g‖`` for products without error, and not below rounding, ``[dampings, columns]``."""
        known = self.off_diagonal[:, -1] * self.coefficients(dampings)[..., -1].abs() / self.norms
        return known.clamp_min(self.basis[0].rounding)

    def measured_residual(self, operator: LinearOperator, damping: float) -> Tensor:
        """The same by one more product with u_λ, ``[columns]``: shows the error of products, too."""
        solution = self.solution(damping)
        left = operator.matvec(solution).axpy_(damping, solution).axpy_(-self.norms, self.basis[0])
        return left.norm().cpu() / self.norms

    def solution(self, damping: float) -> ParamVector:
        """u_λ itself, a block."""
        (weights,) = self.coefficients(torch.tensor([damping], dtype=torch.float64))
        return self._combined(weights)

    def project(self, functionals: ParamVector) -> Tensor:
        """``wᵀQ``, ``[columns, k, functionals]``."""
        return torch.stack([vectors.gram(functionals).cpu() for vectors in self.basis], dim=1)

    def _combined(self, weights: Tensor) -> ParamVector:
        """``Q·weights`` column by column, from ``[columns, k]``."""
        total = self.basis[0].zeros_like()
        for k, vectors in enumerate(self.basis):
            total.axpy_(weights[:, k], vectors)
        return total

    # --- quadratures -------------------------------------------------------------------------------------

    def gauss(self) -> tuple[Tensor, Tensor]:
        """Nodes, rising, and weights with ``Σ weight·f(node) ≈ gᵀf(H)g``, each ``[columns, k]``, by Gauss' rule."""
        return self._rule(self.tridiagonal())

    def radau(self) -> tuple[Tensor, Tensor]:
        """The same with one more node, at zero: the rule of Gauss-Radau, each ``[columns, k + 1]``."""
        T, beta = self.tridiagonal(), self.off_diagonal[:, -1]
        columns, k = self.diagonal.shape
        values = torch.linalg.eigvalsh(T)
        # A node at zero needs T positive definite; where it is singular to rounding, the node goes just below.
        node = values[:, 0].clamp_max(0.0) - 1e-10 * values[:, -1].clamp_min(torch.finfo(T.dtype).tiny)
        last = torch.eye(k, dtype=T.dtype)[-1]
        shifted = T - torch.diag_embed(node.unsqueeze(1).expand(columns, k))
        longer = torch.nn.functional.pad(T, (0, 1, 0, 1))
        longer[:, k - 1, k] = longer[:, k, k - 1] = beta
        longer[:, k, k] = node + beta.square() * torch.linalg.solve(shifted, last.expand(columns, k))[:, -1]
        return self._rule(longer)

    def dimension_bounds(self, dampings: Tensor) -> tuple[Tensor, Tensor]:
        """Below and above ``gᵀH(H + λ)⁻¹g``, by the rules of Gauss-Radau and Gauss, each ``[dampings, columns]``."""

        def kept(nodes: Tensor, weights: Tensor) -> Tensor:
            return torch.sum(weights * nodes / (nodes + dampings.reshape(-1, 1, 1)), dim=-1)

        lower, upper = kept(*self.radau()), kept(*self.gauss())
        return torch.minimum(lower, upper), upper

    def _rule(self, matrix: Tensor) -> tuple[Tensor, Tensor]:
        nodes, vectors = torch.linalg.eigh(matrix)
        return nodes.clamp_min(0.0), self.norms.square().unsqueeze(1) * vectors[:, 0].square()

    # --- eigenvalues -------------------------------------------------------------------------------------

    def multiplicities(self) -> list[int]:
        """Multiplicities of the eigenvalues that every column has found, from the largest on.

        The columns' Ritz vectors of an eigenvalue span its eigenspace, and show its multiplicity where there are more
        columns than that. The list ends where they do not, or where rounding has begun to add copies.
        """
        columns, k = self.diagonal.shape
        if columns < 2 or not self.basis:
            return []  # one vector cannot show a multiplicity
        values, vectors = (part.flip(-1) for part in torch.linalg.eigh(self.tridiagonal()))
        rounding = self.basis[0].rounding * values[:, :1].abs()
        residuals = self.off_diagonal[:, -1:] * vectors[:, -1].abs() + rounding
        found, room = are_found(values, residuals), _FOUND * _to_nearest(values)
        counts: list[int] = []
        for i in range(k):
            differ = float(values[:, i].max() - values[:, i].min())
            if not bool(found[:, i].all()) or differ > 2 * float(room[:, i].min()):
                break
            ritz = self._combined(vectors[:, :, i])
            shares = torch.linalg.eigvalsh(ritz.gram(ritz).cpu()) / columns
            directions = int((shares > _DIRECTION).sum())
            if directions == columns:
                break  # as many as there are starts, or more
            counts.append(directions)
        return counts


def are_found(values: Tensor, residuals: Tensor) -> Tensor:
    """Which Ritz values, falling along the last dimension, are eigenvalues by their residuals."""
    return residuals < _FOUND * _to_nearest(values)


def _to_nearest(values: Tensor) -> Tensor:
    gaps = torch.nn.functional.pad(-values.diff(dim=-1), (1, 1), value=math.inf)
    return torch.minimum(gaps[..., 1:], gaps[..., :-1])


def counted_once(nodes: Tensor, weights: Tensor, counts: list[int]) -> tuple[Tensor, Tensor]:
    """A rule, largest node first, in which an eigenvalue that was found m times over is m nodes of weight 1.

    Args:
        nodes: of a quadrature from random signs, rising, ``[columns, k]``.
        weights: the start's shares. That in an eigenvector has mean 1 and variance about 2: putting the mean in its
            place leaves the quadrature unbiased and takes this part of its variance away.
        counts: multiplicities of the largest eigenvalues.
    """
    nodes, weights = nodes.flip(1), weights.flip(1)
    if not counts:
        return nodes, weights
    found, rest = nodes[:, : len(counts)], weights[:, len(counts) :]
    ones = weights.new_ones(len(weights), sum(counts))
    left = (weights.sum(1, keepdim=True) - sum(counts)).clamp_min(0.0)
    rest = rest * (left / rest.sum(1, keepdim=True).clamp_min(torch.finfo(rest.dtype).tiny))
    repeated = found.repeat_interleave(torch.tensor(counts), dim=1)
    return torch.cat([repeated, nodes[:, len(counts) :]], dim=1), torch.cat([ones, rest], dim=1)


def krylov_space(
    operator: LinearOperator, starts: ParamVector, *, max_products: int, keep_basis: bool = True
) -> Krylov:
    """Lanczos from given vectors, side by side.

    A column whose space is exhausted (β = 0) goes on with zeros, which change nothing of what is read from it.

    Args:
        operator: a deterministic operator: the whole data or a fixed subset.
        starts: one vector or a block of them, none of them zero.
        max_products: k, the products spent on each column.
        keep_basis: hold all ``max_products`` vectors of every column and reorthogonalise them. Without it three
            suffice. Copies of eigenvalues, which rounding then breeds, share a weight: quadratures stand.
    """
    if max_products < 1:
        raise OptionError(f"max_products is {max_products}; a Krylov space needs at least one product")
    block = as_block(starts)
    nonzero_norms(block)
    state, norms, _ = BlockLanczos.begin(block, apart=True, keep_basis=keep_basis)
    steps = min(max_products, block.numel)
    with ticker(f"Krylov space of {block.columns} columns", steps) as tick:
        for _ in range(steps):
            state.step(operator)
            tick()
            if state.current is None:
                break
    return Krylov(tuple(vectors for vectors, _ in state.basis or ()), *state.T.columns(), norms)


def krylov_spaces(
    operator: LinearOperator,
    starts: ParamVector,
    *,
    max_products: int,
    budget: int,
    keep_basis: bool = True,
) -> Iterator[Krylov]:
    """Krylov spaces of a block's columns, as many at a time as have their bases within ``budget`` bytes."""
    columns = starts.unstack()
    at_once = max(1, budget // (max_products * columns[0].nbytes))
    for start in range(0, len(columns), at_once):
        group = ParamVector.stack(columns[start : start + at_once])
        yield krylov_space(operator, group, max_products=max_products, keep_basis=keep_basis)


def nonzero_norms(vectors: ParamVector) -> Tensor:
    """Norms of the columns; refuses a column of zeros."""
    norms = vectors.norm()
    if not bool((norms > 0).all()):
        raise VectorError(
            f"column {int(norms.argmin())} is zero: there is nothing to solve for. Leave it out"
        )
    return norms
