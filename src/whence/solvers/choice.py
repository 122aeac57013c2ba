"""`choose`: the cheapest solver that reaches the asked accuracy, predicted from the spectrum.

Accuracy is the expected correlation ρ of the scores with the exact ones. An error of ε relative to the scores, in root
mean square, leaves about ``ρ = 1 - ε²/2``. What each solver needs, in terms gone through for all queries together:

*Conjugate gradients* over all n terms: ``n · K``, with the K of `Density.cg_iterations`. Nothing random is left, and K
falls with the number of queries, which share one Krylov space. They stop when the certified error b, relative to the
scores, is below 1.4 ε: b is a bound, and counts directions that no score sees; scores are off by half of it (measured:
0.4 to 0.6).

*LiSSA*, m chains: averaged over N terms, scores are off by ``ε² = C·d₂(λ)/N`` (`Density.sampling_error`), half of the
path is averaged, and no chain may be shorter than the paper's plan, ``T·|B| ≈ 2C·Tr(H)/λ``, or its start is not
forgotten. It does not depend on n: with much data and a large λ it wins.

Both share the passes of a block over the queries, so terms can be compared without them.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch

from whence.errors import OptionError
from whence.plan import Plan, format_bytes, format_duration, resolve_damping
from whence.spectrum import Spectrum

__all__ = ["Alternative", "Choice", "check_accuracy", "choose", "tolerance_for"]

SolverName = Literal["cg", "lissa"]

#: What the certified error may be, in units of the scores' error: it is a bound and counts more.
_CERTIFIED = 1.4
#: The part of a path that is averaged.
_TAIL = 0.5
#: Vectors of the parameters' size that conjugate gradients hold per query.
_CG_COPIES = 8


@dataclass(frozen=True)
class Alternative:
    """What one solver would cost.

    Attributes:
        solver: ``"cg"`` or ``"lissa"``.
        terms: gone through, for all queries together.
        seconds: where a product was timed, of one query.
        memory_copies: vectors of the parameters' size per query.
        how: its settings, in words.
        refine: of LiSSA's plan.
        impossible: why it cannot be used; empty if it can.
    """

    solver: SolverName
    terms: float
    seconds: float | None
    memory_copies: int
    how: str
    refine: float = 1.0
    impossible: str = ""


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
        """What this solver would cost."""
        return next(alternative for alternative in self.alternatives if alternative.solver == solver)

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
            lines.append(f"{mark} {_NAMES[alternative.solver]:<20} {cost}{time}   {alternative.how}{note}")
        return "\n".join(lines)


_NAMES = {"cg": "conjugate gradients", "lissa": "LiSSA"}


def check_accuracy(accuracy: float) -> None:
    """Refuse what is no correlation that can be asked for."""
    if not 0.5 <= accuracy < 1:
        raise OptionError(
            f"accuracy is {accuracy}; it is the correlation with the exact scores to aim at, in [0.5, 1), such as 0.99"
        )


def tolerance_for(accuracy: float) -> float:
    """The certified error, relative to the scores, at which conjugate gradients can be expected to be this accurate."""
    check_accuracy(accuracy)
    return min(0.9, _CERTIFIED * math.sqrt(2 * (1 - accuracy)))


def choose(
    spectrum: Spectrum,
    damping: float | str = "auto",
    *,
    num_terms: int,
    queries: int = 1,
    accuracy: float = 0.995,
    chains: int = 4,
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
        chains: of LiSSA.
        memory_bytes: what vectors may take; None for any amount.
        generator: draws the right-hand sides that conjugate gradients are simulated for.
    """
    check_accuracy(accuracy)
    value = resolve_damping(damping, spectrum)
    found = [
        _conjugate_gradients(spectrum, value, num_terms, queries, accuracy, generator),
        _lissa(spectrum, value, num_terms, accuracy, chains),
    ]
    if memory_bytes is not None and spectrum.num_parameters is not None:
        found = [_within(a, queries * 4.0 * spectrum.num_parameters, memory_bytes) for a in found]
    if all(alternative.impossible for alternative in found):
        raise OptionError("; ".join(f"{_NAMES[a.solver]}: {a.impossible}" for a in found))
    order = sorted(found, key=lambda alternative: (bool(alternative.impossible), alternative.terms))
    return Choice(tuple(order), accuracy, num_terms)


def _conjugate_gradients(
    spectrum: Spectrum,
    damping: float,
    num_terms: int,
    queries: int,
    accuracy: float,
    generator: torch.Generator,
) -> Alternative:
    density = spectrum.density
    if density is None:
        kappa = spectrum.lambda_max.value / damping
        iterations = 0.5 * math.sqrt(kappa + 1) * math.log(2 / tolerance_for(accuracy)) + 1
    else:
        forecast = density.cg_iterations(
            damping, queries, generator=generator, tolerance=tolerance_for(accuracy)
        )
        iterations = forecast.mean
    terms = num_terms * math.ceil(iterations)
    how = f"about {math.ceil(iterations)} iterations over all {num_terms:,} terms, for all queries together"
    return Alternative("cg", terms, _seconds(spectrum, terms), _CG_COPIES, how)


def _lissa(spectrum: Spectrum, damping: float, num_terms: int, accuracy: float, chains: int) -> Alternative:
    shortest = Plan.tuned(spectrum, damping, num_terms=num_terms, chains=chains, refine=1.0)
    density, square = spectrum.density, 2 * (1 - accuracy)
    # Without a density, d₂ ≤ d ≤ Tr(H)/λ
    dimension = spectrum.trace.value / damping
    if density is not None:
        dimension = density.second_dimension(damping).value
    constant = max(1.0, spectrum.sampling_constant.value if spectrum.sampling_constant else 2.0)
    needed = constant * dimension / square / _TAIL
    refine = max(1.0, needed / shortest.num_term_products)
    plan = Plan.tuned(spectrum, damping, num_terms=num_terms, chains=chains, refine=refine)
    how = f"{chains} chains of {plan.num_steps:,} steps with {plan.batch_size:,} fresh terms each"
    terms = plan.num_term_products
    return Alternative("lissa", terms, _seconds(spectrum, terms), plan.memory_copies, how, refine)


def _seconds(spectrum: Spectrum, terms: float) -> float | None:
    return None if spectrum.seconds_per_term is None else terms * spectrum.seconds_per_term


def _within(alternative: Alternative, bytes_per_copy: float, limit: float) -> Alternative:
    needed = alternative.memory_copies * bytes_per_copy
    if needed <= limit:
        return alternative
    why = f"its vectors need {format_bytes(needed)}, and {format_bytes(limit)} are there"
    return replace(alternative, impossible=why)


def _priced(alternative: Alternative, num_terms: int) -> str:
    text = f"{_NAMES[alternative.solver]}, {alternative.how} ({alternative.terms / num_terms:.3g} passes over the data)"
    return f"{text}, which is impossible: {alternative.impossible}" if alternative.impossible else text
