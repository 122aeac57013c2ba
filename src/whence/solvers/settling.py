"""`Settling`: what the error that is left means for the scores, as the steps so far have shown it.

A product passes by the slopes ``∇ℓ(z)ᵀv`` of all examples z (`LinearOperator.matvec_with_slopes`), so how far a step
has moved the scores costs nothing to know. With b the proven bound of ``‖e_j‖_A`` and variances over examples, of the
last few steps,

    visible² = Σ_k Var_z ∇ℓ(z)ᵀ(x_k - x_{k-1}) / Σ_k ‖x_k - x_{k-1}‖²_A
    loose²   = (b²_{j-2} - b²_j) / (‖e_{j-2}‖²_A - ‖e_j‖²_A)
    ε        = visible · b_j / (loose · 1.2 · std_z ∇ℓ(z)ᵀx_j)

is the error to be expected of the scores, relative to their spread: that of a correlation of about ``1 - ε²/2``. Proven
is b alone. Why: docs/math.md, "When scores have settled".
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

__all__ = ["Settling"]

#: Steps that tell how visible an error is: several, since single ones vary.
_STEPS = 3
#: By how much what was removed is more visible than what is left; the first steps after a preconditioner's good guess
#: are not.
_FLATTER = 1.2
#: Steps that tell how loose the bound is, and what is believed of that at most: where they hardly moved, it is noise.
_BACK, _LOOSEST = 2, 1.7
#: Of fewer examples than this, scores have no spread to speak of.
_FEWEST = 8
#: Examples that are looked at; of more, every second, third, …
_EXAMPLES = 2**16
_TINY = torch.finfo(torch.float64).tiny


@dataclass
class Settling:
    """Scores of the examples along the way.

    Attributes:
        scores: of the iterate, ``[columns, examples]``.
        along: slopes along the last search direction S_j.
        moved: the variance over examples of what each step changed of the scores, per column.
        removed: what it removed of ``‖e‖²_A``, per column.
        bounds: b² after each step, per column.
    """

    scores: Tensor
    along: Tensor | None = None
    moved: list[list[float]] = field(default_factory=list)
    removed: list[list[float]] = field(default_factory=list)
    bounds: list[list[float]] = field(default_factory=list)

    @classmethod
    def begin(cls, slopes: Tensor, *, columns: int | None = None) -> Settling | None:
        """At a start with these slopes; or, for so many columns, at zero. None if there are too few examples."""
        slopes = _looked_at(slopes)
        if slopes.shape[1] < _FEWEST:
            return None
        return cls(slopes.clone() if columns is None else slopes.new_zeros(columns, slopes.shape[1]))

    def step(self, slopes: Tensor, ratio: Tensor | None, step: Tensor, removed: Tensor) -> None:
        """After ``S_j = Z_j - S_{j-1}·ratio`` and ``x_j = x_{j-1} + S_j·step``; slopes are those along Z_j."""
        along = _looked_at(slopes)
        if ratio is not None and self.along is not None:
            along = along - ratio.T @ self.along
        change = step.T @ along
        self.along, self.scores = along, self.scores + change
        self.moved.append(_variance(change).tolist())
        self.removed.append(removed.tolist())

    def bounded(self, upper: Tensor) -> None:
        """What is proven after the step: b."""
        self.bounds.append(upper.square().tolist())

    def error(self, upper: Tensor) -> Tensor:
        """ε of every column; infinite before the first step. ``upper``: b, as `bounded` was told or measured again."""
        if not self.moved:
            return torch.full_like(upper, math.inf)
        moved, removed = (_last(rows, _STEPS).sum(0) for rows in (self.moved, self.removed))
        visible = moved / removed.clamp_min(_TINY)
        # a column of zeros has no error, and no scores
        size = _variance(self.scores)
        flatter = _FLATTER if len(self.moved) >= _STEPS else 1.0
        found = visible.sqrt() * upper / (flatter * self._loose() * size.sqrt()).clamp_min(_TINY)
        return torch.where((size == 0) & (moved == 0) & (upper == 0), torch.zeros_like(found), found)

    def _loose(self) -> Tensor:
        """By how much b is too large, per column: 1 where there is nothing to compare it with."""
        back = min(_BACK, len(self.bounds) - 1)
        if back < 1 or len(self.bounds) != len(self.removed):
            return torch.ones(len(self.scores), dtype=torch.float64)
        bounds = _last(self.bounds, back + 1)
        fell, removed = bounds[0] - bounds[-1], _last(self.removed, back).sum(0)
        found = (fell.clamp_min(0.0) / removed.clamp_min(_TINY)).sqrt().clamp(1.0, _LOOSEST)
        return torch.where(fell.isfinite(), found, torch.ones_like(found))  # nothing was proven before


def _last(rows: list[list[float]], count: int) -> Tensor:
    return torch.tensor(rows[-count:], dtype=torch.float64)


def _looked_at(slopes: Tensor) -> Tensor:
    return slopes[:, :: -(-slopes.shape[1] // _EXAMPLES)]


def _variance(rows: Tensor) -> Tensor:
    return rows.var(1, correction=0)
