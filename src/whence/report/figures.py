"""The page's figures, as SVG that takes its colours from the page's style sheet.

Places along an axis are percentages and there is no ``viewBox``, so a figure stretches to any width while its
letters and dots keep their size. Lines of many points sit in a nested ``svg`` that stretches.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
from markupsafe import Markup, escape

from whence.report.axes import Linear, Log, Scale, Steps, SymLog, tick_label
from whence.report.checks import Comparison, Verdict
from whence.report.content import Entry, Floats
from whence.report.formatting import brief, count

__all__ = [
    "agreement",
    "chain_paths",
    "eigenvalues",
    "histogram",
    "verdict_mark",
    "whisker",
    "whisker_axis",
    "whisker_scale",
]

HEIGHT = 170  # of a figure's plotting area, in pixels
SQUARE = 270  # the same where both axes count alike
PAIRS = 400  # in a scatter plot, at most
BARS = 60
POINTS = 240  # of a path; more than a screen shows
PALETTE = 6  # colours of chains in style.css


# --- a score with its interval --------------------------------------------------------------------------------


def whisker_scale(entries: Iterable[Entry]) -> Linear:
    """One scale for all the whiskers of a question, with zero on it."""
    ends = [x for e in entries for x in (e.low, e.high, e.score) if math.isfinite(x)]
    low, high = min([0.0, *ends]), max([0.0, *ends])
    margin = 0.03 * (high - low) or 1.0
    return Linear(
        low - margin if low < 0 else low - margin / 2, high + margin if high > 0 else high + margin / 2
    )


def whisker(entry: Entry, scale: Linear) -> Markup:
    """A dot for the score, a bar for its interval, a line at zero. The numbers stand beside it in words."""
    side = "pos" if entry.score >= 0 else "neg"
    zero = _line(scale(0.0), 0, 18, "zero")
    if not math.isfinite(entry.score):
        return _svg(zero, height=18, look="whisker")
    bar = ""
    if math.isfinite(entry.low) and math.isfinite(entry.high):
        low, high = scale(entry.low), scale(entry.high)
        caps = f'<line class="{side} cap" x1="{_at(low)}" x2="{_at(low)}" y1="5" y2="13"/>'
        caps += f'<line class="{side} cap" x1="{_at(high)}" x2="{_at(high)}" y1="5" y2="13"/>'
        bar = f'<line class="{side} bar" x1="{_at(low)}" x2="{_at(high)}" y1="9" y2="9"/>{caps}'
    dot = f'<circle class="{side}" cx="{_at(scale(entry.score))}" cy="9" r="3.4"/>'
    return _svg(zero + bar + dot, height=18, look="whisker")


def whisker_axis(scale: Linear) -> Markup:
    """The scale that stands above a list's whiskers."""
    parts = ['<line class="axis" x1="0" x2="100%" y1="21" y2="21"/>']
    for value in scale.ticks(0.22):
        place = scale(value)
        anchor = "start" if place < 0.08 else "end" if place > 0.92 else "middle"
        parts.append(_line(place, 17, 21, "axis"))
        parts.append(f'<text x="{_at(place)}" y="12" text-anchor="{anchor}">{tick_label(value)}</text>')
    return _svg("".join(parts), height=22, look="whisker whisker-axis")


# --- all scores ------------------------------------------------------------------------------------------------


def histogram(
    values: Floats,
    noise: float = math.nan,
    *,
    helpful: Iterable[Entry] = (),
    harmful: Iterable[Entry] = (),
    names: tuple[str, str] = ("score", "scores"),
) -> Markup | None:
    """How many examples have which score; the examples shown above are marked under the axis.

    Args:
        values: the scores of all examples.
        noise: the typical half-width of an interval: scores below it cannot be told from zero.
        helpful: the examples to mark in the colour of positive scores.
        harmful: those to mark in the colour of negative ones.
        names: what a score is called, and several of them.
    """
    scores = values[np.isfinite(values)]
    if scores.size == 0:
        return None
    name, plural = names
    size = float(np.abs(scores).max()) or 1.0
    threshold = noise if math.isfinite(noise) and 0 < noise < size else _typical(scores, size)
    low = min(float(scores.min()), -threshold)
    if scores.min() >= 0 and threshold != noise:  # what cannot be negative begins at zero
        low = 0.0
    scale = SymLog(low, max(float(scores.max()), threshold), threshold)
    edges = _edges(scale)
    counts, _ = np.histogram(scores, bins=edges)
    tallest = Linear(0.0, math.log1p(max(1, int(counts.max()))))
    parts = [_region(scale(-threshold), scale(threshold), "noise")] if threshold == noise else []
    k = 1
    while k <= counts.max():
        y = HEIGHT * (1 - tallest(math.log1p(k)))
        parts.append(f'<line class="grid" x1="0" x2="100%" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="-7" y="{y + 4:.1f}" text-anchor="end">{tick_label(float(k))}</text>')
        k *= 10
    for number, low, high in zip(counts.tolist(), edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        if number == 0:
            continue
        within = threshold == noise and max(abs(low), abs(high)) <= threshold * 1.001
        side = "unclear" if within else "pos" if low >= 0 else "neg"
        height = HEIGHT * tallest(math.log1p(number))
        tip = f"{count(number)} with {plural} from {brief(low, 2)} to {brief(high, 2)}"
        width = max(0.2, 100 * (scale(high) - scale(low)) - 0.15)
        parts.append(
            f'<rect class="{side}" x="{_at(scale(low))}" width="{width:.2f}%" y="{HEIGHT - height:.1f}" '
            f'height="{height:.1f}"><title>{tip}</title></rect>'
        )
    parts.append(_above("examples, by powers of ten"))
    parts.append(_bottom_axis(scale, 0.13, f"{name}, even near zero, then by powers of ten", drop=12))
    for side, entries in (("pos", helpful), ("neg", harmful)):
        for entry in entries:
            if math.isfinite(entry.score):
                parts.append(_line(scale(entry.score), HEIGHT + 3, HEIGHT + 12, f"{side} rug"))
    label = (
        f"Histogram of {count(scores.size)} {plural}, from {brief(scale.low, 3)} to {brief(scale.high, 3)}"
    )
    return _svg("".join(parts), height=HEIGHT, look="plot", label=label)


def _typical(scores: Floats, size: float) -> float:
    """Where the axis turns logarithmic if no error is known: at the median, but within six decades."""
    return max(float(np.median(np.abs(scores))), 1e-6 * size)


def _edges(scale: SymLog) -> Floats:
    """Edges of bars, even on the axis, with zero among them so that no bar mixes the two signs."""
    low, high = scale.bend(scale.low), scale.bend(scale.high)
    below = min(BARS - 2, max(2, round(BARS * -low / (high - low)))) if low < 0 else 0
    places = [*np.linspace(low, 0.0, below + 1)[:-1], *np.linspace(0.0, high, BARS - below + 1)]
    edges = np.array([scale.unbend(float(place)) for place in places])
    edges[0], edges[-1] = scale.low, scale.high  # exactly, or rounding would drop the extremes
    return edges


# --- the solver's path -----------------------------------------------------------------------------------------


def chain_paths(paths: Floats | None, tail: float, *, unit: str = "step") -> Markup | None:
    """``gᵀu`` along every chain; the averaged tail is shaded, its average marked at the right.

    Args:
        paths: ``[chains, steps]``, the first point after the first step.
        tail: the part of the path that is averaged; 0 if only the last point counts.
        unit: what a step is called.
    """
    if paths is None or paths.ndim != 2 or paths.shape[1] < 2 or not np.isfinite(paths).any():
        return None
    chains, steps = paths.shape
    along = Steps(1.0, float(steps))
    drawn = np.unique(np.linspace(1, steps, min(steps, POINTS)).round().astype(int))
    places = [along(step) for step in drawn.tolist()]
    scale = _path_scale(paths[:, drawn - 1])
    averaged = _averaged(steps, tail)
    parts = [_region(along(steps - averaged + 1), 1.0, "tail")] if tail > 0 else []
    parts.append(_left_axis(scale))
    for chain in range(chains):
        look = f"chain c{chain % PALETTE}"
        parts.append(f'<svg x="0" y="0" width="100%" height="{HEIGHT}" viewBox="0 0 1000 {HEIGHT}" ')
        parts.append('preserveAspectRatio="none">')
        runs = _runs(places, paths[chain, drawn - 1], scale)
        parts += [f'<polyline class="{look}" points="{points}"/>' for points in runs]
        parts.append("</svg>")
        mean = float(paths[chain, -averaged:].mean())
        if math.isfinite(mean):
            y = HEIGHT * (1 - scale(mean))
            parts.append(f'<svg x="100%" y="0" overflow="visible"><line class="{look} mean" x1="3" x2="13" ')
            parts.append(f'y1="{y:.1f}" y2="{y:.1f}"/></svg>')
    parts.append(_above("gᵀu"))
    parts.append(_bottom_axis(along, 0.12, unit))
    how = f"in {chains} chains of" if chains > 1 else "of"
    label = f"The solver's path {how} {count(steps)} {unit}s"
    return _svg("".join(parts), height=HEIGHT, look="plot", label=label)


def _averaged(steps: int, tail: float) -> int:
    """How many of the last steps are averaged."""
    return max(1, round(tail * steps))


def _path_scale(paths: Floats) -> Scale:
    known = paths[np.isfinite(paths)]
    low, high = float(known.min()), float(known.max())
    if low > 0 and high / low > 5:  # the start is g/λ, often far above where the path settles
        return Log(low / 1.2, high * 1.2)
    margin = 0.06 * (high - low) or abs(high) or 1.0
    return Linear(low - margin, high + margin)


def _runs(places: Iterable[float], path: Floats, scale: Scale) -> Iterable[str]:
    """The path's points, cut where it is not finite."""
    points: list[str] = []
    for place, value in zip(places, path.tolist(), strict=True):
        if math.isfinite(value):
            points.append(f"{1000 * place:.1f},{HEIGHT * (1 - scale(value)):.1f}")
        elif points:
            yield " ".join(points)
            points = []
    if points:
        yield " ".join(points)


# --- the spectrum ----------------------------------------------------------------------------------------------


def eigenvalues(values: Floats | None, damping: float) -> Markup | None:
    """The top of the spectrum, largest first, with the damping as a line across."""
    if values is None:
        return None
    kept = np.sort(values[np.isfinite(values) & (values > 0)])[::-1]
    if kept.size == 0:
        return None
    known = [float(kept[0]), float(kept[-1])] + ([damping] if 0 < damping < math.inf else [])
    scale = Log(min(known) / 1.5, max(known) * 1.5)
    ranks: Scale = Log(0.9, kept.size * 1.1) if kept.size > 30 else Linear(0.0, kept.size + 1.0)
    positions = np.unique(np.geomspace(1, kept.size, min(kept.size, POINTS)).round().astype(int))
    if kept.size <= POINTS:
        positions = np.arange(1, kept.size + 1)
    parts = [_left_axis(scale)]
    for rank in positions.tolist():
        y = HEIGHT * (1 - scale(float(kept[rank - 1])))
        tip = f"number {rank}: {brief(float(kept[rank - 1]))}"
        parts.append(f'<circle class="eigenvalue" cx="{_at(ranks(rank))}" cy="{y:.1f}" r="2.6">')
        parts.append(f"<title>{tip}</title></circle>")
    if 0 < damping < math.inf:
        y = HEIGHT * (1 - scale(damping))
        parts.append(f'<line class="damping" x1="0" x2="100%" y1="{y:.1f}" y2="{y:.1f}"/>')
        # Above the line at its left end the largest eigenvalues may be in the way; below it nothing is.
        parts.append(f'<text class="damping" x="6" y="{y + (14 if y < HEIGHT - 18 else -6):.1f}">')
        parts.append(f"damping λ = {brief(damping, 3)}</text>")
    parts.append(_above("eigenvalue"))
    parts.append(_bottom_axis(ranks, 0.15, "number, largest first"))
    return _svg("".join(parts), height=HEIGHT, look="plot", label=f"The {kept.size} largest eigenvalues")


# --- checks ----------------------------------------------------------------------------------------------------

_MARKS = {
    "trust": '<circle class="ground" cx="9" cy="9" r="8"/><path class="sign" d="M5.2 9.4l2.6 2.7 5-5.8"/>',
    "doubt": '<rect class="ground" x="2.6" y="2.6" width="12.8" height="12.8" transform="rotate(45 9 9)"/>'
    '<path class="sign" d="M9 4.8v5M9 12.6v.4"/>',
    "cannot tell": '<circle class="ring" cx="9" cy="9" r="7.4"/><path class="line" d="M6.7 7.2q.2-2.2 2.3-2.2t2.3 2q0 '
    '1.3-1.3 1.9-1 .5-1 1.6M9 12.9v.4"/>',
}


def verdict_mark(verdict: Verdict) -> Markup:
    """A tick, an exclamation mark or a question mark; the word stands beside it."""
    return Markup(f'<svg class="mark" width="18" height="18" aria-hidden="true">{_MARKS[verdict]}</svg>')


def agreement(comparisons: Iterable[Comparison]) -> Markup | None:
    """Scores by influence over scores by fine-tuning, with their errors; on the diagonal the two are equal.

    With several queries, scores are in units of the query's largest, or one query would hide the others.
    """
    used = [comparison for comparison in comparisons if comparison.converged]
    if not used:
        return None
    queries = len(used[0].fine_tuned)
    sizes = [max((abs(c.fine_tuned[q]) for c in used), default=0.0) or 1.0 for q in range(queries)]
    units = sizes if queries > 1 else [1.0]
    pairs = [(comparison, q) for q in range(queries) for comparison in used]
    pairs = pairs[:: max(1, math.ceil(len(pairs) / PAIRS))]
    ends = [0.0]
    for comparison, q in pairs:
        for value, error in (
            (comparison.influence[q], comparison.influence_error[q]),
            (comparison.fine_tuned[q], comparison.fine_tuned_error[q]),
        ):
            ends += [value / units[q], (value - error) / units[q], (value + error) / units[q]]
    ends = [end for end in ends if math.isfinite(end)]
    margin = 0.04 * (max(ends) - min(ends)) or 1.0
    scale = Linear(min(ends) - margin, max(ends) + margin)
    parts = [_left_axis(scale, SQUARE)]
    parts.append(f'<line class="diagonal" x1="0" y1="{SQUARE}" x2="100%" y2="0"/>')
    parts += [_pair(comparison, q, units[q], scale) for comparison, q in pairs]
    whole = "score" if queries == 1 else "score, as a part of the question’s largest"
    parts.append(_above(f"by influence: {whole}"))
    parts.append(_bottom_axis(scale, 0.2, "by fine-tuning", height=SQUARE))
    label = f"{count(len(pairs))} scores by influence against the same by fine-tuning"
    return _svg("".join(parts), height=SQUARE, look="plot", label=label)


def _pair(comparison: Comparison, q: int, unit: float, scale: Linear) -> str:
    """One score in both ways: disc, diamond or ring for helpful, harmful and random examples."""
    score, truth = comparison.influence[q] / unit, comparison.fine_tuned[q] / unit
    wide, high = comparison.fine_tuned_error[q] / unit, comparison.influence_error[q] / unit
    if not (math.isfinite(score) and math.isfinite(truth)):
        return ""
    x, y = scale(truth), SQUARE * (1 - scale(score))
    look = {"most helpful": "pos", "most harmful": "neg"}.get(comparison.kind, "other")
    tip = f"example {count(comparison.index)}, question {q + 1}: {brief(comparison.influence[q], 3)} by influence, "
    tip += f"{brief(comparison.fine_tuned[q], 3)} by fine-tuning"
    parts = [f'<g class="pair {look}"><title>{escape(tip)}</title>']
    if math.isfinite(high):
        bottom, top = (SQUARE * (1 - scale(score + end)) for end in (-high, high))
        parts.append(_line(x, round(top, 1), round(bottom, 1), f"{look} bar"))
    if math.isfinite(wide) and wide > 0:
        ends = f'x1="{_at(scale(truth - wide))}" x2="{_at(scale(truth + wide))}"'
        parts.append(f'<line class="{look} bar" {ends} y1="{y:.1f}" y2="{y:.1f}"/>')
    if look == "neg":  # a square that stands on its corner, about where it is
        parts.append(f'<svg x="{_at(x)}" y="{y:.1f}" overflow="visible">')
        parts.append(
            '<rect class="neg" x="-3.2" y="-3.2" width="6.4" height="6.4" transform="rotate(45)"/></svg>'
        )
    else:
        parts.append(f'<circle class="{look}" cx="{_at(x)}" cy="{y:.1f}" r="3.6"/>')
    return "".join([*parts, "</g>"])


# --- parts -----------------------------------------------------------------------------------------------------


def _at(place: float) -> str:
    return f"{100 * place:.2f}%"


def _line(place: float, top: float, bottom: float, look: str) -> str:
    return f'<line class="{look}" x1="{_at(place)}" x2="{_at(place)}" y1="{top}" y2="{bottom}"/>'


def _region(start: float, end: float, look: str) -> str:
    return f'<rect class="{look}" x="{_at(start)}" width="{_at(end - start)}" y="0" height="{HEIGHT}"/>'


def _left_axis(scale: Scale, height: int = HEIGHT) -> str:
    parts = []
    for value in scale.ticks(0.16):
        y = height * (1 - scale(value))
        parts.append(f'<line class="grid" x1="0" x2="100%" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="-7" y="{y + 4:.1f}" text-anchor="end">{tick_label(value)}</text>')
    return "".join(parts)


def _above(title: str) -> str:
    """What the vertical axis counts, at its top."""
    return f'<text class="title" x="-7" y="-8">{title}</text>'


def _bottom_axis(scale: Scale, gap: float, title: str, *, drop: int = 0, height: int = HEIGHT) -> str:
    """The axis below; ``drop`` leaves room for marks between it and its labels."""
    parts = [f'<line class="axis" x1="0" x2="100%" y1="{height}" y2="{height}"/>']
    for value in scale.ticks(gap):
        parts.append(_line(scale(value), height, height + 4 + drop, "axis"))
        label = f'<text x="{_at(scale(value))}" y="{height + 17 + drop}" text-anchor="middle">'
        parts.append(f"{label}{tick_label(value)}</text>")
    parts.append(f'<text class="title" x="50%" y="{height + 34 + drop}" text-anchor="middle">{title}</text>')
    return "".join(parts)


def _svg(inside: str, *, height: int, look: str, label: str | None = None) -> Markup:
    """The element. Everything inside is made of numbers and of this module's own words, so it is safe markup."""
    role = f'role="img" aria-label="{escape(label)}"' if label else 'aria-hidden="true"'
    return Markup(f'<svg class="{look}" width="100%" height="{height}" {role}>{inside}</svg>')
