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
from dataclasses import dataclass

from torch import Tensor

from whence.errors import OptionError
from whence.spectrum.lanczos import BlockTridiagonal, cholesky, orthonormal_factors

__all__ = ["BlockTridiagonal", "Certificate", "cholesky", "orthonormal_factors"]


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
        subset: whether these are a subset of the data. Then u* is the subset's solution.

    Example:
        >>> import torch
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
    subset: bool = False

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
