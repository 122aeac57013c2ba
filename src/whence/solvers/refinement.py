"""Refinement: solve on small subsets, finish on the whole training set.

Each of the m chains does both on its own, so that all of them are independent:

    1. conjugate gradients on a subset S of its own:    (H_S + λ)ũ = g
    2. averaged steps on fresh batches from there:      u ← u - ηP⁻¹[(H̃ + λ)u - g]

**What the start is off by.** With A = H + λ, exactly ``ũ - u* = -A⁻¹(H_S - H)ũ``. For terms of the kind of condition
C.1 and s of them in S, its relative variance in the scores is ``C·d₂(λ)/s`` (`Density.sampling_error`), its relative
bias about ``C·d(λ)/s``: the subset's solution is too long. The variance is each chain's own, so the chains' spread
shows what the steps leave of it; of the bias they leave the part that `whence.solvers.error_parts` bounds. Chains that
share one subset of m·s terms begin nearer, but have in common what they should differ by: on digits their 95% intervals
covered as little as 77% of the scores, with a snapshot 26%; those of chains with subsets of their own, 89% to 96%.

**Control variates on a snapshot.** Let v be near u*, and ``r = g - Av`` over all n terms, one pass. The step

    u ← u - ηP⁻¹[(H̃ + λ)(u - v) - r]

has the same mean, and its noise is ``(H̃ - H)(u - v)`` in place of ``(H̃ - H)u``. As A is linear, these are LiSSA's
steps for the *correction equation* ``A d = r`` with d = u - v, begun at d = ũ - v; `Lissa` runs them, guard and
recovery included. The snapshot is ``v = σ·w`` with w the mean of the chains' starts and ``σ = gᵀw / wᵀAw``, the length
at which ``½vᵀAv - gᵀv`` is least: that takes most of the subsets' bias out of v, and the pass tells it for nothing.

**When a snapshot pays.** N averaged terms leave ``ε² = C·d₂/N`` of the scores' mean square. With a snapshot the same
steps leave 1 to 2 times ``ω·ε²`` (measured), where ω is the relative variance of the chains' starts. To get there
without it, the steps would have to go through L/2ω terms in place of L. So it pays if ``n + L < L/2ω``: where the data
are few and the starts good, or the steps many, because much accuracy is asked for. The rule has 3 for 2, as less noise
lays bare what bias the starts had: where they are poor, no snapshot is taken.

**What does not pay**, and is not here. *r from N fresh terms*: they leave ``C·d₂/N``, the steps ``C·d₂δ²/L`` with δ the
length of the correction. For N + L terms in all that is ``(1 + δ)²C·d₂/(N + L)`` at best, and averaged steps alone get
``C·d₂/(N + L)``. *The subset's own inverse* as that of the correction, ``d = A_S⁻¹r``: what S does not see of A looks
flat to it, and with fewer than some ten terms per effective dimension d(λ) the error grows.

Memory, in vectors of the parameters' size, for each right-hand side and beside LiSSA's: the chains' starts, one each,
their mean, and with a snapshot two more. Conjugate gradients come first, and need their own eight instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from whence.errors import OptionError
from whence.operators import Damped
from whence.preconditioners import LowRank, Preconditioner
from whence.solvers.base import Solution, Solver, check_right_hand_side
from whence.solvers.cg import ConjugateGradient
from whence.solvers.error_parts import left_of_start, measured_parts, relative_spread
from whence.solvers.journal import Journal
from whence.solvers.lissa import Lissa
from whence.solvers.plan import Plan
from whence.solvers.residual import residual_norm
from whence.vectors import ParamVector

__all__ = ["Refinement", "snapshot_pays"]

#: Noise that a snapshot leaves, in units of the relative variance of the starts, and some room.
_LEFT_OF_NOISE = 3.0
#: Where conjugate gradients stop: at this error; with a preconditioner, when an iteration has gained this little.
_START_ERROR, _START_GAIN = 0.05, 0.3
#: No starts are expected to have less: their subsets would have to be as large as all of the steps together.
_BEST_SPREAD = 0.01


def snapshot_pays(num_terms: int, step_terms: int, spread: float) -> bool:
    """Whether one pass over the data buys more than as many further steps: ``n + L < L/3ω``.

    Args:
        num_terms: n.
        step_terms: L, terms of all steps of all chains together.
        spread: ω, the relative variance of one chain's start, ``E‖ũ - Eũ‖²_H / ‖Eũ‖²_H``, about ``C·d₂(λ)/s`` for
            subsets of s terms.
    """
    return (num_terms + step_terms) * _LEFT_OF_NOISE * spread < step_terms


@dataclass(frozen=True)
class _Snapshot:
    """v, and r = g - Av."""

    point: ParamVector
    residual: ParamVector


@dataclass(frozen=True)
class _Starts:
    """ũ of each chain, what they cost, and the bound of what conjugate gradients left of them, in the norm of A_S."""

    values: list[ParamVector]
    bound: Tensor
    products: int
    terms: int
    events: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Refinement(Solver):
    """Subset solves, then averaged steps on all of the data, with control variates where they pay.

    Args:
        plan: of the steps, for LiSSA or (`Plan.preconditioned`) for the preconditioner; its chains.
        subset: terms of each chain's own subset; about the effective dimension d(λ) is enough.
        snapshot: take one, a pass over all terms; ``"auto"`` if it pays.
        preconditioner: P of the steps, for which the plan was made, and of the subset solves; None for none.
        start_tolerance: relative error of the scores at which conjugate gradients stop, 0.05 by default. What they
            leave is alike in all chains, so it must be well below what a subset leaves, ``√(C·d₂(λ)/s)``, or intervals
            cover too little. With a preconditioner, what the last iteration gained, 0.3 by default: P⁻¹g is a good
            start already, and the end of the way, the subset's own solution, is too long where P is slow to mend it.
        max_iterations: of conjugate gradients, at most.
        tail: the part of each path that is averaged.
        recover: answer divergence by a smaller step or a larger batch (with a warning), or raise at once.
        residual_batches: held-out batches for the residual, four times the plan's size each.
        tolerance: the residual, relative to ‖g‖, at which a solution counts as converged.

    Example:
        >>> from whence import Damped, FiniteSum, ParamVector, estimate_spectrum
        >>> g = torch.Generator().manual_seed(0)
        >>> H = FiniteSum([torch.diag(torch.tensor([1.0, 0.1 * k])) for k in range(8)])
        >>> plan = Plan.from_spectrum(estimate_spectrum(H, generator=g), damping=0.1)
        >>> solver = Refinement(plan=plan, subset=4)
        >>> solution = solver.solve(Damped(H, 0.1), ParamVector({"x": torch.ones(2)}), generator=g)
        >>> bool(solution.converged), len(solution.chains)
        (True, 4)
    """

    plan: Plan
    subset: int
    snapshot: bool | Literal["auto"] = "auto"
    preconditioner: Preconditioner | None = None
    start_tolerance: float | None = None
    max_iterations: int = 30
    tail: float = 0.5
    recover: bool = True
    residual_batches: int = 8
    tolerance: float = 0.5

    def __post_init__(self) -> None:
        if isinstance(self.subset, bool) or not isinstance(self.subset, int) or self.subset < 1:
            raise OptionError(
                f"subset is {self.subset!r}; give a number of terms for each chain's own subset"
            )
        if self.snapshot not in (True, False, "auto"):
            raise OptionError(f"snapshot is {self.snapshot!r}; it must be True, False or 'auto'")
        if self.snapshot == "auto" and self.plan.chains < 2:
            raise OptionError(
                "whether a snapshot pays is told by the spread of the chains' starts, and the plan has one chain; "
                "use more chains, or say snapshot=True or False"
            )
        self._conjugate_gradients()
        self._steps()

    def solve(
        self, A: Damped, rhs: ParamVector, *, generator: torch.Generator, journal: Journal | None = None
    ) -> Solution:
        """Solve ``A u = g`` for one right-hand side or a block.

        Args:
            A: the damped operator.
            rhs: g.
            generator: all randomness comes from here.
            journal: keeps the steps safe on their way, and hands them back to go on with. Starts and snapshot are made
                again, from the same generator in the same state, which costs what it did.
        """
        lissa = self._steps()
        lissa.check(A)
        check_right_hand_side(A, rhs)
        A.check_batch_size(self.subset)
        starts = self._start(A, rhs, generator)
        begun = ParamVector.mean(starts.values)
        snapshot = self._take_snapshot(A, rhs, starts.values, generator)
        equation = rhs
        if snapshot is not None:
            equation = snapshot.residual
            for start in starts.values:
                start.axpy_(-1.0, snapshot.point)
        state = lissa.run(A, equation, generator=generator, journal=journal, start=starts.values, watch=rhs)
        plan, chains, paths = state.plan, state.finished, torch.tensor(state.paths, dtype=torch.float64)
        batch = min(4 * plan.batch_size, A.num_terms)
        # (H̃ + λ)d - r is an estimate of Au - g, too, and the better for the snapshot
        mean = ParamVector.mean(chains)
        residual, stderr = residual_norm(A, mean, equation, self.residual_batches, batch, generator)
        if snapshot is not None:
            share = equation.norm() / rhs.norm().clamp_min(torch.finfo(torch.float64).tiny)
            residual, stderr = share * residual, share * stderr
            paths = paths + snapshot.point.dot(rhs).reshape(-1)
            for vector in (mean, *chains):
                vector.axpy_(1.0, snapshot.point)
        left = left_of_start(plan, lissa.averaged(plan))
        return Solution(
            value=mean,
            chains=tuple(chains),
            residual=residual,
            residual_stderr=stderr,
            converged=residual - 2 * stderr <= self.tolerance,
            num_products=starts.products + int(snapshot is not None) + state.products + self.residual_batches,
            num_term_products=starts.terms
            + (0 if snapshot is None else A.num_terms)
            + state.terms
            + self.residual_batches * batch,
            events=(*starts.events, *state.events),
            plan=plan,
            paths=paths,
            error_parts=measured_parts(
                A,
                mean,
                chains,
                left=left,
                start=begun,
                in_energy=True,
                certificate=left * starts.bound,
                terms=batch,
                generator=generator,
            ),
        )

    # --- its parts ---------------------------------------------------------------------------------------

    def _steps(self) -> Lissa:
        return Lissa(
            self.plan,
            tail=self.tail,
            recover=self.recover,
            residual_batches=self.residual_batches,
            tolerance=self.tolerance,
            preconditioner=self.preconditioner,
        )

    def _conjugate_gradients(self) -> ConjugateGradient:
        P = self.preconditioner
        if isinstance(P, LowRank):
            P = replace(P, exact_for_terms=None)  # what is proven of it does not hold for these subsets
        return ConjugateGradient(
            tolerance=self._stop_at,
            max_iterations=self.max_iterations,
            preconditioner=P,
            verify=False,
        )

    def _start(self, A: Damped, rhs: ParamVector, generator: torch.Generator) -> _Starts:
        """Each chain's subset, drawn and solved."""
        solved = [self._solved(A.subset(self.subset, generator), rhs) for _ in range(self.plan.chains)]
        bounds = torch.stack([s.certificate.upper for s in solved if s.certificate is not None])
        return _Starts(
            values=[s.value for s in solved],
            bound=bounds.square().mean(0).sqrt(),
            products=sum(s.num_products for s in solved),
            terms=sum(s.num_term_products for s in solved),
            events=tuple(dict.fromkeys(event for s in solved for event in s.events)),
        )

    @property
    def _stop_at(self) -> float:
        if self.start_tolerance is not None:
            return self.start_tolerance
        return _START_ERROR if self.preconditioner is None else _START_GAIN

    def _solved(self, A: Damped, rhs: ParamVector) -> Solution:
        """Conjugate gradients on a subset.

        Nothing is proven of a preconditioner on this subset, and the bound of the error is far off. There, the last
        iteration must have gained little: ``‖x_j - x_{j-1}‖²_A = gᵀ(x_j - x_{j-1})``.
        """
        solver = self._conjugate_gradients()
        state = solver.begin(A, rhs)
        if self.preconditioner is None:
            solver.advance(A, rhs, state)
            return solver.finish(A, rhs, state)
        before = torch.zeros(rhs.columns or 1, dtype=torch.float64)
        while state.iteration < self.max_iterations and not solver.done(state):
            solver.advance(A, rhs, state, until=state.iteration + 1)
            now = torch.tensor(state.path[-1], dtype=torch.float64)
            gained = (now - before).clamp_min(0.0).sqrt()
            if bool((gained <= self._stop_at * state.score_rms).all()):
                break
            before = now
        return solver.finish(A, rhs, state)

    def _take_snapshot(
        self, A: Damped, rhs: ParamVector, starts: Sequence[ParamVector], generator: torch.Generator
    ) -> _Snapshot | None:
        """A snapshot, where one is asked for or pays."""
        n, steps = A.num_terms, self.plan.num_term_products
        if not self.snapshot:
            return None
        if self.snapshot == "auto":
            if not snapshot_pays(n, steps, _BEST_SPREAD):
                return None
            terms = min(max(self.subset, 4 * self.plan.batch_size), n)
            if not snapshot_pays(n, steps, relative_spread(A, starts, terms, generator)):
                return None
        point = ParamVector.mean(starts)
        product = A.matvec(point)
        along, energy = rhs.dot(point), product.dot(point)
        length = torch.where(energy > 0, along / energy.clamp_min(torch.finfo(torch.float64).tiny), 1.0)
        return _Snapshot(point.scale_(length), rhs.clone().axpy_(-length, product))
