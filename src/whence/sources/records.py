"""`Records`: rows of named fields, wherever they are stored, read when they are asked for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from whence.errors import DataError

__all__ = ["FirstRows", "RecordIds", "Records", "RowList", "Shards", "field_of", "text_of"]

#: The field that names a row, where the user names none.
ID_FIELD = "id"


class Records(ABC):
    """Rows, each a mapping from field to value.

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
    def __getitem__(self, row: int) -> Mapping[str, Any]:
        """The fields of one row."""

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        """All rows in order, in one pass."""
        return (self[row] for row in range(len(self)))

    def where(self, row: int) -> str:
        """Where a row is, for messages: a file and a line."""
        return f"{self.name}, row {row + 1}"

    def link(self, row: int) -> str | None:
        """Where a reader can find the row: a path, with the line if it has one."""
        return None

    def class_names(self, field: str) -> tuple[str, ...] | None:
        """The names of a label field's classes, where the format keeps them."""
        return None

    def given_id(self, row: int, fields: Mapping[str, Any]) -> str | None:
        """The id that the row itself gives, or None."""
        name = ID_FIELD if self.id_field is None else self.id_field
        value = fields.get(name)
        if value is None:
            if self.id_field is not None:
                raise DataError(
                    f"{self.where(row)} has no field {name!r} to name it; {_fields_there(fields)}"
                )
            return None
        if isinstance(value, bool) or not isinstance(value, (str, int)) or value == "":
            raise DataError(
                f"{self.where(row)}: the field {name!r} is {_shown(value)}; an id must be a text or a whole number"
            )
        return str(value)


class RowList(Records):
    """Rows held in memory.

    Example:
        >>> rows = RowList([{"prompt": "2 + 2 =", "completion": " 4"}], name="queries")
        >>> rows.where(0), rows[0]["completion"]
        ('queries, row 1', ' 4')
    """

    def __init__(self, rows: Sequence[Mapping[str, Any]], *, name: str, id_field: str | None = None) -> None:
        if len(rows) == 0:
            raise DataError(f"{name} has no rows; give at least one")
        self._rows, self.name, self.id_field = rows, name, id_field

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int) -> Mapping[str, Any]:
        return self._rows[row]


class Shards(Records):
    """Several files of one format as one, in the order given."""

    def __init__(self, parts: Sequence[Records], *, name: str, id_field: str | None = None) -> None:
        self._parts, self.name, self.id_field = parts, name, id_field
        self._ends = array("q")
        for part in parts:
            self._ends.append(len(part) + (self._ends[-1] if self._ends else 0))

    def __len__(self) -> int:
        return self._ends[-1]

    def _locate(self, row: int) -> tuple[Records, int]:
        part = bisect_right(self._ends, row)
        return self._parts[part], row - (self._ends[part - 1] if part else 0)

    def __getitem__(self, row: int) -> Mapping[str, Any]:
        part, inner = self._locate(row)
        return part[inner]

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        for part in self._parts:
            yield from part

    def where(self, row: int) -> str:
        part, inner = self._locate(row)
        return part.where(inner)

    def link(self, row: int) -> str | None:
        part, inner = self._locate(row)
        return part.link(inner)

    def class_names(self, field: str) -> tuple[str, ...] | None:
        return self._parts[0].class_names(field)


class FirstRows(Records):
    """The first rows of others.

    Example:
        >>> rows = RowList([{"text": "a"}, {"text": "b"}, {"text": "c"}], name="data")
        >>> [fields["text"] for fields in FirstRows(rows, 2)]
        ['a', 'b']
    """

    def __init__(self, records: Records, count: int) -> None:
        self._records, self._count = records, min(count, len(records))
        self.name, self.id_field = records.name, records.id_field

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, row: int) -> Mapping[str, Any]:
        return self._records[row]

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        return islice(iter(self._records), self._count)

    def where(self, row: int) -> str:
        return self._records.where(row)

    def link(self, row: int) -> str | None:
        return self._records.link(row)

    def class_names(self, field: str) -> tuple[str, ...] | None:
        return self._records.class_names(field)


class RecordIds:
    """The ids of the rows that were added: their own, or ``name#1``, ``name#2``, … where they have none.

    Example:
        >>> rows = RowList([{"id": "a"}, {}], name="data")
        >>> ids = RecordIds(rows)
        >>> for row, fields in enumerate(rows):
        ...     ids.add(row, fields)
        >>> ids[0], ids[1], ids.find("data#2"), ids.find("b")
        ('a', 'data#2', 1, None)
    """

    def __init__(self, records: Records) -> None:
        self._records = records
        self._given: dict[int, str] = {}  # by row; empty where no row has an id of its own
        self._rows: dict[str, int] = {}

    def add(self, row: int, fields: Mapping[str, Any]) -> None:
        """Take the row's id, or raise `DataError` if an earlier row has it."""
        id = self._records.given_id(row, fields)
        if id is None:
            return
        earlier = self._rows.setdefault(id, row)
        if earlier != row:
            raise DataError(
                f"{self._records.where(earlier)} and {self._records.where(row)} have the same id {id!r}; "
                "ids must differ: rename one, or name another field as the id"
            )
        self._given[row] = id

    def __getitem__(self, row: int) -> str:
        return self._given.get(row) or f"{self._records.name}#{row + 1}"

    def find(self, id: str) -> int | None:
        """The row of this id, or None."""
        if id in self._rows:
            return self._rows[id]
        name, mark, number = id.rpartition("#")
        if not (mark and name == self._records.name and number.isdecimal() and number.isascii()):
            return None
        row = int(number) - 1
        return row if 0 <= row < len(self._records) and row not in self._given else None


def field_of(records: Records, row: int, fields: Mapping[str, Any], name: str) -> Any:
    """A field's value, or a `DataError` that says which fields the row has."""
    value = fields.get(name)
    if value is None:
        problem = f"leaves the field {name!r} empty" if name in fields else f"has no field {name!r}"
        raise DataError(f"{records.where(row)} {problem}; {_fields_there(fields)}")
    return value


def text_of(
    records: Records, row: int, fields: Mapping[str, Any], name: str, *, may_be_empty: bool = False
) -> str:
    """A field's text, or a `DataError` if it is missing, not text, or empty."""
    value = field_of(records, row, fields, name)
    if not isinstance(value, str):
        raise DataError(
            f"{records.where(row)}: the field {name!r} is {_shown(value)}, not text; name a field that holds text"
        )
    if not may_be_empty and not value.strip():
        raise DataError(
            f"{records.where(row)} has an empty {name!r}; remove it, or leave such rows out (--skip-empty)"
        )
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{records.where(row)}: the field {name!r} holds half of a surrogate pair at character "
            f"{error.start}, which is no text; repair the row"
        ) from error
    return value


def _fields_there(fields: Mapping[str, Any]) -> str:
    names = [name for name in fields if isinstance(name, str)]
    return f"it has {', '.join(map(repr, names))}" if names else "it has no fields at all"


def _shown(value: Any) -> str:
    """A value and its type, short enough for a message."""
    shown = repr(value)
    return f"{shown if len(shown) <= 60 else shown[:57] + '...'} ({type(value).__name__})"
