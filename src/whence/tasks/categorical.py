"""Cross-entropy over K classes: what classification and language modelling share.

With ``p = softmax(h)``: ``ℓ = -log p_y``, ``S = Diag(p) - p pᵀ``, so ``S t = p ∘ (t - ⟨p, t⟩)``; and with
``ŷ ~ p``, ``r = p - e_ŷ`` has ``E[r rᵀ] = S``. All of it costs a few tensors of the logits' size.

Classes may have weights w, and labels be smoothed by ε, as in `torch.nn.functional.cross_entropy`:

    ℓ = -Σ_k q_k log p_k,   q = (1 - ε) w_y e_y + (ε/K) w,     S = m (Diag(p) - p pᵀ),   m = Σ_k q_k

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

from whence.backward import pulled_back
from whence.errors import DataError, ModelError, OptionError
from whence.tasks.base import Batch, Task, noise

__all__ = ["IGNORED", "CategoricalTask"]

#: The label that marks a position without a term, as in `torch.nn.functional.cross_entropy`.
IGNORED = -100

#: What is multiplied by a smaller probability than this may lose digits in float32.
_RESOLVED = 1e-25


class CategoricalTask(Task):
    """Cross-entropy of logits ``[..., K]`` against integer targets ``[...]``, `IGNORED` ones left out.

    Args:
        label_smoothing: ε, what of a label's weight is spread evenly over all classes.
        class_weights: w, ``[K]``; by default 1 for each. Means are over terms, not over their weights.
    """

    known_convex = True
    measures = ("margin", "contrast")

    def __init__(
        self, *, label_smoothing: float = 0.0, class_weights: Sequence[float] | Tensor | None = None
    ) -> None:
        if not 0 <= label_smoothing < 1:
            raise OptionError(f"label_smoothing is {label_smoothing}; it must be at least 0 and less than 1")
        self.label_smoothing = float(label_smoothing)
        self.class_weights: Tensor | None = None
        if class_weights is not None:
            weights = torch.as_tensor(class_weights, dtype=torch.float64)
            if (
                weights.ndim != 1
                or not bool((weights.isfinite() & (weights >= 0)).all())
                or not bool(weights.any())
            ):
                raise OptionError(
                    f"class_weights are {weights.tolist()}; give a finite number of at least 0 for each class"
                )
            self.class_weights = weights

    def settings(self) -> Mapping[str, object]:
        smoothed = {"label_smoothing": self.label_smoothing} if self.label_smoothing else {}
        weighted = {} if self.class_weights is None else {"class_weights": self.class_weights.tolist()}
        return {**smoothed, **weighted}

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
        if width == 1:
            raise ModelError(
                f"the model has one output per term, of which a softmax is always 1; {type(self).__name__} needs two "
                "classes or more. Use BinaryClassification or Regression"
            )
        if self.class_weights is not None and len(self.class_weights) != width:
            raise OptionError(
                f"there are {len(self.class_weights)} class_weights for {width} outputs; give one for each"
            )
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
        outputs = _wide(outputs)
        losses = self._weighed(self._minus_log_probability(outputs, batch), batch)
        if self.label_smoothing:
            weights = self._weights(outputs)
            spread = weights.mean() * outputs.logsumexp(-1) - outputs @ weights / outputs.shape[-1]
            losses = losses + self.label_smoothing * spread.masked_fill(batch.targets == IGNORED, 0.0)
        return losses

    def margins(self, outputs: Tensor, batch: Batch) -> Tensor:
        return _odds_against(_wide(outputs), batch).masked_fill(batch.targets == IGNORED, 0.0)

    def surprisals(self, outputs: Tensor, batch: Batch) -> Tensor:
        return self._minus_log_probability(_wide(outputs), batch)

    @staticmethod
    def _minus_log_probability(outputs: Tensor, batch: Batch) -> Tensor:
        # -log p_y = log(1 + eᵃ). `F.cross_entropy` has the gradient p_y - 1; this one's is -Σ_{k≠y} p_k.
        against = _odds_against(outputs, batch)
        # beyond the threshold, the 1 is below float64's rounding
        return F.softplus(against, threshold=40.0).masked_fill(batch.targets == IGNORED, 0.0)

    # --- weights and smoothing -------------------------------------------------------------------------------

    def _weights(self, outputs: Tensor) -> Tensor:
        """w, ``[K]``."""
        if self.class_weights is None:
            return torch.ones(outputs.shape[-1], dtype=outputs.dtype, device=outputs.device)
        return self.class_weights.to(outputs)

    def _weighed(self, values: Tensor, batch: Batch) -> Tensor:
        """A value of each term, times ``(1 - ε) w_y``."""
        if self.class_weights is not None:
            values = values * self.class_weights.to(values)[batch.targets.clamp_min(0)]
        return values * (1 - self.label_smoothing) if self.label_smoothing else values

    def _massed(self, values: Tensor, batch: Batch, dims: int = 0, power: float = 1.0) -> Tensor:
        """Values of terms, with ``dims`` more dimensions each, times a power of m."""
        if self.class_weights is None:
            return values  # m = 1
        mass = self._weighed(values.new_ones(batch.targets.shape), batch)
        mass = (mass + self.label_smoothing * self.class_weights.to(values).mean()).pow(power)
        return values * mass.reshape(*mass.shape, *(1,) * dims)

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
        derivatives = self._weighed(expected - others.sum(-1).double() * chosen, batch)
        if self.label_smoothing:
            weights = self._weights(others)
            towards = outputs.detach().softmax(-1, dtype=dtype) * weights.mean() - weights / len(weights)
            derivatives = derivatives + self.label_smoothing * torch.linalg.vecdot(towards, tangents).double()
        return derivatives.masked_fill_(ignored, 0.0)

    def hessian_product(self, outputs: Tensor, tangents: Tensor, batch: Batch) -> Tensor:
        # S is the Jacobian of the softmax, so its fused derivative is the product: one pass over the logits. S sees no
        # constant: with tangents as seen from the likeliest class's, ⟨p, t⟩ keeps its digits where p is all there.
        dtype = torch.float64 if outputs.dtype == torch.float64 else torch.float32
        likeliest = outputs.argmax(-1, keepdim=True).expand(*tangents.shape[:-1], 1)
        tangents = tangents - tangents.gather(-1, likeliest)
        with torch.enable_grad():
            logits = outputs.detach().to(dtype).requires_grad_()
            (product,) = pulled_back(logits.softmax(-1), [logits], tangents)
        assert product is not None
        ignored = batch.targets == IGNORED
        product = self._massed(product, batch, 1)
        if ignored.device.type == "cpu" and not bool(ignored.any()):
            return product  # elsewhere, looking costs more than filling: the host would wait
        return product.masked_fill_(ignored.unsqueeze(-1), 0.0)

    def derivatives_beside(self, outputs: Tensor, tangents: Tensor, product: Tensor, batch: Batch) -> Tensor:
        # (S t)_y = w_y p_y (t_y - ⟨p, t⟩), so w_y ⟨p - e_y, t⟩ = -(S t)_y / p_y: no further pass over the tangents
        chance = torch.exp(-self._minus_log_probability(outputs.detach().to(product.dtype), batch))
        if self.label_smoothing or float(chance.min()) < _RESOLVED:
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
        return self._massed(slope, batch, 1).masked_fill_((batch.targets == IGNORED).unsqueeze(-1), 0.0)

    def curvature(self, outputs: Tensor, batch: Batch) -> Tensor:
        # Tr S = 1 - ‖p‖² = Σ p(1 - p); the latter keeps its digits when the model is nearly certain.
        probabilities = self._masked_probabilities(outputs, batch)
        spread = torch.linalg.vecdot(probabilities, 1 - probabilities)
        spread = self._massed(spread, batch).masked_fill_(batch.targets == IGNORED, 0.0)
        total: Tensor = spread.reshape(batch.size, -1).sum(1)
        return total

    def sample_residual(self, outputs: Tensor, batch: Batch, generator: torch.Generator) -> Tensor:
        residual = self._masked_probabilities(outputs, batch)
        valid = (batch.targets != IGNORED).reshape(-1)
        rows = residual.view(-1, residual.shape[-1])
        # Inverse-CDF sampling: torch.multinomial refuses more than 2**24 categories and wants its own
        # device's generator; one uniform number per term needs neither.
        device = generator.device
        uniform = noise(
            batch, (len(rows), 1), lambda shape: torch.rand(shape, generator=generator, device=device)
        )
        uniform = uniform.to(rows)
        drawn = (rows.cumsum(-1) < uniform).sum(-1).clamp_max(rows.shape[-1] - 1)
        rows[torch.arange(len(rows), device=rows.device)[valid], drawn[valid]] -= 1.0
        return self._massed(residual, batch, 1, power=0.5)

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


def _wide(outputs: Tensor) -> Tensor:
    return outputs.float() if outputs.dtype in (torch.float16, torch.bfloat16) else outputs


def _odds_against(outputs: Tensor, batch: Batch) -> Tensor:
    """a: the log-odds of all other classes together against the label."""
    labels = batch.targets.masked_fill(batch.targets == IGNORED, 0).unsqueeze(-1)
    others = outputs.scatter(-1, labels, -torch.inf).logsumexp(-1)
    return others - outputs.gather(-1, labels).squeeze(-1)


def _are_probabilities(outputs: Tensor) -> bool:
    """Whether a softmax was applied already. Logits add up to 1 in every row by no accident."""
    if not outputs.is_floating_point() or outputs.shape[-1] < 2 or bool((outputs < 0).any()):
        return False
    sums = outputs.detach().double().sum(-1)
    allowed = max(1e-4, 8 * torch.finfo(outputs.dtype).eps)
    return bool(((sums - 1).abs() <= allowed).all())
