"""`Run`: a run directory, where every phase leaves what it found; and `Journal`, for a phase under way.

An artifact that is there is read and not computed again, so that a run that is begun again is a replay of what was
done, and goes on from there. What is on disk, and what keeps it whole: `whence.runs.manifest`.
"""

from __future__ import annotations

import platform
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import is_dataclass, make_dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch

from whence.errors import RunDirectoryError, StorageError, WhenceWarning
from whence.runs import files
from whence.runs.codec import decode, encode, saved_fields
from whence.runs.codec import identity as memory_of
from whence.runs.lock import lock
from whence.runs.manifest import Manifest, version_of
from whence.vectors import ParamVector

__all__ = [
    "Journal",
    "Remembering",
    "Run",
    "Scalar",
    "check_run",
    "environment",
    "holds",
    "read",
    "read_table",
]

T = TypeVar("T")
#: A value of an option.
Scalar = bool | int | float | str | None

_PACKAGES = ("whence", "torch", "numpy", "transformers", "safetensors", "pyarrow", "curvlinops-for-pytorch")


class Remembering(Protocol):
    """An operator whose later products depend on its earlier ones."""

    def state(self) -> dict[str, float | None]:
        """What it remembers."""

    def restore_state(self, state: Mapping[str, float | None]) -> None:
        """Go on from what it remembered."""


class Run:
    """A run directory, or (``path=None``) nothing at all: then everything is computed and nothing is kept.

    Args:
        path: the directory; made if it does not exist.
        config: what was asked: option -> value.
        identity: what it was asked about: name -> fingerprint.

    Raises:
        RunDirectoryError: the directory holds a run of another configuration or about other things (the differences
            are shown), of another format, was damaged, holds something else altogether, or is in use.
        StorageError: the directory cannot be written to, and holds no run that could be read.
    """

    def __init__(
        self, path: str | Path | None, config: Mapping[str, Scalar], *, identity: Mapping[str, str]
    ) -> None:
        self.path = None if path is None else Path(path)
        self._manifest: Manifest | None = None
        self._states: dict[str, Any] = {}  # of journals, where nothing is on disk
        self._unlock: Callable[[], Any] = lambda: None
        self._writable = True
        if self.path is None:
            return
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            there = sorted(entry.name for entry in self.path.iterdir())
        except OSError as error:
            raise StorageError(
                f"cannot make the directory {self.path} ({error}); choose another one"
            ) from error
        foreign = [name for name in there if name != "lock" and not name.startswith(files.TEMPORARY)]
        is_new = not Manifest.is_in(self.path)
        if is_new and foreign:
            raise RunDirectoryError(
                f"{self.path} is not empty ({foreign[0]!r} is there) and holds no run; give a new directory"
            )
        release = lock(self.path, may_be_read_only=not is_new)
        self._writable = release is not None
        if release is not None:
            self._unlock = weakref.finalize(self, release)
        try:
            tree, _ = encode(dict(config), dict[str, Scalar])
            if Manifest.is_in(self.path):
                self._manifest = Manifest.open(self.path)
                self._check(tree, identity)
            else:
                self._manifest = Manifest(self.path, tree, identity, environment())
                self._manifest.change({})
            if self._writable:
                self._manifest.sweep()
        except BaseException:
            self._unlock()
            raise

    @classmethod
    def again(cls, path: str | Path) -> Run:
        """The run that a directory holds, whatever it is about; or a new one, about nothing."""
        found = Manifest.open(Path(path)) if Manifest.is_in(Path(path)) else None
        return (
            cls(path, {}, identity={}) if found is None else cls(path, found.config, identity=found.identity)
        )

    def _check(self, config: Any, identity: Mapping[str, str]) -> None:
        assert self._manifest is not None
        pairs = ((self._manifest.config, config), (self._manifest.identity, dict(identity)))
        differences = [
            text for there, now in pairs for text in _differences(dict(_flat(there)), dict(_flat(now)))
        ]
        if differences:
            raise RunDirectoryError(
                f"{self.path} holds a run of another configuration ({'; '.join(differences)}). "
                "Give another directory, or the same settings to go on with that run"
            )
        before, here = self._manifest.environment, environment()
        changed = [
            f"{_shown(name)} {_shown(before[name])} → {here.get(name)}"
            for name in before
            if before[name] != here.get(name)
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
        """Let others use the directory; from here on it is only read."""
        self._writable = False
        self._unlock()

    # --- artifacts ---------------------------------------------------------------------------------------

    def has(self, name: str) -> bool:
        """Whether an artifact is there."""
        return self._manifest is not None and name in self._manifest

    def keep(
        self,
        name: str,
        cls: type[T],
        compute: Callable[[], T],
        *,
        operator: Remembering | None = None,
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
        manifest = self._manifest
        if manifest is None:
            return compute()
        if not self.has(name):
            self._check_writable(name)
            file = files.write_tree(manifest.place(name), *encode(compute(), cls))
            manifest.change({name: file}, operators={} if operator is None else {name: operator.state()})
        value = manifest.value(name, cls, device=device)
        if operator is not None:
            operator.restore_state(manifest.operator(name))
        return value

    def keep_table(self, name: str, compute: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
        """Equally long numpy columns of whole numbers or float64, as a Parquet file; otherwise as `keep`."""
        manifest = self._manifest
        if manifest is None:
            return dict(compute())
        if not self.has(name):
            self._check_writable(name)
            place = manifest.place(name)
            file = place.with_name(place.name + ".parquet")
            files.write_table(file, compute())
            manifest.change({name: file})
        return files.read_table(manifest.file(name))

    def put(self, name: str, cls: type[T], value: T) -> T:
        """Keep an artifact in place of an earlier one, which is there until then."""
        manifest = self._manifest
        if manifest is None:
            return value
        self._check_writable(name)
        place = manifest.place(f"{name}.{manifest.next_number()}")
        manifest.change({name: files.write_tree(place, *encode(value, cls))})
        return manifest.value(name, cls)

    def drop(self, name: str) -> None:
        """Forget an artifact, if it is there."""
        if self._manifest is not None and self.has(name):
            self._check_writable(name)
            self._manifest.change({}, remove=[name])

    def journal(
        self, name: str, cls: type[T], *, seconds: float = 30.0, device: torch.device | str = "cpu"
    ) -> Journal[T]:
        """A journal of this name, for states of this class."""
        memory = self._states if self._manifest is None else None
        return Journal(self._manifest, name, cls, seconds=seconds, device=device, memory=memory)

    def _check_writable(self, name: str) -> None:
        if not self._writable:
            raise StorageError(
                f"{self.path} cannot be written to (read-only, or closed), and {name!r} is not there yet. "
                "Change its permissions, or choose another directory"
            )


class Journal(Generic[T]):
    """Writes the state of something under way down, every so many seconds.

    Fields of the state's dataclasses with ``metadata={"appended": True}`` are lists of vectors that only grow, or begin
    again, and whose items never change: an item is written once, to a file of its own, and later states refer to it.

    Args:
        manifest: of the run directory; None where there is none.
        name: the journal's, as an artifact.
        cls: the state's dataclass.
        seconds: between two writings.
        device: where restored vectors go.
        memory: keeps the last state itself where there is no directory.
    """

    def __init__(
        self,
        manifest: Manifest | None,
        name: str,
        cls: type[T],
        *,
        seconds: float,
        device: torch.device | str,
        memory: dict[str, Any] | None = None,
    ) -> None:
        self._memory = memory
        self._manifest, self._name, self._cls = manifest, name, cls
        self._record: Any = make_dataclass("Record", [("items", list[str]), ("state", cls)])
        self._seconds, self._device = seconds, device
        self._written = time.monotonic()
        # by id: an item that was written, its artifact, and its file where the manifest does not name it yet
        self._items: dict[int, tuple[ParamVector, str, Path | None]] = {}

    def restore(self) -> T | None:
        """The state last written, or None."""
        if self._manifest is None:
            return None if self._memory is None else self._memory.get(self._name)
        if self._name not in self._manifest:
            return None
        there = self._manifest.names(self._name + ".")
        record = self._manifest.value(self._name, self._record, device=self._device, more=there)
        items = list(_appended(record.state))
        if len(items) != len(record.items) or set(record.items) != set(there):
            raise RunDirectoryError(
                f"{self._manifest.file(self._name)} does not fit its items. {files.REMEDY}"
            )
        self._items = {id(item): (item, name, None) for item, name in zip(items, record.items, strict=True)}
        state: T = record.state
        return state

    def record(self, state: T, *, now: bool = False) -> None:
        """Write the state down if it is time to, or at once."""
        manifest = self._manifest
        if self._memory is not None:
            self._memory[self._name] = state
        if manifest is None or not (now or time.monotonic() - self._written >= self._seconds):
            return
        items = list(_appended(state))
        known: dict[Any, str] = {}
        add: dict[str, Path] = {}
        for item in items:
            _, name, file = self._items.get(id(item)) or (
                item,
                f"{self._name}.{manifest.next_number()}",
                None,
            )
            tree, tensors = encode(item, ParamVector, prefix=name)
            if id(item) not in self._items:
                file = files.write_tree(manifest.place(name), tree, tensors)
                self._items[id(item)] = item, name, file
            if file is not None and name not in manifest:
                add[name] = file
            known |= {memory_of(tensor): key for key, tensor in tensors.items()}
        self._items = {id(item): self._items[id(item)] for item in items}
        order = [name for _, name, _ in self._items.values()]
        place = manifest.place(f"{self._name}.{manifest.next_number()}")
        add[self._name] = files.write_tree(
            place, *encode(self._record(order, state), self._record, known=known)
        )
        manifest.change(add, remove=set(manifest.names(self._name + ".")) - set(order))
        self._written = time.monotonic()

    def clear(self) -> None:
        """Forget the state: what it led to is kept elsewhere."""
        if self._memory is not None:
            self._memory.pop(self._name, None)
        if self._manifest is not None and self._name in self._manifest:
            self._manifest.change({}, remove=[self._name, *self._manifest.names(self._name + ".")])
        self._items.clear()


def _appended(state: Any) -> Iterator[ParamVector]:
    """The items of all fields that are only appended to, each once."""
    seen: set[int] = set()

    def walk(value: Any) -> Iterator[ParamVector]:
        kind: Any = type(value)
        for field, _ in saved_fields(kind):
            inner = getattr(value, field.name)
            if field.metadata.get("appended"):
                yield from inner
            elif is_dataclass(inner):
                yield from walk(inner)

    for item in walk(state):
        if id(item) not in seen:
            seen.add(id(item))
            yield item


# --- single files ---------------------------------------------------------------------------------------------------


def write_value(path: Path, value: Any) -> None:
    """One file of a value that belongs to no run; `read_value` reads it back."""
    tree, tensors = encode(value)
    files.write_safetensors(path, tree, tensors)


def read_value(path: Path, cls: type[T]) -> T:
    """What `write_value` wrote.

    Raises:
        RunDirectoryError: the file is not that, or was damaged.
    """
    tree, tensors = files.read_tree(path)
    try:
        return decode(cls, tree, tensors)
    except RunDirectoryError as error:
        raise RunDirectoryError(f"{path} holds no {cls.__name__}: {error}") from error


# --- reading finished runs -----------------------------------------------------------------------------------------


def read(path: str | Path, name: str, cls: type[T], *, device: torch.device | str = "cpu") -> T:
    """An artifact of a run directory, whatever its configuration."""
    return Manifest.open(Path(path)).value(name, cls, device=device)


def read_table(path: str | Path, name: str) -> dict[str, Any]:
    """A table of a run directory, whatever its configuration."""
    return files.read_table(Manifest.open(Path(path)).file(name))


def holds(path: str | Path, name: str) -> bool:
    """Whether a directory is that of a run, and has this artifact.

    Raises:
        RunDirectoryError: it is of another format, or was damaged.
    """
    return Manifest.is_in(Path(path)) and name in Manifest.open(Path(path))


def check_run(path: str | Path) -> None:
    """Refuse a directory that is not that of a run.

    Raises:
        RunDirectoryError: names the directory.
    """
    if not Manifest.is_in(Path(path)):
        raise RunDirectoryError(f"{path} holds no run; give the directory that one was written to")


def environment() -> dict[str, str]:
    """Versions and machine: what the last bits of a result depend on beside its configuration."""
    found = {name: version_of(name) for name in _PACKAGES}
    machine = {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "threads": str(torch.get_num_threads()),
    }
    return {name: value for name, value in found.items() if value} | machine


# --- differences ----------------------------------------------------------------------------------------------


def _flat(tree: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """A tree's leaves under dotted names."""
    if isinstance(tree, dict) and tree:
        for key, value in tree.items():
            yield from _flat(value, f"{name}.{key}" if name else key)
    elif name:
        yield name, tree


def _differences(there: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
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
