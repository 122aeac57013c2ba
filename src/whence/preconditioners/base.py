"""What every preconditioner offers: an approximation ``P ≈ H + λ`` whose inverse is cheap.

One of them serves every query, and both kinds of solver: conjugate gradients multiply residuals by P⁻¹, LiSSA its
steps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from whence.vectors import ParamVector

__all__ = ["Preconditioner"]


class Preconditioner(ABC):
    """A symmetric positive definite ``P ≈ H + λ``.

    Attributes:
        damping: the λ that it was made for.
    """

    damping: float

    @abstractmethod
    def solve(self, vector: ParamVector) -> ParamVector:
        """``P⁻¹v``, a new vector; on a block, for each column."""

    @abstractmethod
    def root_solve(self, vector: ParamVector) -> ParamVector:
        """``P^(-1/2)v`` with the symmetric root, a new vector; on a block, for each column."""

    @property
    @abstractmethod
    def smallest(self) -> float:
        """A lower bound, positive, of the eigenvalues of ``P⁻¹(H + λ)``: what an error's upper bound rests on."""

    def draw(self, like: ParamVector, generator: torch.Generator) -> ParamVector:
        """``P^(-1/2)ξ`` with normal ξ: a random vector of covariance P⁻¹, so that ``E⟨w, ·⟩² = wᵀP⁻¹w``."""
        return self.root_solve(like.randn_like(generator))
