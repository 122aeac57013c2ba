"""`ScoreParts`: scores on disk, one Parquet file per part of the training data.

A part is written whole or not at all, so a run that was killed while scoring goes on with the first part that
is missing. Together the parts are an ordinary Parquet data set with one row for each query and example::

    query  index  terms  score  stderr  chain_0 … chain_{m-1}  dot_product  norm

`dot_product` is the plain gradient dot product, `norm` the length of the example's gradient; null where they were not
asked for. `stderr` is of several chains; the errors of a single one follow from its certificate and the norms.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from whence.errors import RunDirectoryError
from whence.runs.files import replace_file

__all__ = ["PartOfScores", "ScoreParts"]


@dataclass(frozen=True)
class PartOfScores:
    """Scores of some examples.

    Attributes:
        indices: positions in the training data, ``[n]``.
        terms: how many terms each has, ``[n]``.
        chains: scores by every chain, ``[chains, queries, n]``.
        dots: gradient dot products, ``[queries, n]``, or None.
        norms: lengths of the examples' gradients, ``[n]``, or None.
    """

    indices: Tensor
    terms: Tensor
    chains: Tensor
    dots: Tensor | None
    norms: Tensor | None = None

    @staticmethod
    def join(parts: list[PartOfScores]) -> PartOfScores:
        """One after the other."""
        dots = [part.dots for part in parts if part.dots is not None]
        norms = [part.norms for part in parts if part.norms is not None]
        return PartOfScores(
            torch.cat([part.indices for part in parts]),
            torch.cat([part.terms for part in parts]),
            torch.cat([part.chains for part in parts], dim=2),
            torch.cat(dots, dim=1) if len(dots) == len(parts) else None,
            torch.cat(norms) if len(norms) == len(parts) else None,
        )


class ScoreParts:
    """The directory of parts."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def path(self, number: int) -> Path:
        """Where a part is, or will be."""
        return self.directory / f"part-{number:05d}.parquet"

    def read(self, number: int) -> PartOfScores | None:
        """A part, or None where it has not been written."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        path = self.path(number)
        if not path.exists():
            return None
        try:
            table = pq.read_table(path, partitioning=None)
        except (OSError, pa.ArrowException) as error:
            raise RunDirectoryError(
                f"{path} cannot be read ({error}); delete this file and run again: only its part is computed anew"
            ) from error
        queries = int(table["query"][-1].as_py()) + 1
        names = sorted(
            (name for name in table.column_names if name.startswith("chain_")),
            key=lambda name: int(name.removeprefix("chain_")),
        )

        def column(name: str) -> Tensor:
            return torch.from_numpy(table[name].to_numpy().copy()).reshape(queries, -1)

        chains = torch.stack([column(name) for name in names])
        dots = None if table["dot_product"].null_count else column("dot_product")
        norms = None if table["norm"].null_count else column("norm")[0]
        return PartOfScores(column("index")[0], column("terms")[0], chains, dots, norms)

    def read_all(self, count: int) -> PartOfScores:
        """All parts together."""
        parts = [self.read(number) for number in range(count)]
        missing = [number for number, part in enumerate(parts) if part is None]
        if missing:
            raise RunDirectoryError(
                f"{self.directory} lacks part {missing[0]} of {count}; run the same command again to compute it"
            )
        return PartOfScores.join([part for part in parts if part is not None])

    def write(self, number: int, part: PartOfScores) -> None:
        """Write a part, at once."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        chains, queries, examples = part.chains.shape
        stderr = (
            part.chains.std(0) / math.sqrt(chains)
            if chains > 1
            else torch.full_like(part.chains[0], math.nan)
        )
        columns: dict[str, Any] = {
            "query": torch.arange(queries, dtype=torch.int32).repeat_interleave(examples).numpy(),
            "index": part.indices.repeat(queries).numpy(),
            "terms": part.terms.repeat(queries).numpy(),
            "score": part.chains.mean(0).flatten().numpy(),
            "stderr": stderr.flatten().numpy(),
        }
        columns |= {f"chain_{k}": part.chains[k].flatten().numpy() for k in range(chains)}
        table = pa.table(columns)
        optional = {
            "dot_product": part.dots,
            "norm": None if part.norms is None else part.norms.repeat(queries),
        }
        for name, values in optional.items():
            absent = pa.nulls(queries * examples, pa.float64())
            column = absent if values is None else pa.array(values.flatten().numpy())
            table = table.append_column(name, column)
        replace_file(self.path(number), lambda temporary: pq.write_table(table, temporary))
