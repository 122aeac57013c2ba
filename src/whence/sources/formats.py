"""`open_records`: from a path to `Records`, by the format: JSON lines, JSON, CSV, plain text, or a table."""

from __future__ import annotations

import csv
import io
import json
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from whence.errors import DataError, OptionError
from whence.sources.files import (
    existing_path,
    naming_bad_bytes,
    parse_json,
    read_text,
    suffix_of,
    utf8_file,
)
from whence.sources.records import Records, Row, RowList, Shards, shown
from whence.sources.tables import is_saved_dataset, parquet_file, saved_dataset

__all__ = ["IMAGE_SUFFIXES", "Files", "open_records"]

TEXT_SUFFIXES = (".txt", ".text", ".md", ".rst")
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg")
KNOWN = ".jsonl, .json, .csv, .tsv, .txt (each also with .gz), .parquet"
#: Python's csv module refuses fields longer than this; the default of 128 KiB is less than a long document.
LONGEST_CSV_FIELD = 2**31 - 1


def open_records(path: str | Path, *, split: str | None = None, encoding: str = "utf-8") -> Records:
    """The rows of a file or directory, by what it is.

    Args:
        path: a ``.jsonl``, ``.json``, ``.csv``, ``.tsv``, ``.txt`` (each also with ``.gz``) or ``.parquet``
            file; a directory of text files, one document each, or of ``.jsonl`` or ``.parquet`` files; or a
            directory saved by the ``datasets`` library, with a split as ``path:split``.
        split: the split of a saved ``DatasetDict``.
        encoding: of text files.
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
        return _open_directory(place, split, encoding)
    if split is not None:
        raise OptionError(f"{place} is a file, which has no splits; name it without {split!r}")
    return _open_file(place, encoding)


def _open_file(path: Path, encoding: str) -> Records:
    if path.stat().st_size == 0:
        raise DataError(f"{path} is empty; give a file with data")
    suffix = suffix_of(path)
    if suffix in (".jsonl", ".ndjson"):
        return JsonLines(path, encoding)
    if suffix == ".json":
        return _json_records(path, encoding)
    if suffix in (".csv", ".tsv"):
        return RowList(_csv_rows(path, encoding, "," if suffix == ".csv" else "\t"), name=path.name)
    if suffix == ".parquet":
        return parquet_file(path)
    if suffix in TEXT_SUFFIXES:
        return Files(path, [path], encoding)
    described = f"the extension {suffix!r}" if suffix else "no extension"
    raise DataError(f"{path} has {described}, which is not a known format; known are {KNOWN}")


def _open_directory(directory: Path, split: str | None, encoding: str) -> Records:
    if is_saved_dataset(directory):
        return saved_dataset(directory, split)
    if split is not None:
        raise OptionError(f"{directory} is not a saved data set, so it has no split {split!r}; leave it out")
    files = sorted(p for p in directory.rglob("*") if p.is_file() and not _hidden(p.relative_to(directory)))
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
        return Files(directory, texts, encoding)
    remedy = f"give a directory of text files ({', '.join(TEXT_SUFFIXES)}), of .jsonl or .parquet files, or a data set"
    if any(p.suffix.lower() in IMAGE_SUFFIXES for p in files):
        remedy = "if it is a folder of images, it needs an image model"
    elif (directory / "config.json").is_file():
        remedy = "it looks like a model, not like training data"
    suffixes = ", ".join(sorted({p.suffix.lower() or "no extension" for p in files})[:6])
    there = f"its files have {suffixes}" if files else "it is empty"
    raise DataError(f"{directory} holds no data that are known here: {there}; {remedy}")


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


class Files(Records):
    """One text file for each row, read when it is asked for; ids are the paths below ``root``."""

    def __init__(self, root: Path, files: Sequence[Path], encoding: str = "utf-8") -> None:
        self.name, self._root, self._files, self._encoding = root.name, root, files, encoding

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, number: int) -> Row:
        path = self._files[number]
        # The root may be the only file itself.
        id = path.name if path == self._root else path.relative_to(self._root).as_posix()
        return Row({"id": id, **self._content(path, id)}, str(path), str(path))

    def _content(self, path: Path, id: str) -> Mapping[str, Any]:
        return {"text": read_text(path, self._encoding)}


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
                with naming_bad_bytes(self._path, "utf-8", offset):
                    text = file.readline().decode().removeprefix("\ufeff").rstrip("\r\n")
                where = f"{self._path}, line {line}"
                value = parse_json(text, where, "every line must hold one JSON object")
                yield Row(_json_object(value, where), where, f"{self._path}:{line}")


def _json_records(path: Path, encoding: str) -> Records:
    """A ``.json`` file: a list of objects, read whole, or, as the extension is often used, JSON lines."""
    text = read_text(path, encoding)
    if not text.lstrip().startswith("["):
        try:
            json.loads(text.lstrip().partition("\n")[0])
        except (ValueError, RecursionError):
            pass  # one object over several lines, or nothing of the kind: said below
        else:
            return JsonLines(path, encoding)
    values = parse_json(text, str(path), "give a list of objects")
    if not isinstance(values, list):
        raise DataError(f"{path} holds {shown(values)}; give a list of objects, one per row")
    rows = [_json_object(value, f"{path}, row {number}") for number, value in enumerate(values, 1)]
    return RowList(rows, name=path.name, place=str(path))


def _json_object(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise DataError(f'{where} holds {shown(value)}, not an object; write it as {{"text": ...}}')
    return value


def _csv_rows(path: Path, encoding: str, delimiter: str) -> list[Row]:
    """The rows of a table with a header, every value a text."""
    previous = csv.field_size_limit(LONGEST_CSV_FIELD)
    rows: list[Row] = []
    reader = csv.reader(io.StringIO(read_text(path, encoding), newline=""), delimiter=delimiter, strict=True)
    try:
        header = next((values for values in reader if values), [])
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
        raise DataError(f"{path} has no rows below a header line; give at least one")
    return rows


def _check_header(header: Sequence[str], path: Path) -> None:
    """Refuse a first line that cannot be a header: empty or repeated names, or numbers."""
    problems = [f"{name!r} is a number" for name in header if _is_number(name)]
    problems += ["a column has no name"] if "" in header else []
    problems += ["two columns have the same name"] if len(set(header)) < len(header) else []
    if problems:
        raise DataError(
            f"{path} has no usable header: its first line is {', '.join(map(repr, header))[:100]}, where "
            f"{problems[0]}; add a first line that names the columns"
        )


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
