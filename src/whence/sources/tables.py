"""Records in tables: Parquet files, and data sets of the ``datasets`` library, saved or on the hub."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

from whence.errors import DataError, OptionError
from whence.libraries import load_library
from whence.sources.files import refusing
from whence.sources.records import Records, RowList

__all__ = ["hub_dataset", "is_saved_dataset", "parquet_file", "saved_dataset"]

#: Row groups of a Parquet file kept after use; neighbouring rows are usually asked for together.
KEPT_GROUPS = 2


def parquet_file(path: Path) -> Records:
    """The rows of a Parquet file, read one row group at a time."""
    rows: Any = _ParquetRows(path)
    return RowList(rows, name=path.name, place=str(path), classes=rows.classes())


class _ParquetRows:
    def __init__(self, path: Path) -> None:
        from pyarrow import parquet

        self._path = path
        with refusing(DataError, f"{path} is not a readable Parquet file", "fetch or write it again"):
            self._file = parquet.ParquetFile(path, memory_map=True)
        metadata = self._file.metadata
        self._ends = list(accumulate(metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)))
        self._group = lru_cache(KEPT_GROUPS)(self._read_group)

    def __reduce__(self) -> Any:
        return _ParquetRows, (self._path,)  # an open file cannot be sent to another process, its path can

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, number: int) -> Any:
        group = bisect_right(self._ends, number)
        inner = number - (self._ends[group - 1] if group else 0)
        with self._refusing(group):
            return self._group(group).slice(inner, 1).to_pylist()[0]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for group in range(len(self._ends)):
            for batch in self._group(group).to_batches(max_chunksize=256):
                with self._refusing(group):
                    rows = batch.to_pylist()
                yield from rows

    def _read_group(self, group: int) -> Any:
        with self._refusing(group):
            return self._file.read_row_group(group)

    def _refusing(self, group: int) -> AbstractContextManager[None]:
        return refusing(DataError, f"{self._path}: row group {group} cannot be read", "fetch it again")

    def classes(self) -> dict[str, list[str]]:
        """The classes of label columns, which the datasets library writes into the file's metadata."""
        try:
            features = json.loads(self._file.schema_arrow.metadata[b"huggingface"])["info"]["features"]
            return {field: its["names"] for field, its in features.items() if "names" in its}
        except (KeyError, TypeError, ValueError, AttributeError):
            return {}


def hub_dataset(name: str, *, split: str) -> Records:
    """One split of a data set on the Hugging Face hub, ``owner/name``, fetched into the library's own cache."""
    datasets = load_library("datasets", "hf", "to fetch data sets from the hub")
    with refusing(DataError, f"the data set {name} cannot be fetched", "check its name and your access"):
        loaded = datasets.load_dataset(name, split=split, trust_remote_code=False)
    return _dataset_rows(loaded, name=f"{name}:{split}", place=name)


def is_saved_dataset(directory: Path) -> bool:
    """Whether the ``datasets`` library saved this directory."""
    names = ("dataset_dict.json", "dataset_info.json", "state.json")
    of_several, info, state = [(directory / name).is_file() for name in names]
    return of_several or (info and state)


def saved_dataset(path: Path, split: str | None) -> Records:
    """A directory written by ``Dataset.save_to_disk`` or ``DatasetDict.save_to_disk``."""
    datasets = load_library("datasets", "hf", "to read data sets saved by save_to_disk")
    with refusing(DataError, f"{path} looks like a saved data set but cannot be loaded", "save it again"):
        loaded = datasets.load_from_disk(str(path))
    if not isinstance(loaded, datasets.DatasetDict):
        if split is not None:
            raise OptionError(f"{path} is a single data set without splits; name it without {split!r}")
        return _dataset_rows(loaded, name=path.name, place=str(path))
    splits = ", ".join(loaded)
    if split is None and len(loaded) != 1:
        raise OptionError(f"{path} has the splits {splits}; say which, as {path}:{next(iter(loaded), '')}")
    chosen = next(iter(loaded)) if split is None else split
    if chosen not in loaded:
        raise OptionError(f"{path} has no split {chosen!r}; it has {splits}")
    return _dataset_rows(loaded[chosen], name=f"{path.name}:{chosen}", place=str(path))


def _dataset_rows(data: Any, *, name: str, place: str) -> Records:
    """A memory-mapped ``Dataset``; images are left as the bytes that are stored."""
    datasets = load_library("datasets", "hf", "to read data sets of its format")
    classes = {}
    for column, feature in data.features.items():
        if isinstance(feature, datasets.Image):
            data = data.cast_column(column, datasets.Image(decode=False))
        if isinstance(feature, datasets.ClassLabel):
            classes[column] = feature.names
    return RowList(data.with_format(None), name=name, place=place, classes=classes)
