"""`Turned`: examples' gradients in a Kronecker basis, ``Q_Gᵀ G Q_A``, in the metric's coordinates."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from whence.model.gauss_newton import GaussNewton
from whence.model.layers import Call, Matrix, Passed, matrices
from whence.vectors import ParamVector

__all__ = ["Turned", "by_position", "side_of"]


class Turned:
    """Reads examples' gradients off backward passes, matrix by matrix, and turns them.

    Args:
        gnh: brings the network and its metric.
    """

    def __init__(self, gnh: GaussNewton) -> None:
        self._network = network = gnh.network
        #: What both sides of every matrix are multiplied by.
        self.scales = {matrix: _side_scales(matrix, network.metric) for matrix in matrices(network)}

    def of(self, matrix: Matrix, left: Tensor | None, right: Tensor | None, passed: Passed) -> Tensor | None:
        """``Q_Gᵀ G Q_A`` of every example, ``[n, rows, columns]``.

        Of a linear layer it is ``Σ_t (Q_Gᵀg_t)(Q_Aᵀa_t)ᵀ``, which turns vectors and no matrices.
        """
        calls = by_position(matrix, passed)
        if not calls:
            packed = self.packed(matrix, passed)
            if packed is None:
                return None
            packed = packed if left is None else left.T.to(packed) @ packed
            return packed if right is None else packed @ right.to(packed)
        rows, columns = self.scales[matrix]
        total: Tensor | None = None
        for call, kind in calls:
            g = call.outputs_by_position
            if call.is_embedding:
                found = call.looked_up(side_of(g, columns, right))
                found = found if rows is None else found * rows.unsqueeze(1)
                found = found if left is None else left.T.to(found) @ found
            elif kind == "bias":
                found = side_of(g.sum(1), rows, left).unsqueeze(-1)
                found = found if columns is None else found * columns
            else:
                a = call.inputs_by_position(bias=matrix.bias is not None)
                found = torch.bmm(side_of(g, rows, left).mT, side_of(a, columns, right))
            total = found if total is None else total.add_(found)
        return total

    def packed(self, matrix: Matrix, passed: Passed) -> Tensor | None:
        """G of every example, or of the batch where examples have none, in the metric's coordinates."""
        tensors = {}
        for name in matrix.names:
            found = passed.gradients(name)
            if found is None and name in passed.others:
                found = self._network.whole(name, passed.others[name]).unsqueeze(0)
            if found is not None:
                tensors[name] = found
        if not tensors:
            return None
        some = next(iter(tensors.values()))
        for name in matrix.names:  # a weight without its bias, or the other way round, does for zeros
            tensors.setdefault(name, some.new_zeros(len(some), *self._network.parameters[name].shape))
        packed = matrix.pack(tensors, (len(some),))
        rows, columns = self.scales[matrix]
        packed = packed if rows is None else packed * rows.unsqueeze(1).to(packed)
        return packed if columns is None else packed * columns.to(packed)


def by_position(matrix: Matrix, passed: Passed) -> Sequence[tuple[Call, str]]:
    """The calls of a matrix's layers, if all tell its gradient by vectors at positions; none otherwise."""
    calls = passed.calls.get(matrix.weight, ())
    fits = all(
        call.is_embedding or (call.is_linear and (kind == "bias" or call.transposed == matrix.transposed))
        for call, kind in calls
    )
    return calls if fits else ()


def side_of(vectors: Tensor, scale: Tensor | None, basis: Tensor | None) -> Tensor:
    """One side of a gradient, in the metric's coordinates and turned into its basis."""
    vectors = vectors if scale is None else vectors * scale.to(vectors)
    return vectors if basis is None else vectors @ basis.to(vectors)


def _side_scales(matrix: Matrix, metric: ParamVector | None) -> tuple[Tensor | None, Tensor | None]:
    """``r^(-1/2)`` and ``c^(-1/2)`` of a metric ``D = r cᵀ``; of any other metric, of the nearest such."""
    if metric is None:
        return None, None
    packed = matrix.pack(metric.whole_of(matrix.names))
    whole = packed.mean()
    return (packed.mean(1) / whole.sqrt()).rsqrt(), (packed.mean(0) / whole.sqrt()).rsqrt()
