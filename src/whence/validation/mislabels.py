"""Finding wrong labels: how many are found when the most suspicious examples are inspected first.

    found(f) = share of the mislabelled among the f · n most suspicious

Examples of equal suspicion could come in any order, so within a tie the curve is its expectation, a straight line. A
random order finds ``f`` of them on average.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from whence.errors import DataError, OptionError
from whence.spectrum import Estimate

__all__ = ["DetectionCurve", "detection_curve"]


@dataclass(frozen=True)
class DetectionCurve:
    """Share of the mislabelled found over the share of examples inspected: straight between its points.

    Attributes:
        inspected: shares of the examples, from 0 to 1, ``[points]``; a point for every value of suspicion.
        shares: of the mislabelled that are among them, ``[points]``.
    """

    inspected: Tensor
    shares: Tensor
    num_examples: int
    num_mislabelled: int

    def found(self, fraction: float) -> float:
        """Share of the mislabelled among this fraction of the examples, the most suspicious first."""
        _check_fraction(fraction)
        return float(np.interp(fraction, self.inspected.numpy(), self.shares.numpy()))

    def chance(self, fraction: float) -> Estimate:
        """What a random order finds: its mean, which is the fraction, and its standard deviation.

        For k of n examples, w of them mislabelled, ``σ² = k(n - k)(n - w) / (n²(n - 1)w)``, the hypergeometric's.
        """
        _check_fraction(fraction)
        n, w = self.num_examples, self.num_mislabelled
        variance = fraction * (1 - fraction) * (n - w) / ((n - 1) * w) if n > 1 else 0.0
        return Estimate(fraction, math.sqrt(variance))

    @property
    def area(self) -> float:
        """Area under the curve; by chance it is ½, and at best `best_area`."""
        return float(torch.trapezoid(self.shares, self.inspected))

    @property
    def best_area(self) -> float:
        """``1 - w/2n``: all w mislabelled of n come first."""
        return 1 - self.num_mislabelled / (2 * self.num_examples)

    def __str__(self) -> str:
        tenth = self.found(0.1)
        return (
            f"{tenth:.1%} of {self.num_mislabelled:,} wrong labels in the first tenth of {self.num_examples:,} "
            f"examples (area {self.area:.3f}, best {self.best_area:.3f}, chance 0.5)"
        )


def detection_curve(suspicion: Any, mislabelled: Any) -> DetectionCurve:
    """How well a suspicion finds wrong labels.

    Args:
        suspicion: ``[n]`` numbers, larger where the label is more likely wrong: the loss, self-influence, ….
        mislabelled: ``[n]`` of bool.

    Example:
        >>> curve = detection_curve([0.9, 0.1, 0.8, 0.2], [True, False, False, False])
        >>> curve.found(0.25), curve.area
        (1.0, 0.875)
    """
    suspect, wrong = torch.as_tensor(suspicion).detach().cpu().double(), torch.as_tensor(mislabelled).cpu()
    if suspect.ndim != 1 or suspect.shape != wrong.shape:
        raise OptionError(
            f"suspicion has shape {tuple(suspect.shape)}, mislabelled {tuple(wrong.shape)}; both must be [n]"
        )
    if wrong.dtype != torch.bool:
        raise OptionError(f"mislabelled is {wrong.dtype}; give a mask of bool, one entry for each example")
    if not bool(wrong.any()):
        raise DataError("no example is mislabelled, so there is nothing to find; flip some labels first")
    unknown = suspect.isnan().nonzero().flatten()
    if len(unknown):
        raise DataError(f"the suspicion of example {int(unknown[0])} is NaN; give every example a number")
    levels, members = (-suspect).unique(return_inverse=True)  # ascending: the most suspicious first
    sizes = torch.bincount(members, minlength=len(levels))
    hits = torch.bincount(members[wrong], minlength=len(levels))
    start = torch.zeros(1, dtype=torch.float64)
    return DetectionCurve(
        inspected=torch.cat([start, sizes.cumsum(0).double() / len(suspect)]),
        shares=torch.cat([start, hits.cumsum(0).double() / int(wrong.sum())]),
        num_examples=len(suspect),
        num_mislabelled=int(wrong.sum()),
    )


def _check_fraction(fraction: float) -> None:
    if not 0 <= fraction <= 1:
        raise OptionError(f"fraction is {fraction}; it is a share of the examples, from 0 to 1")
