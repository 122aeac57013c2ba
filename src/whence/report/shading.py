"""Texts shaded token by token by their share of the score."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from whence.exhibit import Exhibit
from whence.report.formatting import signed
from whence.report.untrusted import visible

__all__ = ["LEVELS", "Token", "shade", "strongest"]

LEVELS = 10  # depths of shading, each a class in style.css: the page's policy allows no inline styles


@dataclass(frozen=True)
class Token:
    """A token as it is shown.

    Attributes:
        text: what it says, with hidden characters made visible.
        score: its share of the example's score.
        look: class names: ``p1`` … ``p10`` for helpful, ``n1`` … ``n10`` for harmful, ``nl`` for a line break.
    """

    text: str
    score: float
    look: str

    @property
    def tip(self) -> str:
        """Its score, in words for a tooltip."""
        return signed(self.score)


def shade(exhibit: Exhibit | None, scores: Sequence[float] | None) -> tuple[Token, ...]:
    """The exhibit's tokens with their shading, deepest at the text's own largest score.

    Empty if there are no tokens, or if scores and tokens do not match one to one: a shading that is off by one
    would mislead, plain text does not.

    Example:
        >>> [t.look for t in shade(Exhibit(tokens=("a", "b", "c")), (2.0, -1.0, math.nan))]
        ['t p10', 't n5', 't']
    """
    if exhibit is None or not exhibit.tokens or scores is None or len(scores) != len(exhibit.tokens):
        return ()
    largest = max((abs(score) for score in scores if math.isfinite(score)), default=0.0)
    return tuple(
        Token(visible(text), score, _look(text, score, largest))
        for text, score in zip(exhibit.tokens, scores, strict=True)
    )


def _look(text: str, score: float, largest: float) -> str:
    level = round(LEVELS * abs(score) / largest) if largest > 0 and math.isfinite(score) else 0
    shading = f" {'p' if score > 0 else 'n'}{level}" if level else ""
    return f"t{shading}{' nl' if text.strip(' ') == chr(10) else ''}"


def strongest(tokens: Sequence[Token], most: int = 5) -> tuple[Token, ...]:
    """The tokens with the largest scores, for readers who see no colours or have no pointer."""
    known = [token for token in tokens if math.isfinite(token.score) and token.score != 0]
    return tuple(sorted(known, key=lambda token: -abs(token.score))[:most])
