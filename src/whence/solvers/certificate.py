"""`Certificate`: how far a solution can be from the exact one, proven.

The bounds come from the recurrence of conjugate gradients (`whence.solvers.error_bounds`); their derivation is in
docs/math.md, "Gauss-Radau bounds for a block".
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from whence.errors import OptionError

__all__ = ["Certificate"]


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
