"""Self-influence of every training example: how much each is needed for its own loss to be what it is.

    s(z) = wᵀ(H + λ)⁻¹w,   w = ∇ℓ(z)          without z, its own loss is higher by about s(z)·(z's terms / all terms)

An example that no other one speaks for, such as one with a wrong label, keeps its loss down by itself: its
self-influence is large. A solve for each is out of the question. So H + λ is replaced by one low-rank P (`reading`),
with bounds of what that can change (`bounds`), and the scale is set by a few exact solves (`calibration`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from whence.errors import OptionError
from whence.model.gauss_newton import GaussNewton
from whence.operators import LinearOperator
from whence.preconditioners import nystrom
from whence.scoring.self_influence.bounds import Bounds, affordable_rank, measure_bounds
from whence.scoring.self_influence.calibration import Calibration, calibrate
from whence.scoring.self_influence.reading import Readings, read_examples

__all__ = ["SelfInfluence", "self_influence"]

_COPIED = ("indices", "terms", "norms", "losses", "labels", "predictions", "probabilities")


@dataclass(frozen=True, eq=False)
class SelfInfluence:
    """Self-influence of training examples with bounds, beside the cheaper loss and gradient norm.

    ``low ≤ s ≤ high``. The upper end is proven, the lower one holds with probability ``bounds.confidence``; both are
    about H over ``bounds.operator_terms`` terms. The value lies between them, where exact solves for a few examples put
    it. (The bounds are the same multiples of the value for all examples, but for rounding.)

    Attributes:
        indices, terms: which examples, and how many terms each has, ``[n]``.
        values, low, high: self-influence and its bounds, ``[n]`` in float64.
        norms: ‖∇ℓ(z)‖.
        losses: in nats.
        labels, predictions, probabilities: as in `Readings`.
        num_terms: of all of the data.
        damping: λ.
        rank: of P.
        bounds: of P.
        calibration: None where nothing was solved for; the values are then ``wᵀP⁻¹w``, at the upper end.
    """

    indices: Tensor
    terms: Tensor
    values: Tensor
    low: Tensor
    high: Tensor
    norms: Tensor
    losses: Tensor
    labels: Tensor
    predictions: Tensor
    probabilities: Tensor
    num_terms: int
    damping: float
    rank: int
    bounds: Bounds
    calibration: Calibration | None

    @classmethod
    def from_readings(
        cls, found: Readings, bounds: Bounds, calibration: Calibration | None, **others: Any
    ) -> SelfInfluence:
        """Values and bounds of what was read; ``others`` are ``num_terms``, ``damping`` and ``rank``."""
        low = (found.forms - found.errors).clamp_min(0.0) / bounds.largest
        high = (found.forms + found.errors) / bounds.smallest
        scale = 1.0 if calibration is None else calibration.value
        return cls(
            values=(scale * found.forms).clamp(low, high),
            low=low,
            high=high,
            bounds=bounds,
            calibration=calibration,
            **{name: getattr(found, name) for name in _COPIED},
            **others,
        )

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def effects(self) -> Tensor:
        """Nats by which each example's own loss would rise without it, ``[n]``."""
        return self.values * self.terms.double() / self.num_terms


def self_influence(
    gnh: GaussNewton,
    damping: float,
    *,
    generator: torch.Generator,
    rank: int | None = None,
    terms: int | None = None,
    positions: Tensor | None = None,
    probes: int = 8,
) -> SelfInfluence:
    """Self-influence of all training examples, or of some.

    Costs about ``rank + 16`` products and a few iterations for the probes, then one backward and one forward for each
    example.

    Args:
        gnh: the operator; brings the network, task and data.
        damping: λ.
        generator: draws Nyström's test vectors, the subset, Lanczos' start and the probes.
        rank: of P; by default 32, or what half of the memory holds.
        terms: how many terms of the data H is taken over at most; None: all of them.
        positions: of the examples to read; all by default.
        probes: examples that are solved for exactly; 0: none.

    Example:
        >>> from whence import Classification
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Linear(2, 3).eval()
        >>> data = [(torch.randn(2), i % 3) for i in range(30)]
        >>> gnh = GaussNewton(model, Classification(), data)
        >>> found = self_influence(gnh, 0.01, generator=torch.Generator().manual_seed(0))
        >>> bool((found.low <= found.values).all() and (found.values <= found.high).all())
        True
    """
    if terms is not None and terms < 1:
        raise OptionError(f"terms is {terms}; curvature needs at least one term to be measured on")
    columns, at_once = affordable_rank(gnh) if rank is None else (rank, 8)
    operator: LinearOperator = gnh
    if terms is not None and terms < gnh.num_terms:
        operator = gnh.subset(terms, generator)
    P = nystrom(operator, damping, rank=columns, generator=generator, at_once=at_once)
    bounds = measure_bounds(P, operator, generator=generator)
    found = read_examples(gnh, P, [torch.arange(len(gnh.terms)) if positions is None else positions])
    calibration = None
    if probes:
        calibration = calibrate(gnh, P, operator, found, generator=generator, probes=probes)
    return SelfInfluence.from_readings(
        found, bounds, calibration, num_terms=gnh.num_terms, damping=P.damping, rank=P.rank
    )
