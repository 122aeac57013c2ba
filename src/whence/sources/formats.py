"""`open_records`: from a path to `Records`, by the format: JSON lines, JSON, CSV, plain text, or a table."""

from __future__ import annotations

import csv
import io
import json
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from whence.errors import DataError, OptionError
from whence.sources.files import (
    decode,
    existing_path,
    parse_json,
    read_text,
    suffix_of,
    utf8_file,
)
from whence.sources.records import Records, Row, RowList, Shards
from whence.sources.tables import ParquetRows, is_saved_dataset, saved_dataset

__all__ = ["IMAGE_SUFFIXES", "Files", "open_records"]

TEXT_SUFFIXES = (".txt", ".text", ".md", ".rst")
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg")
KNOWN = ".jsonl, .json, .csv, .tsv, .txt (each also with .gz), .parquet"
#: Python's csv module refuses fields longer than this; the default of 128 KiB is less than a long document.
LONGEST_CSV_FIELD = 2**31 - 1


def open_records(
    path: str | Path,
    *,
    split: str | None = None,
    encoding: str = "utf-8",
    pattern: str | None = None,
    id_field: str | None = None,
) -> Records:
    """The rows of a file or directory, by what it is.

    Args:
        path: a ``.jsonl``, ``.json``, ``.csv``, ``.tsv``, ``.txt`` (each also with ``.gz``) or ``.parquet``
            file; a directory of text files, one document each, or of ``.jsonl`` or ``.parquet`` files; or a
            directory saved by the ``datasets`` library, with a split as ``path:split``.
        split: the split of a saved ``DatasetDict``.
        encoding: of text files.
        pattern: which files of a directory are documents, such as ``**/*.py``; by default text files.
        id_field: the field that names a row; by default ``id`` where there is one.
    """
    before, mark, after = str(path).rpartition(":")
    if mark and not Path(path).expanduser().exists() and Path(before).expanduser().exists():
        if split not in (None, after):
            raise OptionError(
                f"{str(path)!r} names the split {after!r}, but {split!r} was asked for; give one"
            )
        path, split = before, after
    place = existing_path(path)
    if place.is_dir():
        records = _open_directory(place, split, encoding, pattern)
    elif split is None:
        records = _open_file(place, encoding)
    else:
        raise OptionError(f"{place} is a file, which has no splits; name it without {split!r}")
    return records if id_field is None else Shards([records], name=records.name, id_field=id_field)


def _open_file(path: Path, encoding: str) -> Records:
    if path.stat().st_size == 0:
        raise DataError(f"{path} is empty; give a file with data")
    suffix = suffix_of(path)
    if suffix in (".jsonl", ".ndjson"):
        return JsonLines(path, encoding)
    if suffix == ".json":
        return _json_records(path, encoding)
    if suffix in (".csv", ".tsv"):
        return RowList(
            _csv_rows(read_text(path, encoding), path, "," if suffix == ".csv" else "\t"), name=path.name
        )
    if suffix == ".parquet":
        return ParquetRows(path)
    if suffix in TEXT_SUFFIXES:
        return _documents(path, [path], encoding)
    described = f"the extension {suffix!r}" if suffix else "no extension"
    raise DataError(f"{path} has {described}, which is not a known format; known are {KNOWN}")


def _open_directory(directory: Path, split: str | None, encoding: str, pattern: str | None) -> Records:
    if pattern is None and is_saved_dataset(directory):
        return saved_dataset(directory, split)
    if split is not None:
        raise OptionError(f"{directory} is not a saved data set, so it has no split {split!r}; leave it out")
    files = sorted(
        p
        for p in directory.glob("**/*" if pattern is None else pattern)
        if p.is_file() and (pattern or not _hidden(p.relative_to(directory)))
    )
    if not files:
        raise DataError(
            f"the directory {directory} is empty; give one with text, .jsonl or .parquet files"
            if pattern is None
            else f"no file of {directory} matches the pattern {pattern!r}; try '**/*.txt', for instance"
        )
    if pattern is not None:
        return _documents(directory, files, encoding)
    tables = [p for p in files if suffix_of(p) in (".parquet", ".jsonl")]
    texts = [p for p in files if suffix_of(p) in TEXT_SUFFIXES]
    formats = sorted({suffix_of(p) for p in tables})
    if len(formats) > 1:
        raise DataError(
            f"{directory} holds both {' and '.join(formats)} files; name the files or a directory of one"
        )
    if tables:
        return Shards([_open_file(p, encoding) for p in tables], name=directory.name)
    if texts:
        return _documents(directory, texts, encoding)
    raise DataError(_unknown_directory(directory, files))


def _unknown_directory(directory: Path, files: list[Path]) -> str:
    suffixes = sorted({p.suffix.lower() or "no extension" for p in files})
    message = f"{directory} holds no data that are known here: its files have {', '.join(suffixes[:6])}"
    if any(p.suffix.lower() in IMAGE_SUFFIXES for p in files):
        return f"{message}; if it is a folder of images, it needs an image model"
    if (directory / "config.json").is_file():
        return f"{message}; it looks like a model, not like training data"
    return (
        f"{message}; give a directory of text files ({', '.join(TEXT_SUFFIXES)}, or others by a pattern), of "
        ".jsonl or .parquet files, or one saved by Dataset.save_to_disk"
    )


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


# --- files of their own ----------------------------------------------------------------------------------


class Files(Records):
    """One file for each row, read when it is asked for; ids are the paths below ``root``.

    Args:
        root: the directory that holds the files, or the only file.
        files: in order.
        read: from a file to its fields.
    """

    def __init__(self, root: Path, files: Sequence[Path], read: Callable[[Path], Mapping[str, Any]]) -> None:
        self.name, self._root, self._files, self._read = root.name, root, files, read

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, number: int) -> Row:
        path = self._files[number]
        id = path.name if path == self._root else path.relative_to(self._root).as_posix()
        return Row({"id": id, **self._read(path)}, str(path), str(path))


def _documents(root: Path, files: Sequence[Path], encoding: str) -> Records:
    return Files(root, files, partial(_document, encoding=encoding))


def _document(path: Path, encoding: str) -> Mapping[str, Any]:
    return {"text": read_text(path, encoding)}


# --- JSON and CSV ----------------------------------------------------------------------------------------


class JsonLines(Records):
    """One JSON object per line, found again by its byte offset: only offsets are held in memory.

    Lines of nothing but white space are passed over.
    """

    def __init__(self, path: Path, encoding: str) -> None:
        self.name, self._path, self._plain = path.name, path, utf8_file(path, encoding, self)
        self._offsets, self._lines = array("q"), array("q")
        offset = 0
        with self._plain.open("rb") as file:
            for line, content in enumerate(file, 1):
                if content.strip(b" \t\r\n\xef\xbb\xbf"):
                    self._offsets.append(offset)
                    self._lines.append(line)
                offset += len(content)
        if not self._offsets:
            raise DataError(f"{path} is empty; give a file with one JSON object per line")

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, number: int) -> Row:
        return next(self._rows(range(number, number + 1)))

    def __iter__(self) -> Iterator[Row]:
        return self._rows(range(len(self)))

    def _rows(self, numbers: range) -> Iterator[Row]:
        with self._plain.open("rb") as file:
            for number in numbers:
                offset, line = self._offsets[number], self._lines[number]
                file.seek(offset)
                text = (
                    decode(file.readline(), self._path, offset=offset).removeprefix("\ufeff").rstrip("\r\n")
                )
                where = f"{self._path}, line {line}"
                value = parse_json(text, where, "every line must hold one JSON object")
                yield Row(_json_object(value, where), where, f"{self._path}:{line}")


def _json_records(path: Path, encoding: str) -> Records:
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
            return JsonLines(path, encoding)
    values = parse_json(text, str(path), "give a list of objects")
    if not isinstance(values, list):
        raise DataError(f"{path} holds {_json_type(values)}; give a list of objects, one per row")
    if not values:
        raise DataError(f"{path} is an empty list; give at least one row")
    places = (f"{path}, row {number}" for number in range(1, len(values) + 1))
    rows = [
        Row(_json_object(value, place), place, str(path)) for value, place in zip(values, places, strict=True)
    ]
    return RowList(rows, name=path.name)


def _json_object(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise DataError(f'{where} holds {_json_type(value)}, not an object; write it as {{"text": ...}}')
    return value


def _json_type(value: Any) -> str:
    names = {list: "a list", dict: "an object", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def _csv_rows(text: str, path: Path, delimiter: str) -> list[Row]:
    """The rows of a table with a header, every value a text."""
    previous = csv.field_size_limit(LONGEST_CSV_FIELD)
    rows: list[Row] = []
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    try:
        header = next((values for values in reader if values), None)
        if header is None:
            raise DataError(f"{path} is empty; give a table with a header line")
        _check_header(header, path)
        line = reader.line_num + 1
        for values in reader:
            where = f"{path}, line {line}"
            if values and len(values) != len(header):
                raise DataError(
                    f"{where} has {len(values)} values but the header has {len(header)} columns; put quotes "
                    "around values that contain the separator, and give every row every column"
                )
            if values:
                rows.append(Row(dict(zip(header, values, strict=True)), where, f"{path}:{line}"))
            line = reader.line_num + 1
    except csv.Error as error:
        raise DataError(f"{path}, line {reader.line_num} is not CSV: {error}; repair the quotes") from error
    finally:
        csv.field_size_limit(previous)
    if not rows:
        raise DataError(
            f"{path} has a header but no rows; give at least one row (its one line was read as the header)"
        )
    return rows


def _check_header(header: Sequence[str], path: Path) -> None:
    """Refuse a first line that cannot be a header: empty or repeated names, or numbers."""
    numeric = [name for name in header if _is_number(name)]
    if numeric:
        problem = f"{numeric[0]!r} is a number"
    elif "" in header:
        problem = "a column has no name"
    elif len(set(header)) < len(header):
        problem = "two columns have the same name"
    else:
        return
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
