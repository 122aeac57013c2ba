"""Rankings with confidence: who is first, by how much, and whether the order means anything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Protocol, TypeVar, cast, overload

import torch
from torch import Tensor

from whence.attribution.scored import Scored
from whence.libraries import data_frame

__all__ = ["Ranking", "Row", "ends_of_rankings", "rank_examples", "top_is_separated"]

#: Differences of more than so many standard errors are not close.
_FAR = 8.0
#: Pairs looked at together.
_AT_ONCE = 4_000_000


@dataclass(frozen=True)
class Row:
    """One example's place in the ranking of one query.

    Attributes:
        query: which query.
        rank: 1 is the most helpful, or the most harmful where those were asked for.
        index: position in the training data.
        score, low, high: with its confidence interval.
        effect, effect_low, effect_high: nats by which the query's loss would change without this example.
        separated: whether the next rank is lower beyond the errors.
        dot_product, dot_product_rank: what the plain gradient dot product says; None if not computed.
        unit: the score over the length of the example's gradient; None where that is not known.
        solver_stderr, checkpoint_stderr: both parts of the score's standard error, of several checkpoints; else None.
        another_low, another_high: where the score of one more checkpoint should lie, as confidently; else None.
    """

    query: int
    rank: int
    index: int
    score: float
    low: float
    high: float
    effect: float
    effect_low: float
    effect_high: float
    separated: bool
    dot_product: float | None = None
    dot_product_rank: int | None = None
    unit: float | None = None
    solver_stderr: float | None = None
    checkpoint_stderr: float | None = None
    another_low: float | None = None
    another_high: float | None = None

    heading: ClassVar[str] = (
        f"{'query':>5} {'rank':>4} {'index':>8} {'score':>10} {'interval':>23} {'removal':>12}"
    )

    def __str__(self) -> str:
        interval = f"[{self.low:.4g}, {self.high:.4g}]"
        tie = "" if self.separated else "  ≈ next"
        another = ""
        if self.another_low is not None and self.another_high is not None:
            another = f"  another model [{self.another_low:.4g}, {self.another_high:.4g}]"
        return (
            f"{self.query:>5} {self.rank:>4} {self.index:>8} {self.score:>10.4g} {interval:>23} "
            f"{self.effect:>+8.2g} nat{another}{tie}"
        )


class _AnyRow(Protocol):
    """What a ranking asks of its rows: to print, and to become a table."""

    heading: ClassVar[str]

    @property
    def query(self) -> int: ...


R = TypeVar("R", bound=_AnyRow)


class Ranking(Sequence[R]):
    """Rows of one or several queries; prints as a table, and under it why its intervals cannot be trusted.

    Args:
        rows: in their order.
        doubts: about the result that they are of.
        errors: which error dominates, in words, of several checkpoints.
    """

    def __init__(self, rows: Sequence[R], doubts: Sequence[str] = (), errors: str = "") -> None:
        self._rows, self.doubts, self.errors = tuple(rows), tuple(doubts), errors

    @overload
    def __getitem__(self, index: int) -> R: ...
    @overload
    def __getitem__(self, index: slice) -> Ranking[R]: ...
    def __getitem__(self, index: int | slice) -> R | Ranking[R]:
        if isinstance(index, slice):
            return Ranking(self._rows[index], self.doubts, self.errors)
        return self._rows[index]

    def __len__(self) -> int:
        return len(self._rows)

    def of_query(self, query: int) -> Ranking[R]:
        """The rows of one query."""
        return Ranking([row for row in self._rows if row.query == query], self.doubts, self.errors)

    def to_pandas(self) -> Any:
        """A `pandas.DataFrame` with a column for every attribute of its rows; doubts are its ``attrs["doubts"]``."""
        frame = data_frame([asdict(cast(Any, row)) for row in self._rows])
        frame.attrs["doubts"] = list(self.doubts)
        return frame

    def __str__(self) -> str:
        heading = type(self._rows[0]).heading if self._rows else Row.heading
        notes = [*filter(None, [self.errors]), *(f"note: {doubt}" for doubt in self.doubts)]
        return "\n".join([heading, *map(str, self._rows), *notes])

    __repr__ = __str__


def rank_examples(
    scored: Scored, k: int, *, harmful: bool, confidence: float
) -> list[tuple[int, float, bool]]:
    """The first k of one query's scores: position, half width, and whether the next one is lower beyond the errors."""
    ordered = Scored(-scored.chains, scored.certified) if harmful else scored
    mean = ordered.mean
    count = min(k + 1, len(mean))  # one more, to compare the last with
    order = _stable_top(mean, count)
    chosen = ordered.at(order)
    width = chosen.half_width(confidence)
    apart: list[bool] = []
    if count > 1:
        apart = chosen.at(slice(None, -1)).above(chosen.at(slice(1, None)), confidence).tolist()
    apart += [True] * (min(k, len(mean)) - len(apart))  # the very last has no next to be confused with
    return [(int(position), float(width[i]), bool(apart[i])) for i, position in enumerate(order[:k].tolist())]


def _stable_top(values: Tensor, count: int) -> Tensor:
    """Positions of the largest values, equal ones by position, so that a ranking is reproducible."""
    if len(values) <= 100_000:
        return values.argsort(descending=True, stable=True)[:count]
    threshold = torch.topk(values, count).values[-1]
    above = (values >= threshold).nonzero().flatten()
    return above[values[above].argsort(descending=True, stable=True)][:count]


def top_is_separated(scored: Scored, k: int, confidence: float) -> Tensor:
    """Whether each query's first k are separated from all others, ``[queries]``, from scores ``[queries, n]``.

    They are when each of them exceeds each of the rest beyond the errors of their difference. Of all those comparisons
    only a few are close; the confidence is shared between the ones that are (Bonferroni), so that it holds for the set
    as a whole.
    """
    return torch.tensor(
        [_separated(scored.at(query), k, confidence) for query in range(scored.chains.shape[1])]
    )


def _separated(scored: Scored, k: int, confidence: float) -> bool:
    mean = scored.mean
    if len(mean) <= k:
        return True
    order = mean.argsort(descending=True, stable=True)
    top, rest = scored.at(order[:k].unsqueeze(1)), order[k:]
    close: list[Scored] = []
    for part in rest.split(max(1, _AT_ONCE // (k * len(scored.chains)))):
        difference = top.minus(scored.at(part.unsqueeze(0)))
        near = difference.mean <= _FAR * difference.stderr
        close.append(difference.at(near))
    pairs = Scored.join(close)
    count = pairs.mean.numel()
    if count == 0:
        return True
    shared = 1 - (1 - confidence) / count
    # one-sided: that the lower of a pair is really the higher
    return bool((pairs.mean > pairs.half_width(2 * shared - 1)).all())


def ends_of_rankings(chains: Tensor, dots: Tensor | None, shown: int, baseline: int = 5) -> list[list[int]]:
    """For each query, the positions (among the scored) of the examples that its page shows, by score or gradient."""
    chosen = []
    for q, mean in enumerate(chains.mean(0)):
        ends = {*_stable_top(mean, shown).tolist(), *_stable_top(-mean, shown).tolist()}
        if dots is not None:
            ends |= set(_stable_top(dots[q], baseline).tolist())
        chosen.append(sorted(ends))
    return chosen
