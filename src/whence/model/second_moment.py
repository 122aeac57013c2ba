"""`root_second_moment`: what Adam would divide its steps by, measured at the parameters as they are."""

from __future__ import annotations

import torch
from torch import Tensor

from whence.model.gauss_newton import GaussNewton
from whence.model.layers import matrices
from whence.model.network import Network
from whence.vectors import ParamVector

__all__ = ["BATCH", "BATCHES", "factored", "root_second_moment"]

#: Examples of a batch, and batches at most.
BATCH, BATCHES = 32, 64
#: Entries are at least this part of their root mean square: a parameter that no training example moves has no scale.
_FLOOR = 1e-3


def root_second_moment(gnh: GaussNewton, *, generator: torch.Generator) -> ParamVector:
    """``√v``, ``v = mean over batches of (∇ mean loss)²`` matrix by matrix `factored`; a pass over the data at most.

    Adam's own v̂ at the end of training is an average over its last thousand steps or so; this is at one point, and over
    batches of 32 examples whatever the training's were.

    Args:
        gnh: the operator, without a metric; brings the network, task and data.
        generator: draws the batches.
    """
    total, count = gnh.zeros(), 0
    order = torch.randperm(len(gnh.terms), generator=generator, device=generator.device).cpu()
    for positions in order.split(BATCH)[:BATCHES]:
        gradient = gnh.training_gradient(positions)
        total.axpy_(1.0, gradient.mul_(gradient))
        count += 1
    return factored(total.scale_(1 / count).power(0.5), gnh.network)


def factored(metric: ParamVector, network: Network) -> ParamVector:
    """The metric as ``D = r cᵀ`` in every matrix of parameters, with the same means of squares by row and by column.

    So it is diagonal in Kronecker's sense too, and EK-FAC can be made in its coordinates. Entries are at least a
    thousandth of their root mean square; ones where all are zero.
    """
    least = _FLOOR * float(metric.norm()) / metric.numel**0.5 or 1.0
    parts: dict[str, Tensor] = {}
    for matrix in matrices(network):
        entries = metric.whole_of(matrix.names)
        squares = matrix.pack({name: entry.clamp_min(least) for name, entry in entries.items()}).square()
        rows, columns = squares.mean(1, keepdim=True), squares.mean(0, keepdim=True)
        found = matrix.unpack((rows * columns / squares.mean()).sqrt(), metric.shape_of(matrix.weight))
        parts |= {name: metric.own_rows(name, entry).clone() for name, entry in found.items()}
    return metric.like({name: parts[name].contiguous() for name in metric})
