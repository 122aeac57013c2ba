"""`Ending`: the model as EK-FAC differentiates it, ending in ``z = Rᵀh`` with ``R Rᵀ = S``."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from whence.errors import ModelError
from whence.model.gauss_newton import GaussNewton
from whence.model.inspection import check_finite
from whence.preconditioners.ekfac.layers import Call, Layer, covered_leaves, watching, why_not_called_well
from whence.tasks import Batch, Task

__all__ = ["Ending"]


class Ending(nn.Module):
    """The model, followed by ``z = Rᵀh``, a row for each example.

    With ``samples``, a column of z is ``Σ_i ⟨r_i, h_i⟩`` over the example's terms, with residuals drawn anew in every
    pass: independent r_i have ``E[(Σ J_i r_i)(Σ J_i r_i)ᵀ] = Σ J_i S_i J_iᵀ``. Without, R is the root of all of the
    example's S_i together, block by block, and no column mixes two terms.
    """

    def __init__(
        self, gnh: GaussNewton, layers: Mapping[str, Layer], samples: int | None, generator: torch.Generator
    ) -> None:
        super().__init__()
        self.training = False
        self.model = gnh.network.model
        self.network, self.task = gnh.network, gnh.task
        self.layers, self.samples, self.generator = layers, samples, generator
        self.leaves = covered_leaves(gnh, layers)

    def forward(self, inputs: Mapping[str, Batch]) -> Tensor:
        return self.run(inputs["batch"])[0]

    def run(self, batch: Batch) -> tuple[Tensor, dict[str, Call]]:
        """``z``, ``[n, columns]``, and the one call of each layer."""
        with watching(self.layers) as calls:
            outputs = self.network.outputs(batch, self.leaves)
        for name, layer in self.layers.items():
            reason = why_not_called_well(layer, calls[name], batch.size)
            if reason is not None:
                raise ModelError(
                    f"the weight of {name!r} is {reason}, from {batch.name(0)} on, though not on the longest: what "
                    "the model calls depends on its inputs. Use the Nyström preconditioner instead"
                )
        check_finite(outputs)
        once = {name: call for name, (call,) in calls.items()}
        rows = outputs.reshape(batch.size, -1)
        rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
        if self.samples is None:
            return torch.einsum("nm,nmc->nc", rows, _root(self.task, outputs.detach(), batch).to(rows)), once
        columns = []
        for _ in range(self.samples):
            residual = self.task.sample_residual(outputs.detach(), batch, self.generator)
            assert residual is not None  # `ekfac` has seen to that
            columns.append(torch.linalg.vecdot(rows, residual.reshape(batch.size, -1).to(rows)))
        return torch.stack(columns, 1), once


def _root(task: Task, outputs: Tensor, batch: Batch) -> Tensor:
    """``R`` with ``R Rᵀ = S``, ``[n, m, m]``, for all m outputs of each example."""
    n, m = batch.size, outputs[0].numel()
    identity = torch.eye(m, dtype=outputs.dtype, device=outputs.device)
    tangents = identity.reshape(m, 1, *outputs.shape[1:]).expand(m, *outputs.shape)
    hessians = task.hessian_product(outputs, tangents, batch).reshape(m, n, m).transpose(0, 1)
    values, vectors = torch.linalg.eigh(hessians.to(torch.promote_types(hessians.dtype, torch.float32)))
    root: Tensor = vectors * values.clamp_min(0).sqrt().unsqueeze(1)
    return root
