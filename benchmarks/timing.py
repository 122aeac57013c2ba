"""Interleaved timing, and results on the screen and on disk.

Timings taken one contender after the other compare the contenders *and* what the machine did meanwhile. Here
every round runs all of them, in an order shuffled anew, and a ratio is formed within a round; its median over
the rounds, with the quartiles, is what is reported.
"""

from __future__ import annotations

import gc
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import whence
from reproduction.provenance import commit, cpu_name

__all__ = ["Quartiles", "environment", "interleaved", "ratios", "report", "save"]

RESULTS = Path(__file__).parent / "results"


def interleaved(
    contenders: Mapping[str, Callable[[], object]],
    repeats: int,
    *,
    warmup: int = 2,
    seed: int = 0,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Time all contenders in every round, in shuffled order.

    Args:
        contenders: name -> what to run; the result is dropped within the timed part.
        repeats: timed rounds.
        warmup: rounds before, not timed.
        seed: of the shuffling.
        clock: seconds; `time.process_time` for CPU time on a busy machine (with a single thread).

    Returns:
        Name -> seconds, one per round.
    """
    if repeats < 1:
        raise ValueError(f"repeats is {repeats}; it must be at least 1")
    order = list(contenders)
    shuffle = random.Random(seed).shuffle
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    collecting = gc.isenabled()
    gc.collect()
    gc.freeze()  # what exists by now is not garbage: makes the collections below fast
    gc.disable()
    try:
        for round_number in range(-warmup, repeats):
            shuffle(order)
            for name in order:
                gc.collect()
                begin = clock()
                contenders[name]()
                elapsed = clock() - begin
                if round_number >= 0:
                    seconds[name].append(elapsed)
    finally:
        gc.unfreeze()
        if collecting:
            gc.enable()
    return seconds


@dataclass(frozen=True)
class Quartiles:
    """A median with the middle half of the values around it."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Quartiles:
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)

    def __str__(self) -> str:
        return f"{self.median:.2f} [{self.low:.2f}, {self.high:.2f}]"


def ratios(seconds: Mapping[str, Sequence[float]], baseline: str) -> dict[str, Quartiles]:
    """Time over the baseline's in the same round: quartiles over the rounds."""
    base = seconds[baseline]
    return {
        name: Quartiles.of([mine / theirs for mine, theirs in zip(times, base, strict=True)])
        for name, times in seconds.items()
    }


def environment() -> dict[str, Any]:
    """What a number depends on besides the code: versions, threads, CPU, load, date, commit."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(),
        "whence": whence.__version__,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "python": platform.python_version(),
        "platform": platform.platform(),
    }


def report(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table; PASS and MISS in colour."""
    table = Table(title=title, title_justify="left")
    for position, column in enumerate(columns):
        table.add_column(column, justify="left" if position == 0 else "right")
    colours = {"PASS": "[green]PASS[/]", "MISS": "[red]MISS[/]"}
    for row in rows:
        cells = [str(cell).replace("[", r"\[") for cell in row]
        table.add_row(*(colours.get(cell, cell) for cell in cells))
    console = Console(width=None if sys.stdout.isatty() else 140)  # a pipe would get 80 columns
    console.print(table)


def save(name: str, results: Any) -> Path:
    """Write results with their environment to ``benchmarks/results/<name>.json``."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    content = {"environment": environment(), "results": results}
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    Console().print(f"written to {os.path.relpath(path)}")
    return path
