"""Any loss that is convex in the outputs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from whence.backward import pulled_back
from whence.errors import ModelError
from whence.tasks.base import Batch, Task

__all__ = ["ConvexLoss"]


class ConvexLoss(Task):
    """A loss given as a function, its output-Hessian product taken by autograd.

    ``S t = ∂/∂ε ∇_h ℓ(h + εt)`` is one gradient and one product through the loss alone, so nothing larger
    than the outputs is built. Each example's loss may depend on that example's outputs only.

    Args:
        loss: ``(outputs [n, ...], targets [n, ...]) -> losses [n]``, convex in the outputs.

    Example:
        >>> import torch
        >>> task = ConvexLoss(lambda h, y: (h - y).cosh().log().sum(-1))
        >>> batch = task.collate([(torch.zeros(2), torch.tensor([0.5]))])
        >>> task.hessian_product(torch.tensor([[0.5]]), torch.tensor([[2.0]]), batch)
        tensor([[2.]])
    """

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.loss = loss

    def check(self, outputs: Tensor, batch: Batch) -> None:
        losses = self.loss(outputs, batch.targets)
        if losses.shape != (batch.size,):
            raise ModelError(
                f"the loss function returned shape {tuple(losses.shape)} for {batch.size} examples; "
                f"it must return one number per example, shape ({batch.size},): use reduction='none'"
            )
        generator = torch.Generator().manual_seed(0)
        tangents = torch.randn(outputs.shape, generator=generator, dtype=outputs.dtype).to(outputs.device)
        curvature = (tangents * self.hessian_product(outputs, tangents, batch)).reshape(batch.size, -1).sum(1)
        scale = float(curvature.abs().max())
        if float(curvature.min()) < -1e-4 * scale:
            raise ModelError(
                f"the loss is not convex in the outputs: a second derivative along a random direction is "
                f"{float(curvature.min()):.3g}. The Gauss-Newton Hessian needs a convex loss"
            )

    def losses(self, outputs: Tensor, batch: Batch) -> Tensor:
        return self.loss(outputs, batch.targets)

    def hessian_product(self, outputs: Tensor, tangents: Tensor, batch: Batch) -> Tensor:
        if tangents.ndim > outputs.ndim:  # a block of tangents
            return torch.stack([self.hessian_product(outputs, t, batch) for t in tangents])
        with torch.enable_grad():
            point = outputs.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(self.loss(point, batch.targets).sum(), point, create_graph=True)
            if not gradient.requires_grad:  # a loss that is linear in the outputs has no curvature
                return torch.zeros_like(outputs)
            (product,) = pulled_back(gradient, [point], tangents)
        return torch.zeros_like(outputs) if product is None else product
