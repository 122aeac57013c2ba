"""`measure_rounding`: would the scores be the same, had the weights been rounded otherwise?

Weights in bfloat16 or float16 were rounded, unless the model was trained in them. Scores are those of the weights as
they are, in float32 arithmetic; what they say of the model before it was rounded, they cannot know. But rounding is
noise of a known size: at ``θ + r`` with r uniform over ± half a unit in the last place of every weight, slopes
``∇ℓ(z; θ + r)ᵀu`` of some examples z along the solution u are compared with the scores ``∇ℓ(z)ᵀu``. A model that fits
its data to the end has small gradients that stand on such digits. ``python -m benchmarks.precision`` compares this with
the scores of the weights before they were rounded.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from whence.model.gauss_newton import GaussNewton
from whence.model.network import adding_to, widened
from whence.model.quantised import is_quantised
from whence.vectors import ParamVector

__all__ = ["measure_rounding"]

#: Examples that are compared; of fewer, a correlation says nothing.
_EXAMPLES, _FEWEST = 64, 8


def measure_rounding(
    gnh: GaussNewton, solution: ParamVector, positions: Tensor, scores: Tensor
) -> Tensor | None:
    """The correlation of scores with those of weights that are rounded otherwise, for each query.

    Args:
        gnh: the operator.
        solution: u, a column for each query.
        positions: of the examples that were scored.
        scores: along u, ``[queries, scored]``.

    Returns:
        None where no selected weight has fewer bits than float32, or too few examples were scored.
    """
    network = gnh.network
    narrow = any(p.dtype in (torch.bfloat16, torch.float16) for p in network.parameters.values())
    if not narrow or network.together or len(positions) < _FEWEST:
        return None
    chosen = torch.linspace(0, len(positions) - 1, min(len(positions), _EXAMPLES), dtype=torch.float64).long()
    whole, generator = network.opened(solution), torch.Generator().manual_seed(0)
    moved = {
        name: _rounded_otherwise(tensor, generator)
        for name, tensor in {**network.parameters, **network.narrow_rest}.items()
        if not is_quantised(tensor)
    }
    slopes = torch.stack(
        [_slopes(gnh, int(positions[place]), moved, whole) for place in chosen.tolist()], dim=1
    )
    pairs = torch.stack([scores[:, chosen].double().cpu(), slopes.double().cpu()], dim=1)
    pairs = pairs - pairs.mean(2, keepdim=True)
    lengths = pairs.norm(dim=2)
    found = (pairs[:, 0] * pairs[:, 1]).sum(1) / lengths.prod(1).clamp_min(1e-300)
    return torch.where(lengths.prod(1) > 0, found, torch.ones_like(found))


def _rounded_otherwise(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """A weight in float32, as it may have been before it was rounded; itself where it was not."""
    wide = widened(tensor.detach())
    if tensor.dtype not in (torch.bfloat16, torch.float16):
        return wide
    unit = torch.ldexp(torch.full_like(wide, torch.finfo(tensor.dtype).eps), torch.frexp(wide).exponent - 1)
    noise = torch.rand(tensor.shape, generator=generator).to(wide.device) - 0.5
    return torch.where(wide == 0, wide, wide + noise * unit)


def _slopes(gnh: GaussNewton, position: int, moved: Mapping[str, Tensor], solution: ParamVector) -> Tensor:
    """``∇ℓ(z)ᵀu`` at other weights, of every column."""
    network, batch = gnh.network, gnh.terms.fetch(torch.tensor([position]))
    leaves = {name: moved[name].detach().requires_grad_() for name in network.parameters if name in moved}
    rest = {name: tensor for name, tensor in moved.items() if name not in leaves}
    loss = gnh.task.query_losses(network.outputs(batch, {**rest, **leaves}), batch).sum()
    gradient = network.blank()
    network.pull_back(loss, leaves, torch.ones_like(loss), adding_to(gradient, 1.0))
    return torch.stack([gradient.dot(column) for column in solution.unstack()])
