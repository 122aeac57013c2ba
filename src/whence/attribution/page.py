"""`render`: the page of an attribution, as one self-contained HTML document."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from markupsafe import Markup

from whence.attribution.checkpoint import correlation
from whence.attribution.groups import Groups
from whence.attribution.ranking import Row
from whence.errors import OptionError
from whence.exhibit import Exhibit
from whence.report import figures
from whence.report.axes import Linear
from whence.report.checks import LIMITS
from whence.report.document import Item, Page, document, shade, words_to_filter
from whence.report.formatting import MINUS, brief, count, interval, plus_minus, shorten, signed
from whence.runs.files import given_path, write_bytes
from whence.spectrum import Estimate

if TYPE_CHECKING:
    from whence.attribution.result import Attribution

__all__ = ["accuracy_words", "checked_file", "render", "write_page"]

#: Rows shown at each end of a ranking, and of the ranking by gradient dot product.
SHOWN = 20
BASELINE_SHOWN = 5
UNITS_SHOWN, GROUPS_SHOWN = 10, 20
WORDS = 32  # letters of an answer in a sentence
CONFIDENCE = 0.95
_ANCHORS = {"score": "t", "baseline": "b", "unit": "u"}
_ENOUGH = 20  # examples that a top ten means something of
TAIL = 0.5  # the part of a path that LiSSA averages

_ESTIMATES = ("trace", "frobenius", "lambda_max", "sampling_constant", "top_sampling_constant")
_LISSA_SETTINGS = ("damping", "step_size", "batch_size", "num_steps", "chains", "constant")


def render(result: Attribution) -> str:
    """The page of a result."""
    solve, spectrum, validation = result.solve, result.solve.plan.spectrum, result.validation
    questions = [_Question(result, q, agreement) for q, agreement in enumerate(result.agreement.tolist())]
    estimates = {name: getattr(spectrum, name) for name in _ESTIMATES}
    plan: dict[str, float | int]
    if result.checkpoints:  # each has its own
        estimates, plan = {}, {}
    elif solve.solver == "ekfac":
        estimates = {name: estimates[name] for name in ("trace", "lambda_max")}
        plan = {"damping": solve.plan.damping}
    elif solve.certificate is None:
        plan = {name: getattr(solve.plan, name) for name in _LISSA_SETTINGS}
    else:
        plan = {
            "damping": solve.plan.damping,
            "iterations": solve.paths.shape[1],
            "operator_terms": solve.certificate.operator_terms,
        }
    page = Page(
        title=result.title,
        num_examples=result.num_examples,
        num_scored=len(result.indices),
        not_scored=result.not_scored,
        score_method=result.score_method,
        settings={name: str(value) for name, value in result.settings.items()},
        versions=result.versions,
        seconds=result.seconds,
    )
    known = None if result.checkpoints else spectrum.eigenvalues
    eigenvalues = None if known is None else known.numpy()
    return document(
        "page.html.j2",
        page,
        questions=questions,
        unconverged=[question for question in questions if not question.ended_well],
        accuracy=accuracy_words(result),
        doubts=result.doubts,
        confidence=CONFIDENCE,
        solve=solve,
        spectrum={name: (e.value, e.stderr) for name, e in estimates.items() if isinstance(e, Estimate)},
        plan=plan,
        term="example" if result.num_terms == result.num_examples else "token",
        eigenvalues=figures.eigenvalues(eigenvalues, solve.plan.damping),
        damping=_Damping(result),
        checkpoints=_checkpoints(result),
        dominant_error=result.dominant_error,
        validation=validation,
        agreement=None if validation is None else figures.agreement(validation.comparisons),
        check_numbers=_check_numbers,
        limits=LIMITS,
        reproduce={"plan": plan},
    )


def accuracy_words(result: Attribution) -> str:
    """What correlation with the exact damped scores is expected; empty where nothing is known of it."""
    if result.accuracy is None:
        return ""
    value, low, high = (f"{number:.2f}" if number < 0.995 else f"{number:.3f}" for number in result.accuracy)
    doubted = " This is in doubt." if result.doubts else ""
    return f"Scores should correlate {value} with the exact ones (90%: {low} to {high}).{doubted}"


def write_page(page: str, path: str | Path, *, example: str = "report.html") -> Path:
    """Write an HTML document, all of it or nothing: a reader never meets half of one. Returns its path.

    Raises:
        OptionError: ``path`` is a directory; says that it could be ``example`` in it.
        StorageError: the file cannot be written, as on a full disk; what was there before is still there.
    """
    target = checked_file(path, example)
    write_bytes(target, page.encode("utf-8"))
    return target


def checked_file(path: str | Path, example: str) -> Path:
    """The path, unless there is a directory."""
    target = given_path(path, "path")
    if target.is_dir():
        raise OptionError(f"{target} is a directory; give the file's name too, such as {target / example}")
    return target


def _checkpoints(result: Attribution) -> list[dict[str, object]]:
    """What the page says of each checkpoint: its solve, and how much its scores are like those of all."""
    mean, found = result.scored.mean, []
    for each, scores in zip(result.checkpoints, result.chain_scores, strict=False):
        found.append(
            {
                "name": each.name,
                "solver": each.solver,
                "damping": each.damping,
                "converged": int(each.converged.sum()),
                "residual": float(each.residual.max()),
                "loss": float(each.losses.mean()),
                "correlation": float(correlation(scores, mean).mean()),
            }
        )
    return found


class _Damping:
    """What the page says of λ: how it was found, what it decides, and how far scores depend on the data's own draw.

    Attributes:
        words: how it was found.
        depends: whether rankings depend on it, in words; empty where that is not known.
        figure: how much of the top ten other λ keep.
        errors: the solver's error beside that of H, in words; empty where the latter was not measured.
    """

    def __init__(self, result: Attribution) -> None:
        self.words, self.depends, self.figure = result.solve.damping_words, "", None
        if result.solve.shifted is not None and len(result.indices) >= _ENOUGH:
            over = result.over_damping()
            self.depends, self.figure = over.words(), over.figure()
        self.errors = ""
        if result.data_stderr is not None and result.stability is not None:
            size = result.scored.mean.square().mean().sqrt().clamp_min(1e-300)
            solver = float(result.scored.stderr.nan_to_num(0.0).square().mean().sqrt() / size)
            data = float(result.data_stderr[:, result.indices].square().mean().sqrt() / size)
            larger = "The second is the larger one." if data > solver else "The first is the larger one."
            agreement = result.stability.agreement_at(result.solve.plan.damping)
            self.errors = (
                "Two errors of the scores are known, in root mean square and relative to them. The solver’s, which the "
                f"intervals show: about {solver:.1%}. That of H itself: had it been measured on half of the training "
                f"data and not on all, {data:.0%}; the scores of two halves agree to {agreement:.2f}. {larger} Neither "
                "says how far influence is from retraining."
            )


class _Question:
    """What the templates show of a query: its lists, its figures, and how its solve fared.

    Attributes:
        quick: whether EK-FAC answered.
        proven: what a certificate bounds the scores' error by, relative to the scores, in root mean square; or None.
        expected: what the examples' scores should be off by, relative to their spread; or None.
        parts: what the chains' start has left behind, at most, and what sampling has added, relative to the scores; or
            None.
        agreement: mean correlation between the chains' scores, pair by pair; NaN where there is one.
        paths: the solver's way, as a figure.
        clear: how many scores are positive and negative beyond their errors, how many neither; None without errors.
    """

    def __init__(self, result: Attribution, q: int, agreement: float) -> None:
        solve, parts, certificate = result.solve, result.solve.error_parts, result.solve.certificate
        self.number, self.anchor = q, f"q{q}"
        self.exhibit = result.queries[q] if q < len(result.queries) else Exhibit(id=str(q))
        self.facts = self.exhibit.facts or (("Loss", f"{brief(float(result.query_losses[q]), 3)} nats"),)
        self.converged, self.ended_well = bool(solve.converged[q]), bool(solve.ended_well[q])
        self.quick = solve.solver == "ekfac"
        self.residual, self.residual_stderr = float(solve.residual[q]), float(solve.residual_stderr[q])
        self.agreement = agreement
        self.proven = None  # ‖u - u*‖_A / ‖u‖_H
        if certificate is not None and solve.score_rms is not None:
            self.proven = float(certificate.upper[q]) / max(float(solve.score_rms[q]), 1e-300)
        self.expected = None if parts.expected is None else float(parts.expected[q])
        self.parts = None
        if certificate is None and solve.solver != "ekfac" and not result.checkpoints:
            self.parts = float(parts.bias[q]), float(parts.sampling[q])
        tail, unit = (TAIL, "step") if certificate is None else (0.0, "iteration")
        self.paths = figures.chain_paths(solve.paths[:, :, q].numpy(), tail, unit=unit)
        self._list(result)
        self._draw(result)

    def _list(self, result: Attribution) -> None:
        """The two ends of the ranking, and what gradients alone would have answered."""
        q = self.number
        # An example is helpful if its score is positive: with few examples the two ends would overlap.
        helpful = [row for row in result.top(SHOWN, query=q) if row.score > 0]
        harmful = [row for row in result.top(SHOWN, query=q, harmful=True) if row.score < 0]
        by_baseline: list[int] = []
        if result.dot_products is not None:
            order = result.dot_products[q].argsort(descending=True, stable=True)[:BASELINE_SHOWN]
            by_baseline = result.indices[order].tolist()
        scale = figures.whisker_scale((row.score, row.low, row.high) for row in (*helpful, *harmful))
        self.axis = figures.whisker_axis(scale)
        self.helpful, self.harmful = (
            [_item(result, row, scale) for row in end] for end in (helpful, harmful)
        )
        self.baseline = [_item(result, result.row(q, i), scale, by="baseline") for i in by_baseline]
        self.units = dict[str, list[Item]]()
        if result.norms is not None:
            for name in ("helpful", "harmful"):
                end = result.top(UNITS_SHOWN, query=q, harmful=name == "harmful", by="unit")
                own = [row for row in end if (row.score < 0) == (name == "harmful")]
                self.units[name] = [_item(result, row, scale, by="unit") for row in own]
        self.groups, self.groups_left = list[GroupShown](), 0
        if result.grouping is not None:
            self._show_groups(result.groups())

    def _show_groups(self, groups: Groups) -> None:
        """The groups with the largest effects, most helpful first."""
        rows = list(groups.top(len(groups.names), query=self.number, confidence=CONFIDENCE))
        if len(rows) > GROUPS_SHOWN:
            self.groups_left = len(rows)
            largest = sorted(rows, key=lambda row: -abs(row.effect))[:GROUPS_SHOWN]
            rows = [row for row in rows if row in largest]
        scale = figures.whisker_scale((row.effect, row.low, row.high) for row in rows)
        for row in rows:
            effect, ends = interval(row.effect, row.low, row.high)
            whisker = figures.whisker(row.effect, row.low, row.high, scale)
            self.groups.append(GroupShown(row.group, row.examples, row.effect, effect, ends, whisker))

    def _draw(self, result: Attribution) -> None:
        """All scores, as numbers and as a figure."""
        scored = result.scored.at(self.number)
        scores, widths = scored.mean.numpy(), scored.half_width(CONFIDENCE).numpy()
        known = widths[np.isfinite(widths)]
        self.histogram = figures.histogram(
            scores,
            float(np.median(known)) if known.size else math.nan,
            helpful=[item.value for item in self.helpful],
            harmful=[item.value for item in self.harmful],
        )
        self.clear = None
        if known.size:
            positive, negative = int((scores > widths).sum()), int((scores < -widths).sum())
            self.clear = positive, negative, scores.size - positive - negative

    @property
    def without(self) -> dict[str, str]:
        """What the model would be without the examples of a list: its name -> in words."""
        x = self.exhibit
        if x.contrast is not None:
            answer = x.label if x.label is not None else x.text or "this"
            said = f"inclined to “{shorten(answer, WORDS)}” rather than “{shorten(x.contrast, WORDS)}”"
            return {"helpful": f"less {said}", "harmful": f"more {said}"}
        of = (
            "the label"
            if self.mistaken
            else "these, on average"
            if x.asked and not x.text and not x.image
            else "this"
        )
        return {"helpful": f"less sure of {of}", "harmful": f"surer of {of}"}

    @property
    def number_words(self) -> str:
        """What it is worth, in a word."""
        name, text = self.facts[0]
        return f"{name[:1].lower()}{name[1:]} {text}"

    @property
    def has_units(self) -> bool:
        """Whether the lengths of gradients are known."""
        return bool(self.units)

    @property
    def items(self) -> list[Item]:
        """Everything in its lists."""
        return [
            *self.helpful,
            *self.harmful,
            *self.baseline,
            *(i for end in self.units.values() for i in end),
        ]

    @property
    def heading(self) -> str:
        """What to call it where there is little room: its id, else what it says."""
        exhibit = self.exhibit
        if exhibit.id:
            return exhibit.id
        said = f"{exhibit.prompt or ''}{exhibit.text or ''}".strip()
        if said:
            return said if len(said) <= 90 else said[:60].rstrip() + " … " + said[-24:].lstrip()
        return f"read as {exhibit.prediction}" if exhibit.prediction else exhibit.label or ""

    @property
    def mistaken(self) -> bool:
        """Whether the model said something else than the label: then the label is what is explained."""
        label, said = self.exhibit.label, self.exhibit.prediction
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


@dataclass(frozen=True)
class GroupShown:
    """A group of training examples in the table of a question."""

    name: str
    examples: int
    value: float
    effect: str
    interval: str
    whisker: Markup

    @property
    def side(self) -> str:
        """Class name of its sign."""
        return "neg" if self.value < 0 else "pos" if self.value > 0 else "neither"


def _item(result: Attribution, row: Row, scale: Linear, *, by: str = "score") -> Item:
    """A row of a ranking by influence, or by gradients: then its rank by influence is said beside it."""
    by_baseline = by == "baseline"
    exhibit = result.exhibits.get(row.index) or Exhibit()
    score, ends = interval(row.score, row.low, row.high)
    effect, effect_ends = interval(row.effect, row.effect_low, row.effect_high)
    lines = [("If removed", f"{effect} nats", f"between {effect_ends} nats")]
    if row.another_low is not None and row.another_high is not None:
        _, another = interval(row.score, row.another_low, row.another_high)
        lines.append(("Another model", another, "Where the score of one more checkpoint should lie"))
    if by_baseline and math.isfinite(row.score):
        lines.append(("Influence", f"rank {count(row.rank)} of {count(len(result.indices))}", ""))
    if by == "unit" and row.unit is not None:
        lines.append(("Per unit", signed(row.unit), "the score over the length of its gradient"))
    if row.dot_product is not None and row.dot_product_rank is not None:
        dot = f"rank {count(row.dot_product_rank)}, {signed(row.dot_product)}"
        lines.append(("By gradient", dot, ""))
    return Item(
        index=row.index,
        rank=row.dot_product_rank if by_baseline and row.dot_product_rank else row.rank,
        anchor=f"q{row.query}-{_ANCHORS[by]}{row.index}",
        exhibit=exhibit,
        value=row.score,
        score=score,
        interval=ends,
        whisker=figures.whisker(row.score, row.low, row.high, scale),
        keys={
            "effect": row.effect,
            "baseline": "" if row.dot_product is None else row.dot_product,
            "unit": "" if row.unit is None else row.unit,
            "separated": int(row.separated),
        },
        lines=lines,
        tokens=shade(exhibit, result.token_scores.get((row.query, row.index))),
        tied=not by_baseline and not row.separated,
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
