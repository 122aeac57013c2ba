"""Accuracy against cost: the efforts of a method on a problem, as a table and as a plot."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from benchmarks.timing import RESULTS, report
from whence import Plan
from whence.report.drawing import COLOURS, figure

__all__ = ["AUTO", "TARGET", "Curve", "Point", "correlation", "draw", "show"]

TARGET = 0.99
AUTO = "auto"


@dataclass(frozen=True)
class Point:
    """One effort of one method; ``expected`` is the correlation that the solver itself expects, where it does."""

    terms: float
    seconds: float
    correlation: float
    expected: float | None = None


@dataclass
class Curve:
    """All efforts of one method on one problem."""

    method: str
    points: list[Point] = field(default_factory=list)
    note: str = ""
    beyond: float | None = None

    def affords(self, plan: Plan, limit: float) -> bool:
        """Whether a plan's sample-products are within a limit; else this curve ends, and says where."""
        terms = plan.num_term_products
        if terms > limit:
            self.beyond = limit
        return terms <= limit

    def at_target(self) -> Point | None:
        """The cheapest effort from which on this and all dearer ones are accurate enough: no lucky crossing."""
        found = None
        for point in sorted(self.points, key=lambda point: -point.terms):
            if not point.correlation >= TARGET:
                break
            found = point
        return found


def correlation(a: Tensor, b: Tensor) -> float:
    """Over examples, on average over queries."""
    a, b = (x - x.mean(-1, keepdim=True) for x in (a, b))
    return float(((a * b).sum(-1) / (a.norm(dim=-1) * b.norm(dim=-1)).clamp_min(1e-300)).mean())


def show(row: dict[str, Any]) -> None:
    """A table of one problem."""
    lines = []
    for made in row["curves"]:
        curve = Curve(
            made["method"], [Point(**point) for point in made["points"]], made["note"], made["beyond"]
        )
        point = curve.at_target()
        reached = max((p.correlation for p in curve.points), default=float("nan"))
        beyond = f"more than {curve.beyond:,.0f}" if curve.beyond else "never"
        cells = (beyond, "", f"{reached:.4f}") if point is None else (
            f"{point.terms:,.0f}", f"{point.seconds:.2f}", f"{point.correlation:.4f}"
        )  # fmt: skip
        lines.append((curve.method, *cells))
    report(
        f"{row['name']}: to reach a correlation of {TARGET}",
        ("", "sample-products", "seconds", "correlation"),
        lines,
    )


def draw(rows: list[dict[str, Any]]) -> None:
    """Correlation against sample-products and against seconds: two panels for each problem, two problems in a row."""
    names = dict.fromkeys(curve["method"] for row in rows for curve in row["curves"])
    *others, black = COLOURS
    colours = dict(
        zip((name for name in names if name != AUTO), (*others, "#999999", "#882255"), strict=False)
    )
    handles = {}
    with figure(-(-len(rows) // 2), 4, width=3.6, height=2.7) as (drawn, panels):
        for row, left, right in zip(rows, panels[::2], panels[1::2], strict=False):
            for panel, what, label in ((left, "terms", "sample-products"), (right, "seconds", "seconds")):
                for curve in row["curves"]:
                    points = sorted(curve["points"], key=lambda point: point[what])
                    alone = curve["method"] == AUTO
                    (handles[curve["method"]],) = panel.plot(
                        [p[what] for p in points],
                        [max(1 - p["correlation"], 1e-6) for p in points],
                        "*" if alone else "o-",
                        color=black if alone else colours[curve["method"]],
                        markersize=11 if alone else 3,
                        zorder=3 if alone else 2,
                        label=curve["method"],
                    )
                panel.axhline(1 - TARGET, color="black", linewidth=0.6, linestyle="--")
                panel.set(xscale="log", yscale="log", xlabel=label)
                panel.xaxis.set_minor_formatter("")
            left.set_title(row["name"], loc="left")
            left.set_ylabel("1 - correlation")
        for panel in panels[2 * len(rows) :]:
            panel.set_axis_off()
        drawn.legend([handles[name] for name in names], list(names), loc="outside lower center", ncols=4)
    for suffix in ("svg", "png"):
        drawn.savefig(RESULTS / f"solvers.{suffix}", bbox_inches="tight", dpi=150)
