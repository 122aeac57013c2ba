"""Two steps of an attribution, spectrum and plan: what is known of the curvature, and how to solve with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from whence.attribution.cost import count_passes
from whence.attribution.job import Job
from whence.model.importance import Importance, measure_importance
from whence.model.memory import half_of_memory
from whence.preconditioners import LowRank, nystrom
from whence.runs import Run
from whence.solvers import Solver
from whence.solvers.auto import Alternative, Choice, choose, make_solver
from whence.solvers.plan import Plan
from whence.spectrum import Spectrum, estimate_spectrum
from whence.tasks import Task

__all__ = ["Measured", "Planned", "make_plan", "measure"]

#: A constant C above this means that few examples carry the Hessian.
_NOISY = 6.0
#: What measuring a spectrum costs, in products as large as Lanczos'.
_SPECTRUM_PRODUCTS = 24


# --- spectrum ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """What is known of the curvature.

    Attributes:
        spectrum: with batches drawn as they will be.
        importance: what they are drawn by; None: all examples alike.
    """

    spectrum: Spectrum
    importance: Importance | None = None


def measure(run: Run, job: Job) -> Measured:
    """The spectrum; from here on batches are drawn by curvature, where that was asked for or pays."""
    own, sampling = job.own_solver, job.options.sampling
    importance = _draw_by_curvature(run, job) if sampling == "curvature" else None
    if own is not None and (plan := own.made_for()) is not None:
        return Measured(plan.spectrum, importance)
    spectrum = _spectrum(run, job, "spectrum")
    if sampling == "auto" and own is None and job.options.solver != "cg":
        # written down, since it depends on the machine's memory
        drawing = run.keep(
            "drawing", dict[str, bool], lambda: {"by_curvature": _curvature_pays(job, spectrum)}
        )
        if drawing["by_curvature"]:
            importance = _draw_by_curvature(run, job)
            return Measured(_spectrum(run, job, "spectrum-by-curvature"), importance)
    return Measured(spectrum, importance)


def _spectrum(run: Run, job: Job, name: str) -> Spectrum:
    def compute() -> Spectrum:
        random = job.options.generator(1)
        return estimate_spectrum(job.gnh, generator=random, terms=job.options.spectrum_terms)

    return run.keep(name, Spectrum, compute, operator=job.gnh)


def _draw_by_curvature(run: Run, job: Job) -> Importance:
    importance = run.keep("importance", Importance, lambda: measure_importance(job.gnh))
    job.gnh.terms.draw_by(importance.probabilities())
    return importance


def _curvature_pays(job: Job, spectrum: Spectrum) -> bool:
    """Whether drawing by curvature should save more than finding it out costs.

    The constant C of the batches' noise is about 2 when examples contribute alike; where it is surely far above, few of
    them carry the Hessian. LiSSA's cost is proportional to C, so ``2/C`` of it is what could be left; and before that a
    forward pass over the data (a fifth of a product), and the spectrum once more.
    """
    gnh, choice = job.gnh, _choice(job, spectrum)
    measured = (spectrum.sampling_constant, spectrum.top_sampling_constant)
    constants = [estimate for estimate in measured if estimate is not None]
    surely = max((estimate.value - estimate.stderr for estimate in constants), default=0.0)
    if type(gnh.task).curvature is Task.curvature or surely <= _NOISY:
        return False
    left = choice.of("lissa").terms * 2 / max(estimate.value for estimate in constants)
    again = gnh.num_terms / 5 + _SPECTRUM_PRODUCTS * min(job.options.spectrum_terms, gnh.num_terms)
    return left + again < choice.best.terms


# --- plan ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Planned:
    """How the queries will be solved for.

    Attributes:
        solver: ready to solve.
        plan: LiSSA's, in force or as the alternative; brings spectrum and damping.
        choice: why this solver, in words.
        drawn: how batches are drawn, in words, where that is not uniformly.
    """

    solver: Solver[Any]
    plan: Plan
    choice: str
    drawn: tuple[str, ...]


@dataclass(frozen=True)
class Chosen:
    """The part of a plan that is kept: which solver, why, and LiSSA's numbers."""

    alternative: Alternative
    words: str
    plan: Plan


def make_plan(run: Run, job: Job, measured: Measured) -> Planned:
    """The solver: the user's own, or the one that the rule of `whence.solvers.auto` takes."""
    own = job.own_solver
    if own is not None and (plan := own.made_for()) is not None:
        return Planned(own, plan, "", _drawn(measured.importance, own))
    chosen = run.keep("plan", Chosen, lambda: _choose(job, measured.spectrum))
    if own is not None:
        return Planned(own, chosen.plan, "", _drawn(measured.importance, own))
    solver = make_solver(
        chosen.alternative,
        chosen.plan,
        accuracy=float(job.options.accuracy),
        preconditioner=_preconditioner(run, job, chosen),
        # Inexact products must be told from converged ones; exact ones need no further product.
        verify=job.gnh.product != "exact",
    )
    return Planned(solver, chosen.plan, chosen.words, _drawn(measured.importance, solver))


def _choose(job: Job, spectrum: Spectrum) -> Chosen:
    options, choice = job.options, _choice(job, spectrum)
    plan = Plan.tuned(
        spectrum,
        options.damping,
        num_terms=job.gnh.num_terms,
        chains=options.chains,
        refine=choice.of("lissa").refine if options.refine is None else options.refine,
    )
    return Chosen(choice.best, choice.words() if options.solver == "auto" else "", plan)


def _choice(job: Job, spectrum: Spectrum) -> Choice:
    gnh, queries = job.gnh, len(job.queries)
    return choose(
        spectrum,
        job.options.damping,
        num_terms=gnh.num_terms,
        queries=queries,
        accuracy=float(job.options.accuracy),
        chains=job.options.chains,
        passes=count_passes(gnh, queries),
        memory_bytes=half_of_memory(gnh.network.device),
    ).asked(job.options.solver)


def _preconditioner(run: Run, job: Job, chosen: Chosen) -> LowRank | None:
    """Where one was chosen: made once, and kept with the run."""
    wanted = chosen.alternative
    if not wanted.rank:
        return None

    def compute() -> LowRank:
        random, damping = job.options.generator(4), chosen.plan.damping
        made = nystrom(job.gnh, damping, rank=wanted.rank, terms=wanted.rank_terms, generator=random)
        return made.shrunk()  # or errors could hardly be proven: it was made from a part of the terms

    return run.keep("preconditioner", LowRank, compute, operator=job.gnh, device=job.device)


def _drawn(importance: Importance | None, solver: Solver[Any]) -> tuple[str, ...]:
    if importance is None or not solver.independent:  # one that draws nothing
        return ()
    examples = len(importance.curvature)
    top = max(1, examples // 50)
    return (
        f"The model is certain of most of its training data: {top:,} of {examples:,} examples carry "
        f"{importance.share_of_top(top):.0%} of the output curvature. Batches were drawn by curvature.",
    )
