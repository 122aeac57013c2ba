"""Backward passes from any cotangent, as from a loss.

Given a cotangent, `torch.autograd.grad` checks its shape by means of symbolic shapes, and so imports sympy: a quarter
of a second and thirty megabytes in every program. From one number it asks for none.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["pulled_back", "seeded"]


def seeded(outputs: Tensor, cotangent: Tensor) -> Tensor:
    """One number to go backward from: the gradient that arrives at the outputs is the cotangent.

    Example:
        >>> x = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> torch.autograd.grad(seeded(x.square(), torch.tensor([1.0, 10.0])), x)
        (tensor([ 2., 40.]),)
    """
    cotangent = cotangent.to(outputs.dtype)
    with torch.enable_grad():
        alias = outputs.view_as(
            outputs
        )  # of its own, since autograd reads gradients of the outputs before their hooks
        alias.register_hook(lambda _: cotangent)
        return alias.sum()


def pulled_back(
    outputs: Tensor, inputs: Sequence[Any], cotangents: Tensor, *, keep_graph: bool = False
) -> list[Tensor | None]:
    """``Jᵀ c`` for each of the inputs; None where the outputs do not depend on one.

    With more dimensions in ``cotangents`` than in ``outputs`` it is a block, ``[k, *input]``.
    """
    missing: list[bool] = []

    def pull(cotangent: Tensor) -> list[Tensor]:
        number = seeded(outputs, cotangent)
        found = torch.autograd.grad(number, inputs, allow_unused=True, retain_graph=keep_graph)
        missing[:] = [gradient is None for gradient in found]
        return [gradient for gradient in found if gradient is not None]

    with warnings.catch_warnings():
        # an operation that cannot be vectorised is done for one cotangent at a time
        warnings.filterwarnings("ignore", "There is a performance drop", UserWarning)
        pulled = iter((torch.func.vmap(pull) if cotangents.ndim > outputs.ndim else pull)(cotangents))
    return [None if is_missing else next(pulled) for is_missing in missing]
