"""``until="top-10 stable"``: when to stop, in terms of what a reader of a ranking wants to know.

The k best of a query are *separated* when each of them exceeds each of the rest beyond the errors of their difference.
Of all those comparisons only a few are close; the confidence is shared between the ones that are (Bonferroni), so that
it holds for the set as a whole.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from whence.attribution.uncertainty import Scored
from whence.errors import OptionError

__all__ = ["Until", "top_is_separated"]

#: Differences of more than so many standard errors are not close.
_FAR = 8.0
#: Pairs looked at together.
_AT_ONCE = 4_000_000


@dataclass(frozen=True)
class Until:
    """Stop once the ``k`` most helpful examples of every query are separated from the rest.

    Attributes:
        k: how many.
        confidence: that the set is right, per query.
    """

    k: int
    confidence: float = 0.95

    @classmethod
    def parse(cls, text: str) -> Until:
        """From ``"top-10 stable"``, or ``"top-10 stable at 0.99"``."""
        found = re.fullmatch(r"top-(\d+) stable(?: at (0?\.\d+))?", text.strip())
        if found is None or int(found[1]) < 1:
            raise OptionError(
                f"until is {text!r}; write 'top-10 stable', or 'top-10 stable at 0.99' for another confidence"
            )
        return cls(int(found[1]), float(found[2] or 0.95))

    def __str__(self) -> str:
        return f"top-{self.k} stable at {self.confidence:g}"

    def words(self, separated: Tensor, rounds: int, *, ended: str) -> str:
        """What came of it."""
        queries, done = len(separated), int(separated.sum())
        whose = "the query" if queries == 1 else f"all {queries} queries"
        after = f"after {rounds} round{'' if rounds == 1 else 's'} of solving"
        if done == queries:
            return (
                f"The {self.k} most helpful examples of {whose} are separated from the rest at a confidence of "
                f"{self.confidence:g}, {after}."
            )
        return (
            f"{ended.capitalize()} {after}: the {self.k} most helpful examples are separated from the rest at a "
            f"confidence of {self.confidence:g} for {done} of {queries} queries, not for the others."
        )


def top_is_separated(scored: Scored, k: int, confidence: float) -> Tensor:
    """Whether each query's first k are separated from all others, ``[queries]``, from scores ``[queries, n]``."""
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
