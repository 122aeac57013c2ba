"""`Shifted`: scores for every damping from the products of one solve.

H and H + λ span the same Krylov space. With its orthonormal basis V from the right-hand sides, ``VᵀHV = T`` and
``g = V₁β₀``, the solution for any λ is ``u_λ = V (T + λ)⁻¹ e₁β₀``, and an example's score is ``∇ℓ(z)ᵀu_λ``: a small
matrix times the slopes ``∇ℓ(z)ᵀV`` that the products passed by. No vector of the parameters' size is needed.
docs/math.md, "One Krylov space for every damping".
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Shifted"]


@dataclass(frozen=True)
class Shifted:
    """The Krylov space of a solve, as the examples see it.

    Attributes:
        T: of H, ``[k, k]`` in float64.
        start: β₀, ``[first block, queries]``.
        slopes: ``∇ℓ(z)ᵀV``, ``[k, examples]``.
        last: columns of the last block.
    """

    T: Tensor
    start: Tensor
    slopes: Tensor
    last: int

    def scores(self, damping: float, *, without_last: bool = False) -> Tensor:
        """``∇ℓ(z)ᵀu_λ``, ``[queries, examples]`` in float64; as they were a product before, if asked for."""
        size = len(self.T) - (self.last if without_last else 0)
        rhs = torch.zeros(size, self.start.shape[1], dtype=torch.float64)
        rhs[: len(self.start)] = self.start
        shifted = self.T[:size, :size] + damping * torch.eye(size, dtype=torch.float64)
        weights: Tensor = torch.linalg.solve(shifted, rhs)
        return weights.T @ self.slopes[:size].double()

    def unsettled(self, damping: float) -> float:
        """By how much of their own size the last product still moved the scores: small where they have settled."""
        if len(self.T) <= self.last:
            return 1.0
        after, before = self.scores(damping), self.scores(damping, without_last=True)
        return float((after - before).norm() / after.norm().clamp_min(torch.finfo(torch.float64).tiny))
