"""`Records`: rows of named fields, wherever they are stored, read when they are asked for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, islice
from typing import Any

from whence.errors import DataError

__all__ = ["RecordIds", "Records", "Row", "RowList", "Shards", "shown"]


@dataclass(frozen=True, slots=True)
class Row:
    """One row: its fields, and where it stands.

    Attributes:
        fields: from name to value.
        where: the row's place in messages, such as a file and a line.
        link: where a reader can find it: a path, with the line if it has one.

    Example:
        >>> Row({"text": "a cat"}, "pets.jsonl, line 1").text("text")
        'a cat'
    """

    fields: Mapping[str, Any]
    where: str
    link: str | None = None

    def value(self, name: str) -> Any:
        """A field's value, or a `DataError` that says which fields the row has."""
        value = self.fields.get(name)
        if value is None:
            problem = f"leaves the field {name!r} empty" if name in self.fields else f"has no field {name!r}"
            names = ", ".join(map(repr, self.fields)) or "no fields at all"
            raise DataError(f"{self.where} {problem}; it has {names}")
        return value

    def text(self, name: str, *, may_be_empty: bool = False) -> str:
        """A field's text, or a `DataError` if it is missing, not text, or empty."""
        value = self.value(name)
        if not isinstance(value, str):
            raise DataError(
                f"{self.where}: the field {name!r} is {shown(value)}, not text; name a field that holds text"
            )
        if not may_be_empty and not value.strip():
            raise DataError(
                f"{self.where} has an empty {name!r}; remove it, or leave such rows out (--skip-empty)"
            )
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise DataError(
                f"{self.where}: the field {name!r} holds half of a surrogate pair at character "
                f"{error.start}, which is no text; repair the row"
            ) from error
        return value

    def is_empty(self, name: str) -> bool:
        """Whether a field is missing, or holds nothing but white space."""
        value = self.fields.get(name)
        return not (value.strip() if isinstance(value, str) else value)

    @property
    def id(self) -> str | None:
        """What its field ``id`` says; None where there is none."""
        value = self.fields.get("id")
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (str, int)) or value == "":
            raise DataError(
                f"{self.where}: the field 'id' is {shown(value)}; an id must be a text or a whole number"
            )
        return str(value)


class Records(ABC):
    """A sequence of rows, numbered from 0; its ``name``, usually the file's, is in messages and ids."""

    name: str

    @abstractmethod
    def __len__(self) -> int:
        """Number of rows."""

    @abstractmethod
    def __getitem__(self, number: int) -> Row:
        """One row."""

    def __iter__(self) -> Iterator[Row]:
        """All rows in order, in one pass."""
        return (self[number] for number in range(len(self)))

    def class_names(self, field: str) -> Sequence[str] | None:
        """The names of a label field's classes, where the format keeps them."""
        return None

    def first(self, count: int) -> Records:
        """The first ``count`` rows.

        Example:
            >>> rows = RowList([{"text": "a"}, {"text": "b"}, {"text": "c"}], name="data")
            >>> [row.text("text") for row in rows.first(2)]
            ['a', 'b']
        """
        return Shards([self], name=self.name, count=count)


class RowList(Records):
    """Rows held in memory, or in anything else with ``len`` and indexing.

    Args:
        rows: fields, or rows that know where they stand.
        name: what messages call the whole.
        place: the file or directory that the rows are in.
        classes: from a label field to the names of its classes.

    Example:
        >>> rows = RowList([{"prompt": "2 + 2 =", "completion": " 4"}], name="queries")
        >>> rows[0].where, rows[0].fields["completion"]
        ('queries, row 1', ' 4')
    """

    def __init__(
        self,
        rows: Sequence[Mapping[str, Any] | Row],
        *,
        name: str,
        place: str | None = None,
        classes: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        if len(rows) == 0:
            raise DataError(f"{place or name} has no rows; give at least one")
        self._rows, self.name, self._place, self._classes = rows, name, place, classes or {}

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> Row:
        return self._row(self._rows[number], number)

    def __iter__(self) -> Iterator[Row]:
        return (self._row(fields, number) for number, fields in enumerate(self._rows))

    def _row(self, fields: Mapping[str, Any] | Row, number: int) -> Row:
        if isinstance(fields, Row):
            return fields
        return Row(fields, f"{self._place or self.name}, row {number + 1}", self._place)

    def class_names(self, field: str) -> Sequence[str] | None:
        return self._classes.get(field)


class Shards(Records):
    """Several records as one, in the order given; with ``count``, only so many rows of them."""

    def __init__(self, parts: Sequence[Records], *, name: str, count: int | None = None) -> None:
        self._parts, self.name = parts, name
        self._ends = list(accumulate(map(len, parts)))
        self._count = self._ends[-1] if count is None else min(count, self._ends[-1])

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> Row:
        part = bisect_right(self._ends, number)
        return self._parts[part][number - (self._ends[part - 1] if part else 0)]

    def __iter__(self) -> Iterator[Row]:
        return islice(chain.from_iterable(self._parts), self._count)

    def class_names(self, field: str) -> Sequence[str] | None:
        return self._parts[0].class_names(field)


class RecordIds:
    """The ids of the rows read so far: their own, or ``name#1``, ``name#2``, … where they have none.

    Example:
        >>> ids = RecordIds(RowList([{"id": "a"}, {}], name="data"))
        >>> [number for number, row in ids.read()]
        [0, 1]
        >>> ids[0], ids[1], ids.find("data#2"), ids.find("b")
        ('a', 'data#2', 1, None)
    """

    def __init__(self, records: Records) -> None:
        self._records = records
        self._given: dict[int, str] = {}  # by row; empty where no row has an id of its own
        self._numbers: dict[str, int] = {}

    def read(self) -> Iterator[tuple[int, Row]]:
        """All rows with their numbers, in one pass; raises `DataError` where two have the same id."""
        for number, row in enumerate(self._records):
            id = row.id
            if id is not None:
                earlier = self._numbers.setdefault(id, number)
                if earlier != number:
                    raise DataError(
                        f"{self._records[earlier].where} and {row.where} have the same id {id!r}; "
                        "ids must differ: rename one"
                    )
                self._given[number] = id
            yield number, row

    def __getitem__(self, number: int) -> str:
        return self._given.get(number) or f"{self._records.name}#{number + 1}"

    def find(self, id: str) -> int | None:
        """The number of the row with this id, or None."""
        digits = id.rpartition("#")[2]
        number = self._numbers.get(id, int(digits) - 1 if digits.isdecimal() else -1)
        return number if 0 <= number < len(self._records) and self[number] == id else None


def shown(value: Any) -> str:
    """A value and its type, short enough for a message."""
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"
