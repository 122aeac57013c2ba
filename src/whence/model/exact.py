"""Exact Jacobian products by dual numbers.

One forward pass on dual numbers ``θ + εu`` gives the outputs ``h`` and their tangent ``t = J u`` together, and
leaves behind the graph that the backward pass ``Jᵀ S t`` needs: one forward serves both directions.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.module import register_module_forward_hook

from whence.model.fully_sharded import ShardedNetwork
from whence.model.grouped import PlainGroups
from whence.model.network import Network
from whence.tasks import Batch
from whence.vectors import ParamVector

__all__ = ["block_tangents", "dual_forward", "tangent_only"]


def dual_forward(
    network: Network, batch: Batch, vector: Mapping[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """Outputs with their graph, the leaves of that graph, and the tangent ``J u``.

    Of a sharded model, whose parameters are gathered in a pass of their own kind, by two passes.
    """
    if isinstance(network, ShardedNetwork):
        tangent, leaves = tangent_only(network, batch, vector)[1], network.leaves()
        return network.outputs(batch, leaves), leaves, tangent
    with _dual_numbers(network, cut_tangent_graph=True):
        # The dual tensors are the leaves themselves: were they made from leaves, every layer's gradient would
        # wait for the end of the backward pass before it could be handed over.
        leaves = {name: dual.requires_grad_() for name, dual in _duals(network, vector).items()}
        outputs, tangent = forward_ad.unpack_dual(network.outputs(batch, leaves))
    return outputs, leaves, _or_zeros(tangent, outputs)


def tangent_only(network: Network, batch: Batch, vector: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Outputs and tangent ``J u`` without any graph: what a quadratic form needs."""
    with torch.no_grad(), _dual_numbers(network, cut_tangent_graph=False):
        outputs, tangent = forward_ad.unpack_dual(
            network.dual_outputs(batch, vector)
            if isinstance(network, ShardedNetwork)
            else network.outputs(batch, _duals(network, vector))
        )
    return outputs, _or_zeros(tangent, outputs)


def block_tangents(network: Network, batch: Batch, block: ParamVector) -> Tensor:
    """``J u`` for every column, ``[k, *outputs]``, the columns vectorised over one pass."""
    plain = network.values()
    tangents = {name: network.scaled(name, block[name]).to(plain[name].dtype) for name in plain}

    def one(direction: dict[str, Tensor]) -> Tensor:
        tangent = torch.func.jvp(lambda theta: network.outputs(batch, theta), (plain,), (direction,))[1]
        assert isinstance(tangent, Tensor)
        return tangent

    with torch.no_grad(), _forward_mode_friendly(network):
        result = torch.func.vmap(one)(tangents)
    assert isinstance(result, Tensor)
    return result


def _duals(network: Network, vector: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: forward_ad.make_dual(value, network.scaled(name, vector[name]).to(value.dtype))
        for name, value in network.values().items()
    }


def _or_zeros(tangent: Tensor | None, outputs: Tensor) -> Tensor:
    return torch.zeros_like(outputs) if tangent is None else tangent.detach()


@contextmanager
def _dual_numbers(network: Network, *, cut_tangent_graph: bool) -> Iterator[None]:
    # Autograd would also record how tangents are computed, which nobody differentiates: twice the memory,
    # and time to fault it in. Detaching tangents after every module keeps only the primal graph.
    hook = register_module_forward_hook(_detach_tangent) if cut_tangent_graph else nullcontext()
    with forward_ad.dual_level(), _forward_mode_friendly(network), hook:
        yield


@contextmanager
def _forward_mode_friendly(network: Network) -> Iterator[None]:
    # Fused kernels of attention and of experts have no forward-mode derivative; plain implementations have.
    fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    experts = PlainGroups() if network.may_group else nullcontext()
    padding = register_module_forward_hook(_hold_padding)
    with sdpa_kernel(SDPBackend.MATH), experts, padding, warnings.catch_warnings():
        # vmap over an operation without a batching rule loops over it: slower, not wrong.
        warnings.filterwarnings("ignore", message="There is a performance drop")
        # torch warns of a deprecation inside itself when it first loads its forward-mode rules.
        warnings.filterwarnings("ignore", message=r"`torch\.jit\.script", category=DeprecationWarning)
        try:
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fast_path)


def _detach_tangent(module: nn.Module, inputs: Any, output: Any) -> Any:
    if not isinstance(output, Tensor):
        return None
    primal, tangent = forward_ad.unpack_dual(output)
    return None if tangent is None else forward_ad.make_dual(primal, tangent.detach())


def _hold_padding(module: nn.Module, inputs: Any, output: Any) -> Any:
    """An embedding's padding row gets no gradient in the backward pass; give it no tangent in the forward."""
    if not isinstance(module, nn.Embedding) or module.padding_idx is None:
        return None
    return torch.where((inputs[0] == module.padding_idx).unsqueeze(-1), output.detach(), output)
