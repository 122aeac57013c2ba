"""Table 2: the Frobenius norm beside λmax, and what both must satisfy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reproduction.finding import Conclusion, number, plus_minus
from reproduction.table1 import PRINTED, by_kind, joined, measure
from whence.report.drawing import COLOURS, figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["conclude", "draw", "measure"]


def conclude(numbers: dict[str, Any]) -> Conclusion:
    """Whether the norm is near λmax for language models only; and who satisfies what every such matrix does."""
    rows = numbers["rows"]
    ratios = {
        kind: sorted(_ratio(row["frobenius"], row["lambda_max"]) for row in rows if row["kind"] == kind)
        for kind in ("language", "vision")
    }
    told = bool(ratios["language"] and ratios["vision"])
    language, vision = (joined([number(ratio) for ratio in ratios[kind]]) for kind in ("language", "vision"))
    impossible = [p for p in PRINTED if not p.possible]
    return Conclusion(
        title="Table 2: the Frobenius norm",
        claim="(‖H‖_F/λmax)² says how many rows a sketch needs to find λmax; it is small for language models and "
        "thousands for the vision models.",
        holds=ratios["language"][-1] < 100 and ratios["vision"][0] > 1000 if told else None,
        verdict=f"(‖H‖_F/λmax)² is {language or 'not measured'} for language models and {vision or 'not measured'} for "
        f"vision models, where the paper has thousands, by norms that no positive semi-definite matrix with its trace "
        f"and λmax can have ({joined([p.name for p in impossible])}).",
        rows=(
            *by_kind(
                rows,
                (
                    "‖H‖_F",
                    lambda p: number(p.frobenius),
                    lambda row: plus_minus(row["frobenius"], row["frobenius_stderr"]),
                ),
                ("at most √(λmax·Tr(H))", lambda p: number(p.largest_frobenius), _largest),
                (
                    "(‖H‖_F/λmax)²",
                    lambda p: number(_ratio(p.frobenius, p.lambda_max)),
                    lambda row: number(_ratio(row["frobenius"], row["lambda_max"])),
                ),
            ),
            (
                "rows with λmax ≤ ‖H‖_F ≤ √(λmax·Tr(H)), within errors",
                f"{len(PRINTED) - len(impossible)} of {len(PRINTED)}",
                f"{sum(row['consistent'] for row in rows)} of {len(rows)}",
            ),
        ),
        details=tuple(
            f"{row['name']} on {row['data']}: λmax = {plus_minus(row['lambda_max'], row['lambda_max_stderr'])}."
            for row in rows
        ),
        errata=tuple(
            f"{p.name}: the printed ‖H‖_F of {number(p.frobenius)} exceeds √(λmax·Tr(H)) = "
            f"{number(p.largest_frobenius)}, which no positive semi-definite matrix can."
            for p in impossible
        ),
    )


def _ratio(frobenius: float, lambda_max: float) -> float:
    return (frobenius / lambda_max) ** 2


def _largest(row: dict[str, Any]) -> str:
    return number(row["largest_frobenius"])


def draw(numbers: dict[str, Any]) -> Figure:
    """The norms, and where they can lie."""
    here = [
        (row["name"], row["lambda_max"], row["frobenius"], row["largest_frobenius"], row["consistent"])
        for row in numbers["rows"]
    ]
    theirs = [
        (f"{p.name} (paper)", p.lambda_max, p.frobenius, p.largest_frobenius, p.possible) for p in PRINTED
    ]
    with figure(1, 1, width=7.0, height=4.0) as (drawn, (panel,)):
        for place, (_, low, norm, high, inside) in enumerate([*here, *theirs]):
            panel.plot([low, high], [place, place], color=COLOURS[5], linewidth=7, alpha=0.5)
            panel.plot(norm, place, "o" if inside else "X", color=COLOURS[0] if inside else COLOURS[1])
        panel.set_yticks(range(len(here) + len(theirs)), [name for name, *_ in [*here, *theirs]])
        panel.invert_yaxis()
        panel.set(
            xscale="log", xlabel="‖H‖_F (dot) within [λmax, √(λmax·Tr(H))] (bar)",
            title="Where the Frobenius norm can lie, and where it does",
        )  # fmt: skip
    return drawn
