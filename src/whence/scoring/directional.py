"""Scores as directional derivatives: ``∇ℓ_i(z)ᵀu`` for a whole batch at once, without any gradient.

The derivative of every term's loss along u is one dual-number forward (exact), or the difference of two plain
forwards at ``θ ± δu``. A batch's terms come out one by one, so scores per token are free.

    exact                ∇ℓ_iᵀ u = ⟨∂ℓ_i/∂h_i, J_i u⟩            one dual forward; several directions vectorised
    finite differences   (ℓ_i(θ+δu) - ℓ_i(θ-δu)) / 2δ          two forwards per direction
"""

from __future__ import annotations

import torch
from torch import Tensor

from whence.model.exact import tangent_only
from whence.model.finite_difference import StepMemory
from whence.model.gauss_newton import GaussNewton
from whence.model.inspection import check_finite
from whence.tasks import Batch
from whence.vectors import ParamVector

__all__ = ["DirectionalDerivatives"]


class DirectionalDerivatives:
    """Derivatives of per-term losses along the columns of a block.

    Args:
        gnh: the network, its task, and how its products are computed.
        directions: a block of k directions u.
        pilot: a batch to measure finite differences' steps on; what is computed later does not depend on the
            order in which batches come.
    """

    def __init__(self, gnh: GaussNewton, directions: ParamVector, pilot: Batch) -> None:
        self._gnh, self._directions = gnh, directions
        self._columns = directions.unstack()
        self._calibrations: list[tuple[StepMemory, float]] = []
        if gnh.product != "exact":
            differences = gnh.differences(pilot)
            self._calibrations = [differences.calibrate(pilot, column) for column in self._columns]

    def of_terms(self, batch: Batch) -> Tensor:
        """``∇ℓ_iᵀu`` for every term: ``[k, *losses]`` in float64, zero where the batch has no term."""
        if self._gnh.product == "exact":
            return self._exact(batch)
        task, differences = self._gnh.task, self._gnh.differences(batch)
        rows = [
            differences.loss_derivatives(
                batch, column, calibration, lambda outputs: task.losses(outputs, batch)
            ).double()
            for column, calibration in zip(self._columns, self._calibrations, strict=True)
        ]
        return torch.stack(rows)

    def _exact(self, batch: Batch) -> Tensor:
        gnh = self._gnh
        if len(self._columns) > 1 and gnh.vectorises(batch, self._directions):
            with torch.no_grad():
                outputs = gnh.network.outputs(batch)
            check_finite(outputs)
            parts = gnh.tangents(outputs, batch, self._directions)
            return torch.cat([gnh.task.loss_derivatives(outputs, tangents, batch) for tangents in parts])
        rows = []
        for column in self._columns:
            outputs, tangent = tangent_only(gnh.network, batch, column)
            check_finite(outputs)
            rows.append(gnh.task.loss_derivatives(outputs, tangent, batch))
        return torch.stack(rows)
