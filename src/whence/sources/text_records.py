"""Records from text formats: JSON lines, JSON, CSV, and plain text files."""

from __future__ import annotations

import csv
import io
import json
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from whence.errors import DataError
from whence.sources.plain_text import PlainFile, read_text
from whence.sources.records import Records, RowList

__all__ = ["CsvRows", "JsonLines", "TextFiles", "json_records"]

#: Python's csv module refuses fields longer than this; the default of 128 KiB is less than a long document.
LONGEST_CSV_FIELD = 2**31 - 1


class JsonLines(Records):
    """One JSON object per line, found again by its byte offset: only offsets are held in memory.

    Lines of nothing but white space are passed over.
    """

    def __init__(self, path: Path, *, encoding: str = "utf-8", id_field: str | None = None) -> None:
        self.name, self.id_field, self._path = path.name, id_field, path
        self._file = PlainFile(path, encoding)
        self._offsets, self._lines = array("q"), array("q")
        offset = 0
        with self._file.path.open("rb") as file:
            for number, line in enumerate(file):
                if line.strip(b" \t\r\n\xef\xbb\xbf"):
                    self._offsets.append(offset)
                    self._lines.append(number)
                offset += len(line)
        if not self._offsets:
            raise DataError(f"{path} is empty; give a file with one JSON object per line")

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, row: int) -> Mapping[str, Any]:
        with self._file.path.open("rb") as file:
            file.seek(self._offsets[row])
            return self._parse(file.readline(), row)

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        with self._file.path.open("rb") as file:
            for row, offset in enumerate(self._offsets):
                file.seek(offset)
                yield self._parse(file.readline(), row)

    def _parse(self, line: bytes, row: int) -> Mapping[str, Any]:
        text = self._file.decode(line, self._offsets[row]).removeprefix("\ufeff").rstrip("\r\n")
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            reason = (
                f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else error
            )
            raise DataError(
                f"{self.where(row)} is not JSON: {reason}; every line must hold one JSON object"
            ) from error
        return _json_object(value, self.where(row))

    def where(self, row: int) -> str:
        return f"{self._path}, line {self._lines[row] + 1}"

    def link(self, row: int) -> str:
        return f"{self._path}:{self._lines[row] + 1}"


def json_records(path: Path, *, encoding: str = "utf-8", id_field: str | None = None) -> Records:
    """A ``.json`` file: a list of objects, read whole, or, as the extension is often used, JSON lines."""
    text = read_text(path, encoding)
    if not text.strip():
        raise DataError(f"{path} is empty; give a JSON list of objects")
    if not text.lstrip().startswith("["):
        try:
            json.loads(text.lstrip().splitlines()[0])
        except ValueError:
            pass  # one object over several lines, or nothing of the kind: said below
        else:
            return JsonLines(path, encoding=encoding, id_field=id_field)
    try:
        rows = json.loads(text)
    except (ValueError, RecursionError) as error:
        place = f"line {error.lineno}: {error.msg}" if isinstance(error, json.JSONDecodeError) else str(error)
        raise DataError(f"{path} is not JSON, {place}; give a list of objects") from error
    if not isinstance(rows, list):
        raise DataError(f"{path} holds {_json_type(rows)}; give a list of objects, one per row")
    if not rows:
        raise DataError(f"{path} is an empty list; give at least one row")
    objects = [_json_object(value, f"{path}, row {row + 1}") for row, value in enumerate(rows)]
    return FileRows(objects, path=path, id_field=id_field)


class FileRows(RowList):
    """Rows of a file that is read whole."""

    def __init__(
        self,
        rows: Sequence[Mapping[str, Any]],
        *,
        path: Path,
        id_field: str | None = None,
        lines: Sequence[int] | None = None,
    ) -> None:
        super().__init__(rows, name=path.name, id_field=id_field)
        self._path, self._lines = path, lines

    def where(self, row: int) -> str:
        place = f"row {row + 1}" if self._lines is None else f"line {self._lines[row]}"
        return f"{self._path}, {place}"

    def link(self, row: int) -> str:
        return str(self._path) if self._lines is None else f"{self._path}:{self._lines[row]}"


class CsvRows(FileRows):
    """A table with a header line, separated by commas or tabs; read whole, every value a text."""

    def __init__(
        self, path: Path, *, encoding: str = "utf-8", delimiter: str = ",", id_field: str | None = None
    ) -> None:
        rows, lines = _csv_rows(read_text(path, encoding), path, delimiter)
        super().__init__(rows, path=path, id_field=id_field, lines=lines)


def _csv_rows(text: str, path: Path, delimiter: str) -> tuple[list[dict[str, str]], list[int]]:
    previous = csv.field_size_limit(LONGEST_CSV_FIELD)
    rows: list[dict[str, str]] = []
    lines: list[int] = []
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    try:
        header = next((row for row in reader if row), None)
        if header is None:
            raise DataError(f"{path} is empty; give a table with a header line")
        _check_header(header, path)
        start = reader.line_num + 1
        for row in reader:
            if row and len(row) != len(header):
                raise DataError(
                    f"{path}, line {start} has {len(row)} values but the header has {len(header)} columns; put "
                    "quotes around values that contain the separator, and give every row every column"
                )
            if row:
                rows.append(dict(zip(header, row, strict=True)))
                lines.append(start)
            start = reader.line_num + 1
    except csv.Error as error:
        raise DataError(f"{path}, line {reader.line_num} is not CSV: {error}; repair the quotes") from error
    finally:
        csv.field_size_limit(previous)
    if not rows:
        raise DataError(
            f"{path} has a header but no rows; give at least one row (its one line was read as the header)"
        )
    return rows, lines


def _check_header(header: Sequence[str], path: Path) -> None:
    """A first line that cannot be a header: empty or repeated names, or numbers."""
    numeric = [name for name in header if _is_number(name)]
    if numeric or "" in header or len(set(header)) < len(header):
        problem = (
            f"{numeric[0]!r} is a number"
            if numeric
            else "a column has no name"
            if "" in header
            else "two columns have the same name"
        )
        raise DataError(
            f"{path} has no usable header: its first line is {', '.join(map(repr, header))[:100]}, where {problem}; "
            "add a first line that names the columns"
        )


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


class TextFiles(Records):
    """Documents in files of their own, each read when it is asked for; ids are the paths below ``root``."""

    def __init__(self, root: Path, files: Sequence[Path], *, encoding: str = "utf-8") -> None:
        self.name, self._root, self._files, self._encoding = root.name, root, files, encoding

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, row: int) -> Mapping[str, Any]:
        path = self._files[row]
        text = read_text(path, self._encoding)
        id = path.name if path == self._root else path.relative_to(self._root).as_posix()
        return {"id": id, "text": text}

    def where(self, row: int) -> str:
        return str(self._files[row])

    def link(self, row: int) -> str:
        return str(self._files[row])


def _json_object(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise DataError(f'{where} holds {_json_type(value)}, not an object; write it as {{"text": ...}}')
    return value


def _json_type(value: Any) -> str:
    names = {list: "a list", dict: "an object", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
