"""`Groups`: what whole groups of training examples did, such as a source, an author or a label.

Influence is additive: leaving out a group G changes a query's loss by about the sum of its examples' effects, which is
the score of the group's summed gradient, ``Σ_{z ∈ G} w_z ∇ℓ(z)`` with ``w_z = z's terms / all terms``. Its error is
that of this one score (docs/math.md, "Groups of examples"), since those of single examples are not independent.

* Independent chains: each has its own sum, and their spread is the error.
* A certificate: as of a single example, from the length of the summed gradient, ``b ‖Σ w_z ∇ℓ(z)‖ / √Tr(H)``. Where
  that was not measured, ``Σ w_z ‖∇ℓ(z)‖`` bounds it.
* An expected error: the errors σ of two of a group's scores are taken to be correlated by ρ = 0.15, so that the square
  of their sum's error is ``(1 - ρ) Σσ² + ρ (Σσ)²``. With independent errors it would be too small by a factor of 3 for
  groups of a hundred alike, by the triangle inequality too large (``python -m benchmarks.groups``).
  The solver's part of the errors of several checkpoints is summed likewise; their spread is that of the sums.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from whence.attribution.ranking import Ranking, rank_examples
from whence.attribution.scored import Scored
from whence.errors import DataError, OptionError
from whence.libraries import data_frame
from whence.model.gauss_newton import GaussNewton
from whence.progress import track

if TYPE_CHECKING:
    from whence.attribution.result import Attribution

__all__ = ["ALIKE", "GroupRow", "Grouping", "Groups", "measure_norms", "named_groups"]

#: ρ: how far expected errors of two examples of a group are correlated.
ALIKE = 0.15


@dataclass(frozen=True)
class Grouping:
    """Which group every training example belongs to.

    Attributes:
        names: of the groups, in the order in which they first occur.
        of: the number of every training example's group, ``[train]``; -1 for none.
        norms: ``‖Σ w_z ∇ℓ(z)‖`` over the scored examples of each group, or None where no error needs it.
    """

    names: tuple[str, ...]
    of: Tensor
    norms: Tensor | None = None

    @staticmethod
    def by(names: Sequence[Hashable | None], examples: int) -> Grouping:
        """From a name for every training example; None for an example of no group."""
        if isinstance(names, (str, Mapping)) or not hasattr(names, "__len__") or len(names) != examples:
            count = f"{len(names)} of them" if hasattr(names, "__len__") else f"a {type(names).__name__}"
            raise DataError(
                f"groups must name a group for each of the {examples} training examples (None for none); got {count}"
            )
        listed = names.tolist() if hasattr(names, "tolist") else list(names)
        words = [None if name is None else str(name) for name in listed]
        numbers = {
            name: number for number, name in enumerate(dict.fromkeys(w for w in words if w is not None))
        }
        if not numbers:
            raise DataError("no example belongs to a group; name at least one")
        return Grouping(tuple(numbers), torch.tensor([-1 if w is None else numbers[w] for w in words]))

    def sums(self, values: Tensor, indices: Tensor) -> Tensor:
        """Of values ``[…, scored]`` of these examples, over every group: ``[…, groups]``."""
        of = self.of[indices]
        result = values.new_zeros(*values.shape[:-1], len(self.names))
        return result.index_add_(-1, of[of >= 0], values[..., of >= 0])


def named_groups(groups: str | Sequence[Hashable | None], train: Any) -> Sequence[Hashable | None]:
    """Names for all training examples: as given, or what a field of theirs says."""
    if not isinstance(groups, str):
        return groups
    column = getattr(train, "column", None)
    if groups in (getattr(train, "column_names", None) or ()):  # of the datasets library
        return list(train[groups])
    if callable(column):
        found: Sequence[Hashable | None] = column(groups)
        return found
    rows = [train[position] for position in range(len(train))]
    if not all(isinstance(row, Mapping) and groups in row for row in rows):
        raise DataError(
            f"groups is {groups!r}, and the training examples have no such field; give a list with a name for each"
        )
    return [row[groups] for row in rows]


def measure_norms(gnh: GaussNewton, grouping: Grouping, positions: Tensor) -> Grouping:
    """The same with the lengths of the groups' gradients, for one backward pass over the examples at ``positions``."""
    of, norms = grouping.of[gnh.terms.indices[positions]], []
    for number in track(range(len(grouping.names)), "gradients of groups"):
        own = positions[of == number]
        length = 0.0
        if len(own):
            share = float(gnh.terms.counts()[own].sum()) / gnh.num_terms
            length = share * float(gnh.training_gradient(own).norm())
        norms.append(length)
    return replace(grouping, norms=torch.tensor(norms, dtype=torch.float64))


@dataclass(frozen=True)
class GroupRow:
    """A group's place in the ranking of one query.

    Attributes:
        query: which query.
        rank: 1 is the most helpful, or the most harmful where those were asked for.
        group: its name.
        examples: how many of its examples were scored.
        effect, low, high: nats by which the query's loss would change without the group, with its confidence interval.
        separated: whether the next rank is lower beyond the errors.
    """

    query: int
    rank: int
    group: str
    examples: int
    effect: float
    low: float
    high: float
    separated: bool

    heading: ClassVar[str] = (
        f"{'query':>5} {'rank':>4} {'examples':>8} {'removal':>12} {'interval':>23}  group"
    )

    def __str__(self) -> str:
        interval = f"[{self.low:.3g}, {self.high:.3g}]"
        tie = "" if self.separated else "  ≈ next"
        return (
            f"{self.query:>5} {self.rank:>4} {self.examples:>8} {self.effect:>+8.2g} nat {interval:>23}  "
            f"{self.group}{tie}"
        )


@dataclass(frozen=True)
class Groups:
    """Effects of leaving out whole groups, with their errors.

    Attributes:
        names: of the groups.
        sizes: how many examples of each were scored.
        scored: effects in nats, ``[queries, groups]``, with their errors.
        bounds: what no effect's error can exceed, ``[queries, groups]``: proven, of solvers with a certificate.
        doubts: why the intervals cannot be trusted.
    """

    names: tuple[str, ...]
    sizes: Tensor
    scored: Scored
    bounds: Tensor | None
    doubts: tuple[str, ...]

    @staticmethod
    def of(result: Attribution, grouping: Grouping) -> Groups:
        """Of an attribution's scores."""
        share, indices = result.terms.double() / result.num_terms, result.indices
        chains = grouping.sums(result.chain_scores * share, indices)
        single, certified, bounds = result.scored.certified, None, None
        certificate = result.solve.certificate
        norms = grouping.norms
        if result.norms is not None:
            at_most = grouping.sums(share * result.norms.double(), indices)  # by the triangle inequality
            norms = at_most if norms is None else torch.minimum(norms, at_most)
            if certificate is not None:
                bounds = certificate.score_bound(norms)
        if single is not None and (result.error_is_expected or result.checkpoints):
            own, together = (
                grouping.sums((share * single).square(), indices),
                grouping.sums(share * single, indices),
            )
            certified = torch.sqrt((1 - ALIKE) * own + ALIKE * together.square())
        elif single is not None and certificate is not None and norms is not None:
            certified = certificate.score_error(norms, result.solve.plan.spectrum.trace.value)
        of = grouping.of[indices]
        sizes = torch.bincount(of[of >= 0], minlength=len(grouping.names))
        return Groups(grouping.names, sizes, Scored(chains, certified), bounds, result.doubts)

    @property
    def effects(self) -> Tensor:
        """Nats by which each query's loss would change without each group, ``[queries, groups]``."""
        return self.scored.mean

    @property
    def stderr(self) -> Tensor:
        """Standard errors of the effects."""
        return self.scored.stderr

    def interval(self, confidence: float = 0.95) -> tuple[Tensor, Tensor]:
        """Ends of the confidence intervals of the effects, ``[queries, groups]`` each."""
        width = self.scored.half_width(confidence)
        return self.effects - width, self.effects + width

    def top(
        self, k: int = 5, *, query: int | None = None, harmful: bool = False, confidence: float = 0.95
    ) -> Ranking[GroupRow]:
        """The k most helpful groups (or most harmful) for every query, or for one."""
        if k < 1:
            raise OptionError(f"k is {k}; ask for at least one group")
        queries = len(self.effects)
        if query is not None and not -queries <= query < queries:
            raise OptionError(f"query {query} does not exist: there are {queries}, numbered from 0")
        rows = []
        for q in range(queries) if query is None else [query % queries]:
            ranked = rank_examples(self.scored.at(q), k, harmful=harmful, confidence=confidence)
            for rank, (number, width, apart) in enumerate(ranked, start=1):
                effect = float(self.effects[q, number])
                rows.append(
                    GroupRow(
                        query=q,
                        rank=rank,
                        group=self.names[number],
                        examples=int(self.sizes[number]),
                        effect=effect,
                        low=effect - width,
                        high=effect + width,
                        separated=apart,
                    )
                )
        return Ranking(rows, self.doubts)

    def to_pandas(self) -> Any:
        """A `pandas.DataFrame`, one row for each query and group, most helpful first."""
        queries, groups = self.effects.shape
        low, high = self.interval()
        frame = data_frame(
            {
                "query": torch.arange(queries).repeat_interleave(groups).numpy(),
                "group": list(self.names) * queries,
                "examples": self.sizes.repeat(queries).numpy(),
                "effect": self.effects.flatten().numpy(),
                "stderr": self.stderr.flatten().numpy(),
                "low": low.flatten().numpy(),
                "high": high.flatten().numpy(),
            }
        )
        frame = frame.sort_values(["query", "effect"], ascending=[True, False], ignore_index=True)
        frame.attrs["doubts"] = list(self.doubts)
        return frame

    def __str__(self) -> str:
        return str(self.top(min(len(self.names), 10)))
