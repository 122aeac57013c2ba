"""The phases of an attribution. Each takes from the run directory what is there, and computes what is not.

A phase must not depend on what earlier phases left in memory, only on what they left on disk: random numbers start
from the seed in every phase, and finite differences from the memory that the phase before wrote down.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from whence.model.data import TermSet
from whence.model.gauss_newton import GaussNewton
from whence.progress import ticker
from whence.runs import Run, ScoreParts
from whence.runs.journal import pack, unpack
from whence.runs.scores import PartOfScores
from whence.scoring import Scorer
from whence.vectors import ParamVector

__all__ = ["directions", "parts_of", "query_gradients", "score"]

#: A part of the scores should take about this many flops: a minute or so on a few cores.
_FLOPS_PER_PART = 2e12
_LARGEST_PART = 50_000


def query_gradients(run: Run, gnh: GaussNewton, queries: TermSet) -> ParamVector:
    """The right-hand sides: gradients of the query losses, a column each."""

    def compute() -> tuple[dict[str, Tensor], dict[str, Any]]:
        return pack(gnh.gradients(queries.data), "gradients"), {}

    return unpack(run.tensors("gradients", compute, gnh.network.device)[0], "gradients")


def directions(chains: list[ParamVector], gradients: ParamVector | None) -> ParamVector:
    """One block: all queries of the first chain, of the second, …, and the gradients for the baseline."""
    blocks = chains if gradients is None else [*chains, gradients]
    tensors = {name: torch.cat([block[name] for block in blocks]) for name in blocks[0]}
    return ParamVector(tensors, columns=sum(block.columns or 1 for block in blocks))


def parts_of(scorer: Scorer, positions: Tensor, part_size: int | None) -> list[Tensor]:
    """The examples to score, cut into parts whose bounds depend on nothing but the job."""
    if part_size is None:
        per_example = max(scorer.cost, 1.0)
        micro = scorer.gnh.micro_batch
        part_size = min(max(int(_FLOPS_PER_PART / per_example), 1), _LARGEST_PART)
        part_size = max(part_size // micro, 1) * micro
    return list(positions.split(part_size))


def score(
    run: Run, scorer: Scorer, parts: list[Tensor], chains: int, queries: int, *, name: str = "scores"
) -> PartOfScores:
    """Scores of all parts; those on disk, in the directory of this name, are read."""
    done: list[PartOfScores] = []
    files = None if run.path is None else ScoreParts(run.path / name)
    total = sum(len(part) for part in parts)
    with ticker("scoring training examples", total) as tick:
        for number, positions in enumerate(parts):
            part = None if files is None else files.read(number)
            if part is None:
                part = _part(scorer, positions, chains, queries, tick)
                if files is not None:
                    files.write(number, part)
            else:
                for _ in range(len(positions)):
                    tick()
            done.append(part)
    return PartOfScores.join(done)


def _part(scorer: Scorer, positions: Tensor, chains: int, queries: int, tick: Any) -> PartOfScores:
    pieces = [_ticked(scorer, chunk, tick) for chunk in _pieces(scorer, positions)]
    rows = torch.cat([piece for piece, _ in pieces], dim=1)
    norms = [lengths for _, lengths in pieces if lengths is not None]
    by_chain = rows[: chains * queries].reshape(chains, queries, -1)
    dots = rows[chains * queries :] if len(rows) > chains * queries else None
    indices = scorer.terms.indices[positions]
    counts = scorer.terms.counts()[positions]
    return PartOfScores(indices, counts, by_chain, dots, torch.cat(norms) if norms else None)


def _pieces(scorer: Scorer, positions: Tensor) -> Iterator[Tensor]:
    yield from positions.split(8 * scorer.gnh.micro_batch)


def _ticked(scorer: Scorer, positions: Tensor, tick: Any) -> tuple[Tensor, Tensor | None]:
    found = scorer.score_with_norms(positions) if scorer.norms else (scorer.score(positions), None)
    for _ in range(len(positions)):
        tick()
    return found
