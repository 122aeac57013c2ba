"""The pages' figures, as SVG that takes its colours from the style sheet."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
from markupsafe import Markup, escape

from whence.report.axes import HEIGHT, Linear, Log, Plot, Scale, Steps, SymLog, at, level, upright
from whence.report.checks import Comparison, Verdict
from whence.report.formatting import brief, count, tick_label

__all__ = [
    "Floats",
    "agreement",
    "chain_paths",
    "eigenvalues",
    "histogram",
    "verdict_mark",
    "whisker",
    "whisker_axis",
    "whisker_scale",
]

Floats = npt.NDArray[np.float64]

SQUARE = 270  # height of a figure whose axes count alike, in pixels
PAIRS = 400  # in a scatter plot, at most
BARS = 60
POINTS = 240  # of a path; more than a screen shows
PALETTE = 6  # colours of chains in style.css


# --- a score with its interval ---------------------------------------------------------------------------------


def whisker_scale(scores: Iterable[tuple[float, float, float]]) -> Linear:
    """One scale for all the whiskers of a question, each a score and its interval, with zero on it."""
    ends = [x for score in scores for x in score if math.isfinite(x)]
    low, high = min([0.0, *ends]), max([0.0, *ends])
    margin = 0.03 * (high - low) or 1.0
    return Linear(low - (margin if low < 0 else margin / 2), high + (margin if high > 0 else margin / 2))


def whisker(score: float, low: float, high: float, scale: Linear) -> Markup:
    """A dot for the score, a bar for its interval, a line at zero. The numbers stand beside it in words."""
    side = "pos" if score >= 0 else "neg"
    parts = [upright(at(scale(0.0)), 0, 18, "zero")]
    if math.isfinite(score):
        if math.isfinite(low) and math.isfinite(high):
            ends = [at(scale(end)) for end in (low, high)]
            parts.append(level(9, f"{side} bar", *ends))
            parts += [upright(end, 5, 13, f"{side} cap") for end in ends]
        parts.append(f'<circle class="{side}" cx="{at(scale(score))}" cy="9" r="3.4"/>')
    return _small("whisker", 18, parts)


def whisker_axis(scale: Linear) -> Markup:
    """The scale that stands above a list's whiskers."""
    parts = [level(21, "axis")]
    for value in scale.ticks(0.22):
        place = scale(value)
        anchor = "start" if place < 0.08 else "end" if place > 0.92 else "middle"
        parts.append(upright(at(place), 17, 21, "axis"))
        parts.append(f'<text x="{at(place)}" y="12" text-anchor="{anchor}">{tick_label(value)}</text>')
    return _small("whisker whisker-axis", 22, parts)


def _small(look: str, height: int, parts: Iterable[str]) -> Markup:
    return Markup(
        f'<svg class="{look}" width="100%" height="{height}" aria-hidden="true">{"".join(parts)}</svg>'
    )


# --- all scores ------------------------------------------------------------------------------------------------


def histogram(
    values: Floats,
    noise: float = math.nan,
    *,
    helpful: Iterable[float] = (),
    harmful: Iterable[float] = (),
    names: tuple[str, str] = ("score", "scores"),
) -> Markup | None:
    """How many examples have which score; the examples shown above are marked under the axis.

    Args:
        values: the scores of all examples.
        noise: the typical half-width of an interval: scores below it cannot be told from zero.
        helpful: scores to mark in the colour of positive ones.
        harmful: scores to mark in the colour of negative ones.
        names: what a score is called, and several of them.
    """
    scores = values[np.isfinite(values)]
    if scores.size == 0:
        return None
    name, plural = names
    size = float(np.abs(scores).max()) or 1.0
    noisy = math.isfinite(noise) and 0 < noise < size
    # Without a known error, the axis turns logarithmic at the median, but within six decades.
    threshold = noise if noisy else max(float(np.median(np.abs(scores))), 1e-6 * size)
    begins_at_zero = scores.min() >= 0 and not noisy
    low = 0.0 if begins_at_zero else min(float(scores.min()), -threshold)
    scale = SymLog(low, max(float(scores.max()), threshold), threshold)
    edges = _edges(scale)
    counts, _ = np.histogram(scores, bins=edges)
    most = max(1, int(counts.max()))
    plot = Plot(scale, SymLog(0.0, float(most), 1.0))
    if noisy:
        plot.add_region(-threshold, threshold, "noise")
    plot.add_grid([10.0**k for k in range(len(str(most)))])
    for number, low, high in zip(counts.tolist(), edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        if number == 0:
            continue
        within = noisy and max(abs(low), abs(high)) <= threshold * 1.001
        side = "unclear" if within else "pos" if low >= 0 else "neg"
        width = max(0.2, 100 * (scale(high) - scale(low)) - 0.15)
        top = plot.y(number)
        plot.add(f'<rect class="{side}" x="{plot.x(low)}" width="{width:.2f}%" y="{top}" ')
        plot.add(f'height="{HEIGHT - top:.1f}">')
        plot.add(
            f"<title>{count(number)} with {plural} from {brief(low, 2)} to {brief(high, 2)}</title></rect>"
        )
    for side, shown in (("pos", helpful), ("neg", harmful)):
        marked = filter(math.isfinite, shown)
        plot.add(*(upright(plot.x(score), HEIGHT + 3, HEIGHT + 12, f"{side} rug") for score in marked))
    return plot.finish(
        "examples, by powers of ten",
        f"{name}, even near zero, then by powers of ten",
        f"Histogram of {count(scores.size)} {plural}, from {brief(scale.low, 3)} to {brief(scale.high, 3)}",
        gap=0.13,
        drop=12,
    )


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
    drawn = np.unique(np.linspace(1, steps, min(steps, POINTS)).round().astype(int))
    averaged = max(1, round(tail * steps))
    plot = Plot(Steps(1.0, float(steps)), _path_scale(paths[:, drawn - 1]))
    if tail > 0:
        plot.add_region(steps - averaged + 1, steps, "tail")
    plot.add_grid()
    for chain in range(chains):
        look = f"chain c{chain % PALETTE}"
        # Many points sit in a picture of their own, which stretches with the figure.
        plot.add(f'<svg x="0" y="0" width="100%" height="{HEIGHT}" viewBox="0 0 1000 {HEIGHT}" ')
        plot.add('preserveAspectRatio="none">')
        for points in _runs(drawn.tolist(), paths[chain, drawn - 1].tolist(), plot):
            plot.add(f'<polyline class="{look}" points="{points}"/>')
        plot.add("</svg>")
        mean = float(paths[chain, -averaged:].mean())
        if math.isfinite(mean):
            mark = level(plot.y(mean), f"{look} mean", "3", "13")
            plot.add(f'<svg x="100%" y="0" overflow="visible">{mark}</svg>')
    how = f"in {chains} chains of" if chains > 1 else "of"
    return plot.finish("gᵀu", unit, f"The solver's path {how} {count(steps)} {unit}s", gap=0.12)


def _path_scale(paths: Floats) -> Scale:
    known = paths[np.isfinite(paths)]
    low, high = float(known.min()), float(known.max())
    if low > 0 and high / low > 5:  # the start is g/λ, often far above where the path settles
        return Log(low / 1.2, high * 1.2)
    margin = 0.06 * (high - low) or abs(high) or 1.0
    return Linear(low - margin, high + margin)


def _runs(steps: Iterable[int], path: Iterable[float], plot: Plot) -> Iterable[str]:
    """The path's points, cut where it is not finite."""
    points: list[str] = []
    for step, value in zip(steps, path, strict=True):
        if math.isfinite(value):
            points.append(f"{1000 * plot.across(step):.1f},{plot.y(value)}")
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
    damped = 0 < damping < math.inf
    known = [float(kept[0]), float(kept[-1]), *([damping] if damped else [])]
    ranks: Scale = Log(0.9, kept.size * 1.1) if kept.size > 30 else Linear(0.0, kept.size + 1.0)
    positions = np.arange(1, kept.size + 1)
    if kept.size > POINTS:
        positions = np.unique(np.geomspace(1, kept.size, POINTS).round().astype(int))
    plot = Plot(ranks, Log(min(known) / 1.5, max(known) * 1.5))
    plot.add_grid()
    for rank in positions.tolist():
        value = float(kept[rank - 1])
        plot.add(f'<circle class="eigenvalue" cx="{plot.x(rank)}" cy="{plot.y(value)}" r="2.6">')
        plot.add(f"<title>number {rank}: {brief(value)}</title></circle>")
    if damped:
        y = plot.y(damping)
        plot.add(level(y, "damping"))
        # Above the line at its left end the largest eigenvalues may be in the way; below it nothing is.
        plot.add(f'<text class="damping" x="6" y="{y + (14 if y < HEIGHT - 18 else -6):.1f}">')
        plot.add(f"damping λ = {brief(damping, 3)}</text>")
    label = f"The {kept.size} largest eigenvalues"
    return plot.finish("eigenvalue", "number, largest first", label, gap=0.15)


def kept_over_damping(dampings: Floats, kept: Floats, chosen: float) -> Markup | None:
    """Which part of the top ten stays the same for other λ, over all questions, with the chosen λ as an upright line.

    Args:
        dampings: λ.
        kept: ``[λ, questions]``.
        chosen: the λ of the page.
    """
    if len(dampings) < 2:
        return None
    plot = Plot(Log(float(dampings.min()) / 1.3, float(dampings.max()) * 1.3), Linear(0.0, 1.05))
    plot.add_grid()
    plot.add(upright(plot.x(chosen), 0, HEIGHT, "damping"))
    for damping, row in zip(dampings.tolist(), kept, strict=True):
        low, mean = float(row.min()), float(row.mean())
        plot.add(upright(plot.x(damping), plot.y(float(row.max())), plot.y(low), "chain c0"))
        plot.add(f'<circle class="eigenvalue" cx="{plot.x(damping)}" cy="{plot.y(mean)}" r="3">')
        plot.add(
            f"<title>λ = {brief(damping, 3)}: {mean:.0%} of the top ten, at least {low:.0%}</title></circle>"
        )
    return plot.finish(
        "part of the top ten", "damping λ", "How much of the top ten other dampings keep", gap=0.15
    )


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
    units = [1.0]
    if queries > 1:
        units = [max(abs(c.fine_tuned[q]) for c in used) or 1.0 for q in range(queries)]
    pairs = [(comparison, q) for q in range(queries) for comparison in used]
    pairs = pairs[:: max(1, math.ceil(len(pairs) / PAIRS))]
    ends = [0.0]
    for c, q in pairs:
        both = ((c.influence[q], c.influence_error[q]), (c.fine_tuned[q], c.fine_tuned_error[q]))
        ends += [end / units[q] for value, error in both for end in (value, value - error, value + error)]
    ends = [end for end in ends if math.isfinite(end)]
    margin = 0.04 * (max(ends) - min(ends)) or 1.0
    scale = Linear(min(ends) - margin, max(ends) + margin)
    plot = Plot(scale, scale, SQUARE)
    plot.add_grid()
    plot.add(f'<line class="diagonal" x1="0" y1="{SQUARE}" x2="100%" y2="0"/>')
    plot.add(*(_pair(comparison, q, units[q], plot) for comparison, q in pairs))
    whole = "score" if queries == 1 else "score, as a part of the question’s largest"
    label = f"{count(len(pairs))} scores by influence against the same by fine-tuning"
    return plot.finish(f"by influence: {whole}", "by fine-tuning", label, gap=0.2)


def _pair(comparison: Comparison, q: int, unit: float, plot: Plot) -> str:
    """One score in both ways: disc, diamond or ring for helpful, harmful and random examples."""
    score, truth = comparison.influence[q] / unit, comparison.fine_tuned[q] / unit
    wide, high = comparison.fine_tuned_error[q] / unit, comparison.influence_error[q] / unit
    if not (math.isfinite(score) and math.isfinite(truth)):
        return ""
    x, y = plot.x(truth), plot.y(score)
    look = {"most helpful": "pos", "most harmful": "neg"}.get(comparison.kind, "other")
    tip = f"example {count(comparison.index)}, question {q + 1}: {brief(comparison.influence[q], 3)} by influence, "
    tip += f"{brief(comparison.fine_tuned[q], 3)} by fine-tuning"
    parts = [f'<g class="pair {look}"><title>{escape(tip)}</title>']
    if math.isfinite(high):
        parts.append(upright(x, plot.y(score + high), plot.y(score - high), f"{look} bar"))
    if math.isfinite(wide) and wide > 0:
        parts.append(level(y, f"{look} bar", plot.x(truth - wide), plot.x(truth + wide)))
    if look == "neg":  # a square that stands on its corner, about where it is
        square = '<rect class="neg" x="-3.2" y="-3.2" width="6.4" height="6.4" transform="rotate(45)"/>'
        parts.append(f'<svg x="{x}" y="{y}" overflow="visible">{square}</svg>')
    else:
        parts.append(f'<circle class="{look}" cx="{x}" cy="{y}" r="3.6"/>')
    return "".join([*parts, "</g>"])
