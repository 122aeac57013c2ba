"""Cross-entropy over K classes: what classification and language modelling share.

With ``p = softmax(h)``: ``ℓ = -log p_y``, ``S = Diag(p) - p pᵀ``, so ``S t = p ∘ (t - ⟨p, t⟩)``; and with
``ŷ ~ p``, ``r = p - e_ŷ`` has ``E[r rᵀ] = S``. All of it costs a few tensors of the logits' size.

A model that is trained to the end is certain of nearly all its data. ``1 - p_y`` may be 1e-12 there, and is all that an
example's gradient is made of; next to 1 it has no digits in float32. So nothing here subtracts a probability from 1, or
two nearly equal numbers that are weighted by one: what the label's entry is, follows from those of all the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from whence.errors import DataError, ModelError
from whence.tasks.base import Batch, Task

__all__ = ["IGNORED", "CategoricalTask"]

#: The label that marks a position without a term, as in `torch.nn.functional.cross_entropy`.
IGNORED = -100

#: What is multiplied by a smaller probability than this may lose digits in float32.
_RESOLVED = 1e-25


class CategoricalTask(Task):
    """Cross-entropy of logits ``[..., K]`` against integer targets ``[...]``, `IGNORED` ones left out."""

    def assemble(self, columns: Mapping[str, Tensor] | Sequence[Any]) -> Batch:
        batch = super().assemble(columns)
        if batch.targets.is_floating_point() or batch.targets.dtype == torch.bool:
            return batch  # refused by `check`, with the reason
        return replace(batch, targets=batch.targets.long())

    def check(self, outputs: Tensor, batch: Batch) -> None:
        targets = batch.targets
        if outputs.ndim < 2 or outputs.shape[:-1] != targets.shape:
            raise ModelError(
                f"the model's outputs have shape {tuple(outputs.shape)} for targets of shape "
                f"{tuple(targets.shape)}; {type(self).__name__} reads logits [*targets.shape, classes]"
            )
        self.check_targets(batch, outputs.shape[-1])
        if _are_probabilities(outputs):
            raise ModelError(
                "the model's outputs are probabilities: none is negative, and every row adds up to 1. "
                f"{type(self).__name__} reads logits: leave out the softmax at the end. If training did take the "
                "cross-entropy of such outputs, give that loss as a ConvexLoss"
            )

    def check_targets(self, batch: Batch, width: int | None) -> None:
        targets = batch.targets
        if targets.is_floating_point() or targets.dtype == torch.bool:
            raise DataError(
                f"targets must be integer class labels, got {targets.dtype}; "
                "use Regression for real-valued targets"
            )
        if width is None:
            return
        wrong = ((batch.targets < 0) & (batch.targets != IGNORED)) | (batch.targets >= width)
        if bool(wrong.any()):
            position = tuple(wrong.nonzero()[0].tolist())
            raise DataError(
                f"label {int(batch.targets[position])} ({batch.name(position[0])}) is out of range: the model "
                f"has {width} outputs, so labels are 0..{width - 1}"
            )

    def output_scale(self, outputs: Tensor) -> float:
        # Softmax is far from linear once logits move by 1; small logits have a smaller scale of their own.
        return min(1.0, super().output_scale(outputs))

    def losses(self, outputs: Tensor, batch: Batch) -> Tensor:
        # -log p_y = log(1 + eᵃ), with a the log-odds of all other classes together against y. `F.cross_entropy` has the
        # gradient p_y - 1; this one's is -Σ_{k≠y} p_k.
        if outputs.dtype in (torch.float16, torch.bfloat16):
            outputs = outputs.float()
        ignored = batch.targets == IGNORED
        labels = batch.targets.masked_fill(ignored, 0).unsqueeze(-1)
        others = outputs.scatter(-1, labels, -torch.inf).logsumexp(-1)
        against = others - outputs.gather(-1, labels).squeeze(-1)
        # beyond the threshold, the 1 is below float64's rounding
        return F.softplus(against, threshold=40.0).masked_fill(ignored, 0.0)

    def loss_derivatives(self, outputs: Tensor, tangents: Tensor, batch: Batch) -> Tensor:
        # ⟨p - e_y, t⟩ = Σ_{k≠y} p_k t_k - (Σ_{k≠y} p_k) t_y: where the model is nearly certain of y, ⟨p, t⟩ - t_y
        # would be all rounding. Two passes over the logits.
        ignored = batch.targets == IGNORED
        labels = batch.targets.masked_fill(ignored, 0).unsqueeze(-1)
        dtype = torch.float64 if outputs.dtype == torch.float64 else torch.float32
        others = outputs.detach().softmax(-1, dtype=dtype).scatter_(-1, labels, 0.0)
        tangents = tangents.to(dtype)
        expected = torch.linalg.vecdot(others, tangents).double()
        chosen = tangents.gather(-1, labels.expand(*tangents.shape[:-1], 1)).squeeze(-1)
        derivatives: Tensor = (expected - others.sum(-1).double() * chosen).masked_fill_(ignored, 0.0)
        return derivatives

    def hessian_product(self, outputs: Tensor, tangents: Tensor, batch: Batch) -> Tensor:
        # S is the Jacobian of the softmax, so its fused derivative is the product: one pass over the logits. S sees no
        # constant: with tangents as seen from the likeliest class's, ⟨p, t⟩ keeps its digits where p is all there.
        dtype = torch.float64 if outputs.dtype == torch.float64 else torch.float32
        likeliest = outputs.argmax(-1, keepdim=True).expand(*tangents.shape[:-1], 1)
        tangents = tangents - tangents.gather(-1, likeliest)
        with torch.enable_grad():
            logits = outputs.detach().to(dtype).requires_grad_()
            (product,) = torch.autograd.grad(
                logits.softmax(-1),
                logits,
                tangents.to(dtype),
                is_grads_batched=tangents.ndim > outputs.ndim,
            )
        ignored = batch.targets == IGNORED
        return product.masked_fill_(ignored.unsqueeze(-1), 0.0) if bool(ignored.any()) else product

    def derivatives_beside(self, outputs: Tensor, tangents: Tensor, product: Tensor, batch: Batch) -> Tensor:
        # (S t)_y = p_y (t_y - ⟨p, t⟩), so ⟨p - e_y, t⟩ = -(S t)_y / p_y: no further pass over the tangents
        chance = torch.exp(-self.losses(outputs.detach(), batch))
        if float(chance.min()) < _RESOLVED:
            return super().derivatives_beside(outputs, tangents, product, batch)
        ignored = batch.targets == IGNORED
        labels = batch.targets.masked_fill(ignored, 0).unsqueeze(-1)
        chosen = product.gather(-1, labels.expand(*product.shape[:-1], 1)).squeeze(-1)
        return (-chosen.double() / chance.double()).masked_fill_(ignored, 0.0)

    def divergence_slope(self, outputs: Tensor, anchor: Tensor, batch: Batch) -> Tensor:
        # p - p' = p' ∘ (exp(log p - log p') - 1). With Δ = h - h', m = ⟨p', Δ⟩ and d = Δ - m, the divergence is
        # D = log⟨p', eᵈ⟩ and log p - log p' = d - D: nearly equal probabilities are never subtracted, and no raw
        # logit is exponentiated.
        change = outputs.detach() - anchor.detach()
        log_anchor = anchor.detach().log_softmax(-1)
        probabilities = log_anchor.exp()
        change = change - torch.linalg.vecdot(probabilities, change).unsqueeze(-1)
        small = torch.linalg.vecdot(probabilities, torch.expm1(change.clamp_max(1.0)) - change).log1p()
        large = torch.logsumexp(log_anchor + change, -1)
        divergence = torch.where(change.amax(-1) <= 1.0, small, large).unsqueeze(-1)
        # exp(log p), not p' · eˣ, where the change is large: eˣ alone may overflow
        ratio = change - divergence
        slope = torch.where(
            ratio <= 1.0,
            probabilities * torch.expm1(ratio.clamp_max(1.0)),
            (log_anchor + ratio).exp() - probabilities,
        )
        return slope.masked_fill_((batch.targets == IGNORED).unsqueeze(-1), 0.0)

    def curvature(self, outputs: Tensor, batch: Batch) -> Tensor:
        # Tr S = 1 - ‖p‖² = Σ p(1 - p); the latter keeps its digits when the model is nearly certain.
        probabilities = self._masked_probabilities(outputs, batch)
        spread = torch.linalg.vecdot(probabilities, 1 - probabilities)
        spread = spread.masked_fill_(batch.targets == IGNORED, 0.0)
        total: Tensor = spread.reshape(batch.size, -1).sum(1)
        return total

    def sample_residual(self, outputs: Tensor, batch: Batch, generator: torch.Generator) -> Tensor:
        residual = self._masked_probabilities(outputs, batch)
        valid = (batch.targets != IGNORED).reshape(-1)
        rows = residual.view(-1, residual.shape[-1])
        # Inverse-CDF sampling: torch.multinomial refuses more than 2**24 categories and wants its own
        # device's generator; one uniform number per term needs neither.
        uniform = torch.rand(len(rows), 1, generator=generator, device=generator.device).to(rows)
        drawn = (rows.cumsum(-1) < uniform).sum(-1).clamp_max(rows.shape[-1] - 1)
        rows[torch.arange(len(rows), device=rows.device)[valid], drawn[valid]] -= 1.0
        return residual

    def num_terms(self, batch: Batch) -> Tensor:
        return (batch.targets != IGNORED).reshape(batch.size, -1).sum(1)

    @staticmethod
    def _masked_probabilities(outputs: Tensor, batch: Batch) -> Tensor:
        dtype = torch.float64 if outputs.dtype == torch.float64 else torch.float32
        probabilities = outputs.detach().softmax(-1, dtype=dtype)
        ignored = batch.targets == IGNORED
        if bool(ignored.any()):
            probabilities[ignored] = 0.0
        return probabilities


def _are_probabilities(outputs: Tensor) -> bool:
    """Whether a softmax was applied already. Logits add up to 1 in every row by no accident."""
    if not outputs.is_floating_point() or outputs.shape[-1] < 2 or bool((outputs < 0).any()):
        return False
    sums = outputs.detach().double().sum(-1)
    allowed = max(1e-4, 8 * torch.finfo(outputs.dtype).eps)
    return bool(((sums - 1).abs() <= allowed).all())
