"""The proximal Bregman objective: fine-tune on one example while holding the model to its own outputs.

    F(θ) = (1/N) Σ_i D(h_i(θ), h_i(θ*)) + ε ℓ(z; θ) + (λ/2)‖θ - θ*‖²,     D(h, h') = ℓ(h) - ℓ(h') - ⟨h - h', ∇ℓ(h')⟩

Its Hessian at θ* is ``H + λ`` plus ε times z's own, so its minimiser moves off θ* by ``-ε(H + λ)⁻¹∇ℓ(z)`` to first
order: damped influence, defined without any Hessian. Everything here is in units of ε: the displacement is
``d = (θ - θ*)/ε`` and the gradient is divided by ε too, so both are of ordinary size however small ε is.

Float64 throughout, on a copy of the model; the divergence's slope ``∇ℓ(h) - ∇ℓ(h')`` is computed by the task without
subtracting probabilities that nearly agree.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from whence.errors import OptionError
from whence.model.data import TermSet
from whence.model.inspection import (
    check_determinism,
    check_evaluation_mode,
    check_finite,
    check_outputs,
    fitting_micro_batch,
)
from whence.model.network import Network, adding_to
from whence.model.selection import ParameterFilter, select_parameters
from whence.tasks import Batch, Task
from whence.validation.double import DoublePrecision
from whence.vectors import ParamVector

__all__ = ["BregmanObjective"]

_ACTIVATIONS = 512 * 2**20
_ANCHORS_KEPT = 256 * 2**20  # bytes of the model's own outputs, kept instead of computed again
#: Changes of the outputs (as a part of their scale) among which ε is chosen: where the path is straightest.
_CHANGES = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2)
#: Of the step to start with, what a solution may be in directions of large curvature, where it must be seen too.
_PART = 1 / 32


class BregmanObjective:
    """``F`` for a model, its training data and λ; the example z and ε come with every call.

    Args:
        model: in evaluation mode; copied into float64, not modified.
        task: what its outputs mean.
        train: the data that hold the model to its outputs.
        damping: λ.
        params: which parameters may move.
        micro_batch: examples per pass; by default as many as fit.
    """

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        train: Any,
        *,
        damping: float,
        params: ParameterFilter | None = None,
        micro_batch: int | None = None,
    ) -> None:
        if not isinstance(damping, (int, float)) or not 0 < damping < float("inf"):
            raise OptionError(
                f"damping is {damping!r}; the proximal objective needs a positive number, such as the one that an "
                "attribution was solved with"
            )
        check_evaluation_mode(model)
        names = set(select_parameters(model, params))
        wide = copy.deepcopy(model).double()
        for parameter in wide.parameters():
            parameter.requires_grad_(False)
        self.damping, self.task = float(damping), task
        self.network = _DoubleNetwork(wide, task, {n: p for n, p in wide.named_parameters() if n in names})
        self.terms = TermSet(train, task, self.network.device)
        pilot = self.widened(self.terms.fetch(self.terms.longest(2)))
        self.terms.width = check_outputs(self.network, pilot)
        check_determinism(self.network, pilot)
        self.micro_batch = micro_batch or fitting_micro_batch(self.network, pilot, memory=_ACTIVATIONS)
        with torch.no_grad():
            width = self.network.outputs(pilot)[0].numel()
        self._keeps_anchors = width * 8 * len(self.terms) <= _ANCHORS_KEPT
        self._anchors: list[Tensor] = []

    def widened(self, batch: Batch) -> Batch:
        """The batch in float64."""
        return batch.to(self.network.device, torch.float64)

    def examples(self, data: Any, at_once: int = 1) -> Iterator[Batch]:
        """Points or queries in their order, ``at_once`` to a batch."""
        terms = TermSet(data, self.task, self.network.device)
        terms.width = self.terms.width
        for positions in torch.arange(len(terms)).split(at_once):
            yield self.widened(terms.fetch(positions))

    def at(self, displacement: ParamVector, epsilon: float) -> dict[str, Tensor]:
        """``θ* + εd``, ready for a gradient."""
        return {
            name: p.detach().add(displacement[name], alpha=epsilon).requires_grad_()
            for name, p in self.network.parameters.items()
        }

    def gradient(
        self,
        displacement: ParamVector,
        epsilon: float,
        point: Batch,
        positions: Tensor | None = None,
        weights: Tensor | None = None,
    ) -> ParamVector:
        """``∇F(θ* + εd) / ε``, over all of the data or, without bias, over the drawn examples at ``positions``."""
        total = displacement.clone().scale_(self.damping)
        moved = self.at(displacement, epsilon)
        count = len(self.terms) if positions is None else len(positions)
        receive = adding_to(total, self.terms.weight(count) / epsilon)
        for batch, anchor in self._batches(positions, weights):
            outputs = self.network.outputs(batch, moved)
            slope = self.task.divergence_slope(outputs, anchor, batch)
            if batch.weights is not None:
                slope.mul_(batch.weights.reshape(-1, *(1,) * (slope.ndim - 1)))
            self.network.pull_back(outputs, moved, slope, receive)
        loss = self.task.query_losses(self.network.outputs(point, moved), point).sum()
        self.network.pull_back(loss, moved, torch.ones_like(loss), adding_to(total, 1.0))
        return total

    def loss_gradient(self, batch: Batch) -> ParamVector:
        """``∇ℓ`` of one example at θ*."""
        total = self.network.zeros()
        leaves = self.network.leaves()
        loss = self.task.query_losses(self.network.outputs(batch, leaves), batch).sum()
        self.network.pull_back(loss, leaves, torch.ones_like(loss), adding_to(total, 1.0))
        return total

    def losses(self, displacement: ParamVector, epsilon: float, queries: list[Batch]) -> Tensor:
        """Losses of the queries at ``θ* + εd``."""
        moved = self.at(displacement, epsilon)
        with torch.no_grad():
            return torch.cat(
                [self.task.query_losses(self.network.outputs(batch, moved), batch) for batch in queries]
            )

    def loss_derivatives(self, direction: ParamVector, epsilon: float, queries: list[Batch]) -> Tensor:
        """``⟨∇ℓ(q), d⟩`` of the queries at θ*, by central differences over a part of ε."""
        step = _PART * epsilon
        ahead, behind = (self.losses(direction, sign * step, queries) for sign in (1, -1))
        return (ahead - behind) / (2 * step)

    def straightest(self, direction: ParamVector, point: Batch) -> float:
        """ε for which the outputs' path along d is straightest: short enough to be a line, long enough to be seen.

        On a straight path, a part of the step makes the same part of the change. Curvature spoils that for long
        steps and rounding for short ones.
        """
        with torch.no_grad():
            origin = self.network.outputs(point)
            scale = self.task.output_scale(origin)

            def change(epsilon: float) -> Tensor:
                return self.network.outputs(point, self.at(direction, epsilon)) - origin

            epsilon = 1e-3 / max(float(direction.norm()), 1e-30)
            best, least = epsilon, float("inf")
            for aim in _CHANGES:
                for _ in range(3):
                    moved = float(change(epsilon).square().mean().sqrt())
                    if not 0 < moved < float("inf"):
                        epsilon *= 1e3 if moved == 0 else 1e-3
                        continue
                    epsilon *= aim * scale / moved
                part, whole = change(_PART * epsilon), change(epsilon)
                bent = float((part / _PART - whole).norm() / whole.norm().clamp_min(1e-300))
                if bent < least:
                    best, least = epsilon, bent
        return best

    def _batches(self, positions: Tensor | None, weights: Tensor | None) -> Iterator[tuple[Batch, Tensor]]:
        """Micro-batches with the model's own outputs, which are kept for whole passes where they fit."""
        chosen = torch.arange(len(self.terms)) if positions is None else positions
        order = self.terms.by_length(chosen)
        for number, part in enumerate(order.split(self.micro_batch)):
            batch = self.widened(self.terms.fetch(chosen[part]))
            if weights is not None:
                batch = replace(batch, weights=weights[part].to(self.network.device))
            if positions is None and number < len(self._anchors):
                yield batch, self._anchors[number]
                continue
            with torch.no_grad():
                outputs = self.network.outputs(batch)
            check_finite(outputs)
            if positions is None and self._keeps_anchors:
                self._anchors.append(outputs)
            yield batch, outputs


class _DoubleNetwork(Network):
    """A network that computes in float64 also where its model would not."""

    def outputs(self, batch: Batch, parameters: Mapping[str, Tensor] | None = None) -> Tensor:
        with DoublePrecision():
            return super().outputs(batch, parameters)
