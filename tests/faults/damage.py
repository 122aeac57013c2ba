"""Every file of a run damaged in every way: what is read then is as it was, or refused.

A finished run is loaded, its page is made and it is asked for again; an unfinished one is gone on with. A file is cut
off, has one bit flipped, is all zeros, deleted, a link, or has another file in its place: the one of the same name in
another run, or another one of its own run.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import whence
from kills import watched
from subjects import Kind, plain
from whence.cleaning import load_cleaning
from whence.errors import RunDirectoryError, StorageError

#: How refusals end, in part.
REMEDIES = ("Put back a copy", "Give another", "give a new", "give the directory", "mend that and run")


class Stopped(BaseException):
    """What a killed process looks like from inside."""


@dataclass
class Count:
    """How uses of damaged runs ended.

    Attributes:
        files: that were damaged.
        uses: of the runs.
        same: those that ended in the same numbers,
        refused: or in an error that names the file, and what to do about it.
        wrong: what was neither.
    """

    files: int = 0
    uses: int = 0
    same: int = 0
    refused: int = 0
    wrong: list[str] = field(default_factory=list)


def damage_everything(
    kind: Kind, root: Path, *, flips: int = 8, killed: Sequence[float] = (0.5, 0.9)
) -> Count:
    """Damage every file of a finished run, and of some that were killed after so much of their operations."""
    count, dice = Count(), random.Random(0)
    with watched(lambda _: None):
        kind.run(root / "whole")
        kind.run(root / "other", seed=1)
        result = plain(kind.run(root / "whole"))
        _damage(kind, root / "whole", root / "other", result, count, dice, flips)
        for share in killed:
            directory = root / f"killed at {share}"
            _stopped(kind, directory, share)
            _damage(kind, directory, root / "other", result, count, dice, flips)
    return count


def _damage(
    kind: Kind,
    directory: Path,
    other: Path,
    result: Any,
    count: Count,
    dice: random.Random,
    flips: int,
) -> None:
    finished = directory.name == "whole"
    uses: dict[str, Callable[[Path], bool]] = {"run": lambda path: plain(kind.run(path)) == result}
    if finished and kind.loads:
        loaded = plain(_loaded(kind, directory))
        uses["load"] = lambda path: plain(_loaded(kind, path)) == loaded
        uses["page"] = lambda path: bool(_loaded(kind, path).to_html(path.parent / "page.html"))
    copy = directory.with_name("damaged")
    for file in _files(directory):
        count.files += 1
        for name, damage in _damages(directory / file, other / file, dice, flips):
            for use, same in uses.items():
                shutil.rmtree(copy, ignore_errors=True)
                shutil.copytree(directory, copy)
                damage(copy / file)
                count.uses += 1
                try:
                    fine = same(copy)
                except (RunDirectoryError, StorageError) as error:
                    refused = _is_told(str(error), copy, file)
                    count.refused += refused
                    count.wrong += [] if refused else [f"{directory.name}/{file}, {name}, {use}: {error}"]
                except Exception as error:
                    count.wrong.append(
                        f"{directory.name}/{file}, {name}, {use}: {type(error).__name__}: {error}"
                    )
                else:
                    count.same += fine
                    count.wrong += [] if fine else [f"{directory.name}/{file}, {name}, {use}: other numbers"]


def _is_told(message: str, directory: Path, file: Path) -> bool:
    """Whether a refusal names the file, or for a manifest its run, and says what to do."""
    where = directory / file
    named = str(where) in message or (file.name == "manifest.json" and str(where.parent) in message)
    return named and any(word in message for word in REMEDIES)


def _damages(
    file: Path, other: Path, dice: random.Random, flips: int
) -> Iterator[tuple[str, Callable[[Path], object]]]:
    whole = file.read_bytes()
    size = len(whole)
    for length in {0, size // 2, size - 1}:
        yield f"cut off at {length}", lambda path, length=length: path.write_bytes(whole[:length])
    for place in sorted(dice.sample(range(size), min(flips, size))):
        bit = 1 << dice.randrange(8)
        changed = whole[:place] + bytes([whole[place] ^ bit]) + whole[place + 1 :]
        yield f"bit {bit} of byte {place}", lambda path, changed=changed: path.write_bytes(changed)
    yield "zeros", lambda path: path.write_bytes(bytes(size))
    yield "deleted", lambda path: path.unlink()
    yield "a directory", lambda path: (path.unlink(), path.mkdir())
    if other.is_file() and other.read_bytes() != whole:
        yield "another run's", lambda path: path.write_bytes(other.read_bytes())
    beside = [
        path for path in file.parent.iterdir() if path.is_file() and path.name != "lock" and path != file
    ]
    own = dice.choice(sorted(beside) or [file])
    yield f"its own {own.name}", lambda path: path.write_bytes(own.read_bytes())
    yield "a link", lambda path: (path.unlink(), path.symlink_to(file))


def _files(directory: Path) -> list[Path]:
    return sorted(p.relative_to(directory) for p in directory.rglob("*") if p.is_file() and p.name != "lock")


def _loaded(kind: Kind, directory: Path) -> Any:
    return load_cleaning(directory) if kind.command == "clean" else whence.load(directory)


def _stopped(kind: Kind, directory: Path, share: float) -> None:
    """A run that was killed after so much of its operations."""
    total = done = 0

    def count(_: str) -> None:
        nonlocal total
        total += 1

    def stop(_: str) -> None:
        nonlocal done
        done += 1
        if done >= share * total:
            raise Stopped

    with watched(count):
        kind.run(directory.with_name("counted"))
    try:
        with watched(stop):
            kind.run(directory)
    except Stopped:
        return
    raise AssertionError("the run was not stopped")
