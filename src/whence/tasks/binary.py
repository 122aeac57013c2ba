"""Yes-or-no labels: one for each example, or several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from whence.errors import DataError, ModelError, OptionError
from whence.tasks.base import Batch, Task, noise

__all__ = ["BinaryClassification"]


class BinaryClassification(Task):
    """Binary and multi-label classification: a logit for each yes-or-no label, one term per example.

    With ``σ = 1/(1 + e⁻ʰ)``, labels y from 0 to 1 and the weight v of positive ones,

        ℓ = -Σ_l v y_l log σ_l + (1 - y_l) log(1 - σ_l),     S = Diag(m_l σ_l (1 - σ_l)),   m = v y + 1 - y

    the *sum* over an example's labels, in nats. Outputs are ``[n]``, ``[n, 1]`` or ``[n, labels]``, targets as many.

    Args:
        positive_weight: v, a number or one for each label; as ``pos_weight`` of `torch.nn.BCEWithLogitsLoss`.

    Example:
        >>> import torch
        >>> task = BinaryClassification()
        >>> batch = task.collate([(torch.zeros(4), 1), (torch.ones(4), 0)])
        >>> task.losses(torch.zeros(2), batch)
        tensor([0.6931, 0.6931])
    """

    known_convex = True
    measures: tuple[str, ...] = ("margin", "contrast")

    def __init__(self, *, positive_weight: float | Sequence[float] | Tensor = 1.0) -> None:
        weight = torch.as_tensor(positive_weight, dtype=torch.float64)
        if weight.ndim > 1 or not bool((weight.isfinite() & (weight > 0)).all()):
            raise OptionError(
                f"positive_weight is {weight.tolist()}; give a positive number, or one for each label"
            )
        self.positive_weight = weight

    def settings(self) -> Mapping[str, object]:
        plain = bool((self.positive_weight == 1).all())
        return {} if plain else {"positive_weight": self.positive_weight.tolist()}

    def assemble(self, columns: Mapping[str, Tensor] | Sequence[Any]) -> Batch:
        batch = super().assemble(columns)
        targets = batch.targets
        return Batch(batch.args, batch.kwargs, targets if targets.is_floating_point() else targets.float())

    def check(self, outputs: Tensor, batch: Batch) -> None:
        rows = outputs.shape[0] if outputs.ndim else 0
        labels = batch.targets.numel() // max(batch.size, 1)
        if rows != batch.size or outputs.numel() != batch.targets.numel():
            raise ModelError(
                f"the model's outputs have shape {tuple(outputs.shape)} for targets of shape "
                f"{tuple(batch.targets.shape)}; BinaryClassification needs a logit for each label. Use Classification "
                "for one label out of several classes"
            )
        if self.positive_weight.numel() not in (1, labels):
            raise OptionError(
                f"there are {self.positive_weight.numel()} positive_weights for {labels} labels; give one for each"
            )
        self.check_targets(batch, None)

    def check_targets(self, batch: Batch, width: int | None) -> None:
        wrong = ~((batch.targets >= 0) & (batch.targets <= 1))
        if bool(wrong.any()):
            place = tuple(wrong.nonzero()[0].tolist())
            raise DataError(
                f"label {float(batch.targets[place]):g} ({batch.name(place[0])}) is not from 0 (no) to 1 (yes); use "
                "Classification for numbers of classes"
            )

    def output_scale(self, outputs: Tensor) -> float:
        return min(1.0, super().output_scale(outputs))  # as of a softmax

    def losses(self, outputs: Tensor, batch: Batch) -> Tensor:
        yes, no = self._sides(outputs, batch)
        # beyond the threshold, the 1 in log(1 + eʰ) is below float64's rounding
        losses = yes * F.softplus(-outputs, threshold=40.0) + no * F.softplus(outputs, threshold=40.0)
        return losses.reshape(batch.size, -1).sum(1)

    def margins(self, outputs: Tensor, batch: Batch) -> Tensor:
        targets = batch.targets.to(outputs.dtype).reshape(outputs.shape)
        if outputs.numel() != batch.size or not bool(((targets == 0) | (targets == 1)).all()):
            raise OptionError(
                "measure='margin' asks for the odds of one yes-or-no label; these are several for each example, or "
                "between 0 and 1. Ask for the loss, or give contrast="
            )
        return ((1 - 2 * targets) * outputs).reshape(batch.size)

    def surprisals(self, outputs: Tensor, batch: Batch) -> Tensor:
        targets = batch.targets.to(outputs.dtype).reshape(outputs.shape)
        of_labels = F.binary_cross_entropy_with_logits(outputs, targets, reduction="none")
        return of_labels.reshape(batch.size, -1).sum(1)

    def hessian_product(self, outputs: Tensor, tangents: Tensor, batch: Batch) -> Tensor:
        return tangents * self._diagonal(outputs, batch)

    def curvature(self, outputs: Tensor, batch: Batch) -> Tensor:
        return self._diagonal(outputs, batch).reshape(batch.size, -1).sum(1)

    def divergence_slope(self, outputs: Tensor, anchor: Tensor, batch: Batch) -> Tensor:
        # σ(a) - σ(b) = σ(a) σ(-b) (1 - e^(b-a)) for a ≥ b: nearly equal numbers are never subtracted
        a, b = torch.maximum(outputs, anchor).detach(), torch.minimum(outputs, anchor).detach()
        apart = -a.sigmoid() * (-b).sigmoid() * torch.expm1(b - a)
        yes, no = self._sides(outputs, batch)
        return (yes + no) * apart * (outputs - anchor).detach().sign()

    def sample_residual(self, outputs: Tensor, batch: Batch, generator: torch.Generator) -> Tensor:
        chance = outputs.detach().sigmoid()
        device = generator.device
        uniform = noise(
            batch, outputs.shape, lambda shape: torch.rand(shape, generator=generator, device=device)
        )
        uniform = uniform.to(chance)
        yes, no = self._sides(outputs, batch)
        return (yes + no).sqrt() * torch.where(uniform < chance, -(-outputs.detach()).sigmoid(), chance)

    def _sides(self, outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """``v y`` and ``1 - y``, of the outputs' shape."""
        targets = batch.targets.to(outputs.dtype)
        yes = targets.reshape(batch.size, -1) * self.positive_weight.to(targets)
        return yes.reshape(outputs.shape), (1 - targets).reshape(outputs.shape)

    def _diagonal(self, outputs: Tensor, batch: Batch) -> Tensor:
        """S, of the outputs' shape."""
        yes, no = self._sides(outputs, batch)
        h = outputs.detach()
        return (yes + no) * h.sigmoid() * (-h).sigmoid()
