"""A device that is not the CPU, on machines that have no other.

Its tensors are ordinary ones whose storage is marked. As on a GPU, no operation takes them together with a CPU tensor
(but for single numbers and indices), what is made on a device is made there only if that is said, and a generator draws
on its own device. Reading a number of a marked tensor makes the host wait: that is counted.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

__all__ = ["DEVICE", "StrayTensorError", "on_device", "to_device"]

#: Of a kind that is not there, so nothing can really be sent to it.
DEVICE = torch.device("xpu", 0)
CPU = torch.device("cpu")
_aten = torch.ops.aten
_READS = ("item", "tolist", "__bool__", "__float__", "__int__", "__index__", "numpy")
_MIXING = {
    _aten.copy_.default, _aten.index.Tensor, _aten.index_put_.default, _aten.index_put.default,
    _aten._index_put_impl_.default,
}  # fmt: skip


class StrayTensorError(AssertionError):
    """What on a GPU would be an error about tensors on two devices."""


class _Marks:
    """Which storages and generators belong to the device."""

    def __init__(self) -> None:
        self._storages: dict[int, Any] = {}
        self.generators: dict[int, Any] = {}

    def _key(self, tensor: Tensor) -> Any:
        while is_functorch_wrapped_tensor(tensor):
            tensor = get_unwrapped(tensor)
        return tensor.untyped_storage()

    def add(self, tensor: Tensor) -> None:
        storage = self._key(tensor)
        key = storage._cdata
        if key not in self._storages:
            self._storages[key] = weakref.ref(storage, lambda _, key=key: self._storages.pop(key, None))

    def __contains__(self, tensor: Tensor) -> bool:
        return self._key(tensor)._cdata in self._storages


_marks = _Marks()
#: What autograd made out of nothing in its formulas, wherever it was needed.
_neutral = _Marks()


def is_there(tensor: Tensor) -> bool:
    """Whether a tensor is on the device."""
    return tensor in _marks


class _Generator(torch.Generator):
    def __new__(cls, device: Any = "cpu") -> Any:
        there = torch.device(device).type == DEVICE.type
        made = super().__new__(cls, "cpu" if there else device)
        if there:
            _marks.generators[made._cdata] = made  # kept, so that no other one gets its place
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return DEVICE if self._cdata in _marks.generators else CPU


class _Devices(TorchFunctionMode):
    """What programs say of devices: tensors tell where they are, and go where they are told to."""

    def __init__(self, waits: list[str]) -> None:
        super().__init__()
        self._waits = waits

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if func == Tensor.device.__get__:  # type: ignore[attr-defined]
            return DEVICE if args[0] in _marks else func(*args)
        tensor = args[0] if args and isinstance(args[0], Tensor) else None
        if name in _READS and tensor is not None and tensor in _marks:
            self._waits.append(name)
        if name == "cpu" and tensor is not None:
            return self._moved(tensor, CPU)
        if name == "to" and tensor is not None:
            return self._to(func, tensor, args[1:], kwargs)
        generator = kwargs.get("generator")
        device = kwargs.get("device")
        if generator is not None and (device is not None or tensor is None):
            there = device is not None and torch.device(device).type == DEVICE.type
            if there != (generator._cdata in _marks.generators):
                raise StrayTensorError(f"{name} draws on {device} by a generator on {generator.device}")
        with _asked(not any(isinstance(leaf, Tensor) for leaf in tree_leaves((args, kwargs)))):
            made = func(*args, **kwargs) if device is None else func(*args, **{**kwargs, "device": CPU})
        if device is None:
            return made
        if torch.device(device).type == DEVICE.type:
            made = made.clone() if made is tensor else made
            _marks.add(made)
        elif tensor is not None and tensor in _marks:
            raise StrayTensorError(f"{name} copies a tensor of the device to the CPU in passing")
        return made

    def _to(self, func: Any, tensor: Tensor, args: Any, kwargs: dict[str, Any]) -> Tensor:
        device = kwargs.pop("device", None)
        rest = []
        for arg in args:
            if isinstance(arg, Tensor):
                device, arg = (DEVICE if arg in _marks else CPU), arg.dtype
            if isinstance(arg, (torch.device, str)) and device is None:
                device = torch.device(arg)
            elif arg is not None:
                rest.append(arg)
        result: Tensor = func(tensor, *rest, **kwargs) if rest or kwargs else tensor
        return result if device is None else self._moved(result, torch.device(device))

    def _moved(self, tensor: Tensor, device: torch.device) -> Tensor:
        there = tensor in _marks
        if there == (device.type == DEVICE.type):
            return tensor
        if there:
            self._waits.append("cpu")
            with _unmarked():
                return tensor.clone()
        moved = tensor.clone()
        _marks.add(moved)
        return moved


class _Operations(TorchDispatchMode):
    """What operations do: results are where the operands are, which must be in one place."""

    enabled, asked = True, False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs or {})) if isinstance(leaf, Tensor)]
        there = [tensor in _marks for tensor in tensors]
        if any(there) and func not in _MIXING:
            for tensor, marked in zip(tensors, there, strict=True):
                if not marked and tensor.ndim and tensor not in _neutral:
                    raise StrayTensorError(
                        f"{func} takes a tensor of the device and a CPU tensor of shape {tuple(tensor.shape)}"
                    )
        result = func(*args, **(kwargs or {}))
        if not _Operations.asked and not any(there) and all(tensor in _neutral for tensor in tensors):
            tree_map(lambda t: _neutral.add(t) if isinstance(t, Tensor) else None, result)
        first = bool(there) and there[0]
        if _Operations.enabled and (first if func in _MIXING else any(there)):
            tree_map(lambda t: _marks.add(t) if isinstance(t, Tensor) else None, result)
        return result


@contextmanager
def _asked(out_of_nothing: bool) -> Iterator[None]:
    """What is made out of nothing in here a program asked for, not a formula of autograd."""
    before, _Operations.asked = _Operations.asked, out_of_nothing
    try:
        yield
    finally:
        _Operations.asked = before


@contextmanager
def _unmarked() -> Iterator[None]:
    _Operations.enabled = False
    try:
        yield
    finally:
        _Operations.enabled = True


@contextmanager
def on_device() -> Iterator[list[str]]:
    """While active, the device exists. Gives the list of the times that the host waited for it."""
    waits: list[str] = []
    own, torch.Generator = torch.Generator, _Generator  # type: ignore[misc]
    try:
        with _Operations(), _Devices(waits):
            yield waits
    finally:
        torch.Generator = own  # type: ignore[misc]


def to_device(model: nn.Module) -> nn.Module:
    """The model, with its parameters and buffers on the device."""
    for tensor in (*model.parameters(), *model.buffers()):
        _marks.add(tensor)
    return model
