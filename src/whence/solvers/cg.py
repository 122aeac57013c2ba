"""Conjugate gradients for ``(H + λ)u = g``: one Krylov space for all right-hand sides, and proven bounds of the error.

A = H + λ, P a preconditioner or the identity. On top of `BlockLanczos`, with its α and β, a block LDLᵀ of T:

    d_j = α_j - β_j d_{j-1}⁻¹ β_jᵀ,      S_j = Z_j - S_{j-1} d_{j-1}⁻¹ β_jᵀ,      x_j = x_{j-1} + S_j d_j⁻¹ ζ_j
    ζ_{j+1} = -β_{j+1} d_j⁻¹ ζ_j,      g - A x_j = V_{j+1} ζ_{j+1},      ‖e_{j-1}‖²_A - ‖e_j‖²_A = diag(ζ_jᵀ d_j⁻¹ ζ_j)

with ``ζ_1 = β_0``, e_j the error of x_j, and ``‖e‖²_A = eᵀAe``; `ErrorBounds` bounds what is left of it.
A block of q shares one space: every product adds q directions to it for all of them, so that fewer products do than
for a single right-hand side. Small matrices are float64, whatever the vectors are.

Memory, in vectors of the parameters' size, for each right-hand side and beside the model: g, x, the last two blocks V,
S, and two more during a step; with a preconditioner P⁻¹V, and three. The product that verifies takes two blocks more,
and ``keep_basis`` one for every iteration.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from whence.arguments import check_fields
from whence.errors import OptionError
from whence.operators import Damped
from whence.preconditioners import Preconditioner
from whence.preconditioners.base import check_made_for
from whence.solvers.base import Certificate, ErrorParts, Solution, Solver, Statistics
from whence.solvers.cg_state import CGState, Spanned
from whence.solvers.error_bounds import ErrorBounds
from whence.solvers.settling import Settling
from whence.spectrum.lanczos import BlockLanczos, as_block, cholesky, column_dots, finite
from whence.vectors import ParamVector

__all__ = ["CGState", "ConjugateGradient"]

#: What one of several columns may be off by, in units of the error that is asked of them together.
_WORST = 2.0
#: By how much the error falls from one round of solving to the next.
_TIGHTER = 0.25


@dataclass(frozen=True, kw_only=True)
class ConjugateGradient(Solver[CGState]):
    """Conjugate gradients until the scores are proven to be right to a tolerance.

    The stopping rule, ``‖e‖_A ≤ tolerance · ‖u‖_H`` with the proven bound on the left, is about scores: over examples
    whose labels are drawn from the model it bounds their root-mean-square error, relative to theirs (docs/math.md, "Why
    the tolerance is about scores"). The scores of real examples may be right long before, where these are made of many
    terms; or long after, where the model is sure of their labels. With ``score_error`` their own expected error decides
    instead; see `whence.solvers.settling`.

    Args:
        tolerance: the relative error of the scores, in root mean square, to stop at.
        score_error: the expected error of the examples' scores, relative to their spread, to stop at in place of the
            tolerance: in root mean square over columns, none of them twice as far off. None for the tolerance, which
            also decides where an operator has no examples, or very few of them.
        max_iterations: products to spend at most, one more for a start and one to verify not counted.
        preconditioner: P ≈ H + λ. Its `smallest` must hold for the operator that is solved with.
        largest: an upper bound of the eigenvalues of the H that is solved with: bounds the error from below for free,
            and tells how far rounding goes, which a preconditioner hides.
        keep_basis: keep all blocks V, to prove errors where a preconditioner's `smallest` says little (`Spanned`).
            Without a preconditioner nothing is gained, and nothing kept.
        keep_slopes: keep what the products show of the examples, so that ``stats.shifted`` has scores for every λ; not
            with a preconditioner or a start, whose spaces are of one λ.
        verify: spend one more product, with x and the next block of the basis: it measures the residual, which shows
            the errors of inexact products, and bounds the error from below.

    Example:
        >>> from whence import Damped, Dense, ParamVector
        >>> A = Damped(Dense(torch.diag(torch.tensor([1.0, 0.1, 0.0]))), 0.1)
        >>> g = torch.Generator().manual_seed(0)
        >>> solution = ConjugateGradient(tolerance=1e-3).solve(A, ParamVector({"x": torch.ones(3)}), generator=g)
        >>> solution.value["x"]
        tensor([ 0.9091,  5.0000, 10.0000])
        >>> bool(solution.converged)
        True
    """

    name: ClassVar[str] = "cg"
    independent: ClassVar[bool] = False
    state_type: ClassVar[type[CGState]] = CGState

    tolerance: float = 0.1
    score_error: float | None = None
    max_iterations: int = 100
    preconditioner: Preconditioner | None = None
    largest: float | None = None
    keep_basis: bool = False
    keep_slopes: bool = False
    verify: bool = True

    def __post_init__(self) -> None:
        check_fields(self)
        for name, example in (
            ("tolerance", "such as 0.1"),
            ("score_error", "such as 0.1, or None"),
            ("largest", "an upper bound of H's eigenvalues, or None"),
        ):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise OptionError(f"{name} is {value}; give a positive number, {example}")
        if self.max_iterations < 1:
            raise OptionError(f"max_iterations is {self.max_iterations}; it must be at least 1")
        if self.preconditioner is not None and not isinstance(self.preconditioner, Preconditioner):
            raise OptionError(
                f"the preconditioner is a {type(self.preconditioner).__name__}; give a Preconditioner, or None"
            )

    def check(self, A: Damped, rhs: ParamVector, start: ParamVector | None) -> None:
        """Refuse a preconditioner of another system."""
        P = self.preconditioner
        if self.keep_slopes and (P is not None or start is not None):
            raise OptionError(
                "keep_slopes goes with neither a preconditioner nor a start: their spaces are of one λ"
            )
        if P is not None:
            check_made_for(A, P.damping)
            if not 0 < P.smallest < math.inf:
                raise OptionError(
                    f"the preconditioner's smallest is {P.smallest}; it must be a positive number"
                )

    # --- solving -----------------------------------------------------------------------------------------

    def begin(
        self, A: Damped, rhs: ParamVector, *, generator: torch.Generator, start: ParamVector | None = None
    ) -> CGState:
        """The state before the first iteration. Nothing is random; a start costs a product."""
        g = as_block(rhs)
        x, residual, slopes = g.zeros_like(), g, None
        if start is not None:
            x.copy_(as_block(start)).scale_((column_dots(g, g) > 0).double())  # g = 0 has the solution 0
            product, slopes = A.matvec_with_slopes(x) if self._watches else (A.matvec(x), None)
            residual = finite(product).scale_(-1.0).axpy_(1.0, g)
        lanczos, zeta, left_out = BlockLanczos.begin(residual, self.preconditioner)
        lanczos.norm = 0.0 if self.largest is None else self.largest + A.damping
        state = CGState.begin(x, lanczos, zeta, left_out.diagonal().clamp_min(0.0).sqrt())
        if self.keep_basis and self.preconditioner is not None:
            state.spanned = Spanned()
        self._keep(state)
        state.products = int(start is not None)
        state.settling = None if slopes is None else Settling.begin(slopes)
        zero = torch.zeros_like(state.energy)
        self._bounds(A).after_step(g, state, decrease=zero, length=zero)
        return state

    def done(self, state: CGState) -> bool:
        """Whether the tolerance is met, the iterations are spent, or no step can help."""
        return state.iteration >= self.max_iterations or bool(self._met(state).all()) or state.exhausted

    def progress(self, state: CGState) -> tuple[int, int]:
        """Iterations, and how many there may be."""
        return state.iteration, self.max_iterations

    def further(self, rounds: int) -> ConjugateGradient:
        """To a quarter of the error with every round."""
        tighter = _TIGHTER**rounds
        return replace(
            self,
            tolerance=self.tolerance * tighter,
            score_error=None if self.score_error is None else self.score_error * tighter,
        )

    @property
    def _watches(self) -> bool:
        return self.score_error is not None or self.keep_slopes

    def _met(self, state: CGState) -> Tensor:
        """Which columns are done: their scores have settled, or where these are not known, are proven right."""
        if self.score_error is None or state.settling is None:
            return state.upper <= self.tolerance * state.score_rms
        error = state.settling.error(state.upper)
        return (error <= _WORST * self.score_error) & (error.square().mean() <= self.score_error**2)

    def step(self, A: Damped, rhs: ParamVector, state: CGState) -> None:
        """One block product, with the next block of the Krylov space."""
        g = as_block(rhs)
        S, left_out, slopes = state.lanczos.step(A, self.preconditioner, slopes=self._watches)
        state.products += 1
        T = state.lanczos.T
        pivot, ratio = T.diagonal[-1], None
        if state.pivot is not None and state.direction is not None:
            ratio = torch.cholesky_solve(T.below[-2].T, state.pivot)  # d⁻¹βᵀ
            pivot = pivot - T.below[-2] @ ratio
            S = S.clone().axpy_(-1.0, state.direction.mix(ratio))
        factor = cholesky(pivot)
        if factor is None:
            state.fail("A direction without positive curvature was met", A.damping)
            return
        step = torch.cholesky_solve(state.zeta, factor)
        state.iterate.axpy_(1.0, S.mix(step))
        decrease = torch.sum(state.zeta * step, dim=0)
        state.direction, state.pivot, state.zeta = S, factor, -T.below[-1] @ step
        state.left_out = state.left_out + torch.sum(step * (left_out @ step), dim=0).clamp_min(0.0).sqrt()
        if slopes is not None:
            if self.keep_slopes:
                state.slopes.append(ParamVector({"examples": slopes.float()}, columns=len(slopes)))
            if state.iteration == 0 and state.settling is None:
                state.settling = Settling.begin(slopes, columns=len(decrease))
            if state.settling is not None:  # else there are too few, or earlier steps were not watched
                state.settling.step(slopes, ratio, step, decrease)
        state.iteration += 1
        self._keep(state)
        state.path.append(column_dots(state.iterate, g).tolist())
        length = column_dots(S, S).sqrt() @ step.abs()
        self._bounds(A).after_step(g, state, decrease=decrease, length=length)
        if state.settling is not None:
            state.settling.bounded(state.upper)

    def _keep(self, state: CGState) -> None:
        """The next block of the basis, where all are kept."""
        V, Z = state.lanczos.current, state.lanczos.weighted
        if state.spanned is not None and self.preconditioner is not None and V is not None and Z is not None:
            state.spanned.add(V, Z, self.preconditioner)

    # --- the end -----------------------------------------------------------------------------------------

    def finish(self, A: Damped, rhs: ParamVector, state: CGState) -> Solution:
        """The solution, which shares x with the state, and its certificate; with ``verify`` after one more product."""
        g, single = as_block(rhs), rhs.columns is None
        shifted = state.shifted(A.damping)  # before a further block is measured
        state = replace(state, events=list(state.events), lanczos=replace(state.lanczos))
        was_met = self._met(state)
        if self.verify:
            self._verify(A, g, state)
        met = self._met(state)
        if bool((was_met & ~met).any()) and not state.failed:
            state.events.append(
                "The measured residual is larger than the recurrence's: products are inexact, or rounding has added "
                "up. Solve again from here (start=solution.value), or in a higher precision."
            )
        elif state.rounded and not bool(met.all()):
            state.events.append(
                "All that is left of the error's bound is rounding, and that is above the tolerance: use a higher "
                "precision."
            )

        def columns(numbers: Tensor) -> Tensor:
            return numbers[0] if single else numbers

        value, zero = state.iterate.column(0) if single else state.iterate, torch.zeros_like(state.upper)
        stats = Statistics(
            solver=self.name,
            residual=columns(state.residual),
            residual_stderr=columns(zero),
            converged=columns(met),
            num_products=state.products,
            num_term_products=state.products * A.num_terms,
            events=tuple(state.events),
            paths=torch.tensor(state.path, dtype=torch.float64).reshape(1, len(state.path), len(met)),
            error_parts=ErrorParts(
                bias=columns(zero),
                sampling=columns(zero),
                certificate=columns(state.upper / state.score_rms.clamp_min(torch.finfo(torch.float64).tiny)),
                expected=None if state.settling is None else columns(state.settling.error(state.upper)),
            ),
            certificate=Certificate(
                columns(state.lower), columns(state.upper), damping=A.damping, operator_terms=A.num_terms
            ),
            score_rms=columns(state.score_rms),
            exhausted=state.exhausted,
            shifted=None if state.failed else shifted,
        )
        return Solution(value, (value,), stats)

    def _verify(self, A: Damped, g: ParamVector, state: CGState) -> None:
        """Measure the residual by a product, and with it the curvature of the next block."""
        x, q = state.iterate, state.iterate.columns or 0
        Z = None if state.failed else state.lanczos.weighted
        probes = [*x.unstack(), *([] if Z is None else Z.unstack())]
        product = finite(A.matvec(ParamVector.stack(probes)))
        state.products += 1
        residual = product.part(0, q).scale_(-1.0).axpy_(1.0, g)
        curvature = None if Z is None else Z.gram(product.part(q, len(probes)), exact=True).cpu()
        self._bounds(A).after_measurement(g, state, residual, curvature)

    def _bounds(self, A: Damped) -> ErrorBounds:
        return ErrorBounds(A.damping, self.preconditioner, self.largest)
