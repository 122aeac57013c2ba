"""Drawing examples by what they contribute to the Hessian: for models that are certain of almost everything.

Where a model fits its training data to the end, a few uncertain examples carry H. Batches drawn uniformly then mostly
hold nothing, and once in a while everything: the constant C of condition C.1 is in the tens or hundreds, and so is the
cost of a solve. Draw example z with a chance proportional to the trace of its own part of the output Hessian instead,

    p(z) = (1 - a) Tr S(z) / Σ Tr S  +  a / n,          S(z) = ∇²ℓ(h) in the outputs,

and count it ``1 / (n p(z))`` times. Expectations stay what they were. The second part keeps that count below 1/a: an
example whose outputs say little may still have a large Jacobian. One forward pass over the data measures all Tr S(z).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from whence.errors import OptionError
from whence.model.gauss_newton import GaussNewton
from whence.progress import ticker

__all__ = ["Importance", "measure_importance"]

#: The part of the draws that stays uniform.
UNIFORM = 0.2


@dataclass(frozen=True)
class Importance:
    """How much each example contributes to the output Hessian.

    Attributes:
        curvature: ``Tr S(z)``, summed over an example's terms, ``[n]``.
    """

    curvature: Tensor

    def __post_init__(self) -> None:
        if not bool(torch.isfinite(self.curvature).all()) or not float(self.curvature.sum()) > 0:
            raise OptionError(
                "the model is certain of every example: there is no curvature to draw examples by. Draw uniformly"
            )

    def probabilities(self, uniform: float = UNIFORM) -> Tensor:
        """p(z) in float64, adding up to one."""
        if not 0 < uniform <= 1:
            raise OptionError(f"uniform is {uniform}; it is a part of the draws, in (0, 1]")
        share = self.curvature.double() / self.curvature.double().sum()
        return (1 - uniform) * share + uniform / len(share)

    def gain(self, uniform: float = UNIFORM) -> float:
        """How many times smaller the mean square of an example's trace becomes, were all Jacobians alike.

        ``n Σ t² / Σ t²/p``: the factor by which C falls, roughly.
        """
        square = self.curvature.double().square()
        return float(len(square) * square.sum() / (square / self.probabilities(uniform)).sum())

    def share_of_top(self, examples: int) -> float:
        """The part of the whole trace that the ``examples`` most uncertain ones carry."""
        top = self.curvature.double().topk(min(examples, len(self.curvature))).values
        return float(top.sum() / self.curvature.double().sum())


def measure_importance(gnh: GaussNewton) -> Importance:
    """One forward pass over the data."""
    found = torch.zeros(len(gnh.terms), dtype=torch.float64)
    positions = torch.arange(len(gnh.terms))
    order = gnh.terms.by_length(positions)
    with ticker("uncertainty of training examples", len(positions)) as tick, torch.no_grad():
        for chunk in order.split(gnh.micro_batch):
            batch = gnh.terms.fetch(positions[chunk]).shared(gnh.network.ranks)
            if not batch.held and not gnh.lockstep:
                continue
            curvature = gnh.task.curvature(gnh.network.outputs(batch), batch)
            if curvature is None:
                raise OptionError(
                    f"{type(gnh.task).__name__} does not tell the curvature of outputs; draw uniformly"
                )
            start = 0 if batch.share is None else batch.share.start
            found[chunk[start : start + batch.held]] = curvature[: batch.held].double().cpu()
            for _ in range(len(chunk)):
                tick()
    return Importance(gnh.network.ranks.sum(found))
