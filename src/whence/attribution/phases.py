"""The phases of an attribution, in one list: counted to choose a way (`budget`), timed to foretell it (`cost`).

A phase is so many times a unit of work over all of the data. A unit is counted in the currency of
`whence.scoring.cost`: with F the work of a forward pass over one example and c what starting one costs for each,

    gradients       3(F + c)           of the training loss
    query           3(F + c) once      of one example alone
    factors         9(F + c)           EK-FAC's two passes, with all that is done between them
    product         5F + 5c            with one vector
    iteration of k  (1 + 4k)F + 5c     a product with k vectors, and the algebra of conjugate gradients
    scores of k     directions: the cheaper of `Work.layers` and `Work.gradients`
    norms of k      the same with the lengths of the examples' gradients
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from whence.attribution.strain import AMONG, AMONG_FACTORED, PROBES
from whence.model.gauss_newton import GaussNewton
from whence.model.second_moment import BATCH, BATCHES
from whence.options import Options
from whence.scoring.cost import Work
from whence.solvers.plan import part_of_auto

__all__ = [
    "FACTOR_TERMS",
    "TOP_TERMS",
    "Costs",
    "Phase",
    "Unit",
    "count_unit",
    "expected_iterations",
    "list_phases",
]

Kind = Literal["gradients", "query", "factors", "product", "iteration", "scores", "norms"]

#: Terms that EK-FAC is made from, at most; and those that λmax is measured on where nothing else of the spectrum is.
FACTOR_TERMS, TOP_TERMS = 2**17, 1024
#: Products of the whole spectrum, of λmax alone, and of a solve for the strain or on halves of the data.
_SPECTRUM, _TOP, _ROUGH = 24, 12, 8
#: What a forward pass costs, in products.
_FORWARD = 0.2
#: Columns that are solved for on each half of the data; both halves together are all of it.
_HALVES_COLUMNS = 4


@dataclass(frozen=True)
class Unit:
    """A kind of work over all of the data, for so many vectors at once."""

    kind: Kind
    columns: int = 1


@dataclass(frozen=True)
class Phase:
    """So many times a unit, on the way to the quick answer, on that of an exact solve, or on both."""

    name: str
    unit: Unit
    times: float
    quick: bool = True
    exact: bool = True


def list_phases(
    gnh: GaussNewton, queries: int, options: Options, *, examples: int | None = None
) -> tuple[Phase, ...]:
    """All phases but the iterations of the solve itself.

    Args:
        gnh: the operator.
        queries: right-hand sides solved together.
        options: of the attribution.
        examples: to be scored; all by default.
    """
    n, terms = len(gnh.terms), gnh.num_terms
    weighed = float(part_of_auto(options.damping) is not None)
    scored = 1.0 if examples is None else examples / n
    directions = queries * (1 + int(options.baseline))
    product, lengths = Unit("product"), Unit("norms")
    return (
        Phase("metric", Unit("gradients"), weighed * min(1.0, BATCH * BATCHES / n)),
        Phase("queries", Unit("query"), queries),
        Phase("factors", Unit("factors"), min(1.0, FACTOR_TERMS / terms), exact=False),
        Phase("λmax", product, _TOP * min(1.0, TOP_TERMS / terms), exact=False),
        Phase("outputs", product, weighed * _FORWARD * float(n > AMONG_FACTORED), exact=False),
        Phase("strain by factors", lengths, weighed * min(1.0, AMONG_FACTORED / n), exact=False),
        Phase("scale", product, 1.0, exact=False),
        Phase("scores", Unit("scores", directions), scored, exact=False),
        Phase("spectrum", product, _SPECTRUM * min(1.0, options.spectrum_terms / terms), quick=False),
        Phase("all outputs", product, weighed * _FORWARD * float(n > AMONG), quick=False),
        Phase("strain, among", lengths, weighed * min(1.0, AMONG / n), quick=False),
        Phase("strain", Unit("iteration", PROBES), weighed * _ROUGH, quick=False),
        Phase("halves", Unit("iteration", _HALVES_COLUMNS), weighed * _ROUGH, quick=False),
        Phase("proven scores", Unit("norms", directions), scored, quick=False),
    )


@dataclass(frozen=True)
class Costs:
    """What the ways to an answer cost together, counted or in seconds.

    Attributes:
        quick: the quick answer, from the model to its scores.
        before: an exact solve, with all that goes before and after it, but for its iterations.
        iteration: one iteration, for all queries.
        expected: how many of these an exact solve should take.
        proven: scoring again, after going on from the quick answer.
    """

    quick: float
    before: float
    iteration: float
    expected: float
    proven: float

    @classmethod
    def of(cls, phases: Sequence[Phase], queries: int, price: Callable[[Unit], float]) -> Costs:
        """All phases at the price of their units."""
        spent = {phase.name: phase.times * price(phase.unit) if phase.times else 0.0 for phase in phases}
        return cls(
            quick=sum(spent[phase.name] for phase in phases if phase.quick),
            before=sum(spent[phase.name] for phase in phases if phase.exact),
            iteration=price(Unit("iteration", queries)),
            expected=expected_iterations(queries),
            proven=spent["proven scores"],
        )

    @property
    def exact(self) -> float:
        """An exact solve, and all that goes before and after it."""
        return self.before + self.expected * self.iteration

    def going_on(self, iterations: float | None) -> float:
        """From the quick answer by so many iterations; None for as many as an exact solve takes."""
        more = self.expected if iterations is None else iterations
        return self.quick + more * self.iteration + self.proven


def expected_iterations(queries: int) -> int:
    """K(q): a rough guess of what block conjugate gradients take, 12 for one query and 4 for fifty."""
    return max(3, round(12 * math.pow(queries, -0.3)))


def count_unit(work: Work, unit: Unit, *, exact: bool, examples: int) -> float:
    """Flops' worth of a unit over so many examples; ``exact``: whether products are."""
    work = replace(work, batch=max(1, min(work.batch, examples)))
    F, c, k = work.flops, work.launching / work.batch, unit.columns
    if unit.kind == "query":
        return 3 * (F + work.launching)
    if unit.kind in ("gradients", "factors"):
        return examples * (9 if unit.kind == "factors" else 3) * (F + c)
    if unit.kind in ("product", "iteration"):
        return examples * ((1 + 4 * k) * F + (5 if exact else 1 + 4 * k) * c)
    return examples * min(work.layers(k, norms=unit.kind == "norms"), work.gradients(k))
