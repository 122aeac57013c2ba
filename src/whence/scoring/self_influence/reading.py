"""One pass over the examples: ``q = wᵀP⁻¹w`` from one backward each, beside the loss and what the model says.

    q = (‖w‖² - Σ_k Λ_k/(Λ_k + λ) (u_kᵀw)²) / λ,       w = ∇ℓ(z),   P = λ + UΛUᵀ

`Scorer` gives the length of w and its products with U without holding a gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Protocol

import torch
from torch import Tensor

from whence.errors import DataError
from whence.model.gauss_newton import GaussNewton
from whence.preconditioners import LowRank
from whence.preconditioners.blocks import precision
from whence.progress import ticker
from whence.scoring import Scorer
from whence.tasks.categorical import CategoricalTask

__all__ = ["PartStore", "Readings", "read_examples"]

_CHUNK = 64  # examples between two moves of the progress bar


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
        names = [field.name for field in fields(Readings)]
        return Readings(**{name: torch.cat([getattr(part, name) for part in parts]) for name in names})


class PartStore(Protocol):
    """Keeps finished parts of the pass."""

    def read(self, number: int) -> Readings | None:
        """A part, or None where it has not been written."""

    def write(self, number: int, part: Readings) -> None:
        """Write a part, at once."""


def read_examples(
    gnh: GaussNewton, preconditioner: LowRank, parts: Sequence[Tensor], *, store: PartStore | None = None
) -> Readings:
    """Read all parts; those that the store has are not computed again.

    Args:
        gnh: the operator; brings the network, task and data.
        preconditioner: P.
        parts: positions, one part after the other.
        store: where finished parts are kept.
    """
    scorer = Scorer(gnh, preconditioner.vectors, method="gradients", norms=True)
    done = []
    with ticker("self-influence of training examples", sum(map(len, parts))) as tick:
        for number, positions in enumerate(parts):
            part = None if store is None else store.read(number)
            if part is None:
                pieces = [_read(scorer, preconditioner, chunk, tick) for chunk in positions.split(_CHUNK)]
                part = Readings.join(pieces)
                if store is not None:
                    store.write(number, part)
            else:
                for _ in range(len(positions)):
                    tick()
            done.append(part)
    return Readings.join(done)


def _read(scorer: Scorer, P: LowRank, positions: Tensor, tick: Callable[[], None]) -> Readings:
    products, norms = scorer.score_with_norms(positions)
    squares, top = norms.square(), float(P.eigenvalues[0])
    kept = P.eigenvalues / (P.eigenvalues + P.damping)
    along = (kept.unsqueeze(1) * (P.correction.T @ products).square()).sum(0)
    # The difference of two large numbers, but never less than this, as P ≼ Λ₁ + λ.
    forms = torch.maximum((squares - along) / P.damping, squares / (top + P.damping))
    # Sums of n rounded products: their errors add up as a random walk's steps do.
    longest = max(tensor[0].numel() for tensor in P.vectors.values())
    errors = squares * (precision(P.vectors) * math.sqrt(longest) / P.damping)
    answers = _answers(scorer.gnh, positions)
    for _ in range(len(positions)):
        tick()
    terms = scorer.terms
    return Readings(
        indices=terms.indices[positions],
        terms=terms.counts()[positions],
        norms=norms,
        forms=forms,
        errors=errors,
        **answers,
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
    return {
        "losses": losses,
        "labels": labels,
        "predictions": predictions,
        "probabilities": probabilities,
    }
