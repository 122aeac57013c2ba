"""What reaches a terminal: no command of a stranger's text, no number cut, and a result also from a read-only disk."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from whence.cli import app
from whence.cli.app import _beside
from whence.runs.files import TEMPORARY, write_bytes

RUNNER = CliRunner()
#: ESC, OSC with a title, C1, NUL, bidi, markup of the terminal library, and an end of line.
EVIL = "\x1b[2J\x1b]0;owned\x07\x9b31m\x00\u202eevil\u2066[bold]\r\nnext"
HIDDEN = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")

BUILD = f"""
import torch
from whence import Classification, Exhibit
from whence.sources import Problem

EVIL = {EVIL!r}

def hostile():
    torch.manual_seed(0)
    data = [(torch.randn(4), i % 3) for i in range(12)]
    def show(i):
        return Exhibit(id=f"id {{i}} {{EVIL}}", text=f"text {{EVIL}}", label=f"label {{EVIL}}", note=f"note {{EVIL}}",
                       prompt=f"prompt {{EVIL}}", prediction=f"said {{EVIL}}")
    return Problem(torch.nn.Linear(4, 3).eval(), Classification(), train=data, queries=data[:1],
                   train_exhibits=show, query_exhibits=show)

def broken():
    raise RuntimeError("no " + EVIL)
"""


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("terminal") / "build.py"
    path.write_text(BUILD)
    return path


def invoke(*arguments: object, code: int = 0, env: dict[str, str] | None = None) -> Any:
    result = RUNNER.invoke(app, [str(argument) for argument in arguments], env=env)
    assert result.exit_code == code, (result.output, result.exception)
    return result


def test_nothing_of_a_stranger_commands_the_terminal(build: Path) -> None:
    for command in ("attribute", "clean"):
        printed = invoke(command, f"{build}:hostile", env={"COLUMNS": "400"}).output
        assert "‹ESC›[2J" in printed
        assert "‹U+009B›31m" in printed
        assert not HIDDEN.search(printed.replace("\n", ""))
    answer = invoke("attribute", f"{build}:hostile", "--json").stdout
    assert not HIDDEN.search(answer.replace("\n", ""))
    assert json.loads(answer)["queries"][0]["id"] == f"id 0 {EVIL}"


def test_an_error_or_a_file_name_commands_no_terminal(build: Path, tmp_path: Path) -> None:
    assert not HIDDEN.search(invoke("attribute", f"{build}:broken", code=2).output.replace("\n", ""))
    missing = tmp_path / "\x1b]0;owned\x07.jsonl"
    printed = invoke("attribute", f"{build}:hostile", "--train", missing, code=2).output
    assert not HIDDEN.search(printed.replace("\n", ""))


@pytest.mark.parametrize("width", [20, 60, 100])
def test_no_number_is_cut_however_narrow_the_terminal(build: Path, width: int) -> None:
    found = []
    for columns in (400, width):
        printed = invoke("attribute", f"{build}:hostile", env={"COLUMNS": str(columns)}).output
        found.append(re.findall(r"(\S+) +(\S+ … \S+) +([+-]\S+ nat) +(\d+) ", printed))
    assert len(found[0]) > 3
    assert found[1] == found[0]


def refuse(*_: Any, **__: Any) -> Any:
    raise OSError(errno.EROFS, "Read-only file system")


def test_a_finished_run_on_a_read_only_disk_is_shown(
    build: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = ["attribute", f"{build}:hostile", "--run-dir", tmp_path / "run"]
    first = invoke(*job).output
    open_file = os.open
    monkeypatch.setattr(
        os, "open", lambda p, f, *a, **k: refuse() if f & os.O_CREAT else open_file(p, f, *a, **k)
    )
    monkeypatch.setattr(os, "access", lambda path, mode, **_: mode != os.W_OK)
    monkeypatch.setattr("tempfile.mkstemp", refuse)
    again = invoke(*job).output
    assert "read-only, so report.html is not written there" in again
    assert [line for line in first.splitlines() if " nat" in line] == [
        line for line in again.splitlines() if " nat" in line
    ]
    asked = invoke(*job, "--report", tmp_path / "page.html", code=4).output
    assert "page.html could not be written" in asked
    assert not (tmp_path / "page.html").exists()


def test_a_full_disk_is_told_with_its_own_exit_code(
    build: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    page = tmp_path / "page.html"
    printed = invoke("attribute", f"{build}:hostile", "--report", page, code=4).output
    assert "the disk is full" in printed
    assert list(tmp_path.iterdir()) == []


KILLED = """
import os, signal, sys
from pathlib import Path
from whence.runs.files import replace_file
replace_file(Path(sys.argv[1]), lambda temporary: os.kill(os.getpid(), signal.SIGKILL))
"""


def test_what_a_killed_process_left_beside_a_page_is_gone_after_the_next(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    done = subprocess.run([sys.executable, "-c", KILLED, str(page)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert len(list(tmp_path.glob(f"{TEMPORARY}*"))) == 1
    mine = tmp_path / f"{TEMPORARY}mine"
    mine.write_text("another's")
    write_bytes(tmp_path / "other.html", b"another page")
    assert len(list(tmp_path.glob(f"{TEMPORARY}*"))) == 2  # which is not theirs to delete
    write_bytes(page, b"page")
    assert sorted(path.name for path in tmp_path.iterdir()) == [mine.name, "other.html", "page.html"]


def test_a_directory_named_like_markup_is_shown_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "[" / "bold]"
    directory.mkdir(parents=True)
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert _beside(None, directory, "report.html") is None
    assert "[/bold] is read-only" in capsys.readouterr().err
