"""`Shards`: which rows of every parameter each process holds, as DTensor's ``Shard(0)`` has it.

Of a parameter with n rows, W processes hold ⌈n/W⌉ each, the last ones fewer or none; a parameter that is one number is
a row of one. A vector in parameter space is held in these parts, whether the model itself is whole on every process or
sharded by ``fully_shard``, which parts parameters in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from whence.distributed.ranks import Ranks

__all__ = ["Shards"]

#: Bytes of small tensors that are sent in one message.
_TOGETHER = 32 * 2**20


class Shards:
    """How vectors of one space are parted.

    Args:
        ranks: the processes.
        shapes: of whole parameters, by name.
    """

    def __init__(self, ranks: Ranks, shapes: Mapping[str, torch.Size]) -> None:
        self.ranks, self.shapes = ranks, dict(shapes)

    def same_as(self, other: Shards | None) -> bool:
        """Whether vectors of both can be added."""
        return other is self or (
            other is not None and other.shapes == self.shapes and other.ranks.size == self.ranks.size
        )

    def rows(self, name: str, rank: int | None = None) -> slice:
        """The rows of a parameter that a process holds: this one, by default."""
        shape, rank = self.shapes[name], self.ranks.rank if rank is None else rank
        count, most = (shape[0] if len(shape) else 1), self._most(name)
        return slice(min(rank * most, count), min((rank + 1) * most, count))

    def shape(self, name: str) -> torch.Size:
        """Of what this process holds of a parameter."""
        rows = self.rows(name)
        return torch.Size((rows.stop - rows.start, *self.shapes[name][1:]))

    def part(self, name: str, whole: Tensor) -> Tensor:
        """What this process holds of a whole tensor; a view. The tensor may have dimensions before the parameter's."""
        lead = whole.ndim - len(self.shapes[name])
        rows, whole = self.rows(name), whole if len(self.shapes[name]) else whole.unsqueeze(-1)
        return whole.narrow(lead, rows.start, rows.stop - rows.start)

    def gathered(self, parts: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors, on every process, a few megabytes at a time."""
        for names in self._together(parts, {name: self._lead(name, part) for name, part in parts.items()}):
            flat = torch.cat([self._padded(name, parts[name]).reshape(-1) for name in names])
            every, start = self.ranks.gathered(flat), 0
            for name in names:
                lead, tail = self._lead(name, parts[name]), self.shapes[name][1:]
                size = math.prod(lead) * self._most(name) * math.prod(tail)
                found = every[:, start : start + size].reshape(-1, *lead, self._most(name), *tail)
                start += size
                found = found.movedim(0, len(lead)).flatten(len(lead), len(lead) + 1)
                rows = self.shapes[name][0] if len(self.shapes[name]) else 1
                found = found.narrow(len(lead), 0, rows)
                yield name, found.reshape((*lead, *self.shapes[name]))

    def summed(self, wholes: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """This process's parts of the sums over all processes; tensors may be overwritten."""
        leads = {name: whole.shape[: whole.ndim - len(self.shapes[name])] for name, whole in wholes.items()}
        for names in self._together(wholes, leads):
            if len(names) == 1:
                total = self.ranks.sum(wholes[names[0]])
                yield names[0], self.part(names[0], total).clone()
                continue
            flat = self.ranks.sum(torch.cat([wholes[name].reshape(-1) for name in names]))
            sizes = [wholes[name].numel() for name in names]
            for name, piece in zip(names, flat.split(sizes), strict=True):
                yield name, self.part(name, piece.reshape(wholes[name].shape)).clone()

    def _most(self, name: str) -> int:
        shape = self.shapes[name]
        return -(-(shape[0] if len(shape) else 1) // self.ranks.size)

    def _lead(self, name: str, part: Tensor) -> torch.Size:
        """Dimensions before a parameter's, of what is held of it."""
        return part.shape[: part.ndim - max(len(self.shapes[name]), 1)]

    def _padded(self, name: str, part: Tensor) -> Tensor:
        """As many rows as the process with the most has."""
        lead, most = self._lead(name, part), self._most(name)
        if part.shape[len(lead)] == most:
            return part
        padded = part.new_zeros(*lead, most, *self.shapes[name][1:])
        padded.narrow(len(lead), 0, part.shape[len(lead)]).copy_(part)
        return padded

    def _together(
        self, tensors: Mapping[str, Tensor], leads: Mapping[str, torch.Size]
    ) -> Iterator[list[str]]:
        """Names in their order, in groups of one dtype whose whole tensors go into one message; alike on all."""
        group: list[str] = []
        size = 0
        for name, tensor in tensors.items():
            numbers = math.prod(leads[name]) * math.prod(self.shapes[name])
            more = numbers * tensor.element_size()
            if group and (size + more > _TOGETHER or tensor.dtype != tensors[group[0]].dtype):
                yield group
                group, size = [], 0
            group.append(name)
            size += more
        if group:
            yield group
