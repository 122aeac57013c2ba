"""`Records`: rows of named fields, wherever they are stored, read when they are asked for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, islice
from typing import Any

from whence.errors import DataError

__all__ = ["RecordIds", "Records", "Row", "RowList", "Shards"]

#: The field that names a row, where the user names none.
ID_FIELD = "id"


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
            raise DataError(f"{self.where} {problem}; {self._fields_there()}")
        return value

    def text(self, name: str, *, may_be_empty: bool = False) -> str:
        """A field's text, or a `DataError` if it is missing, not text, or empty."""
        value = self.value(name)
        if not isinstance(value, str):
            raise DataError(
                f"{self.where}: the field {name!r} is {_shown(value)}, not text; name a field that holds text"
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

    def given_id(self, field: str | None) -> str | None:
        """The id in ``field``, which must then be there; without ``field``, the one in ``id`` or None."""
        name = ID_FIELD if field is None else field
        value = self.fields.get(name)
        if value is None:
            if field is None:
                return None
            raise DataError(f"{self.where} has no field {name!r} to name it; {self._fields_there()}")
        if isinstance(value, bool) or not isinstance(value, (str, int)) or value == "":
            raise DataError(
                f"{self.where}: the field {name!r} is {_shown(value)}; an id must be a text or a whole number"
            )
        return str(value)

    def _fields_there(self) -> str:
        names = [name for name in self.fields if isinstance(name, str)]
        return f"it has {', '.join(map(repr, names))}" if names else "it has no fields at all"


class Records(ABC):
    """A sequence of rows.

    Attributes:
        name: what messages and ids call the whole, usually the file's name.
        id_field: the field that names a row; None means ``id`` where there is one.
    """

    name: str
    id_field: str | None = None

    @abstractmethod
    def __len__(self) -> int:
        """Number of rows."""

    @abstractmethod
    def __getitem__(self, number: int) -> Row:
        """One row; they are numbered from 0."""

    def __iter__(self) -> Iterator[Row]:
        """All rows in order, in one pass."""
        return (self[number] for number in range(len(self)))

    def class_names(self, field: str) -> tuple[str, ...] | None:
        """The names of a label field's classes, where the format keeps them."""
        return None

    def first(self, count: int) -> Records:
        """The first ``count`` rows.

        Example:
            >>> rows = RowList([{"text": "a"}, {"text": "b"}, {"text": "c"}], name="data")
            >>> [row.text("text") for row in rows.first(2)]
            ['a', 'b']
        """
        return Shards([self], name=self.name, id_field=self.id_field, count=count)


class RowList(Records):
    """Rows held in memory.

    Args:
        rows: fields, or rows that know where they stand.
        name: what messages call the whole.

    Example:
        >>> rows = RowList([{"prompt": "2 + 2 =", "completion": " 4"}], name="queries")
        >>> rows[0].where, rows[0].fields["completion"]
        ('queries, row 1', ' 4')
    """

    def __init__(self, rows: Sequence[Mapping[str, Any] | Row], *, name: str) -> None:
        if len(rows) == 0:
            raise DataError(f"{name} has no rows; give at least one")
        self._rows, self.name = rows, name

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> Row:
        row = self._rows[number]
        return row if isinstance(row, Row) else Row(row, f"{self.name}, row {number + 1}")


class Shards(Records):
    """Several records as one, in the order given.

    Args:
        parts: the records.
        name: what messages call the whole.
        id_field: the field that names a row.
        count: how many rows to take; all by default.
    """

    def __init__(
        self, parts: Sequence[Records], *, name: str, id_field: str | None = None, count: int | None = None
    ) -> None:
        self._parts, self.name, self.id_field = parts, name, id_field
        self._ends = list(accumulate(map(len, parts)))
        self._count = self._ends[-1] if count is None else min(count, self._ends[-1])

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> Row:
        part = bisect_right(self._ends, number)
        return self._parts[part][number - (self._ends[part - 1] if part else 0)]

    def __iter__(self) -> Iterator[Row]:
        return islice(chain.from_iterable(self._parts), self._count)

    def class_names(self, field: str) -> tuple[str, ...] | None:
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
            id = row.given_id(self._records.id_field)
            if id is not None:
                earlier = self._numbers.setdefault(id, number)
                if earlier != number:
                    raise DataError(
                        f"{self._records[earlier].where} and {row.where} have the same id {id!r}; "
                        "ids must differ: rename one, or name another field as the id"
                    )
                self._given[number] = id
            yield number, row

    def __getitem__(self, number: int) -> str:
        return self._given.get(number) or f"{self._records.name}#{number + 1}"

    def find(self, id: str) -> int | None:
        """The number of the row with this id, or None."""
        if id in self._numbers:
            return self._numbers[id]
        name, mark, digits = id.rpartition("#")
        if not (mark and name == self._records.name and digits.isdecimal() and digits.isascii()):
            return None
        number = int(digits) - 1
        return number if 0 <= number < len(self._records) and number not in self._given else None


def _shown(value: Any) -> str:
    """A value and its type, short enough for a message."""
    shown = repr(value)
    return f"{shown if len(shown) <= 60 else shown[:57] + '...'} ({type(value).__name__})"
