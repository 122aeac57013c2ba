"""The page of ``whence clean``: training examples that look like mistakes, and how sure that is.

It is made of the same parts as the page of an attribution: its styles, its scripts, its policy, its figures.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from markupsafe import Markup

from whence.exhibit import Exhibit
from whence.report import figures
from whence.report.axes import Linear
from whence.report.content import Entry, Floats
from whence.report.document import document
from whence.report.formatting import brief, count, interval, percentage, plus_minus, signed
from whence.report.untrusted import Picture, href, picture
from whence.report.words import Fact

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
        smallest, largest, confidence: its bounds; see `whence.scoring.self_influence`.
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


@dataclass(frozen=True)
class CleanReport:
    """Everything on the page.

    Attributes:
        title: heading.
        by: the measure that ranks: a key of `MEASURES`.
        suspects: the first of the ranking.
        harmful: the examples that harm the given queries most; empty where there were none.
        queries: how many queries were given.
        exhibits: index -> what to show of an example.
        values: self-influence of all examples.
        overlaps: measure -> how many of the suspects are as far up by it.
        grounds: what the numbers rest on.
        notes: what to know before reading on, in words.
        num_examples, num_scored, not_scored, score_method, settings, versions, seconds: as in `Report`.
    """

    title: str
    by: str
    suspects: tuple[Suspect, ...]
    harmful: tuple[Suspect, ...]
    queries: int
    exhibits: Mapping[int, Exhibit]
    values: Floats
    overlaps: Mapping[str, int]
    grounds: Grounds
    notes: tuple[str, ...]
    num_examples: int
    num_scored: int
    not_scored: str
    score_method: str
    settings: Mapping[str, str]
    versions: Mapping[str, str] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class SuspectView:
    """An example as the template shows it: numbers in words, a figure, an address on the page."""

    suspect: Suspect
    anchor: str
    sort_value: float
    side: str
    score: str
    interval: str
    effect: str
    places: tuple[tuple[str, str], ...]
    says: str | None
    whisker: Markup
    exhibit: Exhibit
    picture: Picture | None
    link: str | None
    tokens: tuple[()] = ()


@dataclass(frozen=True)
class ListView:
    """A ranking: ``name`` is "suspects" or "harmful", ``measure`` what its numbers are called."""

    name: str
    measure: str
    entries: tuple[SuspectView, ...]
    axis: Markup
    histogram: Markup | None

    @property
    def words_to_filter(self) -> tuple[str, ...]:
        """Labels, predictions and notes that occur in the list."""
        found = {
            word
            for view in self.entries
            for word in (view.suspect.label, view.suspect.prediction, view.exhibit.note)
            if word
        }
        return tuple(sorted(found)[:40])


def render(report: CleanReport) -> str:
    """The page as one self-contained HTML document."""
    lists = [_list("suspects", report.suspects, report)]
    if report.queries:
        lists.append(_list("harmful", report.harmful, report))
    return document(
        "clean.html.j2",
        report=report,
        lists=lists,
        labelled=any(suspect.label is not None for suspect in report.suspects),
        measure=MEASURES[report.by],
        overlaps=[(MEASURES[name], shared) for name, shared in report.overlaps.items()],
        facts=list(_facts(report.grounds)),
        limits=_limits(report.grounds),
        reproduce={"settings": dict(report.settings), "versions": dict(report.versions)},
    )


def _list(name: str, suspects: Iterable[Suspect], report: CleanReport) -> ListView:
    entries = [_entry(suspect, harm=name == "harmful") for suspect in suspects]
    scale = figures.whisker_scale(entries)
    views = tuple(
        _view(suspect, entry, report.exhibits.get(suspect.index) or Exhibit(), scale, name, report.by)
        for suspect, entry in zip(suspects, entries, strict=True)
    )
    return ListView(
        name=name,
        measure="influence on the queries" if name == "harmful" else "self-influence",
        entries=views,
        axis=figures.whisker_axis(scale),
        histogram=None
        if name == "harmful"
        else figures.histogram(
            report.values, helpful=entries, names=("self-influence", "values of self-influence")
        ),
    )


def _entry(suspect: Suspect, *, harm: bool) -> Entry:
    """The numbers of a list's whiskers."""
    numbers = (suspect.self_influence, suspect.low, suspect.high, suspect.effect)
    if harm:
        known = (suspect.score, suspect.score_low, suspect.score_high, suspect.score_effect)
        score, low, high, effect = (math.nan if number is None else number for number in known)
        numbers = (score, low, high, effect)
    score, low, high, effect = numbers
    return Entry(suspect.rank, suspect.index, score, low, high, effect, effect, effect, separated=True)


def _view(suspect: Suspect, entry: Entry, exhibit: Exhibit, scale: Linear, name: str, by: str) -> SuspectView:
    harm = name == "harmful"
    score, ends = interval(entry.score, entry.low, entry.high)
    if not harm:  # bounds far apart, the lower one small: each in digits of its own
        score, ends = brief(entry.score, 3), f"{brief(entry.low, 2)} to {brief(entry.high, 2)}"
    places = [
        ("Loss", f"rank {count(suspect.loss_rank)}, {brief(suspect.loss, 3)} nats"),
        ("Gradient norm", f"rank {count(suspect.gradient_norm_rank)}, {brief(suspect.gradient_norm, 3)}"),
    ]
    if harm or by != "self-influence":  # else the list's own rank and number are these
        value = f", {brief(suspect.self_influence, 3)}" if harm else ""
        places.insert(0, ("Self-influence", f"rank {count(suspect.self_influence_rank)}{value}"))
    says = None
    if suspect.prediction is not None:
        sure = "" if suspect.probability is None else f" ({percentage(suspect.probability, 2)})"
        says = f"{suspect.prediction}{sure}"
    return SuspectView(
        suspect=suspect,
        anchor=f"{name}-{suspect.index}",
        sort_value=entry.score,
        side="neg" if entry.score < 0 else "pos",
        score=score,
        interval=ends,
        effect=signed(entry.effect),
        places=tuple(places),
        says=says,
        whisker=figures.whisker(entry, scale),
        exhibit=exhibit,
        picture=picture(exhibit.image),
        link=href(exhibit.link),
    )


def _facts(grounds: Grounds) -> Iterator[Fact]:
    g = grounds
    yield Fact(
        "Largest curvature λmax", plus_minus(*g.lambda_max), "The steepest direction of the training loss."
    )
    yield Fact(
        "Damping λ",
        brief(g.damping),
        "Stands for the curvature of directions that the data hardly determine. Larger brings self-influence nearer to "
        "the squared length of the gradient.",
    )
    yield Fact(
        "Rank",
        count(g.rank),
        "Directions whose curvature is taken as measured. In all others λ stands for it.",
    )
    yield Fact(
        f"{g.term.capitalize()}s",
        f"{count(g.operator_terms)} of {count(g.num_terms)}",
        "What the curvature is measured on. The bounds are about the curvature of these.",
    )
    if g.scale is not None:
        yield Fact(
            "Scale",
            plus_minus(*g.scale),
            f"Exact self-influence over the upper bound: the mean over {count(g.probes)} examples that were solved "
            f"for. From example to example it differs by about {percentage(g.spread / g.scale[0], 2)}.",
        )
    yield Fact(
        "Upper over lower bound",
        brief(g.largest / g.smallest, 3),
        "The same for every example. A larger rank brings the two together.",
    )
    yield Fact("Products", count(g.num_products), "Of the curvature with a vector, or with several at once.")


def _limits(grounds: Grounds) -> str:
    whole = grounds.operator_terms >= grounds.num_terms
    about = (
        "the training data" if whole else f"the {count(grounds.operator_terms)} {grounds.term}s measured on"
    )
    return (
        f"Exact self-influence for the curvature of {about} is never above the upper bound, and not below the lower "
        f"one with probability {percentage(grounds.confidence)}. That it finds mistakes is a matter of experience, "
        "not of proof."
    )
