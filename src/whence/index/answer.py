"""`Answer`: what an index says to some questions."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from whence.attribution.ranking import Ranking, Row
from whence.attribution.result import Attribution
from whence.attribution.scored import half_width

__all__ = ["Answer"]


@dataclass(frozen=True)
class Answer:
    """Estimates of all scores, and the best of them scored again.

    Attributes:
        result: an ordinary result about the examples that were scored again, without the index's error.
        estimates: scores of all examples from the index, ``[queries, train]``.
        stderr: their standard errors: how far they are from the scores that `result` has, ``[queries, train]``.
    """

    result: Attribution
    estimates: Tensor
    stderr: Tensor

    def __repr__(self) -> str:
        return f"Answer({self.result!r})"

    def interval(self, confidence: float = 0.95) -> tuple[Tensor, Tensor]:
        """Ends of the estimates' confidence intervals, ``[queries, train]`` each."""
        width = half_width(self.stderr, float("inf"), confidence)
        return self.estimates - width, self.estimates + width

    def top(self, k: int = 5, *, query: int | None = None, harmful: bool = False) -> Ranking[Row]:
        """The k most helpful (or harmful) examples, as `Attribution.top` has them."""
        return self.result.top(k, query=query, harmful=harmful)
