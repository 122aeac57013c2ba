"""`Scores`: what every example scored for every query, computed and kept in parts.

A part of a run is written whole or not at all, so a run that was killed while scoring goes on with the first part that
is missing. On disk the parts are an ordinary Parquet data set with one row for each query and example::

    query  index  terms  score  stderr  chain_0 … chain_{m-1}  [dot_product]  [norm]

`dot_product` is the plain gradient dot product and `norm` the length of the example's gradient, where they were asked
for. `stderr` is of several chains; the errors of a single one follow from its certificate and the norms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from whence.attribution.job import Job
from whence.errors import RunDirectoryError
from whence.model.gauss_newton import GaussNewton
from whence.progress import ticker, track
from whence.runs import Run
from whence.runs.files import REMEDY
from whence.scoring import Scorer
from whence.vectors import ParamVector

__all__ = [
    "PartSize",
    "Scores",
    "check_examples",
    "directions",
    "keep_parts",
    "part_of_minute",
    "score_parts",
    "token_shares",
]

#: A part should take about this many flops: a minute or so on a few cores.
_FLOPS_PER_PART = 2e12
_LARGEST_PART = 50_000
_PER_EXAMPLE = ("indices", "terms", "chains", "dots", "norms")  # examples come last in all of them


@dataclass(frozen=True)
class Scores:
    """Scores of some examples.

    Attributes:
        indices: positions in the training data, ``[n]``.
        terms: how many terms each has, ``[n]``.
        chains: scores by every chain, ``[chains, queries, n]``.
        dots: gradient dot products, ``[queries, n]``, or None.
        norms: lengths of the examples' gradients, ``[n]``, or None.
        method: how they were computed, in words.
    """

    indices: Tensor
    terms: Tensor
    chains: Tensor
    dots: Tensor | None = None
    norms: Tensor | None = None
    method: str = ""

    @staticmethod
    def join(parts: Sequence[Scores]) -> Scores:
        """One after the other: parts of one run, so that all have the same fields."""

        def joined(name: str) -> Any:
            values = [getattr(part, name) for part in parts]
            return None if values[0] is None else torch.cat(values, dim=-1)

        return replace(parts[0], **{name: joined(name) for name in _PER_EXAMPLE})

    def columns(self) -> dict[str, np.ndarray]:
        """As a table."""
        chains, queries, examples = self.chains.shape
        stderr = torch.full_like(self.chains[0], math.nan)
        if chains > 1:
            stderr = self.chains.std(0) / math.sqrt(chains)
        columns = {
            "query": torch.arange(queries).repeat_interleave(examples),
            "index": self.indices.repeat(queries),
            "terms": self.terms.repeat(queries),
            "score": self.chains.mean(0).flatten(),
            "stderr": stderr.flatten(),
            **{f"chain_{k}": self.chains[k].flatten() for k in range(chains)},
        }
        if self.dots is not None:
            columns["dot_product"] = self.dots.flatten()
        if self.norms is not None:
            columns["norm"] = self.norms.repeat(queries)
        return {name: column.numpy() for name, column in columns.items()}

    @staticmethod
    def from_columns(columns: Mapping[str, np.ndarray]) -> Scores:
        """Inverse of `columns`."""
        queries = int(columns["query"][-1]) + 1

        def column(name: str) -> Tensor:
            return torch.from_numpy(columns[name].copy()).reshape(queries, -1)

        count = sum(name.startswith("chain_") for name in columns)
        return Scores(
            column("index")[0],
            column("terms")[0],
            torch.stack([column(f"chain_{k}") for k in range(count)]),
            column("dot_product") if "dot_product" in columns else None,
            column("norm")[0] if "norm" in columns else None,
        )


@dataclass(frozen=True)
class PartSize:
    """How many examples a part has."""

    examples: int

    def __post_init__(self) -> None:
        if self.examples < 1:
            raise ValueError(f"parts of {self.examples} examples")


def part_of_minute(flops: float, multiple: int = 1) -> int:
    """How many examples of so many flops each make a part, in whole multiples."""
    size = min(max(int(_FLOPS_PER_PART / max(flops, 1.0)), 1), _LARGEST_PART)
    return max(size // multiple, 1) * multiple


def directions(chains: Sequence[ParamVector], gradients: ParamVector | None) -> ParamVector:
    """One block: all queries of the first chain, of the second, …, and the gradients for the baseline."""
    blocks = [*chains] if gradients is None else [*chains, gradients]
    if len(blocks) == 1:  # as large as all queries' gradients, so not copied
        return blocks[0]
    return ParamVector.join(blocks)


def score_parts(run: Run, name: str, scorer: Scorer, job: Job, *, chains: int) -> Scores:
    """Scores of the job's examples along `directions` of so many chains; parts that the run has are read."""
    # written down, so that a run is gone on with in the parts that it was begun with
    size = run.keep(
        f"{name}/size",
        PartSize,
        lambda: PartSize(job.options.part_size or part_of_minute(scorer.cost, job.gnh.micro_batch)),
    )
    compute = partial(_score_part, scorer, chains, len(job.questions))
    saying = "scoring training examples"
    parts = keep_parts(run, name, job.positions, size.examples, compute, saying=saying)
    found = Scores.join([Scores.from_columns(part) for part in parts])
    check_examples(run, name, found.indices, scorer.terms.indices[job.positions])
    return replace(found, method=scorer.describe())


def check_examples(run: Run, name: str, found: Tensor, wanted: Tensor) -> None:
    """Refuse parts that are of other examples than were asked for, or of some of them twice."""
    if not torch.equal(found, wanted):
        raise RunDirectoryError(
            f"the parts {name}/ in {run.path} are of other examples than was asked for, or in another order. {REMEDY}"
        )


def keep_parts(
    run: Run,
    name: str,
    positions: Tensor,
    size: int,
    compute: Callable[[Tensor, Callable[[], None]], dict[str, np.ndarray]],
    *,
    saying: str,
) -> Iterator[dict[str, np.ndarray]]:
    """Tables of so many examples each, by ``compute(positions, tick)``; those that the run has are read."""
    with ticker(saying, len(positions)) as tick:
        for number, part in enumerate(positions.split(size)):
            key = f"{name}/part-{number:05d}"
            if run.has(key):
                for _ in part:
                    tick()
            yield run.keep_table(key, partial(compute, part, tick))


def _score_part(
    scorer: Scorer, chains: int, queries: int, positions: Tensor, tick: Callable[[], None]
) -> dict[str, np.ndarray]:
    rows, lengths = [], []
    for chunk in positions.split(8 * scorer.gnh.micro_batch):
        found, norms = scorer.score_with_norms(chunk) if scorer.norms else (scorer.score(chunk), None)
        rows.append(found)
        lengths += [] if norms is None else [norms]
        for _ in chunk:
            tick()
    along, solved = torch.cat(rows, dim=1), chains * queries
    return Scores(
        scorer.terms.indices[positions],
        scorer.terms.counts()[positions],
        along[:solved].reshape(chains, queries, -1),
        along[solved:] if len(along) > solved else None,
        torch.cat(lengths) if lengths else None,
    ).columns()


def token_shares(
    gnh: GaussNewton, chains: Sequence[ParamVector], positions: Sequence[Sequence[int]]
) -> dict[tuple[int, int], tuple[float, ...]]:
    """Each token's share of some scores: (query, position) -> one number per token.

    The prediction of token j + 1 is made at token j, so the first token has none.
    """
    shares: dict[tuple[int, int], tuple[float, ...]] = {}
    for q, wanted in enumerate(track(positions, "scores of tokens")):
        mean = ParamVector.mean([chain.column(q) for chain in chains])
        scorer = Scorer(gnh, mean, method="directional")
        for position, row in zip(wanted, scorer.term_shares(torch.tensor(wanted)), strict=True):
            shares[q, position] = (0.0, *row[0, :-1].tolist())
    return shares
