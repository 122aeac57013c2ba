"""Self-influence of every training example: how much each is needed for its own loss to be what it is.

    s(z) = wᵀ(H + λ)⁻¹w,   w = ∇ℓ(z)          without z, its own loss is higher by about s(z)·(z's terms / all terms)

An example that no other one speaks for, such as one with a wrong label, keeps its loss down by itself: its
self-influence is large. A solve for each is out of the question, so

1. H + λ is replaced by one low-rank ``P = λ + UΛUᵀ``, and one backward for each example gives
   ``q = wᵀP⁻¹w = (‖w‖² - Σ_k Λ_k/(Λ_k + λ) (u_kᵀw)²) / λ`` (`read_examples`);
2. bounds of P⁻¹(H + λ) bound ``s/q`` (`whence.scoring.bounds`);
3. exact solves for a few examples, drawn with chances proportional to q, set the scale: over such draws
   ``E[s/q] = Σs / Σq`` (`calibrate`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from whence.errors import DataError, OptionError
from whence.model.gauss_newton import GaussNewton
from whence.operators import Damped, LinearOperator
from whence.preconditioners import LowRank, nystrom
from whence.scoring.bounds import WORKING_VECTORS, Bounds, affordable_rank, copies_in_memory, measure_bounds
from whence.scoring.scorer import Scorer
from whence.solvers import ConjugateGradient
from whence.spectrum import Estimate
from whence.tasks.categorical import CategoricalTask

__all__ = ["Calibration", "Readings", "SelfInfluence", "calibrate", "read_examples", "self_influence"]

_CHUNK = 64  # examples between two moves of the progress bar
_TOLERANCE = 0.1  # of an exact solve; what it leaves of s is the square of that
_COPIED = ("indices", "terms", "norms", "losses", "labels", "predictions", "probabilities")


@dataclass(frozen=True, eq=False)
class Readings:
    """What a pass tells of some examples, ``[n]`` each.

    Attributes:
        indices: positions in the training data.
        terms: how many terms each has.
        losses: in nats, the mean over an example's terms.
        norms: ``‖w‖``.
        forms: q.
        errors: what rounding may have done to q.
        labels: the class that is given; -1 where the task has no single label.
        predictions: the class that the model gives; -1 likewise.
        probabilities: that the model gives to its prediction; NaN likewise.
    """

    indices: Tensor
    terms: Tensor
    losses: Tensor
    norms: Tensor
    forms: Tensor
    errors: Tensor
    labels: Tensor
    predictions: Tensor
    probabilities: Tensor

    def __len__(self) -> int:
        return len(self.indices)

    @staticmethod
    def join(parts: Sequence[Readings]) -> Readings:
        """One after the other."""
        names = vars(parts[0])
        return Readings(**{name: torch.cat([getattr(part, name) for part in parts]) for name in names})

    def columns(self) -> dict[str, np.ndarray]:
        """As a table."""
        return {name: column.numpy() for name, column in vars(self).items()}

    @staticmethod
    def from_columns(columns: Mapping[str, np.ndarray]) -> Readings:
        """Inverse of `columns`."""
        return Readings(**{name: torch.from_numpy(column.copy()) for name, column in columns.items()})


def read_examples(
    gnh: GaussNewton, preconditioner: LowRank, positions: Tensor, *, tick: Callable[[], None] | None = None
) -> Readings:
    """Read some examples: one backward and one forward for each.

    Args:
        gnh: the operator; brings the network, task and data.
        preconditioner: P.
        positions: of the examples.
        tick: called after each.
    """
    scorer = Scorer(gnh, preconditioner.vectors, method="gradients", norms=True)
    done = []
    for chunk in positions.split(_CHUNK):
        done.append(_read(scorer, preconditioner, chunk))
        for _ in chunk:
            if tick is not None:
                tick()
    return Readings.join(done)


def _read(scorer: Scorer, P: LowRank, positions: Tensor) -> Readings:
    products, norms = scorer.score_with_norms(positions)
    squares, top = norms.square(), float(P.eigenvalues[0])
    kept = P.eigenvalues / (P.eigenvalues + P.damping)
    along = (kept.unsqueeze(1) * (P.correction.T @ products).square()).sum(0)
    # The difference of two large numbers, but never less than this, as P ≼ Λ₁ + λ.
    forms = torch.maximum((squares - along) / P.damping, squares / (top + P.damping))
    # Sums of n rounded products: their errors add up as a random walk's steps do.
    longest = max(tensor[0].numel() for tensor in P.vectors.values())
    errors = squares * (P.vectors.rounding * math.sqrt(longest) / P.damping)
    return Readings(
        indices=scorer.terms.indices[positions],
        terms=scorer.terms.counts()[positions],
        norms=norms,
        forms=forms,
        errors=errors,
        **_answers(scorer.gnh, positions),
    )


@torch.no_grad()
def _answers(gnh: GaussNewton, positions: Tensor) -> dict[str, Tensor]:
    """Loss, label, prediction and its probability, by forwards alone."""
    count = len(positions)
    losses = torch.zeros(count, dtype=torch.float64)
    labels, predictions = torch.full((count,), -1), torch.full((count,), -1)
    probabilities = torch.full((count,), math.nan, dtype=torch.float64)
    for columns in gnh.terms.by_length(positions).split(gnh.micro_batch):
        batch = gnh.terms.fetch(positions[columns])
        outputs = gnh.network.outputs(batch)
        losses[columns] = gnh.task.query_losses(outputs, batch).double().cpu()
        if isinstance(gnh.task, CategoricalTask) and batch.targets.ndim == 1:
            sure, says = outputs.double().softmax(-1).max(-1)
            labels[columns], predictions[columns] = batch.targets.cpu(), says.cpu()
            probabilities[columns] = sure.cpu()
    wrong = (~losses.isfinite()).nonzero().flatten().tolist()
    if wrong:
        index = int(gnh.terms.indices[positions[wrong[0]]])
        raise DataError(
            f"the loss of example {index} is {float(losses[wrong[0]])}; check its inputs and label, or leave it out"
        )
    return {"losses": losses, "labels": labels, "predictions": predictions, "probabilities": probabilities}


@dataclass(frozen=True)
class Calibration:
    """What exact solves for a few examples say of ``s/q``.

    Attributes:
        value: the mean of s/q, which estimates ``Σs/Σq``.
        stderr: its standard error.
        spread: the standard deviation of s/q from example to example.
        solves: how many examples were drawn.
        num_products: products spent, each with several examples at once.
    """

    value: float
    stderr: float
    spread: float
    solves: int
    num_products: int


def calibrate(
    gnh: GaussNewton,
    preconditioner: LowRank,
    operator: LinearOperator,
    found: Readings,
    *,
    generator: torch.Generator,
    solves: int = 8,
) -> Calibration | None:
    """Solve for a few examples by conjugate gradients, and compare.

    After a step, ``gᵀx = s - ‖e‖²_A`` with proven bounds of the error e: a rough solve tells s precisely.

    Args:
        gnh: the operator; brings the data.
        preconditioner: P.
        operator: the H that P was made from, undamped.
        found: q of the examples to draw from.
        generator: draws them.
        solves: how many.

    Returns:
        None where every gradient is zero.
    """
    if solves < 2:
        raise OptionError(f"solves is {solves}; a mean with its error needs at least 2 examples")
    edges = found.forms.cumsum(0)
    if not float(edges[-1]) > 0:
        return None
    uniform = torch.rand(solves, generator=generator, device=generator.device, dtype=torch.float64).cpu()
    drawn = torch.searchsorted(edges, uniform * edges[-1]).clamp_max_(len(edges) - 1)
    chosen, times = drawn.unique(return_counts=True)
    room = (copies_in_memory(gnh) - preconditioner.rank) // WORKING_VECTORS
    solver = ConjugateGradient(tolerance=_TOLERANCE, preconditioner=preconditioner, verify=False)
    exact, spent = [], 0
    for group in found.indices[chosen].split(max(1, room)):
        rhs = gnh.gradients([gnh.terms.data[index] for index in group.tolist()])
        solution = solver.solve(Damped(operator, preconditioner.damping), rhs, generator=generator)
        assert solution.certificate is not None
        lower, upper = solution.certificate.lower.square(), solution.certificate.upper.square()
        left = torch.where(upper.isfinite(), 0.5 * (lower + upper), lower)
        exact.append(rhs.dot(solution.value).cpu() + left.cpu())
        spent += solution.num_products
    ratios = (torch.cat(exact) / found.forms[chosen]).repeat_interleave(times)
    mean = Estimate.from_samples(ratios.tolist())
    return Calibration(mean.value, mean.stderr, mean.stderr * math.sqrt(solves), solves, spent)


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
    exact_solves: int = 8,
) -> SelfInfluence:
    """Self-influence of all training examples, or of some.

    Costs about ``rank + 16`` products and a few iterations for the exact solves, then one backward and one forward for
    each example.

    Args:
        gnh: the operator; brings the network, task and data.
        damping: λ.
        generator: draws Nyström's test vectors, the subset, Lanczos' start and the examples to solve for.
        rank: of P; by default 32, or what half of the memory holds.
        terms: how many terms of the data H is taken over at most; None: all of them.
        positions: of the examples to read; all by default.
        exact_solves: examples that are solved for exactly; 0: none.

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
    found = read_examples(gnh, P, torch.arange(len(gnh.terms)) if positions is None else positions)
    calibration = None
    if exact_solves:
        calibration = calibrate(gnh, P, operator, found, generator=generator, solves=exact_solves)
    return SelfInfluence.from_readings(
        found, bounds, calibration, num_terms=gnh.num_terms, damping=P.damping, rank=P.rank
    )
