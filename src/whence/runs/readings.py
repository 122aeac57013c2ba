"""`ReadingParts`: what a pass over the training data read of each example, on disk, one Parquet file per part.

A part is written whole or not at all, so a pass that was killed goes on with the first part that is missing.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import torch

from whence.errors import RunDirectoryError
from whence.runs.files import replace_file
from whence.scoring.self_influence import Readings

__all__ = ["ReadingParts"]


class ReadingParts:
    """The directory of parts."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def path(self, number: int) -> Path:
        """Where a part is, or will be."""
        return self.directory / f"part-{number:05d}.parquet"

    def read(self, number: int) -> Readings | None:
        """A part, or None where it has not been written."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        path = self.path(number)
        if not path.exists():
            return None
        try:
            table = pq.read_table(path, partitioning=None)
            columns = {field.name: table[field.name].to_numpy().copy() for field in fields(Readings)}
        except (OSError, KeyError, pa.ArrowException) as error:
            raise RunDirectoryError(
                f"{path} cannot be read ({error}); delete this file and cleaning.json and run again: only its part is "
                "computed anew"
            ) from error
        return Readings(**{name: torch.from_numpy(column) for name, column in columns.items()})

    def read_all(self, count: int) -> Readings:
        """All parts together."""
        parts = [part for part in map(self.read, range(count)) if part is not None]
        if len(parts) < count:
            raise RunDirectoryError(
                f"{self.directory} lacks {count - len(parts)} of {count} parts; delete cleaning.json beside it and run "
                "the same command again to compute them"
            )
        return Readings.join(parts)

    def write(self, number: int, part: Readings) -> None:
        """Write a part, at once."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        table = pa.table({field.name: getattr(part, field.name).numpy() for field in fields(Readings)})
        replace_file(self.path(number), lambda temporary: pq.write_table(table, temporary))
