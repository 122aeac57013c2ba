"""The contract of a preconditioner, ``P ≈ H + λ`` with a cheap inverse, and an operator seen in P's coordinates.

One preconditioner serves every query and both kinds of solver: conjugate gradients multiply residuals by P⁻¹, LiSSA
its steps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor

from whence.errors import OptionError
from whence.operators import Damped, LinearOperator, check_damping
from whence.vectors import ParamVector

__all__ = ["Preconditioned", "Preconditioner", "check_damping", "check_made_for"]


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

    @abstractmethod
    def with_damping(self, damping: float) -> Preconditioner:
        """The same for another λ: ``P - λ`` stays."""

    @property
    @abstractmethod
    def smallest(self) -> float:
        """A positive lower bound of the eigenvalues of ``P⁻¹(H + λ)``: what an error's upper bound rests on."""

    def draw(self, like: ParamVector, generator: torch.Generator) -> ParamVector:
        """``P^(-1/2)ξ`` with normal ξ: a random vector of covariance P⁻¹, so that ``E⟨w, ·⟩² = wᵀP⁻¹w``."""
        return self.root_solve(like.randn_like(generator))


class Preconditioned(LinearOperator):
    """``P^(-1/2) A P^(-1/2)``: symmetric, with the eigenvalues of ``P⁻¹A``; every estimator works on it unchanged.

    Of an undamped operator H, `estimate_spectrum` measures here what a plan with P needs: ``Tr(P⁻¹H)``, its largest
    eigenvalue, and C. `damped` is the system itself, ``P^(-1/2)(H + λ)P^(-1/2)``.

    Args:
        operator: A.
        preconditioner: P.

    Example:
        >>> from whence import Dense
        >>> from whence.preconditioners import nystrom
        >>> H = Dense(torch.diag(torch.tensor([9.0, 3.0], dtype=torch.float64)))
        >>> P = nystrom(H, 1.0, rank=2, generator=torch.Generator().manual_seed(0))
        >>> v = ParamVector({"x": torch.ones(2, dtype=torch.float64)})
        >>> Preconditioned(H, P).matvec(v)["x"]
        tensor([0.9000, 0.7500], dtype=torch.float64)
        >>> Preconditioned(H, P).damped.matvec(v)["x"]
        tensor([1.0000, 1.0000], dtype=torch.float64)
    """

    def __init__(self, operator: LinearOperator, preconditioner: Preconditioner) -> None:
        if isinstance(operator, Damped):
            check_made_for(operator, preconditioner.damping)
        self.operator = operator
        self.preconditioner = preconditioner

    @property
    def damped(self) -> Preconditioned:
        """``P^(-1/2)(H + λ)P^(-1/2)``, with the λ of P."""
        if isinstance(self.operator, Damped):
            return self
        return Preconditioned(Damped(self.operator, self.preconditioner.damping), self.preconditioner)

    def zeros(self, columns: int | None = None) -> ParamVector:
        return self.operator.zeros(columns)

    def matvec(self, vector: ParamVector) -> ParamVector:
        return self.preconditioner.root_solve(self.operator.matvec(self.preconditioner.root_solve(vector)))

    def quadratic_form(self, vector: ParamVector) -> Tensor:
        return self.operator.quadratic_form(self.preconditioner.root_solve(vector))

    @property
    def num_terms(self) -> int:
        return self.operator.num_terms

    def sample(self, batch_size: int, generator: torch.Generator) -> Preconditioned:
        return Preconditioned(self.operator.sample(batch_size, generator), self.preconditioner)

    def subset(
        self, batch_size: int, generator: torch.Generator, *, distinct: bool = False
    ) -> Preconditioned:
        drawn = self.operator.subset(batch_size, generator, distinct=distinct)
        return Preconditioned(drawn, self.preconditioner)

    @property
    def share_of_whole(self) -> float:
        return self.operator.share_of_whole

    @property
    def has_factors(self) -> bool:
        return self.operator.has_factors

    def sample_factor(self, batch_size: int, generator: torch.Generator) -> ParamVector:
        """``P^(-1/2)g`` with ``E[g gᵀ] = A``."""
        return self.preconditioner.root_solve(self.operator.sample_factor(batch_size, generator))

    def state(self) -> dict[str, float | None]:
        return self.operator.state()

    def restore_state(self, state: Mapping[str, float | None]) -> None:
        self.operator.restore_state(state)


def check_made_for(system: Damped, damping: float, what: str = "preconditioner") -> None:
    """Refuse a preconditioner, or whatever else was made for another λ than the system has."""
    if abs(system.damping - damping) > 1e-9 * damping:
        raise OptionError(
            f"the system's damping is {system.damping}, the {what} was made for {damping}; make both from one value"
        )
