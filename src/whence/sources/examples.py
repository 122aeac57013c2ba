"""`Examples`: a data set that can also be shown, searched and asked for by id."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch

from whence.errors import DataError
from whence.exhibit import Exhibit
from whence.sources.labels import Labels, labels_for
from whence.sources.records import RecordIds, Records, Row

__all__ = ["Examples", "LabelledRows", "ListedExamples", "nothing_left"]


class Examples(ABC):
    """A map-style data set for a task, with what a reader is shown of each example.

    ``len`` and integer indexing give the examples as the task reads them; `exhibit` gives what to show,
    `id` and `find` translate between positions and names, `texts` gives what a text search looks through.
    """

    #: What to call the data set in messages.
    name: str

    @abstractmethod
    def __len__(self) -> int:
        """Number of examples."""

    @abstractmethod
    def __getitem__(self, index: int) -> Any:
        """The example at ``index``, as the task reads it."""

    @abstractmethod
    def id(self, index: int) -> str:
        """The example's own name."""

    @abstractmethod
    def exhibit(self, index: int) -> Exhibit:
        """What a reader is shown of the example at ``index``."""

    @abstractmethod
    def find(self, id: str) -> tuple[int, ...]:
        """Positions of the examples with this id: none if unknown, several where a document was cut up."""

    def column(self, name: str) -> list[Any]:
        """What a field says of every example, such as its source; None where a row has none."""
        raise DataError(
            f"{self.name} has no field {name!r} to tell groups by; read it from rows that have one"
        )

    def texts(self) -> Iterator[str | None]:
        """The texts of all examples in order, read as they are asked for; None where one has none."""
        return (self.exhibit(index).text for index in range(len(self)))

    @property
    def ids(self) -> Iterator[str]:
        """The ids of all examples, in order."""
        return (self.id(index) for index in range(len(self)))

    def _checked(self, index: int) -> int:
        """A position from 0 to ``len - 1``; negative ones count from the end, as in a list."""
        position = index + len(self) if index < 0 else index
        if not 0 <= position < len(self):
            raise IndexError(f"{self.name} has {len(self)} examples, there is no position {index}")
        return position


class ListedExamples(Examples):
    """Any map-style data set, with exhibits made beforehand, made on demand, or none.

    Args:
        data: anything with ``len`` and integer indexing.
        name: what to call it; an example without an id of its own is ``name#1``, ``name#2``, …
        exhibits: one per example, or a function from position to exhibit.
        fields: of the rows that the examples were made from.
        contrasts: what each is compared with, as queries; see `whence.tasks.questions.Questions`.

    Example:
        >>> examples = ListedExamples([([0.0], 1), ([1.0], 0)], name="toy")
        >>> list(examples.ids), examples.find("toy#2")
        (['toy#1', 'toy#2'], (1,))
    """

    def __init__(
        self,
        data: Any,
        *,
        name: str,
        exhibits: Sequence[Exhibit] | Callable[[int], Exhibit] | None = None,
        fields: Sequence[Mapping[str, Any]] | None = None,
        contrasts: Sequence[Any] | None = None,
    ) -> None:
        if not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
            raise DataError(
                f"{name} is a {type(data).__name__}; give a map-style data set with __len__ and __getitem__ "
                "(a list of examples will do)"
            )
        if len(data) == 0:
            raise DataError(f"{name} is empty; give at least one example")
        if exhibits is not None and not callable(exhibits) and len(exhibits) != len(data):
            raise DataError(
                f"{name} has {len(data)} examples but {len(exhibits)} exhibits; give one for each"
            )
        self.data, self.name, self._exhibits, self._fields = data, name, exhibits, fields
        self.contrasts = contrasts

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        return self.data[self._checked(index)]

    def exhibit(self, index: int) -> Exhibit:
        index = self._checked(index)
        exhibit = Exhibit()
        if callable(self._exhibits):
            exhibit = self._exhibits(index)
        elif self._exhibits is not None:
            exhibit = self._exhibits[index]
        if not isinstance(exhibit, Exhibit):
            raise DataError(
                f"the exhibit of example {index} of {self.name} is a {type(exhibit).__name__}; "
                "give a whence.exhibit.Exhibit"
            )
        return exhibit if exhibit.id is not None else replace(exhibit, id=f"{self.name}#{index + 1}")

    def id(self, index: int) -> str:
        return str(self.exhibit(index).id)

    def column(self, name: str) -> list[Any]:
        fields = self.data if self._fields is None else self._fields
        rows = (fields[index] for index in range(len(self)))
        found = [row.get(name) if isinstance(row, Mapping) else None for row in rows]
        if name == "id" and all(value is None for value in found):
            return list(self.ids)
        return super().column(name) if all(value is None for value in found) else found

    def find(self, id: str) -> tuple[int, ...]:
        return (self._positions[id],) if id in self._positions else ()

    @cached_property
    def _positions(self) -> dict[str, int]:
        positions: dict[str, int] = {}
        for index, id in enumerate(self.ids):
            if id in positions:
                raise DataError(
                    f"two examples of {self.name} have the id {id!r}: {positions[id]} and {index}; "
                    "give every example an id of its own"
                )
            positions[id] = index
        return positions


class LabelledRows(Examples):
    """One example for each row, with a label: what texts and images for classifiers have in common.

    Args:
        records: the rows.
        labels: the classes; by default those that the data name.
        label_field: where the label is.
        needed: rows that leave this field empty are left out; None for no such field.

    Attributes:
        labels: the classes: those given, or those that the data name.
        targets: the class of each example, by number.
        skipped: how many rows were left out.
    """

    def __init__(
        self, records: Records, *, labels: Labels | None, label_field: str, needed: str | None = None
    ) -> None:
        self.name, self._records, self._ids = records.name, records, RecordIds(records)
        kept = {
            number: row.value(label_field)
            for number, row in self._ids.read()
            if needed is None or not row.is_empty(needed)
        }
        self.skipped = len(records) - len(kept)
        if not kept:
            raise nothing_left(self.name, self.skipped)
        self._numbers, values = list(kept), list(kept.values())
        self.labels = labels_for(values, labels, records.class_names(label_field))
        targets = [self.labels.number(value) for value in values]
        if None in targets:
            wrong = targets.index(None)
            raise self.labels.unknown(values[wrong], self._row(wrong).where)
        self.targets = torch.tensor(targets)

    def _row(self, index: int) -> Row:
        """The row of an example."""
        return self._records[self._numbers[index]]

    def _rows(self) -> Iterator[Row]:
        """The rows of all examples, in one pass."""
        kept = set(self._numbers)
        return (row for number, row in enumerate(self._records) if number in kept)

    def __len__(self) -> int:
        return len(self.targets)

    def id(self, index: int) -> str:
        return self._ids[self._numbers[self._checked(index)]]

    def find(self, id: str) -> tuple[int, ...]:
        number = self._ids.find(id)
        index = len(self) if number is None else bisect_left(self._numbers, number)
        return (index,) if index < len(self) and self._numbers[index] == number else ()

    def label(self, index: int) -> str:
        """The example's class, in words."""
        return self.labels.names[int(self.targets[index])]

    def column(self, name: str) -> list[Any]:
        found = [row.fields.get(name) for row in self._rows()]
        if name in ("id", "label") and all(value is None for value in found):
            return [self.id(index) if name == "id" else self.label(index) for index in range(len(self))]
        return super().column(name) if all(value is None for value in found) else found

    @property
    def contrasts(self) -> list[int | None] | None:
        """As queries, the class that each is compared with, by its field ``contrast``; None without such fields."""
        named = [row.fields.get("contrast") for row in self._rows()]
        if all(value is None for value in named):
            return None
        numbers = [None if value is None else self.labels.number(value) for value in named]
        for index, (value, number) in enumerate(zip(named, numbers, strict=True)):
            if value is not None and number is None:
                raise self.labels.unknown(value, f"{self._row(index).where}, in 'contrast',")
        return numbers


def nothing_left(name: str, skipped: int) -> DataError:
    """What to raise where all rows were left out."""
    return DataError(f"no row of {name} has text; all {skipped} were left out")
