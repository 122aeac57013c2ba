"""The linear datamodeling score: do scores predict what training on other subsets of the data would give?

    prediction(S, q) = Σ_{i in S} score(q, i),      truth(S, q) = - mean over seeds of ℓ(q; train(S, s))
    LDS = mean over queries of the Spearman correlation of the two over subsets

Its interval, the comparison of two methods and the noise ceiling are derived in docs/math.md, 'Linear datamodeling
score'.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from whence.arguments import checked
from whence.errors import DataError, OptionError
from whence.validation.retraining import Outcomes
from whence.validation.statistics import Ranks, draw_weights, rank_correlations

__all__ = [
    "Bench",
    "DatamodelingDifference",
    "DatamodelingScore",
    "compare_datamodeling_scores",
    "linear_datamodeling_score",
]

_MOST_SPLITS = 128
_NUMBERS_AT_ONCE = 100_000  # what fits into a processor's cache


@dataclass(frozen=True)
class DatamodelingScore:
    """A linear datamodeling score with its confidence interval.

    Attributes:
        value: mean over queries of `per_query`, undefined ones left out.
        low, high: ends of the bootstrap interval of this confidence.
        per_query: Spearman correlation over subsets, ``[queries]``; NaN where undefined.
        undefined: query -> why it has no correlation.
        split_half: the LDS that the mean of half of the seeds has against the mean of as many others, averaged over
            ways to split; None with one seed.
        num_subsets, num_seeds: of the truth.
    """

    value: float
    low: float
    high: float
    stderr: float
    confidence: float
    per_query: Tensor
    undefined: Mapping[int, str]
    split_half: float | None
    num_subsets: int
    num_seeds: int

    @property
    def ceiling(self) -> float | None:
        """About what the expected loss itself would score, had one trained with infinitely many seeds.

        From the split-half r of ``h = ⌊seeds/2⌋`` by Spearman and Brown: ``√(k r / (1 + (k - 1) r))``, ``k = seeds/h``.
        """
        if self.split_half is None:
            return None
        r, k = max(self.split_half, 0.0), self.num_seeds / (self.num_seeds // 2)
        return math.sqrt(k * r / (1 + (k - 1) * r))

    def __str__(self) -> str:
        queries = len(self.per_query)
        text = (
            f"LDS {self.value:.3f} [{self.low:.3f}, {self.high:.3f}] ({self.confidence:.0%}; "
            f"{self.num_subsets} subsets × {self.num_seeds} seeds, {queries} {'query' if queries == 1 else 'queries'})"
        )
        if self.ceiling is not None:
            text += f", noise ceiling {self.ceiling:.3f}"
        if self.undefined:
            text += f", {len(self.undefined)} queries without a correlation"
        return text


@dataclass(frozen=True)
class DatamodelingDifference:
    """By how much one method's LDS exceeds another's, from the same resamples.

    Attributes:
        value: mean over the queries for which both are defined of first less second.
        low, high, stderr: of the difference.
    """

    first: DatamodelingScore
    second: DatamodelingScore
    value: float
    low: float
    high: float
    stderr: float

    @property
    def separated(self) -> bool:
        """Whether the interval leaves out zero."""
        return self.low > 0 or self.high < 0

    def __str__(self) -> str:
        return (
            f"{self.first.value:.3f} - {self.second.value:.3f} = {self.value:+.3f} [{self.low:+.3f}, {self.high:+.3f}] "
            f"({self.first.confidence:.0%})"
        )


@checked()
def linear_datamodeling_score(
    scores: Tensor,
    outcomes: Outcomes,
    *,
    confidence: float = 0.95,
    bootstrap: int = 1000,
    generator: torch.Generator,
) -> DatamodelingScore:
    """The LDS of scores against what training on subsets gave.

    Args:
        scores: ``[queries, n]``, positive where training on the example lowers the query's loss, as
            `Attribution.scores` (or `Attribution.effects`, where examples differ in length).
        outcomes: of `retrain` on random subsets, such as `half_subsets`.
        confidence: of the interval.
        bootstrap: number of resamples.
        generator: draws them.

    Example:
        >>> from whence.validation import half_subsets
        >>> g = torch.Generator().manual_seed(0)
        >>> subsets = half_subsets(8, 20, generator=g)
        >>> helps = torch.arange(8.0, dtype=torch.float64).repeat(3, 1)
        >>> outcomes = Outcomes(-(subsets.double() @ helps.T).unsqueeze(1), subsets, seeds=(0,))
        >>> linear_datamodeling_score(helps, outcomes, generator=g).value
        1.0
    """
    bench = Bench(outcomes, confidence, bootstrap, generator)
    return bench.score(*bench.correlations(scores))


def compare_datamodeling_scores(
    first: Tensor,
    second: Tensor,
    outcomes: Outcomes,
    *,
    confidence: float = 0.95,
    bootstrap: int = 1000,
    generator: torch.Generator,
) -> DatamodelingDifference:
    """The LDS of two methods on the same outcomes, and the interval of their difference.

    The difference is often known far better than either: both meet the same lucky and unlucky subsets. ``first`` and
    ``second`` are the scores of the two methods; the rest is as for `linear_datamodeling_score`.
    """
    bench = Bench(outcomes, confidence, bootstrap, generator)
    one, other = bench.correlations(first), bench.correlations(second)
    return bench.difference(one, other)


class Bench:
    """Outcomes, and the resamples of subsets (rows) and queries (columns) that every method is measured on."""

    def __init__(
        self, outcomes: Outcomes, confidence: float, bootstrap: int, generator: torch.Generator
    ) -> None:
        if not 0 < confidence < 1:
            raise OptionError(f"confidence is {confidence}; it is a probability, such as 0.95")
        needed = math.ceil(2 / (1 - confidence))
        if bootstrap < needed:
            raise OptionError(
                f"bootstrap is {bootstrap}; an interval of {confidence:.0%} needs at least {needed} resamples, better "
                "1000"
            )
        self.subsets, self.queries = outcomes.mean.shape
        if self.subsets < 3:
            raise OptionError(f"there are {self.subsets} subsets; a correlation over them needs at least 3")
        self.outcomes, self.confidence = outcomes, confidence
        self.truth = Ranks(-outcomes.mean)
        self.rows = draw_weights(bootstrap, self.subsets, generator)
        self.columns = draw_weights(bootstrap, self.queries, generator)
        self.split_half = _split_half(outcomes, generator)

    def correlations(self, scores: Tensor, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Of a method's predictions with the truth: ``[queries]``, and ``[bootstrap, queries]`` in the resamples.

        ``rows`` are other resamples of subsets than the bench's own: how often each occurs, ``[resamples, subsets]``.
        """
        n = self.outcomes.subsets.shape[1]
        if scores.shape != (self.queries, n):
            raise OptionError(
                f"scores have shape {tuple(scores.shape)}; it must be [{self.queries}, {n}], as there are outcomes of "
                f"{self.queries} queries and {n} examples"
            )
        scores = scores.detach().cpu().double()
        unknown = (~torch.isfinite(scores)).any(0).nonzero().flatten()
        if len(unknown):
            raise DataError(
                f"{len(unknown)} examples have scores that are NaN or infinite (the first is {int(unknown[0])}); score "
                "every example that subsets were drawn from"
            )
        predictions = self.outcomes.subsets.double() @ scores.T
        # Sums of the same numbers in another order differ by rounding, which must not be ranked.
        same = predictions.amax(0) - predictions.amin(0) <= 1e-12 * scores.abs().sum(1)
        predictions[:, same] = 0.0
        ranks, rows = Ranks(predictions), self.rows if rows is None else rows
        chunks = rows.split(max(1, _NUMBERS_AT_ONCE // (self.subsets * self.queries)))
        resampled = torch.cat([rank_correlations(ranks, self.truth, chunk) for chunk in chunks])
        return rank_correlations(ranks, self.truth)[0], resampled

    def difference(self, one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> DatamodelingDifference:
        """From the correlations of two methods."""
        found = self.interval(one[0] - other[0], one[1] - other[1])
        return DatamodelingDifference(self.score(*one), self.score(*other), *found)

    def means(self, resampled: Tensor) -> Tensor:
        """The LDS in every resample, of subsets and queries, ``[bootstrap]``; NaN where no query has one."""
        weights = self.columns * ~resampled.isnan()
        return (weights * resampled.nan_to_num()).sum(1) / weights.sum(1)

    def score(self, per_query: Tensor, resampled: Tensor) -> DatamodelingScore:
        """From the correlations of a method."""
        value, low, high, stderr = self.interval(per_query, resampled)
        flat = self.outcomes.mean.amax(0) == self.outcomes.mean.amin(0)
        return DatamodelingScore(
            value=value,
            low=max(low, -1.0),
            high=min(high, 1.0),
            stderr=stderr,
            confidence=self.confidence,
            per_query=per_query,
            undefined={
                query: "its loss is the same after training on any of the subsets"
                if bool(flat[query])
                else "its scores predict the same for each of the subsets"
                for query in per_query.isnan().nonzero().flatten().tolist()
            },
            split_half=self.split_half,
            num_subsets=self.subsets,
            num_seeds=len(self.outcomes.seeds),
        )

    def interval(self, per_query: Tensor, resampled: Tensor) -> tuple[float, float, float, float]:
        """Value, low, high and standard error of a mean over queries."""
        defined = ~per_query.isnan()
        means = self.means(torch.where(defined, resampled, math.nan))
        per_query, resampled, means = per_query[defined], resampled[:, defined], means[~means.isnan()]
        value = float(per_query.mean())
        if len(means) < 2:
            return value, math.nan, math.nan, math.nan
        variance = _variance(per_query, resampled)
        shrink = math.sqrt(min(1.0, variance / max(float(means.var()), 1e-300)))
        tail = (1 - self.confidence) / 2
        ends = means.quantile(torch.tensor([tail, 1 - tail], dtype=torch.float64))
        # Correlations over few subsets are a little too small; those of resamples are so by as much again.
        mean = means.mean()
        low, high = (2 * value - mean + shrink * (ends - mean)).tolist()
        return value, min(low, value), max(high, value), math.sqrt(variance)


def _variance(per_query: Tensor, resampled: Tensor) -> float:
    """Of the mean over queries: ``σ²_subsets + σ²_queries - σ²_both``; ``resampled`` has other subsets only."""
    deviations = (resampled - per_query).nan_to_num()
    shared = deviations.mean(1)
    of_subsets, count = float(shared.var()), len(per_query)
    if count < 2:
        return of_subsets
    of_queries = float(per_query.var()) / count
    of_both = float((deviations - shared.unsqueeze(1)).var(0).sum()) / (count * (count - 1))
    return max(of_subsets + of_queries - of_both, of_subsets, of_queries)


def _split_half(outcomes: Outcomes, generator: torch.Generator) -> float | None:
    """The mean LDS of half of the seeds against the other half."""
    if len(outcomes.seeds) < 2:
        return None
    values = []
    for halves in _halvings(len(outcomes.seeds), generator):
        first, second = (Ranks(outcomes.losses[:, half].mean(1)) for half in halves)
        values.append(float(rank_correlations(first, second).nanmean()))
    return math.fsum(values) / len(values)


def _halvings(seeds: int, generator: torch.Generator) -> list[tuple[list[int], list[int]]]:
    """All ways to part the seeds in two equal halves (one is left over where they are odd), or some of many."""
    half, everyone = seeds // 2, range(seeds)
    if math.comb(seeds, half) * math.comb(seeds - half, half) > 2 * _MOST_SPLITS:
        drawn = [
            torch.randperm(seeds, generator=generator, device=generator.device).tolist()
            for _ in range(_MOST_SPLITS)
        ]
        return [(order[:half], order[half : 2 * half]) for order in drawn]
    return [
        (list(first), list(second))
        for first in itertools.combinations(everyone, half)
        for second in itertools.combinations([seed for seed in everyone if seed not in first], half)
        if first < second
    ]
