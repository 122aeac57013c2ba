"""`render`: the page of ``whence clean``. Which training examples look like mistakes, and how sure is that?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from whence.exhibit import Exhibit
from whence.report import figures
from whence.report.axes import Linear
from whence.report.document import Item, Page, document, words_to_filter
from whence.report.formatting import brief, count, interval, percentage, signed

if TYPE_CHECKING:
    from whence.cleaning.result import Cleaning, Suspect

__all__ = ["render"]

_IN_WORDS = {"gradient-norm": "length of its gradient"}  # measures that are called otherwise in a sentence


def render(result: Cleaning) -> str:
    """The page as one self-contained HTML document."""
    suspects = result.top(result.shown)
    lists = [_ListView("suspects", suspects, result)]
    if result.harm is not None:
        lists.append(_ListView("harmful", result.most_harmful(result.shown), result))
    page = Page(
        title=result.title,
        num_examples=len(result.ids),
        num_scored=len(result.ids),
        not_scored="",
        score_method="One backward per example gives its products with the directions of the approximation, and "
        "the length of its gradient; one forward its loss.",
        settings={name: str(value) for name, value in result.settings.items()},
        versions=result.versions,
        seconds=result.seconds,
    )
    overlaps = {
        by: sum(places[suspect.index] <= len(suspects) for suspect in suspects)
        for by, places in result.places.items()
        if by != result.by
    }
    return document(
        "clean_page.html.j2",
        page,
        result=result,
        lists=lists,
        measure=_IN_WORDS.get(result.by, result.by),
        overlaps=[(_IN_WORDS.get(by, by), shared) for by, shared in overlaps.items()],
    )


class _ListView:
    """What the template shows of a ranking, ``"suspects"`` or ``"harmful"``."""

    def __init__(self, name: str, suspects: Sequence[Suspect], result: Cleaning) -> None:
        scores = [_score(suspect, harm=name == "harmful") for suspect in suspects]
        scale = figures.whisker_scale(scores)
        self.name = name
        self.axis = figures.whisker_axis(scale)
        self.items = [
            _item(name, suspect, score, scale, result)
            for suspect, score in zip(suspects, scores, strict=True)
        ]
        self.histogram = None
        if name == "suspects":
            self.histogram = figures.histogram(
                result.found.values.numpy(),
                helpful=[value for value, _, _ in scores],
                names=("self-influence", "values of self-influence"),
            )
        said = [word for suspect in suspects for word in (suspect.label, suspect.prediction)]
        self.words = words_to_filter([*said, *(item.exhibit.note for item in self.items)])


def _score(suspect: Suspect, *, harm: bool) -> tuple[float, float, float]:
    """What a list ranks by or shows first, with its ends."""
    if not harm:
        return suspect.self_influence, suspect.low, suspect.high
    value, low, high = (
        math.nan if x is None else x for x in (suspect.score, suspect.score_low, suspect.score_high)
    )
    return value, low, high


def _item(
    name: str, suspect: Suspect, score: tuple[float, float, float], scale: Linear, result: Cleaning
) -> Item:
    harm = name == "harmful"
    value, low, high = score
    shown, ends = interval(*score)
    if not harm:  # bounds far apart, the lower one small: each in digits of its own
        shown, ends = brief(value, 3), f"{brief(low, 2)} to {brief(high, 2)}"
    effect = suspect.score_effect if harm else suspect.effect
    lines = [("If removed", f"{signed(math.nan if effect is None else effect)} nats", "")]
    if harm or result.by != "self-influence":  # else the list's own rank and number are these
        own = f", {brief(suspect.self_influence, 3)}" if harm else ""
        lines.append(("Self-influence", f"rank {count(suspect.self_influence_rank)}{own}", ""))
    loss, norm = f"{brief(suspect.loss, 3)} nats", brief(suspect.gradient_norm, 3)
    lines.append(("Loss", f"rank {count(suspect.loss_rank)}, {loss}", ""))
    lines.append(("Gradient norm", f"rank {count(suspect.gradient_norm_rank)}, {norm}", ""))
    exhibit = result.exhibits.get(suspect.index) or Exhibit()
    says = suspect.prediction
    if says is not None and suspect.probability is not None:
        says = f"{says} ({percentage(suspect.probability, 2)})"
    return Item(
        index=suspect.index,
        rank=suspect.rank,
        anchor=f"{name}-{suspect.index}",
        exhibit=replace(exhibit, id=suspect.id, label=suspect.label or exhibit.label, prediction=says),
        value=value,
        score=shown,
        interval=ends,
        whisker=figures.whisker(*score, scale),
        keys={
            "effect": suspect.loss,
            "baseline": suspect.gradient_norm,
            "separated": int(suspect.disagrees),
        },
        lines=lines,
        disagrees=suspect.disagrees,
    )
