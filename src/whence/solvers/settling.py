"""`Settling`: what the error that is left means for the scores, as the steps so far have shown it.

Conjugate gradients bound what is left of the error in the energy norm, ``‖e_j‖_A ≤ b``, and know what each step removed
of it, ``‖x_k - x_{k-1}‖²_A``. How much of an error the *scores* of examples show is another matter. A passage's score
averages over its tokens, whose errors cancel where its signal adds up; a model that is sure of its training labels has
examples whose gradients are not those of the labels that it would draw; a flat direction hardly moves any score. No
spectrum knows, but the steps do: a product passes by the slopes ``∇ℓ(z)ᵀv`` of all examples z
(`LinearOperator.matvec_with_slopes`), so how far a step has moved the scores costs nothing to know. With variances over
examples, of the last few steps,

    visible² = Σ_k Var_z ∇ℓ(z)ᵀ(x_k - x_{k-1}) / Σ_k ‖x_k - x_{k-1}‖²_A
    ε        = visible · b / (1.6 · std_z ∇ℓ(z)ᵀx_j)

is the error to be expected of the scores, relative to their spread: that of a correlation of about ``1 - ε²/2``. Two
things make ``visible · b`` too large, by 1.6 together: b is a bound, and what is left lies in flatter directions than
what was removed, which scores show less. ``python -m benchmarks.solvers`` shows both sides. Proven is b alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

__all__ = ["Settling"]

#: Steps that tell how visible an error is: several, since single ones vary.
_STEPS = 3
#: By how much the product of bound and visibility is too large after 1, 2, 3 and more steps: the first ones after a
#: preconditioner's good guess are no more visible than what they leave.
_TOO_LARGE = (1.0, 1.3, 1.6)
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
    """

    scores: Tensor
    along: Tensor | None = None
    moved: list[list[float]] = field(default_factory=list)
    removed: list[list[float]] = field(default_factory=list)

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

    def error(self, upper: Tensor) -> Tensor:
        """ε of every column, from the bounds of ``‖e‖_A``; infinite before the first step.

        Args:
            upper: b.
        """
        if not self.moved:
            return torch.full_like(upper, math.inf)
        moved, removed = (
            torch.tensor(rows[-_STEPS:], dtype=torch.float64).sum(0) for rows in (self.moved, self.removed)
        )
        visible = moved / removed.clamp_min(_TINY)
        # a column of zeros has no error, and no scores
        size = _variance(self.scores)
        too_large = _TOO_LARGE[min(len(self.moved), len(_TOO_LARGE)) - 1]
        found = visible.sqrt() * upper / (too_large * size.sqrt()).clamp_min(_TINY)
        return torch.where((size == 0) & (moved == 0) & (upper == 0), torch.zeros_like(found), found)


def _looked_at(slopes: Tensor) -> Tensor:
    return slopes[:, :: -(-slopes.shape[1] // _EXAMPLES)]


def _variance(rows: Tensor) -> Tensor:
    return rows.var(1, correction=0)
