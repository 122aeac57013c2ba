"""Kills a run again and again until it is done, and compares its numbers with those of an uninterrupted one.

Run as a program, so that the processes it forks start with everything imported and nothing running:
``python interruptions.py DIRECTORY PRODUCT/COMMAND …``. Prints JSON: for every kind of run, one row for each run with
the phases it was killed in.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import signal
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet  # noqa: F401 (here, or every process would import it for itself)
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import whence
from whence.runs.files import read_tree

RANDOM_RUNS, KILLS_PER_RUN = 2, 4
_ROUNDS = [
    [f"solve-{n}", f"solve-{n}.", f"solution-{n}", f"scores-{n}/part-00000", f"scores-{n}/part-00004"]
    for n in (1, 2, 3)
]
_BEGIN = ["", "queries", "spectrum", "plan"]
#: How the artifacts begin whose appearance is a moment to kill at, in the order in which a run keeps them. What is
#: numbered after a dot are the vectors that a journal appends.
MOMENTS: dict[str, list[str]] = {
    "lissa": [*_BEGIN, *_ROUNDS[0], "result"],
    "cg": [*_BEGIN, *(name for name in _ROUNDS[0] if not name.endswith(".")), "result"],
    "lissa-until": [*_BEGIN, *_ROUNDS[0], *_ROUNDS[1], "result"],
    "cg-until": [*_BEGIN, *(n for part in _ROUNDS for n in part if not n.endswith(".")), "result"],
    "clean": ["", "spectrum", "curvature", "bounds", "readings/part-00000", "readings/part-00004", "scale",
              "self-influence", "cleaning"],
}  # fmt: skip


def problem() -> tuple[nn.Module, TensorDataset, list[Any]]:
    """Real digits and a model trained on them, made once, before any process is forked."""
    torch.set_num_threads(1)
    bunch = load_digits()
    x, y = torch.tensor(bunch.data[:150]).float() / 16, torch.tensor(bunch.target[:150])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 12), nn.Tanh(), nn.Linear(12, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model.eval(), TensorDataset(x[:120], y[:120]), [(x[i], y[i]) for i in (120, 121)]


MODEL, TRAIN, QUERIES = problem()


def run(directory: Path, kind: str) -> None:
    product, command = kind.split("/")
    common: dict[str, Any] = {"task": whence.Classification(), "product": product, "part_size": 15}
    if command == "clean":
        whence.clean(MODEL, TRAIN, **common, rank=8, exact_solves=4, run_dir=directory, shown=5)
        return
    options: dict[str, Any] = {
        "solver": command,
        "damping": 0.05,
        "chains": 3,
        "refine": 1.0,
        "accuracy": 0.98,
    }
    if command == "cg":
        options["solver"] = whence.ConjugateGradient(tolerance=1e-5)
    elif command.endswith("-until"):
        solver = command.removesuffix("-until")
        options |= {"solver": solver, "until": "top-10 stable", "accuracy": 0.8, "budget": 20.0}
        options["damping"] = 0.001 if solver == "cg" else 0.05
    whence.attribute(MODEL, TRAIN, QUERIES, **common, **options, run_dir=directory, checkpoint_seconds=0.01)


def begin(directory: Path, kind: str) -> int:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                run(directory, kind)
            code = 0
        finally:
            os._exit(code)
    return child


def kill_when(child: int, moment: Callable[[], bool]) -> bool:
    """Kill the child at the moment; False if it was done before."""
    while not moment():
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            assert status == 0, f"the run failed with status {status}"
            return False
        time.sleep(0.0005)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


def manifest(directory: Path) -> dict[str, Any]:
    path = directory / "manifest.json"
    found: dict[str, Any] = json.loads(path.read_bytes()) if path.exists() else {}
    return found


def has_come_to(directory: Path, moment: str) -> bool:
    """Whether there is an artifact of this beginning; the empty one is the manifest alone."""
    found = manifest(directory)
    return any(name.startswith(moment) for name in found["artifacts"]) if moment and found else bool(found)


def phase(directory: Path, kind: str) -> str:
    there = [name for name in MOMENTS[kind.split("/")[1]] if has_come_to(directory, name)]
    return (there[-1] or "manifest") if there else "nothing"


def finish(directory: Path, kind: str) -> None:
    _, status = os.waitpid(begin(directory, kind), 0)
    assert status == 0, f"the run failed with status {status}"


def untimed(node: Any) -> Any:
    """A JSON tree without how long anything took."""
    if isinstance(node, dict):
        return {
            key: untimed(value) for key, value in node.items() if key not in ("seconds", "seconds_per_term")
        }
    return [untimed(value) for value in node] if isinstance(node, list) else node


def numbers(directory: Path) -> dict[str, Any]:
    """All that a finished run holds, but how long anything took."""
    found = manifest(directory)
    kept: dict[str, Any] = {"operators": found["operators"]}
    for name, artifact in found["artifacts"].items():
        path = directory / artifact["file"]
        if path.suffix == ".parquet":
            kept[name] = path.read_bytes()
        else:
            tree, tensors = read_tree(path)
            bits = {key: tensor.reshape(-1).view(torch.uint8).tolist() for key, tensor in tensors.items()}
            kept[name] = untimed(tree), bits
    return kept


def killed_at_random(directory: Path, kind: str, duration: float, randomness: random.Random) -> list[str]:
    """Kill a run a few times, anywhere; the phases that this met."""
    killed = []
    for _ in range(KILLS_PER_RUN):
        # Each goes on where the one before came to, so all of them together take about one run.
        moment = time.monotonic() + randomness.uniform(0, duration / 3)
        if not kill_when(begin(directory, kind), lambda moment=moment: time.monotonic() > moment):
            break
        killed.append(phase(directory, kind))
    return killed


def killed_at_every_moment(directory: Path, kind: str) -> list[str]:
    """Kill one run at each of the moments, one after the other; the phases that this met."""
    killed = []
    for name in MOMENTS[kind.split("/")[1]]:
        if not kill_when(begin(directory, kind), lambda name=name: has_come_to(directory, name)):
            break
        killed.append(phase(directory, kind))
    return killed


def kill_and_compare(root: Path, kind: str) -> list[dict[str, Any]]:
    begun = time.monotonic()
    finish(root / "uninterrupted", kind)
    duration = time.monotonic() - begun
    truth = numbers(root / "uninterrupted")
    randomness = random.Random(0)
    rows = []
    for number in range(1 + RANDOM_RUNS):
        directory = root / f"run-{number}"
        if number == 0:
            killed = killed_at_every_moment(directory, kind)
        else:
            killed = killed_at_random(directory, kind, duration, randomness)
        finish(directory, kind)
        found = numbers(directory)
        different = sorted(name for name in found.keys() | truth.keys() if found.get(name) != truth.get(name))
        rows.append({"killed": killed, "different": different})
    return rows


def main() -> None:
    # here, or every process would import it for itself; not above, where doctest's collection would meet its warnings
    importlib.import_module("torch._decomp.decompositions_for_jvp")
    root, kinds = Path(sys.argv[1]), sys.argv[2:]
    print(json.dumps({kind: kill_and_compare(root / kind, kind) for kind in kinds}))


if __name__ == "__main__":
    main()
