"""Fingerprints: telling whether a model, a data set or a query is the one a run was begun with.

They cover everything: every byte of every tensor of a model, and every example of a data set. Reading the data once
more is little beside a run, which goes over them for every product.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from whence.model.fully_sharded import own_type
from whence.model.quantised import parts
from whence.progress import ticker

__all__ = ["of_data", "of_model", "of_value", "without_addresses"]

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def of_model(model: nn.Module) -> str:
    """Of all parameters and buffers, their names included, also those that are not saved with the model."""
    digest = hashlib.blake2b(own_type(model).__qualname__.encode())
    for name, tensor in {**dict(model.named_buffers()), **model.state_dict()}.items():
        digest.update(name.encode())
        for part in parts(_whole(tensor)):
            for piece in _pieces(part):
                digest.update(piece)
    return digest.hexdigest()[:16]


def of_data(data: Any) -> str:
    """Of all examples of a data set, in their order."""
    if isinstance(data, TensorDataset):
        return of_value([len(data), data.tensors])
    digest, count = hashlib.blake2b(), len(data)
    digest.update(f"examples{count}".encode())
    with ticker("reading the data, to recognise them", count) as tick:
        for index in range(count):
            for piece in _pieces(data[index]):
                digest.update(piece)
            tick()
    return digest.hexdigest()[:16]


def of_value(value: Any) -> str:
    """Of nested containers and dataclasses of tensors, arrays, numbers and strings."""
    digest = hashlib.blake2b()
    for piece in _pieces(value):
        digest.update(piece)
    return digest.hexdigest()[:16]


def without_addresses(text: str) -> str:
    """What an object says of itself, but where it is in memory."""
    return _ADDRESS.sub("", text)


def _whole(tensor: Any) -> Tensor:
    """With what other processes hold of it, where it is sharded."""
    found: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found


def _pieces(value: Any) -> Iterable[bytes | memoryview]:
    """The value's bytes; every container and array says first what it is and how large."""
    if isinstance(value, Tensor):
        value = _whole(value)
        flat = value.detach().cpu().contiguous().reshape(-1)
        if flat.numel() == 1:  # counts as contiguous whatever its stride
            flat = flat.clone(memory_format=torch.contiguous_format)
        yield f"tensor{tuple(value.shape)}{value.dtype}".encode()
        if flat.numel():
            yield memoryview(flat.view(torch.uint8).numpy())
    elif isinstance(value, Mapping):
        yield f"mapping{len(value)}".encode()
        for key in sorted(value, key=str):
            yield from _pieces(str(key))
            yield from _pieces(value[key])
    elif isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        yield f"sequence{len(value)}".encode()
        for item in value:
            yield from _pieces(item)
    elif hasattr(value, "tobytes"):  # arrays and images
        yield f"array{getattr(value, 'shape', getattr(value, 'size', ''))}{getattr(value, 'dtype', '')}".encode()
        yield value.tobytes()
    elif is_dataclass(value) and not isinstance(value, type):
        yield f"{type(value).__name__}{len(fields(value))}".encode()
        for field in fields(value):
            yield from _pieces(field.name)
            yield from _pieces(getattr(value, field.name))
    else:
        text = without_addresses(repr(value)).encode()
        yield f"{type(value).__name__}{len(text)}".encode()
        yield text
