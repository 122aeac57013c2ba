"""`CGState`: conjugate gradients in flight, in tensors and numbers alone, so that a caller can save it and go on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from whence.solvers.block_lanczos import BlockLanczos
from whence.solvers.settling import Settling
from whence.solvers.spanned import Spanned
from whence.vectors import ParamVector

__all__ = ["CGState"]


@dataclass
class CGState:
    """Everything that is needed to go on from iteration j, bit for bit.

    Attributes:
        iterate: x, a block even for a single right-hand side.
        lanczos: the Krylov space, at its next block V_{j+1}.
        zeta: the residual in that block, ``V_{j+1} ζ``.
        lower, upper: bounds of ``‖e_j‖_A``, per column, with room for what rounding does.
        energy: the upper bound of ``‖e_j‖²_A`` by the recurrence alone, per column.
        residual: ``‖g - Ax‖ / ‖g‖`` by the recurrence, per column.
        score_rms: ``‖x‖_H``, per column: the root mean square of the scores.
        left_out: length, in the norm of P⁻¹, of what is missing from the recurrence's residual, per column.
        rounding: what rounding can do to ``‖e_j‖_A``, per column.
        slack: what both can do to it: no upper bound gets below this.
        direction: S_j.
        pivot: Cholesky factor of d_j.
        iteration: j.
        trusted: whether μ is known for this operator, and nothing has contradicted it.
        capped: whether nothing has contradicted `largest`.
        failed: whether A turned out not to be positive definite.
        products: spent so far.
        path: gᵀx after every iteration, per column.
        events: what had to be changed, in words.
        operator: what earlier products left behind that later ones depend on.
        generator: state of the generator before it drew the subset.
        settling: the examples' scores along the way, where the solver watches them.
        spanned: all of the basis, where the solver keeps it to prove errors by.
    """

    iterate: ParamVector
    lanczos: BlockLanczos
    zeta: Tensor
    lower: Tensor
    upper: Tensor
    energy: Tensor
    residual: Tensor
    score_rms: Tensor
    left_out: Tensor
    rounding: Tensor
    slack: Tensor
    direction: ParamVector | None = None
    pivot: Tensor | None = None
    iteration: int = 0
    trusted: bool = True
    capped: bool = True
    failed: bool = False
    products: int = 0
    path: list[list[float]] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    operator: Mapping[str, float | None] = field(default_factory=dict)
    generator: Tensor | None = None
    settling: Settling | None = None
    spanned: Spanned | None = None

    @classmethod
    def begin(cls, iterate: ParamVector, lanczos: BlockLanczos, zeta: Tensor, left_out: Tensor) -> CGState:
        """Before the first iteration, with nothing proven yet."""
        zero = torch.zeros_like(left_out)
        return cls(
            iterate=iterate,
            lanczos=lanczos,
            zeta=zeta,
            lower=zero,
            upper=torch.full_like(zero, math.inf),
            energy=torch.full_like(zero, math.inf),
            residual=zero,
            score_rms=zero,
            left_out=left_out,
            rounding=zero,
            slack=zero,
        )

    @property
    def rounded(self) -> bool:
        """Whether all that is left of the error's bound is rounding, so that more iterations cannot help."""
        return bool((self.energy.sqrt() <= self.slack).all())

    def fail(self, what: str, damping: float) -> None:
        """A is not positive definite: nothing is known about the error."""
        self.failed = True
        self.lower, self.upper = torch.zeros_like(self.lower), torch.full_like(self.upper, math.inf)
        self.energy = self.upper
        self.events.append(
            f"{what} after {self.iteration} iterations, so nothing is proven: H is not positive semi-definite, its "
            f"products are too inexact, or the precision is too low for λ = {damping:.4g}. Use exact products, a "
            "higher precision or a larger damping."
        )
