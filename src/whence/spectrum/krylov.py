"""A Krylov space from a given vector: solutions of ``(H + λ)u = g`` for every λ at once, from the same products.

H and H + λ span the same space. From g, after k products,

    H Q = Q T + β q eₖᵀ,      u_λ ≈ ‖g‖ Q (T + λ)⁻¹ e₁,      (H + λ)u_λ - g = ‖g‖ β (eₖᵀ(T + λ)⁻¹e₁) q

with Q orthonormal and T tridiagonal: solutions for all λ and their residuals. Scores need ``wᵀQ`` only. T is also a
Gauss quadrature of g's spectral measure, which bounds ``gᵀH(H + λ)⁻¹g`` from above, and from below with a node at zero.

`whence.spectrum.lanczos` starts at random, keeps the top of the spectrum alone and stops when it knows that; here the
start is given, the whole of T matters, and columns run side by side.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from whence.errors import OptionError, VectorError
from whence.operators import LinearOperator
from whence.progress import ticker
from whence.vectors import ParamVector

__all__ = ["Krylov", "krylov_space", "krylov_spaces", "nonzero_norms"]


@dataclass(frozen=True)
class Krylov:
    """Krylov spaces of one operator from the columns of a block, each of k orthonormal vectors.

    Attributes:
        basis: Q: k blocks, one column for each start.
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

    def coefficients(self, dampings: Tensor) -> Tensor:
        """``‖g‖ (T + λ)⁻¹ e₁``: u_λ in the basis, ``[dampings, columns, k]``."""
        values, vectors = torch.linalg.eigh(self.tridiagonal())
        shifted = vectors[:, 0] / (values + dampings.reshape(-1, 1, 1))
        return self.norms.unsqueeze(1) * torch.einsum("cki,lci->lck", vectors, shifted)

    def residuals(self, dampings: Tensor) -> Tensor:
        """``‖(H + λ)u_λ - g‖ / ‖g‖`` for products without error, and not below rounding, ``[dampings, columns]``."""
        known = self.off_diagonal[:, -1] * self.coefficients(dampings)[..., -1].abs() / self.norms
        return known.clamp_min(_rounding(self.basis[0]))

    def measured_residual(self, operator: LinearOperator, damping: float) -> Tensor:
        """The same by one more product with u_λ, ``[columns]``: shows the error of products, too."""
        solution = self.solution(damping)
        left = operator.matvec(solution).axpy_(damping, solution).axpy_(-self.norms, self.basis[0])
        return left.norm().cpu() / self.norms

    def solution(self, damping: float) -> ParamVector:
        """u_λ itself, a block."""
        (weights,) = self.coefficients(torch.tensor([damping], dtype=torch.float64))
        total = self.basis[0].zeros_like()
        for k, vectors in enumerate(self.basis):
            total.axpy_(weights[:, k], vectors)
        return total

    def project(self, functionals: ParamVector) -> Tensor:
        """``wᵀQ``, ``[columns, k, functionals]``."""
        return torch.stack([vectors.gram(functionals).cpu() for vectors in self.basis], dim=1)

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

    def tridiagonal(self) -> Tensor:
        """T, ``[columns, k, k]``."""
        beside = torch.diag_embed(self.off_diagonal[:, :-1], offset=1)
        return torch.diag_embed(self.diagonal) + beside + beside.transpose(1, 2)


def krylov_space(operator: LinearOperator, starts: ParamVector, *, max_products: int) -> Krylov:
    """Lanczos from given vectors, fully reorthogonalised; holds all ``max_products`` vectors of every column.

    A column whose space is exhausted (β = 0) goes on with zeros, which change nothing of what is read from it.

    Args:
        operator: a deterministic operator: the whole data or a fixed subset.
        starts: one vector or a block of them, none of them zero.
        max_products: k, the products spent on each column.
    """
    if max_products < 1:
        raise OptionError(f"max_products is {max_products}; a Krylov space needs at least one product")
    current = starts.clone() if starts.columns is not None else ParamVector.stack([starts])
    norms = nonzero_norms(current)
    current.scale_(1 / norms)
    steps = min(max_products, current.numel)
    smallest = _rounding(current)
    basis: list[ParamVector] = []
    diagonal: list[Tensor] = []
    off_diagonal: list[Tensor] = []
    scale = torch.zeros_like(norms)
    with ticker(f"Krylov space of {current.columns} columns", steps) as tick:
        while True:
            following = operator.matvec(current)
            basis.append(current)
            diagonal.append(current.dot(following))
            scale = torch.maximum(scale, following.norm())
            for _ in range(2):  # twice is enough
                for kept in basis:
                    following.axpy_(-kept.dot(following), kept)
            beta = following.norm()
            beta = torch.where(beta > smallest * scale, beta, torch.zeros_like(beta))
            off_diagonal.append(beta)
            tick()
            if len(basis) >= steps or not bool((beta > 0).any()):
                break
            current = following.scale_(torch.where(beta > 0, 1 / beta, beta))
    if not all(bool(torch.isfinite(part).all()) for part in (*diagonal, *off_diagonal)):
        raise VectorError("a product holds NaN or infinity; check the model's outputs and its precision")
    return Krylov(
        tuple(basis), torch.stack(diagonal, 1).cpu(), torch.stack(off_diagonal, 1).cpu(), norms.cpu()
    )


def krylov_spaces(
    operator: LinearOperator, starts: ParamVector, *, max_products: int, budget: int
) -> Iterator[Krylov]:
    """Krylov spaces of a block's columns, as many at a time as have their bases within ``budget`` bytes."""
    columns = starts.unstack()
    at_once = max(1, budget // (max_products * columns[0].nbytes))
    for start in range(0, len(columns), at_once):
        yield krylov_space(
            operator, ParamVector.stack(columns[start : start + at_once]), max_products=max_products
        )


def _rounding(vector: ParamVector) -> float:
    return max(torch.finfo(tensor.dtype).eps for tensor in vector.values())


def nonzero_norms(vectors: ParamVector) -> Tensor:
    """Norms of the columns; refuses a column of zeros."""
    norms = vectors.norm()
    if not bool((norms > 0).all()):
        raise VectorError(
            f"column {int(norms.argmin())} is zero: there is nothing to solve for. Leave it out"
        )
    return norms
