"""Two steps of an attribution, spectrum and plan: what is known of the curvature, and how to solve with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from whence.attribution.budget import Way
from whence.attribution.cost import count_passes
from whence.attribution.job import Job
from whence.attribution.phases import FACTOR_TERMS, TOP_TERMS
from whence.errors import OptionError, RunDirectoryError
from whence.model.gauss_newton import GaussNewton
from whence.model.importance import Importance, measure_importance
from whence.model.memory import half_of_memory
from whence.options import Options
from whence.preconditioners.ekfac import Ekfac, ekfac
from whence.runs import Run
from whence.runs.files import REMEDY
from whence.solvers import Solver
from whence.solvers.auto import Alternative, Choice, choose, make_cg, make_solver
from whence.solvers.factored import Factored
from whence.solvers.plan import Plan
from whence.spectrum import Estimate, Spectrum, estimate_spectrum
from whence.spectrum.lambda_max import lanczos
from whence.tasks import Task

__all__ = ["Planned", "choice_for", "make_factors", "make_plan", "measure_spectrum", "plan_quick"]

#: A constant C above this means that few examples carry the Hessian.
_NOISY = 6.0
#: LiSSA is refused where it would cost so many times what conjugate gradients do: days in place of minutes.
_HOPELESS = 1000.0
#: What measuring a spectrum costs, in products as large as Lanczos'.
_SPECTRUM_PRODUCTS = 24
#: EK-FAC's s where it stands in for H + λ, chosen by eye on the works of the benchmarks; as a preconditioner it is 1.
SCALE = 10.0
#: Iterations of conjugate gradients with EK-FAC, at most, and those whose basis must fit into memory.
_MOST, _KEPT_STEPS = 60, 16
#: What products show of the examples is kept for other λ while it is fewer numbers than this, for so many products.
_SLOPES, _SLOPES_STEPS = 2**26, 16


# --- spectrum ------------------------------------------------------------------------------------------------


def measure_spectrum(run: Run, job: Job, factors: Ekfac | None) -> Spectrum:
    """The spectrum, with batches drawn uniformly; that of a solver's own plan where it brings one.

    Where there are factors: the trace and the Frobenius norm (which is at least that) are theirs, and λmax is measured.
    """
    if job.own_plan is not None:
        return job.own_plan.spectrum
    if factors is None:
        return _spectrum(run, job, "spectrum")

    def compute() -> Spectrum:
        gnh, random = job.gnh, job.options.generator(1)
        found = lanczos(gnh.subset(min(TOP_TERMS, gnh.num_terms), random, distinct=True), generator=random)
        top = found.lambda_max
        return Spectrum(
            Estimate(max(factors.trace, top.value)),
            Estimate(max(factors.frobenius, top.value)),
            top,
            num_parameters=gnh.num_parameters,
        )

    return run.keep("spectrum", Spectrum, compute, operator=job.gnh)


def make_factors(run: Run, job: Job, way: Way) -> Ekfac | None:
    """EK-FAC in the job's coordinates, for any λ; None where it does not answer first."""
    if not way.factored:
        return None
    gnh = job.gnh
    enough = max(1, int(FACTOR_TERMS / gnh.terms.terms_per_example))

    def compute() -> Ekfac:
        some = enough if enough < len(gnh.terms) else None
        return ekfac(gnh, 1.0, generator=job.options.generator(7), examples=some)

    return run.keep("factors", Ekfac, compute, operator=gnh, device=job.device)


def _spectrum(run: Run, job: Job, name: str) -> Spectrum:
    def compute() -> Spectrum:
        random = job.options.generator(1)
        return estimate_spectrum(job.gnh, generator=random, terms=job.options.spectrum_terms)

    return run.keep(name, Spectrum, compute, operator=job.gnh)


def _draw_by_curvature(run: Run, job: Job) -> Importance:
    importance = run.keep("importance", Importance, lambda: measure_importance(job.gnh))
    job.gnh.terms.draw_by(importance.probabilities())
    return importance


def _drawing(run: Run, job: Job, spectrum: Spectrum, damping: float) -> tuple[Spectrum, Importance | None]:
    """From here on batches are drawn by curvature, where that was asked for or pays; the spectrum is then another."""
    sampling = job.options.sampling
    if sampling == "curvature":
        importance = _draw_by_curvature(run, job)
        if job.own_plan is not None:
            return spectrum, importance
    elif sampling == "auto" and job.own_solver is None and job.options.solver != "cg":
        # written down, since it depends on the machine's memory
        found = run.keep(
            "drawing", dict[str, bool], lambda: {"by_curvature": _curvature_pays(job, spectrum, damping)}
        )
        if not found["by_curvature"]:
            return spectrum, None
        importance = _draw_by_curvature(run, job)
    else:
        return spectrum, None
    return _spectrum(run, job, "spectrum-by-curvature"), importance


def _curvature_pays(job: Job, spectrum: Spectrum, damping: float) -> bool:
    """Whether drawing by curvature should save more than finding it out costs.

    The constant C of the batches' noise is about 2 when examples contribute alike; where it is surely far above, few of
    them carry the Hessian. LiSSA's cost is proportional to C, so ``2/C`` of it is what could be left; and before that a
    forward pass over the data (a fifth of a product), and the spectrum once more.
    """
    gnh, choice = job.gnh, _choice(job, spectrum, damping)
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
        limited: whether a budget ends the solve.
    """

    solver: Solver[Any]
    plan: Plan
    choice: str
    drawn: tuple[str, ...]
    limited: bool = False


@dataclass(frozen=True)
class Chosen:
    """The part of a plan that is kept: which solver, why, and LiSSA's numbers."""

    alternative: Alternative
    words: str
    plan: Plan


def plan_quick(job: Job, way: Way, factors: Ekfac, spectrum: Spectrum, damping: float) -> Planned:
    """The quick answer's: EK-FAC in place of H + λ."""
    solver = Factored(preconditioner=factors.with_damping(damping).with_scale(SCALE))
    plan = Plan.tuned(spectrum, damping, num_terms=job.gnh.num_terms, chains=job.options.chains)
    return Planned(solver, plan, way.words, ())


def make_plan(
    run: Run, job: Job, way: Way, factors: Ekfac | None, spectrum: Spectrum, damping: float
) -> Planned:
    """The solver: the user's own, or the one that the rule of `whence.solvers.auto` takes; from factors on, CG."""
    own = job.own_solver
    if factors is not None:
        plan = Plan.tuned(spectrum, damping, num_terms=job.gnh.num_terms, chains=job.options.chains)
        # written down, since it depends on the machine's memory
        basis = run.keep("basis", dict[str, bool], lambda: {"kept": _basis_fits(job)})
        refining = make_cg(
            job.options.correlation,
            certified=job.options.accuracy == "certified",
            max_iterations=_MOST if way.iterations is None else way.iterations,
            preconditioner=factors.with_damping(damping),
            keep_basis=basis["kept"],
            verify=job.gnh.product != "exact",
        )
        return Planned(refining, plan, way.words, (), limited=way.iterations is not None)
    spectrum, importance = _drawing(run, job, spectrum, damping)
    if own is not None and job.own_plan is not None:
        return Planned(own, job.own_plan, "", _drawn(importance, own))
    chosen = run.keep("plan", Chosen, lambda: _choose(job, spectrum, damping))
    if (chosen.plan.chains, chosen.plan.damping) != (job.options.chains, damping):
        raise RunDirectoryError(
            f"the plan in {run.path} is for {chosen.plan.chains} chains and λ = {chosen.plan.damping:.6g}, the run for "
            f"{job.options.chains} and {damping:.6g}. {REMEDY}"
        )
    if own is not None:
        return Planned(own, chosen.plan, "", _drawn(importance, own))
    solver = make_solver(
        chosen.alternative,
        chosen.plan,
        accuracy=job.options.correlation,
        certified=job.options.accuracy == "certified",
        # Inexact products must be told from converged ones; exact ones need no further product.
        verify=job.gnh.product != "exact",
        keep_slopes=_SLOPES_STEPS * len(job.questions) * len(job.gnh.terms) <= _SLOPES,
    )
    return Planned(solver, chosen.plan, chosen.words, _drawn(importance, solver))


def _choose(job: Job, spectrum: Spectrum, damping: float) -> Chosen:
    options, choice = job.options, _choice(job, spectrum, damping)
    if options.solver == "lissa":
        _check_worth_it(choice, job.gnh.num_terms)
    plan = Plan.tuned(
        spectrum,
        damping,
        num_terms=job.gnh.num_terms,
        chains=options.chains,
        refine=choice.of("lissa").refine if options.refine is None else options.refine,
    )
    return Chosen(choice.best, choice.words() if options.solver == "auto" else "", plan)


def _check_worth_it(choice: Choice, num_terms: int) -> None:
    """Refuse a plan of LiSSA that would go on for days: that of a model of which a few examples carry the curvature."""
    lissa, cg = choice.of("lissa"), choice.of("cg")
    if cg.impossible or lissa.work <= _HOPELESS * cg.work:
        return
    raise OptionError(
        f"LiSSA would go over the data {lissa.terms / num_terms:,.0f} times ({lissa.how}), conjugate gradients "
        f"{cg.terms / num_terms:,.0f} times: λ is small, or few examples carry the curvature. Use solver='cg', or "
        "'auto'; or a larger damping; or solver=whence.Lissa(plan), with a plan of your own"
    )


def _choice(job: Job, spectrum: Spectrum, damping: float) -> Choice:
    return choice_for(job.gnh, spectrum, damping, len(job.questions), job.options)


def choice_for(
    gnh: GaussNewton, spectrum: Spectrum, damping: float, queries: int, options: Options
) -> Choice:
    """What `whence.solvers.auto` says to so many queries, on this machine."""
    return choose(
        spectrum,
        damping,
        num_terms=gnh.num_terms,
        queries=queries,
        accuracy=options.correlation,
        chains=options.chains,
        passes=count_passes(gnh, queries),
        memory_bytes=gnh.network.ranks.told(lambda: half_of_memory(gnh.network.device)),
    ).asked(options.solver)


def _basis_fits(job: Job) -> bool:
    """Whether the blocks of a solve can all be kept, which proves errors where a preconditioner says little."""
    memory, columns = job.gnh.network.ranks.told(lambda: half_of_memory(job.device)), len(job.questions)
    return memory is None or 8.0 * job.gnh.num_parameters * columns * _KEPT_STEPS <= memory


def _drawn(importance: Importance | None, solver: Solver[Any]) -> tuple[str, ...]:
    if importance is None or not solver.independent:  # one that draws nothing
        return ()
    examples = len(importance.curvature)
    top = max(1, examples // 50)
    return (
        f"The model is certain of most of its training data: {top:,} of {examples:,} examples carry "
        f"{importance.share_of_top(top):.0%} of the output curvature. Batches were drawn by curvature.",
    )
