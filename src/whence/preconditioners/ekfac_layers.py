"""Which layers EK-FAC can cover: found out by trying, with a reason for every parameter that it cannot.

EK-FAC is right where a layer is called once in a forward pass, with a row of inputs for each example, and where its
parameters do nothing else. So the model is run on one example, then on two. From a layer's inputs and the gradient of
its outputs, torch's own layer gives gradients of weight and bias; they must be those that the model gives. This finds
weights used without calling their layer, overridden forwards, and hooks that change outputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional

from whence.model.gauss_newton import GaussNewton

__all__ = ["Call", "Layer", "covered_leaves", "supported_layers", "watching", "why_not_called_well"]

_COVERED = (nn.Linear, nn.Conv2d, nn.Embedding)


@dataclass(frozen=True)
class Layer:
    """A module that is covered, and the names of its selected parameters."""

    module: nn.Linear | nn.Conv2d | nn.Embedding
    names: dict[str, str] = field(default_factory=dict)  # "weight" or "bias" -> the parameter's name


@dataclass(frozen=True)
class Call:
    """What went into a layer in a forward pass and what came out.

    Attributes:
        inputs: the positional arguments.
        output: what it returned.
        edge: where the output's gradient arrives, whatever is done to the output in place; None where it has none.
    """

    inputs: tuple[Any, ...]
    output: Any
    edge: GradientEdge | None


def supported_layers(gnh: GaussNewton, widest: int) -> tuple[dict[str, Layer], dict[str, str], int]:
    """The layers by name, a reason for every other parameter, and the number of outputs of the longest example."""
    owners: dict[int, list[tuple[str, nn.Module, str]]] = {}
    for name, module in gnh.network.model.named_modules():
        for kind, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            owners.setdefault(parameter.data_ptr(), []).append((name, module, kind))
    layers: dict[str, Layer] = {}
    uncovered: dict[str, str] = {}
    for name, parameter in gnh.network.parameters.items():
        (owner, module, kind), *others = owners[parameter.data_ptr()]
        reason = (
            f"tied: it is also in {', '.join(repr(other) for other, _, _ in others)}"
            if others
            else _why_not_supported(module, kind, widest)
        )
        if reason is not None:
            uncovered[name] = reason
        else:
            assert isinstance(module, _COVERED)
            layers.setdefault(owner, Layer(module)).names[kind] = name
    # One example, then two: no number of positions is 1 and 2, nor are examples times positions, unless there is one.
    outputs = 0
    for examples in (1, 2):
        if not layers:
            break
        reasons, outputs = _try(gnh, layers, examples)
        for owner, reason in reasons.items():
            uncovered |= dict.fromkeys(layers.pop(owner).names.values(), reason)
    return layers, {name: uncovered[name] for name in gnh.network.parameters if name in uncovered}, outputs


def covered_leaves(gnh: GaussNewton, layers: Mapping[str, Layer]) -> dict[str, Tensor]:
    """Aliases of the layers' parameters to take gradients with: the model's own are never asked for one."""
    covered = {name for layer in layers.values() for name in layer.names.values()}
    return {name: leaf for name, leaf in gnh.network.leaves().items() if name in covered}


@contextmanager
def watching(layers: Mapping[str, Layer]) -> Iterator[dict[str, list[Call]]]:
    """Every call of the layers inside, by their names."""
    calls: dict[str, list[Call]] = {name: [] for name in layers}

    def note(module: nn.Module, inputs: tuple[Any, ...], output: Any, *, name: str) -> None:
        differentiable = isinstance(output, Tensor) and output.requires_grad
        # now, before anything changes the output in place
        calls[name].append(Call(inputs, output, get_gradient_edge(output) if differentiable else None))

    handles = []
    try:
        for name, layer in layers.items():
            handles.append(layer.module.register_forward_hook(partial(note, name=name)))
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def why_not_called_well(layer: Layer, calls: list[Call], examples: int) -> str | None:
    """Whether a layer was called once, with a row of inputs for each example; if not, how."""
    if len(calls) != 1:
        return f"in a layer called {len(calls)} times in a forward pass"
    (call,) = calls
    if len(call.inputs) != 1 or not isinstance(call.inputs[0], Tensor) or not isinstance(call.output, Tensor):
        return "in a layer that is not called with one tensor"
    (given,) = call.inputs
    if isinstance(layer.module, nn.Embedding):
        whole = given.dtype in (torch.int32, torch.int64)
        if not whole or (given.numel() and not 0 <= given.min() <= given.max() < len(layer.module.weight)):
            return "in an embedding that is not called with the numbers of its rows"
        batched = given.ndim >= 1  # with one token for each example, they are a vector
    else:
        batched = given.ndim == 4 if isinstance(layer.module, nn.Conv2d) else given.ndim >= 2
    if not batched or len(given) != examples or len(call.output) != examples:
        return f"in a layer whose inputs {tuple(given.shape)} are not one row for each of {examples} examples"
    return None


def _why_not_supported(module: nn.Module, kind: str, widest: int) -> str | None:
    """What can be told from a parameter's module alone."""
    kinds = ("weight",) if isinstance(module, nn.Embedding) else ("weight", "bias")
    if not isinstance(module, _COVERED) or kind not in kinds:
        return f"a parameter of {type(module).__name__}; only Linear, Conv2d and Embedding are covered"
    if module.weight.element_size() < 4:
        return f"in {module.weight.dtype}; the factors need float32"
    if isinstance(module, nn.Conv2d):
        if module.groups > 1:
            return f"in a convolution of {module.groups} groups"
        uneven = any(d * (k - 1) % 2 for k, d in zip(module.kernel_size, module.dilation, strict=True))
        if module.padding_mode != "zeros" or (module.padding == "same" and uneven):
            return f"in a convolution with padding {module.padding!r}, {module.padding_mode!r}"
    if isinstance(module, nn.Embedding):
        odd = {
            "max_norm": module.max_norm is not None,
            "scale_grad_by_freq": module.scale_grad_by_freq,
            "sparse gradients": module.sparse,
        }
        if any(odd.values()):
            return f"in an embedding with {next(option for option, given in odd.items() if given)}"
        width = module.weight.shape[1]  # the vocabulary's factor is the identity
    else:
        width = max(len(module.weight), module.weight[0].numel() + 1)
    if width > widest:
        return f"in a layer {width:,} wide; widest is {widest:,}"
    return None


def _try(gnh: GaussNewton, layers: Mapping[str, Layer], examples: int) -> tuple[dict[str, str], int]:
    """Which of the layers cannot be covered, and why; and the number of outputs of an example."""
    batch = gnh.terms.fetch(gnh.terms.longest(1).repeat(examples))
    leaves = covered_leaves(gnh, layers)
    with watching(layers) as calls:
        outputs = gnh.network.outputs(batch, leaves)
    found = {name: why_not_called_well(layer, calls[name], examples) for name, layer in layers.items()}
    reasons = {name: reason for name, reason in found.items() if reason is not None}
    single = {name: calls[name][0] for name in layers if name not in reasons}
    edges = {name: call.edge for name, call in single.items() if call.edge is not None}
    wanted: list[Any] = [*leaves.values(), *edges.values()]
    draw = torch.randn(outputs.shape, generator=torch.Generator().manual_seed(0)).to(outputs)
    gradients = torch.autograd.grad(outputs, wanted, draw, allow_unused=True)
    of_parameters = dict(zip(leaves, gradients[: len(leaves)], strict=True))
    of_outputs = dict(zip(edges, gradients[len(leaves) :], strict=True))
    for name, call in single.items():
        if not _gradients_agree(layers[name], call.inputs[0].detach(), of_outputs.get(name), of_parameters):
            reasons[name] = "used in another way than by calling its layer"
    return reasons, outputs.numel() // examples


def _gradients_agree(
    layer: Layer, inputs: Tensor, of_output: Tensor | None, of_parameters: Mapping[str, Tensor | None]
) -> bool:
    """Whether the parameters' gradients are those of torch's own layer at these inputs."""
    module = layer.module
    own = {kind: getattr(module, kind).detach().requires_grad_() for kind in layer.names}
    weight, bias = own.get("weight", module.weight), own.get("bias")
    if isinstance(module, nn.Embedding):
        output = functional.embedding(inputs, weight, module.padding_idx)
    elif (
        inputs.dtype != weight.dtype
        or inputs.shape[1 if isinstance(module, nn.Conv2d) else -1] != weight.shape[1]
    ):
        return False
    elif isinstance(module, nn.Conv2d):
        output = functional.conv2d(inputs, weight, bias, module.stride, module.padding, module.dilation)
    else:
        output = functional.linear(inputs, weight, bias)
    if of_output is None or of_output.shape != output.shape:
        return False
    found = torch.autograd.grad(output, list(own.values()), of_output.to(output.dtype))
    return all(_close(g, of_parameters[name]) for g, name in zip(found, layer.names.values(), strict=True))


def _close(actual: Tensor, expected: Tensor | None) -> bool:
    # NaN is close to anything here: outputs that are not finite are refused by name, later
    return expected is not None and not float((actual - expected).norm()) > 0.01 * float(expected.norm())
