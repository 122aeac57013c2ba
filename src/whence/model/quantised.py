"""Quantised weights: which they are, what they are made of, and layers that lose derivatives because of them.

Numbers of 8 bits or fewer have no derivatives, so they are never among the selected parameters; adapters in floating
point above them are. A layer that multiplies by dequantised weights has the derivatives of that product. One that
rounds its inputs, too, has none, and a backward pass ends there without a word: only what is above it, or goes around
it, would be seen. That is looked for on the pilot.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from whence.errors import ModelError

__all__ = ["dequantised", "is_packed", "is_quantised", "parts", "refusing_cuts"]

#: Of buffers that hold packed weights, as GPTQ's and AWQ's layers have them; positions are of 64 bits.
_PACKED = (torch.uint8, torch.int8, torch.int16, torch.int32)


def parts(tensor: Tensor) -> list[Tensor]:
    """The plain tensors that a tensor is made of: itself, or what a tensor of a class of its own holds."""
    if hasattr(tensor, "to_local"):  # what this process holds of a sharded one
        tensor = tensor.to_local()
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return [tensor]
    names, _ = flatten()
    return [part for name in names for part in parts(getattr(tensor, name))]


def is_quantised(tensor: Tensor) -> bool:
    """Whether numbers of 8 bits or fewer, or whole ones, stand for the values, as in torchao's tensors.

    Example:
        >>> is_quantised(torch.zeros(2, dtype=torch.int8)), is_quantised(torch.zeros(2, dtype=torch.bfloat16))
        (True, False)
    """
    return is_packed(tensor) or any(
        not part.is_floating_point() or part.element_size() < 2 for part in parts(tensor)
    )


def is_packed(tensor: Tensor) -> bool:
    """Whether it is one of bitsandbytes': stored under any dtype, and unpacked by its layer as that was told."""
    return getattr(tensor, "quant_state", None) is not None


def dequantised(tensor: Any) -> Tensor:
    """The values that a quantised weight stands for, in float32."""
    values: Tensor = tensor.dequantize()
    return values.float()


@contextmanager
def refusing_cuts(model: nn.Module) -> Iterator[int]:
    """While active, a quantised layer whose outputs do not carry the gradient of its inputs raises `ModelError`.

    Gives how many quantised layers there are.
    """
    layers = [(name, module) for name, module in model.named_modules() if _holds_quantised(module)]
    with ExitStack() as stack:
        for name, module in layers:
            stack.callback(module.register_forward_hook(_Watch(name), with_kwargs=True).remove)
        yield len(layers)


class _Watch:
    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, module: nn.Module, args: Any, kwargs: Mapping[str, Any], output: Any) -> None:
        if not torch.is_grad_enabled() or not any(t.requires_grad for t in _real((args, kwargs))):
            return
        if any(not t.requires_grad for t in _real(output)):
            raise ModelError(
                f"the layer {self.name!r} ({type(module).__name__}) is quantised in a way that has no derivatives: its "
                "inputs depend on the selected parameters, its outputs carry no gradient. Such are layers that round "
                "their inputs, too; quantise the weights alone (torchao's Int8WeightOnlyConfig or "
                "IntxWeightOnlyConfig), or give the model in floating point"
            )


def _real(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _holds_quantised(module: nn.Module) -> bool:
    if type(module).__module__.startswith(("torch.ao.nn", "torch.nn.quantized")):
        return True  # these keep packed weights outside of parameters and buffers
    packed = (b for b in module.buffers(recurse=False) if b.dtype in _PACKED and b.ndim > 1)
    return any(is_quantised(p) for p in module.parameters(recurse=False)) or any(True for _ in packed)
