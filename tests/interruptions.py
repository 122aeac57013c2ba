"""Kills a run again and again until it is done, and compares its numbers with those of an uninterrupted one.

Run as a program, so that the processes it forks start with everything imported and nothing running:
``python interruptions.py DIRECTORY PRODUCT/SOLVER …``. Prints JSON: for every kind of run, one row for each run with
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet  # noqa: F401 (here, or every process would import it for itself)
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import whence

RANDOM_RUNS, KILLS_PER_RUN = 4, 4
#: Files whose appearance is a moment to kill at, in the order in which a run writes them.
MOMENTS = [
    "config.json",
    "gradients.safetensors",
    "spectrum.json",
    "plan.json",
    "solve/state.safetensors",
    "solve/chain-0-1.safetensors",
    "solve/cg.safetensors",
    "solution.safetensors",
    "scores/part-00000.parquet",
    "scores/part-00004.parquet",
    "shown.parquet",
]


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
    product, name = kind.split("/")
    solver = whence.ConjugateGradient(tolerance=1e-5) if name == "cg" else name
    whence.attribute(
        MODEL, TRAIN, QUERIES, task=whence.Classification(), product=product, damping=0.05, chains=3,
        refine=1.0, accuracy=0.98, run_dir=directory, checkpoint_seconds=0.01, part_size=15, solver=solver,
    )  # fmt: skip


def begin(directory: Path, kind: str) -> int:
    child = os.fork()
    if child == 0:
        code = 1
        try:
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


def phase(directory: Path) -> str:
    there = [name for name in MOMENTS if (directory / name).exists()]
    return there[-1] if there else "nothing"


def finish(directory: Path, kind: str) -> None:
    _, status = os.waitpid(begin(directory, kind), 0)
    assert status == 0, f"the run failed with status {status}"


def files(directory: Path) -> dict[str, bytes]:
    """All numbers of a finished run."""
    result = json.loads((directory / "result.json").read_text())
    numbers = {name: result[name] for name in ("query_losses", "query_products", "query_dots")}
    numbers["solve"] = {k: v for k, v in result["solve"].items() if k != "spectrum"}
    parts = sorted((directory / "scores").iterdir())
    return {path.name: path.read_bytes() for path in parts} | {"result": json.dumps(numbers).encode()}


def killed_at_random(directory: Path, kind: str, duration: float, randomness: random.Random) -> list[str]:
    """Kill a run a few times, anywhere; the phases that this met."""
    killed = []
    for _ in range(KILLS_PER_RUN):
        # Each goes on where the one before came to, so all of them together take about one run.
        moment = time.monotonic() + randomness.uniform(0, duration / 4)
        if not kill_when(begin(directory, kind), lambda moment=moment: time.monotonic() > moment):
            break
        killed.append(phase(directory))
    return killed


def killed_at_every_moment(directory: Path, kind: str, moments: list[str]) -> list[str]:
    """Kill one run at each of the moments, one after the other; the phases that this met."""
    killed = []
    for name in moments:
        if not kill_when(begin(directory, kind), (directory / name).exists):
            break
        killed.append(phase(directory))
    return killed


def kill_and_compare(root: Path, kind: str) -> list[dict[str, Any]]:
    begun = time.monotonic()
    finish(root / "uninterrupted", kind)
    duration = time.monotonic() - begun
    truth = files(root / "uninterrupted")
    randomness = random.Random(0)
    rows = []
    other = ("state.safetensors", "chain-0-1.safetensors") if kind.endswith("cg") else "cg.safetensors"
    moments = [name for name in MOMENTS if not name.endswith(other)]
    for number in range(1 + RANDOM_RUNS):
        directory = root / f"run-{number}"
        if number == 0:
            killed = killed_at_every_moment(directory, kind, moments)
        else:
            killed = killed_at_random(directory, kind, duration, randomness)
        finish(directory, kind)
        rows.append({"killed": killed, "same": files(directory) == truth})
    return rows


def main() -> None:
    # here, or every process would import it for itself; not above, where doctest's collection would meet its warnings
    importlib.import_module("torch._decomp.decompositions_for_jvp")
    root, kinds = Path(sys.argv[1]), sys.argv[2:]
    print(json.dumps({kind: kill_and_compare(root / kind, kind) for kind in kinds}))


if __name__ == "__main__":
    main()
