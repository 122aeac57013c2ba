"""`render`: the page of ``whence clean``. Which training examples look like mistakes, and how sure is that?"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from whence.exhibit import Exhibit
from whence.report import figures
from whence.report.axes import Linear
from whence.report.content import Entry, Floats, Page
from whence.report.document import Item, document, words_to_filter
from whence.report.formatting import brief, count, interval, percentage, signed

__all__ = ["MEASURES", "CleanReport", "Grounds", "Suspect", "render"]

#: What examples can be ranked by, and what to call it in a sentence.
MEASURES = {"self-influence": "self-influence", "loss": "loss", "gradient-norm": "length of its gradient"}


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


@dataclass(frozen=True)
class Grounds:
    """What the numbers rest on.

    Attributes:
        damping: λ.
        lambda_max: the largest curvature, with its standard error.
        rank: of the approximation.
        smallest, largest, confidence: its bounds; see `whence.scoring.self_influence.bounds`.
        scale: the mean of exact values over the approximation's, with its standard error; None where none were solved
            for.
        spread: the standard deviation of that ratio from example to example.
        probes: how many were solved for.
        operator_terms, num_terms: terms that curvature was measured on, and how many there are.
        term: what a term is: "example" or "token".
        num_products: products of the curvature with a vector.
        problems: what is wrong with the approximation, in words; empty if nothing is.
    """

    damping: float
    lambda_max: tuple[float, float]
    rank: int
    smallest: float
    largest: float
    confidence: float
    scale: tuple[float, float] | None
    spread: float
    probes: int
    operator_terms: int
    num_terms: int
    term: str
    num_products: int
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class CleanReport(Page):
    """Everything on the page.

    Attributes:
        by: the measure that ranks: a key of `MEASURES`.
        suspects: the first of the ranking.
        harmful: the examples that harm the given queries most; empty where there were none.
        queries: how many queries were given.
        exhibits: index -> what to show of an example.
        values: self-influence of all examples.
        overlaps: measure -> how many of the suspects are as far up by it.
        grounds: what the numbers rest on.
        notes: what to know before reading on, in words.
    """

    by: str
    suspects: tuple[Suspect, ...]
    harmful: tuple[Suspect, ...]
    queries: int
    exhibits: Mapping[int, Exhibit]
    values: Floats
    overlaps: Mapping[str, int]
    grounds: Grounds
    notes: tuple[str, ...]


class _ListView:
    """What the template shows of a ranking.

    Attributes:
        name: "suspects" or "harmful".
        items: the examples.
        axis: the scale of their whiskers.
        histogram: the values of all examples, as a figure; None for harm.
        words: labels, predictions and notes that occur in the list.
    """

    def __init__(self, name: str, suspects: Sequence[Suspect], report: CleanReport) -> None:
        entries = [_entry(suspect, harm=name == "harmful") for suspect in suspects]
        scale = figures.whisker_scale(entries)
        self.name = name
        self.axis = figures.whisker_axis(scale)
        self.items = [
            _item(name, s, entry, scale, report) for s, entry in zip(suspects, entries, strict=True)
        ]
        self.histogram = None
        if name == "suspects":
            names = ("self-influence", "values of self-influence")
            self.histogram = figures.histogram(report.values, helpful=entries, names=names)
        said = [word for suspect in suspects for word in (suspect.label, suspect.prediction)]
        self.words = words_to_filter([*said, *(item.exhibit.note for item in self.items)])


def render(report: CleanReport) -> str:
    """The page as one self-contained HTML document."""
    lists = [_ListView("suspects", report.suspects, report)]
    if report.queries:
        lists.append(_ListView("harmful", report.harmful, report))
    return document(
        "clean_page.html.j2",
        report,
        lists=lists,
        labelled=any(suspect.label is not None for suspect in report.suspects),
        measure=MEASURES[report.by],
        overlaps=[(MEASURES[name], shared) for name, shared in report.overlaps.items()],
    )


def _entry(suspect: Suspect, *, harm: bool) -> Entry:
    """The numbers of a list's whiskers."""
    numbers = (suspect.self_influence, suspect.low, suspect.high, suspect.effect)
    known = (suspect.score, suspect.score_low, suspect.score_high, suspect.score_effect)
    score, low, high, effect = (math.nan if x is None else x for x in (known if harm else numbers))
    return Entry(suspect.rank, suspect.index, score, low, high, effect, effect, effect, separated=True)


def _item(name: str, suspect: Suspect, entry: Entry, scale: Linear, report: CleanReport) -> Item:
    harm = name == "harmful"
    score, ends = interval(entry.score, entry.low, entry.high)
    if not harm:  # bounds far apart, the lower one small: each in digits of its own
        score, ends = brief(entry.score, 3), f"{brief(entry.low, 2)} to {brief(entry.high, 2)}"
    lines = [("If removed", f"{signed(entry.effect)} nats", "")]
    if harm or report.by != "self-influence":  # else the list's own rank and number are these
        value = f", {brief(suspect.self_influence, 3)}" if harm else ""
        lines.append(("Self-influence", f"rank {count(suspect.self_influence_rank)}{value}", ""))
    loss, norm = f"{brief(suspect.loss, 3)} nats", brief(suspect.gradient_norm, 3)
    lines.append(("Loss", f"rank {count(suspect.loss_rank)}, {loss}", ""))
    lines.append(("Gradient norm", f"rank {count(suspect.gradient_norm_rank)}, {norm}", ""))
    exhibit = report.exhibits.get(suspect.index) or Exhibit()
    says = suspect.prediction
    if says is not None and suspect.probability is not None:
        says = f"{says} ({percentage(suspect.probability, 2)})"
    return Item(
        index=suspect.index,
        rank=suspect.rank,
        anchor=f"{name}-{suspect.index}",
        exhibit=replace(exhibit, id=suspect.id, label=suspect.label or exhibit.label, prediction=says),
        value=entry.score,
        score=score,
        interval=ends,
        whisker=figures.whisker(entry, scale),
        keys={
            "effect": suspect.loss,
            "baseline": suspect.gradient_norm,
            "separated": int(suspect.disagrees),
        },
        lines=lines,
        disagrees=suspect.disagrees,
    )
