"""What the templates show of a `Question` and its `Entry`s: numbers in words, figures, addresses on the page."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup

from whence.exhibit import Exhibit
from whence.report import figures, words
from whence.report.axes import Linear
from whence.report.checks import LIMITS, NAMES, Check, Validation
from whence.report.content import Entry, Question, Report
from whence.report.formatting import MINUS, brief, count, interval, plus_minus, signed
from whence.report.shading import Token, shade, strongest
from whence.report.untrusted import Picture, href, picture

__all__ = [
    "CheckView",
    "EntryView",
    "ListView",
    "QuestionView",
    "ValidationView",
    "question_view",
    "validation_view",
]

DEFAULT_TAIL = 0.5  # the part of a path that LiSSA averages unless the plan says otherwise


@dataclass(frozen=True)
class EntryView:
    """One example of a list.

    Attributes:
        entry: where it comes from.
        anchor: its address on the page.
        rank: its place, as the list counts.
        score, interval, effect, effect_interval: as text.
        tied: whether it could change places with the next.
        by_gradient: what the plain gradient dot product says, or None.
        by_influence: its place by influence, where the list counts by something else.
        whisker: the interval as a figure.
        picture, link, tokens, strongest: of the exhibit.
    """

    entry: Entry
    anchor: str
    rank: int
    score: str
    interval: str
    effect: str
    effect_interval: str
    tied: bool
    by_gradient: str | None
    by_influence: str | None
    whisker: Markup
    picture: Picture | None
    link: str | None
    tokens: tuple[Token, ...]
    strongest: tuple[Token, ...]

    @property
    def exhibit(self) -> Exhibit:
        """What is known of the example; an empty exhibit if nothing was kept."""
        return self.entry.exhibit or Exhibit()

    @property
    def side(self) -> str:
        """Class name of its sign."""
        score = self.entry.score
        return "neg" if score < 0 else "pos" if score > 0 else "neither"


@dataclass(frozen=True)
class ListView:
    """A list of entries: ``name`` is "helpful", "harmful" or "baseline"."""

    name: str
    entries: tuple[EntryView, ...]


@dataclass(frozen=True)
class QuestionView:
    """One question.

    Attributes:
        question: where it comes from.
        anchor: its address on the page.
        heading: what to call it where there is little room.
        picture, link, tokens: of the query's exhibit.
        lists: the two ends of the ranking; ``baseline`` is what gradients alone would have answered.
        axis: the scale of the whiskers.
        histogram, paths: figures.
        clear: how many scores are positive and negative beyond their errors, and how many are neither;
            None where no error is known.
        residual, agreement, verdict: why to believe it, in words.
        only_images: whether the lists are images without text, which need less room.
        words_to_filter: labels and notes that occur in the lists.
    """

    question: Question
    anchor: str
    heading: str
    picture: Picture | None
    link: str | None
    lists: tuple[ListView, ...]
    baseline: ListView
    axis: Markup
    histogram: Markup | None
    paths: Markup | None
    clear: tuple[int, int, int] | None
    residual: str
    agreement: str
    verdict: str
    only_images: bool
    words_to_filter: tuple[str, ...]

    @property
    def has_baseline(self) -> bool:
        """Whether gradients' dot products were computed."""
        entries = [*self.lists[0].entries, *self.lists[1].entries, *self.baseline.entries]
        return any(view.entry.baseline is not None for view in entries)

    @property
    def mistaken(self) -> bool:
        """Whether the model said something else than the label: then the label is what is explained."""
        label, said = self.question.exhibit.label, self.question.exhibit.prediction
        return label is not None and said is not None and said != label and not said.startswith(f"{label} (")

    @property
    def has_tokens(self) -> bool:
        """Whether any text is shaded."""
        lists = (*self.lists, self.baseline)
        return any(view.tokens for one in lists for view in one.entries)


def question_view(question: Question, report: Report) -> QuestionView:
    """Everything the page shows of a question."""
    scale = figures.whisker_scale([*question.helpful, *question.harmful])
    anchors = _Anchors(f"q{question.number}")
    lists = (
        ListView("helpful", tuple(_entry(e, anchors.of(e, "t"), scale) for e in question.helpful)),
        ListView("harmful", tuple(_entry(e, anchors.of(e, "t"), scale) for e in question.harmful)),
    )
    baseline = ListView("baseline", tuple(_baseline_entries(question, anchors, scale)))
    shown = [view.exhibit for one in (*lists, baseline) for view in one.entries]
    reach = _standard_errors_in_interval(question, report.confidence)
    half_widths = reach * question.stderr
    known = half_widths[np.isfinite(half_widths)]
    positive = int((question.scores > half_widths).sum())
    negative = int((question.scores < -half_widths).sum())
    return QuestionView(
        question=question,
        anchor=f"q{question.number}",
        heading=_heading(question.exhibit),
        picture=picture(question.exhibit.image),
        link=href(question.exhibit.link),
        lists=lists,
        baseline=baseline,
        axis=figures.whisker_axis(scale),
        histogram=figures.histogram(
            question.scores,
            float(np.median(known)) if known.size else math.nan,
            helpful=question.helpful,
            harmful=question.harmful,
        ),
        paths=figures.chain_paths(
            question.paths,
            report.trust.plan.get("tail", DEFAULT_TAIL if question.proven is None else 0.0),
            unit="step" if question.proven is None else "iteration",
        ),
        clear=(positive, negative, question.scores.size - positive - negative) if known.size else None,
        residual=words.residual(question),
        agreement=words.agreement(question),
        verdict=words.verdict(question),
        only_images=any(e.image for e in shown) and not any(e.text or e.tokens for e in shown),
        words_to_filter=_words_to_filter(shown),
    )


def _entry(entry: Entry, anchor: str, scale: Linear, by_influence: str | None = None) -> EntryView:
    exhibit = entry.exhibit or Exhibit()
    score, ends = interval(entry.score, entry.low, entry.high)
    effect, effect_ends = interval(entry.effect, entry.effect_low, entry.effect_high)
    tokens = shade(exhibit, entry.token_scores)
    by_gradient = None
    if entry.baseline is not None:
        place = f"rank {count(entry.baseline_rank)}, " if entry.baseline_rank is not None else ""
        by_gradient = f"{place}{signed(entry.baseline)}"
    return EntryView(
        entry=entry,
        anchor=anchor,
        rank=entry.rank,
        score=score,
        interval=ends,
        effect=effect,
        effect_interval=effect_ends,
        tied=not entry.separated,
        by_gradient=by_gradient,
        by_influence=by_influence,
        whisker=figures.whisker(entry, scale),
        picture=picture(exhibit.image),
        link=href(exhibit.link),
        tokens=tokens,
        strongest=strongest(tokens),
    )


def _baseline_entries(question: Question, anchors: _Anchors, scale: Linear) -> Iterator[EntryView]:
    """Entries ranked by gradients, each with the place that influence gives it."""
    for place, entry in enumerate(question.by_baseline, start=1):
        rank = 1 + int((question.scores > entry.score).sum())
        total = count(question.scores.size)
        by_influence = f"rank {count(rank)} of {total}" if math.isfinite(entry.score) else None
        view = _entry(entry, anchors.of(entry, "b"), scale, by_influence)
        yield EntryView(**{**vars(view), "rank": entry.baseline_rank or place, "tied": False})


class _Anchors:
    """Addresses such as ``q0-t123``; an example that is shown twice gets a second one."""

    def __init__(self, prefix: str) -> None:
        self.prefix, self.taken = prefix, set[str]()

    def of(self, entry: Entry, kind: str) -> str:
        anchor = f"{self.prefix}-{kind}{entry.index}"
        while anchor in self.taken:
            anchor += "-again"
        self.taken.add(anchor)
        return anchor


def _heading(exhibit: Exhibit) -> str:
    """The query's name: its id, else what it says."""
    if exhibit.id:
        return exhibit.id
    said = f"{exhibit.prompt or ''}{exhibit.text or ''}".strip()
    if said:
        return said if len(said) <= 90 else said[:60].rstrip() + " … " + said[-24:].lstrip()
    if exhibit.prediction:
        return f"read as {exhibit.prediction}"
    return exhibit.label or ""


def _standard_errors_in_interval(question: Question, confidence: float) -> float:
    """Half an interval's width in standard errors, as the entries have it; normal if none tells."""
    ratios = []
    for entry in (*question.helpful[:4], *question.harmful[:4]):
        where = np.flatnonzero(question.indices == entry.index)
        error = float(question.stderr[where[0]]) if where.size else math.nan
        width = (entry.high - entry.low) / 2
        if error > 0 and math.isfinite(width):
            ratios.append(width / error)
    if ratios:
        return statistics.median(ratios)
    return statistics.NormalDist().inv_cdf(0.5 + min(max(confidence, 0.0), 0.999999) / 2)


def _words_to_filter(exhibits: Iterable[Exhibit], most: int = 40) -> tuple[str, ...]:
    found = {word for exhibit in exhibits for word in (exhibit.label, exhibit.note) if word}
    return tuple(sorted(found)[:most])


# --- checks of the scores ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CheckView:
    """One check: its question, its verdict as a mark and in a word, what it found, and its numbers as text."""

    heading: str
    look: str
    mark: Markup
    word: str
    sentence: str
    numbers: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class ValidationView:
    """All checks: the conclusion, one row for each, scores against fine-tuning, and what none of it says."""

    conclusion: CheckView
    checks: tuple[CheckView, ...]
    agreement: Markup | None
    limits: str


_WORDS = {"trust": "Trust", "doubt": "Doubt", "cannot tell": "Cannot tell"}


def validation_view(validation: Validation | None) -> ValidationView | None:
    """What the page shows of the checks; None where there were none."""
    if validation is None:
        return None
    whole = Check("all", validation.verdict, validation.summary)
    return ValidationView(
        conclusion=_check(whole),
        checks=tuple(_check(check) for check in validation.checks),
        agreement=figures.agreement(validation.comparisons),
        limits=LIMITS,
    )


def _check(check: Check) -> CheckView:
    return CheckView(
        heading=NAMES.get(check.name, check.name),
        look=f"says-{check.verdict.partition(' ')[0]}",
        mark=figures.verdict_mark(check.verdict),
        word=_WORDS[check.verdict] if check.ran else "Not run",
        sentence=check.sentence,
        numbers=tuple(_number(check.numbers)),
    )


def _number(numbers: Mapping[str, tuple[float, float]]) -> Iterator[tuple[str, str]]:
    """Numbers as text; one named "of" belongs to the number before it."""
    shown: list[tuple[str, str]] = []
    for name, (value, error) in numbers.items():
        text = brief(value, 3) if error == 0 else _with_error(value, error)
        if name == "of" and shown:
            before, number = shown.pop()
            shown.append((before, f"{number} of {text}"))
        else:
            shown.append((name, text))
    yield from shown


def _with_error(value: float, error: float) -> str:
    """Three decimals are enough here; an error that they do not show is left out."""
    if error >= 0.01 or abs(value) >= 100:
        return plus_minus(value, error)
    text = f"{value:.3f}" if error < 0.0005 else f"{value:.3f} ± {error:.3f}"
    return text.replace("-", MINUS)
