"""`OverDamping`: how scores and rankings change with λ, from the products of one solve."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from markupsafe import Markup
from torch import Tensor

from whence.errors import OptionError
from whence.libraries import data_frame
from whence.operators import check_damping
from whence.report import figures
from whence.report.notebook import card
from whence.solvers.shifted import Shifted

__all__ = ["OverDamping"]

#: Scores that the last product still moved by more of their size have not settled.
SETTLED = 0.1
#: Rankings that share less of their top ten within a factor of four of λ depend on it.
_SHARED, _FACTOR, _TOP = 0.7, 4.0, 10


@dataclass(frozen=True)
class OverDamping:
    """Scores for a range of λ.

    Attributes:
        dampings: λ, falling, ``[L]``.
        scores: ``[L, queries, scored]``.
        indices: which training examples these are.
        settled: whether the solve was long enough for this λ, ``[L]``: it was for its own and all larger ones, and for
            smaller ones whose scores the last product moved no more than its own.
        chosen: the λ of the solve.
    """

    dampings: Tensor
    scores: Tensor
    indices: Tensor
    settled: Tensor
    chosen: float

    @classmethod
    def of(cls, shifted: Shifted, dampings: Sequence[float], chosen: float, indices: Tensor) -> OverDamping:
        """From what a solve kept."""
        if not dampings:
            raise OptionError("dampings hold nothing; give at least one λ")
        for damping in dampings:
            check_damping(damping)
        enough = max(SETTLED, shifted.unsettled(chosen))
        return cls(
            torch.tensor(dampings, dtype=torch.float64),
            torch.stack([shifted.scores(damping)[:, indices] for damping in dampings]),
            indices,
            torch.tensor([d >= chosen or shifted.unsettled(d) <= enough for d in dampings]),
            chosen,
        )

    def ranks(self) -> Tensor:
        """Place of every example in its ranking, 0 for the most helpful, ``[L, queries, scored]``."""
        return self.scores.argsort(dim=-1, descending=True, stable=True).argsort(-1)

    def top(self, k: int = _TOP) -> Tensor:
        """The k most helpful examples, ``[L, queries, k]``."""
        return self.indices[self.scores.argsort(dim=-1, descending=True, stable=True)[..., :k]]

    def shared(self, k: int = _TOP) -> Tensor:
        """Which part of the top k of the chosen λ is in the top k of each λ, ``[L, queries]``."""
        top, own = self.top(k), int((self.dampings.log() - torch.tensor(self.chosen).log()).abs().argmin())
        found = [
            [len(set(a) & set(b)) / len(b) for a, b in zip(rows, top[own].tolist(), strict=True)]
            for rows in top.tolist()
        ]
        return torch.tensor(found)

    @property
    def near(self) -> Tensor:
        """Which λ are settled and within a factor of four of the chosen one, ``[L]``."""
        distance = (self.dampings.log() - torch.tensor(self.chosen).log()).abs()
        return self.settled & (distance <= torch.tensor(_FACTOR).log() + 1e-9)

    @property
    def depends(self) -> Tensor:
        """Whether a query's top ten is another one for a λ near the chosen one, ``[queries]``."""
        return self.shared()[self.near].amin(0) < _SHARED

    def words(self) -> str:
        """What to make of it, in a sentence."""
        depends, queries, looked_at = int(self.depends.sum()), self.scores.shape[1], self.dampings[self.near]
        between = f"between {float(looked_at.min()):.3g} and {float(looked_at.max()):.3g}"
        if not depends:
            return f"The top ten of every query are mostly the same for every λ {between}."
        whose = "this query" if queries == 1 else f"{depends} of {queries} queries"
        return f"The rankings of {whose} depend on λ: {between}, more than three of their top ten change."

    def to_pandas(self) -> Any:
        """A `pandas.DataFrame`, one row for each λ, query and scored example."""
        count, queries, scored = self.scores.shape
        return data_frame(
            {
                "damping": self.dampings.repeat_interleave(queries * scored).numpy(),
                "settled": self.settled.repeat_interleave(queries * scored).numpy(),
                "query": torch.arange(queries).repeat_interleave(scored).repeat(count).numpy(),
                "index": self.indices.repeat(count * queries).numpy(),
                "score": self.scores.flatten().numpy(),
                "rank": self.ranks().flatten().numpy() + 1,
            }
        )

    def figure(self) -> Markup | None:
        """How much of the top ten of the chosen λ every settled λ keeps, as a drawing; None where there is one λ."""
        return figures.kept_over_damping(
            self.dampings[self.settled].numpy(), self.shared()[self.settled].numpy(), self.chosen
        )

    def _repr_html_(self) -> str:
        return card("How the top of the rankings depends on λ", [self.words()], self.figure(), height=400)
