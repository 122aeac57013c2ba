"""``whence index`` and ``whence ask``: what later questions need, made once, and their answers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from whence.cli.inputs import InputOptions, Inputs, TrustRun, check_trusted
from whence.cli.options import AsJson, takes
from whence.cli.outcome import print_json, tell
from whence.cli.tables import rows_as_json, show_result
from whence.distributed import one_process
from whence.errors import OptionError, RunDirectoryError
from whence.index import Index, index
from whence.options import AskOptions, IndexOptions
from whence.runs import Run, holds, read
from whence.units import format_bytes

__all__ = ["ask_command", "index_command"]

#: What belongs to a question.
_ASKED = ("queries", "prompt", "completion", "contrast", "query_groups", "groups", "candidates")


@takes(InputOptions, IndexOptions)
def index_command(
    given: InputOptions,
    options: IndexOptions,
    *,
    index_dir: Annotated[Path, typer.Option("--index", help="Directory of the index.")],
    json: AsJson = False,
) -> None:
    """Make an index of the training data, which answers later questions in a moment.

    The same command goes on with one that was interrupted, and adds examples that have come to the end of the data.
    """
    one_process("whence index")
    for name in _ASKED:
        if getattr(given, name) is not None:
            raise OptionError(
                f"--{name} is of a question, and an index is for all of them; give it to whence ask"
            )
    inputs = Inputs(given)

    def keep(run: Run) -> None:
        if not run.has("inputs") or read(index_dir, "inputs", InputOptions) != given:
            run.put("inputs", InputOptions, given)

    made = index(
        inputs.problem.model,
        inputs.train,
        task=inputs.task,
        directory=index_dir,
        params=inputs.params,
        class_names=inputs.class_names,
        training=inputs.training,
        on_run=keep,
        options=options,
    )
    examples, each = len(made.gnh.terms), made.bytes_per_example
    if json:
        print_json({"index": str(index_dir), "examples": examples, "bytes_per_example": each})
    else:
        tell(
            f"index: {index_dir}, {examples:,} examples of {each:,} bytes, {format_bytes(examples * each)} in all"
        )


@takes(AskOptions)
def ask_command(
    options: AskOptions,
    *,
    index_dir: Annotated[Path, typer.Argument(help="Directory of an index.")],
    trust_run: TrustRun = False,
    queries: Annotated[
        str | None,
        typer.Option(
            help="Questions: rows with prompt and completion (or text), or labelled images or texts."
        ),
    ] = None,
    prompt: Annotated[
        str | None, typer.Option(help="One question, typed here: what the model was given…")
    ] = None,
    completion: Annotated[str | None, typer.Option(help="…and what it said.")] = None,
    contrast: Annotated[str | None, typer.Option(help="…and what it might have said instead.")] = None,
    report: Annotated[Path | None, typer.Option(help="Where to write the page.")] = None,
    top: Annotated[int, typer.Option(help="Examples to print at each end of a ranking.")] = 5,
    json: AsJson = False,
) -> None:
    """Find the training examples behind answers, from an index."""
    one_process("whence ask")
    if not holds(index_dir, "inputs"):
        raise RunDirectoryError(
            f"{index_dir} holds no index that whence index made; one made from Python is asked from there: "
            "whence.Index.open(…).ask(…)"
        )
    kept = read(index_dir, "inputs", InputOptions)
    check_trusted(
        index_dir,
        kept,
        trusted=trust_run,
        otherwise="From Python: whence.Index.open(directory, model, train, task=…).ask(…)",
    )
    inputs = Inputs(replace(kept, queries=queries, prompt=prompt, completion=completion, contrast=contrast))
    asked = inputs.questions
    found = Index.open(
        index_dir,
        inputs.problem.model,
        inputs.train,
        task=inputs.task,
        params=inputs.params,
        class_names=inputs.class_names,
    )
    result = found.ask(asked, options=options).result
    if report is not None:
        result.to_html(report)
    if json:
        print_json({"queries": rows_as_json(result, top), "report": None if report is None else str(report)})
    else:
        show_result(result, top)
        if report is not None:
            tell(f"\npage: {report}")
