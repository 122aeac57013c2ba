"""A run that is killed at any moment goes on where it was, and ends in the same bits."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).parent / "interruptions.py"
KINDS = ["exact/lissa", "finite-difference/lissa", "finite-difference/cg", "exact/refinement"]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What was found for all kinds of runs, by one program."""
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(tmp_path_factory.mktemp("killed")), *KINDS],
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("kind", KINDS)
def test_runs_killed_at_random_and_in_every_phase_end_in_the_same_bits(kind: str, found: Any) -> None:
    rows = found[kind]
    kills = [phase for row in rows for phase in row["killed"]]
    assert len(kills) >= 12
    assert len(set(kills)) >= 5
    assert any(phase.startswith("solve/") for phase in kills)
    assert any(phase.startswith("scores/") for phase in kills)
    assert all(row["same"] for row in rows), rows
