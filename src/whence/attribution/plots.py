"""`Plots`: figures of a result for papers and notebooks, by matplotlib.

Pages draw their own, which need no library: `whence.report.figures`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from whence.errors import OptionError
from whence.report.drawing import COLOURS, figure
from whence.report.formatting import shorten
from whence.report.untrusted import visible

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from whence.attribution.result import Attribution

__all__ = ["Plots"]

_HELPS, _HARMS = COLOURS[0], COLOURS[1]
_NAME = 44  # letters of a name beside a score
_LINE = 92  # letters in a line of tokens
_LETTER, _SIZE = (
    0.602,
    9.0,
)  # width of a letter of the monospaced face in units of its size, and its size in points


@dataclass(frozen=True)
class Plots:
    """Figures of one result. Each call gives a new `matplotlib.figure.Figure`, which a notebook shows.

    Example:
        >>> result.plot.ranking(query=0).savefig("ranking.svg")  # doctest: +SKIP
    """

    result: Attribution

    def ranking(self, query: int = 0, k: int = 8, *, confidence: float = 0.95) -> Figure:
        """The k most helpful and the k most harmful examples with their scores and intervals.

        Hollow dots could change places with the next one, as far as the errors tell.
        """
        ends = [
            [row for row in self.result.top(k, query=query, confidence=confidence) if row.score > 0],
            [
                row
                for row in self.result.top(k, query=query, harmful=True, confidence=confidence)
                if row.score < 0
            ][::-1],
        ]
        rows = [row for end in ends for row in end]
        with figure(width=7.0, height=0.9 + 0.27 * len(rows)) as (drawn, (axes,)):
            axes.axvline(0.0, color="0.4", linewidth=0.8)
            for place, row in enumerate(rows):
                colour = _HELPS if row.score > 0 else _HARMS
                if math.isfinite(row.low) and math.isfinite(row.high):
                    axes.plot([row.low, row.high], [place, place], color=colour, linewidth=1.2)
                axes.plot(
                    row.score, place, "o", color=colour, markerfacecolor=colour if row.separated else "w"
                )
            axes.set_yticks(range(len(rows)), [self._name(row.index) for row in rows], parse_math=False)
            axes.invert_yaxis()
            axes.grid(visible=False, axis="y")
            axes.set_xlabel(f"score, with its {confidence:.0%} interval")
            axes.set_title("what helped and what harmed " + self._question(query), parse_math=False)
        return drawn

    def tokens(self, query: int = 0, index: int | None = None) -> Figure:
        """The words of a training text, shaded by their share of its score: blue helped, orange harmed.

        Args:
            query: which query.
            index: position in the training data; by default the most helpful example.
        """
        result, index = self.result, self.result.top(1, query=query)[0].index if index is None else index
        shares, exhibit = result.token_scores.get((query, index)), result.exhibits.get(index)
        if not shares or exhibit is None or not exhibit.tokens or len(shares) != len(exhibit.tokens):
            kept = sorted(i for q, i in result.token_scores if q == query)
            raise OptionError(
                f"no shares of tokens were kept of example {index} for query {query}; "
                + (f"they were of {kept[:10]}" if kept else "only texts at the ends of rankings have them")
            )
        largest = max((abs(share) for share in shares if math.isfinite(share)), default=0.0) or 1.0
        words, x, line = [], 0, 0
        for text, share in zip(exhibit.tokens, shares, strict=True):
            word = visible(text.replace("\n", "⏎"))
            if x and x + len(word) > _LINE:
                x, line = 0, line + 1
            words.append((x, line, word, share / largest if math.isfinite(share) else 0.0))
            x += len(word)
            if "\n" in text:
                x, line = 0, line + 1
        across, high = _LETTER * _SIZE * (_LINE + 2) / 72, (line + 1) * 2 * _SIZE / 72
        with figure(width=across, height=high + 0.45) as (drawn, (axes,)):
            drawn.set_layout_engine("none")
            axes.set_position((0.0, 0.0, 1.0, high / (high + 0.45)))
            axes.set_axis_off()
            axes.set_xlim(-1, _LINE + 1)
            axes.set_ylim(line + 0.9, -0.7)
            for start, at, word, share in words:
                ground = (_HELPS if share > 0 else _HARMS) + f"{round(200 * abs(share)):02x}"
                axes.barh(at, len(word), 0.86, start, color=ground, linewidth=0)
                drawn_word = axes.text(
                    start, at, word, family="DejaVu Sans Mono", fontsize=_SIZE, parse_math=False
                )
                drawn_word.set_verticalalignment("center_baseline")
            title = f"{self._name(index)}: score {float(result.scores[query, index]):.3g} for {self._question(query)}"
            axes.set_title(title, loc="left", x=1 / (_LINE + 2), parse_math=False)
        return drawn

    def convergence(self, query: int = 0) -> Figure:
        """``gᵀu`` along every chain of the solve: where the paths lie flat on each other, nothing is left to do."""
        paths = self.result.solve.paths[..., query].numpy()
        if paths.ndim != 2 or paths.shape[1] < 2:
            raise OptionError(
                f"no path of steps is kept of {self.result.solve.solver}: the quick answer takes none, and a mean of "
                "checkpoints has many; ask one model for an exact solve (solver='cg' or 'lissa')"
            )
        with figure(width=6.0) as (drawn, (axes,)):
            for chain, path in enumerate(paths):
                axes.plot(np.arange(1, len(path) + 1), path, label=f"chain {chain + 1}")
            if len(paths) > 1:
                axes.legend()
            known = paths[np.isfinite(paths)]
            if len(known) and known.min() > 0 and known.max() > 5 * known.min():
                axes.set_yscale("log")
            axes.set_xlabel(f"steps of {self.result.solve.solver}")
            axes.set_ylabel("gᵀu")
            axes.set_title("the solver's path for " + self._question(query), parse_math=False)
        return drawn

    def damping(self) -> Figure:
        """How much of every query's top ten other λ would keep; the λ of this result is the upright line."""
        over = self.result.over_damping()
        dampings, kept = over.dampings[over.settled].numpy(), over.shared()[over.settled].numpy()
        with figure(width=6.0) as (drawn, (axes,)):
            axes.vlines(dampings, kept.min(1), kept.max(1), color=COLOURS[5], linewidth=4, alpha=0.5)
            axes.plot(dampings, kept.mean(1), "o-", label="mean over the queries, and their range")
            axes.axvline(over.chosen, color=_HARMS, label=f"λ = {over.chosen:.3g}")
            axes.set_xscale("log")
            axes.set_ylim(0, 1.05)
            axes.set_xlabel("damping λ")
            axes.set_ylabel("part of the top ten that is the same")
            axes.legend(loc="lower right")
        return drawn

    def _name(self, index: int) -> str:
        """What to call a training example where there is little room; never markup."""
        exhibit = self.result.exhibits.get(index)
        words = [] if exhibit is None else [exhibit.id or "", exhibit.label or "", exhibit.note or ""]
        said = ", ".join(word for word in words if word)
        return shorten(visible(said or f"example {index}"), _NAME)

    def _question(self, query: int) -> str:
        name = self.result.queries[query].id or ""
        return shorten(visible(name if name != str(query) and name else f"query {query}"), _NAME)
