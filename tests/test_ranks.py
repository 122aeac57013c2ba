"""Several processes give what one does: vectors in parts, shares of passes, run directories, refusals.

The cases are in `on_ranks`: programs of two (four) processes run them and save what they found, and so does this one.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import on_ranks
from whence.attribution import load

PROGRAM = Path(on_ranks.__file__)
FAST = ["vectors", "products", "preconditioners", "spectrum", "scores", "attribute", "quick", "sharded"]
FAST += ["sharded factors", "sharded factors, parted", "sharded factors, mixed", "sharded quick"]
FAST += ["sharded, exact", "sharded, exact, mixed"]
SLOW = ["lissa", "float32", "llama", "llama, quick", "lora", "sharded cg", "sharded lissa"]
SLOW += ["sharded factors, llama", "sharded, exact, lora", "sharded, float32"]


def program(processes: int, out: Path, *names: str) -> list[str]:
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={processes}",
    ]
    return [*torchrun, str(PROGRAM), str(out), *names]


def run(processes: int, out: Path, *names: str) -> dict[str, Any]:
    done = subprocess.run(program(processes, out, *names), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-6000:]
    return torch.load(out, weights_only=False)  # type: ignore[no-any-return]


def numbers(found: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(found, Mapping):
        for key, value in found.items():
            yield from numbers(value, f"{name}/{key}")
    elif isinstance(found, Sequence) and not isinstance(found, str):
        for number, value in enumerate(found):
            yield from numbers(value, f"{name}/{number}")
    else:
        yield name, found


def check_same(found: Any, expected: Any, tolerance: float) -> None:
    here, there = dict(numbers(found)), dict(numbers(expected))
    assert here.keys() == there.keys()
    for name, value in there.items():
        if isinstance(value, (str, bool)):
            assert here[name] == value, name
            continue
        mine, theirs = (
            torch.as_tensor(number, dtype=None if isinstance(number, Tensor) else torch.float64).double()
            for number in (here[name], value)
        )
        assert mine.shape == theirs.shape, name
        assert float((mine - theirs).abs().max()) <= tolerance * float(theirs.abs().max()), name


@pytest.fixture(scope="module")
def on_two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run(2, tmp_path_factory.mktemp("two") / "found.pt", *FAST, "refused")


@pytest.mark.parametrize("name", FAST)
def test_two_processes_find_what_one_does(name: str, on_two: dict[str, Any]) -> None:
    # finite differences of float64 are off by 1e-9 or so, whatever their step, which rounding moves
    inexact = name in ("sharded", "scores", "sharded cg")
    check_same(on_two[name], on_ranks.CASES[name](), 1e-7 if inexact else 1e-9)


def test_what_several_processes_cannot_do_is_refused(on_two: dict[str, Any]) -> None:
    said = on_two["refused"]
    assert said.keys() == {
        "a vector that is whole",
        "other weights",
        "other options",
        "clean",
        "an example that is not finite",
        "in bfloat16",
        "validate",
        "told",
    }
    assert "parted(vector.shards)" in said["a vector that is whole"]
    assert said["other weights"].startswith("RankError: the processes do not agree on the model's weights")
    assert "what was asked" in said["other options"]
    assert said["clean"].startswith("RankError: clean works in one process")
    assert said["validate"].startswith("RankError: validate works in one process")
    assert said["told"][0] == ["DataError: no"] * 2
    assert said["told"][1] == ["KeyError: 'no'", "RankError: rank 0 failed: KeyError: 'no'"]
    assert said["an example that is not finite"].startswith("DataError: example 37")


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
def test_more_cases_on_more_processes(processes: int, tmp_path: Path) -> None:
    names = [*SLOW, *(FAST if processes == 4 else ())]
    found = run(processes, tmp_path / "found.pt", *names)
    for name in names:
        inexact = name in ("sharded", "scores", "sharded cg", "sharded lissa")
        tolerance = 1e-4 if "float32" in name else 1e-7 if inexact else 1e-9
        check_same(found[name], on_ranks.CASES[name](), tolerance)


@pytest.mark.slow
@pytest.mark.parametrize(("solver", "first", "then"), [("cg", 4, 2), ("lissa", 2, 1), ("lissa", 2, 4)])
def test_a_run_that_lost_a_process_goes_on_with_another_number_of_them(
    solver: str, first: int, then: int, tmp_path: Path
) -> None:
    expected = on_ranks.in_directory(str(tmp_path / "alone"), solver)
    directory, out = tmp_path / "run", tmp_path / "found.pt"
    begun = subprocess.Popen(
        program(first, out, f"{solver}@{directory}"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    while not (directory / "plan.json").exists():
        assert begun.poll() is None
        time.sleep(0.01)
    os.kill(children(begun.pid)[-1], signal.SIGKILL)
    said = begun.communicate(timeout=60)[1]
    assert begun.returncode != 0
    assert "Signal 9" in said
    assert not (directory / "result.json").exists()
    check_same(run(then, out, f"{solver}@{directory}")[f"{solver}@{directory}"], expected, 1e-9)
    assert bool(load(directory).scores.isfinite().all())


@pytest.mark.slow
def test_a_process_that_hangs_ends_the_others_within_a_minute(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    begun = subprocess.Popen(
        program(2, tmp_path / "found.pt", f"lissa@{directory}"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    while not (directory / "plan.json").exists():
        assert begun.poll() is None
        time.sleep(0.01)
    stopped, other = children(begun.pid)
    os.kill(stopped, signal.SIGSTOP)
    waited = time.monotonic()
    while alive(other) and time.monotonic() - waited < 90:
        time.sleep(0.1)
    assert time.monotonic() - waited < 60
    assert "has given no sign of life for 40 seconds" in begun.communicate(timeout=90)[1]
    assert begun.returncode != 0


def alive(process: int) -> bool:
    told = subprocess.run(["ps", "-o", "stat=", "-p", str(process)], capture_output=True, text=True)
    return bool(told.stdout.strip()) and not told.stdout.startswith("Z")


def children(parent: int) -> list[int]:
    """Processes that one has started."""
    found = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(parent)], capture_output=True, text=True, check=True
    )
    return [int(word) for word in found.stdout.split()]


def test_tensors_are_parted_as_by_dtensor() -> None:
    from whence.distributed import Ranks, Shards

    for rows in (1, 2, 3, 4, 5, 9):
        whole = torch.arange(float(rows * 2)).reshape(rows, 2)
        parts: list[Tensor] = []
        for rank in range(4):
            parts.append(Shards(Ranks(rank, 4), {"w": whole.shape}).part("w", whole))
        chunks = whole.chunk(4)
        assert [len(part) for part in parts[: len(chunks)]] == [len(chunk) for chunk in chunks]
        assert torch.equal(torch.cat(parts), whole)
