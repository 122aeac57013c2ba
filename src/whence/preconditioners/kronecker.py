"""`KroneckerBlock`: one matrix of parameters, in the basis that EK-FAC takes its block of H for diagonal in.

Where several processes work together, each holds its rows of Q_G, Q_A and E, as it does of a vector, and multiplies its
rows of what the block is applied to. ``Q_Gᵀ X`` is then a sum over processes, of which each keeps its rows, and
``Q_G X`` needs X whole: both for one matrix at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from whence.distributed import ALONE, Ranks, Shards
from whence.model.layers import Matrix
from whence.preconditioners.sums import of_one, shards_of
from whence.vectors import ParamVector

__all__ = ["KroneckerBlock"]

_E, _LEFT, _RIGHT = "eigenvalues", "left", "right"


@dataclass(frozen=True, eq=False)
class KroneckerBlock:
    """``(Q_G ⊗ Q_A) diag(E) (Q_G ⊗ Q_A)ᵀ`` for one matrix of parameters.

    Attributes:
        matrix: the parameters, a weight with its bias or any other alone.
        parts: E, ``[rows, columns]``, as "eigenvalues", and Q_G, ``[rows, rows]``, and Q_A, ``[columns, columns]``, as
            "left" and "right", where they are not the identity; of each, this process's rows.
    """

    matrix: Matrix
    parts: ParamVector

    @classmethod
    def of(
        cls, matrix: Matrix, left: Tensor | None, right: Tensor | None, eigenvalues: Tensor
    ) -> KroneckerBlock:
        """A block of whole tensors, in one process."""
        first, second = (None if side is None else of_one(side) for side in (left, right))
        return cls.joined(matrix, first, second, of_one(eigenvalues), ALONE)

    @classmethod
    def joined(
        cls,
        matrix: Matrix,
        left: ParamVector | None,
        right: ParamVector | None,
        eigenvalues: ParamVector,
        ranks: Ranks,
    ) -> KroneckerBlock:
        """A block of `of_one` tensors, each whole or parted over the processes already."""
        given = {_E: eigenvalues, _LEFT: left, _RIGHT: right}
        found = {name: tensor for name, tensor in given.items() if tensor is not None}
        shards = None
        if ranks.size > 1:
            shards = Shards(ranks, {name: tensor.shape_of("") for name, tensor in found.items()})
        rows = {name: tensor.parted(shards_of(tensor, ranks))[""] for name, tensor in found.items()}
        return cls(matrix, ParamVector(rows, shards=shards))

    @property
    def eigenvalues(self) -> Tensor:
        """This process's rows of E."""
        return self.parts[_E]

    @property
    def left(self) -> Tensor | None:
        """Its rows of Q_G; None for the identity."""
        return self.parts.get(_LEFT)

    @property
    def right(self) -> Tensor | None:
        """Its rows of Q_A; None for the identity."""
        return self.parts.get(_RIGHT)

    def apply(self, vector: ParamVector, function: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """``Q f(E) Qᵀ v`` for these parameters; on a block, for each column."""
        mine = self._rows_of(vector)
        right = None if self.right is None else self._all(_RIGHT, self.right).to(mine)
        left = None if self.left is None else self.left.to(mine)
        turned = mine if right is None else mine @ right
        turned = turned if left is None else self._sum(left.T @ turned)
        turned = turned * function(self.eigenvalues.to(mine))
        turned = turned if left is None else left @ self._all(_E, turned)
        turned = turned if right is None else turned @ right.T
        return self._given_back(turned, vector)

    # --- rows of several processes -----------------------------------------------------------------------

    def _rows_of(self, vector: ParamVector) -> Tensor:
        """This process's rows of the matrix that a vector is, ``[*columns, rows, columns]``."""
        lead = () if vector.columns is None else (vector.columns,)
        if self.parts.shards is None or self._by_rows(vector):
            return self.matrix.pack(vector, lead)
        return self.parts.shards.part(_E, self.matrix.pack(vector.whole_of(self.matrix.names), lead))

    def _given_back(self, rows: Tensor, vector: ParamVector) -> dict[str, Tensor]:
        """Inverse of `_rows_of`."""
        if self.parts.shards is None or self._by_rows(vector):
            held = vector[self.matrix.weight].shape[vector.columns is not None :]
            return self.matrix.unpack(rows, held)
        found = self.matrix.unpack(self._all(_E, rows), vector.shape_of(self.matrix.weight))
        return {name: vector.own_rows(name, whole).clone() for name, whole in found.items()}

    def _by_rows(self, vector: ParamVector) -> bool:
        """Whether a process's rows of the parameters are its rows of the matrix."""
        shape = vector.shape_of(self.matrix.weight)
        return not self.matrix.transposed and self.matrix.shape[0] == (shape[0] if len(shape) else 1)

    def _all(self, name: str, rows: Tensor) -> Tensor:
        """All rows of what each process has some of."""
        shards = self.parts.shards
        return rows if shards is None else dict(shards.gathered({name: rows}))[name]

    def _sum(self, whole: Tensor) -> Tensor:
        """This process's rows of a sum over processes."""
        shards = self.parts.shards
        return whole if shards is None else dict(shards.summed({_E: whole}))[_E]
