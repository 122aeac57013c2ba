"""What every solver takes, goes through and returns.

A solve is ``begin``, ``step`` until ``done``, ``finish``, over a state of tensors and numbers that can be saved after
every step. `Solver.solve` is that loop, with or without a journal.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from whence.arguments import checked
from whence.cards import table_card
from whence.errors import OptionError, VectorError
from whence.operators import Damped, failures_become_typed
from whence.progress import ticker
from whence.solvers.plan import Plan
from whence.solvers.shifted import Shifted
from whence.threads import one_at_a_time
from whence.vectors import ParamVector

__all__ = [
    "Certificate",
    "ErrorParts",
    "Journal",
    "Solution",
    "Solver",
    "State",
    "Statistics",
    "check_system",
]

#: Right-hand sides whose residuals a solution shows.
_SHOWN = 8


@dataclass(frozen=True)
class Certificate:
    """Proven bounds of ``‖u - u*‖_A``: the error of a solution of ``(H + λ)u = g`` in the energy norm, A = H + λ.

    Derived in docs/math.md, "Gauss-Radau bounds for a block". They are about the operator that was solved with, if its
    products are exact to rounding. Those of finite differences are not; a measured residual shows by how much, and is
    then part of the upper bound.

    Attributes:
        lower: per column in float64; 0 where nothing is known.
        upper: per column in float64; infinite where nothing can be proven.
        damping: λ.
        operator_terms: how many terms the operator averaged.

    Example:
        >>> import torch
        >>> lower, upper = torch.tensor([0.25, 1.0]).double(), torch.tensor([0.5, 2.0]).double()
        >>> certificate = Certificate(lower, upper, damping=0.25, operator_terms=100)
        >>> certificate.score_bound(torch.tensor([1.0, 3.0]))
        tensor([[ 1.,  3.],
                [ 4., 12.]], dtype=torch.float64)
    """

    lower: Tensor
    upper: Tensor
    damping: float
    operator_terms: int

    def score_bound(self, norms: Tensor) -> Tensor:
        """The most that scores ``wᵀu`` can be wrong by: ``|wᵀ(u - u*)| ≤ ‖w‖_{A⁻¹} ‖u - u*‖_A ≤ ‖w‖ upper / √λ``.

        From the examples' ‖w‖: ``[columns, examples]`` in float64, without the first dimension for a single solution.
        """
        return self._spread(norms) / math.sqrt(self.damping)

    def score_error(self, norms: Tensor, trace: float) -> Tensor:
        """The spread of a typical example's score around the exact one, at most: ``upper ‖w‖ / √Tr(H)``.

        ``E_z (∇ℓ(z)ᵀe)² = eᵀHe ≤ ‖e‖²_A`` over examples z whose labels are drawn from the model, and
        ``E_z ‖∇ℓ(z)‖² = Tr(H)``: shared out by gradient norm, the errors have this mean square. No bound for any single
        example.
        """
        if not 0 < trace < math.inf:
            raise OptionError(
                f"the trace is {trace}; give Tr(H), a positive number, as estimate_spectrum finds it"
            )
        return self._spread(norms) / math.sqrt(trace)

    def _spread(self, norms: Tensor) -> Tensor:
        if not bool((norms >= 0).all()):
            raise OptionError("norms of gradients must be numbers, none of them negative")
        return self.upper.unsqueeze(-1) * norms.to(self.upper)


@dataclass(frozen=True)
class ErrorParts:
    """Where the error of a solution comes from, per column, in units of ``‖u‖_H``. NaN where nothing is known.

    An error e changes scores by ``‖e‖_H`` in root mean square, and ``‖u‖_H`` is the scores' own.

    Attributes:
        bias: at most, what the start has left behind, which the spread of chains need not show.
        sampling: standard error of the chains' mean, as their spread shows it.
        certificate: the proven bound of what conjugate gradients left undone.
        expected: not proven, but what the examples' scores should be off by, in units of their own spread, as the
            steps of conjugate gradients have shown (`whence.solvers.settling`); None where they were not watched.
    """

    bias: Tensor
    sampling: Tensor
    certificate: Tensor
    expected: Tensor | None = None

    def joined(self, earlier: ErrorParts, rounds: int) -> ErrorParts:
        """Of the mean over ``rounds`` earlier rounds of chains and this one, which has as many chains as each."""
        return ErrorParts(
            bias=torch.maximum(earlier.bias, self.bias),
            sampling=torch.hypot(rounds * earlier.sampling, self.sampling) / (rounds + 1),
            certificate=torch.maximum(earlier.certificate, self.certificate),
        )


@dataclass(frozen=True, kw_only=True)
class Statistics:
    """How a solver fared: everything about a solution but its vectors.

    Attributes:
        residual, residual_stderr: ``‖(H + λ)u - g‖ / ‖g‖`` per column, and its standard error.
        converged: whether the solver's tolerance is met, per column.
        num_products: products spent, all chains together.
        num_term_products: terms gone through in them.
        events: what the solver had to change on the way, in words.
        paths: gᵀu along every chain, ``[chains, steps, columns]``.
        error_parts: which part of the error is bias, which sampling, and which is proven.
        plan: LiSSA's settings in force at the end.
        score_rms: ``‖u‖_H`` per column, where the solver knows it: the root mean square of the scores.
        exhausted: whether more steps cannot make the solution better in this precision.
        shifted: scores of all examples for every λ, where the solver kept what they need.
    """

    solver: str
    residual: Tensor
    residual_stderr: Tensor
    converged: Tensor
    num_products: int
    num_term_products: int
    events: tuple[str, ...]
    paths: Tensor
    error_parts: ErrorParts
    plan: Plan | None = None
    certificate: Certificate | None = None
    score_rms: Tensor | None = None
    exhausted: bool = False
    shifted: Shifted | None = None

    def joined(self, earlier: Statistics, rounds: int) -> Statistics:
        """Of this round of independent chains together with the ``rounds`` before it."""
        same_steps = earlier.paths.shape[1:] == self.paths.shape[1:]
        return replace(
            self,
            num_products=earlier.num_products + self.num_products,
            num_term_products=earlier.num_term_products + self.num_term_products,
            events=earlier.events + tuple(event for event in self.events if event not in earlier.events),
            paths=torch.cat([earlier.paths, self.paths]) if same_steps else self.paths,
            converged=earlier.converged & self.converged,
            error_parts=self.error_parts.joined(earlier.error_parts, rounds),
        )


@dataclass(frozen=True)
class Solution:
    """An approximate ``u = (H + λ)⁻¹ g`` that knows how far to trust itself.

    Attributes:
        value: the solution; a block if the right-hand side was one. For stochastic solvers, the chains' mean.
        chains: independent estimates of the same solution; one where the solver is deterministic.
        stats: everything else.
    """

    value: ParamVector
    chains: tuple[ParamVector, ...]
    stats: Statistics

    def _rows(self) -> list[tuple[str, str]]:
        """Name and value of everything that is shown."""
        stats = self.stats
        residuals = zip(
            stats.residual.reshape(-1).tolist(), stats.residual_stderr.reshape(-1).tolist(), strict=True
        )
        shown = [f"{value:.2g}" + (f" ± {error:.1g}" if error else "") for value, error in residuals]
        more = f", … of {len(shown)}" if len(shown) > _SHOWN else ""
        converged = stats.converged.reshape(-1)
        return [
            ("solver", stats.solver),
            ("converged", f"{int(converged.sum())} of {len(converged)}"),
            ("residual", f"{', '.join(shown[:_SHOWN])}{more}   of ‖g‖"),
            ("chains", f"{len(self.chains)}"),
            ("cost", f"{stats.num_products:,} products over {stats.num_term_products:,} terms"),
        ]

    def __str__(self) -> str:
        return "\n".join([*(f"{name:<9}  {value}" for name, value in self._rows()), *self.stats.events])

    def _repr_html_(self) -> str:
        """A card, for notebooks."""
        return table_card("A solution of (H + λ)u = g", self._rows(), self.stats.events)

    @property
    def converged(self) -> Tensor:
        """Whether the solver's tolerance is met, per column."""
        return self.stats.converged

    @property
    def residual(self) -> Tensor:
        """``‖(H + λ)u - g‖ / ‖g‖``, per column."""
        return self.stats.residual

    @property
    def num_products(self) -> int:
        """Products spent."""
        return self.stats.num_products

    @property
    def num_term_products(self) -> int:
        """Terms gone through in them."""
        return self.stats.num_term_products

    @property
    def certificate(self) -> Certificate | None:
        """Proven bounds of the error, where the solver has them."""
        return self.stats.certificate

    @property
    def stderr(self) -> ParamVector:
        """Standard error of every entry of `value`, from the spread of the chains."""
        m = len(self.chains)
        if m < 2:
            raise VectorError(
                "one chain has no spread, so no standard error; solve with chains=2 or more (4 by default), or bound "
                "what you need of the solution by `project`"
            )
        variance = self.value.zeros_like()
        for chain in self.chains:
            for name, total in variance.items():
                total.add_((chain[name] - self.value[name]).square_())
        for total in variance.values():
            total.div_(m * (m - 1)).sqrt_()
        return variance

    @property
    def degrees_of_freedom(self) -> float:
        """For Student's t: one less than the number of chains; infinite where nothing is random."""
        return len(self.chains) - 1 if len(self.chains) > 1 else math.inf

    def project(self, functionals: ParamVector) -> tuple[Tensor, Tensor]:
        """``⟨w, u⟩`` for linear functionals w of the solution (a score is one), with its error.

        The error is the standard error of several chains; of one chain with a certificate the proven bound
        ``‖w‖ ‖u - u*‖_A / √λ``; of one chain without, infinite.

        Args:
            functionals: a vector w, or a block of them.

        Returns:
            Values and errors, ``[columns of u, columns of w]`` in float64, without the dimensions of single vectors.
        """
        draws = torch.stack([chain.gram(functionals) for chain in self.chains])
        value = draws.mean(0)
        if len(self.chains) > 1:
            error = draws.std(0) / math.sqrt(len(self.chains))
        elif self.certificate is not None:
            bound = self.certificate.score_bound(functionals.norm().reshape(-1).cpu())
            error = bound.reshape(value.shape).to(value)
        else:
            error = torch.full_like(value, math.inf)
        if functionals.columns is None:
            value, error = value.squeeze(1), error.squeeze(1)
        if self.value.columns is None:
            value, error = value.squeeze(0), error.squeeze(0)
        return value, error


class State(Protocol):
    """A solve in flight: a dataclass of vectors, tensors and numbers, so that it can be saved and gone on with.

    Attributes:
        operator: what earlier products left behind that later ones depend on.
        events: what had to be changed, in words.
    """

    operator: Mapping[str, float | None]
    events: list[str]


S = TypeVar("S", bound=State)


class Journal(Protocol[S]):
    """Keeps a solve safe: it is handed the state after every step, and decides when to write it down."""

    def restore(self) -> S | None:
        """The state last written, or None."""

    def record(self, state: S, *, now: bool = False) -> None:
        """Write the state down when it is time to, or at once."""


class Solver(ABC, Generic[S]):
    """Solves ``(H + λ)u = g``.

    Attributes:
        name: in results and on the command line.
        independent: whether another round of solving gives estimates that are independent of those before, to be
            averaged with them; else it goes on from the state before, and replaces what that gave.
        state_type: the class of its states.
    """

    name: ClassVar[str]
    independent: ClassVar[bool]
    state_type: ClassVar[type[Any]]

    @abstractmethod
    def check(self, A: Damped, rhs: ParamVector, start: ParamVector | None) -> None:
        """Refuse what this solver was not made for; called before any work."""

    @abstractmethod
    def begin(
        self, A: Damped, rhs: ParamVector, *, generator: torch.Generator, start: ParamVector | None = None
    ) -> S:
        """The state before the first step."""

    @abstractmethod
    def step(self, A: Damped, rhs: ParamVector, state: S) -> None:
        """One product further."""

    @abstractmethod
    def done(self, state: S) -> bool:
        """Whether there is nothing left to do, or to be gained."""

    @abstractmethod
    def progress(self, state: S) -> tuple[int, int]:
        """Steps done, and how many there may be."""

    @abstractmethod
    def finish(self, A: Damped, rhs: ParamVector, state: S) -> Solution:
        """The solution, judged. The state can still be gone on with."""

    def made_for(self) -> Plan | None:
        """The plan that it works under, where it needs one: brings the damping and the spectrum."""
        return None

    def further(self, rounds: int) -> Solver[S]:
        """The solver for one more round after so many: itself, unless a round goes on to a smaller error."""
        return self

    @one_at_a_time
    @failures_become_typed()
    @checked("A", "rhs", "start")
    def solve(
        self,
        A: Damped,
        rhs: ParamVector,
        *,
        generator: torch.Generator,
        start: ParamVector | None = None,
        state: S | None = None,
        journal: Journal[S] | None = None,
        on_step: Callable[[S], bool | None] | None = None,
    ) -> Solution:
        """Solve ``A u = g`` for one right-hand side, or for a block of them together.

        Args:
            A: the damped operator.
            rhs: g.
            generator: all randomness comes from here.
            start: u⁰, of the right-hand side's form; by default the solver's own.
            state: a solve of the same system to go on with, where the journal has none.
            journal: keeps the solve safe on its way, and hands it back to go on with.
            on_step: called after every step with the state; True stops the solve.
        """
        check_system(A, rhs, start)
        self.check(A, rhs, start)
        if state is not None and not isinstance(state, self.state_type):
            raise OptionError(
                f"state is a {type(state).__name__}; {self.name} goes on with a {self.state_type.__name__}"
            )
        if journal is not None:
            state = journal.restore() or state
        if state is None:
            state = self.begin(A, rhs, generator=generator, start=start)
        else:
            A.operator.restore_state(state.operator)
        done, total = self.progress(state)
        with ticker(self.name, total, done=done) as tick:
            while not self.done(state):
                self.step(A, rhs, state)
                state.operator = A.operator.state()
                if journal is not None:
                    journal.record(state)
                tick()
                if on_step is not None and on_step(state):
                    state.events.append("Stopped by the caller.")
                    break
        if journal is not None:
            journal.record(state, now=True)
        return self.finish(A, rhs, state)


def check_system(A: Damped, rhs: ParamVector, start: ParamVector | None = None) -> None:
    """Refuse what is no damped system, and vectors of another model or with NaN or infinity, before any work."""
    if not isinstance(A, Damped):
        raise OptionError("a solver needs a damped system; wrap the operator: Damped(operator, damping)")
    if not isinstance(rhs, ParamVector):
        raise VectorError(
            f"the right-hand side is a {type(rhs).__name__}; give a ParamVector, such as GaussNewton.gradients returns"
        )
    A.zeros().check_same_space(rhs, "right-hand side")
    if not rhs.is_finite():
        raise VectorError(
            "the right-hand side holds NaN or infinity: the query's loss or gradient overflowed. "
            "Check the query's inputs and label"
        )
    if start is not None:
        if not isinstance(start, ParamVector):
            raise VectorError(f"the start is a {type(start).__name__}; give a ParamVector, or leave it out")
        rhs.check_same_form(start, "start")
        if not start.is_finite():
            raise VectorError("the start holds NaN or infinity; leave it out")
