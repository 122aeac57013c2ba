"""``whence serve``: a page that answers questions, on this machine alone."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from whence.attribution import load
from whence.cli.inputs import Command, Inputs, TrustRun
from whence.cli.options import guarded
from whence.cli.outcome import tell
from whence.distributed import one_process
from whence.explorer import Answering, serve
from whence.explorer.answering import BySolving
from whence.explorer.answers import KeptAnswer
from whence.explorer.questions import Question
from whence.runs import holds

__all__ = ["serve_command"]


@guarded
def serve_command(
    directory: Annotated[Path, typer.Argument(help="Directory of a run of `whence attribute`.")],
    trust_run: TrustRun = False,
    port: Annotated[int, typer.Option(help="On this machine; 0 for any that is free.")] = 0,
) -> None:
    """Ask the model of a run more in the browser: type a prompt, see what it says, and where that comes from.

    The address that is printed works on this machine only, and holds a secret: who has it can ask.
    """
    one_process("whence serve")
    otherwise = "From Python: whence.explorer.serve(whence.explorer.Answering(…), port=0, told=print)"
    command = Command.of_run(directory, trusted=trust_run, otherwise=otherwise)
    inputs = Inputs(command.inputs)
    problem = inputs.problem
    way = BySolving(
        model=problem.model,
        train=inputs.train,
        task=inputs.task,
        params=inputs.params,
        class_names=inputs.class_names,
        training=inputs.training,
        options=command.options,
    )
    answering = Answering(
        way,
        model=problem.model,
        task=inputs.task,
        train=inputs.train,
        queries=inputs.queries if inputs.has_queries or problem.queries is not None else (),
        tokenizer=problem.tokenizer,
        context=problem.context,
    )
    if holds(directory, "result"):
        result, kept = load(directory), answering.kept
        kept.keep(
            KeptAnswer(kept.number(), Question(completion=f"The run: {result.title}"), "finished", result)
        )
    serve(answering, port=port, told=lambda address: tell(f"Open {address}\nIt answers until Ctrl-C."))
