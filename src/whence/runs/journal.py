"""`Journal`: the state of something under way, written down every so many seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass, make_dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from whence.errors import RunDirectoryError
from whence.runs import files
from whence.runs.codec import encode, identity, saved_fields
from whence.runs.manifest import Manifest
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
    """

    def __init__(
        self,
        place: Manifest | dict[str, Any],
        name: str,
        cls: type[T],
        *,
        seconds: float,
        device: torch.device | str,
        writing: Callable[[str], Manifest],
    ) -> None:
        self._place, self._name, self._writing = place, name, writing
        self._record: Any = make_dataclass("Record", [("items", list[str]), ("state", cls)])
        self._seconds, self._device = seconds, device
        self._written = time.monotonic()
        self._items: dict[int, tuple[ParamVector, str]] = {}  # by id, each with its artifact

    def restore(self) -> T | None:
        """The state last written, or None."""
        place = self._place
        if isinstance(place, dict) or self._name not in place:
            return place.get(self._name) if isinstance(place, dict) else None
        there = place.names(self._name + ".")
        record = place.value(self._name, self._record, device=self._device, more=there)
        items = _appended(record.state)
        if len(items) != len(record.items) or set(record.items) != set(there):
            raise RunDirectoryError(f"{place.file(self._name)} does not fit its items. {files.REMEDY}")
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
        place = self._writing(self._name)
        if not (now or time.monotonic() - self._written >= self._seconds):
            return
        before = self._items
        self._items = {
            id(item): before.get(id(item)) or (item, f"{self._name}.{place.next_number()}")
            for item in _appended(state)
        }
        known: dict[Any, str] = {}
        add: dict[str, Path] = {}
        for item, name in self._items.values():
            tree, tensors = encode(item, ParamVector, prefix=name)
            if name not in place:
                add[name] = files.write_tree(place.place(name), tree, tensors)
            known |= {identity(tensor): key for key, tensor in tensors.items()}
        order = [name for _, name in self._items.values()]
        tree, tensors = encode(self._record(order, state), self._record, known=known)
        file = place.place(f"{self._name}.{place.next_number()}")
        add[self._name] = files.write_tree(file, tree, tensors)
        place.change(add, remove=set(place.names(self._name + ".")) - set(order))
        self._written = time.monotonic()

    def clear(self) -> None:
        """Forget the state: what it led to is kept elsewhere."""
        self._items.clear()
        if isinstance(self._place, dict):
            self._place.pop(self._name, None)
        elif self._name in self._place:
            self._writing(self._name).change({}, remove=[self._name, *self._place.names(self._name + ".")])


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
