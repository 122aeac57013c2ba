"""The commands."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from whence.attribution import attribute, load
from whence.attribution.budget import way_for
from whence.attribution.cost import forecast, spectrum_terms
from whence.attribution.damping import first_damping, metric_of
from whence.attribution.planning import choice_for
from whence.cleaning import clean, load_cleaning
from whence.cli.index import ask_command, index_command
from whence.cli.inputs import Command, InputOptions, Inputs, TrustRun
from whence.cli.options import AsJson, guarded, takes
from whence.cli.outcome import NOT_CONVERGED, print_json, say, tell
from whence.cli.serve import serve_command
from whence.cli.sweep import check_figure, draw, sweep_dampings
from whence.cli.tables import cleaning_as_json, rows_as_json, show_cleaning, show_plan, show_result, show_way
from whence.cli.tune import tune_command
from whence.cli.validate import validate_command
from whence.distributed import current, launched, one_process
from whence.errors import OptionError
from whence.model.gauss_newton import GaussNewton
from whence.model.memory import keep_freed_memory
from whence.options import CleanOptions, MeasureOptions, Options
from whence.runs import Run, as_json, holds
from whence.solvers.auto import Choice
from whence.solvers.plan import Plan
from whence.spectrum import Spectrum, estimate_spectrum

__all__ = ["app", "main"]

app = typer.Typer(
    name="whence",
    help="Which training examples made the model say that, and how sure are we?",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode="rich",
)

RunDir = Annotated[
    Path | None, typer.Option(help="Directory that keeps the run: resumable, and what `whence report` reads.")
]
Report = Annotated[Path | None, typer.Option(help="Where to write the page; beside the run if there is one.")]
By = Annotated[
    str, typer.Option(help="What ranks the printed examples: score, or unit: the score per unit of gradient.")
]
Top = Annotated[int, typer.Option(help="Examples to print at each end of a ranking.")]


@app.command(epilog="Example: [bold]whence spectrum path/to/model --train train.jsonl[/]")
@takes(InputOptions, MeasureOptions)
def spectrum(given: InputOptions, options: MeasureOptions, *, json: AsJson = False) -> None:
    """Measure the Gauss-Newton Hessian: trace, Frobenius norm, λmax, sampling constants, each with its error."""
    one_process("whence spectrum")
    gnh = Inputs(given).operator(options)
    measured = _measure(gnh, options)
    if json:
        print_json({**as_json(measured), "num_terms": gnh.num_terms, "product": gnh.product})
    else:
        tell(f"{gnh!r}\n\n{measured}")


@app.command(
    epilog="Examples:\n\n"
    "[bold]whence plan path/to/model --train train.jsonl --queries queries.jsonl --damping auto[/]\n\n"
    "[bold]whence plan path/to/model --train train.jsonl --damping-sweep --figure sweep.svg[/]",
)
@takes(InputOptions, Options, only="plan")
def plan(
    given: InputOptions,
    options: Options,
    *,
    damping_sweep: Annotated[
        bool,
        typer.Option(
            "--damping-sweep",
            help="Also tell what other λ, from λmax/2 to λmax/5000, would cost and change: 96 more products.",
        ),
    ] = False,
    figure: Annotated[
        Path | None, typer.Option(help="Draw the damping sweep to this file, .svg or .png.")
    ] = None,
    json: AsJson = False,
) -> None:
    """Tell what an attribution will do and what it will cost in time, memory and disk. Nothing long is run."""
    one_process("whence plan")
    check_figure(figure, damping_sweep)
    inputs = Inputs(given)
    shortlist = inputs.candidates
    queries = len(inputs.questions) if inputs.has_queries or inputs.problem.queries else 1
    gnh = inputs.operator(options)
    way = way_for(gnh, queries, options)
    examples = len(gnh.terms) if shortlist is None else len(shortlist)
    made: Plan | None = None
    choice: Choice | None = None
    refine = 1.0
    if damping_sweep or not way.factored:  # EK-FAC needs no spectrum
        gnh = gnh.in_metric(metric_of(gnh, inputs.training, options))
        terms = options.spectrum_terms if damping_sweep else spectrum_terms(gnh, queries, options)
        measured = _measure(gnh, dataclasses.replace(options, spectrum_terms=terms))
        damping, _ = first_damping(options.damping, inputs.training, measured, gnh)
        choice = choice_for(gnh, measured, damping, queries, options)
        refine = choice.of("lissa").refine if options.refine is None else options.refine
        made = Plan.tuned(measured, damping, num_terms=gnh.num_terms, chains=options.chains, refine=refine)
    cost = forecast(
        gnh,
        way,
        options,
        queries=queries,
        examples=examples,
        plan=made,
        solver=None if choice is None else choice.best,
    )
    sweep = None
    if damping_sweep and made is not None:
        sweep = sweep_dampings(gnh, made, cost, queries=queries, refine=refine, options=options)
        if figure is not None:
            draw(sweep, figure)
    if json:
        print_json(
            {
                **({} if made is None else {"spectrum": as_json(made.spectrum), "plan": as_json(made)}),
                **({} if choice is None else {"choice": _choice_as_json(choice)}),
                "way": as_json(way),
                "queries": queries,
                "examples": examples,
                **dataclasses.asdict(cost),
                **({} if sweep is None else {"damping_sweep": sweep.to_json()}),
            }
        )
        return
    show_plan(made, choice, sweep)
    show_way(way, cost, queries, examples)
    if figure is not None:
        tell(f"\nfigure: {figure}")


@app.command(
    "attribute",
    epilog="Examples:\n\n"
    "[bold]whence attribute my-model/ --train train.jsonl --queries queries.jsonl --run-dir runs/first[/]\n\n"
    "[bold]whence attribute my-model/ --train speeches/ --prompt 'My fellow' --completion ' citizens' --run-dir b[/]"
    "\n\n[bold]whence attribute model.py:build --task classification --train images/train --queries odd/[/]\n\n"
    "[bold]whence attribute seeds/*/ --train train.jsonl --queries queries.jsonl --run-dir runs/seeds[/]",
)
@takes(InputOptions, Options)
def attribute_command(
    given: InputOptions,
    options: Options,
    *,
    more: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL]...",
            help="More checkpoints: other seeds, or points of one training. Scores are then means over all, with the "
            "spread between them in every error.",
        ),
    ] = None,
    run_dir: RunDir = None,
    report: Report = None,
    top: Top = 5,
    by: By = "score",
    json: AsJson = False,
) -> None:
    """Find the training examples behind the queries' answers, each with an error bar."""
    if by == "unit":
        options = dataclasses.replace(options, norms=True)
    command = Command(given, options, tuple(more or ()))
    _attribute(command, run_dir=run_dir, report=report, top=top, by=by, json=json)


@app.command(epilog="Example: [bold]whence resume runs/first --trust-run[/]")
@guarded
def resume(
    run_dir: Annotated[Path, typer.Argument(help="Run directory of an interrupted attribute command.")],
    trust_run: TrustRun = False,
    report: Report = None,
    top: Top = 5,
    by: By = "score",
    json: AsJson = False,
) -> None:
    """Go on with an interrupted run, with the command that began it."""
    otherwise = f"Give the command that began it again, with --run-dir {run_dir}, or run its program"
    command = Command.of_run(run_dir, trusted=trust_run, otherwise=otherwise)
    _attribute(command, run_dir=run_dir, report=report, top=top, by=by, json=json)


@app.command("report", epilog="Example: [bold]whence report runs/first --output report.html[/]")
@guarded
def report_command(
    run_dir: Annotated[
        Path,
        typer.Argument(help="Directory of a finished run of attribute or clean, or of a saved attribution."),
    ],
    output: Annotated[
        Path | None,
        typer.Option(help="Where to write the page; report.html in the directory by default, or clean.html."),
    ] = None,
) -> None:
    """Write the page of a finished run: one self-contained HTML file."""
    one_process("whence report")
    if holds(run_dir, "cleaning"):
        page = load_cleaning(run_dir).to_html(output or run_dir / "clean.html")
    else:
        page = load(run_dir).to_html(output or run_dir / "report.html")
    tell(page)


@app.command(
    "clean", epilog="Example: [bold]whence clean my-model/ --train train.jsonl --run-dir runs/clean[/]"
)
@takes(InputOptions, CleanOptions)
def clean_command(
    given: InputOptions,
    options: CleanOptions,
    *,
    run_dir: RunDir = None,
    report: Report = None,
    csv: Annotated[
        Path | None, typer.Option(help="Where to write all examples as CSV; beside the run if there is one.")
    ] = None,
    top: Annotated[int, typer.Option(help="Examples to print.")] = 20,
    json: AsJson = False,
) -> None:
    """Rank training examples that look like mistakes: wrong labels, odd ones out.

    With --queries (examples that the model should get right), also those that harm them most.
    """
    if top < 1:
        raise OptionError(f"--top is {top}; print at least one example")
    if given.candidates is not None:
        raise OptionError("clean looks at every training example; leave --candidates out")
    inputs = Inputs(given)
    result = clean(
        inputs.problem.model,
        inputs.train,
        task=inputs.task,
        queries=inputs.questions if inputs.has_queries else None,
        params=inputs.params,
        class_names=inputs.class_names,
        run_dir=run_dir,
        options=options,
    )
    page, table = _beside(report, run_dir, "clean.html"), _beside(csv, run_dir, "clean.csv")
    if page is not None:
        result.to_html(page)
    if table is not None:
        result.to_csv(table)
    if json:
        print_json({**cleaning_as_json(result, top), "report": _text(page), "csv": _text(table)})
    else:
        show_cleaning(result, top)
        for name, path in (("page", page), ("table", table)):
            if path is not None:
                tell(f"{name}: {path}")
    if result.harm is not None and not result.harm.converged:
        say("the solver did not converge for every query; a larger --damping helps")
        raise typer.Exit(NOT_CONVERGED)


app.command("index", epilog="Example: [bold]whence index my-model/ --train train.jsonl --index my-index[/]")(
    index_command
)
app.command(
    "ask",
    epilog="Example: [bold]whence ask my-index --trust-run --prompt 'My fellow' --completion ' citizens'[/]",
)(ask_command)
app.command("validate", epilog="Example: [bold]whence validate runs/first --trust-run --budget 10min[/]")(
    validate_command
)
app.command("serve", epilog="Example: [bold]whence serve runs/first --trust-run[/]")(serve_command)
app.command(
    "tune",
    epilog="Example: [bold]whence tune my-model/ --train train.jsonl --queries queries.jsonl --trainer "
    "train.py:train --run-dir runs/tune[/]",
)(tune_command)


@app.command(epilog="Example: [bold]whence demo --output demo[/]")
@guarded
def demo(
    part: Annotated[str, typer.Argument(help="digits, text or all.")] = "all",
    output: Annotated[Path, typer.Option(help="Where the pages go.")] = Path("demo"),
) -> None:
    """Train two small models on real data that comes with Python, ask them questions, and write the pages."""
    one_process("whence demo")
    from whence.demo import run_demo  # needs scikit-learn and transformers

    run_demo(part, output)


def main() -> None:
    """Entry point."""
    keep_freed_memory()  # products of one size follow each other for hours
    with launched():
        try:
            app()
        except SystemExit as end:
            if end.code not in (None, 0, NOT_CONVERGED):
                raise  # without waiting for other processes, which may not come to an end of their own
            code = end.code
    sys.exit(code)


def _attribute(
    command: Command, *, run_dir: Path | None, report: Path | None, top: int, by: str, json: bool
) -> None:
    if by not in ("score", "unit"):
        raise OptionError(f"--by is {by!r}; rank by score or by unit")

    def keep(run: Run) -> None:
        if not run.has("result"):  # which nothing is left to repeat of
            run.keep("command", Command, lambda: command)
        if run.has("command") and run.keep("command", Command, lambda: command).models != command.models:
            run.put("command", Command, command)  # of several checkpoints, others than before

    inputs = Inputs(command.inputs, command.more)
    page = _beside(report, run_dir, "report.html")
    try:
        result = attribute(
            inputs.model,
            inputs.train,
            inputs.questions,
            task=inputs.task,
            params=inputs.params,
            groups=inputs.groups,
            candidates=inputs.candidates,
            class_names=inputs.class_names,
            training=inputs.trainings,
            run_dir=run_dir,
            on_run=keep,
            options=command.options,
        )
    except KeyboardInterrupt:
        if run_dir is not None and page is not None and holds(run_dir, "quick"):
            say(f"interrupted; the quick answer so far: {escape(str(load(run_dir).to_html(page)))}")
        raise
    if current().rank == 0:
        if page is not None:
            result.to_html(page)
        if json:
            print_json({"queries": rows_as_json(result, top, by), "report": _text(page)})
        else:
            show_result(result, top, by)
            if page is not None:
                tell(f"\npage: {page}")
        if not bool(result.solve.ended_well.all()):
            say("the solver did not converge for every query; a larger --damping helps, or more --chains")
    if not bool(result.solve.ended_well.all()):
        raise typer.Exit(NOT_CONVERGED)


def _beside(given: Path | None, run_dir: Path | None, name: str) -> Path | None:
    """Where a file goes: where it was asked for, else beside the run; nowhere without one, or on a read-only disk."""
    if given is not None or run_dir is None:
        return given
    if run_dir.exists() and not os.access(run_dir, os.W_OK):
        say(f"{escape(str(run_dir))} is read-only, so {name} is not written there; name another place for it")
        return None
    return run_dir / name


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def _choice_as_json(choice: Choice) -> dict[str, object]:
    return {"solver": choice.best.solver, "words": choice.words(), **as_json(choice)}


def _measure(gnh: GaussNewton, options: MeasureOptions) -> Spectrum:
    return estimate_spectrum(gnh, generator=options.generator(1), terms=options.spectrum_terms)
