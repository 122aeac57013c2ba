"""`Sums`: sums over examples, of which several processes have shares; each sum is one tensor.

Where every process holds the model whole, it adds up what its own examples give, and processes are summed at the end.
Of a sharded model such sums would be as large as the whole of it: when a few megabytes have come together they are
summed over processes, as gradients are, and each process keeps its rows.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from whence.distributed import Ranks, Shards
from whence.model.network import Network
from whence.vectors import ParamVector

__all__ = ["TOGETHER", "Sums", "of_one", "shards_of"]

#: Bytes of whole tensors, of those that are parted, that a process has at once.
TOGETHER = 32 * 2**20


def of_one(tensor: Tensor) -> ParamVector:
    """A tensor that is whole on every process, as a vector without names."""
    return ParamVector({"": tensor})


def shards_of(tensor: ParamVector, ranks: Ranks) -> Shards | None:
    """How such a vector is parted over processes; None for one alone."""
    return None if ranks.size == 1 else Shards(ranks, {"": tensor.shape_of("")})


class Sums:
    """Sums by key.

    Args:
        network: whose processes add to them, and whose micro-batches are passed by all of them where it is sharded.
        together: whether every process adds what all examples of a micro-batch give, and not its share alone.
    """

    def __init__(self, network: Network, *, together: bool) -> None:
        self._ranks, self._parted, self._together = network.ranks, network.together, together
        #: What this process has added; and its rows of what was summed over all.
        self._added: dict[Hashable, Tensor] = {}
        self._found: dict[Hashable, ParamVector] = {}

    def add(self, key: Hashable, tensor: Tensor) -> None:
        """Of a micro-batch; may overwrite the tensor."""
        if key in self._added:
            self._added[key].add_(tensor)
        else:
            self._added[key] = tensor
            self._keep_few()

    def add_squares(self, key: Hashable, rows: Tensor) -> None:
        """``Σ x xᵀ`` over rows x."""
        if key in self._added:
            self._added[key].addmm_(rows.T, rows)
        else:
            self.add(key, rows.T @ rows)

    def pop(self, key: Hashable, zeros: Tensor) -> ParamVector | None:
        """The sum over all processes, parted where the network is; None where none has added to it.

        Args:
            key: of the sum.
            zeros: of its form.
        """
        if self._parted:
            self._part()
            return self._found.pop(key, None)
        added = self._added.pop(key, None)
        if not float(self._ranks.largest(torch.tensor(float(added is not None)))):
            return None
        # others' shares alone may have had something to add
        return self._summed(zeros if added is None else added)

    def _keep_few(self) -> None:
        if self._parted and sum(t.numel() * t.element_size() for t in self._added.values()) > TOGETHER:
            self._part()

    def _part(self) -> None:
        """Sum what was added over processes; all of them come here, as each adds the same sums in the same order."""
        while self._added:
            key = next(iter(self._added))
            more = self._summed(self._added.pop(key))
            more = more.parted(self.shards(more))
            if key in self._found:
                self._found[key].axpy_(1.0, more)
            else:
                self._found[key] = more

    def shards(self, tensor: ParamVector) -> Shards | None:
        """How sums of such a form are held."""
        return shards_of(tensor, self._ranks) if self._parted else None

    def _summed(self, tensor: Tensor) -> ParamVector:
        return of_one(tensor if self._together else self._ranks.sum(tensor))
