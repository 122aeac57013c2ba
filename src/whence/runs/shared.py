"""Values of a run directory, read by the first process and known to all.

A tensor is sent when it is asked for, and a vector's part kept of it: a whole vector is in no process's memory for
longer than that, but the first one's, which has read it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from whence.distributed import Ranks, Shards
from whence.runs.codec import decode

__all__ = ["shared_value"]

T = TypeVar("T")


def shared_value(
    ranks: Ranks,
    cls: type[T],
    read: Callable[[], tuple[Any, Mapping[str, Tensor]]],
    *,
    device: torch.device | str,
    shards: Shards | None,
) -> T:
    """The value that ``read`` finds a tree and tensors of, where it is called, on the first process.

    Raises:
        RunDirectoryError: on all of them.
    """
    found: dict[str, Tensor] = {}

    def forms() -> tuple[Any, dict[str, tuple[torch.dtype, torch.Size]]]:
        tree, tensors = read()
        found.update(tensors)
        return tree, {key: (tensor.dtype, tensor.shape) for key, tensor in found.items()}

    tree, described = ranks.told(forms)
    return decode(cls, tree, _Sent(ranks, found, described), device=device, shards=shards)


class _Sent(Mapping[str, Tensor]):
    """Tensors that the first process has; all ask for them in one order."""

    def __init__(
        self, ranks: Ranks, found: Mapping[str, Tensor], forms: Mapping[str, tuple[torch.dtype, torch.Size]]
    ) -> None:
        self._ranks, self._found, self._forms = ranks, found, forms

    def __getitem__(self, key: str) -> Tensor:
        dtype, shape = self._forms[key]
        tensor = self._found[key] if self._ranks.rank == 0 else torch.empty(shape, dtype=dtype)
        return self._ranks.same(tensor)

    def __iter__(self) -> Iterator[str]:
        return iter(self._forms)

    def __len__(self) -> int:
        return len(self._forms)
