"""What an attribution will cost, told before anything long starts.

Time is *timed*: every unit of work that `whence.attribution.phases` lists is run on a few examples, for the seconds of
a counted flop in it; all the rest is counting. What is timed is at most about a third of the quick answer, and needs no
more memory than a few vectors. What is chosen never depends on it (`whence.attribution.budget` counts).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import torch

from whence.attribution.budget import Way, count_prices
from whence.attribution.phases import FACTOR_TERMS, Costs, Kind, Unit, count_unit, list_phases
from whence.model.gauss_newton import GaussNewton
from whence.operators import Damped
from whence.options import Options
from whence.preconditioners.ekfac import basis_widths, draws_of_each, ekfac
from whence.scoring import Scorer
from whence.scoring.cost import count_work
from whence.solvers.auto import CG_COPIES, Alternative, Passes
from whence.solvers.cg import ConjugateGradient
from whence.solvers.plan import Plan
from whence.vectors import ParamVector

__all__ = ["Forecast", "count_passes", "forecast", "spectrum_terms", "time_phases"]

#: The part of the quick answer that timing a unit may take; and its vectors, in bytes.
_SHARE, _BYTES = 0.05, 64 * 2**20
#: Products that Lanczos may take, and terms that are few enough for any.
_LANCZOS, _FEWEST = 24, 64
#: Draws for each example that EK-FAC is timed with, at most.
_DRAWS = 10
#: How wide the decomposition is that is timed.
_WIDTH = 256
#: A unit is tried on so many examples first, so that what a first call costs is not counted.
_TRIED = 2


def time_phases(gnh: GaussNewton, queries: int, options: Options, *, examples: int | None = None) -> Costs:
    """Seconds of the ways to an answer on this machine, as busy as it is now.

    Args:
        gnh: the operator.
        queries: right-hand sides.
        options: of the attribution.
        examples: to be scored; all by default.
    """
    timer = _Timer(gnh, count_prices(gnh, queries, options).quick, queries, options)
    return Costs.of(list_phases(gnh, queries, options, examples=examples), queries, timer.seconds)


class _Timer:
    """Seconds of units over all of the data, each kind timed once."""

    def __init__(self, gnh: GaussNewton, quick: float, queries: int, options: Options) -> None:
        self.gnh, self.work, self.affordable, self.options = gnh, count_work(gnh), _SHARE * quick, options
        self.generator = torch.Generator().manual_seed(0)
        bytes_each = sum(t.numel() * t.element_size() for t in gnh.zeros().values())
        #: Vectors that fit, of those which there will be.
        self.columns = max(1, min(queries, _BYTES // bytes_each))
        self.rates: dict[Kind, float] = {}
        self.algebra: float | None = None

    def seconds(self, unit: Unit) -> float:
        """Of a unit over all of the data."""
        if unit.kind not in self.rates:
            self.rates[unit.kind] = self._time(unit.kind)
        n = 1 if unit.kind == "query" else len(self.gnh.terms)
        found = self.rates[unit.kind] * self._count(unit, n)
        if unit.kind == "iteration":
            if self.algebra is None:
                self.algebra = self._algebra()
            found += self.algebra * unit.columns / self.columns
        if unit.kind == "factors":
            found += self._bases()
        return found

    def _count(self, unit: Unit, examples: int) -> float:
        return count_unit(self.work, unit, exact=self.gnh.product == "exact", examples=examples)

    def _time(self, kind: Kind) -> float:
        """Seconds of a counted flop in this kind of work: on as many examples as may be, in one pass."""
        columns = 1 if kind in ("gradients", "query", "product", "factors") else self.columns
        unit, gnh = Unit(kind, columns), self.gnh
        block = None if columns == 1 else gnh.zeros(columns).randn_like(self.generator)
        at_once = gnh.micro_batch if block is None else gnh.examples_at_once(block)
        n = min(len(gnh.terms), at_once)
        while n > _TRIED and self._count(unit, n) > self.affordable:
            n //= 2
        work = self._work(kind, gnh.zeros().randn_like(self.generator) if block is None else block)
        spread = gnh.terms.spread(1 if kind == "query" else n)
        if kind != "factors":  # which would find its bases twice
            work(spread[:_TRIED])
        taken = _seconds(lambda: work(spread))
        if kind == "factors":
            taken = max(taken - self._bases(), taken / 2)
        return taken / self._count(unit, len(spread))

    def _work(self, kind: Kind, vectors: ParamVector) -> Callable[[torch.Tensor], object]:
        gnh = self.gnh
        if kind == "gradients":
            return gnh.training_gradient
        if kind == "factors":
            draws = min(_DRAWS, draws_of_each(gnh.num_terms))
            return lambda where: ekfac(gnh, 1.0, generator=self.generator, examples=len(where), samples=draws)
        if kind == "query":
            return lambda where: gnh.gradients([gnh.terms.data[int(gnh.terms.indices[where[0]])]])
        if kind in ("product", "iteration"):
            return lambda where: gnh.over(where).matvec(vectors)
        method = self.options.method if kind == "scores" else "layers"
        if kind == "norms" and gnh.example_gradients().missing:
            method = "gradients"
        scorer = Scorer(gnh, vectors, method=method, norms=kind == "norms")  # type: ignore[arg-type]  # checked
        return scorer.score

    def _algebra(self) -> float:
        """Of an iteration, beside its product: half of a solve on an example; the rest is its beginning and end."""
        solver = ConjugateGradient(max_iterations=1, tolerance=1e-6, verify=False)
        system = Damped(self.gnh.over(torch.arange(1)), 1.0)
        vectors = self.gnh.zeros(self.columns).randn_like(self.generator)
        solved = _seconds(lambda: solver.solve(system, vectors, generator=self.generator))
        return max(0.0, solved - _seconds(lambda: system.matvec(vectors))) / 2

    def _bases(self) -> float:
        """Of EK-FAC's eigenvectors: a small decomposition is timed, and wider ones take the cube of their width."""
        widths = basis_widths(self.gnh, min(FACTOR_TERMS, self.gnh.num_terms))
        tried = min(_WIDTH, max(widths, default=1))
        matrix = torch.randn(tried, tried, dtype=torch.float64, generator=self.generator)
        found = _seconds(lambda: torch.linalg.eigh(matrix @ matrix.T))
        return found * sum((width / tried) ** 3 for width in widths)


def _seconds(work: Callable[[], object]) -> float:
    begun = perf_counter()
    work()
    return perf_counter() - begun


def spectrum_terms(gnh: GaussNewton, queries: int, options: Options) -> int:
    """Terms that a plan measures the spectrum on: Lanczos then costs no more than half of the quick answer."""
    quick = count_prices(gnh, queries, options).quick
    product = count_unit(
        count_work(gnh), Unit("product"), exact=gnh.product == "exact", examples=len(gnh.terms)
    )
    fitting = quick / 2 / (_LANCZOS * product) * gnh.num_terms
    return max(_FEWEST, min(options.spectrum_terms, int(fitting)))


@dataclass(frozen=True)
class Forecast:
    """Predicted cost of an attribution.

    Attributes:
        seconds: of what `whence.attribute` will do, from the model to the scores.
        quick_seconds, iteration_seconds, exact_seconds: of the quick answer, of an iteration more for all queries, and
            of an exact solve.
        memory_bytes: of vectors, beside the model and one batch's activations.
        disk_bytes: of a run directory at its largest.
    """

    seconds: float
    quick_seconds: float
    iteration_seconds: float
    exact_seconds: float
    memory_bytes: int
    disk_bytes: int


def forecast(
    gnh: GaussNewton,
    way: Way,
    options: Options,
    *,
    queries: int,
    examples: int | None = None,
    plan: Plan | None = None,
    solver: Alternative | None = None,
) -> Forecast:
    """Predict the cost of an attribution.

    Args:
        gnh: the operator, in the metric of its damping.
        way: that it will go.
        options: of the attribution.
        queries: right-hand sides solved together: they share every batch and its pass at θ.
        examples: to be scored; all by default.
        plan: of the solve, where there will be one from the start.
        solver: the one that was chosen for it.
    """
    scored = len(gnh.terms) if examples is None else examples
    costs = time_phases(gnh, queries, options, examples=examples)
    iterations: float = costs.expected
    chains, copies = 1, CG_COPIES * queries
    if plan is not None and solver is not None:
        # what starting a pass costs is in the time of an iteration; LiSSA's small batches start more of them
        iterations = (solver.terms if solver.solver == "cg" else solver.work) / gnh.num_terms
        copies, chains = solver.memory_copies, 1 if solver.solver == "cg" else plan.chains
    exact = costs.before + iterations * costs.iteration
    seconds = costs.quick if way.factored else exact
    if way.factored and way.solved:
        seconds = costs.going_on(way.iterations)
    vector = sum(t.numel() * t.element_size() for t in gnh.zeros().values())
    baseline = int(options.baseline)
    return Forecast(
        seconds=seconds,
        quick_seconds=costs.quick,
        iteration_seconds=costs.iteration,
        exact_seconds=exact,
        memory_bytes=vector * max(copies if way.solved else 0, queries * (2 * chains + 1 + baseline)),
        disk_bytes=vector * (queries * chains + copies) + queries * scored * (chains + 5) * 8,
    )


def count_passes(gnh: GaussNewton, queries: int) -> Passes:
    """What starting a pass is worth, in terms: counted in launches and flops, as `whence.scoring.cost` does.

    A product of q columns is 1 + 4q forwards. Exact products start five of them, whatever q; finite differences all.
    """
    work = count_work(gnh)
    forwards = 1 + 4 * queries
    started = 5 if gnh.product == "exact" else forwards
    per_term = forwards * work.flops / gnh.terms.terms_per_example
    return Passes(
        start=started * work.launching / max(per_term, 1.0),
        terms=gnh.micro_batch * gnh.terms.terms_per_example,
    )
