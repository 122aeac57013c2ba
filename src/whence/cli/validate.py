"""``whence validate``: why should one believe a run's scores?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from whence.attribution import load
from whence.cli.inputs import Command, Inputs, TrustRun
from whence.cli.options import AsJson, guarded
from whence.cli.outcome import NOT_CONVERGED, out, plain, print_json, tell
from whence.errors import OptionError
from whence.report.checks import LIMITS, Validation
from whence.runs import as_json
from whence.units import duration_seconds
from whence.validation.validate import check_options, validate

__all__ = ["parse_duration", "validate_command"]

_STYLES = {"trust": "green", "doubt": "bold red", "cannot tell": "yellow"}


@guarded
def validate_command(
    run: Annotated[Path, typer.Argument(help="Directory of a finished `whence attribute`.")],
    trust_run: TrustRun = False,
    budget: Annotated[str, typer.Option(help="Time for all checks together: 90s, 10min, 2h.")] = "10min",
    points: Annotated[
        int,
        typer.Option(
            help="Training examples to fine-tune on, of each kind: most helpful, most harmful, random."
        ),
    ] = 4,
    report: Annotated[
        Path | None, typer.Option(help="Where to write the page; RUN/report.html by default.")
    ] = None,
    json: AsJson = False,
) -> None:
    """Check the scores of a finished run against fine-tuning and other settings, and say in words what was found.

    What does not fit into the budget is skipped, with the reason. What is found is kept with the run and shown on
    the page; the same command goes on with it. Ends with code 5 where a check doubts the scores.
    """
    seconds = parse_duration(budget)
    check_options(seconds, points)
    result = load(run)
    if result.checkpoints:
        raise OptionError(
            f"{run} holds means over {len(result.checkpoints)} checkpoints, and the checks are about one model. From "
            f"Python: whence.validate(model, train, queries, whence.load({str(run / 'checkpoint-…')!r}), task=…)"
        )
    otherwise = (
        f"From Python: whence.validate(model, train, queries, whence.load({str(run)!r}), task=…, "
        f"directory={str(run)!r})"
    )
    command = Command.of_run(run, trusted=trust_run, otherwise=otherwise)
    job = Inputs(command.inputs)
    found = validate(
        job.problem.model,
        job.train,
        job.questions,
        result,
        task=job.task,
        params=job.params,
        budget_seconds=seconds,
        points=points,
        directory=run,
        seed=command.options.seed,
    )
    page = load(run).to_html(report or run / "report.html")
    if json:
        told = {"verdict": found.verdict, "summary": found.summary, "limits": LIMITS, "report": str(page)}
        print_json({**as_json(found), **told})
    else:
        _show(out(), found)
        tell(f"\npage: {page}")
    if found.verdict == "doubt":  # done, but not to be relied on: as of a solve that did not converge
        raise typer.Exit(NOT_CONVERGED)


def parse_duration(text: str) -> float:
    """Seconds of ``90``, ``90s``, ``10min`` or ``1.5h``.

    Example:
        >>> parse_duration("10min"), parse_duration("1.5 h"), parse_duration("90")
        (600.0, 5400.0, 90.0)
    """
    seconds = duration_seconds(f"{text}s" if text.strip().replace(".", "", 1).isdigit() else text)
    if seconds is None:
        raise OptionError(f"--budget is {text!r}; give a time such as 90s, 10min or 2h")
    return seconds


def _show(console: Console, found: Validation) -> None:
    """The conclusion, then each check with its verdict."""
    console.print(plain(found.summary, "bold"))
    for check in found.checks:
        word = check.verdict if check.ran else "not run"
        console.print()
        console.print(Text(f"{word}: ", style=_STYLES[check.verdict]) + plain(check.question))
        console.print(plain(check.sentence))
    console.print(f"\n{LIMITS}", markup=False, style="dim")
