"""``make test-faults``: every kind of run killed at every file operation, every file damaged in every way; counts.

``python tests/faults [kills|processes|damage …] [--only KIND …]`` ends with 1 where anything came out silently other.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from damage import damage_everything
from kills import kill_everywhere, really_killed
from subjects import KINDS, Kind


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests/faults")
    parser.add_argument("parts", nargs="*", default=["kills", "processes", "damage"])
    parser.add_argument("--only", nargs="*", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--times", type=int, default=20, help="processes to kill, of every kind")
    given = parser.parse_args()
    parts: dict[str, Callable[[Kind, Path], Any]] = {
        "kills": kill_everywhere,
        "processes": partial(really_killed, times=given.times),
        "damage": damage_everything,
    }
    torch.set_num_threads(1)
    importlib.import_module("torch._decomp.decompositions_for_jvp")  # once, not in every process
    wrong = 0
    for name in given.only:
        for part in given.parts:
            begun = time.monotonic()
            with tempfile.TemporaryDirectory() as root:
                count = parts[part](KINDS[name], Path(root))
            wrong += len(count.wrong)
            said = ", ".join(f"{number:,} {what}" for what, number in vars(count).items() if what != "wrong")
            print(
                f"{name}, {part}: {said}, {len(count.wrong)} wrong, {time.monotonic() - begun:.0f} s",
                flush=True,
            )
            for each in count.wrong[:5]:
                print(f"    {each}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
