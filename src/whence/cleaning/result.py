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

from whence.attribution.contents import write_page
from whence.errors import OptionError, RunDirectoryError
from whence.exhibit import Exhibit
from whence.libraries import load_library
from whence.report.clean_page import MEASURES, CleanReport, Grounds, Suspect, render
from whence.runs import Scalar, holds, read
from whence.runs.files import replace_file
from whence.scoring.self_influence import SelfInfluence
from whence.spectrum import Estimate

__all__ = ["Cleaning", "Harm", "load_cleaning", "safe_cell"]

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


@dataclass(frozen=True, eq=False)
class Harm:
    """Influence of every training example on some queries together: ``Σ_q score(q, z)``, negative where it harms them.

    Attributes:
        scores: ``[n]``.
        low, high: ends of their 95% intervals.
        queries: how many there were.
        converged: whether the solver did, for all of them.
    """

    scores: Tensor
    low: Tensor
    high: Tensor
    queries: int
    converged: bool


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
        return tuple(notes)

    def suspicion(self, by: str | None = None) -> Tensor:
        """What ranks the examples, ``[n]``: the larger, the more suspicious."""
        measures = {
            "self-influence": self.found.values,
            "loss": self.found.losses,
            "gradient-norm": self.found.norms,
        }
        if (by := by or self.by) not in measures:
            raise OptionError(f"by is {by!r}; it must be one of {', '.join(measures)}")
        return measures[by]

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
            values = (
                float(harm.scores[i]),
                float(harm.low[i]),
                float(harm.high[i]),
                share * float(harm.scores[i]),
            )
            influence = dict(zip(("score", "score_low", "score_high", "score_effect"), values, strict=True))
        return Suspect(
            rank=rank,
            index=i,
            id=self.ids[i],
            label=None if self.labels is None else self.labels[i],
            prediction=None if self.predictions is None else self.predictions[i],
            probability=None if self.predictions is None else float(found.probabilities[i]),
            loss=float(found.losses[i]),
            loss_rank=self._places["loss"][i],
            gradient_norm=float(found.norms[i]),
            gradient_norm_rank=self._places["gradient-norm"][i],
            self_influence=float(found.values[i]),
            low=float(found.low[i]),
            high=float(found.high[i]),
            self_influence_rank=self._places["self-influence"][i],
            effect=share * float(found.values[i]),
            **influence,
        )

    @cached_property
    def _places(self) -> dict[str, list[int]]:
        """Every example's rank by every measure."""
        places = {}
        for by in MEASURES:
            ranks = torch.empty(len(self.ids), dtype=torch.long)
            ranks[self.suspicion(by).argsort(descending=True, stable=True)] = torch.arange(1, len(ranks) + 1)
            places[by] = ranks.tolist()
        return places

    # --- elsewhere ---------------------------------------------------------------------------------------

    def rows(self) -> Iterator[dict[str, Any]]:
        """One for each example, the most suspicious first, with the columns of the CSV file."""
        names = _COLUMNS if self.harm is None else (*_COLUMNS, *_HARM_COLUMNS)
        for rank, position in enumerate(self.order.tolist(), start=1):
            suspect = self._suspect(rank, position)
            yield {name: getattr(suspect, name) for name in names}

    def to_pandas(self) -> Any:
        """A `pandas.DataFrame` of all examples, the most suspicious first."""
        return load_library("pandas", "pandas", "to make a data frame").DataFrame(self.rows())

    def to_csv(self, path: str | Path) -> Path:
        """Write all examples, the most suspicious first. Returns the path.

        Cells that a spreadsheet would take for a formula begin with an apostrophe; see `safe_cell`.
        """
        target = Path(path)
        if target.is_dir():
            raise OptionError(
                f"{target} is a directory; give the file's name too, such as {target / 'clean.csv'}"
            )

        def write(temporary: Path) -> None:
            # Half of a surrogate pair, as some decoders produce, cannot be written: shown as unreadable.
            with temporary.open("w", encoding="utf-8", errors="replace", newline="") as file:
                names = _COLUMNS if self.harm is None else (*_COLUMNS, *_HARM_COLUMNS)
                table = csv.DictWriter(file, names)
                table.writeheader()
                for row in self.rows():
                    table.writerow({name: safe_cell(value) for name, value in row.items()})

        replace_file(target, write)
        return target

    def to_html(self, path: str | Path) -> Path:
        """Write the page: one self-contained file. Returns its path."""
        return write_page(render(self.contents()), path, example="clean.html")

    def contents(self) -> CleanReport:
        """What the page shows."""
        suspects = self.top(self.shown)
        others = {by: places for by, places in self._places.items() if by != self.by}
        return CleanReport(
            title=self.title,
            by=self.by,
            suspects=tuple(suspects),
            harmful=() if self.harm is None else tuple(self.most_harmful(self.shown)),
            queries=0 if self.harm is None else self.harm.queries,
            exhibits=self.exhibits,
            values=self.found.values.numpy(),
            overlaps={
                by: sum(places[suspect.index] <= len(suspects) for suspect in suspects)
                for by, places in others.items()
            },
            grounds=self._grounds(),
            notes=self.notes,
            num_examples=len(self.ids),
            num_scored=len(self.ids),
            not_scored="",
            score_method="One backward per example gives its products with the directions of the approximation, and "
            "the length of its gradient; one forward its loss.",
            settings={name: str(value) for name, value in self.settings.items()},
            versions=self.versions,
            seconds=self.seconds,
        )

    def _grounds(self) -> Grounds:
        found, bounds, scale = self.found, self.found.bounds, self.found.calibration
        return Grounds(
            damping=found.damping,
            lambda_max=(self.lambda_max.value, self.lambda_max.stderr),
            rank=found.rank,
            smallest=bounds.smallest,
            largest=bounds.largest,
            confidence=bounds.confidence,
            scale=None if scale is None else (scale.value, scale.stderr),
            spread=0.0 if scale is None else scale.spread,
            probes=0 if scale is None else scale.solves,
            operator_terms=bounds.operator_terms,
            num_terms=found.num_terms,
            term=self.term,
            problems=bounds.problems,
            num_products=found.rank + bounds.num_products + (0 if scale is None else scale.num_products),
        )


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
        RunDirectoryError: where there is none, or it is not finished.
    """
    path = Path(directory)
    if not holds(path, "cleaning"):
        raise RunDirectoryError(
            f"{path} holds no finished run of whence clean; run the same command again to go on"
        )
    return read(path, "cleaning", Cleaning)
