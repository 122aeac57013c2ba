"""A run that is killed at any moment goes on where it was, and ends in the same bits."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "interruptions.py"


@pytest.mark.parametrize(
    ("product", "solver"), [("exact", "lissa"), ("finite-difference", "lissa"), ("finite-difference", "cg")]
)
def test_runs_killed_at_random_and_in_every_phase_end_in_the_same_bits(
    product: str, solver: str, tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(tmp_path), product, solver],
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    kills = [phase for row in rows for phase in row["killed"]]
    assert len(kills) >= 12
    assert len(set(kills)) >= 5
    assert any(phase.startswith("solve/") for phase in kills)
    assert any(phase.startswith("scores/") for phase in kills)
    assert all(row["same"] for row in rows), rows
