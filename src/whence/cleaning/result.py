"""`Cleaning`: every training example by how much it looks like a mistake, as a table, a page, a data frame."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from whence.attribution.page import checked_file, write_page
from whence.cleaning.page import render
from whence.errors import OptionError, RunDirectoryError
from whence.exhibit import Exhibit
from whence.libraries import data_frame
from whence.report.notebook import framed
from whence.runs import Scalar, opened
from whence.runs.files import replace_file
from whence.scoring.self_influence import SelfInfluence
from whence.spectrum import Estimate

__all__ = ["Cleaning", "Harm", "Suspect", "load_cleaning", "safe_cell"]

_COLUMNS = (
    "index",
    "id",
    "label",
    "prediction",
    "probability",
    "loss",
    "gradient_norm",
    "self_influence",
    "low",
    "high",
    "rank",
)
_HARM_COLUMNS = ("score", "score_low", "score_high")


@dataclass(frozen=True)
class Suspect:
    """One training example, as every measure sees it.

    Attributes:
        rank: its place in the list it stands in.
        index: its position in the training data.
        id: its name.
        label: what it is said to be; None where the task has no labels.
        prediction: what the model says it is, and ``probability`` how sure the model is of that.
        loss: in nats, and ``loss_rank`` its place by that, the largest first.
        gradient_norm, gradient_norm_rank: the same for the length of its gradient.
        self_influence, low, high: with its bounds; ``self_influence_rank`` its place by that.
        effect: nats by which its own loss would rise if it were left out.
        score, score_low, score_high: its influence on the given queries together, negative where it harms them, with a
            95% interval; None where none were given.
        score_effect: nats by which the queries' losses together would change if it were left out.
    """

    rank: int
    index: int
    id: str
    label: str | None
    prediction: str | None
    probability: float | None
    loss: float
    loss_rank: int
    gradient_norm: float
    gradient_norm_rank: int
    self_influence: float
    low: float
    high: float
    self_influence_rank: int
    effect: float
    score: float | None = None
    score_low: float | None = None
    score_high: float | None = None
    score_effect: float | None = None

    @property
    def disagrees(self) -> bool:
        """Whether the model says something else than the label."""
        return self.label is not None and self.label != self.prediction


@dataclass(frozen=True, eq=False)
class Harm:
    """Influence of every training example on some queries together: ``Σ_q score(q, z)``, negative where it harms them.

    Attributes:
        scores: ``[n]``.
        low, high: ends of their 95% intervals.
        queries: how many there were.
        converged: whether the solver did, for all of them.
        doubts: why the intervals cannot be trusted, in words.
    """

    scores: Tensor
    low: Tensor
    high: Tensor
    queries: int
    converged: bool
    doubts: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Cleaning:
    """All training examples, ranked by how likely each is a mistake.

    Attributes:
        found: self-influence with its bounds, losses, gradient norms, predictions, of all examples in order.
        by: what ranks them.
        ids: their names.
        labels, predictions: in words; None where the task has no single label.
        exhibits: index -> what to show of an example; kept for the first of the rankings.
        shown: how many of each ranking the page shows.
        lambda_max: the largest curvature.
        harm: influence on the queries, where some were given.
        term: what a term is: "example" or "token".
        title: of the page.
        settings, versions, seconds: what was asked for, the environment, the time each phase took.
    """

    found: SelfInfluence
    by: str
    ids: tuple[str, ...]
    labels: tuple[str, ...] | None
    predictions: tuple[str, ...] | None
    exhibits: Mapping[int, Exhibit]
    shown: int
    lambda_max: Estimate
    harm: Harm | None
    term: str
    title: str
    settings: Mapping[str, Scalar]
    versions: Mapping[str, str]
    seconds: Mapping[str, float] = field(default_factory=dict)

    def __repr__(self) -> str:
        found = self.found
        return f"Cleaning({len(found):,} examples by {self.by}, λ = {found.damping:.4g}, rank {found.rank})"

    # --- rankings ----------------------------------------------------------------------------------------

    @property
    def notes(self) -> tuple[str, ...]:
        """What to know before relying on the numbers, in words."""
        notes, bounds = [], self.found.bounds
        if bounds.problems:
            notes.append(
                "The approximation of the curvature is rough: the bounds of self-influence are a factor of "
                f"{bounds.ratio:.3g} apart, and the order of near neighbours is no more than a hint. A larger rank "
                "helps."
            )
        if self.harm is not None and not self.harm.converged:
            notes.append(
                "The solver did not converge for every query: read the harm to them as a hint and no more."
            )
        if self.harm is not None:
            notes += [f"Of the harm to the queries: {doubt}" for doubt in self.harm.doubts]
        return tuple(notes)

    def suspicion(self, by: str | None = None) -> Tensor:
        """What ranks the examples, ``[n]``: the larger, the more suspicious."""
        if (by := by or self.by) not in self._measures:
            raise OptionError(f"by is {by!r}; it must be one of {', '.join(self._measures)}")
        return self._measures[by]

    @property
    def _measures(self) -> dict[str, Tensor]:
        found = self.found
        return {"self-influence": found.values, "loss": found.losses, "gradient-norm": found.norms}

    @cached_property
    def order(self) -> Tensor:
        """Positions of all examples, the most suspicious first."""
        return self.suspicion().argsort(descending=True, stable=True)

    def top(self, k: int = 20) -> list[Suspect]:
        """The k most suspicious examples."""
        return self._suspects(self.order, k)

    def most_harmful(self, k: int = 20) -> list[Suspect]:
        """The k examples that harm the queries most; fewer where fewer do."""
        if self.harm is None:
            raise OptionError(
                "no queries were given, so harm to them is not known; give some (queries, --queries)"
            )
        order = self.harm.scores.argsort(stable=True)
        return self._suspects(order[: int((self.harm.scores < 0).sum())], k)

    def _suspects(self, order: Tensor, k: int) -> list[Suspect]:
        if k < 1:
            raise OptionError(f"k is {k}; ask for at least one example")
        return [self._suspect(rank, position) for rank, position in enumerate(order[:k].tolist(), start=1)]

    def _suspect(self, rank: int, i: int) -> Suspect:
        found, harm = self.found, self.harm
        share = float(found.terms[i]) / found.num_terms
        influence = {}
        if harm is not None:
            score = float(harm.scores[i])
            influence = {"score": score, "score_low": float(harm.low[i]), "score_high": float(harm.high[i])}
            influence["score_effect"] = share * score
        return Suspect(
            rank=rank,
            index=i,
            id=self.ids[i],
            label=None if self.labels is None else self.labels[i],
            prediction=None if self.predictions is None else self.predictions[i],
            probability=None if self.predictions is None else float(found.probabilities[i]),
            loss=float(found.losses[i]),
            loss_rank=self.places["loss"][i],
            gradient_norm=float(found.norms[i]),
            gradient_norm_rank=self.places["gradient-norm"][i],
            self_influence=float(found.values[i]),
            low=float(found.low[i]),
            high=float(found.high[i]),
            self_influence_rank=self.places["self-influence"][i],
            effect=share * float(found.values[i]),
            **influence,
        )

    @cached_property
    def places(self) -> Mapping[str, list[int]]:
        """Measure -> every example's rank by it."""
        places = {}
        for by, values in self._measures.items():
            ranks = torch.empty(len(self.ids), dtype=torch.long)
            ranks[values.argsort(descending=True, stable=True)] = torch.arange(1, len(ranks) + 1)
            places[by] = ranks.tolist()
        return places

    # --- elsewhere ---------------------------------------------------------------------------------------

    def rows(self) -> Iterator[dict[str, Any]]:
        """One for each example, the most suspicious first, with the columns of the CSV file."""
        for rank, position in enumerate(self.order.tolist(), start=1):
            suspect = self._suspect(rank, position)
            yield {name: getattr(suspect, name) for name in self._columns}

    @property
    def _columns(self) -> tuple[str, ...]:
        return _COLUMNS if self.harm is None else (*_COLUMNS, *_HARM_COLUMNS)

    def to_pandas(self) -> Any:
        """A `pandas.DataFrame` of all examples, the most suspicious first."""
        return data_frame(self.rows())

    def to_csv(self, path: str | Path) -> Path:
        """Write all examples, the most suspicious first. Returns the path.

        Cells that a spreadsheet would take for a formula begin with an apostrophe; see `safe_cell`.
        """
        target = checked_file(path, "clean.csv")

        def write(temporary: Path) -> None:
            # Half of a surrogate pair, as some decoders produce, cannot be written: shown as unreadable.
            with temporary.open("w", encoding="utf-8", errors="replace", newline="") as file:
                table = csv.DictWriter(file, self._columns)
                table.writeheader()
                for row in self.rows():
                    table.writerow({name: safe_cell(value) for name, value in row.items()})

        replace_file(target, write)
        return target

    def to_html(self, path: str | Path) -> Path:
        """Write the page: one self-contained file. Returns its path."""
        return write_page(render(self), path, example="clean.html")

    def _repr_html_(self) -> str:
        """The page in a frame, for notebooks."""
        return framed(render(self), title=self.title, height=720)


def safe_cell(value: Any) -> Any:
    """A cell that no spreadsheet takes for a formula: such text begins with an apostrophe.

    Example:
        >>> safe_cell("=HYPERLINK(1)"), safe_cell(" +1"), safe_cell("a=b"), safe_cell(-0.1), safe_cell(None)
        ("'=HYPERLINK(1)", "' +1", 'a=b', '-0.1', '')
    """
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.9g}"
    if isinstance(value, str) and (
        value[:1] in ("\t", "\r", "\n") or value.lstrip()[:1] in tuple("=+-@＝＋－＠")
    ):
        return f"'{value}"
    return value


def load_cleaning(directory: str | Path) -> Cleaning:
    """Read a finished run of `clean`.

    Raises:
        RunDirectoryError: where there is none, it is not finished, or what is read of it was damaged.
    """
    kept = opened(directory)
    path = kept.path
    if "cleaning" not in kept:
        raise RunDirectoryError(
            f"{path} holds no finished run of whence clean; run the same command again to go on"
        )
    return kept.value("cleaning", Cleaning)
