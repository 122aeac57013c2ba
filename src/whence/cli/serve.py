"""``whence serve``: a page that answers questions, on this machine alone."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from whence.attribution import load
from whence.cli.inputs import Command, InputOptions, Inputs, TrustRun, check_trusted
from whence.cli.options import guarded
from whence.cli.outcome import tell
from whence.distributed import one_process
from whence.errors import OptionError
from whence.explorer import Answering, serve
from whence.explorer.answering import ByIndex, BySolving, Way
from whence.explorer.answers import KeptAnswer
from whence.explorer.questions import Question
from whence.index import Index
from whence.runs import holds, read

__all__ = ["serve_command"]

_OTHERWISE = "From Python: whence.explorer.serve(whence.explorer.Answering(…), port=0, told=print)"


@guarded
def serve_command(
    directory: Annotated[Path, typer.Argument(help="An index, or the run directory of an attribution.")],
    trust_run: TrustRun = False,
    port: Annotated[int, typer.Option(help="On this machine; 0 for any that is free.")] = 0,
) -> None:
    """Ask a model in the browser: type a prompt, see what it says, and where that comes from.

    From an index (whence index) answers come in a moment; from a run every question takes as long as an attribution.

    The address that is printed works on this machine only, and holds a secret: who has it can ask.
    """
    one_process("whence serve")
    inputs, way = (
        _by_index(directory, trust_run) if holds(directory, "inputs") else _by_run(directory, trust_run)
    )
    problem = inputs.problem
    answering = Answering(
        way,
        model=problem.model,
        task=inputs.task,
        train=inputs.train,
        queries=inputs.questions if inputs.has_queries or problem.queries is not None else (),
        tokenizer=problem.tokenizer,
        context=problem.context,
        class_names=inputs.class_names,
    )
    if holds(directory, "result"):
        result, kept = load(directory), answering.kept
        kept.keep(
            KeptAnswer(kept.number(), Question(completion=f"The run: {result.title}"), "finished", result)
        )
    serve(answering, port=port, told=lambda address: tell(f"Open {address}\nIt answers until Ctrl-C."))


def _by_index(directory: Path, trusted: bool) -> tuple[Inputs, Way]:
    kept = read(directory, "inputs", InputOptions)
    check_trusted(directory, kept, trusted=trusted, otherwise=_OTHERWISE)
    inputs = Inputs(kept)
    found = Index.open(
        directory,
        inputs.problem.model,
        inputs.train,
        task=inputs.task,
        params=inputs.params,
        class_names=inputs.class_names,
    )
    return inputs, ByIndex(found)


def _by_run(directory: Path, trusted: bool) -> tuple[Inputs, Way]:
    command = Command.of_run(directory, trusted=trusted, otherwise=_OTHERWISE)
    if command.more:
        raise OptionError(
            f"{directory} is of {1 + len(command.more)} checkpoints, and questions are asked of one model; begin a run "
            "of that one, or make an index of it"
        )
    inputs = Inputs(command.inputs)
    way = BySolving(
        model=inputs.problem.model,
        train=inputs.train,
        task=inputs.task,
        params=inputs.params,
        class_names=inputs.class_names,
        training=inputs.training,
        options=command.options,
    )
    return inputs, way
