"""Progress bars for long loops, shown on a terminal and silent everywhere else; and the time that phases take."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

__all__ = ["Stopwatch", "ticker", "track"]

T = TypeVar("T")


@contextmanager
def ticker(description: str, total: int, *, done: int = 0) -> Iterator[Callable[[], None]]:
    """A function to call after every step; the bar shows steps done and the time left.

    Args:
        description: what the steps are.
        total: how many there are.
        done: how many were done before, in a run that goes on.

    Example:
        >>> with ticker("solving", total=3) as tick:
        ...     for _ in range(3):
        ...         tick()
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(description, total=total, completed=done)
        yield lambda: bar.advance(task)


def track(items: Sequence[T], description: str) -> Iterator[T]:
    """Iterate with a bar."""
    with ticker(description, len(items)) as tick:
        for item in items:
            yield item
            tick()


class Stopwatch:
    """How long each phase of a job takes.

    Attributes:
        seconds: phase -> duration, added up where a phase is entered again.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add what this takes to a phase's time."""
        begun = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begun
