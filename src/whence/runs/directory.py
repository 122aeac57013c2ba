"""`Run`: a run directory, where every phase leaves what it found.

An artifact that is there is read and not computed again, so that a run that is begun again is a replay of what was
done, and goes on from there. What is on disk, and what keeps it whole: `whence.runs.manifest`.
"""

from __future__ import annotations

import errno
import os
import platform
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from whence.distributed import ALONE, Shards
from whence.errors import RunDirectoryError, StorageError, WhenceWarning
from whence.operators import LinearOperator
from whence.runs import files
from whence.runs.codec import encode
from whence.runs.journal import Journal
from whence.runs.manifest import Content, Manifest, Scalar, version_of
from whence.runs.shared import shared_value

__all__ = ["Run", "differences", "environment", "holds", "opened", "read"]

T = TypeVar("T")

_PACKAGES = ("whence", "torch", "numpy", "transformers", "safetensors", "pyarrow")
_READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)


class Run:
    """A run directory, or (``path=None``) nothing at all: then everything is computed and nothing is kept.

    Args:
        path: the directory; made if it does not exist.
        config: what was asked: option -> value.
        identity: what it was asked about: name -> fingerprint.
        shards: how several processes hold vectors together. Of these the first has the directory: what it reads, or is
            refused, all of them are told, and every method is called on all.

    Raises:
        RunDirectoryError: the directory holds a run of another configuration or about other things (the differences
            are shown), of another format, was damaged, holds something else altogether, or is in use.
        StorageError: the directory cannot be written to, and holds no run that could be read.
    """

    def __init__(
        self,
        path: str | Path | None,
        config: Mapping[str, Scalar],
        *,
        identity: Mapping[str, str],
        shards: Shards | None = None,
    ) -> None:
        self.path = None if path is None else files.given_path(path, "run_dir")
        #: What the run is about: name -> fingerprint.
        self.identity = dict(identity)
        self._shards, self._ranks = shards, ALONE if shards is None else shards.ranks
        self._manifest: Manifest | None = None
        self._states: dict[str, Any] = {}  # of journals, where nothing is on disk
        self._unlock: Callable[[], Any] = lambda: None
        self._refusal = ""  # why nothing may be written, and what to do about it
        if self.path is not None:
            directory = self.path
            self._ranks.told(lambda: self._open(directory, config, identity))

    def _open(self, directory: Path, config: Mapping[str, Scalar], identity: Mapping[str, str]) -> None:
        self.path = directory
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            there = sorted(entry.name for entry in self.path.iterdir())
        except OSError as error:
            raise StorageError(
                f"cannot make the directory {self.path} ({error}); choose another one"
            ) from error
        foreign = [name for name in there if name != "lock" and not files.is_temporary(name)]
        is_new = not Manifest.is_in(self.path)
        if is_new and foreign:
            raise RunDirectoryError(
                f"{self.path} is not empty ({foreign[0]!r} is there) and holds no run; give a new directory"
            )
        release = _lock(self.path, may_be_read_only=not is_new)
        if release is None:
            self._refusal = "it is read-only. Change its permissions, or choose another directory"
        else:
            self._unlock = weakref.finalize(self, release)
        try:
            if Manifest.is_in(self.path):
                self._manifest = Manifest.open(self.path)
                _check_same(self._manifest, config, identity)
            else:
                about = Content(dict(config), dict(identity), environment())
                self._manifest = Manifest(self.path, about)
                self._manifest.change({})
            if not self._refusal:
                self._manifest.sweep()
        except BaseException:
            self._unlock()
            raise

    @classmethod
    def again(cls, path: str | Path) -> Run:
        """The run that a directory holds, whatever it is about; or a new one, about nothing."""
        place = files.given_path(path, "run_dir")
        if not Manifest.is_in(place):
            return cls(place, {}, identity={})
        found = Manifest.open(place).content
        return cls(path, found.config, identity=found.identity)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        """Let others use the directory; from here on it is only read."""
        self._refusal = "the run was closed. Write before its `with` block ends, or open it again"
        self._unlock()

    def has(self, name: str) -> bool:
        """Whether an artifact is there."""
        return self.path is not None and self._ranks.told(lambda: name in self._there())

    def told(self, function: Callable[[], T]) -> T:
        """What a function returns on the process that has the directory."""
        return self._ranks.told(function)

    def keep(
        self,
        name: str,
        cls: type[T],
        compute: Callable[[], T],
        *,
        operator: LinearOperator | None = None,
        device: torch.device | str = "cpu",
    ) -> T:
        """An artifact, computed only where it is not there yet; always as it was read.

        Args:
            name: the artifact's; also its file's, so small letters, digits, ``-``, ``_`` and ``/``.
            cls: its class (`whence.runs.codec`).
            compute: makes it.
            operator: what it remembers afterwards is kept with the artifact, and restored whenever that is read.
            device: where vectors go.

        Raises:
            RunDirectoryError: the artifact was damaged.
            StorageError: it cannot be written; what was there before is still there.
        """
        if self.path is None:
            return compute()
        if not self.has(name):
            self.told(lambda: self._writing(name) and None)
            tree, tensors = encode(compute(), cls)
            states = {} if operator is None else {name: operator.state()}
            self.told(lambda: self._write(name, self._there().place(name), tree, tensors, states))
        value = self._value(name, cls, device)
        if operator is not None:
            operator.restore_state(self.told(lambda: self._there().operator(name)))
        return value

    def keep_table(self, name: str, compute: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
        """Equally long numpy columns of whole numbers or float64, as a Parquet file; otherwise as `keep`."""
        if self.path is None:
            return dict(compute())
        if not self.has(name):
            self.told(lambda: self._writing(name) and None)
            columns = compute()

            def write() -> None:
                self._there().change({name: files.write_table(self._there().place(name), columns)})

            self.told(write)
        return self.told(lambda: files.read_table(self._there().file(name)))

    def put(self, name: str, cls: type[T], value: T) -> T:
        """Keep an artifact in place of an earlier one, which is there until then."""
        if self.path is None:
            return value
        tree, tensors = encode(value, cls)

        def write() -> None:
            manifest = self._writing(name)
            manifest.sweep_numbers(name)
            self._write(name, manifest.place(f"{name}.{manifest.next_number()}"), tree, tensors, {})

        self.told(write)
        return self._value(name, cls, "cpu")

    def drop(self, name: str) -> None:
        """Forget an artifact, if it is there."""
        if self.has(name):
            self.told(lambda: self._writing(name).change({}, remove=[name]))

    def journal(
        self, name: str, cls: type[T], *, seconds: float = 30.0, device: torch.device | str = "cpu"
    ) -> Journal[T]:
        """A journal of this name, for states of this class."""
        if self._manifest is not None and not self._refusal:
            self._manifest.sweep_numbers(name)
        return Journal(
            self._states if self.path is None else self._manifest,
            name,
            cls,
            seconds=seconds,
            device=device,
            writing=self._writing,
            ranks=self._ranks,
            shards=self._shards,
        )

    def inside(self, name: str) -> Path | None:
        """Where a run inside this one has its directory; None where nothing is kept.

        Raises:
            RunDirectoryError: there is a link.
        """
        return None if self.path is None else self.told(lambda: self._there().place(name))

    def _there(self) -> Manifest:
        """On the process that has the directory."""
        assert self._manifest is not None
        return self._manifest

    def _write(
        self, name: str, place: Path, tree: Any, tensors: Mapping[str, Tensor], states: Mapping[str, Any]
    ) -> None:
        self._there().change({name: files.write_tree(place, tree, tensors)}, operators=states)

    def _value(self, name: str, cls: type[T], device: torch.device | str) -> T:
        if self._ranks.size == 1:  # errors name the file
            return self._there().value(name, cls, device=device)
        return shared_value(
            self._ranks, cls, lambda: self._there().tree(name), device=device, shards=self._shards
        )

    def _writing(self, name: str) -> Manifest:
        if self._manifest is None or self._refusal:
            raise StorageError(
                f"{self.path} cannot be written to, so {name!r} cannot be kept: {self._refusal}"
            )
        return self._manifest


def _lock(path: Path, *, may_be_read_only: bool) -> Callable[[], None] | None:
    """Keep other runs out until the result is called, or the process dies; None where a directory is read-only."""
    try:
        import fcntl
    except ImportError:  # no such locks on this system
        return lambda: None
    try:
        handle = os.open(path / "lock", os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    except OSError as error:
        if may_be_read_only and error.errno in _READ_ONLY:
            return None
        raise StorageError(
            f"{path} cannot be written to ({error}). Change its permissions, or choose another directory"
        ) from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(handle)
        raise RunDirectoryError(
            f"{path} is being used by another call or process; wait for it, or give another directory"
        ) from error
    return lambda: os.close(handle)


# --- reading, whatever a run's configuration -------------------------------------------------------------------------


def read(path: str | Path, name: str, cls: type[T]) -> T:
    """An artifact of a run directory."""
    return opened(path).value(name, cls)


def holds(path: str | Path, name: str) -> bool:
    """Whether a directory is that of a run, and has this artifact.

    Raises:
        RunDirectoryError: it is of another format, or was damaged.
    """
    place = files.given_path(path, "run_dir")
    return Manifest.is_in(place) and name in Manifest.open(place)


def opened(path: str | Path) -> Manifest:
    """What a run directory holds; every file is compared with its length and checksum when it is read.

    Raises:
        RunDirectoryError: there is no run, of this format, with a whole manifest.
    """
    return Manifest.open(files.given_path(path, "run_dir"))


# --- is it the same run? ------------------------------------------------------------------------------------------


def environment() -> dict[str, str]:
    """Versions and machine: what the last bits of a result depend on beside its configuration."""
    found = {name: version_of(name) for name in _PACKAGES}
    machine = {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "threads": str(torch.get_num_threads()),
    }
    return {name: value for name, value in found.items() if value} | machine


def _check_same(manifest: Manifest, config: Mapping[str, Scalar], identity: Mapping[str, str]) -> None:
    """Refuse another configuration or identity, and warn of another environment."""
    there = manifest.content
    found = [*differences(there.config, config), *differences(there.identity, identity)]
    if found:
        raise RunDirectoryError(
            f"{manifest.path} holds a run of another configuration ({'; '.join(found)}). "
            "Give another directory, or the same settings to go on with that run"
        )
    here = environment()
    changed = [
        f"{_shown(name)} {_shown(before)} → {here.get(name)}"
        for name, before in there.environment.items()
        if before != here.get(name)
    ]
    if changed:
        warnings.warn(
            f"{manifest.path} was begun in another environment ({', '.join(changed)}); the result will differ in "
            "its last digits from an uninterrupted run",
            WhenceWarning,
            stacklevel=3,
        )


def differences(there: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """What a run directory says otherwise than it is now, in words."""
    for name, value in now.items():
        if name not in there or there[name] != value:
            yield f"{name}: {_short(there.get(name))} there, {_short(value)} now"
    yield from (f"{_shown(name)}: {_short(value)} there" for name, value in there.items() if name not in now)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"


def _shown(text: str) -> str:
    """A stranger's word, harmless to a terminal."""
    return text if text.isprintable() and len(text) <= 60 else _short(text)
