"""Any loss that is convex in the outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from whence.backward import pulled_back
from whence.errors import ModelError
from whence.tasks.base import Batch, Task

__all__ = ["ConvexLoss"]


class ConvexLoss(Task):
    """A loss given as a function, its output-Hessian product taken by autograd.

    ``S t = ∂/∂ε ∇_h ℓ(h + εt)`` is one gradient and one product through the loss alone, so nothing larger
    than the outputs is built. Each example's loss may depend on that example's outputs only. `GaussNewton` looks at its
    second derivatives on up to 64 examples, and refuses a loss that is not convex, or has none (absolute error, hinge).

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

    def settings(self) -> Mapping[str, object]:
        return {"loss": getattr(self.loss, "__qualname__", type(self.loss).__name__)}

    def check(self, outputs: Tensor, batch: Batch) -> None:
        losses = self.loss(outputs, batch.targets)
        if losses.shape != (batch.size,):
            raise ModelError(
                f"the loss function returned shape {tuple(losses.shape)} for {batch.size} examples; "
                f"it must return one number per example, shape ({batch.size},): use reduction='none'"
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
