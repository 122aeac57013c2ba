"""What an attribution may cost, and what that buys: the quick answer, some of the way on from it, or an exact solve.

Costs are counted before anything is run, in the currency of `whence.scoring.cost`. With F the work of a forward pass
over one example, c what starting one costs for each example, q queries and K(q) iterations:

    quick       metric 3(F + c), factors 9(F + c), one product 5F + 5c, scores
    exact       metric, spectrum, strain 8(33F + 5c) + 3(F + c), halves of the data 8(17F + 5c),
                conjugate gradients K((1 + 4q)F + 5c), scores

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
from whence.attribution.strain import PROBES
from whence.model.gauss_newton import GaussNewton
from whence.model.second_moment import BATCH, BATCHES
from whence.options import Budget, Options
from whence.runs import Run
from whence.scoring.cost import count_work
from whence.solvers.plan import part_of_auto

__all__ = ["Prices", "Way", "choose_way", "count_prices", "way_for"]

#: The budget by default, in quick answers; and at least so many flops' worth.
MULTIPLE, HALF_A_MINUTE = 2.5, 1e12
#: Terms that EK-FAC is made from, at most; and from how many on stochastic steps may be the cheapest.
FACTOR_TERMS, MANY = 2**17, 2**18
#: Flops that one core does in a second, where no product was timed.
_PER_SECOND = 3e10
#: Products of the spectrum, and of a solve on halves of the data, for how many columns.
_SPECTRUM, HALVES, HALVES_COLUMNS = 24, 8, 4
#: Forwards of EK-FAC's two passes, with all that is done between them.
_FACTORS = 9


@dataclass(frozen=True)
class Prices:
    """Counted work, in flops' worth over all of the data.

    Attributes:
        quick: of the quick answer.
        exact: of an exact solve and what goes before it.
        iteration: of one more iteration, for all queries.
        product: of a product with one vector.
    """

    quick: float
    exact: float
    iteration: float
    product: float

    def of(self, way: Way) -> float:
        """What goes this way; without a limit, with as many iterations as are expected of an exact solve."""
        if not way.factored:
            return self.exact
        if not way.solved:
            return self.quick
        return self.quick + (
            self.exact - self.quick if way.iterations is None else way.iterations * self.iteration
        )


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


def count_prices(gnh: GaussNewton, queries: int, options: Options) -> Prices:
    """What an attribution of so many queries costs, by its ways."""
    weighed = part_of_auto(options.damping) is not None
    work, n = count_work(gnh), len(gnh.terms)
    F, c = work.flops, work.launching / work.batch
    started = 5 if gnh.product == "exact" else 1 + 4 * queries

    def product(columns: int) -> float:
        return (1 + 4 * columns) * F + (5 if gnh.product == "exact" else 1 + 4 * columns) * c

    score = min(work.layers(queries, norms=False), work.gradients(queries))
    shared = 3 * min(1.0, BATCH * BATCHES / n) * (F + c) + score + 3 * queries * (F + work.launching) / n
    iteration = (1 + 4 * queries) * F + started * c
    part = min(1.0, options.spectrum_terms / gnh.num_terms)
    exact = shared + part * _SPECTRUM * product(1) + expected_iterations(queries) * iteration
    if weighed:
        exact += HALVES * (product(HALVES_COLUMNS) + product(PROBES)) + 3 * (F + c)
    quick = shared + _FACTORS * min(1.0, FACTOR_TERMS / gnh.num_terms) * (F + c) + product(1)
    return Prices(n * quick, n * exact, n * iteration, n * product(1))


def expected_iterations(queries: int) -> int:
    """K(q): a rough guess of what block conjugate gradients take, 12 for one query and 4 for fifty."""
    return max(3, round(12 * math.pow(queries, -0.3)))


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
