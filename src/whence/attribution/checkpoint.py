"""`Checkpoint`: one of several models whose scores were averaged; and which of the mean's two errors is the larger.

Scores are of one set of weights, and training could as well have ended in others: with another seed, or some steps
earlier. Over K checkpoints the score is the mean, and two errors are known of it.

*The solver's*: how far the mean may be from the exact damped scores of these very checkpoints. The errors of all solves
are taken to point the same way, so it is the mean of theirs: one that they share does not average out.

*Between checkpoints*: with s the standard deviation of the K scores, ``s/√K`` is the standard error of their mean,
as a measurement of the mean over all checkpoints that training could have led to; and ``s √(1 + 1/K)`` is how far the
score of one more checkpoint is from the mean. Both with Student's t of K - 1 degrees of freedom.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from whence.attribution.result import Attribution

__all__ = ["Checkpoint", "correlation", "dominant_error"]


@dataclass(frozen=True)
class Checkpoint:
    """One of several models.

    Attributes:
        name: as it was called; else its place among the models that were given, from 1.
        model: its fingerprint.
        solver: which one it was.
        damping: its λ.
        damping_words: how that was found.
        converged: whether each query was solved for as far as was asked, or as the budget went.
        residual: as of `whence.Statistics`, of each query.
        losses: of the queries, in nats.
        doubts: why the intervals of its own scores cannot be trusted; empty where nothing speaks against them.
    """

    name: str
    model: str
    solver: str
    damping: float
    damping_words: str
    converged: Tensor
    residual: Tensor
    losses: Tensor
    doubts: tuple[str, ...] = ()


def _root_mean_square(of: Tensor) -> float:
    """Of everything that is known."""
    return math.sqrt(float(of.double().nan_to_num(0.0).square().mean()))


def dominant_error(result: Attribution) -> str:
    """Which of the two errors of a mean over checkpoints dominates, in a sentence or two; empty for one model."""
    scored, count = result.scored, len(result.checkpoints)
    if not count:
        return ""
    size = max(_root_mean_square(scored.mean), 1e-300)
    solver, between = (_root_mean_square(part) / size for part in (scored.systematic, scored.sampling))
    if max(solver, between) == 0:
        return f"The {count} checkpoints have the same scores, and the solver’s error is zero."
    larger, remedy = "solver’s error", "a higher accuracy would narrow the intervals, more checkpoints hardly"
    if between >= solver:
        larger, remedy = (
            f"spread between the {count} checkpoints",
            "more checkpoints would narrow the intervals, a higher accuracy hardly",
        )
    return (
        f"The {larger} dominates: of the size of the scores, in root mean square, their mean is uncertain by "
        f"{between:.2g} between checkpoints and by {solver:.2g} from the solver; {remedy}."
    )


def correlation(a: Tensor, b: Tensor) -> Tensor:
    """Of two lists of scores, over the last dimension."""
    if a.shape[-1] < 2:
        return torch.ones(a.shape[:-1], dtype=a.dtype)
    a, b = a - a.mean(-1, keepdim=True), b - b.mean(-1, keepdim=True)
    result: Tensor = (a * b).sum(-1) / (a.norm(dim=-1) * b.norm(dim=-1)).clamp_min(1e-300)
    return result
