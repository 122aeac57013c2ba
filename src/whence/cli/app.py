"""The commands."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from whence.attribution import Attribution, attribute, load
from whence.attribution.forecast import count_passes, forecast
from whence.attribution.kronecker import with_basis, would_try
from whence.attribution.saving import plan_to_json, spectrum_to_json
from whence.cleaning.clean_saving import is_cleaning, load_cleaning
from whence.cli.clean import clean_command
from whence.cli.job import Job, JobOptions
from whence.cli.options import AsJson, guarded, takes_job
from whence.cli.outcome import NOT_CONVERGED, out, print_json, say
from whence.cli.sweep import check_figure, draw, sweep_dampings
from whence.cli.tables import rows_as_json, show_forecast, show_plan, show_result, show_sweep
from whence.cli.validate import validate_command
from whence.errors import RunDirectoryError
from whence.model.gauss_newton import GaussNewton
from whence.model.memory import half_of_memory, keep_freed_memory
from whence.runs.files import read_json, write_json
from whence.solvers.choice import choose, resolve_accuracy
from whence.solvers.plan import Plan, check_damping
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

Damping = Annotated[str, typer.Option(help="λ, auto (λmax/200), or a part of λmax: lambda_max/50.")]
Chains = Annotated[int, typer.Option(help="Independent solves; their spread is the error bar.")]
Refine = Annotated[
    float | None,
    typer.Option(help="Cost of each chain, as a multiple of the paper's plan; what the accuracy needs."),
]
Accuracy = Annotated[
    str,
    typer.Option(
        help="What to aim at: the correlation with the exact scores, or their relative error, as 10%."
    ),
]
Terms = Annotated[int, typer.Option(help="Terms (tokens) of the data that λmax is measured on at most.")]


@app.command(epilog="Example: [bold]whence spectrum path/to/model --train train.jsonl[/]")
@takes_job
def spectrum(job: Job, *, lanczos_terms: Terms = 4096, as_json: AsJson = False) -> None:
    """Measure the Gauss-Newton Hessian: trace, Frobenius norm, λmax, sampling constants, each with its error."""
    gnh, measured = _measure(job, lanczos_terms)
    if as_json:
        print_json({**spectrum_to_json(measured), "num_terms": gnh.num_terms, "product": gnh.product})
    else:
        out().print(f"{gnh!r}\n\n{measured}", markup=False)


@app.command(
    epilog="Examples:\n\n"
    "[bold]whence plan path/to/model --train train.jsonl --queries queries.jsonl --damping auto[/]\n\n"
    "[bold]whence plan path/to/model --train train.jsonl --damping-sweep --figure sweep.svg[/]",
)
@takes_job
def plan(
    job: Job,
    *,
    damping: Damping = "auto",
    accuracy: Accuracy = "0.995",
    chains: Chains = 4,
    refine: Refine = None,
    lanczos_terms: Terms = 4096,
    candidates: Annotated[str | None, typer.Option(help="As for attribute.")] = None,
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
    as_json: AsJson = False,
) -> None:
    """Measure the spectrum and tell what an attribution will cost in time, memory and disk. Nothing long is run."""
    check_damping(_damping(damping))
    correlation = resolve_accuracy(accuracy)
    check_figure(figure, damping_sweep)
    shortlist = job.candidates(candidates)
    asked = job.options.queries or job.options.prompt or job.problem.queries
    queries = len(job.queries) if asked else 1
    gnh, measured = _measure(job, lanczos_terms)
    choice = choose(
        measured,
        _damping(damping),
        num_terms=gnh.num_terms,
        queries=queries,
        accuracy=correlation,
        chains=chains,
        passes=count_passes(gnh, queries),
        memory_bytes=half_of_memory(gnh.network.device),
        generator=torch.Generator().manual_seed(job.options.seed),
    )
    refine = choice.of("lissa").refine if refine is None else refine
    made = Plan.tuned(measured, _damping(damping), num_terms=gnh.num_terms, chains=chains, refine=refine)
    examples = len(gnh.terms) if shortlist is None else len(shortlist)
    tries_ekfac = would_try(gnh, choice.best, queries=queries)
    solver = with_basis(gnh, choice.best) if tries_ekfac else choice.best
    cost = forecast(gnh, made, queries=queries, examples=examples, solver=solver)
    sweep = None
    if damping_sweep:
        sweep = sweep_dampings(
            gnh, made, cost, queries=queries, max_terms=lanczos_terms, refine=refine, seed=job.options.seed
        )
        if figure is not None:
            draw(sweep, figure)
    if as_json:
        print_json(
            {
                "spectrum": spectrum_to_json(measured),
                "plan": plan_to_json(made),
                "choice": choice.to_json(),
                "tries_ekfac": tries_ekfac,
                "queries": queries,
                "examples": examples,
                **dataclasses.asdict(cost),
                **({} if sweep is None else {"damping_sweep": sweep.to_json()}),
            }
        )
        return
    show_plan(out(), made, choice)
    if tries_ekfac:
        out().print(
            "attribute will first try an EK-FAC preconditioner, and use it if that saves iterations",
            soft_wrap=True,
        )
    show_forecast(out(), cost, queries, examples)
    if sweep is not None:
        show_sweep(out(), sweep)
    if figure is not None:
        out().print(f"\nfigure: {figure}", markup=False, soft_wrap=True)


@app.command(
    "attribute",
    epilog="Examples:\n\n"
    "[bold]whence attribute my-model/ --train train.jsonl --queries queries.jsonl --run runs/first[/]\n\n"
    "[bold]whence attribute my-model/ --train speeches/ --prompt 'My fellow' --completion ' citizens' --run b[/]\n\n"
    "[bold]whence attribute model.py:build --task classification --train images/train --queries odd/ --run runs/c[/]",
)
@takes_job
def attribute_command(
    job: Job,
    *,
    run: Annotated[
        Path | None,
        typer.Option(help="Directory that keeps the run: resumable, and what `whence report` reads."),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(help="Where to write the page; RUN/report.html if there is a run directory."),
    ] = None,
    damping: Damping = "auto",
    accuracy: Accuracy = "0.995",
    chains: Chains = 4,
    refine: Refine = None,
    solver: Annotated[
        str,
        typer.Option(
            help="auto, cg (conjugate gradients over all of the data), lissa, or refinement (solve on subsets, "
            "finish on fresh batches)."
        ),
    ] = "auto",
    sampling: Annotated[
        str, typer.Option(help="How LiSSA's batches are drawn: auto, uniform or curvature.")
    ] = "auto",
    lanczos_terms: Terms = 4096,
    candidates: Annotated[
        str | None,
        typer.Option(
            help="Score only a shortlist: bm25:K or tfidf:K (the K nearest to each query), or a file of ids."
        ),
    ] = None,
    baseline: Annotated[bool, typer.Option(help="Also compute plain gradient dot products.")] = True,
    top: Annotated[int, typer.Option(help="Examples to print at each end of a ranking.")] = 5,
    shown: Annotated[int, typer.Option(help="Examples to keep for the page at each end.")] = 20,
    title: Annotated[str, typer.Option(help="Of the page.")] = "Which training examples are behind this?",
    as_json: AsJson = False,
) -> None:
    """Find the training examples behind the queries' answers, each with an error bar."""
    own = {
        "damping": damping,
        "solver": solver,
        "accuracy": resolve_accuracy(accuracy),
        "sampling": sampling,
        "chains": chains,
        "refine": refine,
        "lanczos_terms": lanczos_terms,
        "candidates": candidates,
        "baseline": baseline,
        "shown": shown,
        "title": title,
    }
    _attribute(job, own, run=run, report=report, top=top, as_json=as_json)


@app.command(epilog="Example: [bold]whence resume runs/first[/]")
@guarded
def resume(
    run: Annotated[Path, typer.Argument(help="Run directory of an interrupted attribute command.")],
    report: Annotated[
        Path | None, typer.Option(help="Where to write the page; RUN/report.html by default.")
    ] = None,
    top: Annotated[int, typer.Option(help="Examples to print at each end of a ranking.")] = 5,
    as_json: AsJson = False,
) -> None:
    """Go on with an interrupted run, with the command that began it."""
    path = run / "command.json"
    if not path.exists():
        raise RunDirectoryError(
            f"{run} holds no command to repeat; it was not begun by `whence attribute`. Run its program again"
        )
    command = read_json(path)
    _attribute(
        Job(JobOptions(**command["job"])), command["own"], run=run, report=report, top=top, as_json=as_json
    )


@app.command("report", epilog="Example: [bold]whence report runs/first --output report.html[/]")
@guarded
def report_command(
    run: Annotated[
        Path,
        typer.Argument(help="Directory of a finished run of attribute or clean, or of a saved attribution."),
    ],
    output: Annotated[
        Path | None,
        typer.Option(help="Where to write the page; RUN/report.html by default, or RUN/clean.html."),
    ] = None,
) -> None:
    """Write the page of a finished run: one self-contained HTML file."""
    if is_cleaning(run):
        page = load_cleaning(run).to_html(output or run / "clean.html")
    else:
        page = load(run).to_html(output or run / "report.html")
    out().print(str(page), markup=False, soft_wrap=True)


app.command("clean", epilog="Example: [bold]whence clean my-model/ --train train.jsonl --run runs/clean[/]")(
    clean_command
)


app.command("validate", epilog="Example: [bold]whence validate runs/first --budget 10min[/]")(
    validate_command
)


@app.command(epilog="Example: [bold]whence demo --output demo[/]")
@guarded
def demo(
    part: Annotated[str, typer.Argument(help="digits, text or all.")] = "all",
    output: Annotated[Path, typer.Option(help="Where the pages go.")] = Path("demo"),
) -> None:
    """Train two small models on real data that comes with Python, ask them questions, and write the pages."""
    from whence.demo import run_demo

    run_demo(part, output)


def main() -> None:
    """Entry point."""
    keep_freed_memory()  # products of one size follow each other for hours
    app()


def _attribute(
    job: Job, own: dict[str, Any], *, run: Path | None, report: Path | None, top: int, as_json: bool
) -> None:
    options = job.options
    result = attribute(
        job.problem.model,
        job.train,
        job.queries,
        task=job.task,
        damping=_damping(own["damping"]),
        params=options.params or None,
        product=options.product,  # type: ignore[arg-type]  # checked there
        solver=own["solver"],
        accuracy=own["accuracy"],
        sampling=own["sampling"],
        chains=own["chains"],
        refine=own["refine"],
        lanczos_terms=own["lanczos_terms"],
        candidates=job.candidates(own["candidates"]),
        baseline=own["baseline"],
        shown=own["shown"],
        class_names=job.class_names,
        title=own["title"],
        seed=options.seed,
        micro_batch=options.micro_batch,
        run_dir=run,
        on_run=None
        if run is None
        else lambda path: write_json(path / "command.json", {"job": options.as_json(), "own": own}),
    )
    _show(result, run, report, top, as_json)
    if not bool(result.solve.converged.all()):
        say("the solver did not converge for every query; a larger --damping helps, or more --chains")
        raise typer.Exit(NOT_CONVERGED)


def _show(result: Attribution, run: Path | None, report: Path | None, top: int, as_json: bool) -> None:
    page = report or (None if run is None else run / "report.html")
    if page is not None:
        result.to_html(page)
    if as_json:
        print_json({"queries": rows_as_json(result, top), "report": None if page is None else str(page)})
        return
    show_result(out(), result, top)
    if page is not None:
        out().print(f"\npage: {page}", markup=False, soft_wrap=True)


def _measure(job: Job, lanczos_terms: int) -> tuple[GaussNewton, Spectrum]:
    gnh = job.operator()
    generator = torch.Generator().manual_seed(job.options.seed)
    return gnh, estimate_spectrum(gnh, generator=generator, terms=lanczos_terms)


def _damping(text: str | float) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text  # a word, checked where it is used
