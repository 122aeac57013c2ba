"""`choose`: the cheapest solver that reaches the asked accuracy; `Choice.solver` makes it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from whence.errors import OptionError
from whence.preconditioners import Preconditioner
from whence.solvers.alternatives import (
    NAMES,
    Alternative,
    Job,
    Passes,
    SolverName,
    check_accuracy,
    relative_error,
    resolve_accuracy,
    tolerance_for,
)
from whence.solvers.cg import ConjugateGradient
from whence.solvers.lissa import Lissa
from whence.solvers.plan import Plan, resolve_damping
from whence.solvers.refinement import Refinement
from whence.spectrum import Spectrum
from whence.units import format_duration

__all__ = [
    "Alternative",
    "Choice",
    "Passes",
    "SolverName",
    "check_accuracy",
    "choose",
    "make_solver",
    "relative_error",
    "resolve_accuracy",
    "tolerance_for",
]


@dataclass(frozen=True)
class Choice:
    """The solver to use, and what the others would have cost.

    Attributes:
        alternatives: cheapest first.
        accuracy: the asked correlation.
        num_terms: of the data.
    """

    alternatives: tuple[Alternative, ...]
    accuracy: float
    num_terms: int

    @property
    def best(self) -> Alternative:
        """The cheapest that can be used."""
        return next(alternative for alternative in self.alternatives if not alternative.impossible)

    def of(self, solver: SolverName) -> Alternative:
        """What this solver would cost at best; an OptionError where it cannot be predicted."""
        for alternative in self.alternatives:
            if alternative.solver == solver:
                return alternative
        raise OptionError(
            f"{NAMES[solver]} cannot be planned here: no subset and path should reach a correlation of "
            f"{self.accuracy:g}, or the spectrum has no density. Ask for less accuracy, or use solver='auto'"
        )

    def to_json(self) -> dict[str, Any]:
        """All numbers, for scripts."""
        return {
            "solver": self.best.solver,
            "accuracy": self.accuracy,
            "words": self.words(),
            "alternatives": [asdict(alternative) for alternative in self.alternatives],
        }

    def words(self) -> str:
        """Why this one, in a sentence or two."""
        best = self.best
        others = [_priced(a, self.num_terms) for a in self.alternatives if a is not best]
        return (
            f"To reach a correlation of {self.accuracy:g} with the exact scores, this should cost least: "
            f"{_priced(best, self.num_terms)}. Instead of: {'; '.join(others)}."
        )

    def __str__(self) -> str:
        lines = []
        for alternative in self.alternatives:
            mark = "→" if alternative is self.best else " "
            cost = f"{alternative.terms / self.num_terms:8.3g} passes"
            time = "" if alternative.seconds is None else f"   about {format_duration(alternative.seconds)}"
            note = f"   impossible: {alternative.impossible}" if alternative.impossible else ""
            lines.append(f"{mark} {alternative.name:<36} {cost}{time}   {alternative.how}{note}")
        return "\n".join(lines)


def choose(
    spectrum: Spectrum,
    damping: float | str = "auto",
    *,
    num_terms: int,
    queries: int = 1,
    accuracy: float = 0.995,
    chains: int = 4,
    passes: Passes | None = None,
    memory_bytes: float | None = None,
    generator: torch.Generator,
) -> Choice:
    """The solvers with their predicted costs, cheapest first.

    Args:
        spectrum: measured.
        damping: λ, or a part of λmax.
        num_terms: n.
        queries: right-hand sides solved together.
        accuracy: the correlation with exact scores to reach.
        chains: of LiSSA and refinement.
        passes: what products cost beside their terms; by default nothing.
        memory_bytes: what vectors may take; None for any amount.
        generator: draws the right-hand sides that conjugate gradients are simulated for.
    """
    check_accuracy(accuracy)
    job = Job(
        spectrum,
        resolve_damping(damping, spectrum),
        num_terms,
        queries,
        accuracy,
        chains,
        Passes() if passes is None else passes,
        generator,
    )
    found = [*job.conjugate_gradients(), job.lissa(), *job.refinement()]
    if memory_bytes is not None and spectrum.num_parameters is not None:
        found = [a.within(queries, 4.0 * spectrum.num_parameters, memory_bytes) for a in found]
    if all(alternative.impossible for alternative in found):
        raise OptionError("; ".join(f"{a.name}: {a.impossible}" for a in found))
    order = sorted(found, key=lambda alternative: (bool(alternative.impossible), alternative.work))
    return Choice(tuple(order), accuracy, num_terms)


def make_solver(
    chosen: Alternative,
    spectrum: Spectrum,
    damping: float | str,
    *,
    num_terms: int,
    accuracy: float,
    chains: int,
    preconditioner: Preconditioner | None = None,
    keep_basis: bool = False,
    verify: bool = True,
) -> Lissa | ConjugateGradient | Refinement:
    """The solver that was chosen, ready to solve.

    Args:
        chosen: one of a choice's alternatives.
        spectrum: that the choice was made from; the rest as it was there, too.
        damping: λ.
        num_terms: n.
        accuracy: the correlation to reach.
        chains: of LiSSA and refinement.
        preconditioner: where one was chosen: of ``chosen.rank``, from ``chosen.rank_terms`` terms, `LowRank.shrunk`
            so that errors can be proven. Or any other, with ``keep_basis``.
        keep_basis: of `ConjugateGradient`.
        verify: of `ConjugateGradient`.
    """
    if chosen.solver == "cg":
        return ConjugateGradient(
            tolerance=tolerance_for(accuracy),
            score_error=relative_error(accuracy),
            largest=spectrum.largest(3.0),
            preconditioner=preconditioner,
            keep_basis=keep_basis,
            verify=verify,
        )
    plan = Plan.tuned(spectrum, damping, num_terms=num_terms, chains=chains, refine=chosen.refine)
    if chosen.solver == "lissa":
        return Lissa(plan)
    return Refinement(plan=plan.replace(num_steps=chosen.num_steps), subset=chosen.subset)


def _priced(alternative: Alternative, num_terms: int) -> str:
    text = f"{alternative.name}, {alternative.how} ({alternative.terms / num_terms:.3g} passes over the data)"
    return f"{text}, which is impossible: {alternative.impossible}" if alternative.impossible else text
