"""Table 1: statistics of the Gauss-Newton Hessian, and the step, batch and length that follow from them."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from reproduction.finding import Finding, Profile
from reproduction.spectra import Measured
from whence.report.drawing import COLOURS, figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["PRINTED", "Printed", "rounded", "run"]

_CONTEXT = 256  # tokens of a passage here


@dataclass(frozen=True)
class Printed:
    """A row of the paper's table: model, N, Tr(H)/N, λmax, and the printed η, |B|, T at λ = 5, C = 2."""

    name: str
    num_parameters: float
    mean_eigenvalue: float
    lambda_max: float
    step_size: float
    batch_size: int
    num_steps: int

    @property
    def batch_by_formula(self) -> int:
        """``C·Tr(H)/λmax``, rounded as the table rounds."""
        return round(rounded(2 * self.mean_eigenvalue * self.num_parameters / self.lambda_max))

    @property
    def step_by_formula(self) -> float:
        """``1/(λmax + λ)``, rounded as the table rounds."""
        return rounded(1 / (self.lambda_max + 5.0))

    @property
    def steps_by_formula(self) -> int:
        """``2/(λη)`` of the rounded η, rounded up to the next of 1, 1.5, 2, 5."""
        return _up(2 / (5.0 * self.step_by_formula))


PRINTED = (
    Printed("ResNet-18", 11.7e6, 1.32e-3, 270, 0.003, 100, 150),
    Printed("ResNet-50", 25.6e6, 8.17e-4, 470, 0.002, 5, 200),
    Printed("OPT-1.3B", 1.3e9, 9.28e-6, 780, 0.001, 30, 500),
    Printed("Llama-7B", 6.7e9, 5.69e-6, 1600, 0.0005, 50, 1000),
    Printed("Mistral-7B", 7.2e9, 8.18e-5, 5600, 0.0002, 200, 2000),
)


def rounded(x: float) -> float:
    """To the nearest of 1, 2, 3, 5 times a power of ten, in ratio."""
    power = 10.0 ** math.floor(math.log10(x))
    return min(
        (digit * power for digit in (1, 2, 3, 5, 10)), key=lambda candidate: abs(math.log(candidate / x))
    )


def _up(x: float) -> int:
    power = 10.0 ** math.floor(math.log10(x))
    return round(next(d * power for d in (1, 1.5, 2, 5, 10) if d * power >= x * (1 - 1e-9)))


def run(measured: list[Measured], profile: Profile) -> tuple[Finding, Figure]:
    """The table for the measured subjects, beside the printed one."""
    started = time.perf_counter()
    rows = [_row(subject) for subject in measured]
    above_one = all(row["batch_size"] > 1 for row in rows)
    within_context = all(row["batch_size"] <= _CONTEXT for row in rows if row["kind"] == "language")
    words = "; ".join(
        f"{row['name']} on {row['data']}: Tr(H)/N = {row['mean_eigenvalue']:.3g} ± "
        f"{row['mean_eigenvalue_stderr']:.1g}, λmax = {row['lambda_max']:.3g} ± {row['lambda_max_stderr']:.1g}, so η = "
        f"{row['step_size']:.3g}, |B| = {row['batch_size']} {row['unit']}, T = {row['num_steps']} at λ = "
        f"{row['damping']:.3g}; measured C = {row['constant']:.2g} on average and {row['top_constant']:.2g} along the "
        f"top eigenvector, with which |B| would be {row['batch_with_measured_constant']}"
        for row in rows
    )
    agree = [p for p in PRINTED if p.batch_size == p.batch_by_formula]
    finding = Finding(
        name="table1",
        title="Table 1: from the spectrum to step, batch and length",
        claim="Trace and λmax give η = 1/(λmax+λ), |B| = 2Tr(H)/λmax and T = 2/(λη); the batch must be larger than 1, "
        "but is mild, and for language models, counted in tokens, less than one sequence.",
        measured=f"{words}. By the paper's formula, {len(agree)} of its {len(PRINTED)} printed batches follow from its "
        "printed statistics.",
        holds=above_one and within_context if rows else None,
        numbers={"rows": rows, "printed": [_printed(p) for p in PRINTED]},
        profile=profile,
        seconds=time.perf_counter() - started + sum(subject.seconds for subject in measured),
        errata=tuple(
            f"{p.name}: the table's own statistics give |B| ≈ {p.batch_by_formula}, it prints {p.batch_size}."
            for p in PRINTED
            if p not in agree
        ),
    )
    return finding, _draw(measured, rows)


def _row(subject: Measured) -> dict[str, Any]:
    spectrum, plan, count = subject.spectrum, subject.plan, subject.num_parameters
    assert spectrum.sampling_constant is not None
    assert spectrum.top_sampling_constant is not None
    safe = spectrum.safe_constant
    return {
        "name": subject.name,
        "data": subject.data_name,
        "note": subject.note,
        "kind": subject.kind,
        "unit": "tokens" if subject.kind == "language" else "images",
        "num_parameters": count,
        "mean_eigenvalue": spectrum.trace.value / count,
        "mean_eigenvalue_stderr": spectrum.trace.stderr / count,
        "lambda_max": spectrum.lambda_max.value,
        "lambda_max_stderr": spectrum.lambda_max.stderr,
        "constant": spectrum.sampling_constant.value,
        "constant_stderr": spectrum.sampling_constant.stderr,
        "top_constant": spectrum.top_sampling_constant.value,
        "top_constant_stderr": spectrum.top_sampling_constant.stderr,
        "damping": subject.damping,
        "step_size": plan.step_size,
        "batch_size": plan.batch_size,
        "num_steps": plan.num_steps,
        "batch_with_measured_constant": math.ceil(safe / plan.constant * plan.batch_size),
    }


def _printed(row: Printed) -> dict[str, Any]:
    return {
        "name": row.name,
        "batch_size": row.batch_size,
        "batch_by_formula": row.batch_by_formula,
        "step_size": row.step_size,
        "step_by_formula": row.step_by_formula,
        "num_steps": row.num_steps,
        "steps_by_formula": row.steps_by_formula,
    }


def _draw(measured: list[Measured], rows: list[dict[str, Any]]) -> Figure:
    with figure(1, 2, width=5.2, height=3.9) as (drawn, (left, right)):
        for k, subject in enumerate(measured):
            density, largest = subject.spectrum.density, subject.spectrum.lambda_max
            assert density is not None
            nodes, weights = density.gauss_nodes[0], density.gauss_weights[0]
            shown = nodes > 1e-3 * largest.value
            counts, values = weights[shown].cumsum(0).tolist(), nodes[shown].tolist()
            left.step(counts, values, "o-", where="pre", color=COLOURS[k], label=subject.name)
            left.errorbar(
                1, largest.value, 2 * largest.stderr, fmt="*", capsize=3, color=COLOURS[k],
                label="λmax ± 2 errors" if k == len(measured) - 1 else None,
            )  # fmt: skip
        left.set(
            xlabel="eigenvalues that are at least as large",
            ylabel="eigenvalue of H",
            xscale="log",
            yscale="log",
            title="Spectral density",
        )
        left.legend()
        names = [row["name"] for row in rows] + [f"{p.name} (paper)" for p in PRINTED]
        sizes = [row["batch_size"] for row in rows] + [p.batch_by_formula for p in PRINTED]
        colours = [COLOURS[0]] * len(rows) + [COLOURS[6]] * len(PRINTED)
        places = range(len(names))
        right.barh(places, sizes, color=colours, alpha=0.75)
        right.scatter(
            [p.batch_size for p in PRINTED], list(places)[len(rows) :], marker="|", s=120, color=COLOURS[1],
            label="as printed",
        )  # fmt: skip
        right.set_yticks(places, names)
        right.invert_yaxis()
        right.axvline(1, color=COLOURS[1], linestyle=":", linewidth=1)
        right.set(xscale="log", xlabel="|B| = 2·Tr(H)/λmax, in examples or tokens", title="Smallest batch")
        right.legend()
    return drawn
