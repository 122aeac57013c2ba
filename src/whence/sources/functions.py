"""Functions named on the command line: ``package.module:function`` or ``path/to/file.py:function``."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from whence.errors import OptionError

__all__ = ["call_function", "load_function"]


def load_function(spec: str, purpose: str) -> Callable[..., Any]:
    """Import a function by name.

    The working directory, and a file's own directory, become importable, as for ``python file.py``.

    Example:
        >>> load_function("math:sqrt", "the function")(9.0)
        3.0
    """
    place, _, name = spec.rpartition(":")
    if not place or not name:
        raise OptionError(f"{purpose} {spec!r} must be module:function or path/to/file.py:function")
    module = _module(place, purpose)
    function: Any = module
    for part in name.split("."):
        function = getattr(function, part, None)
    if not callable(function):
        there = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        listed = f"it has {', '.join(there[:8])}" if there else "it has no functions"
        raise OptionError(f"{purpose} {spec!r}: {place} has no function {name!r}; {listed}")
    return function  # type: ignore[no-any-return]  # callable, as checked


def call_function(spec: str, purpose: str) -> Any:
    """Import a function and call it without arguments; what it raises becomes an `OptionError` that says where."""
    function = load_function(spec, purpose)
    try:
        return function()
    except Exception as error:
        raise OptionError(f"{purpose} {spec!r} failed{_reason(error)}; repair it and run again") from error


def _module(place: str, purpose: str) -> ModuleType:
    """The module of this name, or in this file."""
    path = Path(place).expanduser().resolve() if place.endswith(".py") else None
    if path is not None and not path.is_file():
        raise OptionError(f"{purpose}: there is no file {str(path)!r}; check the name")
    directory = str(Path.cwd() if path is None else path.parent)
    if directory not in sys.path:
        sys.path.append(directory)  # at the end: nothing installed is hidden by it
    try:
        return importlib.import_module(place) if path is None else _file_module(path)
    except Exception as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if path is None and missing is not None and f"{place}.".startswith(f"{missing}."):
            raise OptionError(
                f"{purpose}: there is no module {place!r}; check the name, run from the directory that holds it, "
                "or give the file as path/to/file.py:function"
            ) from error
        raise OptionError(
            f"{purpose}: {path or place} cannot be imported{_reason(error)}; repair it"
        ) from error


def _file_module(path: Path) -> ModuleType:
    # A name of its own in sys.modules, so that what the file defines can be pickled.
    name = f"whence_user_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception:
        del sys.modules[name]
        raise
    return module


def _reason(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return f"{place} with {type(error).__name__}: {error}"
