"""Results as a person reads them in a terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.markup import escape
from rich.table import Table
from rich.text import Text

from whence.attribution import Attribution, Row
from whence.attribution.budget import Way
from whence.attribution.cost import Forecast
from whence.attribution.groups import Groups
from whence.attribution.page import accuracy_words
from whence.attribution.sweep import DampingForecast
from whence.cleaning import Cleaning
from whence.cleaning.result import Suspect
from whence.cli.outcome import out, plain, tell
from whence.exhibit import Exhibit
from whence.report.formatting import brief, shorten
from whence.report.untrusted import visible
from whence.solvers.auto import Choice, relative_error
from whence.solvers.plan import Plan
from whence.units import format_bytes, format_duration

__all__ = ["cleaning_as_json", "rows_as_json", "show_cleaning", "show_plan", "show_result"]

_WIDTH = 60
#: Columns of text, which may be cut; all others are of numbers.
_TEXTS = ("id", "label → model says", "example", "group")


def show_plan(plan: Plan | None, choice: Choice | None, sweep: DampingForecast | None) -> None:
    """The spectrum, the solvers with their predicted costs, LiSSA's plan and other dampings, where measured."""
    if plan is not None and choice is not None:
        tell(plan.spectrum)
        tell(
            f"\nto reach a correlation of {choice.accuracy:g} with the exact scores (errors of "
            f"{relative_error(choice.accuracy):.2g} of their size):\n{choice}\n\nLiSSA's plan:\n{plan}\n"
        )
    if sweep is not None:
        tell(f"other dampings:\n{sweep}\n\n{sweep.words()}\n")


def show_way(way: Way, cost: Forecast, queries: int, examples: int) -> None:
    """What each way takes for the queries asked, all of it together, and which of them it will be."""
    tell(f"for {queries:,} {'query' if queries == 1 else 'queries'} and {examples:,} training examples:")
    for name, seconds in (
        ("the quick answer, by EK-FAC", cost.quick_seconds),
        ("an iteration more", cost.iteration_seconds),
        ("an exact solve", cost.exact_seconds),
        ("what attribute will do", cost.seconds),
    ):
        tell(f"  {name:<28} about {format_duration(seconds)}")
    tell("time           of this machine as busy as it is now; timed on a few examples")
    tell(f"memory         {format_bytes(cost.memory_bytes)} of vectors, beside the model and one batch")
    tell(f"disk           {format_bytes(cost.disk_bytes)} in the run directory")
    if way.factored:
        tell(f"The quick answer comes first. {way.words}".rstrip())


def show_result(result: Attribution, k: int, by: str = "score") -> None:
    """The ends of every query's ranking, of examples and of groups."""
    console = out()
    for q, exhibit in enumerate(result.queries):
        console.print()
        console.print(Text(f"query {q}: ", style="bold") + plain(_asked(exhibit)))
        state = "converged" if bool(result.solve.converged[q]) else "NOT CONVERGED"
        if result.solve.limited and not bool(result.solve.converged[q]):
            state = "ended by the budget"
        residual, error = float(result.solve.residual[q]), float(result.solve.residual_stderr[q])
        certificate, size = result.solve.certificate, result.solve.score_rms
        if result.checkpoints:
            trust = (
                f"scores of {len(result.checkpoints)} checkpoints correlate {float(result.agreement[q]):.3f}"
            )
        elif result.solve.solver == "ekfac":
            state, trust = "EK-FAC, the quick answer", f"residual {residual:.2g}"
        elif certificate is None or size is None:
            trust = f"residual {residual:.2g} ± {error:.1g}; chains agree to {float(result.agreement[q]):.3f}"
        else:
            proven = float(certificate.upper[q] / size[q])
            trust = f"residual {residual:.2g}; error of the scores proven to be at most {proven:.2g} of their size"
        if exhibit.asked:
            console.print(Text("asked: ", style="bold") + plain(exhibit.asked))
        facts = exhibit.facts or (("loss", f"{float(result.query_losses[q]):.3g} nats"),)
        console.print(
            plain("; ".join(f"{name} {text}" for name, text in facts)) + Text(f"; solver {state}, {trust}")
        )
        for harmful, name in ((False, "most helpful"), (True, "most harmful")):
            rows = [r for r in result.top(k, query=q, harmful=harmful, by=by) if (r.score < 0) == harmful]
            if rows:
                _show_rows(result, rows, name if by == "score" else f"{name} per unit of gradient")
        if result.grouping is not None:
            _show_groups(result.groups(), q, k)
    if result.not_scored:
        tell(f"not everything was scored: {result.not_scored}")
    if result.solve.solver == "ekfac" or result.solve.limited:
        tell(f"\n{accuracy_words(result)} {result.solve.choice}".rstrip())
    if result.dominant_error:
        tell(f"\n{result.dominant_error}")
    _show_notes((*result.doubts, *result.solve.events))


def _show_notes(notes: Sequence[str]) -> None:
    for note in notes:
        out().print(f"[yellow]note:[/] {escape(visible(note))}", soft_wrap=True)


def _print(name: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table in which texts are cut where the terminal is narrow, and numbers are not: lines go on in the next one.

    Widths are all given: left to itself, the library takes from all columns alike, down to nothing.
    """
    console, shown = out(), [[plain(cell) for cell in row] for row in rows]
    widths = [
        max(len(column), *(row[place].cell_len for row in shown), 0) for place, column in enumerate(columns)
    ]
    texts = sorted(
        (place for place, column in enumerate(columns) if column in _TEXTS), key=widths.__getitem__
    )
    room = console.width - 2 * len(columns) - sum(w for place, w in enumerate(widths) if place not in texts)
    for left, place in zip(range(len(texts), 0, -1), texts, strict=True):  # the short ones need not be cut
        widths[place] = min(widths[place], max(10, room // left))
        room -= widths[place]
    table = Table(title=name, title_justify="left", box=None, pad_edge=False)
    for column, width in zip(columns, widths, strict=True):
        table.add_column(column, justify="left" if column in _TEXTS else "right", no_wrap=True, width=width)
    for row in shown:
        table.add_row(*row)
    console.width = max(console.width, sum(widths) + 2 * len(columns))
    console.print(table)


def _show_rows(result: Attribution, rows: list[Row], name: str) -> None:
    cells = []
    for row in rows:
        exhibit = result.exhibits.get(row.index, Exhibit())
        cells.append(
            (
                str(row.rank) + ("" if row.separated else " ≈"),
                exhibit.id or str(row.index),
                f"{row.score:.3g}",
                f"{row.low:.3g} … {row.high:.3g}",
                *([f"{row.another_low:.3g} … {row.another_high:.3g}"] if result.checkpoints else []),
                f"{row.effect:+.2g} nat",
                "" if row.dot_product_rank is None else str(row.dot_product_rank),
                _glimpse(exhibit),
            )
        )
    another = ["another model"] if result.checkpoints else []
    columns = ("rank", "id", "score", "95% interval", *another, "if removed", "dot product's rank", "example")
    _print(name, columns, cells)


def _show_groups(groups: Groups, query: int, k: int) -> None:
    for harmful, name in ((False, "most helpful groups"), (True, "most harmful groups")):
        rows = [r for r in groups.top(k, query=query, harmful=harmful) if (r.effect < 0) == harmful]
        cells = [
            (
                str(row.rank) + ("" if row.separated else " ≈"),
                f"{row.effect:+.2g} nat",
                f"{row.low:.2g} … {row.high:.2g}",
                str(row.examples),
                row.group,
            )
            for row in rows
        ]
        if cells:
            _print(name, ("rank", "if removed", "95% interval", "examples", "group"), cells)


def _asked(exhibit: Exhibit) -> str:
    if exhibit.text is not None:
        return f"{shorten(exhibit.prompt or '', _WIDTH, end=True)} → {shorten(exhibit.text, _WIDTH)}"
    parts = [exhibit.id or "", f"label {exhibit.label}" if exhibit.label else ""]
    parts.append(f"read as {exhibit.prediction}" if exhibit.prediction else "")
    return ", ".join(filter(None, parts))


def _glimpse(exhibit: Exhibit) -> str:
    pieces = [
        f"[{exhibit.label}]" if exhibit.label else "",
        exhibit.note or "",
        shorten(f"{exhibit.prompt or ''}{exhibit.text or ''}", _WIDTH),
    ]
    return " ".join(filter(None, pieces))


def rows_as_json(result: Attribution, k: int, by: str = "score") -> list[dict[str, object]]:
    """The ends of every query's ranking, for scripts."""
    return [
        {
            "query": q,
            "id": result.queries[q].id,
            "loss": float(result.query_losses[q]),
            "asked": result.queries[q].asked,
            "facts": dict(result.queries[q].facts),
            "converged": bool(result.solve.converged[q]),
            "solver": result.solve.solver,
            "accuracy": None if result.accuracy is None else list(result.accuracy),
            "doubts": list(result.doubts),
            "checkpoints": [each.name for each in result.checkpoints],
            "dominant_error": result.dominant_error,
            "residual": float(result.solve.residual[q]),
            "residual_stderr": float(result.solve.residual_stderr[q]),
            **{
                name: [
                    {**asdict(row), "id": result.exhibits.get(row.index, Exhibit()).id}
                    for row in result.top(k, query=q, harmful=harmful, by=by)
                ]
                for harmful, name in ((False, "helpful"), (True, "harmful"))
            },
            **(
                {}
                if result.grouping is None
                else {
                    f"{name}_groups": [asdict(row) for row in result.top_groups(k, query=q, harmful=harmful)]
                    for harmful, name in ((False, "helpful"), (True, "harmful"))
                }
            ),
        }
        for q in range(len(result.queries))
    ]


def cleaning_as_json(result: Cleaning, top: int) -> dict[str, Any]:
    """The first of every ranking, for scripts."""
    calibration = result.found.calibration
    return {
        "by": result.by,
        "num_examples": len(result.ids),
        "damping": result.found.damping,
        "rank": result.found.rank,
        "bounds": asdict(result.found.bounds),
        "calibration": None if calibration is None else asdict(calibration),
        "notes": list(result.notes),
        "suspects": [asdict(suspect) for suspect in result.top(top)],
        "harmful": [] if result.harm is None else [asdict(one) for one in result.most_harmful(top)],
    }


def show_cleaning(result: Cleaning, top: int) -> None:
    """The first of every ranking."""
    bounds, scale = result.found.bounds, result.found.calibration
    _show_suspects(result, result.top(top), f"most suspicious by {result.by}")
    if result.harm is not None:
        tell("")
        _show_suspects(result, result.most_harmful(top), "most harmful for the queries", harm=True)
    exact = "" if scale is None else f"; scaled by exact solves for {scale.solves} examples"
    tell(
        f"\nself-influence from {result.found.rank} directions of the curvature; its bounds are a factor of "
        f"{bounds.ratio:.3g} apart{exact}"
    )
    _show_notes(result.notes)


def _show_suspects(result: Cleaning, suspects: list[Suspect], name: str, *, harm: bool = False) -> None:
    labelled, cells = result.labels is not None, []
    measured = ("harm", "95% interval") if harm else ("self-influence", "bounds")
    says_column = ["label → model says"] if labelled else []
    for one in suspects:
        numbers: tuple[float | None, ...] = (one.self_influence, one.low, one.high)
        if harm:
            numbers = (one.score, one.score_low, one.score_high)
        value, low, high = (math.nan if number is None else number for number in numbers)
        says = "" if one.probability is None else f"{one.label} → {one.prediction} ({one.probability:.0%})"
        cells.append(
            (
                str(one.rank),
                one.id,
                brief(value, 3),
                f"{brief(low, 2)} … {brief(high, 2)}",
                brief(one.loss, 3),
                brief(one.gradient_norm, 3),
                *([says] if labelled else []),
                _glimpse(result.exhibits.get(one.index, Exhibit())),
            )
        )
    _print(name, ("rank", "id", *measured, "loss", "gradient", *says_column, "example"), cells)
