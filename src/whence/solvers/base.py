"""What every solver takes and returns."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import torch
from torch import Tensor

from whence.errors import VectorError
from whence.operators import Damped
from whence.solvers.certificate import Certificate
from whence.solvers.error_parts import ErrorParts
from whence.solvers.plan import Plan
from whence.spectrum import Estimate
from whence.vectors import ParamVector

__all__ = ["Solution", "Solver", "check_right_hand_side"]


@dataclass(frozen=True)
class Solution:
    """An approximate ``u = (H + λ)⁻¹ g`` that knows how far to trust itself.

    Attributes:
        value: the solution; a block if the right-hand side was one. For stochastic solvers, the chains' mean.
        chains: independent estimates of the same solution; one where the solver is deterministic.
        residual: unbiased estimate of ``‖(H + λ)u - g‖ / ‖g‖``, per column, on data the solver did not see.
        residual_stderr: its standard error.
        converged: whether the residual is below the solver's tolerance, per column.
        num_products: sampled products spent, all chains together.
        num_term_products: terms gone through in them.
        events: what the solver had to change on the way, in words.
        plan: the settings in force at the end.
        paths: gᵀu along every chain, ``[chains, steps, columns]``: what the way looked like.
        certificate: proven bounds of the error, where the solver has them.
        score_rms: ``‖u‖_H`` per column, where the solver knows it: the root mean square of the scores.
        error_parts: which part of the error is bias, which sampling, and which is proven.
    """

    value: ParamVector
    chains: tuple[ParamVector, ...]
    residual: Tensor
    residual_stderr: Tensor
    converged: Tensor
    num_products: int
    num_term_products: int
    events: tuple[str, ...] = field(default=())
    plan: Plan | None = None
    paths: Tensor | None = None
    certificate: Certificate | None = None
    score_rms: Tensor | None = None
    error_parts: ErrorParts | None = None

    @property
    def stderr(self) -> ParamVector:
        """Standard error of every entry of `value`, from the spread of the chains."""
        self._need_chains()
        m = len(self.chains)
        variance = self.value.zeros_like()
        for chain in self.chains:
            for name, total in variance.items():
                total.add_((chain[name] - self.value[name]).square_())
        for total in variance.values():
            total.div_(m * (m - 1)).sqrt_()
        return variance

    @property
    def degrees_of_freedom(self) -> int:
        """For Student's t: one less than the number of chains."""
        return len(self.chains) - 1

    def project(self, functionals: ParamVector) -> tuple[Tensor, Tensor]:
        """``⟨w, u⟩`` for linear functionals w of the solution (a score is one), with standard errors.

        Args:
            functionals: a vector w, or a block of them.

        Returns:
            Values and standard errors, ``[columns of u, columns of w]`` in float64, without the dimensions
            of single vectors.
        """
        self._need_chains()
        draws = torch.stack([chain.gram(functionals) for chain in self.chains])
        value = draws.mean(0)
        stderr = draws.std(0) / math.sqrt(len(self.chains))
        if functionals.columns is None:
            value, stderr = value.squeeze(1), stderr.squeeze(1)
        if self.value.columns is None:
            value, stderr = value.squeeze(0), stderr.squeeze(0)
        return value, stderr

    def estimate(self, functional: ParamVector) -> Estimate:
        """`project` for one functional of a single solution."""
        value, stderr = self.project(functional)
        return Estimate(float(value), float(stderr))

    def _need_chains(self) -> None:
        if len(self.chains) < 2:
            raise VectorError(
                "one chain has no spread, so no standard error; solve with chains=2 or more (4 by default)"
            )


class Solver(ABC):
    """Solves ``(H + λ)u = g``."""

    @abstractmethod
    def solve(self, A: Damped, rhs: ParamVector, *, generator: torch.Generator) -> Solution:
        """Solve for one right-hand side, or for a block of them together."""


def check_right_hand_side(A: Damped, rhs: ParamVector) -> None:
    """Refuse a right-hand side of another model, or one with NaN or infinity, before any work."""
    if not isinstance(rhs, ParamVector):
        raise VectorError(
            f"the right-hand side is a {type(rhs).__name__}; give a ParamVector, such as GaussNewton.gradients returns"
        )
    A.zeros().check_same_space(rhs, "right-hand side")
    if not rhs.is_finite():
        raise VectorError(
            "the right-hand side holds NaN or infinity: the query's loss or gradient overflowed. "
            "Check the query's inputs and label"
        )
