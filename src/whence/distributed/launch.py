"""`launched`: the process group of a program that ``torchrun`` has started several times, from its start to its end.

Every process says that it is alive, every few seconds, from a thread of its own. One that is killed closes its
connections, which the others notice at once; one that hangs (a stopped process, a machine that does not answer) says
nothing for `_SILENT` seconds, and the others end with a message, whatever they wait for. One that is only slow goes on
saying that it is alive, and is waited for.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from whence.distributed.ranks import Ranks, current

__all__ = ["launched"]

#: Seconds between two signs of life, and without one until a process is given up.
_EVERY, _SILENT = 4.0, 40.0
#: How a process ends that has given another one up.
_GAVE_UP = 1


@contextlib.contextmanager
def launched() -> Iterator[Ranks]:
    """Join the processes that ``torchrun`` has started beside this one; nothing where it has not, or they are joined.

    Collectives on CPUs go by gloo, on GPUs by NCCL. What runs in here ends within a minute of any process that hangs.

    Example:
        >>> with launched() as ranks:
        ...     ranks.size
        1
    """
    asked = int(os.environ.get("WORLD_SIZE", "1"))
    if asked == 1 or not dist.is_available() or dist.is_initialized():
        yield current()
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group("cpu:gloo,cuda:nccl")
    else:
        dist.init_process_group("gloo")
    ranks, over = current(), threading.Event()
    store: Any = dist.PrefixStore("whence", dist.distributed_c10d._get_default_store())  # type: ignore[attr-defined]
    watch = threading.Thread(target=_watch, args=(ranks, store, over), daemon=True)
    watch.start()
    try:
        yield ranks
        dist.barrier()  # none leaves before all are done, or it would seem lost
        dist.destroy_process_group()
    finally:
        over.set()


def _watch(ranks: Ranks, store: Any, over: threading.Event) -> None:
    """Say that this process is alive, and end it where another one is not."""
    last, silent, beats = [""] * ranks.size, [0] * ranks.size, 0
    # its own beats are what time is counted in: a machine that slept wakes up in no hurry
    while not over.wait(_EVERY):
        beats += 1
        try:
            store.set(f"alive/{ranks.rank}", str(beats))
            now = [_said(store, rank) for rank in range(ranks.size)]
        except RuntimeError:  # the store went with the process that held it, which the next collective tells
            return
        for rank in range(ranks.size):
            silent[rank] = 0 if now[rank] != last[rank] or rank == ranks.rank else silent[rank] + 1
            if silent[rank] * _EVERY >= _SILENT:
                _give_up(ranks, rank)
        last = now


def _said(store: Any, rank: int) -> str:
    """What a process said last; nothing before its first sign."""
    return str(store.get(f"alive/{rank}")) if store.check([f"alive/{rank}"]) else ""


def _give_up(ranks: Ranks, silent: int) -> None:
    # the main thread waits inside a collective, which no exception reaches
    print(
        f"error: rank {ranks.rank} of {ranks.size} ends: rank {silent} has given no sign of life for {_SILENT:.0f} "
        "seconds. The same command, on as many processes as you like, goes on from the run directory",
        file=sys.stderr,
        flush=True,
    )
    os._exit(_GAVE_UP)
