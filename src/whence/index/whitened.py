"""`Whitened`: gradients in the coordinates in which a score is an inner product, rotated.

With EK-FAC's ``P = Q(sE + λ)Qᵀ`` in place of H + λ, a score is ``⟨x_q, x_z⟩`` of ``x = (sE + λ)^(-1/2) Qᵀ∇``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from whence.index.signs import Rotation
from whence.model.gauss_newton import GaussNewton
from whence.model.layers import Passed
from whence.preconditioners.ekfac import Ekfac
from whence.preconditioners.turned import Turned
from whence.scoring.derivatives import loss_slopes
from whence.vectors import ParamVector

__all__ = ["Whitened"]


class Whitened:
    """Rotated whitened gradients, of training examples and of queries.

    Args:
        gnh: model, task and data.
        factors: P, with its λ and s.
        places: of the rotation.
        generator: draws it.
    """

    def __init__(self, gnh: GaussNewton, factors: Ekfac, places: int, generator: torch.Generator) -> None:
        self.gnh, self.factors = gnh, factors
        self._turned = Turned(gnh)
        self._weights = [
            (factors.scale * block.eigenvalues + factors.damping).rsqrt_() for block in factors.blocks
        ]
        self._rotation = Rotation([weight.numel() for weight in self._weights], places, generator)
        self._dtype = max((weight.dtype for weight in self._weights), key=lambda dtype: dtype.itemsize)
        # what has no examples' gradients is told for a batch of one
        self._at_once = 1 if gnh.example_gradients().missing else gnh.micro_batch

    def of_examples(self, positions: Tensor) -> Tensor:
        """``[n, k]``, one backward pass for every batch of examples."""
        gnh, found = self.gnh, []
        order = gnh.terms.by_length(positions)
        for columns in order.split(self._at_once):
            batch = gnh.terms.fetch(positions[columns])
            for passed in gnh.example_gradients().passes(batch, loss_slopes(gnh, batch), others=True):
                found.append(self._rotated(passed, len(columns)))
        rows = torch.cat(found)
        return torch.empty_like(rows).index_copy_(0, order.to(rows.device), rows)

    def _rotated(self, passed: Passed, examples: int) -> Tensor:
        total = self._rotation.blank(examples, self._dtype, self.gnh.network.device)
        for number, block in enumerate(self.factors.blocks):
            matrix, weight, first = block.matrix, self._weights[number], 0
            for few in passed.of_few(matrix.names, weight.numel()):
                turned = self._turned.of(matrix, block.left, block.right, few)
                if turned is not None:
                    rows = turned.mul_(weight.to(turned)).flatten(1).to(total.dtype)
                    self._rotation.add(total[first : first + len(rows)], number, rows)
                    first += len(rows)
        return self._rotation.finish(total)

    def of_gradients(self, gradients: ParamVector) -> Tensor:
        """``[q, k]``, of a block of gradients."""
        parts = []
        for weight, block in zip(self._weights, self.factors.blocks, strict=True):
            packed = block.matrix.pack(gradients.whole_of(block.matrix.names), (gradients.columns or 1,))
            turned = packed if block.left is None else block.left.T.to(packed) @ packed
            turned = turned if block.right is None else turned @ block.right.to(packed)
            parts.append((turned * weight).flatten(1).to(self._dtype))
        return self._rotation(parts)
