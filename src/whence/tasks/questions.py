"""`Questions`: what is asked of a model, beside the loss of its examples.

Every question is one number Q, a weighted sum over some examples, and what is explained is why Q is not larger:

    Q = Σ_i w_i v(x_i),     v: the mean over the example's terms, or their sum, of one of

    loss        ℓ
    margin      -log(p / (1 - p))       of the label
    contrast    -log p                  of the label: "why A rather than B" is Q = -log p(A) + log p(B)

A group of queries is asked about together, by the mean of theirs. The gradient of Q takes the place of a query's; all
that follows is linear in it. As for a loss, a positive score says that training on an example made Q smaller: the
label likelier, the margin wider, the model more inclined to A. All are in nats.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from whence.errors import DataError, OptionError
from whence.tasks.base import Batch, Task

__all__ = ["Parts", "Questions"]

_MEASURES, _REDUCTIONS = ("loss", "margin"), ("mean", "sum")


@dataclass(frozen=True, eq=False)
class Parts:
    """The examples that questions are made of, in the order of the questions.

    Attributes:
        examples: as the task reads them.
        task: that reads them.
        measure, reduce: what each is worth; see `Task.query_losses`.
        question: the number of each example's question.
        weight: w of each example.
        contrast: whether it is what the model might have said instead.
        count: how many questions there are.
    """

    examples: Any
    task: Task
    measure: str
    reduce: str
    question: Tensor
    weight: Tensor
    contrast: Tensor
    count: int

    def worth(self, outputs: Tensor, batch: Batch) -> Tensor:
        """V of every example of a batch."""
        return self.task.query_losses(outputs, batch, measure=self.measure, reduce=self.reduce)

    def together(self, worth: Tensor) -> Tensor:
        """Q of every question, ``[…, questions]``, from all examples' v, ``[…, examples]``."""
        result = worth.new_zeros(*worth.shape[:-1], self.count)
        weighed = worth * self.weight.to(worth)
        return result.index_add_(-1, self.question.to(worth.device), weighed)

    def name(self, position: int) -> str:
        """What to call an example in a message."""
        what = f"query {int(self.question[position])}"
        return f"the contrast of {what}" if bool(self.contrast[position]) else what


@dataclass(frozen=True, eq=False)
class Questions:
    """Queries, and what is asked of them. Taken wherever queries are: a plain list asks for its examples' losses.

    Args:
        queries: examples, as the task reads them.
        contrast: for every query another label, or the tokens of another completion, or an example of its own: "why
            its label rather than this one?". None where nothing is to be compared. By default what the queries
            themselves say (``queries.contrasts``), as those read from files with a field ``contrast`` do.
        groups: for every query the name of its group, or None where it is asked about alone. A group is one
            question, about the mean over its queries. By default ``queries.groups``, where there is such a thing.
        measure: ``"loss"``, or ``"margin"``: log(p / (1 - p)) of the label.
        reduce: ``"mean"`` over an example's terms (tokens), or ``"sum"``.

    Example:
        >>> from whence import Classification
        >>> asked = Questions([(torch.zeros(2), 1), (torch.ones(2), 0)], contrast=[2, 2])
        >>> parts = asked.parts(Classification())
        >>> [label for _, label in parts.examples], parts.weight.tolist()
        ([1, 2, 0, 2], [1.0, -1.0, 1.0, -1.0])
    """

    queries: Any
    contrast: Sequence[Any] | None = None
    groups: Sequence[str | None] | None = None
    measure: str = "loss"
    reduce: str = "mean"

    def __post_init__(self) -> None:
        for name, values in (("measure", _MEASURES), ("reduce", _REDUCTIONS)):
            if getattr(self, name) not in values:
                raise OptionError(
                    f"{name} is {getattr(self, name)!r}; it must be {values[0]!r} or {values[1]!r}"
                )
        for name, given in (("contrast", self.contrast), ("groups", self.groups)):
            if given is None:
                continue
            if isinstance(given, str) or not hasattr(given, "__len__") or len(given) != len(self.queries):
                count = "a single one" if not hasattr(given, "__len__") else f"{len(given)}"
                raise DataError(
                    f"{name} must be a list with one entry for each of the {len(self.queries)} queries (None for "
                    f"none); it is {count}"
                )
        wrong = [name for name in self.groups or () if not isinstance(name, str) and name is not None]
        if wrong:
            raise DataError(f"a query's group is {wrong[0]!r}; give a name, as text, or None")
        if self._compares and self.measure != "loss":
            raise OptionError(
                f"measure is {self.measure!r} beside contrast=, which compares log-probabilities; leave one of them out"
            )

        for number, members in enumerate(self.members if self.groups is not None and self._compares else ()):
            if len({(self.contrast or ())[position] is None for position in members}) > 1:
                raise DataError(
                    f"some queries of the group {self.group(number)!r} have a contrast and others have none; their "
                    "mean would be of different things"
                )

    @classmethod
    def of(cls, queries: Any, **asked: Any) -> Questions:
        """The queries as questions, if they are not yet; ``asked`` are the arguments that differ from the defaults."""
        if isinstance(queries, Questions):
            if asked:
                raise OptionError(
                    f"the queries are Questions, and say so themselves; leave out {', '.join(asked)}"
                )
            return queries
        for name, own in (("contrast", "contrasts"), ("groups", "groups")):
            if name not in asked and (found := getattr(queries, own, None)) is not None:
                asked[name] = found
        return cls(queries, **asked)

    @property
    def _compares(self) -> bool:
        return self.contrast is not None and any(other is not None for other in self.contrast)

    @property
    def plain(self) -> bool:
        """Whether they ask for the loss of each query and no more."""
        return not self._compares and self.groups is None and (self.measure, self.reduce) == ("loss", "mean")

    @cached_property
    def members(self) -> tuple[tuple[int, ...], ...]:
        """The positions of every question's queries; groups stand where their first query does."""
        found: dict[Any, list[int]] = {}
        for position in range(len(self.queries)):
            name = None if self.groups is None else self.groups[position]
            found.setdefault(position if name is None else name, []).append(position)
        return tuple(map(tuple, found.values()))

    @property
    def data(self) -> Any:
        """What fingerprints are of: the queries themselves, where no more than their losses is asked for."""
        return self.queries if self.plain else self

    def __len__(self) -> int:
        return len(self.queries) if self.groups is None else len(self.members)

    def __getitem__(self, number: int) -> Any:
        """All that a question is, for fingerprints."""
        return {
            "queries": [self.queries[position] for position in self.members[number]],
            "contrast": [self.contrast and self.contrast[position] for position in self.members[number]],
            "group": self.group(number),
            "measure": self.measure,
            "reduce": self.reduce,
        }

    def group(self, number: int) -> str | None:
        """The name of a question's group; None where it is about a query alone."""
        return None if self.groups is None else self.groups[self.members[number][0]]

    def words(self) -> str:
        """What is asked beside the loss, for settings; empty for losses."""
        grouped = self.groups is not None and any(name is not None for name in self.groups)
        told = [
            "contrast" if self._compares else "",
            self.measure if self.measure != "loss" else "",
            "sum over terms" if self.reduce == "sum" else "",
            "groups" if grouped else "",
        ]
        return ", ".join(filter(None, told))

    def parts(self, task: Task) -> Parts:
        """What they are made of.

        Raises:
            OptionError: the task does not know what is asked for.
            DataError: a contrast is no other label or answer.
        """
        measure = "contrast" if self._compares else self.measure
        if measure not in ("loss", *task.measures):
            what = "contrast=" if measure == "contrast" else f"measure={measure!r}"
            raise OptionError(
                f"{what} needs probabilities of labels, which {type(task).__name__} does not give; ask for the loss"
            )
        if not self._compares and self.groups is None:
            count = len(self.queries)
            own, none = torch.arange(count), torch.zeros(count, dtype=torch.bool)
            ones = torch.ones(count, dtype=torch.float64)
            return Parts(self.queries, task, measure, self.reduce, own, ones, none, count)
        examples: list[Any] = []
        rows: list[tuple[int, float, bool]] = []
        for number, members in enumerate(self.members):
            for position in members:
                example, other = self.queries[position], self.contrast and self.contrast[position]
                examples.append(example)
                rows.append((number, 1 / len(members), False))
                if other is None:
                    continue
                examples.append(self._contrasting(task, position, example, other))
                rows.append((number, -1 / len(members), True))
        question, weight, contrast = zip(*rows, strict=True)
        return Parts(
            examples,
            task,
            measure,
            self.reduce,
            torch.tensor(question),
            torch.tensor(weight, dtype=torch.float64),
            torch.tensor(contrast),
            len(self.members),
        )

    def _contrasting(self, task: Task, position: int, example: Any, other: Any) -> Any:
        try:
            made = task.contrasting(example, other)
            same = task.collate([made]).same_as(task.collate([example]))
        except DataError as error:
            raise DataError(f"the contrast of query {position} cannot be used: {error}") from error
        if same:
            raise DataError(
                f"the contrast of query {position} is what the query says itself; give another one"
            )
        return made
