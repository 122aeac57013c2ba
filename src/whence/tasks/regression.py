"""Regression with squared error."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from whence.errors import DataError, ModelError, OptionError
from whence.tasks.base import Batch, Task, noise

__all__ = ["Regression"]


class Regression(Task):
    """Gaussian regression: ``ℓ = ‖h - y‖² / (2σ²)`` and ``S = I/σ²``, one term per example.

    With ``variance`` the residual variance σ², the loss is a negative log-likelihood in nats up to a
    constant. (`torch.nn.MSELoss` is ``2σ²/K`` times this loss, for K outputs.) Outputs are ``[n]`` or ``[n, …]``,
    targets as many.

    Example:
        >>> import torch
        >>> task = Regression()
        >>> batch = task.collate([(torch.zeros(2), torch.tensor([1.0]))])
        >>> task.losses(torch.tensor([[3.0]]), batch)
        tensor([2.])
    """

    known_convex = True
    measures = ("contrast",)

    def __init__(self, *, variance: float = 1.0) -> None:
        if not 0 < variance < float("inf"):
            raise OptionError(f"variance must be a positive number, got {variance}")
        self.variance = variance

    def settings(self) -> Mapping[str, object]:
        return {} if self.variance == 1.0 else {"variance": self.variance}

    def check(self, outputs: Tensor, batch: Batch) -> None:
        if not batch.targets.is_floating_point():
            raise DataError(
                f"targets must be real numbers, got {batch.targets.dtype}; convert them with .float(), or "
                "use Classification for class labels"
            )
        rows = outputs.shape[0] if outputs.ndim else 0
        if rows != batch.size or outputs.numel() != batch.targets.numel():
            raise ModelError(
                f"the model's outputs have shape {tuple(outputs.shape)} for targets of shape "
                f"{tuple(batch.targets.shape)}; Regression needs as many outputs as targets per example"
            )

    def losses(self, outputs: Tensor, batch: Batch) -> Tensor:
        residual = outputs.reshape(batch.size, -1) - batch.targets.reshape(batch.size, -1)
        return residual.square().sum(1) / (2 * self.variance)

    def surprisals(self, outputs: Tensor, batch: Batch) -> Tensor:
        return self.losses(outputs, batch)  # up to a constant, which contrasts cancel

    def hessian_product(self, outputs: Tensor, tangents: Tensor, batch: Batch) -> Tensor:
        return tangents / self.variance

    def curvature(self, outputs: Tensor, batch: Batch) -> Tensor:
        per_example = outputs.numel() / batch.size / self.variance
        return torch.full((batch.size,), per_example, device=outputs.device)

    def divergence_slope(self, outputs: Tensor, anchor: Tensor, batch: Batch) -> Tensor:
        return (outputs.detach() - anchor.detach()) / self.variance

    def sample_residual(self, outputs: Tensor, batch: Batch, generator: torch.Generator) -> Tensor:
        device, dtype = generator.device, outputs.dtype
        drawn = noise(
            batch,
            outputs.shape,
            lambda shape: torch.randn(shape, generator=generator, device=device, dtype=dtype),
        )
        return drawn.to(outputs.device).div(math.sqrt(self.variance))
