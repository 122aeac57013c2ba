"""Looking at a model before the long work: is it in evaluation mode, is it a function, what does it cost?"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from whence.errors import ModelError
from whence.model.data import TermSet
from whence.model.network import Network, backward_explained
from whence.model.quantised import parts, refusing_cuts
from whence.tasks import Batch

__all__ = [
    "check_alike",
    "check_convexity",
    "check_determinism",
    "check_finite",
    "check_independence",
    "check_mode",
    "check_outputs",
    "fitting_micro_batch",
]

#: What a tensor may take of a CPU's cache.
_CACHE = 3 * 2**20
_LARGEST_MICRO_BATCH = 1024
#: Directions in which the curvature of a loss is looked at, for every example.
_DIRECTIONS = 4
#: Examples that are run together and alone, and by how much of their size outputs may then differ: kernels round
#: otherwise for other batches.
_TOGETHER, _ALIKE = 4, 1e-3


def check_alike(network: Network, terms: TermSet) -> None:
    """Refuse processes that have other weights or other data than each other, as far as sums tell."""
    if network.ranks.size == 1:
        return
    shapes = [(name, tuple(p.shape), str(p.dtype)) for name, p in network.parameters.items()]
    network.ranks.agree("the parameters", shapes)
    network.ranks.agree("the number of examples and terms", (len(terms), terms.num_terms))
    if not network.together:
        sums = [
            float(tensor.detach().double().sum())
            for tensor in (*network.model.parameters(), *network.model.buffers())
        ]
        network.ranks.agree("the model's weights", sums)


def check_mode(model: nn.Module) -> None:
    """Refuse a model, or a layer of it, in training mode, scripted or compiled."""
    if not isinstance(model, nn.Module):
        several = isinstance(model, (list, tuple, dict))
        alone = (
            "; several checkpoints can be given to attribute, all else is about one model" if several else ""
        )
        raise ModelError(f"the model must be a torch.nn.Module, got a {type(model).__name__}{alone}")
    if model.training:
        raise ModelError(
            "the model is in training mode, where its outputs may be random. Call model.eval() first"
        )
    for name, module in model.named_modules():
        _check_plain(name, module)
        if module.training and isinstance(module, (_DropoutNd, _BatchNorm)):
            raise ModelError(
                f"the layer {name!r} ({type(module).__name__}) is in training mode although the model is not. "
                "Call model.eval() on the whole model"
            )
        if isinstance(module, _BatchNorm) and module.running_mean is None:
            raise ModelError(
                f"the layer {name!r} ({type(module).__name__}) has no running statistics, so outputs depend on the "
                "rest of the batch. Give it those of the training (track_running_stats=True)"
            )
    if any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")):
        raise ModelError(
            "torch.autocast is on, so passes would be in fewer bits than a solve needs. Leave it (with "
            "torch.autocast(..., enabled=False)); a model whose own parameters are bfloat16 is computed in float32"
        )
    devices = sorted({str(parameter.device) for parameter in model.parameters()})
    if hasattr(model, "hf_device_map") and len(devices) > 1:
        raise ModelError(
            f"device_map has put the model's parameters on several devices ({', '.join(devices)}), some of them "
            "perhaps on the disk, from where they are fetched for a pass; that is not supported. Load it on one "
            "device, or shard it over several processes (docs/many-gpus.md)"
        )
    if "meta" in devices:
        raise ModelError(
            "the model's parameters are on the meta device, without numbers (or device_map keeps them elsewhere); load "
            "its weights first, on one device"
        )


def _check_plain(name: str, module: nn.Module) -> None:
    """Refuse code that reads its parameters in a way of its own: derivatives rest on swapping them."""
    where = f"the layer {name!r}" if name else "the model"
    if isinstance(module, torch.jit.ScriptModule):
        raise ModelError(
            f"{where} is TorchScript, which does not see that its parameters are replaced: products would be zero. "
            "Give the Python module that it was made from"
        )
    if type(module).__name__ == "OptimizedModule":
        raise ModelError(
            f"{where} was compiled by torch.compile, whose code has no forward-mode derivatives and does not see small "
            "changes of its parameters. Give the module that it was made from (model._orig_mod)"
        )
    if getattr(module, "_compiled_call_impl", None) is not None:
        raise ModelError(
            f"{where} was compiled in place by its compile() method, whose code does not see small changes of its "
            "parameters. Load the model again, and do not compile it"
        )


def check_outputs(network: Network, batch: Batch) -> int:
    """Run the model on a batch, refuse what its task cannot use, and return the number of outputs per term."""
    with refusing_cuts(network.model) as watched:
        outputs = network.outputs(batch, network.leaves())
        if watched and network.low_precision:  # which are computed otherwise in float32
            leaves = {n: p.detach().requires_grad_() for n, p in network.parameters.items()}
            network.as_it_is(batch, leaves)
    if not outputs.is_floating_point():
        raise ModelError(
            f"the model's outputs are {outputs.dtype}; they must be real numbers, such as logits"
        )
    if not outputs.requires_grad:
        raise ModelError(
            "the model's outputs carry no gradient of the selected parameters: the parameters are not used, or "
            "forward runs under torch.no_grad(). Select others, or remove no_grad"
        )
    _check_swapped(network, outputs)
    outputs = outputs.detach()
    network.task.check(outputs, batch)
    check_finite(outputs)
    with torch.no_grad():
        network.task.check_model(network.outputs, outputs, batch)
    if not bool(torch.isfinite(network.task.losses(outputs, batch)).all()):
        raise ModelError(
            "the loss is NaN or infinite on the first examples: the model's weights or the data are broken. "
            "Evaluate the model on its training data first"
        )
    return int(outputs.shape[-1]) if outputs.ndim > 1 else 1


def _check_swapped(network: Network, outputs: Tensor) -> None:
    """Refuse a model that reached its own parameters where others were put in their place."""
    own = {name: p for name, p in network.parameters.items() if p.requires_grad}
    if not own or network.together:  # a copy that nobody trains
        return
    with backward_explained():
        reached = torch.autograd.grad(outputs.sum(), list(own.values()), allow_unused=True, retain_graph=True)
    missed = [name for name, found in zip(own, reached, strict=True) if found is not None]
    if missed:
        raise ModelError(
            f"the model reads {missed[0]!r} from a copy of its own, kept outside of its modules (a list, a closure, "
            "scripted code), so its derivatives cannot be taken. Read parameters through their modules in forward"
        )


def check_finite(outputs: Tensor) -> None:
    """Refuse outputs with NaN or infinity; one sum tells in all but overflowing cases."""
    if not math.isfinite(float(outputs.detach().sum())) and not bool(torch.isfinite(outputs).all()):
        raise ModelError(
            "the model's outputs hold NaN or infinity on a batch of the data. Check the weights and the inputs; "
            "a half-precision model may have overflowed"
        )


def check_convexity(network: Network, batches: Iterable[Batch]) -> None:
    """Refuse a loss with a negative second derivative on any of these examples, or with none on all of them."""
    found, random = [], torch.Generator(network.device).manual_seed(0)
    for batch in batches:
        with torch.no_grad():
            outputs = network.outputs(batch)
        shape = (_DIRECTIONS, *outputs.shape)
        tangents = torch.randn(shape, generator=random, device=outputs.device, dtype=outputs.dtype)
        product = network.task.hessian_product(outputs, tangents, batch)
        found.append((tangents * product).reshape(_DIRECTIONS, batch.size, -1).sum(2).flatten().double())
    values = torch.cat(found)
    if not bool(values.any()):
        raise ModelError(
            f"the loss has no curvature: its second derivatives in the outputs are zero on all of "
            f"{len(values) // _DIRECTIONS} examples, and so is the Gauss-Newton Hessian. Use a loss that is curved: "
            "the square, or the logarithm of the hyperbolic cosine, in place of the absolute value"
        )
    if float(values.min()) < -1e-4 * float(values.abs().max()):
        raise ModelError(
            f"the loss is not convex in the outputs: a second derivative along a random direction is "
            f"{float(values.min()):.3g}. The Gauss-Newton Hessian needs a convex loss"
        )


def check_determinism(network: Network, batch: Batch) -> None:
    """Refuse a model that gives two answers to one question, such as one with functional dropout."""
    with torch.no_grad():
        first, second = network.outputs(batch), network.outputs(batch)
    difference = float((first - second).abs().max()) if first.numel() else 0.0
    scale = float(first.abs().max())
    if difference > 1e-4 * max(scale, 1e-30):
        raise ModelError(
            f"the model is not deterministic: two passes over the same batch differ by {difference:.3g}. "
            "Dropout may be active in functional form; switch it off"
        )


def check_independence(network: Network, terms: TermSet) -> None:
    """Refuse a model whose outputs for an example depend on which others it is run with.

    A derivative of an example's loss would then be about its batch. Outputs are compared; of sequences that are padded
    in company, whose outputs are longer there, losses.
    """
    with torch.no_grad():
        positions = terms.spread(_TOGETHER)
        together = terms.fetch(positions)
        joint = network.outputs(together)
        joint_losses = network.task.query_losses(joint, together)
        for position in range(together.size):
            alone = terms.fetch(positions[position : position + 1])
            single = network.outputs(alone)
            if single.shape[1:] == joint.shape[1:]:
                found, expected = single[0], joint[position]
            else:
                found, expected = network.task.query_losses(single, alone)[0], joint_losses[position]
            rounding = 32 * torch.finfo(expected.dtype).eps
            difference, scale = float((found - expected).abs().max()), float(joint.abs().max())
            if difference > max(_ALIKE, rounding) * max(scale, 1e-30):
                raise ModelError(
                    f"the model's outputs for {together.name(position)} differ by {difference:.3g} when it is run "
                    "alone and with others: something depends on the rest of the batch, such as batch statistics. Use "
                    "statistics of the training (BatchNorm's running ones) or a normalisation within the example"
                )


def fitting_micro_batch(network: Network, pilot: Batch, *, memory: int) -> int:
    """Examples per pass: as many as fit in memory; on a CPU, as few as keep tensors in its cache.

    Work on tensors beyond the cache goes at the memory's speed. But every pass also goes through all parameters, so
    tensors may be as large as these together.

    Args:
        network: the model.
        pilot: some of the longest examples.
        memory: bytes that autograd may keep for the backward pass.
    """
    total, largest = _activation_bytes(network, pilot)
    fitting = memory * pilot.size / max(total, 1)
    if network.device.type == "cpu":
        parameters = sum(p.numel() * p.element_size() for p in network.parameters.values())
        fitting = min(fitting, max(_CACHE, parameters) * pilot.size / max(largest, 1))
    return int(min(max(fitting, 1.0), _LARGEST_MICRO_BATCH))


def _storages(tensors: Iterable[Tensor]) -> set[int]:
    whole = (tensor for tensor in tensors if not hasattr(tensor, "to_local"))
    return {part.untyped_storage().data_ptr() for tensor in whole for part in parts(tensor)}


def _activation_bytes(network: Network, batch: Batch) -> tuple[int, int]:
    """Bytes that autograd keeps for the backward pass over this batch, parameters not counted; those of the largest."""
    everything = network.constants() | network.leaves()
    own = _storages((*network.model.parameters(), *everything.values()))
    seen: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        if network.together:  # gathered for this layer
            own.update(_storages(network.model.parameters()))
        for part in parts(tensor):
            storage = part.untyped_storage()
            if storage.data_ptr() not in own:
                seen[storage.data_ptr()] = storage.nbytes()
        return (
            tensor.detach()
        )  # the tensor itself would be in a cycle that is never freed, and the model with it

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        outputs = network.outputs(batch, everything)
    last = outputs.numel() * outputs.element_size()
    return sum(seen.values()) + last, max([last, *seen.values()])
