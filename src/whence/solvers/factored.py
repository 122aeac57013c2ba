"""`Factored`: solve with a preconditioner in place of ``H + λ``, and say how far that is from the solution.

    u = a P⁻¹g,       P = K + λ,   A = H + λ

for all right-hand sides together, with the size a and the error from one product with a few random mixtures v of them,
``w = P⁻¹v``.

*Size.* K has r times too little curvature along w, ``r = ⟨w, Hw⟩ / ⟨w, Kw⟩``; so rK stands in for H once more, and

    a = ⟨w, rK u'⟩ / ⟨w, Hw⟩,       u' = (rK + λ)⁻¹v

is what u must be multiplied by for scores of the right size.

*Error.* Over the spectrum of P⁻¹A as v sees it, ``⟨w, Aw⟩ / ⟨v, w⟩`` is the mean and ``⟨Aw, P⁻¹Aw⟩ / ⟨v, w⟩`` the mean
square. With C the coefficient of variation, eigenvalues that are spread as log-normal numbers are leave

    ‖u - u*‖²_A / ‖u*‖²_A = C² / (1 + C²).

Of the energy ``⟨w, Aw⟩`` scores see the part ``⟨w, Hw⟩``; where the error has more than that, it says nothing of scores
(`whence.attribution.doubts`).

See docs/math.md, "The error of a factored solution", which also says how right this has come out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from whence.operators import Damped
from whence.preconditioners import Preconditioner
from whence.preconditioners.base import check_made_for
from whence.solvers.base import ErrorParts, Solution, Solver, Statistics
from whence.spectrum.lanczos import as_block, column_dots, finite
from whence.vectors import ParamVector

__all__ = ["Factored", "FactoredState", "Fit"]

#: Mixtures of the right-hand sides that the error is measured with.
PROBES = 1


@dataclass(frozen=True)
class Fit:
    """What the product found, to answer other questions with: as in `FactoredState`."""

    scale: float
    error: float
    residual: float
    seen: float


@dataclass
class FactoredState:
    """Before and after the one product.

    Attributes:
        probes: v.
        scale: a.
        error: ``√(C² / (1 + C²))``; NaN before.
        residual: ``‖aAw - v‖ / ‖v‖`` over all probes.
        seen: ``⟨w, Hw⟩ / ⟨w, Aw⟩``, the part of the energy that scores see.
    """

    probes: ParamVector
    scale: float = 1.0
    error: float = math.nan
    residual: float = math.nan
    seen: float = math.nan
    measured: bool = False
    events: list[str] = field(default_factory=list)
    operator: Mapping[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Factored(Solver[FactoredState]):
    """Solves with P, whatever the number of right-hand sides, for the price of one product.

    Args:
        preconditioner: P ≈ H + λ, such as `whence.preconditioners.ekfac` makes.
        fit: size and error as they were found with other right-hand sides; then no product is taken.

    Example:
        >>> from whence import Dense
        >>> from whence.preconditioners import nystrom
        >>> H = Dense(torch.diag(torch.tensor([9.0, 3.0, 0.0], dtype=torch.float64)))
        >>> P = nystrom(H, 1.0, rank=2, generator=torch.Generator().manual_seed(0))
        >>> g = ParamVector({"x": torch.ones(3, dtype=torch.float64)})
        >>> solution = Factored(preconditioner=P).solve(Damped(H, 1.0), g, generator=torch.Generator())
        >>> solution.value["x"]
        tensor([0.1000, 0.2500, 1.0000], dtype=torch.float64)
    """

    name: ClassVar[str] = "ekfac"
    independent: ClassVar[bool] = False
    state_type: ClassVar[type[FactoredState]] = FactoredState

    preconditioner: Preconditioner
    fit: Fit | None = None

    def check(self, A: Damped, rhs: ParamVector, start: ParamVector | None) -> None:
        """Refuse a preconditioner of another system."""
        check_made_for(A, self.preconditioner.damping)

    def begin(
        self, A: Damped, rhs: ParamVector, *, generator: torch.Generator, start: ParamVector | None = None
    ) -> FactoredState:
        """Draws the mixtures: every right-hand side, made as long as the others, with a random sign."""
        block = as_block(rhs)
        if self.fit is not None:
            return FactoredState(block, **vars(self.fit), measured=True)
        lengths = column_dots(block, block).sqrt()
        # of a shorter one few digits are left, and it cannot be made longer: the factor is beyond what numbers hold
        least = max(torch.finfo(tensor.dtype).tiny for tensor in block.values())
        unit = torch.where(lengths >= least, 1 / lengths, torch.zeros_like(lengths))
        columns = len(lengths)
        if columns <= PROBES:
            return FactoredState(block.mix(torch.diag(unit)))
        signs = torch.randint(0, 2, (columns, PROBES), generator=generator, device=generator.device).cpu()
        return FactoredState(block.mix(unit.unsqueeze(1) * (2.0 * signs.double() - 1)))

    def step(self, A: Damped, rhs: ParamVector, state: FactoredState) -> None:
        """The product."""
        v, P = state.probes, self.preconditioner
        w = P.solve(v)
        product = finite(A.matvec(w))
        along = float(column_dots(v, w).sum())
        curved = float(column_dots(w, product).sum())
        flat = A.damping * float(column_dots(w, w).sum())
        square = float(column_dots(product, P.solve(product)).sum())
        state.measured = True
        if not (along > 0 and curved > 0):  # right-hand sides that are zero
            state.scale, state.error, state.residual, state.seen = 1.0, 0.0, 0.0, 1.0
            return
        state.scale, state.seen = along / curved, max(0.0, 1 - flat / curved)
        if curved > flat and along > flat:
            r = (curved - flat) / (along - flat)
            # (rK + λ)⁻¹ is (K + λ/r)⁻¹ / r
            further = P.with_damping(A.damping / r).solve(v).scale_(1 / r)
            state.scale = (along - A.damping * float(column_dots(w, further).sum())) / (curved - flat)
        state.error = math.sqrt(max(0.0, 1 - curved**2 / (along * max(square, 1e-300))))
        residual = product.scale_(-state.scale).axpy_(1.0, v)
        whole = float(column_dots(v, v).sum())
        state.residual = math.sqrt(float(column_dots(residual, residual).sum()) / whole)

    def fitted(self, A: Damped, rhs: ParamVector, *, generator: torch.Generator) -> Fit:
        """Size and error, from the product with mixtures of these right-hand sides."""
        self.check(A, rhs, None)
        state = self.begin(A, rhs, generator=generator)
        self.step(A, rhs, state)
        return Fit(state.scale, state.error, state.residual, state.seen)

    def done(self, state: FactoredState) -> bool:
        """Whether the product was taken."""
        return state.measured

    def progress(self, state: FactoredState) -> tuple[int, int]:
        """Of one product."""
        return int(state.measured), 1

    def finish(self, A: Damped, rhs: ParamVector, state: FactoredState) -> Solution:
        """The solution, with what it should be off by."""
        value = self.preconditioner.solve(rhs).scale_(state.scale)
        along = value.dot(rhs).double().cpu()
        like = torch.ones_like(along)
        nothing = like * math.nan
        stats = Statistics(
            solver=self.name,
            residual=like * state.residual,
            residual_stderr=nothing,
            converged=like.bool(),
            num_products=int(self.fit is None),
            num_term_products=A.num_terms if self.fit is None else 0,
            events=tuple(state.events),
            paths=along.reshape(1, 1, -1),
            error_parts=ErrorParts(nothing, nothing, nothing, like * state.error),
            score_rms=(state.seen * along.clamp_min(0.0)).sqrt(),
        )
        return Solution(value, (value,), stats)
