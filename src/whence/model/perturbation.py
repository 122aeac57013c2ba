"""Running a model at ``θ + δu`` without a second copy of θ, and leaving θ bit for bit as it was.

Adding δu in place and taking it off again does not restore θ (floating point), and keeping the original
beside the perturbed parameters is a second model in memory. Instead each parameter is swapped for its
perturbed value only while the module that uses it runs, so one layer's worth exists at a time.

Which module uses which parameter is *observed* once, not guessed from ownership: attention layers read their
output projection's weight without calling it, tied embeddings are used in two places, and a parameter that
no operation was seen to use (compiled or scripted code) is swapped for the whole pass.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

__all__ = ["ParameterUses", "observe_uses", "perturbed"]

#: Module -> the tensors (by name) that its own forward, not a submodule's, uses.
ParameterUses = Mapping[nn.Module, frozenset[str]]


def observe_uses(model: nn.Module, tensors: Mapping[str, Tensor], run: Callable[[], object]) -> ParameterUses:
    """Run the model once and note the innermost module around every use of every tensor."""
    names = {id(tensor): name for name, tensor in tensors.items()}
    uses: defaultdict[nn.Module, set[str]] = defaultdict(set)
    running: list[nn.Module] = []

    class Observer(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
        ) -> Any:
            for leaf in tree_leaves((args, kwargs or {})):
                if id(leaf) in names:
                    uses[running[-1] if running else model].add(names[id(leaf)])
            return func(*args, **(kwargs or {}))

    with ExitStack() as stack:
        for module in model.modules():
            stack.callback(
                module.register_forward_pre_hook(lambda module, args: running.append(module)).remove
            )
            stack.callback(
                module.register_forward_hook(
                    lambda module, args, output: _ignore(running.pop()), always_call=True
                ).remove
            )
        with Observer():
            run()
    unseen = set(tensors) - set().union(*uses.values())
    if unseen:
        uses[model] |= unseen
    return {module: frozenset(used) for module, used in uses.items()}


@contextmanager
def perturbed(
    tensors: Mapping[str, Tensor], uses: ParameterUses, value: Callable[[nn.Module, str, Tensor], Tensor]
) -> Iterator[None]:
    """While active, each tensor reads as ``value(module, name, tensor)`` inside the modules that use it.

    Only for passes without a graph: an autograd graph built here would refer to the restored values.
    """
    depth: Counter[str] = Counter()
    originals: dict[str, Tensor] = {}

    def enter(module: nn.Module) -> None:
        for name in uses[module]:
            depth[name] += 1
            if depth[name] == 1:
                tensor = tensors[name]
                originals[name] = tensor.data
                tensor.data = value(module, name, tensor.data)

    def leave(module: nn.Module) -> None:
        for name in uses[module]:
            depth[name] -= 1
            if depth[name] == 0:
                tensors[name].data = originals.pop(name)

    with ExitStack() as stack:
        for module in uses:
            stack.callback(module.register_forward_pre_hook(lambda module, args: enter(module)).remove)
            stack.callback(
                module.register_forward_hook(
                    lambda module, args, output: leave(module), always_call=True
                ).remove
            )
        try:
            with torch.no_grad():
                yield
        finally:
            for name, original in originals.items():  # only after an error inside the forward
                tensors[name].data = original


def _ignore(_: object) -> None:
    return None
