"""Runs of every kind, small enough to be repeated hundreds of times; and all that one leaves, to be compared."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import whence
from whence.distributed import shard
from whence.errors import WhenceWarning
from whence.runs import as_json
from whence.runs.files import read_tree
from zoo import CASES, mlp, vectors

#: What follows from a clock.
_TIMES = ("seconds", "seconds_per_term", "budget_seconds")


@dataclass(frozen=True)
class Kind:
    """A kind of run.

    Attributes:
        command: ``attribute``, ``clean``, ``tune``, or ``validate``: an attribution, and then its checks.
        options: of it.
        text: whether of a language model.
        queries: whether ``clean`` has any.
        ranks: processes that share the work; of these the first has the directory.
        sharded: whether the model is sharded over them.
    """

    command: str
    options: dict[str, Any]
    text: bool = False
    queries: bool = True
    ranks: int = 1
    sharded: bool = False

    @property
    def loads(self) -> bool:
        """Whether what it leaves can be loaded, and has a page."""
        return self.command != "tune"

    @property
    def parts(self) -> tuple[str, ...]:
        """What can be done to it: copies are taken of what one process leaves."""
        return ("kills", "processes", "damage") if self.ranks == 1 else ("processes",)

    def run(self, directory: Path | None, **changes: Any) -> Any:
        """Do it, or go on with it; everything is made anew, as by another process."""
        model, data, task = _text() if self.text else _numbers()
        if self.sharded:
            shard(model)
        options = {"product": "finite-difference", **self.options, **changes}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", WhenceWarning)
            if self.command == "clean":
                queries = data[:2] if self.queries else None
                return whence.clean(model, data, queries=queries, task=task, run_dir=directory, **options)
            if self.command == "tune":
                return whence.tune(
                    model, data, data[:4], partial(_trained, data), task=task, directory=directory, **options
                )
            result = whence.attribute(
                model, data, data[:2], task=task, run_dir=directory, **options, checkpoint_seconds=0.0
            )
            if self.command == "attribute":
                return result
            # so much that every check is run
            return whence.validate(
                model, data, data[:2], result, task=task, directory=directory, budget_seconds=1e9, points=1
            )


def _numbers() -> tuple[nn.Module, list[Any], whence.Classification]:
    torch.manual_seed(0)
    return mlp().double().eval(), vectors(torch.float64), whence.Classification()


def _text() -> tuple[nn.Module, list[Any], Any]:
    case = next(case for case in CASES if case.name == "gpt2")
    return case.model(torch.float32), case.data(torch.float32), case.task


def _trained(data: list[Any], subset: Sequence[int], seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = mlp().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for position in subset:
        x, y = data[position]
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[None]), torch.tensor([int(y)])).backward()
        optimizer.step()
    return model.eval()


_SMALL: dict[str, Any] = {"damping": "lambda_max/10", "part_size": 8, "shown": 2}
_LISSA: dict[str, Any] = {
    **_SMALL,
    "solver": "lissa",
    "chains": 2,
    "refine": 1.0,
    "accuracy": 0.8,
    "damping": "lambda_max/4",
}
_CLEAN: dict[str, Any] = {"part_size": 8, "rank": 4, "exact_solves": 2, "shown": 2}
#: By finite differences but where it says otherwise: every product depends on those before, so nothing is right by
#: chance.
KINDS: dict[str, Kind] = {
    "cg": Kind("attribute", {**_SMALL, "solver": "cg"}),
    "cg exact": Kind("attribute", {**_SMALL, "solver": "cg", "product": "exact", "damping": "auto"}),
    "lissa": Kind("attribute", _LISSA),
    "lissa by curvature": Kind("attribute", {**_LISSA, "sampling": "curvature"}),
    "auto": Kind("attribute", {**_SMALL, "damping": "auto", "stability": True}),
    "quick": Kind("attribute", {**_SMALL, "damping": "auto", "accuracy": "quick"}),
    "quick, then cg": Kind(
        "attribute", {**_SMALL, "damping": "auto", "accuracy": 0.95, "budget": 1.5, "method": "directional"}
    ),
    "quick of text": Kind("attribute", {**_SMALL, "accuracy": "quick"}, text=True),
    "cg until": Kind(
        "attribute",
        {**_SMALL, "solver": "cg", "damping": "lambda_max/1000", "until": "top-10 stable", "accuracy": 0.8},
    ),
    "lissa until": Kind(
        "attribute", {**_LISSA, "until": "top-5 stable at 0.99", "budget": 3.0, "method": "directional"}
    ),
    "cg of text": Kind("attribute", {**_SMALL, "solver": "cg"}, text=True),
    "recipe": Kind(
        "attribute",
        {**_SMALL, "damping": "auto", "training": {"optimizer": "adam", "rate": 1e-3, "steps": 500}},
    ),
    "clean": Kind("clean", _CLEAN, queries=False),
    "clean with queries": Kind("clean", {**_CLEAN, "damping": "lambda_max/10"}),
    "clean of text": Kind("clean", {**_CLEAN, "product": "auto"}, text=True, queries=False),
    "tune": Kind("tune", {"halves": 6, "multiples": [0.25, 4.0]}),
    "validate": Kind("validate", {**_SMALL, "solver": "cg", "product": "exact"}),
    "two processes": Kind("attribute", {**_SMALL, "solver": "cg"}, ranks=2),
    "sharded": Kind("attribute", {**_SMALL, "solver": "cg", "method": "directional"}, ranks=2, sharded=True),
}


def numbers(directory: Path) -> dict[str, Any]:
    """All that a run's directory says, in runs inside it too, but how long anything took."""
    kept: dict[str, Any] = {}
    for manifest in sorted(directory.rglob("manifest.json")):
        found = json.loads(manifest.read_bytes())
        where = str(manifest.parent.relative_to(directory))
        kept[where] = [found[name] for name in ("config", "identity", "operators")]
        for name, artifact in found["artifacts"].items():
            path = manifest.parent / artifact["file"]
            if path.suffix == ".parquet":
                kept[f"{where}/{name}"] = path.read_bytes()
            else:
                tree, tensors = read_tree(path)
                bits = {key: t.reshape(-1).view(torch.uint8).tolist() for key, t in tensors.items()}
                kept[f"{where}/{name}"] = _untimed(tree), bits
    return kept


def plain(result: Any) -> Any:
    """A result as it can be compared, but how long anything took."""
    return _untimed(as_json(result))


def different(directory: Path, truth: dict[str, Any]) -> list[str]:
    """What a directory says otherwise, by name."""
    found = numbers(directory)
    return sorted(name for name in found.keys() | truth.keys() if found.get(name) != truth.get(name))


def _untimed(node: Any) -> Any:
    if isinstance(node, dict):
        return {key: _untimed(value) for key, value in node.items() if key not in _TIMES}
    return [_untimed(value) for value in node] if isinstance(node, list) else node
