"""`Journal`: the state of something under way, written down every so many seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import is_dataclass, make_dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from whence.distributed import ALONE, Ranks, Shards
from whence.errors import RunDirectoryError
from whence.runs import files
from whence.runs.codec import encode, identity, saved_fields, vector_keys
from whence.runs.manifest import Manifest
from whence.runs.shared import shared_value
from whence.vectors import ParamVector

__all__ = ["Journal"]

T = TypeVar("T")


class Journal(Generic[T]):
    """The last state of something under way; `whence.runs.Run.journal` makes one.

    Fields of the state's dataclasses with ``metadata={"appended": True}`` are lists of vectors that only grow, or begin
    again, and whose items never change: an item is written once, to a file of its own, and later states refer to it.

    Args:
        place: the run directory's manifest; or, where there is none, what holds the last states themselves.
        name: the journal's, as an artifact.
        cls: the state's dataclass.
        seconds: between two writings.
        device: where restored vectors go.
        writing: gives the manifest to write to, or raises `StorageError` where the run is closed or read-only.
        ranks: the processes of the run, of which the first has the directory, and says when it is time to write.
        shards: how they hold vectors.
    """

    def __init__(
        self,
        place: Manifest | dict[str, Any] | None,
        name: str,
        cls: type[T],
        *,
        seconds: float,
        device: torch.device | str,
        writing: Callable[[str], Manifest],
        ranks: Ranks = ALONE,
        shards: Shards | None = None,
    ) -> None:
        self._place, self._name, self._writing = place, name, writing
        self._record: Any = make_dataclass("Record", [("items", list[str]), ("state", cls)])
        self._seconds, self._device = seconds, device
        self._written = time.monotonic()
        self._ranks, self._shards = ranks, shards
        self._items: dict[int, tuple[ParamVector, str]] = {}  # by id, each with its artifact

    def restore(self) -> T | None:
        """The state last written, or None."""
        if isinstance(self._place, dict):
            return self._place.get(self._name)
        if not self._ranks.told(lambda: self._name in self._there()):
            return None

        def read() -> tuple[Any, dict[str, Tensor]]:
            there = self._there()
            return there.tree(self._name, more=there.names(self._name + "."))

        if self._ranks.size == 1:  # errors name the file
            there = self._there()
            record = there.value(
                self._name, self._record, device=self._device, more=there.names(self._name + ".")
            )
        else:
            record = shared_value(self._ranks, self._record, read, device=self._device, shards=self._shards)
        items = _appended(record.state)
        self._ranks.told(lambda: self._check(len(items), record.items))
        self._items = {id(item): (item, name) for item, name in zip(items, record.items, strict=True)}
        state: T = record.state
        return state

    def record(self, state: T, *, now: bool = False) -> None:
        """Write the state down if it is time to, or at once.

        Raises:
            StorageError: the run was closed, or its directory cannot be written to.
        """
        if isinstance(self._place, dict):
            self._place[self._name] = state
            return

        def due() -> bool:
            self._writing(self._name)
            return now or time.monotonic() - self._written >= self._seconds

        if not self._ranks.told(due):
            return
        before, items = self._items, _appended(state)
        has = [before[id(item)][1] if id(item) in before else None for item in items]
        order: list[str] = self._ranks.told(
            lambda: [name or f"{self._name}.{self._there().next_number()}" for name in has]
        )
        self._items = {id(item): (item, name) for item, name in zip(items, order, strict=True)}
        new = self._ranks.told(lambda: [name for name in order if name not in self._there()])
        add: dict[str, Path] = {}
        known: dict[Any, str] = {}
        for item, name in self._items.values():
            keys = vector_keys(item, name)
            known |= {identity(tensor): keys[part] for part, tensor in item.items()}
            if name in new:
                self._write(add, name, name, *encode(item, ParamVector, prefix=name))
        tree, tensors = encode(self._record(order, state), self._record, known=known)
        number = self._ranks.told(lambda: self._there().next_number())
        self._write(add, self._name, f"{self._name}.{number}", tree, tensors)
        self._ranks.told(
            lambda: self._there().change(add, remove=set(self._there().names(self._name + ".")) - set(order))
        )
        self._written = time.monotonic()

    def clear(self) -> None:
        """Forget the state: what it led to is kept elsewhere."""
        self._items.clear()
        if isinstance(self._place, dict):
            self._place.pop(self._name, None)
            return

        def forget() -> None:
            if self._name in self._there():
                gone = [self._name, *self._there().names(self._name + ".")]
                self._writing(self._name).change({}, remove=gone)

        self._ranks.told(forget)

    def _there(self) -> Manifest:
        """On the first process."""
        assert isinstance(self._place, Manifest)
        return self._place

    def _check(self, found: int, names: list[str]) -> None:
        there = self._there()
        if found != len(names) or set(names) != set(there.names(self._name + ".")):
            raise RunDirectoryError(f"{there.file(self._name)} does not fit its items. {files.REMEDY}")

    def _write(
        self, add: dict[str, Path], name: str, file: str, tree: Any, tensors: Mapping[str, Tensor]
    ) -> None:
        """Write a file that will stand for an artifact; on the first process."""

        def write() -> None:
            add[name] = files.write_tree(self._there().place(file), tree, tensors)

        self._ranks.told(write)


def _appended(state: Any) -> list[ParamVector]:
    """The items of all fields that are only appended to, each once."""

    def walk(value: Any) -> Iterator[ParamVector]:
        kind: Any = type(value)
        for field, _ in saved_fields(kind):
            inner = getattr(value, field.name)
            if field.metadata.get("appended"):
                yield from inner
            elif is_dataclass(inner):
                yield from walk(inner)

    return list({id(item): item for item in walk(state)}.values())
