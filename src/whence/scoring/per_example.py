"""Scores from per-example gradients: one backward per example serves every query at once.

    score(u, z) = Σ_p ⟨u_p, ∂ℓ(z)/∂θ_p⟩         p: the parameters, one at a time

Each parameter's gradient is multiplied with all directions as soon as the backward pass has it, and dropped: a
whole gradient never exists, let alone a batch of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from whence.model.gauss_newton import GaussNewton
from whence.model.inspection import check_finite
from whence.tasks import Batch
from whence.vectors import ParamVector

__all__ = ["gradient_products"]


def gradient_products(gnh: GaussNewton, directions: ParamVector, batch: Batch) -> tuple[Tensor, float]:
    """``∇ℓ(z)ᵀu``, ``[k]`` in float64, and ``‖∇ℓ(z)‖²``, of one example; ``ℓ(z)`` is the mean over its terms."""
    square = 0.0
    rows = {name: tensor.flatten(1) for name, tensor in directions.items()}
    total = torch.zeros(directions.columns or 1, dtype=torch.float64, device=batch.targets.device)

    def receive(name: str, gradient: Tensor) -> None:
        nonlocal square
        flat = gradient.reshape(-1).to(rows[name].dtype)
        total.add_(torch.mv(rows[name], flat))
        # of an example that the model is certain of, squares of entries are below what float32 can hold
        square += float(torch.linalg.vector_norm(flat, dtype=torch.float64)) ** 2

    leaves = gnh.network.leaves()
    outputs = gnh.network.outputs(batch, leaves)
    check_finite(outputs)
    loss = gnh.task.query_losses(outputs, batch).sum()
    gnh.network.pull_back(loss, leaves, torch.ones_like(loss), receive)
    return total, square
