"""The whole job, from a model to scores, by whence and by peers in turn: seconds of one core, memory, and LDS.

    python -m benchmarks.peers.interleaved [NAME …] [--with PEER …] [--rounds N] [--show]

Every job is a fresh process in its contender's environment (see `benchmarks.peers`), on one thread. A round runs
all contenders one after the other, so that what else the machine does meets all alike; ratios are formed within a
round. By default the contenders are whence, Kronfluence and Bergson; ``--with`` adds other peers. Memory is the
peak above what the process held once everything was imported and model and data were loaded. Adds to
``benchmarks/results/interleaved.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from benchmarks.damping import SEED, score
from benchmarks.peers.asking import CHECKPOINTS, queries
from benchmarks.peers.job import OURS
from benchmarks.peers.roster import ROSTER
from benchmarks.timing import RESULTS, Quartiles, ratios, report, save
from benchmarks.truth import truth
from benchmarks.works import Work, work
from whence.validation import Outcomes

DIRECTORY = Path("runs") / "interleaved"
#: Works, and rounds of each.
ROUNDS = {"digits": 5, "mnist": 5, "diabetes": 5, "llama": 3}
#: What ratios are to.
BASE = "kronfluence"
#: Who is always there.
ALWAYS = (BASE, "bergson")


def contenders(of: Work, also: Sequence[str]) -> list[str]:
    """Those that can do a work."""
    asked = [name for name in ROSTER if name in (*ALWAYS, *also)]
    return [*OURS, *(name for name in asked if isinstance(of.task, ROSTER[name].tasks))]


def keep_model(of: Work) -> Path:
    """Train a work, unless that is done, and keep all that a job needs."""
    path = DIRECTORY / f"{of.name}, {CHECKPOINTS} checkpoints.pt"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        data = of.data()
        trained = of.fit(range(len(data.train[0])), SEED, checkpoints=CHECKPOINTS)
        asked = [tensor.clone() for tensor in queries(data, of.queries)]
        known = {"model": trained.model, "checkpoints": trained.checkpoints, "task": of.task}
        torch.save({**known, "train": list(data.train), "queries": asked}, path)
    return path


def run(contender: str, model: Path, scores: Path) -> dict[str, float]:
    """One job, in a process of its own."""
    own = ROSTER.get(contender)
    python = f".venv-{own.module}/bin/python" if own is not None and own.environment else sys.executable
    if not Path(python).exists():
        raise SystemExit(f"{python} is not there; `make peers` makes it")
    command = [python, "-W", "ignore", "-m", "benchmarks.peers.job", contender, str(model), str(scores)]
    ended = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, text=True, check=True
    )
    found: dict[str, float] = json.loads(ended.stdout.splitlines()[-1])
    return found


def measure(of: Work, rounds: int, also: Sequence[str]) -> dict[str, Any]:
    """All contenders on one work, in turn."""
    model, names = keep_model(of), contenders(of, also)
    measured: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    files = {name: DIRECTORY / f"{of.name}, {name}.safetensors" for name in names}
    for number in range(rounds):
        for name in names:
            measured[name].append(run(name, model, files[name]))
            print(f"{of.name}, round {number + 1}, {name}: {measured[name][-1]}", flush=True)
    whole = truth(of)
    outcomes = Outcomes(whole.losses[:, :, : of.queries], whole.subsets, whole.seeds)
    seconds = {name: [each["seconds"] for each in rows] for name, rows in measured.items()}
    memory = {name: [each["peak"] - each["loaded"] for each in rows] for name, rows in measured.items()}
    faster, smaller = ratios(seconds, BASE), ratios(memory, BASE)
    return {
        "rounds": rounds,
        "queries": of.queries,
        "contenders": {
            name: {
                **score(load_file(files[name])["scores"], outcomes),
                "cpu_seconds": asdict(Quartiles.of(seconds[name])),
                "memory_mb": asdict(Quartiles.of(memory[name])),
                "loaded_mb": Quartiles.of([each["loaded"] for each in measured[name]]).median,
                "seconds_ratio": asdict(faster[name]),
                "memory_ratio": asdict(smaller[name]),
            }
            for name in names
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers.interleaved", description=__doc__.split("\n")[0]
    )
    parser.add_argument(
        "names",
        nargs="*",
        choices=[*ROUNDS, []],
        metavar="NAME",
        help=f"of {', '.join(ROUNDS)}; all by default",
    )
    parser.add_argument(
        "--with", action="append", default=[], choices=ROSTER, dest="also", metavar="PEER", help="one more"
    )
    parser.add_argument("--rounds", type=int, help="in place of 5, or of the Llama's 3")
    parser.add_argument("--show", action="store_true", help="what is there, measuring nothing")
    options = parser.parse_args()
    for name in [] if options.show else options.names or ROUNDS:
        found = measure(work(name), options.rounds or ROUNDS[name], options.also)
        results = {**kept(), name: found}
        save("interleaved", {known: results[known] for known in ROUNDS if known in results})
    for name, result in kept().items():
        show(name, result)


def kept() -> dict[str, Any]:
    """What was measured before, by work."""
    path = RESULTS / "interleaved.json"
    results: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["results"] if path.exists() else {}
    return results


def show(name: str, result: dict[str, Any]) -> None:
    """Print a work's table."""
    report(
        f"{name}, {result['queries']} queries, medians of {result['rounds']} rounds; ratios to {BASE}'s",
        ("", "LDS", "CPU s", "ratio", "MB", "ratio", "MB loaded"),
        [
            (
                contender,
                f"{found['lds']:.3f} [{found['low']:.3f}, {found['high']:.3f}]",
                f"{found['cpu_seconds']['median']:.3g}",
                f"{found['seconds_ratio']['median']:.2f}",
                f"{found['memory_mb']['median']:.0f}",
                f"{found['memory_ratio']['median']:.2f}",
                f"{found['loaded_mb']:.0f}",
            )
            for contender, found in result["contenders"].items()
        ],
    )


if __name__ == "__main__":
    main()
