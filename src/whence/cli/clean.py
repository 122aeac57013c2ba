"""``whence clean``: which training examples look like mistakes?"""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from whence.cleaning.clean import clean
from whence.cleaning.cleaning import Cleaning
from whence.cli.job import Job
from whence.cli.options import AsJson, takes_job
from whence.cli.outcome import NOT_CONVERGED, out, print_json, say
from whence.errors import OptionError
from whence.exhibit import Exhibit
from whence.report.clean_page import Suspect
from whence.report.formatting import brief, shorten

__all__ = ["clean_command"]

_WIDTH = 50


@takes_job
def clean_command(
    job: Job,
    *,
    by: Annotated[
        str, typer.Option(help="What ranks the examples: self-influence, loss or gradient-norm.")
    ] = "self-influence",
    run: Annotated[
        Path | None, typer.Option(help="Directory that keeps the run: the same command goes on with it.")
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(help="Where to write the page; RUN/clean.html if there is a run directory."),
    ] = None,
    csv: Annotated[
        Path | None,
        typer.Option(help="Where to write all examples as CSV; RUN/clean.csv if there is a run directory."),
    ] = None,
    damping: Annotated[
        str, typer.Option(help="λ, auto (λmax/200), or a part of λmax: lambda_max/50.")
    ] = "auto",
    rank: Annotated[
        int | None,
        typer.Option(
            help="Directions of the curvature's approximation: so many copies of the model. 32 if they fit."
        ),
    ] = None,
    probes: Annotated[
        int, typer.Option(help="Examples solved for exactly, to set the scale; 0 for none.")
    ] = 8,
    lanczos_terms: Annotated[
        int, typer.Option(help="Terms (tokens) of the data that the curvature is measured on at most.")
    ] = 4096,
    top: Annotated[int, typer.Option(help="Examples to print.")] = 20,
    shown: Annotated[int, typer.Option(help="Examples of each ranking on the page.")] = 100,
    title: Annotated[str, typer.Option(help="Of the page.")] = "Which training examples look like mistakes?",
    as_json: AsJson = False,
) -> None:
    """Rank training examples that look like mistakes: wrong labels, odd ones out.

    With --queries (examples that the model should get right), also those that harm them most.
    """
    if top < 1:
        raise OptionError(f"--top is {top}; print at least one example")
    options = job.options
    asked = options.queries is not None or options.prompt is not None or options.completion is not None
    result = clean(
        job.problem.model,
        job.train,
        task=job.task,
        by=by,  # type: ignore[arg-type]  # checked there
        queries=job.queries if asked else None,
        damping=_number_or_word(damping),
        rank=rank,
        params=options.params or None,
        product=options.product,  # type: ignore[arg-type]  # checked there
        probes=probes,
        shown=shown,
        class_names=job.class_names,
        title=title,
        seed=options.seed,
        micro_batch=options.micro_batch,
        run_dir=run,
        lanczos_terms=lanczos_terms,
    )
    page = report or (None if run is None else run / "clean.html")
    table = csv or (None if run is None else run / "clean.csv")
    if page is not None:
        result.to_html(page)
    if table is not None:
        result.to_csv(table)
    if as_json:
        print_json(_as_json(result, top, page, table))
    else:
        _show(out(), result, top)
        for name, path in (("page", page), ("table", table)):
            if path is not None:
                out().print(f"{name}: {path}", markup=False, soft_wrap=True)
    if result.harm is not None and not result.harm.converged:
        say("the solver did not converge for every query; a larger --damping helps")
        raise typer.Exit(NOT_CONVERGED)


def _number_or_word(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text  # a word, checked where it is used


def _as_json(result: Cleaning, top: int, page: Path | None, table: Path | None) -> dict[str, Any]:
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
        "report": None if page is None else str(page),
        "csv": None if table is None else str(table),
    }


def _show(console: Console, result: Cleaning, top: int) -> None:
    bounds, scale = result.found.bounds, result.found.calibration
    console.print(_table(result, result.top(top), f"most suspicious by {result.by}"))
    if result.harm is not None:
        console.print()
        console.print(_table(result, result.most_harmful(top), "most harmful for the queries", harm=True))
    exact = "" if scale is None else f"; scaled by exact solves for {scale.probes} examples"
    console.print(
        f"\nself-influence from {result.found.rank} directions of the curvature; its bounds are a factor of "
        f"{bounds.ratio:.3g} apart{exact}",
        soft_wrap=True,
    )
    for note in result.notes:
        console.print(f"[yellow]note:[/] {escape(note)}", soft_wrap=True)


def _table(result: Cleaning, suspects: list[Suspect], name: str, *, harm: bool = False) -> Table:
    table = Table(title=name, title_justify="left", box=None, pad_edge=False)
    labelled = result.labels is not None
    measured = ("harm", "95% interval") if harm else ("self-influence", "bounds")
    for column in (
        "rank",
        "id",
        *measured,
        "loss",
        "gradient",
        *(["label → model says"] if labelled else []),
        "example",
    ):
        text = column in ("id", "label → model says", "example")
        # Where the terminal is narrow, texts are cut and numbers are not.
        least = (
            10 if column == "id" else None if text else max(len(column), 13 if column == measured[1] else 4)
        )
        table.add_column(column, justify="left" if text else "right", no_wrap=True, min_width=least)
    for one in suspects:
        numbers: tuple[float | None, ...] = (one.self_influence, one.low, one.high)
        if harm:
            numbers = (one.score, one.score_low, one.score_high)
        value, low, high = (math.nan if number is None else number for number in numbers)
        shown = result.exhibits.get(one.index, Exhibit())
        says = "" if one.probability is None else f"{one.label} → {one.prediction} ({one.probability:.0%})"
        table.add_row(
            str(one.rank),
            Text(one.id),
            brief(value, 3),
            f"{brief(low, 2)} … {brief(high, 2)}",
            brief(one.loss, 3),
            brief(one.gradient_norm, 3),
            *([Text(says)] if labelled else []),
            Text(shorten(f"{shown.note or ''} {shown.prompt or ''}{shown.text or ''}", _WIDTH)),
        )
    return table
