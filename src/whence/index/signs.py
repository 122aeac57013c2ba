"""`Rotation` and `Signs`: vectors by the signs of a random rotation, and inner products from them.

A vector x of p numbers is rotated at random into k, ``y = H D C x``: C adds up p entries in k places, each with a
random sign, D are random signs again, and H is Hadamard's matrix over √k. Inner products are kept, in expectation over
C and exactly by the rest. Of y the index keeps its k signs and the size ``c = ‖y‖² / ‖y‖₁``; with another vector q,
rotated in the same way,

    ⟨q, x⟩ ≈ c Σ_j sign(y_j) q_j,        error ≈ √(π/2k) ‖q‖ ‖x‖ ≈ c ‖q‖

in root mean square: for the bytes that are spent, signs of many places say more than eight bits of few (docs/math.md,
"The index").
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

__all__ = ["Rotation", "Signs", "estimates"]

#: Hadamard's matrix is applied in factors of this many rows.
_FACTOR = 32
#: Bytes whose tables' entries are looked up at once: their places stay in the cache.
_AT_ONCE = 2**20


class Rotation:
    """Rotates vectors that come in parts.

    Args:
        sizes: numbers in each part.
        places: k, a power of two.
        generator: draws places and signs.

    Example:
        >>> rotation = Rotation([3, 5], 8, torch.Generator().manual_seed(0))
        >>> x = torch.arange(8.0)
        >>> y = rotation([x[:3].unsqueeze(0), x[3:].unsqueeze(0)])
        >>> y.shape, round(float(y.square().sum()), 3)
        (torch.Size([1, 8]), 140.0)
    """

    def __init__(self, sizes: Sequence[int], places: int, generator: torch.Generator) -> None:
        self.places, whole = places, sum(sizes)

        def signs(count: int) -> Tensor:
            return torch.randint(0, 2, (count,), generator=generator).to(torch.int8).mul_(2).sub_(1)

        # as many entries in every place, but for one
        drawn = torch.randperm(max(whole, places), generator=generator)[:whole].remainder_(places)
        self._places = drawn.to(torch.int32).split(list(sizes))
        self._signs = signs(whole).split(list(sizes))
        self._last = signs(places)
        factor = torch.ones(1, 1)
        while len(factor) < min(_FACTOR, places):
            factor = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), factor)
        self._factor = factor

    def blank(self, rows: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Zeros for `add`, ``[rows, k]``."""
        return torch.zeros(rows, self.places, dtype=dtype, device=device)

    def add(self, total: Tensor, part: int, rows: Tensor) -> None:
        """One part of some vectors, ``[n, size]``; what it holds is overwritten."""
        where = self._places[part].to(total.device)
        total.index_add_(1, where, rows.mul_(self._signs[part].to(rows)))

    def finish(self, total: Tensor) -> Tensor:
        """y, from what was added up."""
        y, done = total * self._last.to(total), 1
        while done < self.places:
            side = min(_FACTOR, self.places // done)
            factor = self._factor[:side, :side].to(y) / math.sqrt(side)
            y = torch.einsum("naib,ij->najb", y.reshape(len(y), -1, side, done), factor)
            y, done = y.reshape(len(y), self.places), done * side
        return y

    def __call__(self, parts: Sequence[Tensor]) -> Tensor:
        """``[n, k]``, of vectors in parts ``[n, size]``."""
        total = self.blank(len(parts[0]), parts[0].dtype, parts[0].device)
        for number, rows in enumerate(parts):
            self.add(total, number, rows.clone())
        return self.finish(total)


@dataclass(frozen=True)
class Signs:
    """What is kept of rotated vectors.

    Attributes:
        bits: signs, eight in a byte, ``[n, k/8]``.
        sizes: c, ``[n]``.
    """

    bits: Tensor
    sizes: Tensor

    @staticmethod
    def of(rotated: Tensor) -> Signs:
        """Of vectors ``[n, k]``."""
        y = rotated.double()
        sizes = y.square().sum(1) / y.abs().sum(1).clamp_min(1e-300)
        packed = np.packbits((rotated > 0).cpu().numpy(), axis=1)
        return Signs(torch.from_numpy(packed), sizes.float().cpu())


def estimates(signs: Signs, queries: Tensor) -> Tensor:
    """``⟨q, x⟩`` for rotated queries ``[q, k]``, ``[q, n]`` in float32.

    By a table of the 256 sums that eight numbers of q make with their signs, for every byte: as many additions as there
    are bytes.
    """
    n, width = signs.bits.shape
    result = torch.empty(len(queries), n)
    each = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1)
    pattern = torch.from_numpy(each).float().mul_(2).sub_(1)  # [256, 8]
    tables = [(query.float().cpu().reshape(width, 8) @ pattern.T).reshape(-1) for query in queries]
    begins = torch.arange(width, dtype=torch.int32) * 256
    rows = max(1, _AT_ONCE // width)
    for first in range(0, n, rows):
        places = (signs.bits[first : first + rows].to(torch.int32) + begins).reshape(-1)
        for row, table in zip(result, tables, strict=True):
            row[first : first + rows] = table.index_select(0, places).reshape(-1, width).sum(1)
    return result * signs.sizes
