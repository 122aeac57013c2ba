"""Table 2: the Frobenius norm beside λmax, and what both must satisfy."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

from reproduction.finding import Finding, Profile
from reproduction.spectra import Measured
from reproduction.table1 import PRINTED
from whence.report.drawing import COLOURS, figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["FROBENIUS", "run"]

#: ‖H‖_F as printed.
FROBENIUS = {
    "ResNet-18": 2.55e4,
    "ResNet-50": 2.67e4,
    "OPT-1.3B": 2.94e3,
    "Llama-7B": 3.73e3,
    "Mistral-7B": 2.49e4,
}


def run(measured: list[Measured], profile: Profile) -> tuple[Finding, Figure]:
    """The table for the measured subjects, and the inequalities that every positive semi-definite matrix satisfies."""
    started = time.perf_counter()
    rows = [_row(subject) for subject in measured]
    printed = [_printed(p.name, p.mean_eigenvalue * p.num_parameters, p.lambda_max) for p in PRINTED]
    words = "; ".join(
        f"{row['name']}: ‖H‖_F = {row['frobenius']:.3g} ± {row['frobenius_stderr']:.1g}, λmax = "
        f"{row['lambda_max']:.3g}, (‖H‖_F/λmax)² = {row['ratio']:.3g}, at most {row['largest']:.3g} allowed for ‖H‖_F"
        for row in rows
    )
    impossible = [row for row in printed if not row["possible"]]
    finding = Finding(
        name="table2",
        title="Table 2: the Frobenius norm",
        claim="(‖H‖_F/λmax)² says how many rows a sketch needs to find λmax; it is small for language models and "
        "thousands for the vision models.",
        measured=f"{words}. For a positive semi-definite matrix λmax ≤ ‖H‖_F ≤ √(λmax·Tr(H)): it holds within "
        f"errors for {sum(row['consistent'] for row in rows)} of {len(rows)} here, and for "
        f"{len(printed) - len(impossible)} of the paper's {len(printed)} rows.",
        holds=_verdict(rows),
        numbers={"rows": rows, "printed": printed},
        profile=profile,
        seconds=time.perf_counter() - started + sum(subject.seconds for subject in measured),
        errata=tuple(
            f"{row['name']}: the printed ‖H‖_F of {row['frobenius']:.3g} exceeds √(λmax·Tr(H)) = {row['largest']:.3g}, "
            "which no positive semi-definite matrix can."
            for row in impossible
        ),
    )
    return finding, _draw(rows, printed)


def _verdict(rows: list[dict[str, Any]]) -> bool | None:
    """Small for language models, thousands for vision: whether these subjects show it too."""
    language = [row["ratio"] for row in rows if row["kind"] == "language"]
    vision = [row["ratio"] for row in rows if row["kind"] == "vision"]
    if not language or not vision:
        return None
    return bool(max(language) < 100 and min(vision) > 1000)


def _row(subject: Measured) -> dict[str, Any]:
    spectrum = subject.spectrum
    return {
        "name": subject.name,
        "kind": subject.kind,
        "data": subject.data_name,
        "frobenius": spectrum.frobenius.value,
        "frobenius_stderr": spectrum.frobenius.stderr,
        "lambda_max": spectrum.lambda_max.value,
        "ratio": (spectrum.frobenius.value / spectrum.lambda_max.value) ** 2,
        "largest": math.sqrt(spectrum.lambda_max.value * spectrum.trace.value),
        "consistent": not spectrum.inconsistencies(),
    }


def _printed(name: str, trace: float, lambda_max: float) -> dict[str, Any]:
    frobenius, largest = FROBENIUS[name], math.sqrt(lambda_max * trace)
    return {
        "name": name,
        "frobenius": frobenius,
        "lambda_max": lambda_max,
        "largest": largest,
        "ratio": (frobenius / lambda_max) ** 2,
        "possible": lambda_max <= frobenius <= largest,
    }


def _draw(rows: list[dict[str, Any]], printed: list[dict[str, Any]]) -> Figure:
    with figure(1, 1, width=7.0, height=4.0) as (drawn, (panel,)):
        everything = [*rows, *[{**row, "name": f"{row['name']} (paper)"} for row in printed]]
        for place, row in enumerate(everything):
            panel.plot(
                [row["lambda_max"], row["largest"]], [place, place], color=COLOURS[5], linewidth=7, alpha=0.5
            )
            inside = row.get("possible", row.get("consistent"))
            panel.plot(
                row["frobenius"], place, "o" if inside else "X", color=COLOURS[0] if inside else COLOURS[1]
            )
        panel.set_yticks(range(len(everything)), [row["name"] for row in everything])
        panel.invert_yaxis()
        panel.set(
            xscale="log", xlabel="‖H‖_F (dot) within [λmax, √(λmax·Tr(H))] (bar)",
            title="Where the Frobenius norm can lie, and where it does",
        )  # fmt: skip
    return drawn
