"""Options that several commands share, declared once: `takes_job` adds them to a command's own."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from whence.cli.job import Job, JobOptions
from whence.cli.outcome import errors_become_messages

__all__ = ["AsJson", "guarded", "takes_job"]

AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON on standard output.")]


def _job_options(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A Hugging Face model directory, or package.module:function (or file.py:function) that returns a "
            "torch module or a whence.sources.Problem.",
        ),
    ],
    train: Annotated[
        str | None,
        typer.Option(
            help="Training data: .jsonl, .json, .csv, .tsv, .parquet, .txt, a directory of text files, of shards or of "
            "images in class folders, or a directory saved by the datasets library (path:split)."
        ),
    ] = None,
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
    task: Annotated[
        str | None, typer.Option(help="classification or language-modeling, where the model does not tell.")
    ] = None,
    params: Annotated[
        list[str] | None,
        typer.Option(
            help="Glob pattern of parameter names to use (repeatable), as 'model.layers.*'; default all."
        ),
    ] = None,
    product: Annotated[str, typer.Option(help="auto, exact or finite-difference.")] = "auto",
    micro_batch: Annotated[
        int | None, typer.Option(help="Examples per pass; by default as many as fit.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Of a Hugging Face model's parameters.")] = "float32",
    tokenizer: Annotated[
        str | None, typer.Option(help="Its directory, where it is not beside the model.")
    ] = None,
    max_length: Annotated[int | None, typer.Option(help="Tokens of a passage at most (512).")] = None,
    truncate: Annotated[
        bool, typer.Option("--truncate", help="Cut long rows instead of refusing them.")
    ] = False,
    skip_empty: Annotated[bool, typer.Option("--skip-empty", help="Leave out rows without text.")] = False,
    text_field: Annotated[str | None, typer.Option(help="Field with the text ('text').")] = None,
    label_field: Annotated[str, typer.Option(help="Field with the label.")] = "label",
    split: Annotated[str | None, typer.Option(help="Split of a saved data set.")] = None,
    encoding: Annotated[str, typer.Option(help="Of text files.")] = "utf-8",
    image_mode: Annotated[str | None, typer.Option(help="Convert images to RGB or L.")] = None,
    transform: Annotated[
        str | None,
        typer.Option(help="From image to tensor: module:function, or an image processor's directory."),
    ] = None,
    allow_download: Annotated[
        bool, typer.Option("--allow-download", help="MODEL may be fetched by its name on the hub.")
    ] = False,
    check_vocabulary: Annotated[
        bool, typer.Option(help="Refuse a tokenizer whose vocabulary does not fit the model.")
    ] = True,
    seed: Annotated[int, typer.Option(help="Of all random numbers.")] = 0,
) -> JobOptions:
    given = dict(locals())
    given["params"] = given["params"] or []
    return JobOptions(**given)


def takes_job(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose first argument is a `Job`, with the job's options in its signature."""
    shared = inspect.signature(_job_options, eval_str=True).parameters
    own = dict(list(inspect.signature(command, eval_str=True).parameters.items())[1:])

    @functools.wraps(command)
    def run(**given: Any) -> None:
        options = _job_options(**{name: given.pop(name) for name in shared})
        with errors_become_messages():
            command(Job(options), **given)

    run.__signature__ = inspect.Signature([*shared.values(), *own.values()])  # type: ignore[attr-defined]
    run.__annotations__ = {name: p.annotation for name, p in {**shared, **own}.items()}
    del run.__wrapped__  # or its own signature would be looked at
    return run


def guarded(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose typed errors become messages and exit codes."""

    @functools.wraps(command)
    def run(*args: Any, **given: Any) -> None:
        with errors_become_messages():
            command(*args, **given)

    return run
