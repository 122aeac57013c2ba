"""Grouped matrix products, of which mixtures of experts are made, as plain ones.

``y = x_e W_e`` for the rows ``x_e`` that a router sent to expert e is one fused kernel in PyTorch, without a
forward-mode derivative. One product for each expert gives the same, and has all derivatives.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

__all__ = ["PlainGroups", "may_group"]

#: What the fused kernel is called, in PyTorch and in transformers.
_FUSED = {"grouped_mm", "_grouped_mm", "grouped_mm_fallback"}


def may_group(model: nn.Module) -> bool:
    """Whether a module other than a convolution holds a stack of matrices, as fused experts do."""
    return any(
        parameter.ndim == 3
        for module in model.modules()
        if not isinstance(module, (nn.Conv1d, nn.ConvTranspose1d))
        for parameter in module.parameters(recurse=False)
    )


class PlainGroups(TorchFunctionMode):
    """While active, ``grouped_mm(x, W, offs=…)`` of a matrix and a stack is a plain product for each of the stack."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        if getattr(func, "__name__", "") in _FUSED and len(args) >= 2:
            x, stack, *rest = args
            ends = rest[0] if rest else options.get("offs")
            if x.ndim == 2 and stack.ndim == 3 and ends is not None and options.get("bias") is None:
                return _by_group(x, stack, ends.tolist())
        return func(*args, **options)


def _by_group(x: Tensor, stack: Tensor, ends: list[int]) -> Tensor:
    starts = [0, *ends[:-1]]
    parts = [x[start:end] @ stack[i] for i, (start, end) in enumerate(zip(starts, ends, strict=True))]
    parts.append(x.new_zeros(len(x) - ends[-1], stack.shape[-1]))  # rows behind the last group
    return torch.cat(parts)
