"""From a path on the command line to `Records`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from whence.errors import DataError, OptionError
from whence.sources.plain_text import suffix_of
from whence.sources.records import Records, Shards
from whence.sources.table_records import ParquetRows, SavedDataset
from whence.sources.text_records import CsvRows, JsonLines, TextFiles, json_records

__all__ = ["IMAGE_SUFFIXES", "existing_path", "is_saved_dataset", "open_records"]

TEXT_SUFFIXES = (".txt", ".text", ".md", ".rst")
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg")
KNOWN = ".jsonl, .json, .csv, .tsv, .txt (each also with .gz), .parquet"


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
    place, split = _with_split(path, split)
    if place.is_dir():
        return _open_directory(place, split=split, encoding=encoding, pattern=pattern, id_field=id_field)
    if split is not None:
        raise OptionError(f"{place} is a file, which has no splits; name it without {split!r}")
    return _open_file(place, encoding=encoding, id_field=id_field)


def existing_path(path: str | Path) -> Path:
    """The path, or a `DataError` if there is nothing."""
    place = Path(path).expanduser()
    if not place.exists():
        near = f" in {place.parent.resolve()}" if not place.is_absolute() else ""
        raise DataError(f"there is no file or directory {str(path)!r}{near}; check the name")
    return place


def is_saved_dataset(directory: Path) -> bool:
    """Whether the ``datasets`` library saved this directory."""
    names = ("dataset_dict.json", "dataset_info.json", "state.json")
    found = [(directory / name).is_file() for name in names]
    return found[0] or (found[1] and found[2])


def _with_split(path: str | Path, split: str | None) -> tuple[Path, str | None]:
    """Read ``path:split``, unless the whole is a path."""
    before, mark, after = str(path).rpartition(":")
    if mark and not Path(path).expanduser().exists() and Path(before).expanduser().exists():
        if split is not None and split != after:
            raise OptionError(
                f"{str(path)!r} names the split {after!r}, but {split!r} was asked for; give one"
            )
        return Path(before).expanduser(), after
    return existing_path(path), split


def _open_file(path: Path, *, encoding: str, id_field: str | None) -> Records:
    if path.stat().st_size == 0:
        raise DataError(f"{path} is empty; give a file with data")
    suffix = suffix_of(path)
    openers: dict[str, Callable[[], Records]] = {
        ".jsonl": partial(JsonLines, path, encoding=encoding, id_field=id_field),
        ".ndjson": partial(JsonLines, path, encoding=encoding, id_field=id_field),
        ".json": partial(json_records, path, encoding=encoding, id_field=id_field),
        ".csv": partial(CsvRows, path, encoding=encoding, id_field=id_field),
        ".tsv": partial(CsvRows, path, encoding=encoding, delimiter="\t", id_field=id_field),
        ".parquet": partial(ParquetRows, path, id_field=id_field),
        **{text: partial(TextFiles, path, [path], encoding=encoding) for text in TEXT_SUFFIXES},
    }
    if suffix not in openers:
        described = f"the extension {suffix!r}" if suffix else "no extension"
        raise DataError(f"{path} has {described}, which is not a known format; known are {KNOWN}")
    return openers[suffix]()


def _open_directory(
    directory: Path, *, split: str | None, encoding: str, pattern: str | None, id_field: str | None
) -> Records:
    if pattern is None and is_saved_dataset(directory):
        return SavedDataset(directory, split=split, id_field=id_field)
    if split is not None:
        raise OptionError(f"{directory} is not a saved data set, so it has no split {split!r}; leave it out")
    files = sorted(p for p in directory.rglob("*") if p.is_file() and not _hidden(p.relative_to(directory)))
    if not files:
        raise DataError(f"the directory {directory} is empty; give one with text, .jsonl or .parquet files")
    if pattern is not None:
        chosen = sorted(p for p in directory.glob(pattern) if p.is_file())
        if not chosen:
            raise DataError(
                f"no file of {directory} matches the pattern {pattern!r}; try '**/*.txt', for instance"
            )
        return TextFiles(directory, chosen, encoding=encoding)
    tables = [p for p in files if suffix_of(p) in (".parquet", ".jsonl")]
    texts = [p for p in files if suffix_of(p) in TEXT_SUFFIXES]
    formats = sorted({suffix_of(p) for p in tables})
    if len(formats) > 1:
        raise DataError(
            f"{directory} holds both {' and '.join(formats)} files; name the files or a directory of one"
        )
    if tables:
        parts = [_open_file(p, encoding=encoding, id_field=id_field) for p in tables]
        return Shards(parts, name=directory.name, id_field=id_field)
    if texts:
        return TextFiles(directory, texts, encoding=encoding)
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
