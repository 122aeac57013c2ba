"""`Sums`: sums over examples, of which several processes have shares; each sum is one tensor.

Where every process holds the model whole, it adds up what its own examples give, and processes are summed at the end. Of
a sharded model such sums would be as large as the whole of it: they are summed over processes after every micro-batch,
as gradients are, and each process keeps its rows.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from whence.distributed import Ranks, Shards
from whence.model.network import Network
from whence.vectors import ParamVector

__all__ = ["Sums", "of_one", "shards_of"]


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
        self._found: dict[Hashable, ParamVector] = {}

    def add(self, key: Hashable, tensor: Tensor) -> None:
        """Of a micro-batch; may overwrite the tensor."""
        more = of_one(tensor)
        if self._parted:
            more = self._summed(more).parted(self.shards(more))
        if key in self._found:
            self._found[key].axpy_(1.0, more)
        else:
            self._found[key] = more

    def add_squares(self, key: Hashable, rows: Tensor) -> None:
        """``Σ x xᵀ`` over rows x."""
        if self._parted or key not in self._found:
            self.add(key, rows.T @ rows)
        else:
            self._found[key][""].addmm_(rows.T, rows)

    def pop(self, key: Hashable, zeros: Tensor) -> ParamVector | None:
        """The sum over all processes, parted where the network is; None where none has added to it.

        Args:
            key: of the sum.
            zeros: of its form.
        """
        found = self._found.pop(key, None)
        if not float(self._ranks.largest(torch.tensor(float(found is not None)))):
            return None
        if found is None:  # others' shares alone had something to add
            found = of_one(zeros)
        return found if self._parted else self._summed(found)

    def shards(self, tensor: ParamVector) -> Shards | None:
        """How sums of such a form are held."""
        return shards_of(tensor, self._ranks) if self._parted else None

    def _summed(self, tensor: ParamVector) -> ParamVector:
        return tensor if self._together else of_one(self._ranks.sum(tensor[""]))
