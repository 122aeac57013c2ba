"""How far to go: the quick answer, some of the way on from it, or an exact solve; by what these cost.

The phases of every way are in `whence.attribution.phases`, and counted before anything is run.

**The rule.** The exact solve, where it costs no more than the budget. Else the quick answer, by EK-FAC; and from it on
by conjugate gradients with EK-FAC as preconditioner, as many iterations as the rest of the budget pays, if these are
two or more. The budget is 2.5 times the quick answer's cost, and half a minute's work where that is more; with an
accuracy that is named there is none. A budget of time counts 30 Gflop for a second. Over more than 2¹⁸ terms, an
accuracy that is named is left to `whence.solvers.auto`: LiSSA's cost does not depend on their number.

Measured by ``python -m benchmarks.stages``: on small works the exact solve is worth its price, on language models the
quick answer agrees with retraining as well.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from whence.attribution.job import Job
from whence.attribution.phases import Costs, Unit, count_unit, list_phases
from whence.model.gauss_newton import GaussNewton
from whence.options import Budget, Options
from whence.runs import Run
from whence.scoring.cost import count_work

__all__ = ["Way", "choose_way", "count_prices", "way_for"]

#: The budget by default, in quick answers; and at least so many flops' worth.
MULTIPLE, HALF_A_MINUTE = 2.5, 1e12
#: From how many terms on stochastic steps may be the cheapest.
MANY = 2**18
#: Flops that one core does in a second, where no product was timed.
_PER_SECOND = 3e10


@dataclass(frozen=True)
class Way:
    """How far to go.

    Attributes:
        factored: whether EK-FAC answers first.
        solved: whether the system is then solved, or solved from the start.
        iterations: that this may take; None for as many as it needs.
        words: why, for the result.
    """

    factored: bool
    solved: bool
    iterations: int | None
    words: str


def count_prices(gnh: GaussNewton, queries: int, options: Options) -> Costs:
    """What an attribution of so many queries costs by its ways, in flops' worth."""
    work, n, exact = count_work(gnh), len(gnh.terms), gnh.product == "exact"

    def price(unit: Unit) -> float:
        return count_unit(work, unit, exact=exact, examples=n)

    return Costs.of(list_phases(gnh, queries, options), queries, price)


def choose_way(run: Run, job: Job) -> Way:
    """The way to go, by the rule at the top of this file; kept with the run."""

    def compute() -> Way:
        if job.own_solver is not None:
            return Way(False, True, None, "")
        return way_for(job.gnh, len(job.questions), job.options)

    return run.keep("way", Way, compute)


def way_for(gnh: GaussNewton, queries: int, options: Options) -> Way:
    """The way to go for so many queries."""
    if options.solver != "auto":
        return Way(False, True, None, "")
    if options.accuracy == "quick":
        return Way(True, False, 0, "The quick answer was asked for.")
    prices = count_prices(gnh, queries, options)
    budget, limit = Budget.parse(options.budget), math.inf
    if budget.multiple is not None:
        limit = budget.multiple * prices.quick
    elif budget.seconds is not None:
        limit = budget.seconds * _PER_SECOND
    elif options.accuracy == "auto":
        limit = max(MULTIPLE * prices.quick, HALF_A_MINUTE)
    exact = prices.exact <= (limit if math.isfinite(limit) else HALF_A_MINUTE)
    if exact or options.until is not None or (math.isinf(limit) and gnh.num_terms > MANY):
        return Way(False, True, None, "")
    if math.isinf(limit):
        return Way(True, True, None, "")
    iterations, times = int((limit - prices.quick) / prices.iteration), limit / prices.quick
    if iterations < 2:
        return Way(
            True,
            False,
            0,
            f"An exact solve would cost {prices.exact / prices.quick:.2g} times as much as this answer, and the budget "
            f"is {times:.2g} times: ask for accuracy=0.99, or for a larger budget, to have it.",
        )
    return Way(True, True, iterations, f"The budget was {times:.2g} times the cost of the quick answer.")
