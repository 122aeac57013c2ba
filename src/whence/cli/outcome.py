"""What a command prints and how it ends: results on standard output, everything else on standard error.

Exit codes: 0 done; 2 something given cannot be used; 3 the numbers went wrong; 4 a file could not be written; 5 done,
but the solver did not converge, or a validation doubts the scores; 130 interrupted.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.text import Text

from whence.distributed import current
from whence.errors import InputError, SolverError, StorageError, WhenceError, WhenceWarning
from whence.report.untrusted import json_visible, visible

__all__ = ["NOT_CONVERGED", "errors_become_messages", "out", "plain", "print_json", "say", "tell"]

NOT_CONVERGED = 5
_CODES = ((InputError, 2), (SolverError, 3), (StorageError, 4), (WhenceError, 1))


def out() -> Console:
    """Where results go."""
    return Console(highlight=False)


def plain(text: str, style: str = "") -> Text:
    """Anything that comes from data or files, on one line: it commands no terminal, and its markup is text."""
    return Text(" ".join(visible(text).split()), style)


def tell(text: object) -> None:
    """Print a part of the result: markup is text, controls are shown, and lines are as long as they are."""
    out().print(visible(str(text)), markup=False, soft_wrap=True)


def say(message: str) -> None:
    """Tell the user something that is not the result."""
    Console(stderr=True, highlight=False, soft_wrap=True).print(visible(message))


def print_json(value: Any) -> None:
    """A result for scripts."""
    print(json_visible(value))


@contextmanager
def errors_become_messages() -> Iterator[None]:
    """Typed errors end the command with one readable message and a code of their kind."""
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning
        try:
            yield
        except WhenceError as error:
            code = next(code for kind, code in _CODES if isinstance(error, kind))
            ranks = current()
            who = f"{ranks}: " if ranks.size > 1 else ""
            say(f"[bold red]error:[/] {who}{escape(str(error))}")
            raise typer.Exit(code) from error
        except KeyboardInterrupt as error:
            say("\ninterrupted; with a run directory (--run-dir), the same command goes on from here")
            raise typer.Exit(130) from error


def _show_warning(message: Any, category: Any, *args: Any, **kwargs: Any) -> None:
    name = "" if issubclass(category, WhenceWarning) else f" {category.__name__}:"
    say(f"[bold yellow]warning:[/]{name} {escape(str(message))}")
