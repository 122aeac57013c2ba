"""`Slopes`: what a Gauss-Newton product learns about the examples on its way.

A product ``Jᵀ S J v`` computes every example's tangent ``t = J v`` and ``S t``. ``⟨∂ℓ/∂h, t⟩ = ∇ℓ(z)ᵀv`` can be read
off these: the slope of each example's loss along v, which is its score if v is a solution. No forward is run for it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from whence.distributed import Ranks
from whence.model.data import TermSet
from whence.tasks import Batch

__all__ = ["Slopes"]


class Slopes:
    """``∇ℓ(z)ᵀv`` for every example z of a set and every column v of a block, collected batch by batch.

    Args:
        terms: the examples.
        columns: of the block.
    """

    def __init__(self, terms: TermSet, columns: int) -> None:
        self._terms = terms
        self._rows = torch.zeros(columns, int(terms.indices.max()) + 1, dtype=torch.float64)

    def note(self, outputs: Tensor, tangents: Tensor, product: Tensor, batch: Batch, first: int) -> None:
        """Of a batch: t and S t of one column, or ``[k, *outputs]`` of the k columns from the first on."""
        assert batch.indices is not None  # fetched from the set
        if batch.held == 0:
            return
        task = self._terms.task
        counts = task.num_terms(batch).clamp_min(1)
        if tangents.ndim == outputs.ndim:
            tangents, product = tangents.unsqueeze(0), product.unsqueeze(0)
        found = task.derivatives_beside(outputs.detach(), tangents, product, batch)
        found = found.reshape(len(tangents), batch.size, -1).sum(2) / counts
        self._rows[first : first + len(found), batch.indices.cpu()] = found.cpu()

    def values(self, ranks: Ranks) -> Tensor:
        """``[columns, examples]`` in float64, in the set's order, of what all processes have noted."""
        return ranks.sum(self._rows)[:, self._terms.indices]
