"""How far an iterate of conjugate gradients is from the solution: the small matrices that bound it from both sides.

After j steps of block Lanczos with A = H + λ in the inner product of P⁻¹, ``A Z = V T + V_{j+1} β E_jᵀ`` with a block
tridiagonal T, and the residual is ``V_{j+1} ζ``. Go on in thought to the end of the space, and eliminate the first j
blocks of the whole T: a positive definite S is left, and the error in the energy norm, ``‖e‖²_A = eᵀAe``, is

    ‖e_j‖²_A = diag(ζᵀ (S⁻¹)₁₁ ζ),      S = T_rest - E₁ β d⁻¹ βᵀ E₁ᵀ,      d the last pivot of T

All eigenvalues of P⁻¹A are at least μ, so the whole T less μ is positive semi-definite, and so is what is left of it
after the first j blocks: ``T_rest - μ - E₁ β d_μ⁻¹ βᵀ E₁ᵀ ≥ 0`` with d_μ the last pivot of T - μ. Hence

    ‖e_j‖²_A ≤ diag(ζᵀ d̃⁻¹ ζ),      d̃ = μ + β (d_μ⁻¹ - d⁻¹) βᵀ

which is the rule of Gauss and Radau with a node at μ, for blocks, and costs no product. A node ν above all eigenvalues
turns the signs, and bounds from below. The next pivot of T in place of d̃ is Gauss' rule, also from below.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from whence.errors import OptionError

__all__ = ["BlockTridiagonal", "Certificate", "cholesky", "orthonormal_factors"]

_DOUBLE = torch.finfo(torch.float64).eps


@dataclass(frozen=True)
class Certificate:
    """Proven bounds of ``‖u - u*‖_A``: the error of a solution of ``(H + λ)u = g`` in the energy norm, A = H + λ.

    They are about the operator that was solved with, if its products are exact to rounding. Those of finite
    differences are not; a measured residual shows by how much, and is then part of the upper bound.

    Attributes:
        lower: per column in float64; 0 where nothing is known.
        upper: per column in float64; infinite where nothing can be proven.
        damping: λ.
        operator_terms: how many terms the operator averaged.

    Example:
        >>> lower, upper = torch.tensor([0.25, 1.0]).double(), torch.tensor([0.5, 2.0]).double()
        >>> certificate = Certificate(lower, upper, damping=0.25, operator_terms=100)
        >>> certificate.score_bound(torch.tensor([1.0, 3.0]))
        tensor([[ 1.,  3.],
                [ 4., 12.]], dtype=torch.float64)
    """

    lower: Tensor
    upper: Tensor
    damping: float
    operator_terms: int

    def score_bound(self, norms: Tensor) -> Tensor:
        """The most that scores ``wᵀu`` can be wrong by: ``|wᵀ(u - u*)| ≤ ‖w‖_{A⁻¹} ‖u - u*‖_A ≤ ‖w‖ upper / √λ``.

        Args:
            norms: ‖w‖ of the examples' gradients.

        Returns:
            ``[columns, examples]`` in float64, without the first dimension for a single solution.
        """
        return self._spread(norms) / math.sqrt(self.damping)

    def score_error(self, norms: Tensor, trace: float) -> Tensor:
        """The spread of a typical example's score around the exact one, at most: ``upper ‖w‖ / √Tr(H)``.

        ``E_z (∇ℓ(z)ᵀe)² = eᵀHe ≤ ‖e‖²_A`` over examples z whose labels are drawn from the model, and
        ``E_z ‖∇ℓ(z)‖² = Tr(H)``: shared out by gradient norm, the errors have this mean square. No bound for any single
        example.

        Args:
            norms: ‖w‖ of the examples' gradients.
            trace: Tr(H).
        """
        if not 0 < trace < math.inf:
            raise OptionError(
                f"the trace is {trace}; give Tr(H), a positive number, as estimate_spectrum finds it"
            )
        return self._spread(norms) / math.sqrt(trace)

    def _spread(self, norms: Tensor) -> Tensor:
        if not bool((norms >= 0).all()):
            raise OptionError("norms of gradients must be numbers, none of them negative")
        return self.upper.unsqueeze(-1) * norms.to(self.upper)


@dataclass
class BlockTridiagonal:
    """T of block Lanczos, in float64: α on the diagonal, β below it, which may have fewer rows than columns.

    Attributes:
        diagonal: α_1 … α_j.
        below: β_2 … β_{j+1}; the last one leads out of the space.
    """

    diagonal: list[Tensor] = field(default_factory=list)
    below: list[Tensor] = field(default_factory=list)
    _known: dict[float, tuple[float, int, Tensor | None]] = field(
        default_factory=dict, repr=False, compare=False
    )

    def extended(self) -> Tensor:
        """T as one matrix, with the last β below it."""
        sizes = [len(alpha) for alpha in self.diagonal] + [len(self.below[-1])]
        starts = [sum(sizes[:j]) for j in range(len(sizes))]
        matrix = torch.zeros(sum(sizes), starts[-1], dtype=torch.float64)
        for j, (alpha, beta) in enumerate(zip(self.diagonal, self.below, strict=True)):
            here, below = (slice(starts[k], starts[k] + sizes[k]) for k in (j, j + 1))
            matrix[here, here], matrix[below, here] = alpha, beta
            if j + 1 < len(self.diagonal):
                matrix[here, below] = beta.T
        return matrix

    def pivot(self, node: float = 0.0, side: float = 1.0) -> Tensor | None:
        """Cholesky factor of the last pivot of ``side · (T - node)``; None if that is not positive definite."""
        known, done, factor = self._known.get(side, (node, 0, None))
        if known != node:  # else go on from where the last call came to
            done, factor = 0, None
        for j in range(done, len(self.diagonal)):
            alpha = self.diagonal[j]
            block = side * (alpha - node * torch.eye(len(alpha), dtype=alpha.dtype))
            if factor is not None:
                block = block - _inner(factor, self.below[j - 1])
            factor = cholesky(block)
            if factor is None:
                return None
        self._known[side] = (node, len(self.diagonal), factor)
        return factor

    def energy(self, zeta: Tensor, pivot: Tensor, node: float, side: float = 1.0) -> Tensor | None:
        """``diag(ζᵀ d̃⁻¹ ζ)``: above ``‖e‖²_A`` for a node below the spectrum, below it for one above (side -1).

        Args:
            zeta: the residual in the next block of the basis.
            pivot: Cholesky factor of d, the last pivot of T.
            node: below or above every eigenvalue of P⁻¹A.
            side: 1 or -1.

        Returns:
            One number per column, or None if T shows that the node is not there.
        """
        shifted = self.pivot(node, side)
        if shifted is None:
            return None
        beta = self.below[-1]
        eye = torch.eye(len(beta), dtype=beta.dtype)
        last = cholesky(node * eye + side * _inner(shifted, beta) - _inner(pivot, beta))
        return None if last is None else torch.sum(zeta * torch.cholesky_solve(zeta, last), dim=0)


def _inner(factor: Tensor, beta: Tensor) -> Tensor:
    """``β d⁻¹ βᵀ`` from the Cholesky factor of d."""
    half: Tensor = torch.linalg.solve_triangular(factor, beta.T, upper=False)
    return half.T @ half


def cholesky(matrix: Tensor) -> Tensor | None:
    """The factor of a symmetric matrix, or None if it is not positive definite."""
    factor, info = torch.linalg.cholesky_ex(matrix)
    return None if int(info) or not bool(torch.isfinite(factor).all()) else factor


def orthonormal_factors(
    gram: Tensor, *, rounding: float, floor: float, outer: Tensor
) -> tuple[Tensor, Tensor]:
    """Orthonormal columns for a block W from its Gram matrix, without what rounding cannot tell from zero.

    Columns are brought to length one first, so that a short right-hand side counts as much as a long one.

    Args:
        gram: ``WᵀP⁻¹W`` in float64.
        rounding: of the vectors' numbers.
        floor: directions into which ``W·outer`` reaches no further than this are noise.
        outer: what W will be multiplied by.

    Returns:
        ``weights, β``: ``V = W·weights`` is orthonormal, and ``W = Vβ`` but for what is left out.
    """
    length = gram.diagonal().clamp_min(0.0).sqrt()
    inverse = torch.where(length > 0, 1 / length, torch.zeros_like(length))
    values, vectors = torch.linalg.eigh(0.5 * inverse.unsqueeze(1) * (gram + gram.T) * inverse)
    # A Gram matrix squares: below √ε of float64 a direction's length is not known, whatever the vectors' precision.
    resolved = len(gram) * max(64 * _DOUBLE, (4 * rounding) ** 2)
    beta = values.clamp_min(0.0).sqrt().unsqueeze(1) * vectors.T * length
    kept = (values > resolved) & (torch.linalg.norm(beta @ outer, dim=1) > floor)
    weights, beta = inverse.unsqueeze(1) * vectors[:, kept] / values[kept].sqrt(), beta[kept]
    if (
        bool(kept.all()) and float(values[0]) > 0.5
    ):  # nearly orthonormal before: stay near, do not mix long and short
        weights, beta = weights @ vectors.T, vectors @ beta
    return weights, beta
