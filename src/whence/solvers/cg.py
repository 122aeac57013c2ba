"""Conjugate gradients for ``(H + λ)u = g``: one Krylov space for all right-hand sides, and proven bounds of the error.

A = H + λ, P a preconditioner or the identity. On top of `BlockLanczos`, with its α and β, a block LDLᵀ of T:

    d_j = α_j - β_j d_{j-1}⁻¹ β_jᵀ,      S_j = Z_j - S_{j-1} d_{j-1}⁻¹ β_jᵀ,      x_j = x_{j-1} + S_j d_j⁻¹ ζ_j
    ζ_{j+1} = -β_{j+1} d_j⁻¹ ζ_j,      g - A x_j = V_{j+1} ζ_{j+1},      ‖e_{j-1}‖²_A - ‖e_j‖²_A = diag(ζ_jᵀ d_j⁻¹ ζ_j)

with ``ζ_1 = β_0``, e_j the error of x_j, and ``‖e‖²_A = eᵀAe``; `whence.solvers.certificate` bounds what is left of it.
A block of q shares one space: every product adds q directions to it for all of them, so that fewer products do than
for a single right-hand side. Small matrices are float64, whatever the vectors are.

Memory, in vectors of the parameters' size, for each right-hand side and beside the model: g, x, the last two blocks V,
S, and two more during a step; with a preconditioner P⁻¹V, and three. The product that verifies takes two blocks more,
and ``keep_basis`` one for every iteration.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from whence.errors import OptionError, VectorError
from whence.operators import Damped
from whence.preconditioners import Preconditioner
from whence.progress import ticker
from whence.solvers.base import Solution, Solver, check_right_hand_side
from whence.solvers.block_lanczos import BlockLanczos, as_block, column_dots, finite
from whence.solvers.certificate import Certificate, cholesky
from whence.solvers.cg_bounds import ErrorBounds
from whence.solvers.cg_state import CGState
from whence.solvers.error_parts import ErrorParts
from whence.solvers.settling import Settling
from whence.solvers.spanned import Spanned
from whence.vectors import ParamVector

__all__ = ["CGState", "ConjugateGradient"]

#: What one of several columns may be off by, in units of the error that is asked of them together.
_WORST = 2.0


@dataclass(frozen=True, kw_only=True)
class ConjugateGradient(Solver):
    """Conjugate gradients until the scores are proven to be right to a tolerance.

    The stopping rule is about scores. An error e of the solution changes the score of an example z by ``∇ℓ(z)ᵀe``, and
    ``E_z (∇ℓ(z)ᵀe)² = eᵀHe ≤ ‖e‖²_A`` when labels are drawn from the model; the scores' own mean square is
    ``E_z (∇ℓ(z)ᵀu)² = ‖u‖²_H``. So ``‖e‖_A ≤ tolerance · ‖u‖_H`` bounds the root-mean-square error of the scores
    relative to the scores. The left side is the proven upper bound; on the right, ``‖u‖²_H = gᵀu - rᵀu - λ‖u‖²`` with
    the residual r.

    The scores of real examples may be right long before, where these are made of many terms; or long after, where the
    model is sure of their labels, so that they differ from those it would draw. With ``score_error`` their own expected
    error decides instead; see `whence.solvers.settling`.

    Args:
        tolerance: the relative error of the scores, in root mean square, to stop at.
        score_error: the expected error of the examples' scores, relative to their spread, to stop at in place of the
            tolerance: in root mean square over columns, none of them twice as far off. None for the tolerance, which
            also decides where an operator has no examples, or very few of them, and on a subset.
        max_iterations: products to spend at most, one more for a start and one to verify not counted.
        subset: solve on a fixed random subset of so many terms; the certificate is about the subset's solution.
        preconditioner: P ≈ H + λ. Its `smallest` must hold for the operator that is solved with. For a subset drawn
            here it cannot, and the error's bound is then ``‖r‖/√λ``.
        largest: an upper bound of the eigenvalues of the H that is solved with: bounds the error from below for free,
            and tells how far rounding goes, which a preconditioner hides.
        keep_basis: keep all blocks V, to prove errors where a preconditioner's `smallest` says little: see
            `whence.solvers.spanned`. Without a preconditioner nothing is gained, and nothing kept.
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

    tolerance: float = 0.1
    score_error: float | None = None
    max_iterations: int = 100
    subset: int | None = None
    preconditioner: Preconditioner | None = None
    largest: float | None = None
    keep_basis: bool = False
    verify: bool = True

    def __post_init__(self) -> None:
        if not 0 < self.tolerance < math.inf:
            raise OptionError(f"tolerance is {self.tolerance}; give a positive number, such as 0.1")
        if self.score_error is not None and not 0 < self.score_error < math.inf:
            raise OptionError(
                f"score_error is {self.score_error}; give a positive number, such as 0.1, or None"
            )
        if self.max_iterations < 1:
            raise OptionError(f"max_iterations is {self.max_iterations}; it must be at least 1")
        if self.subset is not None and self.subset < 1:
            raise OptionError(f"subset is {self.subset}; give a number of terms, or None for all data")
        if self.largest is not None and not 0 < self.largest < math.inf:
            raise OptionError(f"largest is {self.largest}; give an upper bound of H's eigenvalues, or None")
        if self.preconditioner is not None and not isinstance(self.preconditioner, Preconditioner):
            raise OptionError(
                f"the preconditioner is a {type(self.preconditioner).__name__}; give a Preconditioner, or None"
            )

    # --- solving -----------------------------------------------------------------------------------------

    def solve(
        self,
        A: Damped,
        rhs: ParamVector,
        *,
        generator: torch.Generator,
        start: ParamVector | None = None,
        state: CGState | None = None,
        on_iteration: Callable[[CGState], bool | None] | None = None,
    ) -> Solution:
        """Solve ``A u = g`` for one right-hand side, or for a block of them together.

        Args:
            A: the damped operator.
            rhs: g.
            generator: draws the subset, if there is one.
            start: x₀, of the right-hand side's form; zero by default. Costs a product.
            state: a solve of the same system to go on with, as ``on_iteration`` was given it.
            on_iteration: called after every iteration with the state, which it may save; True stops the solve.

        Returns:
            A `Solution` of one chain with a `Certificate`. Nothing is random, so ``residual_stderr`` is zero; the
            residual is the measured one with ``verify``, else the recurrence's. Products count whole blocks.
        """
        self._check(A, rhs, start)
        whole, origin = A, generator.get_state()
        if state is not None and state.generator is not None:
            origin = state.generator
            generator.set_state(origin)
        if self.subset is not None:
            A.check_batch_size(self.subset)
            A = A.subset(self.subset, generator)
        if state is None:
            state = self.begin(A, rhs, start)
            state.events += self._reservations(whole.num_terms)
            state.generator = origin
        else:
            whole.operator.restore_state(state.operator)

        def after(state: CGState) -> bool:
            state.operator = whole.operator.state()  # a subset's products share the memory of the whole
            return on_iteration is not None and bool(on_iteration(state))

        self.advance(A, rhs, state, on_iteration=after)
        return self.finish(A, rhs, state)

    def begin(self, A: Damped, rhs: ParamVector, start: ParamVector | None = None) -> CGState:
        """The state before the first iteration. Costs a product if there is a start."""
        g = as_block(rhs)
        x, residual, slopes = g.zeros_like(), g, None
        if start is not None:
            x.copy_(as_block(start)).scale_((column_dots(g, g) > 0).double())  # g = 0 has the solution 0
            product, slopes = A.matvec_with_slopes(x) if self._watches else (A.matvec(x), None)
            residual = finite(product).scale_(-1.0).axpy_(1.0, g)
        lanczos, zeta, left_out = BlockLanczos.begin(residual, self.preconditioner)
        lanczos.norm = 0.0 if self.largest is None else self.largest + A.damping
        state = CGState.begin(x, lanczos, zeta, left_out.diagonal().clamp_min(0.0).sqrt())
        state.trusted = self.preconditioner is None or self.subset is None
        if self.keep_basis and self.preconditioner is not None:
            state.spanned = Spanned()
        self._keep(state)
        state.products = int(start is not None)
        state.settling = None if slopes is None else Settling.begin(slopes)
        zero = torch.zeros_like(state.energy)
        self._bounds(A).after_step(g, state, decrease=zero, length=zero)
        return state

    def advance(
        self,
        A: Damped,
        rhs: ParamVector,
        state: CGState,
        *,
        until: int | None = None,
        on_iteration: Callable[[CGState], bool | None] | None = None,
    ) -> None:
        """Go on until the tolerance is met or the iterations are spent, or to iteration ``until``."""
        g = as_block(rhs)
        limit = self.max_iterations if until is None else min(until, self.max_iterations)
        with ticker("conjugate gradients", self.max_iterations, done=state.iteration) as tick:
            while state.iteration < limit and not self.done(state):
                self._step(A, g, state)
                tick()
                if on_iteration is not None and on_iteration(state):
                    state.events.append(f"Stopped by the caller after {state.iteration} iterations.")
                    break

    def done(self, state: CGState) -> bool:
        """Whether the tolerance is met, or no step can help: all that is left is rounding, or A is not positive."""
        return bool(self._met(state).all()) or state.rounded or state.lanczos.current is None or state.failed

    @property
    def _watches(self) -> bool:
        return self.score_error is not None and self.subset is None

    def _met(self, state: CGState) -> Tensor:
        """Which columns are done: their scores have settled, or where these are not known, are proven right."""
        if self.score_error is None or state.settling is None:
            return state.upper <= self.tolerance * state.score_rms
        error = state.settling.error(state.upper)
        return (error <= _WORST * self.score_error) & (error.square().mean() <= self.score_error**2)

    def _step(self, A: Damped, g: ParamVector, state: CGState) -> None:
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

        value = state.iterate.column(0) if single else state.iterate
        return Solution(
            value=value,
            chains=(value,),
            residual=columns(state.residual),
            residual_stderr=columns(torch.zeros_like(state.residual)),
            converged=columns(met),
            num_products=state.products,
            num_term_products=state.products * A.num_terms,
            events=tuple(state.events),
            paths=torch.tensor(state.path, dtype=torch.float64).reshape(1, len(state.path), len(met)),
            certificate=Certificate(
                lower=columns(state.lower),
                upper=columns(state.upper),
                damping=A.damping,
                operator_terms=A.num_terms,
                subset=self.subset is not None,
            ),
            score_rms=columns(state.score_rms),
            error_parts=ErrorParts(
                bias=columns(
                    others := torch.full_like(state.upper, 0.0 if self.subset is None else math.nan)
                ),
                sampling=columns(others),  # one subset does not tell how another would differ
                certificate=columns(state.upper / state.score_rms.clamp_min(torch.finfo(torch.float64).tiny)),
                expected=None if state.settling is None else columns(state.settling.error(state.upper)),
            ),
        )

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

    # --- checks ------------------------------------------------------------------------------------------

    def _check(self, A: Damped, rhs: ParamVector, start: ParamVector | None) -> None:
        if not isinstance(A, Damped):
            raise OptionError(
                "conjugate gradients solve a damped system; wrap the operator: Damped(operator, damping)"
            )
        check_right_hand_side(A, rhs)
        P = self.preconditioner
        if P is not None and abs(P.damping - A.damping) > 1e-9 * A.damping:
            raise OptionError(
                f"the system's damping is {A.damping}, the preconditioner was made for {P.damping}; "
                "make both from one value"
            )
        if P is not None and not 0 < P.smallest < math.inf:
            raise OptionError(f"the preconditioner's smallest is {P.smallest}; it must be a positive number")
        if start is not None:
            A.zeros().check_same_space(start, "start")
            if start.columns != rhs.columns:
                raise VectorError(f"the start {start!r} has another form than the right-hand side {rhs!r}")
            if not start.is_finite():
                raise VectorError("the start holds NaN or infinity; leave it out to start from zero")

    def _reservations(self, terms: int) -> list[str]:
        if self.subset is None:
            return []
        said = [
            f"Solved on {self.subset:,} of {terms:,} terms: the certificate is about the subset's solution."
        ]
        if self.preconditioner is not None:
            said.append("The preconditioner was not made for this subset: the error is bounded by ‖r‖/√λ.")
        return said
