"""``whence plan --damping-sweep``: what λ costs and what it changes, as a table, as JSON, as a figure."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from whence.attribution.cost import Forecast
from whence.attribution.sweep import DampingForecast, forecast_dampings
from whence.cli.outcome import say
from whence.errors import OptionError
from whence.libraries import load_library
from whence.model.gauss_newton import GaussNewton
from whence.options import Options
from whence.report.drawing import figure, save_figure
from whence.runs.files import replace_file
from whence.solvers.plan import Plan
from whence.spectrum import spectral_density
from whence.units import format_duration

__all__ = ["check_figure", "draw", "sweep_dampings"]

PROBES, PRODUCTS = 4, 24


def sweep_dampings(
    gnh: GaussNewton, plan: Plan, cost: Forecast, *, queries: int, refine: float, options: Options
) -> DampingForecast:
    """Measure the density, having said how long that takes, and forecast what each λ would do.

    Args:
        gnh: the operator.
        plan: at the chosen λ.
        cost: of the attribution.
        queries: right-hand sides solved together.
        refine: of the plans.
        options: seed, and the terms that the density is measured on at most.
    """
    generator = options.generator(7)
    terms, per_term = min(gnh.num_terms, options.spectrum_terms), plan.spectrum.seconds_per_term
    takes = "" if per_term is None else f", at most {format_duration(PROBES * PRODUCTS * terms * per_term)}"
    say(f"measuring the spectral density: {PROBES} × {PRODUCTS} products of {terms:,} terms{takes}")
    density = spectral_density(
        gnh, generator=generator, probes=PROBES, products=PRODUCTS, terms=options.spectrum_terms
    )
    return forecast_dampings(
        plan.spectrum,
        density,
        num_terms=gnh.num_terms,
        queries=queries,
        chosen=plan.damping,
        chains=plan.chains,
        refine=refine,
        seconds_per_term=cost.iteration_seconds / gnh.num_terms,
    )


def check_figure(path: Path | None, wanted: bool) -> None:
    """Refuse a figure that could not be drawn, before anything is measured."""
    if path is None:
        return
    if not wanted:
        raise OptionError("--figure draws the damping sweep; add --damping-sweep")
    if path.suffix not in (".svg", ".png"):
        raise OptionError(f"--figure is {path}; its name must end in .svg or .png")
    load_library("matplotlib", "reproduce", "to draw the figure")


def draw(sweep: DampingForecast, path: Path) -> None:
    """Effective dimension, cost and agreement of scores over κ, three panels in one file."""
    outlooks = sweep.outlooks
    kappa = [outlook.plan.condition_number for outlook in outlooks]
    with figure(columns=3, width=4.0, height=3.4) as (drawn, (dimension, cost, agreement)):
        dimension.errorbar(
            kappa,
            [outlook.dimension.value for outlook in outlooks],
            yerr=[outlook.dimension.stderr for outlook in outlooks],
            marker="o",
            capsize=2,
            label="d(λ) = Tr H(H + λ)⁻¹",
        )
        second = [outlook.second_dimension.value for outlook in outlooks]
        dimension.plot(kappa, second, marker="s", linestyle="--", label="d₂(λ) = Tr H²(H + λ)⁻²")
        dimension.set(title="effective dimension", yscale="log")

        iterations = [outlook.iterations for outlook in outlooks]
        cost.plot(kappa, sweep.passes, marker="o", label="LiSSA, all chains")
        queries = "one query" if sweep.queries == 1 else f"{sweep.queries:,} queries"
        cost.plot(kappa, iterations, marker="s", linestyle="--", label=f"conjugate gradients, {queries}")
        cost.set(title="cost, in passes over the data", yscale="log")

        chosen, errors = sweep.agreement[:, sweep.chosen], sweep.agreement_stderr[:, sweep.chosen]
        agreement.errorbar(kappa, chosen, yerr=errors, marker="o", capsize=2, label="with the chosen λ")
        agreement.plot(
            kappa[:-1], sweep.agreement.diagonal(1), marker="s", linestyle="--", label="with the next λ"
        )
        agreement.set(title="expected correlation of scores", ylim=(min(0.0, float(chosen.min())), 1.05))
        for panel in (dimension, cost, agreement):
            panel.set(xscale="log", xlabel="λmax/λ")
            panel.axvline(kappa[sweep.chosen], color="0.5", linewidth=1, linestyle=":", label="the chosen λ")
            panel.legend()
        replace_file(path, partial(save_figure, drawn=drawn, kind="svg" if path.suffix == ".svg" else "png"))
