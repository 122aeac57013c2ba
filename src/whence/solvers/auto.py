"""`choose`: which solver, by a rule that a person can check by hand.

Costs are counted in terms gone through for all queries together. With n terms, q queries, m chains, and an error ε of
the scores, relative to their size, for which the proven error may be 2ε:

*Conjugate gradients* take ``n·K`` terms, with K of `Spectrum.cg_iterations`. *LiSSA* takes ``m·T·|B|`` terms: the
paper's plan, and at least ``2·C·d₂(λ)/ε²`` for the error that was asked for. This does not depend on n. See
docs/math.md, "The price of a solve".

The rule: **conjugate gradients; LiSSA where twice its cost is still less.** Twice, because its price is what it costs
if nothing goes wrong: a few examples of huge curvature double the batch and begin all again. A step over few terms
costs more than these, so every pass counts as `Passes.start` terms more. Work is counted, never timed: a choice by
stop-watch would differ between two runs of the same job. Measured by ``python -m benchmarks.solvers``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from whence.errors import OptionError
from whence.solvers.cg import ConjugateGradient
from whence.solvers.lissa import Lissa
from whence.solvers.plan import Plan, resolve_damping
from whence.spectrum import Spectrum
from whence.units import format_bytes, format_duration

__all__ = [
    "Alternative",
    "Choice",
    "Passes",
    "check_accuracy",
    "choose",
    "make_cg",
    "make_solver",
    "relative_error",
    "resolve_accuracy",
    "tolerance_for",
]

#: What the proven error may be, in units of the scores' error: it is a bound, and counts what no score shows.
_PROVEN = 2.0
#: LiSSA must be so many times cheaper: what a restart costs.
_RISK = 2.0
#: The part of a path that is averaged.
_TAIL = 0.5
#: Vectors of the parameters' size that conjugate gradients hold per query.
CG_COPIES = 8


@dataclass(frozen=True)
class Passes:
    """What products cost: as many terms as they go over, and ``start`` more for every pass.

    Attributes:
        start: terms that a product could go over in the time that starting a pass takes.
        terms: of one pass; a product over more of them needs several.
    """

    start: float = 0.0
    terms: float = math.inf

    def work(self, terms: float, products: float) -> float:
        """So many products over so many terms together, in terms."""
        each = math.ceil(terms / max(products, 1.0) / self.terms) if math.isfinite(self.terms) else 1
        return terms + self.start * products * max(each, 1)


@dataclass(frozen=True)
class Alternative:
    """What one solver would cost.

    Attributes:
        how: its settings, in words.
        terms: gone through, for all queries together.
        work: the same, and what starting passes costs, in terms: what decides.
        memory_copies: vectors of the parameters' size for all queries together.
        seconds: where a product was timed, of one query.
        impossible: why it cannot be used; empty if it can.
        refine: cost of LiSSA's chains, as a multiple of the paper's plan.
    """

    solver: str
    how: str
    terms: float
    work: float
    memory_copies: int
    seconds: float | None = None
    impossible: str = ""
    refine: float = 1.0

    @property
    def name(self) -> str:
        """For readers."""
        if self.solver == "lissa":
            return "LiSSA"
        return "conjugate gradients"


@dataclass(frozen=True)
class Choice:
    """The solver to use, and what the others would have cost: the chosen alternative first, the others by work."""

    alternatives: tuple[Alternative, ...]
    accuracy: float
    num_terms: int

    @property
    def best(self) -> Alternative:
        """The one to use."""
        return self.alternatives[0]

    def of(self, solver: str) -> Alternative:
        """The cheapest by this solver."""
        return min((a for a in self.alternatives if a.solver == solver), key=lambda a: a.work)

    def asked(self, solver: str) -> Choice:
        """The same with this solver's cheapest alternative as the one to use; as it is for ``"auto"``."""
        if solver == "auto":
            return self
        own = self.of(solver)
        others = tuple(alternative for alternative in self.alternatives if alternative is not own)
        return replace(self, alternatives=(own, *others))

    def words(self) -> str:
        """Why this one, in a sentence or two."""
        best, *others = (self._priced(alternative) for alternative in self.alternatives)
        asked = f"To reach a correlation of {self.accuracy:g} with the exact scores"
        return f"{asked}: {best}. Instead of: {'; '.join(others)}."

    def _priced(self, alternative: Alternative) -> str:
        passes = alternative.terms / self.num_terms
        text = f"{alternative.name}, {alternative.how} ({passes:.3g} passes over the data)"
        return f"{text}, which is impossible: {alternative.impossible}" if alternative.impossible else text

    def __str__(self) -> str:
        lines = []
        for mark, alternative in zip("→  ", self.alternatives, strict=False):
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
) -> Choice:
    """The solver to use, by the rule at the top of this file.

    Args:
        spectrum: measured.
        damping: λ, or a part of λmax.
        num_terms: of the data.
        queries: right-hand sides solved together.
        accuracy: the correlation with exact scores to reach.
        chains: of LiSSA.
        passes: what products cost beside their terms; by default nothing.
        memory_bytes: what vectors may take; None for any amount.

    Raises:
        OptionError: where no solver's vectors fit into the memory.
    """
    damping = resolve_damping(damping, spectrum)
    passes = Passes() if passes is None else passes
    n, tolerance = num_terms, tolerance_for(accuracy)
    K = math.ceil(spectrum.cg_iterations(damping, queries, tolerance=tolerance))
    found = [
        Alternative(
            solver="cg",
            how=f"about {K} iterations over all {n:,} terms, for all queries together",
            terms=n * K,
            work=passes.work(n * K, K),
            memory_copies=CG_COPIES * queries,
        )
    ]
    refine = _needed_length(spectrum, damping, n, accuracy, chains)
    plan = Plan.tuned(spectrum, damping, num_terms=n, chains=chains, refine=refine)
    found.append(
        Alternative(
            solver="lissa",
            how=f"{chains} chains of {plan.num_steps:,} steps with {plan.batch_size:,} fresh terms each",
            terms=plan.num_term_products,
            work=passes.work(plan.num_term_products, plan.num_products),
            memory_copies=plan.memory_copies * queries,
            refine=refine,
        )
    )
    found = [_here(each, spectrum, memory_bytes) for each in found]
    if all(each.impossible for each in found):
        raise OptionError("; ".join(f"{each.name}: {each.impossible}" for each in found))
    risk = {"cg": 1.0, "lissa": _RISK}
    found.sort(key=lambda each: (bool(each.impossible), risk[each.solver] * each.work))
    return Choice(tuple(found), accuracy, n)


def _here(alternative: Alternative, spectrum: Spectrum, memory_bytes: float | None) -> Alternative:
    """With the seconds that it takes on this machine, and why it is impossible there, if it is."""
    per_term, impossible = spectrum.seconds_per_term, ""
    needed = 4.0 * (spectrum.num_parameters or 0) * alternative.memory_copies
    if memory_bytes is not None and needed > memory_bytes:
        impossible = f"its vectors need {format_bytes(needed)}, and {format_bytes(memory_bytes)} are there"
    seconds = None if per_term is None else alternative.work * per_term
    return replace(alternative, seconds=seconds, impossible=impossible)


def _needed_length(spectrum: Spectrum, damping: float, n: int, accuracy: float, chains: int) -> float:
    """What LiSSA's chains must cost to be this accurate, as a multiple of the paper's plan."""
    shortest = Plan.tuned(spectrum, damping, num_terms=n, chains=chains, refine=1.0)
    constant = max(1.0, 2.0 if spectrum.sampling_constant is None else spectrum.sampling_constant.value)
    # Without a density, d₂ ≤ d ≤ Tr(H)/λ
    dimension = spectrum.trace.value / damping
    if spectrum.density is not None:
        dimension = spectrum.density.second_dimension(damping).value
    needed = constant * dimension / relative_error(accuracy) ** 2 / _TAIL
    return max(1.0, needed / shortest.num_term_products)


def make_solver(
    chosen: Alternative,
    plan: Plan,
    *,
    accuracy: float,
    certified: bool = False,
    verify: bool = True,
    keep_slopes: bool = False,
) -> Lissa | ConjugateGradient:
    """The solver that was chosen, ready to solve.

    Args:
        chosen: one of a choice's alternatives.
        plan: of the damping; in force where LiSSA was chosen.
        accuracy: the correlation with exact scores to reach.
        certified: whether the proven error decides, and not the expected one.
        verify: of `ConjugateGradient`.
        keep_slopes: of `ConjugateGradient`.
    """
    if chosen.solver == "lissa":
        return Lissa(plan)
    largest = plan.spectrum.largest(3.0)
    return make_cg(accuracy, certified=certified, verify=verify, keep_slopes=keep_slopes, largest=largest)


def make_cg(accuracy: float, *, certified: bool, **settings: Any) -> ConjugateGradient:
    """Conjugate gradients that end where the scores can be expected, or are proven, to be this accurate.

    Args:
        accuracy: the correlation with exact scores to reach.
        certified: whether the proven error decides, and not the expected one.
        **settings: other ones of `ConjugateGradient`.
    """
    return ConjugateGradient(
        tolerance=tolerance_for(accuracy),
        score_error=None if certified else relative_error(accuracy),
        **settings,
    )


# --- accuracy ------------------------------------------------------------------------------------------------


def check_accuracy(accuracy: float) -> None:
    """Refuse what is no correlation that can be asked for."""
    if not 0.5 <= accuracy < 1:
        raise OptionError(
            f"accuracy is {accuracy}; it is the correlation with the exact scores to aim at, in [0.5, 1), such as 0.99"
        )


def resolve_accuracy(accuracy: float | str) -> float:
    """The correlation ρ to reach, given as a number, or as the scores' relative error ε in percent: ``1 - ε²/2``.

    Example:
        >>> resolve_accuracy("10%")
        0.995
    """
    if not isinstance(accuracy, str):
        check_accuracy(accuracy)
        return accuracy
    number, percent, rest = accuracy.strip().partition("%")
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    if rest or math.isnan(value) or (percent and not 0 < value <= 100):
        raise OptionError(
            f"accuracy is {accuracy!r}; give the correlation with the exact scores to aim at, such as 0.99, or the "
            "relative error of the scores, above 0% and at most 100%, such as '10%'"
        )
    found = 1 - (value / 100) ** 2 / 2 if percent else value
    check_accuracy(found)
    return found


def relative_error(accuracy: float) -> float:
    """``ε = √(2(1 - ρ))``: how far off scores of this correlation are, in root mean square of their size."""
    return math.sqrt(2 * (1 - accuracy))


def tolerance_for(accuracy: float) -> float:
    """The proven error, relative to the scores, at which conjugate gradients can be expected to be this accurate."""
    check_accuracy(accuracy)
    return min(0.9, _PROVEN * relative_error(accuracy))
