"""`render`: the page of an attribution, from a `Report` to one self-contained HTML document."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from functools import cached_property

import numpy as np
from markupsafe import Markup

from whence.exhibit import Exhibit
from whence.report import figures
from whence.report.axes import Linear
from whence.report.checks import LIMITS
from whence.report.content import Entry, Question, Report
from whence.report.document import Item, document, shade, words_to_filter
from whence.report.figures import Floats
from whence.report.formatting import MINUS, brief, count, interval, plus_minus, signed

__all__ = ["render"]

TAIL = 0.5  # the part of a path that LiSSA averages


def render(report: Report) -> str:
    """The report as one self-contained HTML document."""
    trust, validation = report.trust, report.validation
    questions = [_QuestionView(question, report) for question in report.questions]
    plan = {name: x if math.isfinite(x) else str(x) for name, x in trust.plan.items()}  # JSON has no NaN
    return document(
        "page.html.j2",
        report,
        questions=questions,
        unconverged=[view for view in questions if not view.question.converged],
        agreement=None if validation is None else figures.agreement(validation.comparisons),
        check_numbers=_check_numbers,
        limits=LIMITS,
        eigenvalues=figures.eigenvalues(trust.eigenvalues, trust.plan.get("damping", math.nan)),
        reproduce={"plan": plan},
    )


# --- a question and its lists --------------------------------------------------------------------------------


class _QuestionView:
    """What the template shows of a question: its lists and its figures.

    Attributes:
        question: where it comes from.
        anchor: its address on the page.
        axis: the scale of the whiskers.
        helpful, harmful: the two ends of the ranking.
        baseline: what gradients alone would have answered.
        paths: the solver's way, as a figure.
    """

    def __init__(self, question: Question, report: Report) -> None:
        self.question, self._confidence = question, report.confidence
        self.anchor = f"q{question.number}"
        scale = figures.whisker_scale(
            (e.score, e.low, e.high) for e in (*question.helpful, *question.harmful)
        )
        self.axis = figures.whisker_axis(scale)
        self.helpful = [_item(e, f"{self.anchor}-t{e.index}", scale) for e in question.helpful]
        twice = {e.index for e in question.helpful}
        self.harmful = [
            _item(e, f"{self.anchor}-t{e.index}{'-again' if e.index in twice else ''}", scale)
            for e in question.harmful
        ]
        self.baseline = [
            _item(
                e, f"{self.anchor}-b{e.index}", scale, listed=e.baseline_rank or place, among=question.scores
            )
            for place, e in enumerate(question.by_baseline, start=1)
        ]
        proven = question.proven is not None
        self.paths = figures.chain_paths(
            question.paths,
            0.0 if proven else TAIL,
            unit="iteration" if proven else "step",
        )

    @property
    def items(self) -> list[Item]:
        """Everything in its lists."""
        return [*self.helpful, *self.harmful, *self.baseline]

    @property
    def heading(self) -> str:
        """What to call it where there is little room: its id, else what it says."""
        exhibit = self.question.exhibit
        if exhibit.id:
            return exhibit.id
        said = f"{exhibit.prompt or ''}{exhibit.text or ''}".strip()
        if said:
            return said if len(said) <= 90 else said[:60].rstrip() + " … " + said[-24:].lstrip()
        return f"read as {exhibit.prediction}" if exhibit.prediction else exhibit.label or ""

    @property
    def mistaken(self) -> bool:
        """Whether the model said something else than the label: then the label is what is explained."""
        label, said = self.question.exhibit.label, self.question.exhibit.prediction
        return label is not None and said is not None and said != label and not said.startswith(f"{label} (")

    @property
    def has_baseline(self) -> bool:
        """Whether gradients' dot products were computed."""
        return any(item.keys["baseline"] != "" for item in self.items)

    @property
    def has_tokens(self) -> bool:
        """Whether any text is shaded."""
        return any(item.tokens for item in self.items)

    @property
    def only_images(self) -> bool:
        """Whether the lists are images without text, which need less room."""
        shown = [item.exhibit for item in self.items]
        return any(x.image for x in shown) and not any(x.text or x.tokens for x in shown)

    @property
    def words_to_filter(self) -> list[str]:
        """Labels and notes that occur in the lists."""
        return words_to_filter(w for item in self.items for w in (item.exhibit.label, item.exhibit.note))

    @cached_property
    def _half_widths(self) -> Floats:
        """Half of every score's interval: as many standard errors as for the entries, or for a normal distribution."""
        question, ratios = self.question, []
        for entry in (*question.helpful[:4], *question.harmful[:4]):
            errors = question.stderr[question.indices == entry.index]
            width = (entry.high - entry.low) / 2
            if errors.size and errors[0] > 0 and math.isfinite(width):
                ratios.append(width / float(errors[0]))
        if ratios:
            return statistics.median(ratios) * question.stderr
        confidence = min(max(self._confidence, 0.0), 0.999999)
        return statistics.NormalDist().inv_cdf(0.5 + confidence / 2) * question.stderr

    @property
    def clear(self) -> tuple[int, int, int] | None:
        """How many scores are positive and negative beyond their errors, how many neither; None without errors."""
        if not np.isfinite(self._half_widths).any():
            return None
        scores = self.question.scores
        positive = int((scores > self._half_widths).sum())
        negative = int((scores < -self._half_widths).sum())
        return positive, negative, scores.size - positive - negative

    @property
    def histogram(self) -> Markup | None:
        """All scores, as a figure."""
        question, known = self.question, self._half_widths[np.isfinite(self._half_widths)]
        noise = float(np.median(known)) if known.size else math.nan
        helpful, harmful = ([e.score for e in end] for end in (question.helpful, question.harmful))
        return figures.histogram(question.scores, noise, helpful=helpful, harmful=harmful)


def _item(
    entry: Entry,
    anchor: str,
    scale: Linear,
    *,
    listed: int | None = None,
    among: Floats | None = None,
) -> Item:
    """An entry of a ranking, by influence or by gradients.

    Args:
        entry: what to show.
        anchor: its address on the page.
        scale: of its whisker.
        listed: its place in a ranking by gradients; None in one by influence.
        among: all scores by influence, where its place among them is to be said.
    """
    exhibit = entry.exhibit or Exhibit()
    score, ends = interval(entry.score, entry.low, entry.high)
    effect, effect_ends = interval(entry.effect, entry.effect_low, entry.effect_high)
    lines = [("If removed", f"{effect} nats", f"between {effect_ends} nats")]
    if among is not None and math.isfinite(entry.score):
        rank = 1 + int((among > entry.score).sum())
        lines.append(("Influence", f"rank {count(rank)} of {count(among.size)}", ""))
    if entry.baseline is not None:
        place = "" if entry.baseline_rank is None else f"rank {count(entry.baseline_rank)}, "
        lines.append(("By gradient", f"{place}{signed(entry.baseline)}", ""))
    return Item(
        index=entry.index,
        rank=listed or entry.rank,
        anchor=anchor,
        exhibit=exhibit,
        value=entry.score,
        score=score,
        interval=ends,
        whisker=figures.whisker(entry.score, entry.low, entry.high, scale),
        keys={
            "effect": entry.effect,
            "baseline": "" if entry.baseline is None else entry.baseline,
            "separated": int(entry.separated),
        },
        lines=lines,
        tokens=shade(exhibit, entry.token_scores),
        tied=listed is None and not entry.separated,
    )


def _check_numbers(numbers: Mapping[str, tuple[float, float]]) -> Iterable[tuple[str, str]]:
    """A check's numbers as text; one named "of" belongs to the number before it."""
    shown: list[tuple[str, str]] = []
    for name, (value, error) in numbers.items():
        if error == 0:
            text = brief(value, 3)
        elif error >= 0.01 or abs(value) >= 100:
            text = plus_minus(value, error)
        else:  # three decimals are enough here; an error that they do not show is left out
            text = f"{value:.3f}" if error < 0.0005 else f"{value:.3f} ± {error:.3f}"
            text = text.replace("-", MINUS)
        if name == "of" and shown:
            name, before = shown.pop()
            text = f"{before} of {text}"
        shown.append((name, text))
    return shown
