"""`Preconditioned`: an operator in the coordinates ``P^{1/2}u``, where every estimator of H works unchanged."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from whence.errors import OptionError
from whence.operators import Damped, LinearOperator
from whence.preconditioners.base import Preconditioner
from whence.vectors import ParamVector

__all__ = ["Preconditioned"]


class Preconditioned(LinearOperator):
    """``P^(-1/2) A P^(-1/2)``: symmetric, with the eigenvalues of ``P⁻¹A``.

    Of an operator H it is undamped, and `estimate_spectrum` measures what a plan with P needs: ``Tr(P⁻¹H)``, its
    largest eigenvalue, and C. `damped` is the system itself, ``P^(-1/2)(H + λ)P^(-1/2)``.

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
        if isinstance(operator, Damped) and abs(operator.damping - preconditioner.damping) > (
            1e-9 * preconditioner.damping
        ):
            raise OptionError(
                f"the system's damping is {operator.damping}, the preconditioner was made for "
                f"{preconditioner.damping}; make both from one value"
            )
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
