"""Blocks of k vectors times small matrices, in float64 and within the block's own memory.

``v - U D Uᵀv`` keeps λ/(Λ + λ) of v along a column of U, and an error of the inner products is magnified by
(Λ + λ)/λ. So every sum here is in float64. A tensor is read a few thousand coordinates at a time, all columns together:
never more than a few megabytes are held in float64.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from whence.vectors import ParamVector

__all__ = ["combine", "mix_", "subtract_and_scale_"]

_NUMBERS_AT_ONCE = 2**19  # of all columns: 4 MB in float64, which stay in the cache


def combine(
    vectors: Sequence[ParamVector], weights: Tensor, *, out: ParamVector | None = None
) -> ParamVector:
    """``Σ_i weights[i, j] · vectors[i]`` as column j of a new block, or of ``out``, which may be some of the vectors.

    Args:
        vectors: each single, or a block of one.
        weights: ``[vectors, new columns]``.
        out: a contiguous block to write into.
    """
    if out is None:
        out = vectors[0].unstack()[0].zeros(weights.shape[1])
    for name in out:
        rows = out[name].view(weights.shape[1], -1)
        turned = weights.T.to(rows.device)
        sources = [vector[name].reshape(-1) for vector in vectors]
        for piece in _pieces(rows.shape[1], len(sources) + len(rows)):
            stacked = torch.stack([source[piece] for source in sources]).double()
            rows[:, piece] = (turned @ stacked).to(rows.dtype)
    return out


def mix_(block: ParamVector, weights: Tensor) -> ParamVector:
    """The block times ``weights``, written over it; at most as many columns as there were.

    Returns the block to go on with: the given one's storage is overwritten, or given up for a smaller one.
    """
    columns = weights.shape[1]
    mixed = combine(block.unstack(), weights, out=block.part(0, columns))
    return mixed if columns == block.columns else mixed.clone()


def subtract_and_scale_(
    vector: ParamVector, block: ParamVector, weights: Tensor, scale: float
) -> ParamVector:
    """``v ← scale · (v - Σ_i weights[i] · column i)``, per column of v, each entry rounded once.

    Args:
        vector: v, contiguous; overwritten.
        block: the k columns.
        weights: ``[k, columns of v]``.
        scale: a factor for all of it.
    """
    for name in vector:
        mine = vector[name].view(vector.columns or 1, -1)
        theirs = _rows(block, name)
        turned = weights.T.to(mine.device)
        for piece in _pieces(mine.shape[1], len(mine) + len(theirs)):
            left = mine[:, piece].double().sub_(turned @ theirs[:, piece].double())
            mine[:, piece] = left.mul_(scale).to(mine.dtype)
    return vector


def _rows(vector: ParamVector, name: str) -> Tensor:
    return vector[name].reshape(vector.columns or 1, -1)


def _pieces(length: int, rows: int) -> Iterator[slice]:
    step = max(1, _NUMBERS_AT_ONCE // max(rows, 1))
    return (slice(start, start + step) for start in range(0, length, step))
