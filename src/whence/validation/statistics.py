"""Statistics that the ground truths share: standard errors, ranks and their correlations, resamples."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["Ranks", "draw_weights", "rank_correlations", "standard_error"]


def standard_error(samples: Tensor, dim: int) -> Tensor:
    """Of the mean over one dimension; NaN where there is only one sample."""
    count = samples.shape[dim]
    if count < 2:
        return torch.full_like(samples.mean(dim), math.nan)
    return samples.std(dim) / math.sqrt(count)


class Ranks:
    """Ranks within the columns of a table ``[rows, columns]``, and within any resample of its rows.

    Sorted once: the ranks of a resample follow from the cumulated weights of the rows.

    Example:
        >>> Ranks(torch.tensor([[30.0], [10.0], [10.0]])).centred().flatten()
        tensor([ 1.0000, -0.5000, -0.5000], dtype=torch.float64)
    """

    def __init__(self, table: Tensor) -> None:
        columns = table.T.contiguous()
        ordered, order = columns.sort(dim=1)
        self._order = order.T
        self._below = torch.searchsorted(ordered, columns).T
        self._through = torch.searchsorted(ordered, columns, right=True).T

    def centred(self, weights: Tensor | None = None) -> Tensor:
        """Mid-ranks less their mean where row i occurs ``weights[:, i]`` times, ``[resamples, rows, columns]``.

        Without weights every row occurs once, in a single resample.
        """
        if weights is None:
            weights = torch.ones(1, len(self._order), dtype=torch.float64)
        cumulated = F.pad(weights[:, self._order].cumsum(1), (0, 0, 1, 0))
        shape = (len(weights), *self._order.shape)
        below, through = (cumulated.gather(1, at.expand(shape)) for at in (self._below, self._through))
        return 0.5 * (below + through - weights.sum(1).reshape(-1, 1, 1))


def rank_correlations(first: Ranks, second: Ranks, weights: Tensor | None = None) -> Tensor:
    """Spearman's correlation of each column in each resample, ``[resamples, columns]``; NaN where one is constant."""
    x, y = first.centred(weights), second.centred(weights)
    w = 1.0 if weights is None else weights.unsqueeze(2)
    return (w * x * y).sum(1) / ((w * x * x).sum(1) * (w * y * y).sum(1)).sqrt()


def draw_weights(count: int, size: int, generator: torch.Generator) -> Tensor:
    """How often each of ``size`` things occurs in ``size`` draws with replacement, ``[count, size]``."""
    drawn = torch.randint(size, (count, size), generator=generator, device=generator.device).cpu()
    ones = torch.ones(count, size, dtype=torch.float64)
    return torch.zeros(count, size, dtype=torch.float64).scatter_add_(1, drawn, ones)
