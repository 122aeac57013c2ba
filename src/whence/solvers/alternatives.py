"""What each solver would cost to be accurate enough, predicted from the spectrum.

Accuracy is the expected correlation ρ of the scores with the exact ones. An error of ε relative to the scores, in root
mean square, leaves about ``ρ = 1 - ε²/2``. What each solver needs, in terms gone through for all queries together:

*Conjugate gradients* over all n terms: ``n · K``, with the K of `Density.cg_iterations`. Nothing random is left, and K
falls with the number of queries, which share one Krylov space. They stop when the examples' scores have settled to ε
(`whence.solvers.settling`), which cannot be known beforehand. Predicted is when the certified error b, relative to the
scores, is below 2 ε: b is a bound, and counts directions that no score sees; scores of terms are off by half of it
(measured: 0.4 to 0.6).

*With a low-rank preconditioner*, K is less, and r products over a part of the terms are more. That pays for a few
queries and a small λ: a block of many queries finds the top of the spectrum by itself. Nyström's method knows about
half as many eigenvalues as its rank (`settled_eigenvalues`), and up to an iteration is lost to the terms that it has
not seen (digits, ranks 10 to 30, κ of 100 and 1000: predicted within one iteration).

*LiSSA*, m chains: averaged over N terms, scores are off by ``ε² = C·d₂(λ)/N`` (`Density.sampling_error`), half of the
path is averaged, and no chain may be shorter than the paper's plan, ``T·|B| ≈ 2C·Tr(H)/λ``, or its start is not
forgotten. It does not depend on n: with much data and a large λ it wins.

*Refinement*: a good start from a subset need not be forgotten, so that paths can be shorter. See
`whence.solvers.refinement_forecast`.

**Work.** All share the passes of a block over the queries, so terms can be compared without them. But a pass over a few
terms costs more than these: `Passes` says what starting one is worth. Work is counted, never timed: a choice by
stop-watch would differ between two runs of the same job.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch

from whence.errors import OptionError
from whence.preconditioners import settled_eigenvalues
from whence.solvers.plan import Plan
from whence.solvers.refinement_forecast import cheapest_refinement
from whence.spectrum import Spectrum
from whence.units import format_bytes

__all__ = [
    "NAMES",
    "Alternative",
    "Job",
    "Passes",
    "SolverName",
    "check_accuracy",
    "relative_error",
    "resolve_accuracy",
    "tolerance_for",
]

SolverName = Literal["cg", "lissa", "refinement"]

#: What the certified error may be, in units of the scores' error: it is a bound and counts more.
_CERTIFIED = 2.0
#: The part of a path that is averaged.
_TAIL = 0.5
#: Vectors of the parameters' size that conjugate gradients hold per query.
_CG_COPIES = 8
#: Ranks that are tried.
_RANKS = (8, 16, 32)
#: Parts of the terms that a preconditioner is made from, and the iterations that are lost to the others.
_SHARES = ((0.25, 0.5), (0.1, 1.0))
#: Columns that a preconditioner's products take at once, and vectors that each needs meanwhile.
_RANK_COLUMNS = 8
_RANK_COPIES = 3


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
        solver: ``"cg"``, ``"lissa"`` or ``"refinement"``.
        terms: gone through, for all queries together.
        work: the same, and what starting passes costs, in terms: what decides.
        seconds: where a product was timed, of one query.
        memory_copies: vectors of the parameters' size per query.
        how: its settings, in words.
        refine: of LiSSA's plan.
        rank: of a preconditioner, 0 for none.
        rank_terms: that it is made from.
        subset: terms of each of refinement's subsets.
        num_steps: of refinement's paths.
        shared_copies: vectors of the parameters' size, whatever the number of queries.
        impossible: why it cannot be used; empty if it can.
    """

    solver: SolverName
    terms: float
    work: float
    seconds: float | None
    memory_copies: int
    how: str
    refine: float = 1.0
    rank: int = 0
    rank_terms: int = 0
    subset: int = 0
    num_steps: int = 0
    shared_copies: int = 0
    impossible: str = ""

    def within(self, queries: int, bytes_per_copy: float, limit: float) -> Alternative:
        """The same; impossible if its vectors need more memory than there is."""
        needed = (self.memory_copies * queries + self.shared_copies) * bytes_per_copy
        if needed <= limit:
            return self
        why = f"its vectors need {format_bytes(needed)}, and {format_bytes(limit)} are there"
        return replace(self, impossible=why)

    @property
    def name(self) -> str:
        """For readers."""
        return NAMES[self.solver] + (", preconditioned" if self.rank else "")


NAMES = {"cg": "conjugate gradients", "lissa": "LiSSA", "refinement": "refinement of subset solves"}


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
    """The certified error, relative to the scores, at which conjugate gradients can be expected to be this accurate."""
    check_accuracy(accuracy)
    return min(0.9, _CERTIFIED * relative_error(accuracy))


@dataclass(frozen=True)
class Job:
    """What is asked for; see `choose`."""

    spectrum: Spectrum
    damping: float
    num_terms: int
    queries: int
    accuracy: float
    chains: int
    passes: Passes
    generator: torch.Generator

    def conjugate_gradients(self) -> Iterator[Alternative]:
        """Plain, and with the preconditioner that should cost least."""
        plain, n = self._iterations(0, 1.0), self.num_terms
        how = f"about {plain} iterations over all {n:,} terms, for all queries together"
        terms = float(n * plain)
        yield self._priced(Alternative("cg", terms, self.passes.work(terms, plain), None, _CG_COPIES, how))
        if self.spectrum.density is None:
            return
        found = [
            self._preconditioned(rank, math.ceil(share * n), self._iterations(rank, share, lost))
            for share, lost in _SHARES
            for rank in _RANKS
            if rank <= share * n
        ]
        if found:
            yield self._priced(min(found, key=lambda alternative: alternative.work))

    def _preconditioned(self, rank: int, made_from: int, iterations: int) -> Alternative:
        """A product of k columns is 1 + 4k forwards: queries share the one, and so do the columns of a sketch."""
        n, passes = self.num_terms, self.passes
        columns = (1 + 4 * _RANK_COLUMNS) / _RANK_COLUMNS * rank / (1 + 4 * self.queries)
        return Alternative(
            "cg",
            terms=n * iterations + made_from * columns,
            work=passes.work(n * iterations, iterations)
            + passes.work(made_from * columns, rank / _RANK_COLUMNS),
            seconds=None,
            memory_copies=_CG_COPIES,
            how=f"about {iterations} iterations over all {n:,} terms, {rank} products over {made_from:,} before",
            rank=rank,
            rank_terms=made_from,
            shared_copies=rank + _RANK_COPIES * _RANK_COLUMNS,
        )

    def _iterations(self, rank: int, share: float, lost: float = 0.0) -> int:
        density, tolerance = self.spectrum.density, tolerance_for(self.accuracy)
        if density is None:
            kappa = self.spectrum.lambda_max.value / self.damping
            return math.ceil(0.5 * math.sqrt(kappa + 1) * math.log(2 / tolerance) + 1)
        forecast = density.cg_iterations(
            self.damping,
            self.queries,
            generator=self.generator,
            tolerance=tolerance,
            deflated=settled_eigenvalues(rank) if rank else 0,
            scale=share,
        )
        return max(1, math.ceil(forecast.mean + lost))

    def lissa(self) -> Alternative:
        """As long as its start and the accuracy need."""
        spectrum, damping, n = self.spectrum, self.damping, self.num_terms
        shortest = Plan.tuned(spectrum, damping, num_terms=n, chains=self.chains, refine=1.0)
        # Without a density, d₂ ≤ d ≤ Tr(H)/λ
        dimension = spectrum.trace.value / damping
        if spectrum.density is not None:
            dimension = spectrum.density.second_dimension(damping).value
        needed = self._constant * dimension / (2 * (1 - self.accuracy)) / _TAIL
        refine = max(1.0, needed / shortest.num_term_products)
        plan = Plan.tuned(spectrum, damping, num_terms=n, chains=self.chains, refine=refine)
        how = f"{self.chains} chains of {plan.num_steps:,} steps with {plan.batch_size:,} fresh terms each"
        terms = plan.num_term_products
        work = self.passes.work(terms, plan.num_products)
        return self._priced(Alternative("lissa", terms, work, None, plan.memory_copies, how, refine))

    def refinement(self) -> Iterator[Alternative]:
        """Where a subset and a path are accurate enough, and error bars can be had."""
        if self.chains < 2:
            return
        settings = cheapest_refinement(
            self.spectrum,
            self.damping,
            num_terms=self.num_terms,
            queries=self.queries,
            accuracy=self.accuracy,
            chains=self.chains,
            C=self._constant,
            generator=self.generator,
        )
        if settings is None:
            return
        plan, starts = settings.plan, self.chains * settings.iterations
        work = self.passes.work(plan.num_term_products, plan.num_products)
        work += self.passes.work(starts * settings.subset, starts)
        how = (
            f"{self.chains} chains, each with about {settings.iterations} iterations of conjugate gradients on "
            f"{settings.subset:,} terms of its own, then {plan.num_steps:,} steps with {plan.batch_size:,} fresh terms"
        )
        copies = max(_CG_COPIES + self.chains, plan.memory_copies + self.chains + 1)
        yield self._priced(
            Alternative(
                "refinement", settings.terms, work, None, copies, how,
                subset=settings.subset, num_steps=plan.num_steps,
            )
        )  # fmt: skip

    @property
    def _constant(self) -> float:
        measured = self.spectrum.sampling_constant
        return max(1.0, 2.0 if measured is None else measured.value)

    def _priced(self, alternative: Alternative) -> Alternative:
        """With seconds."""
        per_term = self.spectrum.seconds_per_term
        return replace(alternative, seconds=None if per_term is None else alternative.work * per_term)
