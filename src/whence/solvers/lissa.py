"""LiSSA: stochastic gradient descent on ``½ uᵀ(H + λ)u - uᵀg``, with the paper's settings and error bars.

    u⁰ = g/λ,        u^t = u^{t-1} - η[(H̃_t + λ)u^{t-1} - g],        t = 1 … T

with a fresh batch H̃_t in every step. Theorem 1: in expectation u^T approaches ``u* = (H + λ)⁻¹g`` as ``(1 - ηλ)^T``,
and its mean square error has a floor from sampling that more steps never remove. Averaging the tail of the
path removes it, at no cost but one vector; the last iterate, as in the paper, is available on request.

*Start.* g/λ is exact in flat directions of H, and no iterate needs to be longer than it.
*Chains.* Independent repetitions: their mean is the solution, their spread its standard error.
*Preconditioner.* ``u^t = u^{t-1} - ηP⁻¹[(H̃_t + λ)u^{t-1} - g]`` from ``u⁰ = P⁻¹g``: plain LiSSA in the coordinates
``P^{1/2}u``, where the matrix is ``P^{-1/2}HP^{-1/2}`` and the smallest eigenvalue of the system takes λ's place. The
plan must be made for that matrix (`Plan.preconditioned`): the batch bound grows as the steps get longer, and what is
saved in the end is ``Tr(P⁻¹H)`` instead of ``Tr(H)/λ`` in the cost ``T·|B| ≈ 2C·Tr(P⁻¹H)``.
*Divergence.* ``‖u*‖ ≤ ‖g‖/λ``. A path that leaves this ball (or one that holds its start, too) by a factor is
diverging, whatever the cause; a quadratic form along the direction in which it left tells the cause. See
`whence.solvers.divergence`.

Memory, in vectors of the parameters' size, for each right-hand side and beside the model: a step holds the
right-hand side, the iterate and one average per chain begun; and one gradient when a batch does not fit in a
single pass, or when there are several right-hand sides. The residual at the end holds the right-hand side,
the chains' averages, their mean, and two more.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from whence.errors import OptionError, VectorError, WhenceWarning
from whence.operators import Damped
from whence.preconditioners import Preconditioner
from whence.progress import ticker
from whence.solvers.base import Solution, Solver, check_right_hand_side
from whence.solvers.divergence import Divergence, answer, left_the_ball
from whence.solvers.error_parts import left_of_default_start, left_of_start, measured_parts
from whence.solvers.journal import Chain, Journal, SolveState
from whence.solvers.plan import Plan
from whence.solvers.residual import residual_norm
from whence.vectors import ParamVector

__all__ = ["Chain", "Lissa"]


@dataclass(frozen=True)
class Lissa(Solver):
    """LiSSA under a `Plan`.

    Args:
        plan: step size, batch size, number of steps and of chains.
        average: ``"tail"`` returns the mean of the last part of the path, ``"last"`` its last point.
        tail: the part of the path that is averaged.
        recover: answer divergence by a smaller step or a larger batch (with a warning), or raise at once.
        residual_batches: held-out batches for the residual, four times the plan's size each.
        tolerance: the residual, relative to ‖g‖, at which a solution counts as converged.
        preconditioner: P, for which the plan was made; None for the paper's LiSSA.

    Example:
        >>> from whence import Dense, FiniteSum, Damped, ParamVector, estimate_spectrum
        >>> g = torch.Generator().manual_seed(0)
        >>> H = FiniteSum([torch.diag(torch.tensor([1.0, 0.1 * k])) for k in range(8)])
        >>> plan = Plan.from_spectrum(estimate_spectrum(H, generator=g), damping=0.1)
        >>> solution = Lissa(plan).solve(Damped(H, 0.1), ParamVector({"x": torch.ones(2)}), generator=g)
        >>> bool(solution.converged)
        True
    """

    plan: Plan
    average: Literal["tail", "last"] = "tail"
    tail: float = 0.5
    recover: bool = True
    residual_batches: int = 8
    tolerance: float = 0.5
    preconditioner: Preconditioner | None = None

    def __post_init__(self) -> None:
        if self.average not in ("tail", "last"):
            raise OptionError(f"average is {self.average!r}; it must be 'tail' or 'last'")
        if not 0 < self.tail <= 1:
            raise OptionError(f"tail is {self.tail}; it is the averaged part of the path, in (0, 1]")
        if self.residual_batches < 2:
            raise OptionError(f"residual_batches is {self.residual_batches}; an estimate needs at least 2")

    def solve(
        self,
        A: Damped,
        rhs: ParamVector,
        *,
        generator: torch.Generator,
        journal: Journal | None = None,
        start: ParamVector | Sequence[ParamVector] | None = None,
    ) -> Solution:
        """Solve ``A u = g`` for one right-hand side or a block; a block shares every batch.

        Args:
            A: the damped operator; its damping must be the plan's, or the preconditioner's.
            rhs: g.
            generator: all randomness comes from here.
            journal: keeps the solve safe on its way, and hands it back to go on with.
            start: u⁰ of every chain, or one for each; g/λ or P⁻¹g by default. What is left of the error of a start that
                all chains share is common to them, so their spread does not show it.
        """
        state = self.run(A, rhs, generator=generator, journal=journal, start=start)
        value, plan = ParamVector.mean(state.finished), state.plan
        batch = min(4 * plan.batch_size, A.num_terms)
        residual, stderr = residual_norm(A, value, rhs, self.residual_batches, batch, generator)
        preconditioned, given = self.preconditioner is not None, start is not None
        steps = self.averaged(plan)
        parts = measured_parts(
            A,
            value,
            state.finished,
            left=left_of_start(plan, steps)
            if given
            else left_of_default_start(plan, steps, preconditioned=preconditioned),
            start=start if start is None or isinstance(start, ParamVector) else ParamVector.mean(start),
            in_energy=given or preconditioned,
            certificate=None,
            terms=batch,
            generator=generator,
        )
        return Solution(
            value=value,
            chains=tuple(state.finished),
            residual=residual,
            residual_stderr=stderr,
            converged=residual - 2 * stderr <= self.tolerance,
            num_products=state.products + self.residual_batches,
            num_term_products=state.terms + self.residual_batches * batch,
            events=tuple(state.events),
            plan=plan,
            paths=torch.tensor(state.paths, dtype=torch.float64),
            error_parts=parts,
        )

    def run(
        self,
        A: Damped,
        rhs: ParamVector,
        *,
        generator: torch.Generator,
        journal: Journal | None = None,
        start: ParamVector | Sequence[ParamVector] | None = None,
        watch: ParamVector | None = None,
    ) -> SolveState:
        """All chains to their ends, without a judgement of the result; the paths are ``wᵀu`` with w = ``watch``."""
        self.check(A)
        check_right_hand_side(A, rhs)
        starts = self._starts(rhs, start)
        state = None if journal is None else journal.restore()
        if state is None:
            state = SolveState.begin(self.plan, generator)
        else:
            generator.set_state(state.generator)
            A.operator.restore_state(state.operator)
        while len(state.finished) < state.plan.chains:
            self._run_chain(
                A, rhs, state, journal, starts[len(state.finished)], rhs if watch is None else watch
            )
        return state

    def _run_chain(
        self,
        A: Damped,
        rhs: ParamVector,
        state: SolveState,
        journal: Journal | None,
        start: ParamVector | None,
        watch: ParamVector,
    ) -> None:
        """Begin or go on with the next chain, to its end; or begin all again more cautiously if it diverges."""
        number, plan = len(state.finished), state.plan
        if state.chain is None:
            state.chain = self.start(A, rhs, state.seeds[number], at=start)
            state.paths.append([])
        chain, path = state.chain, state.paths[number]
        with ticker(f"chain {number + 1} of {plan.chains}", plan.num_steps, done=chain.step) as tick:

            def on_step() -> None:
                path.append(chain.iterate.dot(watch).reshape(-1).tolist())
                state.operator = A.operator.state()
                if journal is not None:
                    journal.record(state)
                tick()

            diverged = self.advance(chain, A, rhs, plan, on_step=on_step, start=start)
        state.chain = None  # its iterate is not needed any more, and is a copy of the model
        state.products += chain.step
        state.terms += chain.step * plan.batch_size
        if diverged is None:
            state.finished.append(chain.average)
        else:
            state.begin_again(answer(diverged, A, plan, attempt=len(state.events), recover=self.recover))
            state.events.append(f"{diverged.message} Starting again with {_settings(state.plan)}.")
            warnings.warn(state.events[-1], WhenceWarning, stacklevel=3)
        if journal is not None:
            state.operator = A.operator.state()  # telling the cause of a divergence took a product, too
            journal.record(state, now=True)

    def start(self, A: Damped, rhs: ParamVector, seed: int, *, at: ParamVector | None = None) -> Chain:
        """A chain at ``u⁰ = g/λ``, ``P⁻¹g``, or where it is told to begin, with a random stream of its own."""
        if at is not None:
            iterate = at.clone()
        elif self.preconditioner is not None:
            iterate = self.preconditioner.solve(rhs)
        else:
            iterate = rhs.clone().scale_(1 / A.damping)
        average = iterate.zeros_like() if self.average == "tail" else iterate
        return Chain(iterate, average, 0, torch.Generator().manual_seed(seed))

    def advance(
        self,
        chain: Chain,
        A: Damped,
        rhs: ParamVector,
        plan: Plan,
        *,
        until: int | None = None,
        on_step: Callable[[], None] | None = None,
        start: ParamVector | None = None,
    ) -> Divergence | None:
        """Run a chain to step ``until`` (by default to its end); says so if it diverges on the way.

        A chain that was told where to begin may be longer than any solution: ``start`` is what it is measured with.
        """
        burn_in = self.averaged(plan).start - 1
        radius = rhs.norm() / A.damping
        if start is not None:
            radius = torch.maximum(radius, start.norm())
        while chain.step < (plan.num_steps if until is None else until):
            A_t = A.sample(plan.batch_size, chain.generator)
            if self.preconditioner is None:
                # u ← u - η[(H̃_t + λ)u - g], added in place, parameter by parameter
                A_t.add_matvec_(chain.iterate, chain.iterate, -plan.step_size)
                chain.iterate.axpy_(plan.step_size, rhs)
            else:
                residual = A_t.matvec(chain.iterate).axpy_(-1.0, rhs)
                chain.iterate.axpy_(-plan.step_size, self.preconditioner.solve(residual))
            chain.step += 1
            if left_the_ball(chain.iterate, radius):
                return Divergence(chain.iterate, chain.step, radius, A, plan, self.preconditioner, A_t)
            if self.average == "tail" and chain.step > burn_in:
                chain.average.lerp_(chain.iterate, 1 / (chain.step - burn_in))
            if on_step is not None:
                on_step()
        return None

    def averaged(self, plan: Plan) -> range:
        """The steps whose points are averaged: the last part of the path, or its end."""
        kept = max(1, round(self.tail * plan.num_steps)) if self.average == "tail" else 1
        return range(plan.num_steps - kept + 1, plan.num_steps + 1)

    def _starts(
        self, rhs: ParamVector, start: ParamVector | Sequence[ParamVector] | None
    ) -> Sequence[ParamVector | None]:
        """One for each chain."""
        if start is None:
            return [None] * self.plan.chains
        starts = [start] * self.plan.chains if isinstance(start, ParamVector) else start
        if len(starts) != self.plan.chains:
            raise VectorError(
                f"there are {len(starts)} starts for {self.plan.chains} chains; give one for each, or one for all"
            )
        for each in starts:
            rhs.check_same_form(each, "start")
            if not each.is_finite():
                raise VectorError(
                    "a start holds NaN or infinity; leave it out to start from the right-hand side"
                )
        return starts

    def check(self, A: Damped) -> None:
        """Refuse a system that plan or preconditioner were not made for."""
        if not isinstance(A, Damped):
            raise OptionError(
                f"LiSSA solves a damped system; wrap the operator: Damped(operator, {self.plan.damping})"
            )
        made_for, whose = (
            (self.plan.damping, "plan")
            if self.preconditioner is None
            else (self.preconditioner.damping, "preconditioner")
        )
        if abs(A.damping - made_for) > 1e-9 * made_for:
            raise OptionError(
                f"the system's damping is {A.damping}, the {whose} was made for {made_for}; make both from one value"
            )
        if self.plan.batch_size > A.num_terms:
            raise OptionError(
                f"the plan asks for batches of {self.plan.batch_size} terms, the data hold {A.num_terms}. "
                "Use more data, a smaller C, or a full-batch solver"
            )


def _settings(plan: Plan) -> str:
    return f"η = {plan.step_size:.3g}, |B| = {plan.batch_size:,}, T = {plan.num_steps:,}"
