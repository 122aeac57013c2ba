"""Do a model's tangents and its backward pass belong to the same function?

A product ``JᵀSJv`` takes ``Jv`` from dual numbers or finite differences, and ``Jᵀc`` from the backward pass. Each may
be wrong without a word: exported code does not see parameters that are swapped, finite differences go through a
``detach`` or step over a discontinuity. Then they are not each other's transpose, and H is not symmetric. For a random
w of mean 0 and variance 1,

    ⟨w, t⟩ - ⟨Jᵀw, v⟩ = ⟨w, t - Jv⟩,   whose mean square is ‖t - Jv‖²,

so a few of them estimate the relative error of t on some examples, whatever t is computed by. It is asked along a
gradient, on which scores depend, and along a random direction, which moves every parameter.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from whence.model.network import Network, adding_to
from whence.tasks import Batch
from whence.vectors import ParamVector

__all__ = ["TOLERATED", "disagreement"]

#: Relative error of tangents that is no reason to refuse a model: float32's finite differences have a tenth of it.
TOLERATED = 0.05
_PROBES = 3


def disagreement(network: Network, batch: Batch, tangent: Callable[[ParamVector], Tensor]) -> float:
    """Relative error of ``tangent(v) = Jv`` by what the backward pass says, the larger of two directions'.

    One forward and three backward passes over the batch, and two tangents. Holds two vectors of the parameters' size.

    Args:
        network: the model.
        batch: some examples.
        tangent: of their outputs, along a direction.
    """
    leaves = network.leaves()
    outputs = network.outputs(batch, leaves)
    like = outputs.detach()
    gradient = network.blank()
    spread = gradient.randn_like(torch.Generator(network.device).manual_seed(0))
    directions = (gradient, spread)
    pulled = torch.zeros(len(directions), _PROBES, dtype=torch.float64, device=network.device)
    network.pull_back(outputs, leaves, _probe(0, like), adding_to(gradient, 1.0), keep_graph=True)
    pulled[:, 0] = torch.stack([gradient.dot(v) for v in directions])
    for k in range(1, _PROBES):

        def receive(name: str, part: Tensor, k: int = k) -> None:
            part = part.to_dense()  # an embedding's may be sparse
            for row, direction in enumerate(directions):
                pulled[row, k] += torch.dot(part.flatten(), direction[name].flatten())

        network.pull_back(outputs, leaves, _probe(k, like), receive, keep_graph=k < _PROBES - 1)
    del outputs, leaves
    if network.together:  # each process has met its rows
        pulled[:, 1:] = network.ranks.sum(pulled[:, 1:])
    return max(_relative_error(tangent(v), row) for v, row in zip(directions, pulled.cpu(), strict=True))


def _relative_error(t: Tensor, pulled: Tensor) -> float:
    """Of a tangent t, from ``⟨Jᵀw, v⟩`` of every probe w; 0 where neither sees anything move."""
    sums = [float((_probe(k, t) * t).sum(dtype=torch.float64)) for k in range(_PROBES)]
    seen = torch.tensor(sums, dtype=torch.float64)
    size = max(float(t.double().square().sum()), float(pulled.square().mean()))
    return math.sqrt(float((seen - pulled).square().mean()) / size) if size else 0.0


def _probe(number: int, like: Tensor) -> Tensor:
    """Random signs, the same for a number whenever they are needed again."""
    generator = torch.Generator(like.device).manual_seed(1 + number)
    signs = torch.randint(0, 2, like.shape, generator=generator, device=like.device, dtype=torch.int8)
    return signs.to(like.dtype).mul_(2).sub_(1)
