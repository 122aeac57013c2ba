"""Removal: what a query's loss becomes when examples are left out and the model is trained again.

    effect(G, q) = E_s [ ℓ(q; train(all - G, s)) - ℓ(q; train(all, s)) ]

Positive: the group helped the query. This is what ``score / n`` estimates, summed over the group: the same sign and
unit as `Attribution.effects`. Both trainings have the same seed, and the error is that of the mean difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import Tensor

from whence.attribution.scored import half_width
from whence.errors import OptionError
from whence.tasks import Task
from whence.validation.retraining import Outcomes, Trainer, mask_of, retrain
from whence.validation.statistics import standard_error

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["Brittleness", "RemovalEffects", "brittleness", "removal_effects"]


class RetrainingOptions(TypedDict, total=False):
    """Options of `whence.validation.retrain` that are handed on to it."""

    batch_size: int
    processes: int
    directory: str | Path | None
    name: str


@dataclass(frozen=True)
class RemovalEffects:
    """Effects of removing groups of examples.

    The runs on all data serve every group, so the effects of two groups share part of their error.

    Attributes:
        outcomes: of training on all data, then on all data without each group.
        groups: positions of the examples of each group.
    """

    outcomes: Outcomes
    groups: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if len(self.outcomes.subsets) != len(self.groups) + 1 or not bool(self.outcomes.subsets[0].all()):
            raise OptionError(
                f"{len(self.outcomes.subsets)} subsets do not fit {len(self.groups)} groups; the first must be all "
                "data, the others all data without each group"
            )

    @property
    def differences(self) -> Tensor:
        """``ℓ`` without the group less ``ℓ`` with all data, seed by seed: ``[groups, seeds, queries]``."""
        return self.outcomes.losses[1:] - self.outcomes.losses[:1]

    @property
    def effects(self) -> Tensor:
        """Nats by which each query's loss rises without each group, ``[groups, queries]``."""
        return self.differences.mean(1)

    @property
    def stderr(self) -> Tensor:
        """Standard errors of the effects, ``[groups, queries]``; NaN where there is only one seed."""
        return standard_error(self.differences, 1)

    def interval(self, confidence: float = 0.95) -> tuple[Tensor, Tensor]:
        """Ends of the Student-t confidence intervals over seeds, ``[groups, queries]`` each."""
        seeds = len(self.outcomes.seeds)
        if seeds < 2:
            raise OptionError("there is one seed, which tells nothing of the error; train with several")
        width = half_width(self.stderr, seeds - 1, confidence)
        return self.effects - width, self.effects + width

    def predicted(self, effects: Tensor) -> Tensor:
        """What an attribution predicts: its `Attribution.effects` ``[queries, n]`` summed over each group.

        Returns:
            ``[groups, queries]``, to be compared with `effects`.
        """
        n = self.outcomes.subsets.shape[1]
        if effects.ndim != 2 or effects.shape[1] != n:
            raise OptionError(f"effects have shape {tuple(effects.shape)}; it must be [queries, {n}]")
        return torch.stack([effects[:, list(group)].double().sum(1) for group in self.groups])


def removal_effects(
    train: Trainer,
    num_examples: int,
    groups: Sequence[int | Sequence[int] | Tensor],
    queries: Any,
    *,
    task: Task,
    seeds: Sequence[int],
    **options: Unpack[RetrainingOptions],
) -> RemovalEffects:
    """Train on all data, and on all data without each group, with the same seeds.

    ``groups`` hold positions of examples to remove together; a single position is a group of one (leave-one-out).
    ``num_examples`` is that of the training data. Differences are paired over the seeds. The rest is as for `retrain`.
    """
    if not groups:
        raise OptionError("there is no group to remove; give at least one")
    removed = torch.stack([mask_of(g, num_examples, f"group {k}") for k, g in enumerate(groups)])
    for number, size in enumerate(removed.sum(1).tolist()):
        if not 0 < size < num_examples:
            raise OptionError(
                f"group {number} has {size} of {num_examples} examples; remove at least one and not all"
            )
    kept = torch.cat([torch.ones(1, num_examples, dtype=torch.bool), ~removed])
    outcomes = retrain(train, kept, seeds, queries, task=task, **options)
    return RemovalEffects(outcomes, tuple(tuple(mask.nonzero().flatten().tolist()) for mask in removed))


@dataclass(frozen=True)
class Brittleness:
    """How a query's loss rises without its most helpful examples, and without as many random ones.

    The error of a random mean has two sources, which examples are drawn and which seeds are trained with:
    ``σ² = σ²_draws / draws + σ²_seeds / seeds``. Each is measured by the spread of means over the other. What the two
    share is counted twice, so the errors are a little too large rather than too small.

    Attributes:
        outcomes: of training on all data; without the top k, query by query and k by k; and without k random
            examples, draw by draw and k by k.
        counts: the numbers k of examples that were removed.
        top: positions of each query's most helpful examples, best first, ``[queries, largest k]``.
    """

    outcomes: Outcomes
    counts: tuple[int, ...]
    top: Tensor

    @property
    def top_changes(self) -> Tensor:
        """Change of each query's loss without its own top k, ``[queries, counts, seeds]``."""
        own = torch.arange(len(self.top))
        changes: Tensor = self._removals()[own, :, :, own]
        return changes

    @property
    def random_changes(self) -> Tensor:
        """Change of each query's loss without k random examples, ``[draws, queries, counts, seeds]``."""
        return self._removals()[len(self.top) :].permute(0, 3, 1, 2)

    @property
    def effects(self) -> Tensor:
        """Mean over seeds of `top_changes`, ``[queries, counts]``."""
        return self.top_changes.mean(2)

    @property
    def stderr(self) -> Tensor:
        """Standard errors of `effects`; NaN where there is only one seed."""
        return standard_error(self.top_changes, 2)

    @property
    def random_effects(self) -> Tensor:
        """Mean over draws and seeds of `random_changes`, ``[queries, counts]``."""
        return self.random_changes.mean((0, 3))

    @property
    def random_stderr(self) -> Tensor:
        """Standard errors of `random_effects`."""
        return torch.hypot(self._draw_error(), standard_error(self.random_changes.mean(0), 2))

    @property
    def excess(self) -> Tensor:
        """How much more the top k cost than k random examples, ``[queries, counts]``."""
        return self.effects - self.random_effects

    @property
    def excess_stderr(self) -> Tensor:
        """Standard errors of `excess`, paired over seeds."""
        paired = self.top_changes - self.random_changes.mean(0)
        return torch.hypot(self._draw_error(), standard_error(paired, 2))

    def _removals(self) -> Tensor:
        """``[queries + draws, counts, seeds, queries]``."""
        changes = self.outcomes.losses[1:] - self.outcomes.losses[:1]
        removals: Tensor = changes.unflatten(0, (-1, len(self.counts)))
        return removals

    def _draw_error(self) -> Tensor:
        return standard_error(self.random_changes.mean(3), 0)


def brittleness(
    train: Trainer,
    scores: Tensor,
    queries: Any,
    *,
    task: Task,
    seeds: Sequence[int],
    counts: Sequence[int],
    generator: torch.Generator,
    draws: int = 4,
    **options: Unpack[RetrainingOptions],
) -> Brittleness:
    """Remove each query's k most helpful examples by score, for several k, and k random ones; train again.

    There are ``1 + (queries + draws) · len(counts)`` subsets to train on with each seed. The random examples of one
    draw are nested, as the most helpful are, and serve every query.

    ``scores`` are ``[queries, n]``, positive where training on the example lowers the query's loss; examples with NaN
    were not scored, and are not among the most helpful. ``counts`` are the numbers k. The generator draws the random
    examples, ``draws`` times. The rest is as for `removal_effects`.
    """
    if scores.ndim != 2 or len(scores) != len(queries):
        raise OptionError(
            f"scores have shape {tuple(scores.shape)} for {len(queries)} queries; it must be [queries, n]"
        )
    n = scores.shape[1]
    most = min(int((~scores.isnan()).sum(1).min()), n - 1)
    if not counts or min(counts) < 1 or max(counts) > most:
        raise OptionError(f"counts are {list(counts)}; give numbers of examples to remove, from 1 to {most}")
    if draws < 2:
        raise OptionError(f"draws is {draws}; an error needs at least 2")
    ranked = scores.detach().cpu().double().nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    top = ranked.argsort(dim=1, descending=True, stable=True)[:, : max(counts)]
    drawn = [torch.randperm(n, generator=generator, device=generator.device).cpu() for _ in range(draws)]
    groups = [order[:k] for order in (*top, *drawn) for k in counts]
    found = removal_effects(train, n, groups, queries, task=task, seeds=seeds, **options)
    return Brittleness(found.outcomes, tuple(int(k) for k in counts), top)
