"""`Run`: what a run directory takes, what it refuses, and what survives a full or read-only disk."""

from __future__ import annotations

import fcntl
import gc
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from whence.runs.run import FORMAT, environment, read_config

from whence.errors import RunDirectoryError, StorageError, WhenceWarning
from whence.runs import Run
from whence.runs.files import TEMPORARY, write_json

CONFIG = {"damping": "auto", "seed": 0, "refine": 1.5, "title": "λ", "micro_batch": None, "baseline": True}


def contents(directory: Path) -> dict[str, bytes]:
    files = (path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


def never() -> Any:
    raise AssertionError("computed again")


# --- phases ----------------------------------------------------------------------------------------------------


def test_a_phase_is_computed_once_and_read_afterwards(tmp_path: Path) -> None:
    run = Run(tmp_path / "new" / "run", CONFIG)
    value = {"numbers": (1, 2.5), "none": None}
    first = run.json("plan", lambda: value)
    tensors = {"x": torch.randn(3), "y": torch.arange(2)}
    written, notes = run.tensors("gradients", lambda: (tensors, {"chains": 2}))
    assert first == {"numbers": [1, 2.5], "none": None}  # the first time already as it will be read later
    assert notes == {"chains": 2}
    del run
    again = Run(tmp_path / "new" / "run", CONFIG)
    assert again.json("plan", never) == first
    read, notes = again.tensors("gradients", never)
    assert notes == {"chains": 2}
    assert read.keys() == written.keys() == tensors.keys()
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())


def test_a_phase_that_fails_leaves_nothing_and_is_computed_the_next_time(tmp_path: Path) -> None:
    run = Run(tmp_path, CONFIG)
    before = contents(tmp_path)
    with pytest.raises(ZeroDivisionError):
        run.json("plan", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run.tensors("gradients", lambda: 1 / 0)  # type: ignore[arg-type,return-value]
    with pytest.raises(TypeError):
        run.json("plan", lambda: object())
    assert contents(tmp_path) == before
    assert run.json("plan", lambda: 3) == 3


def test_without_a_directory_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run, value = Run(None, CONFIG), object()
    assert run.path is None
    assert [run.json("plan", lambda: value) for _ in range(2)] == [value, value]
    x = torch.ones(2)
    assert run.tensors("gradients", lambda: ({"x": x}, {}))[0]["x"] is x
    assert contents(tmp_path) == {}


# --- whose directory it is -------------------------------------------------------------------------------------


def test_the_same_configuration_is_taken_and_written_for_people(tmp_path: Path) -> None:
    Run(str(tmp_path), CONFIG)
    before = contents(tmp_path)
    Run(tmp_path, dict(reversed(CONFIG.items())))
    assert contents(tmp_path) == before
    assert json.loads(before["config.json"]) == {"format": FORMAT, **CONFIG}
    assert json.loads(before["environment.json"]) == environment()
    assert "λ" in before["config.json"].decode()
    assert read_config(tmp_path) == CONFIG


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({"seed": 3}, ["seed: 0 there, 3 now"]),
        ({"damping": 0.5, "baseline": False}, ["damping: 'auto' there, 0.5 now", "baseline: True there, False now"]),
        ({"refine": 1.5000000000000002}, ["refine: 1.5 there, 1.5000000000000002 now"]),
        ({"extra": 7}, ["extra: None there, 7 now"]),
        ({"title": "x" * 500}, ["title: 'λ' there, 'xxx"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)  # fmt: skip
def test_another_configuration_is_refused_showing_the_differences(
    tmp_path: Path, changes: dict[str, Any], shown: list[str]
) -> None:
    Run(tmp_path, CONFIG)
    before = contents(tmp_path)
    with pytest.raises(RunDirectoryError, match=r"another configuration.*Give another directory") as caught:
        Run(tmp_path, CONFIG | changes)
    message = str(caught.value)
    assert str(tmp_path) in message
    assert all(part in message for part in shown)
    assert message.count(" there") == len(shown)
    assert len(message) < 500 + len(str(tmp_path))
    assert contents(tmp_path) == before


def test_a_setting_that_is_gone_is_a_difference_too(tmp_path: Path) -> None:
    Run(tmp_path, CONFIG | {"old": 1})
    with pytest.raises(RunDirectoryError, match="old: 1 there"):
        Run(tmp_path, CONFIG)


@pytest.mark.parametrize("found", [0, 1, FORMAT + 1, "1", None])
def test_another_format_is_refused(tmp_path: Path, found: Any) -> None:
    Run(tmp_path, CONFIG)
    write_json(tmp_path / "config.json", {"format": found, **CONFIG} if found is not None else CONFIG)
    with pytest.raises(RunDirectoryError, match=f"format {found}.*reads format {FORMAT}.*environment.json"):
        Run(tmp_path, CONFIG)


def test_a_directory_of_something_else_is_refused_and_left_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "one.jpg").write_bytes(b"jpg")
    (tmp_path / "photos" / f"{TEMPORARY}mine").write_bytes(b"not whence's")
    before = contents(tmp_path)
    with pytest.raises(
        RunDirectoryError, match=r"not empty \('photos' is there\) and holds no run; give a new"
    ):
        Run(tmp_path, CONFIG)
    assert contents(tmp_path) == before


def test_a_file_in_the_directorys_place_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.write_text("mine")
    with pytest.raises(StorageError, match="choose another one") as caught:
        Run(path, CONFIG)
    assert str(path) in str(caught.value)
    assert path.read_text() == "mine"


@pytest.mark.parametrize("failing", ["environment.json", "config.json"])
def test_a_run_whose_beginning_was_cut_off_can_begin_again(
    tmp_path: Path, failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(path: Path, value: Any) -> None:
        if path.name == failing:
            raise StorageError("the disk is full. Free some space and run the same command again")
        write_json(path, value)

    with monkeypatch.context() as patch:
        patch.setattr("whence.runs.run.write_json", write)
        with pytest.raises(StorageError):
            Run(tmp_path, CONFIG)
    Run(tmp_path, CONFIG)
    assert read_config(tmp_path) == CONFIG


# --- another environment, damaged files ------------------------------------------------------------------------


def test_a_changed_environment_warns_and_goes_on(tmp_path: Path) -> None:
    run = Run(tmp_path, CONFIG)
    run.json("plan", lambda: 1)
    del run
    found = environment()
    write_json(tmp_path / "environment.json", found | {"torch": "1.0", "threads": "64"})
    message = rf"another environment \(torch 1\.0 → {found['torch']}.*, threads 64 → .*last digits"
    with pytest.warns(WhenceWarning, match=message.replace("+", r"\+")):
        again = Run(tmp_path, CONFIG)
    assert again.json("plan", never) == 1


def test_an_environment_names_what_results_depend_on() -> None:
    found = environment()
    assert found["torch"] == torch.__version__
    assert {"whence", "numpy", "safetensors", "pyarrow", "python", "machine", "threads"} <= found.keys()
    assert all(found.values())


@pytest.mark.parametrize("name", ["config.json", "environment.json", "plan.json", "gradients.safetensors"])
@pytest.mark.parametrize("damage", [b"", b"{", b"null", b"[1]", b"\xff\xfe\x00"], ids=repr)
def test_a_damaged_file_is_named_with_a_remedy(tmp_path: Path, name: str, damage: bytes) -> None:
    run = Run(tmp_path, CONFIG)
    run.json("plan", lambda: 1)
    run.tensors("gradients", lambda: ({"x": torch.ones(3)}, {}))
    del run
    (tmp_path / name).write_bytes(damage)

    def use() -> None:
        again = Run(tmp_path, CONFIG)
        again.json("plan", never)
        again.tensors("gradients", never)

    if name == "plan.json" and damage in (b"null", b"[1]"):
        use()  # a value like any other, as far as the directory knows
        return
    with pytest.raises(RunDirectoryError, match="Delete the directory and run again") as caught:
        use()
    assert str(tmp_path / name) in str(caught.value)


# --- other processes -------------------------------------------------------------------------------------------


def python(script: str, *arguments: object) -> dict[str, Any]:
    """Run a script in a process of its own; what it prints last is JSON."""
    one_thread = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
    }  # as the tests themselves: it is part of the environment
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        capture_output=True, text=True, timeout=300, env=one_thread,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


LOCK = """
import fcntl, json, sys
try:
    fcntl.flock(open(sys.argv[1]), fcntl.LOCK_EX | fcntl.LOCK_NB)
    print(json.dumps({"locked": False}))
except OSError:
    print(json.dumps({"locked": True}))
"""


def test_a_second_process_is_locked_out_until_the_first_is_done(tmp_path: Path) -> None:
    run = Run(tmp_path, CONFIG)
    assert python(LOCK, tmp_path / "lock")["locked"]
    with pytest.raises(RunDirectoryError, match=r"is being used.*wait for it, or give another directory"):
        Run(tmp_path, CONFIG)
    run.json("plan", lambda: 1)  # the one that was refused broke nothing
    del run
    gc.collect()
    assert not python(LOCK, tmp_path / "lock")["locked"]
    with (tmp_path / "lock").open() as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        with pytest.raises(RunDirectoryError, match=str(tmp_path)):
            Run(tmp_path, CONFIG)
    assert Run(tmp_path, CONFIG).json("plan", never) == 1


def test_a_run_that_is_forgotten_gives_its_lock_back_quietly(tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Run(tmp_path, CONFIG)
        gc.collect()
    assert [str(warning.message) for warning in caught] == []
    Run(tmp_path, CONFIG)


PRELUDE = """
import json, os, resource, signal, sys
from pathlib import Path
import pyarrow.parquet, torch
from whence.errors import StorageError
from whence.runs import FileJournal, Run, ScoreParts
from whence.runs.files import replace_file
from whence.runs.scores import PartOfScores

def outcome(action):
    try:
        action()
        return "done"
    except Exception as error:
        return f"{type(error).__name__}: {error}"

def files(path):
    return {str(p.relative_to(path)): p.read_bytes().hex() for p in path.rglob("*") if p.is_file()}

path, found = Path(sys.argv[1]), {}
large = torch.arange(200_000.0, dtype=torch.float64)
part = PartOfScores(torch.arange(200_000), torch.ones(200_000).long(), torch.rand(2, 1, 200_000), None)
writers = {
    "json": lambda run: run.json("large", lambda: large[:20_000].tolist()),
    "tensors": lambda run: run.tensors("large", lambda: ({"x": large}, {})),
    "scores": lambda run: ScoreParts(run.path / "scores").write(0, part),
}
"""

FULL_DISK = (
    PRELUDE
    + """
def limit(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
limit(50_000)
run = Run(path / "run", {"seed": 0})
run.json("plan", lambda: {"steps": 7})
run.tensors("gradients", lambda: ({"x": large[:100]}, {}))
before = files(path)
for name, write in writers.items():
    found[name] = outcome(lambda: write(run))
found["intact"] = files(path) == before
limit(1000)  # room for environment.json, none for this config.json
config = {"title": "x" * 5000}
found["begin"] = outcome(lambda: Run(path / "other", config))
limit(resource.getrlimit(resource.RLIMIT_FSIZE)[1])
for name, write in writers.items():
    found[name + " again"] = outcome(lambda: write(run))
found["plan"] = run.json("plan", lambda: 0)
found["whole"] = bool(torch.equal(run.tensors("large", lambda: 0)[0]["x"], large))
found["leftovers"] = [name for name in files(path) if ".unfinished" in name]
found["begin again"] = outcome(lambda: Run(path / "other", config))
print(json.dumps(found))
"""
)


def test_a_full_disk_loses_nothing_and_the_run_goes_on_once_there_is_space(tmp_path: Path) -> None:
    found = python(FULL_DISK, tmp_path)
    for name, file in (("json", "large.json"), ("tensors", "large.safetensors"), ("scores", "part-00000")):
        assert found[name].startswith("StorageError: "), found[name]
        assert file in found[name]
        assert "the disk is full. Free some space and run the same command again" in found[name]
        assert found[f"{name} again"] == "done"
    assert found["intact"]
    assert found["plan"] == {"steps": 7}
    assert found["whole"]
    assert found["leftovers"] == []
    assert found["begin"].startswith("StorageError: ")
    assert found["begin again"] == "done"


READ_ONLY = (
    PRELUDE
    + """
run = Run(path / "run", {"seed": 0})
run.json("plan", lambda: {"steps": 7})
before = files(path)
for directory in (path / "run", path):
    directory.chmod(0o555)
if os.getuid() == 0:
    os.setuid(65534)
for name, write in writers.items():
    found[name] = outcome(lambda: write(run))
del run
found["resume"] = outcome(lambda: Run(path / "run", {"seed": 0}))
found["begin"] = outcome(lambda: Run(path / "other", {"seed": 0}))
found["intact"] = files(path) == before
print(json.dumps(found))
"""
)


@pytest.fixture
def open_to_all() -> Iterator[Path]:
    """A directory that any user can look into, unlike pytest's own."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name)
        path.chmod(0o755)
        yield path
        for directory in (path, path / "run"):
            directory.chmod(0o755)


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="there are no such permissions on this system")
def test_a_directory_that_cannot_be_written_to_says_so_and_loses_nothing(open_to_all: Path) -> None:
    found = python(READ_ONLY, open_to_all)
    for name in (*("json", "tensors", "scores"), "resume", "begin"):
        assert found[name].startswith("StorageError: "), found[name]
        assert "Permission denied" in found[name]
        assert "choose another" in found[name]
    assert found["intact"]
    (open_to_all / "run").chmod(0o755)
    assert Run(open_to_all / "run", {"seed": 0}).json("plan", never) == {"steps": 7}
