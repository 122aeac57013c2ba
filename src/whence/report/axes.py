"""Scales, from a value to its place between 0 and 1, and `Plot`: a figure with such a scale along either axis.

Places along the horizontal axis are percentages and there is no ``viewBox``, so a figure stretches to any width while
its letters and dots keep their size.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

from markupsafe import Markup, escape

from whence.report.formatting import tick_label

__all__ = ["HEIGHT", "Linear", "Log", "Plot", "Scale", "Steps", "SymLog", "at", "level", "upright"]

HEIGHT = 170  # of a figure's plotting area, in pixels


class Scale(ABC):
    """An axis from ``low`` to ``high``."""

    def __init__(self, low: float, high: float) -> None:
        self.low, self.high = low, high

    @abstractmethod
    def bend(self, value: float) -> float:
        """The value on the scale on which the axis is even."""

    @abstractmethod
    def candidates(self) -> Iterable[float]:
        """Round values that could be printed, the most important first."""

    def __call__(self, value: float) -> float:
        """The value's place on the axis, 0 to 1; values beyond the ends are put at the ends."""
        start, end = self.bend(self.low), self.bend(self.high)
        if not math.isfinite(value) or end <= start:
            return 0.5
        return (self.bend(min(max(value, self.low), self.high)) - start) / (end - start)

    def ticks(self, gap: float) -> list[float]:
        """Round values at least ``gap`` apart, as a part of the axis's length."""
        chosen: list[float] = []
        for value in self.candidates():
            inside = self.low <= value <= self.high
            if inside and all(abs(self(value) - self(other)) >= gap for other in chosen):
                chosen.append(value)
        return sorted(chosen)


class Linear(Scale):
    """Even steps.

    Example:
        >>> Linear(0.0, 10.0).ticks(0.3)
        [0.0, 5.0, 10.0]
    """

    def bend(self, value: float) -> float:
        return value

    def candidates(self) -> Iterable[float]:
        span = self.high - self.low
        if span <= 0 or not math.isfinite(span):
            return
        unit = 10.0 ** math.floor(math.log10(span))
        for step in (unit * 5, unit * 2, unit, unit / 2):
            first = math.ceil(self.low / step - 1e-9)
            last = math.floor(self.high / step + 1e-9)
            if last - first >= 2 or step == unit / 2:
                yield from (k * step + 0.0 for k in sorted(range(first, last + 1), key=abs))
                return


class Steps(Linear):
    """Whole numbers from the first, which is always printed.

    Example:
        >>> Steps(1.0, 2.0).ticks(0.1), Steps(1.0, 20.0).ticks(0.1)
        ([1.0, 2.0], [1.0, 5.0, 10.0, 15.0, 20.0])
    """

    def candidates(self) -> Iterable[float]:
        yield self.low
        yield from (value for value in super().candidates() if value == round(value))


class Log(Scale):
    """Even factors; both ends are positive.

    Example:
        >>> Log(0.5, 2000.0).ticks(0.1)
        [1.0, 10.0, 100.0, 1000.0]
    """

    def bend(self, value: float) -> float:
        return math.log(value)

    def candidates(self) -> Iterable[float]:
        first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
        if last - first < 2:  # less than two decades: powers of ten alone would say too little
            steps = [m * 10.0**k for k in range(first - 1, last + 1) for m in (1, 2, 5)]
            return sorted(steps, key=lambda value: abs(math.log10(value) % 1.0))
        stride = 1 + (last - first) // 6
        return [10.0**k for k in range(first, last + 1, stride)]


class SymLog(Scale):
    """Even near zero, logarithmic beyond ``threshold``, on both sides.

    Example:
        >>> SymLog(-100.0, 1000.0, 1.0).ticks(0.15)
        [-100.0, -10.0, 0.0, 10.0, 100.0, 1000.0]
    """

    def __init__(self, low: float, high: float, threshold: float) -> None:
        super().__init__(low, high)
        self.threshold = threshold

    def bend(self, value: float) -> float:
        return math.copysign(math.log1p(abs(value) / self.threshold), value)

    def unbend(self, place: float) -> float:
        """The value that `bend` puts at this place."""
        return math.copysign(math.expm1(abs(place)) * self.threshold, place)

    def candidates(self) -> Iterable[float]:
        yield 0.0
        largest = max(abs(self.low), abs(self.high))
        powers = range(math.ceil(math.log10(self.threshold)), math.floor(math.log10(largest) + 1e-9) + 1)
        for factor in (1, 5, 2):  # powers of ten first; the others fill what room they leave
            for k in reversed(range(powers.start - 1, powers.stop)):
                if factor * 10.0**k >= self.threshold / 2:
                    yield factor * 10.0**k
                    yield -factor * 10.0**k


class Plot:
    """A figure with a scale along either axis; what is added later lies on top.

    Everything in it is made of numbers and of this module's own words, so it is safe markup.
    """

    def __init__(self, across: Scale, up: Scale, height: int = HEIGHT) -> None:
        self.across, self.up, self.height = across, up, height
        self._parts: list[str] = []

    def add(self, *parts: str) -> None:
        """Draw these elements."""
        self._parts += parts

    def x(self, value: float) -> str:
        """A value's place from the left, in percent of the width."""
        return at(self.across(value))

    def y(self, value: float) -> float:
        """A value's place from the top, in pixels."""
        return round(self.height * (1 - self.up(value)), 1)

    def add_region(self, start: float, end: float, look: str) -> None:
        """Shade what lies between two values, from top to bottom."""
        low, high = self.across(start), self.across(end)
        self.add(
            f'<rect class="{look}" x="{at(low)}" width="{at(high - low)}" y="0" height="{self.height}"/>'
        )

    def add_grid(self, values: Sequence[float] | None = None) -> None:
        """Lines across with their values at the left."""
        for value in self.up.ticks(0.16) if values is None else values:
            y = self.y(value)
            self.add(level(y, "grid"))
            self.add(f'<text x="-7" y="{y + 4:.1f}" text-anchor="end">{tick_label(value)}</text>')

    def finish(self, above: str, below: str, label: str, *, gap: float, drop: int = 0) -> Markup:
        """The figure with its titles and the axis below.

        Args:
            above: what the vertical axis counts.
            below: what the horizontal axis counts.
            label: what the figure shows, for readers who do not see it.
            gap: between two values of the horizontal axis, as a part of its length.
            drop: room for marks between that axis and its values, in pixels.
        """
        height = self.height
        self.add(f'<text class="title" x="-7" y="-8">{above}</text>', level(height, "axis"))
        for value in self.across.ticks(gap):
            self.add(upright(self.x(value), height, height + 4 + drop, "axis"))
            self.add(f'<text x="{self.x(value)}" y="{height + 17 + drop}" text-anchor="middle">')
            self.add(f"{tick_label(value)}</text>")
        self.add(f'<text class="title" x="50%" y="{height + 34 + drop}" text-anchor="middle">{below}</text>')
        role = f'role="img" aria-label="{escape(label)}"'
        return Markup(f'<svg class="plot" width="100%" height="{height}" {role}>{"".join(self._parts)}</svg>')


def at(place: float) -> str:
    """A part of the width, in percent."""
    return f"{100 * place:.2f}%"


def upright(x: str, top: float, bottom: float, look: str) -> str:
    """An upright line."""
    return f'<line class="{look}" x1="{x}" x2="{x}" y1="{top}" y2="{bottom}"/>'


def level(y: float, look: str, start: str = "0", end: str = "100%") -> str:
    """A level line."""
    return f'<line class="{look}" x1="{start}" x2="{end}" y1="{y}" y2="{y}"/>'
