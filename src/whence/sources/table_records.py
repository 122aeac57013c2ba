"""Records from Parquet files and from data sets that the ``datasets`` library saved."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

from whence.errors import DataError, OptionError
from whence.libraries import load_library
from whence.sources.records import Records

__all__ = ["DatasetRows", "HubDataset", "ParquetRows", "SavedDataset"]

#: Row groups kept after use; neighbouring rows are usually asked for together.
KEPT_GROUPS = 2


class ParquetRows(Records):
    """A Parquet file, read one row group at a time from a memory map."""

    def __init__(self, path: Path, *, id_field: str | None = None) -> None:
        import pyarrow as arrow
        from pyarrow import parquet

        self.name, self.id_field, self._path = path.name, id_field, path
        try:
            self._file = parquet.ParquetFile(path, memory_map=True)
        except (arrow.ArrowException, OSError) as error:
            raise DataError(
                f"{path} is not a readable Parquet file: {_first_line(error)}; fetch or write it again"
            ) from error
        self._errors = (arrow.ArrowException, OSError)
        groups = self._file.metadata.num_row_groups
        sizes = (self._file.metadata.row_group(group).num_rows for group in range(groups))
        self._ends = list(accumulate(sizes))
        self._kept: OrderedDict[int, Any] = OrderedDict()
        if len(self) == 0:
            raise DataError(f"{path} has no rows; give at least one")

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, row: int) -> Mapping[str, Any]:
        group = bisect_right(self._ends, row)
        inner = row - (self._ends[group - 1] if group else 0)
        fields: Mapping[str, Any] = self._group(group).slice(inner, 1).to_pylist()[0]
        return fields

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        for group in range(len(self._ends)):
            try:
                for batch in self._file.iter_batches(batch_size=256, row_groups=[group]):
                    yield from batch.to_pylist()
            except self._errors as error:
                raise self._unreadable(group, error) from error

    def _group(self, group: int) -> Any:
        if group not in self._kept:
            try:
                self._kept[group] = self._file.read_row_group(group)
            except self._errors as error:
                raise self._unreadable(group, error) from error
            if len(self._kept) > KEPT_GROUPS:
                self._kept.popitem(last=False)
        self._kept.move_to_end(group)
        return self._kept[group]

    def _unreadable(self, group: int, error: Exception) -> DataError:
        return DataError(
            f"{self._path}: row group {group} cannot be read: {_first_line(error)}; fetch it again"
        )

    def where(self, row: int) -> str:
        return f"{self._path}, row {row + 1}"

    def link(self, row: int) -> str:
        return str(self._path)

    def class_names(self, field: str) -> tuple[str, ...] | None:
        # The datasets library writes its column types into the file's metadata.
        try:
            info = json.loads((self._file.schema_arrow.metadata or {})[b"huggingface"])
            return tuple(str(name) for name in info["info"]["features"][field]["names"])
        except (KeyError, TypeError, ValueError):
            return None


class DatasetRows(Records):
    """A ``Dataset`` of the ``datasets`` library, memory-mapped; images are left as the bytes that are stored.

    Args:
        data: the ``Dataset``.
        name: what messages and ids call it.
        place: where it is, for messages and links.
        id_field: the field that names a row.
    """

    def __init__(self, data: Any, *, name: str, place: str, id_field: str | None = None) -> None:
        datasets = load_library("datasets", "hf", "to read data sets of its format")
        self.name, self.id_field, self._place = name, id_field, place
        self._features = dict(data.features)
        for column, feature in self._features.items():
            if isinstance(feature, datasets.Image):
                data = data.cast_column(column, datasets.Image(decode=False))
        self._data = data.with_format(None)
        if len(self._data) == 0:
            raise DataError(f"{self.name} has no rows; give at least one")

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, row: int) -> Mapping[str, Any]:
        fields: Mapping[str, Any] = self._data[row]
        return fields

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        yield from self._data

    def where(self, row: int) -> str:
        return f"{self._place}, row {row + 1}"

    def link(self, row: int) -> str:
        return self._place

    def class_names(self, field: str) -> tuple[str, ...] | None:
        names = getattr(self._features.get(field), "names", None)
        return None if names is None else tuple(map(str, names))


class SavedDataset(DatasetRows):
    """A directory written by ``Dataset.save_to_disk`` or ``DatasetDict.save_to_disk``."""

    def __init__(self, path: Path, *, split: str | None = None, id_field: str | None = None) -> None:
        datasets = load_library("datasets", "hf", "to read data sets saved by save_to_disk")
        try:
            loaded = datasets.load_from_disk(str(path))
        except Exception as error:  # whatever it raises, the directory is unusable
            raise DataError(
                f"{path} looks like a saved data set but cannot be loaded: {_first_line(error)}; save it again"
            ) from error
        name = path.name
        if isinstance(loaded, datasets.DatasetDict):
            splits = ", ".join(loaded)
            if split is None and len(loaded) != 1:
                raise OptionError(
                    f"{path} has the splits {splits}; say which, as {path}:{next(iter(loaded), '')}"
                )
            chosen = next(iter(loaded)) if split is None else split
            if chosen not in loaded:
                raise OptionError(f"{path} has no split {chosen!r}; it has {splits}")
            name, loaded = f"{name}:{chosen}", loaded[chosen]
        elif split is not None:
            raise OptionError(f"{path} is a single data set without splits; name it without {split!r}")
        super().__init__(loaded, name=name, place=str(path), id_field=id_field)


class HubDataset(DatasetRows):
    """One split of a data set on the Hugging Face hub, fetched into the library's own cache; or of a local directory.

    Args:
        name: on the hub, such as ``owner/name``, or a directory of data files.
        split: of it.
    """

    def __init__(self, name: str, *, split: str) -> None:
        datasets = load_library("datasets", "hf", "to fetch data sets from the hub")
        try:
            loaded = datasets.load_dataset(name, split=split)
        except Exception as error:  # network, access rights, an unknown name: whatever it raises
            raise DataError(
                f"the data set {name} cannot be fetched: {_first_line(error)}; check its name and your access to it"
            ) from error
        super().__init__(loaded, name=f"{name}:{split}", place=name)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
