"""Fingerprints: telling whether a model, a data set or a query is the one a run was begun with.

A model's covers every number of every tensor, in integer arithmetic, so that it does not depend on threads. A
data set's covers its length and a few hundred examples spread over it: reading all images of a large one only to
recognise it would take longer than many a run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["of_data", "of_model", "of_value"]

_EXAMPLES_READ = 256
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def of_model(model: nn.Module) -> str:
    """Of all parameters and buffers, their names included."""
    digest = hashlib.sha256(type(model).__qualname__.encode())
    for name, tensor in model.state_dict().items():
        if not isinstance(tensor, Tensor):
            continue
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        if tensor.numel() == 0 or tensor.is_complex():
            continue
        flat = tensor.detach().reshape(-1).contiguous()
        bits = flat.view(_INTEGERS[flat.element_size()])
        middle = bits[:: max(1, len(bits) // 997)]
        for total in (bits.sum(dtype=torch.int64), middle.long().cumsum(0).sum()):
            digest.update(str(int(total)).encode())
    return digest.hexdigest()[:16]


def of_data(data: Any) -> str:
    """Of a data set's length and up to 256 of its examples."""
    spread = torch.linspace(0, len(data) - 1, min(_EXAMPLES_READ, len(data))).long().tolist()
    return of_value([len(data), *(data[i] for i in spread)])


def of_value(value: Any) -> str:
    """Of nested containers of tensors, numbers and strings."""
    digest = hashlib.sha256()
    for piece in _pieces(value):
        digest.update(piece)
    return digest.hexdigest()[:16]


def _pieces(value: Any) -> Iterable[bytes]:
    if isinstance(value, Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1)
        yield f"{tuple(value.shape)}{value.dtype}".encode()
        yield flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield str(key).encode()
            yield from _pieces(value[key])
    elif isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        yield f"[{len(value)}".encode()
        for item in value:
            yield from _pieces(item)
    elif hasattr(value, "tobytes"):  # arrays and images
        yield value.tobytes()
    else:
        yield repr(value).encode()
