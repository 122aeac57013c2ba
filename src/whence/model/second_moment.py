"""`root_second_moment`: what Adam would divide its steps by, measured at the parameters as they are."""

from __future__ import annotations

import torch

from whence.model.gauss_newton import GaussNewton
from whence.vectors import ParamVector

__all__ = ["BATCH", "floored", "root_second_moment"]

#: Examples of a batch, and batches at most.
BATCH, _BATCHES = 32, 64
#: Entries are at least this part of their root mean square: a parameter that no training example moves has no scale.
_FLOOR = 1e-3


def root_second_moment(gnh: GaussNewton, *, generator: torch.Generator) -> ParamVector:
    """``√v``, ``v = mean over batches of (∇ mean loss)²`` entry by entry, floored; a pass over the data at most.

    Adam's own v̂ at the end of training is an average over its last thousand steps or so; this is at one point, and over
    batches of 32 examples whatever the training's were.

    Args:
        gnh: the operator, without a metric; brings the network, task and data.
        generator: draws the batches.
    """
    total, count = gnh.zeros(), 0
    order = torch.randperm(len(gnh.terms), generator=generator, device=generator.device).cpu()
    for positions in order.split(BATCH)[:_BATCHES]:
        gradient = gnh.training_gradient(positions)
        total.axpy_(1.0, gradient.mul_(gradient))
        count += 1
    return floored(total.scale_(1 / count).power(0.5))


def floored(metric: ParamVector) -> ParamVector:
    """A metric whose entries are at least a thousandth of their root mean square; ones where all are zero."""
    least = _FLOOR * float(metric.norm()) / metric.numel**0.5 or 1.0
    return ParamVector({name: part.clamp_min(least) for name, part in metric.items()})
