"""`Run`: a run directory, where every phase of an attribution leaves what it found.

::

    config.json              what was asked, flat: name -> value; a directory of another configuration is refused
    environment.json         versions and machine
    spectrum.json plan.json solution.json …        what each phase found, written once
    gradients.safetensors    the queries' gradients
    solve/                   the solver's state (`whence.runs.journal`)
    scores/                  scores, in parts (`whence.runs.scores`)
    shown.parquet            what a page shows of the examples at the ends of the rankings
    result.json              written last: its presence says that the run is complete

A phase whose file is there is not computed again. Everything is written atomically (`whence.runs.files`).
"""

from __future__ import annotations

import contextlib
import os
import platform
import warnings
import weakref
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from torch import Tensor

from whence.errors import RunDirectoryError, StorageError, WhenceWarning
from whence.runs.files import TEMPORARY, read_json, read_object, read_tensors, write_json, write_tensors

__all__ = ["FORMAT", "Run", "environment", "read_config"]

#: Raised when files change their meaning; directories of another format are refused.
FORMAT = 3
_PACKAGES = ("whence", "torch", "numpy", "transformers", "safetensors", "pyarrow", "curvlinops-for-pytorch")


class Run:
    """A run directory, or (``path=None``) nothing at all: then every phase is computed and nothing is kept.

    Args:
        path: the directory; made if it does not exist.
        config: what was asked. Values are JSON scalars or strings.

    Raises:
        RunDirectoryError: the directory holds a run of another configuration (the differences are shown), of
            another format, something else altogether, or is being used by another process.
        StorageError: the directory cannot be written to.
    """

    def __init__(self, path: str | Path | None, config: Mapping[str, Any]) -> None:
        self.path = None if path is None else Path(path)
        self._unlock: Callable[[], Any] = lambda: None
        if self.path is None:
            return
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(
                f"cannot make the directory {self.path} ({error}); choose another one"
            ) from error
        self._refuse_what_is_no_run()
        lock = _lock(self.path)
        if lock is not None:
            self._unlock = weakref.finalize(self, os.close, lock)
        try:
            self._open(config)
        except BaseException:
            self._unlock()
            raise

    def _refuse_what_is_no_run(self) -> None:
        """A directory with other things in it is left as it is."""
        assert self.path is not None
        names = {entry.name for entry in self.path.iterdir() if not entry.name.startswith(TEMPORARY)}
        foreign = sorted(names - {"lock", "environment.json"})  # a run whose beginning was cut off has these
        if foreign and "config.json" not in names:
            raise RunDirectoryError(
                f"{self.path} is not empty ({foreign[0]!r} is there) and holds no run; give a new directory"
            )

    def _open(self, config: Mapping[str, Any]) -> None:
        assert self.path is not None
        for leftover in self.path.rglob(TEMPORARY + "*"):  # of a process that was killed
            with contextlib.suppress(OSError):
                leftover.unlink()
        if (self.path / "config.json").exists():
            self._check(config)
        else:
            self._begin(config)

    def _begin(self, config: Mapping[str, Any]) -> None:
        assert self.path is not None
        write_json(self.path / "environment.json", environment())
        write_json(self.path / "config.json", {"format": FORMAT, **config})

    def _check(self, config: Mapping[str, Any]) -> None:
        assert self.path is not None
        found = read_config(self.path)
        differences = [
            f"{name}: {_short(found.get(name))} there, {_short(value)} now"
            for name, value in config.items()
            if found.get(name) != value
        ]
        differences += [f"{name}: {_short(found[name])} there" for name in found if name not in config]
        if differences:
            raise RunDirectoryError(
                f"{self.path} holds a run of another configuration ({'; '.join(differences)}). "
                "Give another directory, or the same settings to go on with that run"
            )
        before, now = read_object(self.path / "environment.json"), environment()
        changed = [
            f"{name} {before[name]} → {now.get(name)}" for name in before if before[name] != now.get(name)
        ]
        if changed:
            warnings.warn(
                f"{self.path} was begun in another environment ({', '.join(changed)}); the result will differ in "
                "its last digits from an uninterrupted run",
                WhenceWarning,
                stacklevel=3,
            )

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        """Let others use the directory."""
        self._unlock()

    # --- phases ------------------------------------------------------------------------------------------

    def json(self, name: str, compute: Callable[[], Any]) -> Any:
        """What ``compute`` returns, as JSON; computed only where it is not there yet."""
        if self.path is None:
            return compute()
        path = self.path / f"{name}.json"
        if not path.exists():
            write_json(path, compute())
        return read_json(path)

    def tensors(
        self, name: str, compute: Callable[[], tuple[dict[str, Tensor], dict[str, Any]]], device: Any = "cpu"
    ) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors and JSON notes, computed only where they are not there yet."""
        if self.path is None:
            return compute()
        path = self.path / f"{name}.safetensors"
        if not path.exists():
            write_tensors(path, *compute())
        return read_tensors(path, device)


def read_config(path: Path) -> dict[str, Any]:
    """A run's configuration, its format checked."""
    config = read_object(path / "config.json")
    found = config.pop("format", None)
    if found != FORMAT:
        raise RunDirectoryError(
            f"{path} is of format {found}, this whence ({_version('whence')}) reads format {FORMAT}. "
            "Use the version that wrote it (see environment.json), or run again in a new directory"
        )
    return config


def environment() -> dict[str, str]:
    """Versions and machine: what the last bits of a result depend on beside its configuration."""
    import torch

    found = {name: _version(name) for name in _PACKAGES}
    machine = {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "threads": str(torch.get_num_threads()),
    }
    return {**{name: value for name, value in found.items() if value}, **machine}


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"


def _lock(path: Path) -> int | None:
    """Keep other processes out for as long as this one lives; the lock dies with the process."""
    try:
        import fcntl
    except ImportError:  # no such locks on this system
        return None
    try:
        handle = os.open(path / "lock", os.O_WRONLY | os.O_CREAT, 0o666)
    except OSError as error:
        raise StorageError(
            f"{path} cannot be written to ({error}). Change its permissions, or choose another directory"
        ) from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(handle)
        raise RunDirectoryError(
            f"{path} is being used by another process; wait for it, or give another directory"
        ) from error
    return handle
