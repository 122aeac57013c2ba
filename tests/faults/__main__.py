"""``make test-faults``: every kind of run killed at every file operation, every file damaged in every way; counts.

``python tests/faults [kills|processes|damage …] [--only KIND …]`` ends with 1 where anything came out silently other.
With ``--results FILE`` every count is written there as soon as it is known, with a fingerprint of the code that it is
about, and what the file has of this code is not counted again: the same command goes on after an interruption.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

import whence
from damage import damage_everything
from kills import kill_everywhere, really_killed
from subjects import KINDS, Kind


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests/faults")
    parser.add_argument("parts", nargs="*", default=["processes", "damage", "kills"])
    parser.add_argument("--only", nargs="*", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--times", type=int, default=20, help="processes to kill, of every kind")
    parser.add_argument("--states", type=int, help="after kills, to go on from: so many of every kind; all")
    parser.add_argument(
        "--results", type=Path, help="keeps the counts, and what is there is not counted again"
    )
    given = parser.parse_args()
    parts: dict[str, Callable[[Kind, Path], Any]] = {
        "kills": partial(kill_everywhere, at_most=given.states),
        "processes": partial(really_killed, times=given.times),
        "damage": damage_everything,
    }
    torch.set_num_threads(1)
    importlib.import_module("torch._decomp.decompositions_for_jvp")  # once, not in every process
    code = _code()
    kept = json.loads(given.results.read_bytes()) if given.results and given.results.exists() else {}
    wrong = 0
    for part in given.parts:
        for name in given.only:
            if part not in KINDS[name].parts:
                continue
            row = kept.get(f"{name}, {part}", {})
            if row.get("code") != code:
                begun = time.monotonic()
                with tempfile.TemporaryDirectory() as root:
                    count = parts[part](KINDS[name], Path(root))
                row = {**vars(count), "seconds": round(time.monotonic() - begun), "code": code}
                kept[f"{name}, {part}"] = row
                if given.results:
                    _write(given.results, kept)
            wrong += len(row["wrong"])
            said = [f"{row[what]:,} {what}" for what in row if what not in ("wrong", "seconds", "code")]
            print(
                f"{name}, {part}: {', '.join(said)}, {len(row['wrong'])} wrong, {row['seconds']} s",
                flush=True,
            )
            for each in row["wrong"][:5]:
                print(f"    {each}", flush=True)
    return 1 if wrong else 0


def _code() -> str:
    """A fingerprint of the package."""
    digest, root = hashlib.blake2b(digest_size=6), Path(whence.__file__).parent
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _write(path: Path, kept: dict[str, Any]) -> None:
    beside = path.with_name(path.name + ".new")
    beside.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(beside, path)


if __name__ == "__main__":
    sys.exit(main())
