"""A number and its standard error."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from whence.arguments import check_fields
from whence.errors import OptionError, SolverError

__all__ = ["Estimate"]


@dataclass(frozen=True)
class Estimate:
    """An estimated number with the standard error of the estimate.

    Example:
        >>> print(Estimate.from_samples([1.0, 2.0, 3.0]))
        2 ± 0.6
        >>> print(Estimate(33.0, 6.0))
        33 ± 6
    """

    value: float
    stderr: float = 0.0

    def __post_init__(self) -> None:
        check_fields(self)
        if not math.isfinite(self.value) or not self.stderr >= 0:
            raise OptionError(f"not an estimate: value {self.value}, standard error {self.stderr}")

    @classmethod
    def from_samples(cls, samples: Sequence[float]) -> Estimate:
        """Mean of independent samples; its error is infinite when there is only one."""
        n = len(samples)
        if n == 0:
            raise OptionError("an estimate needs at least one sample")
        if not all(map(math.isfinite, samples)):
            raise SolverError(
                "what was measured of the curvature is not finite: gradients or products overflowed. Look for inputs "
                "or weights that are very large, or use the model in float64"
            )
        mean = math.fsum(samples) / n
        if n == 1:
            return cls(mean, math.inf)
        variance = math.fsum((x - mean) ** 2 for x in samples) / (n - 1)
        return cls(mean, math.sqrt(variance / n))

    def sqrt(self) -> Estimate:
        """Square root, its error to first order; a negative value counts as zero."""
        root = math.sqrt(max(self.value, 0.0))
        return Estimate(root, self.stderr / (2 * root) if root > 0 else math.sqrt(self.stderr))

    def upper(self, errors: float = 2.0) -> float:
        """``value + errors · stderr``; the value itself where the error is unknown (infinite)."""
        return self.value + errors * self.stderr if math.isfinite(self.stderr) else self.value

    def lower(self, errors: float = 2.0) -> float:
        """``value - errors · stderr``; the value itself where the error is unknown (infinite)."""
        return self.value - errors * self.stderr if math.isfinite(self.stderr) else self.value

    def __float__(self) -> float:
        return self.value

    def __str__(self) -> str:
        if self.stderr == 0:
            return f"{self.value:.4g}"
        if not math.isfinite(self.stderr):
            return f"{self.value:.3g} ± ?"
        return f"{self.value:.3g} ± {self.stderr:.1g}"
