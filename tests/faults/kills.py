"""Kills at every file operation of a run.

What a killed process leaves is what is on the disk at that moment. So one run shows what kills at all of its operations
leave: its directory is copied before every one of them, and in the middle of every file's writing. Each copy that
differs from the others is gone on with, and must end in what the uninterrupted run left, bit for bit.

`really_killed` kills a process at an operation, to show that the copies are what it leaves.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import signal
import socket
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from subjects import Kind, different, numbers
from whence.distributed import launched
from whence.errors import RunDirectoryError
from whence.runs import files

#: What changes a directory, or makes it last.
_OPERATIONS = (
    (os, "open"), (os, "mkdir"), (os, "replace"), (os, "unlink"), (os, "fsync"), (os, "chmod"), (tempfile, "mkstemp"),
)  # fmt: skip


@contextlib.contextmanager
def watched(operation: Callable[[str], None]) -> Iterator[None]:
    """Call ``operation`` with its name before every file operation, and in the middle of every file's writing."""
    replace_file, inside = files.replace_file, False

    def note(name: str) -> None:
        nonlocal inside
        if not inside:  # what watches may have files of its own
            inside = True
            operation(name)
            inside = False

    def wrapped(name: str, original: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            note(name)
            # waiting for the disk would take most of the time, and shows nothing here
            return None if name == "fsync" else original(*args, **options)

        return call

    def write_in_two(path: Path, write: Callable[[Path], None]) -> None:
        def in_two(temporary: Path) -> None:
            write(temporary)
            whole = temporary.read_bytes()
            temporary.write_bytes(whole[: len(whole) // 2])
            note("write")
            temporary.write_bytes(whole)

        replace_file(path, in_two)

    before = [(module, name, getattr(module, name)) for module, name in _OPERATIONS]
    try:
        for module, name, original in before:
            setattr(module, name, wrapped(name, original))
        files.replace_file = write_in_two
        yield
    finally:
        files.replace_file = replace_file
        for module, name, original in before:
            setattr(module, name, original)


@dataclass
class Count:
    """How kills ended.

    Attributes:
        operations: at which a run was killed.
        states: that this left, all different.
        resumed: how many of them were gone on with,
        same: and ended in the same bits,
        refused: or were refused.
        wrong: what else came out, by the operation.
    """

    operations: int = 0
    states: int = 0
    resumed: int = 0
    same: int = 0
    refused: int = 0
    wrong: list[str] = field(default_factory=list)


def kill_everywhere(kind: Kind, root: Path, *, at_most: int | None = None) -> Count:
    """Kill a run at each of its operations; go on from all that this leaves, or from some, spread over the run."""
    count, states = Count(), dict[str, tuple[str, Path]]()
    whole = root / "whole"

    def copy(operation: str) -> None:
        count.operations += 1
        state = _digest(whole)
        if state not in states:
            states[state] = f"{count.operations} ({operation})", _copied(whole, root / str(len(states)))

    with watched(copy):
        kind.run(whole)
    truth = numbers(whole)
    count.states = len(states)
    chosen = list(states.values())
    if at_most is not None and len(chosen) > at_most:
        chosen = [chosen[round(k * (len(chosen) - 1) / (at_most - 1))] for k in range(at_most)]
    for name, directory in chosen:
        count.resumed += 1
        try:
            with watched(lambda _: None):
                kind.run(directory)
        except RunDirectoryError:
            count.refused += 1
        else:
            if found := different(directory, truth):
                count.wrong.append(f"{name}: {', '.join(found)}")
            else:
                count.same += 1
        shutil.rmtree(directory)
    return count


def really_killed(kind: Kind, root: Path, *, times: int) -> Count:
    """The same by processes that end at an operation, a few of them, spread over the run."""
    count = Count()

    def begin(directory: Path, limit: int = -1) -> int:
        """How the process that has the directory ends; where there are several, it is the first of them."""
        children, port = [], _free_port()
        for rank in range(kind.ranks):
            if child := os.fork():
                children.append(child)
                continue
            code = 1
            try:
                os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(kind.ranks)}
                os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
                code = in_child(directory, limit if rank == 0 else -1, root / f"operations-{rank}")
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        codes = [os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1])]
        for child in children[1:]:
            if codes[0]:
                os.kill(child, signal.SIGKILL)  # it would notice, after a while
            codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        return codes[0] or max(codes)

    def in_child(directory: Path, limit: int, told: Path) -> int:
        done = 0

        def operation(_: str) -> None:
            nonlocal done
            done += 1
            if done == limit:
                os._exit(9)

        with launched(), watched(operation):
            kind.run(directory)
        told.write_text(str(done))
        return 0

    assert begin(root / "whole") == 0
    total, truth = int((root / "operations-0").read_text()), numbers(root / "whole")
    for limit in range(1, total + 1, -(-total // times)):
        directory = root / str(limit)
        assert begin(directory, limit) == 9
        count.operations += 1
        count.resumed += 1
        if begin(directory) != 0:
            count.wrong.append(f"{limit}: it could not be gone on with")
        elif found := different(directory, truth):
            count.wrong.append(f"{limit}: {', '.join(found)}")
        else:
            count.same += 1
        shutil.rmtree(directory)
    count.states = count.operations
    return count


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _digest(directory: Path) -> str:
    digest = hashlib.blake2b()
    for path in sorted(directory.rglob("*")):
        name = str(path.relative_to(directory))
        digest.update(name.encode() + b"\0")
        if path.is_file():
            digest.update(hashlib.blake2b(path.read_bytes()).digest())
    return digest.hexdigest()


def _copied(directory: Path, to: Path) -> Path:
    if directory.exists():
        shutil.copytree(directory, to)
    return to
