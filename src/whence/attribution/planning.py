"""From the spectrum to a solver that is ready to solve: the second phase of an attribution."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import Tensor

from whence.attribution.forecast import count_passes
from whence.attribution.kronecker import Trial, kronecker
from whence.attribution.sampling import curvature_pays, draw_by_curvature
from whence.attribution.saving import plan_from_json, plan_to_json, spectrum_from_json, spectrum_to_json
from whence.attribution.settings import Settings
from whence.model.gauss_newton import GaussNewton
from whence.model.memory import half_of_memory
from whence.preconditioners import LowRank, nystrom
from whence.runs import Run
from whence.solvers import ConjugateGradient, Lissa, Refinement
from whence.solvers.choice import Alternative, Choice, choose, make_solver
from whence.solvers.plan import Plan
from whence.spectrum import Spectrum, estimate_spectrum

__all__ = ["Planned", "make_plan"]


@dataclass(frozen=True)
class Planned:
    """How the queries will be solved for.

    Attributes:
        solver: ready to solve.
        plan: LiSSA's, in force or as the alternative; brings spectrum and damping.
        choice: why this solver, in words.
        drawn: how batches are drawn, in words, where that is not uniformly.
    """

    solver: Lissa | ConjugateGradient | Refinement
    plan: Plan
    choice: str
    drawn: tuple[str, ...]


def make_plan(run: Run, gnh: GaussNewton, settings: Settings, queries: int) -> Planned:
    """Spectrum, choice of the solver, and its settings."""
    if isinstance(settings.solver, (Lissa, Refinement)):
        drawn = draw_by_curvature(run, gnh) if settings.sampling == "curvature" else ()
        return Planned(settings.solver, settings.solver.plan, "", drawn)
    drawn = ()
    if settings.sampling == "curvature":
        drawn = draw_by_curvature(run, gnh)
    spectrum = _measured(run, gnh, settings, "spectrum")
    chosen, words, lissa_terms = _choose(run, gnh, settings, spectrum, queries, "choice")
    if settings.sampling == "auto" and settings.solver in ("auto", "lissa", "refinement"):
        if curvature_pays(
            gnh,
            spectrum,
            terms=chosen.terms,
            lissa_terms=lissa_terms,
            spectrum_terms=settings.lanczos_terms,
        ):
            drawn = draw_by_curvature(run, gnh)
            spectrum = _measured(run, gnh, settings, "spectrum-by-curvature")
            chosen, words, _ = _choose(run, gnh, settings, spectrum, queries, "choice-by-curvature")
        if chosen.solver == "cg":  # which draws nothing
            gnh.terms.importance, drawn = None, ()
    plan = _tuned(gnh, settings, spectrum, chosen.refine)
    if chosen.solver == "refinement":
        plan = plan.replace(num_steps=chosen.num_steps)
    plan = plan_from_json(run.json("plan", lambda: plan_to_json(plan)), spectrum)
    if isinstance(settings.solver, ConjugateGradient):
        return Planned(settings.solver, plan, words, drawn)
    trial = Trial()
    if settings.solver == "auto":
        trial = kronecker(run, gnh, settings, chosen, queries=queries, damping=plan.damping)
    layers = trial.preconditioner
    solver = make_solver(
        replace(chosen, refine=chosen.refine if settings.refine is None else settings.refine),
        spectrum,
        plan.damping,
        num_terms=gnh.num_terms,
        accuracy=settings.accuracy,
        chains=settings.chains,
        preconditioner=layers or _preconditioner(run, gnh, settings, plan.damping, chosen),
        keep_basis=layers
        is not None,  # nothing is known of EK-FAC's quality that an error could be proven by
        # Inexact products must be told from converged ones; exact ones need no further product.
        verify=gnh.product != "exact",
    )
    return Planned(solver, plan, words + trial.words, drawn)


def _choose(
    run: Run, gnh: GaussNewton, settings: Settings, spectrum: Spectrum, queries: int, name: str
) -> tuple[Alternative, str, float]:
    """Which solver and why, and LiSSA's terms; written down, since it depends on the machine's memory."""

    def compute() -> dict[str, Any]:
        choice = choose(
            spectrum,
            settings.damping,
            num_terms=gnh.num_terms,
            queries=queries,
            accuracy=settings.accuracy,
            chains=settings.chains,
            passes=count_passes(gnh, queries),
            memory_bytes=half_of_memory(gnh.network.device),
            generator=settings.generator(3),
        )
        return {
            "chosen": asdict(_asked(choice, settings)),
            "words": choice.words() if settings.solver == "auto" else "",
            "lissa_terms": choice.of("lissa").terms,
        }

    found = run.json(name, compute)
    return Alternative(**found["chosen"]), found["words"], found["lissa_terms"]


def _asked(choice: Choice, settings: Settings) -> Alternative:
    """The alternative that the settings name; the cheapest where they leave it open."""
    if settings.solver == "auto":
        return choice.best
    name = "cg" if isinstance(settings.solver, ConjugateGradient) else settings.solver
    assert name in ("cg", "lissa", "refinement")
    return choice.of(name)


def _preconditioner(
    run: Run, gnh: GaussNewton, settings: Settings, damping: float, chosen: Alternative
) -> LowRank | None:
    """Where one was chosen: made once, and kept with the run."""
    if not chosen.rank:
        return None

    def compute() -> tuple[dict[str, Tensor], dict[str, Any]]:
        made = nystrom(
            gnh, damping, rank=chosen.rank, terms=chosen.rank_terms, generator=settings.generator(4)
        )
        made = made.shrunk()  # or errors could hardly be proven: it was made from a part of the terms
        return made.tensors(), {**made.notes(), "operator": gnh.state()}

    tensors, notes = run.tensors("preconditioner", compute, gnh.network.device)
    gnh.restore_state(notes.pop("operator"))
    return LowRank.from_tensors(tensors, notes)


def _tuned(gnh: GaussNewton, settings: Settings, spectrum: Spectrum, needed: float) -> Plan:
    refine = needed if settings.refine is None else settings.refine
    return Plan.tuned(
        spectrum, settings.damping, num_terms=gnh.num_terms, chains=settings.chains, refine=refine
    )


def _measured(run: Run, gnh: GaussNewton, settings: Settings, name: str) -> Spectrum:
    def measure() -> dict[str, Any]:
        spectrum = estimate_spectrum(gnh, generator=settings.generator(1), terms=settings.lanczos_terms)
        return {**spectrum_to_json(spectrum), "operator": gnh.state()}

    measured = run.json(name, measure)
    gnh.restore_state(measured["operator"])
    return spectrum_from_json(measured)
