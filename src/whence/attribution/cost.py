"""What an attribution will cost, told before anything long starts.

Time is *timed*: every phase is run on a few examples and taken as many times as it will be. What is chosen never
depends on it (`whence.attribution.budget` counts).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from whence.attribution.budget import FACTOR_TERMS, HALVES, HALVES_COLUMNS, Way, expected_iterations
from whence.attribution.strain import PROBES
from whence.model.gauss_newton import GaussNewton
from whence.model.second_moment import BATCH, BATCHES
from whence.operators import Damped
from whence.options import Options
from whence.preconditioners.ekfac import ekfac
from whence.scoring import Scorer
from whence.scoring.cost import count_work
from whence.solvers.auto import CG_COPIES, Alternative, Passes
from whence.solvers.cg import ConjugateGradient
from whence.solvers.plan import Plan, part_of_auto
from whence.vectors import ParamVector

__all__ = ["Forecast", "Paces", "count_passes", "forecast", "time_phases"]

#: Products over the whole that the spectrum is worth, and those over a small part that λmax alone takes.
_SPECTRUM, _TOP, _TOP_TERMS = 24, 12, 1024


@dataclass(frozen=True)
class Paces:
    """Seconds of the phases of an attribution on this machine, as busy as it is now.

    Attributes:
        metric: the second moment of gradients.
        asked: the queries' gradients.
        factors: EK-FAC.
        product: with one vector, over all of the data.
        strain: a few examples solved for on all of the data, found by the lengths of their gradients.
        halves: two halves of the data, solved for a few mixtures.
        iteration: a product with all queries, and the algebra of conjugate gradients.
        spectrum: all that is measured of it; ``top``: λmax alone.
        scores: of all examples to be scored; ``norms``: with the lengths of their gradients, which a proof needs.
    """

    metric: float
    asked: float
    factors: float
    product: float
    strain: float
    halves: float
    iteration: float
    spectrum: float
    top: float
    scores: float
    norms: float

    @property
    def quick(self) -> float:
        """The quick answer, from the model to its scores."""
        return self.metric + self.asked + self.factors + self.top + self.product + self.scores

    def exact(self, iterations: float) -> float:
        """An exact solve of so many iterations, with all that goes before and after it."""
        known = self.metric + self.asked + self.spectrum + self.strain + self.halves
        return known + iterations * self.iteration + self.norms

    def of(self, way: Way, iterations: float) -> float:
        """What goes this way, with as many iterations as an exact solve should take."""
        if not way.factored:
            return self.exact(iterations)
        more = iterations if way.iterations is None else way.iterations
        return self.quick + (more * self.iteration + self.norms if way.solved else 0.0)


def time_phases(gnh: GaussNewton, queries: int, options: Options, *, examples: int | None = None) -> Paces:
    """Run every phase on as many examples as fit into one pass.

    Args:
        gnh: the operator, in the metric of its damping.
        queries: right-hand sides.
        options: of the attribution.
        examples: to be scored; all by default.
    """
    n, generator = len(gnh.terms), torch.Generator().manual_seed(0)
    some = torch.linspace(0, n - 1, min(n, gnh.micro_batch)).long().unique()
    scored = n if examples is None else examples
    vector, block = gnh.zeros().randn_like(generator), gnh.zeros(queries).randn_like(generator)
    plain, proven = (
        Scorer(gnh, block, method=options.method, norms=norms)  # type: ignore[arg-type]  # checked
        for norms in (False, True)
    )
    lengths = Scorer(
        gnh, gnh.zeros(1), method="gradients" if gnh.example_gradients().missing else "layers", norms=True
    )

    def growing(work: Callable[[Tensor], object], count: int = len(some)) -> float:
        """Over all of the data, from so many of them; what a first call costs is not counted."""
        where = some[: max(1, count)]
        work(some[:2])
        return n / len(where) * _seconds(lambda: work(where))

    def algebra(columns: ParamVector) -> float:
        """Of an iteration, beside its product: half of a solve on two examples; the rest is its beginning and end."""
        solver = ConjugateGradient(max_iterations=1, tolerance=1e-6, keep_slopes=True, verify=False)
        system = Damped(gnh.over(some[:2]), 1.0)
        taken = [_seconds(lambda: solver.solve(system, columns, generator=generator)) for _ in range(2)]
        return max(0.0, min(taken) - _seconds(lambda: system.matvec(columns))) / 2

    def factoring(count: int) -> float:
        return _seconds(lambda: ekfac(gnh, 1.0, generator=generator, examples=count))

    factoring(1)
    part = min(1.0, FACTOR_TERMS / gnh.num_terms)
    product = growing(lambda where: gnh.over(where).matvec(vector))
    weighed = part_of_auto(options.damping) is not None and n > HALVES_COLUMNS

    def solved(columns: int) -> float:
        few = gnh.zeros(columns).randn_like(generator)
        return HALVES * (growing(lambda where: gnh.over(where).matvec(few), len(some) // 4) + algebra(few))

    return Paces(
        metric=growing(gnh.training_gradient) * min(1.0, BATCH * BATCHES / n),
        asked=queries * _seconds(lambda: gnh.gradients([gnh.terms.data[int(gnh.terms.indices[0])]])),
        # beyond the examples that it is tried on, 9 forwards each, where a product is 5
        factors=factoring(len(some)) + 9 / 5 * product * max(0.0, part - len(some) / n),
        product=product,
        strain=solved(PROBES) + growing(lengths.score) if weighed else 0.0,
        halves=solved(HALVES_COLUMNS) if weighed else 0.0,
        iteration=growing(lambda where: gnh.over(where).matvec(block), gnh.examples_at_once(block))
        + algebra(block),
        spectrum=_SPECTRUM * min(1.0, options.spectrum_terms / gnh.num_terms) * product,
        top=_TOP * min(1.0, _TOP_TERMS / gnh.num_terms) * product,
        scores=growing(plain.score) * scored / n,
        norms=growing(proven.score) * scored / n,
    )


def _seconds(work: Callable[[], object]) -> float:
    begun = perf_counter()
    work()
    return perf_counter() - begun


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
    paces = time_phases(gnh, queries, options, examples=examples)
    iterations: float = expected_iterations(queries)
    chains, copies = 1, CG_COPIES * queries
    if plan is not None and solver is not None:
        # what starting a pass costs is in the time of an iteration; LiSSA's small batches start more of them
        iterations = (solver.terms if solver.solver == "cg" else solver.work) / gnh.num_terms
        copies, chains = solver.memory_copies, 1 if solver.solver == "cg" else plan.chains
    vector = sum(t.numel() * t.element_size() for t in gnh.zeros().values())
    baseline = int(options.baseline)
    return Forecast(
        seconds=paces.of(way, iterations),
        quick_seconds=paces.quick,
        iteration_seconds=paces.iteration,
        exact_seconds=paces.exact(iterations),
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
