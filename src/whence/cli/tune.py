"""``whence tune``: which λ predicts retraining best?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import typer
from torch import nn

from whence.cli.inputs import InputOptions, Inputs
from whence.cli.options import AsJson, takes
from whence.cli.outcome import print_json, tell
from whence.errors import OptionError
from whence.options import MeasureOptions
from whence.sources.functions import load_function
from whence.validation.tuning import tune

__all__ = ["tune_command"]


@takes(InputOptions, MeasureOptions)
def tune_command(
    given: InputOptions,
    options: MeasureOptions,
    *,
    trainer: Annotated[
        str,
        typer.Option(
            help="Your training: package.module:function or file.py:function, called as function(subset, seed) with "
            "positions of the examples of --train; returns the trained module."
        ),
    ],
    run_dir: Annotated[
        Path | None, typer.Option(help="Directory that keeps what is done: the same command goes on with it.")
    ] = None,
    halves: Annotated[int, typer.Option(help="Random halves of the data to train on, at least 6.")] = 20,
    seeds: Annotated[int, typer.Option(help="Models to train on each half.")] = 1,
    processes: Annotated[int, typer.Option(help="Models to train side by side.")] = 1,
    json: AsJson = False,
) -> None:
    """Choose λ by retraining on random halves of the data, and say how sure the choice is and what it gains.

    What comes out is given to `whence attribute` as --damping.
    """
    if given.candidates is not None:
        raise OptionError("tune scores every training example; leave --candidates out")
    _load(trainer)  # a name that is none is refused before anything long is run
    inputs = Inputs(given)
    found = tune(
        inputs.problem.model,
        inputs.train,
        inputs.questions,
        NamedTrainer(trainer),
        task=inputs.task,
        params=inputs.params,
        training=inputs.training,
        halves=halves,
        seeds=seeds,
        processes=processes,
        directory=run_dir,
        name=trainer,
        options=options,
    )
    if json:
        print_json(found.to_json())
    else:
        tell(found)


@dataclass(frozen=True)
class NamedTrainer:
    """A user's training by its name, which other processes can load too."""

    name: str

    def __call__(self, subset: Sequence[int], seed: int, /) -> nn.Module:
        """Train on the examples at these positions."""
        model: nn.Module = _load(self.name)(subset, seed)  # what it returns is checked by `retrain`
        return model


@cache
def _load(name: str) -> Callable[..., Any]:
    return load_function(name, "the trainer")
