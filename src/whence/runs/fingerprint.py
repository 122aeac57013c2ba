"""Fingerprints: telling whether a model, a data set or a query is the one a run was begun with.

A model's covers every byte of every tensor. A data set's covers its length and a few hundred examples spread over it:
reading all images of a large one only to recognise it would take longer than many a run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["of_data", "of_model", "of_value"]

_EXAMPLES_READ = 256


def of_model(model: nn.Module) -> str:
    """Of all parameters and buffers, their names included."""
    digest = hashlib.blake2b(type(model).__qualname__.encode())
    for name, tensor in model.state_dict().items():
        digest.update(name.encode())
        for piece in _pieces(tensor):
            digest.update(piece)
    return digest.hexdigest()[:16]


def of_data(data: Any) -> str:
    """Of a data set's length and up to 256 of its examples."""
    spread = torch.linspace(0, len(data) - 1, min(_EXAMPLES_READ, len(data)), dtype=torch.float64)
    return of_value([len(data), *(data[i] for i in spread.long().tolist())])


def of_value(value: Any) -> str:
    """Of nested containers of tensors, arrays, numbers and strings."""
    digest = hashlib.blake2b()
    for piece in _pieces(value):
        digest.update(piece)
    return digest.hexdigest()[:16]


def _pieces(value: Any) -> Iterable[bytes | memoryview]:
    """The value's bytes; every container and array says first what it is and how large."""
    if isinstance(value, Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1)
        yield f"tensor{tuple(value.shape)}{value.dtype}".encode()
        if flat.numel():
            yield memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]
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
    else:
        text = repr(value).encode()
        yield f"{type(value).__name__}{len(text)}".encode()
        yield text
