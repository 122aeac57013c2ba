"""`CGState`: conjugate gradients in flight, in tensors and numbers alone, so that it can be saved."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from whence.preconditioners import Preconditioner
from whence.solvers.settling import Settling
from whence.solvers.shifted import Shifted
from whence.spectrum.lanczos import BlockLanczos, BlockTridiagonal
from whence.vectors import ParamVector

__all__ = ["CGState", "Spanned"]

#: Roundings of a product that are allowed for.
_MARGIN = 8.0


def _empty() -> Tensor:
    return torch.zeros(0, 0, dtype=torch.float64)


@dataclass
class Spanned:
    """An error bound that needs nothing of a preconditioner, from all that the solver has multiplied.

    Of all positive semi-definite H that agree with the products so far, ``N = HZ``, the least is ``N (ZᵀN)⁻¹ Nᵀ``, and
    the error of an iterate with the residual r is largest for it: for any y,

        ‖e‖²_A ≤ (rᵀr - 2 yᵀNᵀr + yᵀ(λZᵀN + NᵀN)y) / λ

    See docs/math.md, "Errors proven with any preconditioner". Takes one vector per column and step.

    Attributes:
        blocks: V_1 … V_{j+1}.
        plain, once, twice: VᵀV, VᵀP⁻¹V and VᵀP⁻²V.
    """

    blocks: list[ParamVector] = field(default_factory=list, metadata={"appended": True})
    plain: Tensor = field(default_factory=_empty)
    once: Tensor = field(default_factory=_empty)
    twice: Tensor = field(default_factory=_empty)

    def add(self, V: ParamVector, Z: ParamVector, preconditioner: Preconditioner) -> None:
        """The next block, with ``Z = P⁻¹V``. Costs a solve with P."""
        self.blocks.append(V)
        self.plain, self.once, self.twice = (
            self._bordered(matrix, other)
            for matrix, other in (
                (self.plain, V),
                (self.once, Z),
                (self.twice, preconditioner.solve(Z)),
            )
        )

    def _bordered(self, matrix: Tensor, other: ParamVector) -> Tensor:
        """With the inner products of all blocks with another form of the last."""
        border = torch.cat([block.gram(other, exact=True).cpu() for block in self.blocks])
        above, corner = border[: len(matrix)], border[len(matrix) :]
        corner = 0.5 * (corner + corner.T)
        return torch.cat([torch.cat([matrix, above], 1), torch.cat([above.T, corner], 1)])

    def energy(self, zeta: Tensor, T: BlockTridiagonal, damping: float, rounding: float) -> Tensor:
        """Above ``‖e‖²_A``, per column, from the residual ζ in the last block; products are rounded to ε‖A‖."""
        B = T.extended()
        total, known = B.shape
        r = torch.zeros(total, zeta.shape[1], dtype=torch.float64)
        r[total - len(zeta) :] = zeta
        of_Z, Z_and_Z = self.once[:known], self.twice[:known, :known]
        of_N = B.T @ self.plain - damping * of_Z  # NᵀV
        N_and_N = of_N @ B - damping * (B.T @ of_Z.T - damping * Z_and_Z)
        inner = damping * (of_Z @ B - damping * Z_and_Z) + N_and_N
        inner, along = 0.5 * (inner + inner.T), of_N @ r
        # any y will do: directions whose curvature may be rounding are not asked
        values, vectors = torch.linalg.eigh(inner)
        noise = _MARGIN * damping * rounding * float(Z_and_Z.diagonal().max())
        safe = values > max(noise, 1e-12 * float(values[-1]))
        y = vectors[:, safe] @ ((vectors[:, safe].T @ along) / values[safe].unsqueeze(1))
        square = torch.sum(r * (self.plain @ r), dim=0)
        left = square - torch.sum(y * (2 * along - inner @ y), dim=0)
        return (left.clamp_min(0.0) + _MARGIN * rounding / damping * square) / damping


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
        trusted: whether nothing has contradicted μ, the smallest eigenvalue that bounds rest on.
        capped: whether nothing has contradicted `largest`.
        failed: whether A turned out not to be positive definite.
        products: spent so far.
        path: gᵀx after every iteration, per column.
        events, operator: see `whence.solvers.base.State`.
        settling: the examples' scores along the way, where the solver watches them.
        spanned: all of the basis, where the solver keeps it to prove errors by.
        first: β₀, the right-hand sides in the first block.
        slopes: the examples' slopes along every block of the basis, where the solver keeps them.
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
    settling: Settling | None = None
    spanned: Spanned | None = None
    first: Tensor = field(default_factory=_empty)
    slopes: list[ParamVector] = field(default_factory=list, metadata={"appended": True})

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
            first=zeta,
        )

    def shifted(self, damping: float) -> Shifted | None:
        """Scores for every λ, where all slopes were kept."""
        diagonal = self.lanczos.T.diagonal
        if not self.slopes or len(self.slopes) != len(diagonal):
            return None
        T = self.lanczos.T.extended()
        T = T[: T.shape[1]]
        return Shifted(
            0.5 * (T + T.T) - damping * torch.eye(len(T), dtype=torch.float64),
            self.first,
            torch.cat([rows["examples"] for rows in self.slopes]),
            len(diagonal[-1]),
        )

    @property
    def rounded(self) -> bool:
        """Whether all that is left of the error's bound is rounding, so that more iterations cannot help."""
        return bool((self.energy.sqrt() <= self.slack).all())

    @property
    def exhausted(self) -> bool:
        """Whether no step can help: all that is left is rounding, the space is used up, or A is not positive."""
        return self.rounded or self.lanczos.current is None or self.failed

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
