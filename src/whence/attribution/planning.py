"""From the spectrum to a solver that is ready to solve: the second phase of an attribution."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from whence.allocator import half_of_memory
from whence.attribution.sampling import curvature_pays, draw_by_curvature
from whence.attribution.saving import plan_from_json, plan_to_json, spectrum_from_json, spectrum_to_json
from whence.attribution.settings import Settings
from whence.gauss_newton import GaussNewton
from whence.plan import Plan
from whence.solvers import ConjugateGradient, Lissa
from whence.solvers.choice import choose, tolerance_for
from whence.spectrum import Spectrum, estimate_spectrum
from whence.store import Run

__all__ = ["Planned", "generator", "make_plan"]


def generator(settings: Settings, phase: int) -> torch.Generator:
    """Random numbers of one phase."""
    return torch.Generator().manual_seed(settings.seed * 1_000_003 + phase)


@dataclass(frozen=True)
class Planned:
    """How the queries will be solved for.

    Attributes:
        solver: ready to solve.
        plan: LiSSA's, in force or as the alternative; brings spectrum and damping.
        choice: why this solver, in words.
        drawn: how batches are drawn, in words, where that is not uniformly.
    """

    solver: Lissa | ConjugateGradient
    plan: Plan
    choice: str
    drawn: tuple[str, ...]


def make_plan(run: Run, gnh: GaussNewton, settings: Settings, queries: int) -> Planned:
    """Spectrum, choice of the solver, and its settings."""
    if isinstance(settings.solver, Lissa):
        drawn = draw_by_curvature(run, gnh) if settings.sampling == "curvature" else ()
        return Planned(settings.solver, settings.solver.plan, "", drawn)
    drawn = ()
    if settings.sampling == "curvature":
        drawn = draw_by_curvature(run, gnh)
    spectrum = _measured(run, gnh, settings, "spectrum")
    choice = _choose(run, gnh, settings, spectrum, queries, "choice")
    lissa_may = settings.sampling == "auto" and settings.solver in ("auto", "lissa")
    if lissa_may and curvature_pays(gnh, spectrum, choice["terms"]):
        drawn = draw_by_curvature(run, gnh)
        spectrum = _measured(run, gnh, settings, "spectrum-by-curvature")
        choice = _choose(run, gnh, settings, spectrum, queries, "choice-by-curvature")
        if choice["solver"] == "cg":  # which draws nothing
            gnh.terms.importance, drawn = None, ()
    plan = _tuned(gnh, settings, spectrum, choice["refine"])
    plan = plan_from_json(run.json("plan", lambda: plan_to_json(plan)), spectrum)
    solver: Lissa | ConjugateGradient = Lissa(plan)
    if isinstance(settings.solver, ConjugateGradient):
        solver = settings.solver
    elif choice["solver"] == "cg":
        # Inexact products must be told from converged ones; exact ones need no further product.
        solver = ConjugateGradient(
            tolerance=tolerance_for(settings.accuracy),
            largest=spectrum.lambda_max.upper(3.0),
            verify=gnh.product != "exact",
        )
    return Planned(solver, plan, choice["words"], drawn)


def _choose(
    run: Run, gnh: GaussNewton, settings: Settings, spectrum: Spectrum, queries: int, name: str
) -> dict[str, Any]:
    """Which solver, LiSSA's cost, and why; written down, since it depends on the machine's memory."""

    def compute() -> dict[str, Any]:
        choice = choose(
            spectrum,
            settings.damping,
            num_terms=gnh.num_terms,
            queries=queries,
            accuracy=settings.accuracy,
            chains=settings.chains,
            memory_bytes=half_of_memory(gnh.network.device),
            generator=generator(settings, 3),
        )
        asked = "cg" if isinstance(settings.solver, ConjugateGradient) else str(settings.solver)
        chosen = settings.solver == "auto"
        return {
            "solver": choice.best.solver if chosen else asked,
            "words": choice.words() if chosen else "",
            "refine": choice.of("lissa").refine,
            "terms": (choice.best if chosen else choice.of("lissa")).terms,
        }

    found: dict[str, Any] = run.json(name, compute)
    return found


def _tuned(gnh: GaussNewton, settings: Settings, spectrum: Spectrum, needed: float) -> Plan:
    refine = needed if settings.refine is None else settings.refine
    return Plan.tuned(
        spectrum, settings.damping, num_terms=gnh.num_terms, chains=settings.chains, refine=refine
    )


def _measured(run: Run, gnh: GaussNewton, settings: Settings, name: str) -> Spectrum:
    def measure() -> dict[str, Any]:
        spectrum = estimate_spectrum(
            gnh, generator=generator(settings, 1), lanczos_terms=settings.lanczos_terms
        )
        return {**spectrum_to_json(spectrum), "operator": gnh.state()}

    measured = run.json(name, measure)
    gnh.restore_state(measured["operator"])
    return spectrum_from_json(measured)
