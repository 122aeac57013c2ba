"""What a run is about: fingerprints of model, task and data, and the model's portrait, which tells what is different.

Weights alone do not make a model: with another activation in its code or in its ``config.json`` the same weights
compute something else. So a run keeps what the model's modules say of themselves, its configuration, and what it
answers on two examples; and a model that differs in any of them is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from whence.attribution.groups import Grouping
from whence.errors import RunDirectoryError
from whence.model.fully_sharded import own_type
from whence.model.gauss_newton import GaussNewton
from whence.runs import Run, differences
from whence.runs.fingerprint import of_data, of_model, of_value, without_addresses
from whence.solvers import Solver
from whence.tasks import Questions, Task
from whence.training import Training

__all__ = [
    "Portrait",
    "model_identity",
    "operator_identity",
    "question_identity",
    "recognise",
    "refuse_another",
]

#: Numbers that are kept of the outputs, spread over them.
_NUMBERS = 1024
#: Differences that are told.
_SHOWN = 3
#: Entries of a configuration that say nothing of what a model computes.
_ELSEWHERE = ("transformers_version",)


def model_identity(gnh: GaussNewton) -> dict[str, str]:
    """Which model, task and parameters something is about, whatever the data."""
    names = list(gnh.network.parameters)
    return {
        "model": f"{own_type(gnh.network.model).__name__} {of_model(gnh.network.model)}",
        "task": _task(gnh.task),
        "params": f"{len(names)} tensors, {gnh.num_parameters} parameters {of_value(names)}",
    }


def operator_identity(gnh: GaussNewton) -> dict[str, str]:
    """Which model, task, data and parameters a run is about."""
    return {**model_identity(gnh), "train": f"{len(gnh.terms)} examples {of_data(gnh.terms.data)}"}


def _task(task: Task) -> str:
    """As it prints itself, and a fingerprint of what that may leave out: functions, and tasks of a user's own."""
    known = type(task).__module__.startswith("whence.") and not any(callable(v) for v in vars(task).values())
    return repr(task).removesuffix("()") + ("" if known else f" {of_value(vars(task))}")


def question_identity(
    gnh: GaussNewton,
    questions: Questions,
    positions: Tensor,
    *,
    solver: Solver[Any] | None,
    training: Training | None,
    grouping: Grouping | None,
) -> dict[str, str]:
    """The same, and which queries, examples to score, solver of the user's and training an attribution is about."""
    everything = len(positions) == len(gnh.terms)
    return {
        **operator_identity(gnh),
        "queries": f"{len(questions)} {of_data(questions.data)}",
        "asked": questions.words() or "loss",
        "candidates": "all" if everything else f"{len(positions)} {of_value(positions)}",
        "own solver": "" if solver is None else f"{type(solver).__name__} {of_value(solver)}",
        "groups": "" if grouping is None else f"{len(grouping.names)} {of_value(grouping)}",
        "training": "" if training is None else training.identity,
    }


@dataclass(frozen=True)
class Portrait:
    """A model as it is known beside its weights.

    Attributes:
        modules: name -> type and settings, as the module prints them.
        config: of a Hugging Face model: entry -> value.
        outputs: some of its outputs on the two longest examples.
        losses: of these examples' terms.
    """

    modules: dict[str, str]
    config: dict[str, str]
    outputs: Tensor
    losses: Tensor

    @staticmethod
    def of(gnh: GaussNewton, positions: Tensor | None = None) -> Portrait:
        """The model's as it is now, for one forward pass over two examples: by default the longest."""
        positions = gnh.terms.longest(2) if positions is None else positions
        model, batch = gnh.network.model, gnh.terms.fetch(positions)
        with torch.no_grad():
            outputs = gnh.network.outputs(batch)
            losses = gnh.task.losses(outputs, batch)
        config: dict[Any, Any] = getattr(getattr(model, "config", None), "to_dict", dict)()
        return Portrait(
            {
                name or "itself": without_addresses(f"{own_type(module).__qualname__}({module.extra_repr()})")
                for name, module in model.named_modules()
            },
            {
                str(name): without_addresses(repr(value))
                for name, value in config.items()
                if not str(name).startswith("_") and name not in _ELSEWHERE
            },
            _some(outputs),
            _some(losses),
        )

    def different(self, now: Portrait) -> Iterator[str]:
        """What is another in a model as it is now, in words."""
        yield from (f"module {told}" for told in differences(self.modules, now.modules))
        yield from (f"configuration {told}" for told in differences(self.config, now.config))
        for name in ("outputs", "losses"):
            there, here = getattr(self, name), getattr(now, name)
            if there.shape != here.shape or there.dtype != here.dtype:
                yield f"{name}: {tuple(there.shape)} of {there.dtype} there, {tuple(here.shape)} of {here.dtype} now"
            elif (off := float((there - here).abs().max())) > _tolerance(here):
                yield f"{name} on two of the examples: off by {off:.3g}, of {float(here.abs().max()):.3g}"


def recognise(run: Run, gnh: GaussNewton) -> None:
    """Keep the model's portrait with a run, and refuse another model than the one that is kept.

    Raises:
        RunDirectoryError: it is another; says what differs.
    """
    now = Portrait.of(gnh)
    refuse_another(run.path, run.keep("model", Portrait, lambda: now), now)


def refuse_another(path: Path | None, kept: Portrait, now: Portrait) -> None:
    """Refuse a model that is another than the one whose portrait was kept, as `recognise` does."""
    found = list(kept.different(now))
    if found:
        more = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        raise RunDirectoryError(
            f"{path} holds a run about another model of the same weights ({'; '.join(found[:_SHOWN])}{more}). Give "
            "another directory, or the same model to go on with that run"
        )


def _some(numbers: Tensor) -> Tensor:
    flat = numbers.detach().reshape(-1)
    spread = torch.linspace(0, len(flat) - 1, min(len(flat), _NUMBERS), dtype=torch.float64)
    return flat[spread.long().to(flat.device)].cpu()


def _tolerance(numbers: Tensor) -> float:
    """Half of the digits: what is left is another model's, not another machine's or another number of threads'."""
    return float(torch.finfo(numbers.dtype).eps ** 0.5 * numbers.abs().max())
