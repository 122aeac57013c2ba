"""The fault suite in short: a few kills and damages of every kind. All of them: ``make test-faults``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from damage import damage_everything
from kills import kill_everywhere
from subjects import KINDS
from whence.runs import files
from whence.runs.manifest import Manifest

#: The others take longer; tests/test_until.py has some of rounds.
SHORT = ["cg exact", "lissa", "quick", "quick, then cg", "clean with queries"]


@pytest.mark.parametrize("name", SHORT)
def test_a_run_killed_at_any_file_operation_ends_in_the_same_bits(name: str, tmp_path: Path) -> None:
    count = kill_everywhere(KINDS[name], tmp_path, at_most=4)
    assert count.wrong == []
    assert count.same == count.resumed == 4
    assert count.operations > 250
    assert count.states > 80


@pytest.mark.parametrize("name", ["quick", "clean"])
def test_a_damaged_file_changes_no_number_silently(name: str, tmp_path: Path) -> None:
    count = damage_everything(KINDS[name], tmp_path, flips=1, killed=[0.8] if name == "quick" else [])
    assert count.wrong == []
    assert count.refused > 50
    assert count.same + count.refused == count.uses


def test_processes_that_are_killed_leave_what_the_suite_supposes() -> None:
    program = [sys.executable, str(Path(__file__).parent), "processes", "--times", "2", "--only", "quick"]
    done = subprocess.run(program, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 resumed, 2 same" in done.stdout


# --- the suite itself can fail ---------------------------------------------------------------------------------------


def test_a_manifest_written_before_its_files_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that are written in their places, not beside them."""

    def in_place(path: Path, write: Any) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path)

    monkeypatch.setattr(files, "replace_file", in_place)
    count = kill_everywhere(KINDS["quick"], tmp_path, at_most=12)
    assert count.refused + len(count.wrong) > 0


def test_files_that_are_not_compared_are_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Manifest, "file", lambda self, name: self.path / self.content.artifacts[name].file)
    count = damage_everything(KINDS["quick"], tmp_path, flips=2, killed=[])
    assert any(wrong.endswith("other numbers") for wrong in count.wrong)
