"""LiSSA: stochastic gradient descent on ``½ uᵀ(H + λ)u - uᵀg``, with the paper's settings and error bars.

    u⁰ = g/λ,        u^t = u^{t-1} - η[(H̃_t + λ)u^{t-1} - g],        t = 1 … T

with a fresh batch H̃_t in every step. Theorem 1: in expectation u^T approaches ``u* = (H + λ)⁻¹g`` as ``(1 - ηλ)^T``,
and its mean square error has a floor from sampling that more steps never remove. Averaging the tail of the path removes
it, at the cost of one vector; the last iterate, as in the paper, is available on request.

*Start.* g/λ is exact in flat directions of H, and no iterate needs to be longer than it.
*Chains.* Independent repetitions: their mean is the solution, their spread its standard error.
*Preconditioner.* ``u^t = u^{t-1} - ηP⁻¹[(H̃_t + λ)u^{t-1} - g]`` from ``u⁰ = P⁻¹g``, under a plan that was made for it
(`Plan.preconditioned`).
*Divergence.* ``‖u*‖ ≤ ‖g‖/λ``. A path that leaves this ball, or one that holds its start, too, by a factor is
diverging, whatever the cause (`whence.solvers.divergence`). It goes back a part of its way, where its iterate was kept
in the average's place, or to the average itself, and goes on with a larger batch. Chains that are done go through their
tails again from their averages, as the smaller batch's noise is in these.

Memory, in vectors of the parameters' size, for each right-hand side and beside the model: a step holds the right-hand
side, the iterate and one average per chain begun; and one gradient when a batch does not fit in a single pass, or when
there are several right-hand sides. The residual at the end holds the right-hand side, the chains' averages, their mean,
and two more.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from whence.arguments import check_fields
from whence.errors import OptionError, WhenceWarning
from whence.operators import Damped
from whence.preconditioners import Preconditioner
from whence.preconditioners.base import check_made_for
from whence.solvers.base import Solution, Solver, Statistics
from whence.solvers.divergence import Divergence, answer, left_the_ball
from whence.solvers.held_out import (
    error_parts,
    left_of_default_start,
    left_of_start,
    residual_norm,
    residual_square,
)
from whence.solvers.plan import Plan
from whence.vectors import ParamVector

__all__ = ["Chain", "Lissa", "LissaState"]

#: A solve of more steps than this, over all chains, ends on no machine.
_MOST_PRODUCTS = 10**8
#: Parts of a path before its tail; at the end of each there is a place to go back to.
_PARTS = 8


@dataclass
class Chain:
    """One chain in flight.

    Attributes:
        iterate: u^t.
        average: of the tail so far, before it an iterate to go back to; the iterate itself where only the last one
            counts.
        step: t.
        generator: draws this chain's batches.
    """

    iterate: ParamVector
    average: ParamVector
    step: int
    generator: torch.Generator


@dataclass
class LissaState:
    """A solve in flight.

    Attributes:
        plan: the settings in force, which an answer to divergence may have changed.
        seeds: one per chain.
        generator: state of the solver's own generator, after the seeds were drawn.
        radius: no solution is longer than this, nor a start; per column.
        start: u⁰ of all chains, where it was given.
        chain: the one under way, or None between two.
        finished: averages of the chains that are done.
        halfway: those of chains that were done with smaller batches, whose tails are to come again.
        paths: gᵀu along every chain so far, ``[steps][columns]`` each.
        products, terms: spent so far.
        events, operator: see `whence.solvers.base.State`.
    """

    plan: Plan
    seeds: list[int]
    generator: Tensor
    radius: Tensor
    start: ParamVector | None = None
    chain: Chain | None = None
    finished: list[ParamVector] = field(default_factory=list, metadata={"appended": True})
    halfway: list[ParamVector] = field(default_factory=list)
    paths: list[list[list[float]]] = field(default_factory=list)
    products: int = 0
    terms: int = 0
    events: list[str] = field(default_factory=list)
    operator: Mapping[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Lissa(Solver[LissaState]):
    """LiSSA under a `Plan`.

    Args:
        plan: step size, batch size, number of steps and of chains.
        average: ``"tail"`` returns the mean of the last part of the path, ``"last"`` its last point.
        tail: the part of the path that is averaged.
        recover: answer divergence by a smaller step or a larger batch (with a warning), or raise at once.
        residual_batches: held-out batches for the residual, four times the plan's size each.
        converged_residual: the residual, relative to ‖g‖, at which a solution counts as converged.
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

    name: ClassVar[str] = "lissa"
    independent: ClassVar[bool] = True
    state_type: ClassVar[type[LissaState]] = LissaState

    plan: Plan
    average: Literal["tail", "last"] = "tail"
    tail: float = 0.5
    recover: bool = True
    residual_batches: int = 8
    converged_residual: float = 0.5
    preconditioner: Preconditioner | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.average not in ("tail", "last"):
            raise OptionError(f"average is {self.average!r}; it must be 'tail' or 'last'")
        if not 0 < self.tail <= 1:
            raise OptionError(f"tail is {self.tail}; it is the averaged part of the path, in (0, 1]")
        if self.residual_batches < 2:
            raise OptionError(f"residual_batches is {self.residual_batches}; an estimate needs at least 2")

    def check(self, A: Damped, rhs: ParamVector, start: ParamVector | None) -> None:
        """Refuse a system that plan or preconditioner were not made for."""
        if self.preconditioner is None:
            check_made_for(A, self.plan.damping, "plan")
        else:
            check_made_for(A, self.preconditioner.damping)
        if self.plan.num_products > _MOST_PRODUCTS:
            raise OptionError(
                f"the plan asks for {self.plan.num_products:.2g} steps, as λmax/λ is "
                f"{self.plan.condition_number:.2g} and LiSSA takes about twice that in each of "
                f"{self.plan.chains} chains. Use solver='cg', or a larger damping"
            )
        if self.plan.batch_size > A.num_terms:
            raise OptionError(
                f"the plan asks for batches of {self.plan.batch_size} terms, the data hold {A.num_terms}. "
                "Use more data, a smaller C, or a full-batch solver"
            )

    def made_for(self) -> Plan:
        """The plan."""
        return self.plan

    # --- solving -----------------------------------------------------------------------------------------

    def begin(
        self, A: Damped, rhs: ParamVector, *, generator: torch.Generator, start: ParamVector | None = None
    ) -> LissaState:
        """Nothing done yet; draws the chains' seeds.

        A start that all chains share leaves a part of its error in all of them, which their spread does not show.
        """
        seeds = torch.randint(2**62, (self.plan.chains,), generator=generator, device=generator.device)
        radius = rhs.norm() / A.damping
        if start is not None:
            radius = torch.maximum(radius, start.norm())
        return LissaState(self.plan, seeds.tolist(), generator.get_state(), radius, start)

    def step(self, A: Damped, rhs: ParamVector, state: LissaState) -> None:
        """One step of the chain under way, or of the next; a path that diverges goes back, and on more cautiously."""
        if state.chain is None:
            state.chain = self._chain(A, rhs, state)
            here = state.chain.iterate.dot(rhs).reshape(-1).tolist() if state.chain.step else []
            state.paths.append([here] * state.chain.step)
        chain, plan = state.chain, state.plan
        A_t = self.update(chain, A, rhs, plan)
        state.products += 1
        state.terms += plan.batch_size
        if left_the_ball(chain.iterate, state.radius):
            diverged = Divergence(chain.iterate, chain.step, state.radius, A, plan, self.preconditioner, A_t)
            self._go_back(A, rhs, state, chain, diverged)
            return
        kept = self.averaged(plan).start
        if self.average == "tail" and chain.step >= kept:
            chain.average.lerp_(chain.iterate, 1 / (chain.step - kept + 1))
        elif self.average == "tail" and chain.step % self._part(plan) == 0:
            chain.average.copy_(chain.iterate)
        state.paths[-1].append(chain.iterate.dot(rhs).reshape(-1).tolist())
        if chain.step >= plan.num_steps:
            state.finished.append(chain.average)
            state.chain = None  # its iterate is a copy of the model, and not needed any more

    def update(self, chain: Chain, A: Damped, rhs: ParamVector, plan: Plan) -> Damped:
        """``u ← u - η[(H̃_t + λ)u - g]``, and no judgement of it. Returns the batch's system ``H̃_t + λ``."""
        A_t = A.sample(plan.batch_size, chain.generator)
        if self.preconditioner is None:  # added in place, parameter by parameter
            A_t.add_matvec_(chain.iterate, chain.iterate, -plan.step_size)
            chain.iterate.axpy_(plan.step_size, rhs)
        else:
            residual = A_t.matvec(chain.iterate).axpy_(-1.0, rhs)
            chain.iterate.axpy_(-plan.step_size, self.preconditioner.solve(residual))
        chain.step += 1
        return A_t

    def done(self, state: LissaState) -> bool:
        """Whether all chains have come to their ends."""
        return len(state.finished) >= state.plan.chains

    def progress(self, state: LissaState) -> tuple[int, int]:
        """Steps of all chains."""
        under_way = 0 if state.chain is None else state.chain.step
        return len(state.finished) * state.plan.num_steps + under_way, state.plan.num_products

    def finish(self, A: Damped, rhs: ParamVector, state: LissaState) -> Solution:
        """The chains' mean, with what held-out batches show of its error."""
        value, plan = ParamVector.mean(state.finished), state.plan
        generator = torch.Generator()
        generator.set_state(state.generator)
        batch = min(4 * plan.batch_size, A.num_terms)
        square = residual_square(A, value, rhs, self.residual_batches, batch, generator)
        residual, stderr = residual_norm(*square)
        preconditioned, given = self.preconditioner is not None, state.start is not None
        left = (
            left_of_start(plan, self.averaged(plan))
            if given
            else left_of_default_start(plan, self.averaged(plan), preconditioned=preconditioned)
        )
        parts = error_parts(
            A,
            value,
            state.finished,
            left=left,
            start=state.start,
            in_energy=given or preconditioned,
            terms=batch,
            generator=generator,
        )
        stats = Statistics(
            solver=self.name,
            residual=residual,
            residual_stderr=stderr,
            converged=residual - 2 * stderr <= self.converged_residual,
            num_products=state.products + self.residual_batches,
            num_term_products=state.terms + self.residual_batches * batch,
            events=tuple(state.events),
            paths=torch.tensor(state.paths, dtype=torch.float64),
            error_parts=parts,
            plan=plan,
        )
        return Solution(value, tuple(state.finished), stats)

    def averaged(self, plan: Plan) -> range:
        """The steps whose points are averaged: the last part of the path, or its end."""
        kept = max(1, round(self.tail * plan.num_steps)) if self.average == "tail" else 1
        return range(plan.num_steps - kept + 1, plan.num_steps + 1)

    def _chain(self, A: Damped, rhs: ParamVector, state: LissaState) -> Chain:
        """The next chain, with a random stream of its own."""
        seed, step = state.seeds[len(state.finished)] + len(state.events), 0
        if state.halfway:
            iterate = state.halfway.pop(0).clone()
            step = self.averaged(state.plan).start - 1 if self.average == "tail" else 0
        else:
            iterate = self._start(A, rhs, state)
        average = iterate.zeros_like() if self.average == "tail" else iterate
        return Chain(iterate, average, step, torch.Generator().manual_seed(seed))

    def _start(self, A: Damped, rhs: ParamVector, state: LissaState) -> ParamVector:
        """``u⁰``: g/λ, ``P⁻¹g``, or as it was given."""
        if state.start is not None:
            return state.start.clone()
        if self.preconditioner is not None:
            return self.preconditioner.solve(rhs)
        return rhs.clone().scale_(1 / A.damping)

    def _part(self, plan: Plan) -> int:
        """Steps between places to go back to."""
        return max(1, (self.averaged(plan).start - 1) // _PARTS)

    def _go_back(
        self, A: Damped, rhs: ParamVector, state: LissaState, chain: Chain, diverged: Divergence
    ) -> None:
        """From the last place that was kept, by a more cautious plan; from the start where there was none."""
        old, kept = state.plan, self.averaged(state.plan).start
        plan = answer(diverged, A, old, attempt=len(state.events), recover=self.recover)
        back = min(
            chain.step - 1, kept - 1
        )  # in the tail, the average is as good a place as the path's before it
        back = 0 if self.average == "last" else back if chain.step > kept else back - back % self._part(old)
        del state.paths[-1][back:]
        if back:
            chain.iterate.copy_(chain.average)
        else:
            chain.iterate.copy_(self._start(A, rhs, state))
        chain.step = back
        anew = plan.step_size != old.step_size
        # by another step all have another bias; of noise, smaller batches have more than an equal share in a mean
        state.halfway = [] if anew else [*state.finished, *state.halfway]
        state.finished, state.paths = [], [[] if anew else state.paths[-1]]
        if anew:  # what the start left is smaller where the path goes on from: a whole path from there has less bias
            chain.step = 0
        state.plan = plan
        settings = f"η = {plan.step_size:.3g}, |B| = {plan.batch_size:,}, T = {plan.num_steps:,}"
        again = ", and all chains anew" if anew else ""
        state.events.append(f"{diverged.message} Going on from step {back} with {settings}{again}.")
        warnings.warn(state.events[-1], WhenceWarning, stacklevel=4)
