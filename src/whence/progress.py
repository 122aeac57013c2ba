"""Progress of long loops: a bar on a terminal and in a notebook, elsewhere a line now and then; and phases' time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any, TypeVar

from markupsafe import Markup
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from whence.distributed import current
from whence.units import format_duration

__all__ = ["Stopwatch", "ticker", "track"]

#: Seconds between two lines where there is no terminal; what takes less says nothing.
_EVERY = 30.0
#: Seconds between two pictures of the bar in a notebook.
_CELL_EVERY = 0.3

T = TypeVar("T")


@contextmanager
def ticker(description: str, total: int, *, done: int = 0) -> Iterator[Callable[[], None]]:
    """A function to call after every step, which shows the steps done and the time left, on standard error.

    Args:
        description: what the steps are.
        total: how many there are.
        done: how many were done before, in a run that goes on.

    Example:
        >>> with ticker("solving", total=3) as tick:
        ...     for _ in range(3):
        ...         tick()
    """
    if current().rank > 0:  # the first of several processes says it for all
        yield lambda: None
        return
    console = Console(stderr=True)
    if console.is_jupyter:
        shown = _Cell(description, total, done)
        yield shown
        shown.clear()
        return
    if not console.is_terminal:
        yield _Lines(console, description, total, done)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(description, total=total, completed=done)
        yield lambda: bar.advance(task)


class _Lines:
    """A line every half minute: for logs, and for whoever waits for a job without a terminal."""

    def __init__(self, console: Console, description: str, total: int, done: int) -> None:
        self._console, self._description, self._total = console, description, total
        self._first = self._done = done
        self._begun = self._said = time.monotonic()

    def __call__(self) -> None:
        self._done += 1
        now = time.monotonic()
        if now - self._said < _EVERY:
            return
        self._said, spent = now, now - self._begun
        left = spent * max(0, self._total - self._done) / (self._done - self._first)
        self._console.print(
            f"{self._description}: {self._done:,} of {self._total:,} after {format_duration(spent)}, at most about "
            f"{format_duration(left)} left",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )


class _Cell:
    """A bar under a notebook's cell, taken away at the end. Needs no widgets."""

    def __init__(self, description: str, total: int, done: int) -> None:
        self._display = import_module("IPython.display")
        self._description, self._total = description, total
        self._first = self._done = done
        self._begun = self._said = time.monotonic()
        self._shown = self._display.display(self._html(), display_id=True)

    def __call__(self) -> None:
        self._done += 1
        if time.monotonic() - self._said >= _CELL_EVERY:
            self._said = time.monotonic()
            self._shown.update(self._html())

    def clear(self) -> None:
        self._shown.update(self._display.HTML(""))

    def _html(self) -> Any:
        left, steps = "", self._done - self._first
        if steps:
            rest = (time.monotonic() - self._begun) * max(0, self._total - self._done) / steps
            left = f", about {format_duration(rest)} left"
        bar = Markup('{} <progress max="{}" value="{}"></progress> {:,} of {:,}{}')
        return self._display.HTML(
            bar.format(self._description, self._total, self._done, self._done, self._total, left)
        )


def track(items: Sequence[T], description: str) -> Iterator[T]:
    """Iterate with a bar."""
    with ticker(description, len(items)) as tick:
        for item in items:
            yield item
            tick()


class Stopwatch:
    """How long each phase of a job takes.

    Args:
        after: what to do at the end of every phase.

    Attributes:
        seconds: phase -> duration, added up where a phase is entered again.
    """

    def __init__(self, *, after: Callable[[], object] | None = None) -> None:
        self.seconds: dict[str, float] = {}
        self._after = after

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add what this takes to a phase's time."""
        begun = time.perf_counter()
        yield
        if self._after is not None:
            self._after()
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begun
