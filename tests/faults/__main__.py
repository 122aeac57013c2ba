"""``make test-faults``: every kind of run killed at every file operation, every file damaged in every way; counts.

``python tests/faults [kills|damage|processes …] [--only KIND]``. Ends with 1 where anything came out silently different.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from kills import kill_everywhere, really_killed
from subjects import KINDS


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests/faults")
    parser.add_argument("parts", nargs="*", default=["kills", "processes"])
    parser.add_argument("--only", nargs="*", choices=list(KINDS), default=list(KINDS))
    given = parser.parse_args()
    torch.set_num_threads(1)
    importlib.import_module("torch._decomp.decompositions_for_jvp")  # once, not in every process
    wrong = 0
    for name in given.only:
        for part in given.parts:
            begun = time.monotonic()
            with tempfile.TemporaryDirectory() as root:
                if part == "kills":
                    count = kill_everywhere(KINDS[name], Path(root))
                else:
                    count = really_killed(KINDS[name], Path(root), times=20)
            wrong += len(count.different)
            print(f"{name:24} {part:10} {count} {time.monotonic() - begun:.0f} s", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
