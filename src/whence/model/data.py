"""`TermSet`: a data set seen as terms, with batches and unbiased weights.

The Hessian is a mean over *terms*: examples in classification, predicted tokens in language modelling. Data
come as *examples*, which may hold different numbers of terms. For m examples drawn uniformly out of n that
hold N terms in all, the estimate

    H̃ = (n / (N m)) Σ_{s ∈ B} Σ_{i ∈ s} J_i S_i J_iᵀ

has expectation ``H = (1/N) Σ_i J_i S_i J_iᵀ`` exactly. Dividing by the batch's own number of terms instead
does not: it gives short sequences more weight than they have.

Examples may also be drawn with unequal chances p (`TermSet.importance`). Each then counts ``1 / (n p)`` times, and the
expectation is the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, TensorDataset

from whence.errors import DataError, WhenceError
from whence.tasks import Batch, Task

__all__ = ["TermSet"]

#: Examples that are read twice, to see whether they are the same: a picture that is mirrored half of the time passes
#: so many times in a row with a chance of 2⁻³².
_READ_TWICE = 32
#: More examples than this are not counted but made up.
_MOST = 2**40
_FORM = "Give examples as the task reads them: (x, y), or a dict with labels or input_ids"


class TermSet:
    """A map-style data set, or a subset of one, as terms of a `Task`.

    Args:
        data: anything with ``len`` and integer indexing; items as the task reads them.
        task: how items become batches, and how many terms they hold.
        device: where batches go.
        indices: the examples that belong to the set; all by default.
    """

    def __init__(self, data: Any, task: Task, device: torch.device, *, indices: Tensor | None = None) -> None:
        if isinstance(data, Mapping):
            raise DataError(
                f"the data are a dict of {sorted(map(str, data))}; give a list of examples, each a dict of its "
                "own, or a TensorDataset"
            )
        random_access = hasattr(data, "__len__") and hasattr(data, "__getitem__")
        if not random_access or isinstance(data, IterableDataset):
            raise DataError(
                f"the data are a {type(data).__name__}; whence needs random access: a map-style dataset with "
                "__len__ and __getitem__ (a list of examples will do)"
            )
        count = _length(data)
        self.data, self.task, self.device = data, task, device
        #: Outputs per term, once the model has been run: lets every batch's targets be checked.
        self.width: int | None = None
        #: Which kinds of numbers batches hold, as the first one showed.
        self.kinds: dict[str, str] | None = None
        #: The chance of each example to be drawn, where it is not the same for all; see `whence.model.importance`.
        self.importance: Tensor | None = None
        self.indices = torch.arange(count) if indices is None else indices
        self._lengths = self._count()
        self.num_terms = len(self.indices) if self._lengths is None else int(self._lengths.sum())
        if self.num_terms == 0:
            raise DataError("no example holds a term: every label is ignored (-100) or masked")

    def __len__(self) -> int:
        """Number of examples."""
        return len(self.indices)

    def _count(self) -> Tensor | None:
        """Terms of each example, where they vary."""
        per_example = self.task.terms_per_example
        if per_example == 1:
            return None
        if per_example is not None:
            return torch.full((len(self.indices),), per_example)
        counts = []
        for index in self.indices.tolist():
            example = self._read(index)
            with _naming(f"the terms of example {index} of the data cannot be counted", _FORM):
                counts.append(self.task.count_terms(example))
        return torch.tensor(counts)

    def _read(self, index: int) -> Any:
        with _naming(
            f"example {index} of the data cannot be read", "Mend its __getitem__, or leave the example out"
        ):
            return self.data[index]

    @property
    def terms_per_example(self) -> float:
        """Mean number of terms in an example."""
        return self.num_terms / len(self)

    def draw_weighted(
        self, batch_size: int, generator: torch.Generator, *, distinct: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Positions of enough examples for about ``batch_size`` terms, and what each counts for (None: all the same).

        They are drawn independently; or all different, if they have equal chances.
        """
        examples, device = max(1, round(batch_size / self.terms_per_example)), generator.device
        if self.importance is not None:
            uniform = torch.rand(examples, generator=generator, device=device, dtype=torch.float64)
            edges = self.importance.double().cumsum(0)
            positions = torch.searchsorted(edges, uniform.cpu() * edges[-1]).clamp_max_(len(self) - 1)
            return positions, 1 / (len(self) * self.importance[positions])
        if distinct:
            return torch.randperm(len(self), generator=generator, device=device)[:examples].cpu(), None
        return torch.randint(len(self), (examples,), generator=generator, device=device).cpu(), None

    def expect(self, width: int | None, kinds: dict[str, str] | None = None) -> None:
        """Let every batch be checked: its targets against so many outputs per term, its numbers against these kinds."""
        self.width, self.kinds = width, self.kinds if kinds is None else kinds

    def draw_by(self, probabilities: Tensor | None) -> None:
        """From here on draw examples with these chances; None: all alike."""
        self.importance = probabilities

    def weight(self, examples: int) -> float:
        """``n / (N m)``: what each term of a draw of ``m`` examples is multiplied by."""
        return len(self) / (self.num_terms * examples)

    def share_of_whole(self, positions: Tensor, weights: Tensor | None = None) -> float:
        """The largest c at which no drawn term's coefficient in ``c·H̃`` exceeds the ``1/N`` that it has in H.

        An example that was drawn with the weights w, one for each time, has ``Σw · n/(N m)`` in H̃. So ``c = m/(n·Σw)``
        with the largest such sum: m/n for different examples that count alike.
        """
        _, place = positions.unique(return_inverse=True)
        # no more than 1 but for rounding: as Σp ≤ 1, some drawn example has m·p/times ≤ 1
        return min(1.0, len(positions) / (len(self) * float(torch.bincount(place, weights).max())))

    def fetch(self, positions: Tensor) -> Batch:
        """The examples at these positions, as one batch on the device."""
        indices = self.indices[positions]
        examples = None if isinstance(self.data, TensorDataset) else [self._read(i) for i in indices.tolist()]
        with _naming(
            f"example {int(indices[0])} of the data, with {len(indices) - 1} others, is no batch", _FORM
        ):
            if examples is None:
                batch = self.task.assemble([tensor[indices] for tensor in self.data.tensors])
            else:
                batch = self.task.collate(examples)
            batch = replace(batch, indices=indices)
            self._check_kinds(batch)
            bad = batch.non_finite()
            if len(bad):
                raise DataError(f"{batch.name(int(bad[0]))} holds NaN or infinity; remove or repair it")
            self.task.check_targets(batch, self.width)
            return batch.to(self.device)

    def batches(self, positions: Tensor, size: int, weights: Tensor | None = None) -> Iterator[Batch]:
        """Micro-batches of at most ``size`` examples; similar lengths together, to pad little."""
        order = self.by_length(positions) if len(positions) > size else torch.arange(len(positions))
        for chunk in order.split(size) if len(order) else ():
            batch = self.fetch(positions[chunk])
            if weights is not None:
                batch = replace(batch, weights=weights[chunk].to(self.device))
            yield batch

    def by_length(self, positions: Tensor) -> Tensor:
        """The order in which examples of similar lengths stand together."""
        if self._lengths is None:
            return torch.arange(len(positions))
        return self._lengths[positions].argsort(stable=True)

    def counts(self) -> Tensor:
        """Terms of every example, ``[n]``."""
        return torch.ones(len(self), dtype=torch.long) if self._lengths is None else self._lengths

    def look_through(self, count: int) -> None:
        """Read up to ``count`` examples, spread over the data, for the errors that reading raises."""
        for _ in self.batches(self.spread(count), 64):
            pass

    def spread(self, count: int) -> Tensor:
        """Up to ``count`` positions, evenly over the data."""
        return torch.linspace(0, len(self) - 1, min(count, len(self)), dtype=torch.float64).long()

    def _check_kinds(self, batch: Batch) -> None:
        """Refuse a batch of other kinds of numbers than the first: the model would fail on it, or read it otherwise."""
        kinds = batch.kinds()
        if self.kinds is None:
            self.kinds = kinds
        for name, kind in kinds.items():
            if kind != self.kinds.get(name, kind):
                raise DataError(
                    f"the field {name!r} of {batch.name(0)} is {kind}, and {self.kinds[name]} elsewhere; convert all "
                    "examples to one dtype"
                )

    def check_repeatable(self) -> None:
        """Refuse data that are others at every access: each product and each score would be about another set."""
        if isinstance(self.data, TensorDataset):
            return
        for position in self.spread(_READ_TWICE):
            first, second = (self.fetch(position.reshape(1)) for _ in range(2))
            if not first.same_as(second):
                raise DataError(
                    f"{first.name(0)} is another one at every access, as random augmentation makes it. Switch "
                    "that off (the evaluation transform), or read every example once and keep it in a list"
                )

    def longest(self, count: int) -> Tensor:
        """Positions of the ``count`` examples with the most terms: the ones that need most memory."""
        if self._lengths is None:
            return torch.arange(min(count, len(self)))
        return self._lengths.argsort(descending=True)[:count]


@contextmanager
def _naming(problem: str, remedy: str) -> Iterator[None]:
    """Whatever a stranger's data or code raise in here becomes a `DataError` that says where."""
    try:
        yield
    except (WhenceError, MemoryError):
        raise
    except Exception as error:
        raise DataError(f"{problem}: {type(error).__name__}: {error}. {remedy}") from error


def _length(data: Any) -> int:
    """How many examples there are; refuses none at all, and what no data can hold."""
    with _naming("the number of examples cannot be told", "Mend the data set's __len__"):
        count = len(data)
    if count == 0:
        raise DataError("the data set is empty; give at least one example")
    if count > _MOST:
        raise DataError(f"the data say that they hold {count} examples; more than 2^40 cannot be right")
    return count
