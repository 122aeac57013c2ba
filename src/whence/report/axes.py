"""Scales of figures: from a value to its place between 0 and 1, and which values to print at the axis."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable

from whence.report.formatting import MINUS, SUPERSCRIPTS

__all__ = ["Linear", "Log", "Scale", "Steps", "SymLog", "tick_label"]


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
        if not (math.isfinite(value) and end > start):
            return 0.5 if not math.isfinite(value) or end == start else 0.0
        return min(1.0, max(0.0, (self.bend(min(max(value, self.low), self.high)) - start) / (end - start)))

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


def tick_label(value: float) -> str:
    """A round value, short.

    Example:
        >>> tick_label(-1000.0), tick_label(0.25), tick_label(1e-7)
        ('−1,000', '0.25', '10⁻⁷')
    """
    if value == 0:
        return "0"
    if 1e-3 <= abs(value) < 1e5:
        return (
            f"{value:,.4g}".replace("-", MINUS) if abs(value) < 1e4 else f"{value:,.0f}".replace("-", MINUS)
        )
    power = math.floor(math.log10(abs(value)) + 1e-9)
    factor = f"{abs(value) / 10.0**power:.3g}"
    head = "" if factor == "1" else f"{factor}×"
    return (MINUS if value < 0 else "") + head + "10" + str(power).translate(SUPERSCRIPTS)
