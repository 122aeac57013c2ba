"""The proximal Bregman objective: fine-tune on one example while holding the model to its own outputs.

    F(θ) = (1/N) Σ_i D(h_i(θ), h_i(θ*)) + ε ℓ(z; θ) + (λ/2)‖θ - θ*‖²,     D(h, h') = ℓ(h) - ℓ(h') - ⟨h - h', ∇ℓ(h')⟩

Everything is in units of ε: the displacement is ``d = (θ - θ*)/ε`` and the gradient is divided by ε too, so both are of
ordinary size however small ε is. Derived in docs/math.md, 'Proximal Bregman response'.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from whence.errors import OptionError
from whence.model.data import TermSet
from whence.model.inspection import (
    check_determinism,
    check_finite,
    check_mode,
    check_outputs,
    fitting_micro_batch,
)
from whence.model.network import Network, adding_to
from whence.model.selection import ParameterFilter, select_parameters
from whence.tasks import Batch, Task
from whence.tasks.questions import Parts
from whence.vectors import ParamVector

__all__ = ["PART", "BregmanObjective", "Drawn"]

_ACTIVATIONS = 512 * 2**20
_ANCHORS_KEPT = 256 * 2**20  # bytes of the model's own outputs, kept instead of computed again
#: Changes of the outputs (as a part of their scale) among which ε is chosen: where the path is straightest.
_CHANGES = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2)
#: The part of the first step that ε must still resolve: solutions are so much smaller where curvature is large.
PART = 1 / 32

Drawn = tuple[Tensor, Tensor | None]  # positions of examples, and what each counts for


class BregmanObjective:
    """``F`` for a model, its training data and λ, given as to `pbrf`; the example z and ε come with every call."""

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        train: Any,
        *,
        damping: float,
        params: ParameterFilter | None,
        micro_batch: int | None,
        importance: Tensor | None,
        metric: ParamVector | None = None,
    ) -> None:
        check_mode(model)
        names = set(select_parameters(model, params))
        wide = copy.deepcopy(model).double().requires_grad_(False)
        self.damping, self.task = damping, task
        self.network = _DoubleNetwork(
            wide,
            task,
            {n: p for n, p in wide.named_parameters() if n in names},
            None if metric is None else ParamVector({n: t.double() for n, t in metric.items()}),
        )
        self.terms = TermSet(train, task, self.network.device)
        pilot = self._widened(self.terms.fetch(self.terms.longest(2)))
        self.terms.expect(check_outputs(self.network, pilot))
        check_determinism(self.network, pilot)
        if importance is not None and not (
            importance.shape == (len(self.terms),) and bool(((importance > 0) & importance.isfinite()).all())
        ):
            raise OptionError(
                f"importance has shape {tuple(importance.shape)}; it must hold a positive chance for each of the "
                f"{len(self.terms)} training examples"
            )
        self.terms.draw_by(importance)
        self.micro_batch = micro_batch or fitting_micro_batch(self.network, pilot, memory=_ACTIVATIONS)
        with torch.no_grad():
            width = self.network.outputs(pilot)[0].numel()
        self._keeps_anchors = width * 8 * len(self.terms) <= _ANCHORS_KEPT
        self._anchors: list[Tensor] = []

    def _widened(self, batch: Batch) -> Batch:
        return batch.to(self.network.device, torch.float64)

    def examples(self, data: Any, at_once: int) -> Iterator[Batch]:
        """Points or queries in their order, ``at_once`` to a batch."""
        terms = TermSet(data, self.task, self.network.device)
        terms.expect(self.terms.width, self.terms.kinds)
        for positions in torch.arange(len(terms)).split(at_once):
            yield self._widened(terms.fetch(positions))

    def at(self, displacement: ParamVector, epsilon: float) -> dict[str, Tensor]:
        """``θ* + εd``, ready for a gradient."""
        return {
            name: p.detach()
            .add(self.network.scaled(name, displacement[name]), alpha=epsilon)
            .requires_grad_()
            for name, p in self.network.parameters.items()
        }

    def gradient(
        self, displacement: ParamVector, epsilon: float, point: Batch, drawn: Drawn | None = None
    ) -> ParamVector:
        """``∇F(θ* + εd) / ε``, over all of the data or, without bias, over drawn examples."""
        total = displacement.clone().scale_(self.damping)
        moved = self.at(displacement, epsilon)
        count = len(self.terms) if drawn is None else len(drawn[0])
        receive = adding_to(total, self.terms.weight(count) / epsilon)
        for batch, anchor in self._batches(drawn):
            outputs = self.network.outputs(batch, moved)
            slope = self.task.divergence_slope(outputs, anchor, batch)
            if batch.weights is not None:
                slope.mul_(batch.weights.reshape(-1, *(1,) * (slope.ndim - 1)))
            self.network.pull_back(outputs, moved, slope, receive)
        return self._add_loss_gradient(total, moved, point)

    def loss_gradient(self, point: Batch) -> ParamVector:
        """``∇ℓ(z)`` at θ*."""
        return self._add_loss_gradient(self.network.zeros(), self.network.leaves(), point)

    def _add_loss_gradient(self, total: ParamVector, leaves: dict[str, Tensor], point: Batch) -> ParamVector:
        loss = self.task.query_losses(self.network.outputs(point, leaves), point).sum()
        self.network.pull_back(loss, leaves, torch.ones_like(loss), adding_to(total, 1.0))
        return total

    def _batches(self, drawn: Drawn | None) -> Iterator[tuple[Batch, Tensor]]:
        """Micro-batches with the model's own outputs, which are kept for whole passes where they fit."""
        positions, weights = drawn or (torch.arange(len(self.terms)), None)
        batches = self.terms.batches(positions, self.micro_batch, weights)
        for number, batch in enumerate(map(self._widened, batches)):
            if drawn is None and number < len(self._anchors):
                yield batch, self._anchors[number]
                continue
            with torch.no_grad():
                outputs = self.network.outputs(batch)
            check_finite(outputs)
            if drawn is None and self._keeps_anchors:
                self._anchors.append(outputs)
            yield batch, outputs

    def losses(
        self, displacement: ParamVector, epsilon: float, parts: Parts, batches: Sequence[Batch]
    ) -> Tensor:
        """What is asked, at ``θ* + εd``: from the parts of the questions, in batches."""
        moved = self.at(displacement, epsilon)
        with torch.no_grad():
            worth = [parts.worth(self.network.outputs(batch, moved), batch) for batch in batches]
        return parts.together(torch.cat(worth))

    def straightest(self, direction: ParamVector, point: Batch) -> float:
        """ε for which the outputs' path along d is straightest: short enough to be a line, long enough to be seen.

        On a straight path, a part of the step makes the same part of the change. Curvature spoils that for long
        steps and rounding for short ones.
        """
        epsilon = 1e-3 / max(float(direction.norm()), 1e-30)
        best, least = epsilon, math.inf

        def change(epsilon: float) -> Tensor:
            return self.network.outputs(point, self.at(direction, epsilon)) - origin

        with torch.no_grad():
            origin = self.network.outputs(point)
            scale = self.task.output_scale(origin)
            for aim in _CHANGES:
                for _ in range(3):
                    moved = float(change(epsilon).square().mean().sqrt())
                    if 0 < moved < math.inf:
                        epsilon *= aim * scale / moved
                    else:
                        epsilon *= 1e3 if moved == 0 else 1e-3
                part, whole = change(PART * epsilon), change(epsilon)
                bent = float((part / PART - whole).norm() / whole.norm().clamp_min(1e-300))
                if bent < least:
                    best, least = epsilon, bent
        return best


class _DoublePrecision(TorchFunctionMode):
    """While active, whoever asks for float32 gets float64: many models cast to float32 on purpose."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is Tensor.float:
            return Tensor.double(*args, **(kwargs or {}))

        def wide(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        return func(*map(wide, args), **{name: wide(value) for name, value in (kwargs or {}).items()})


class _DoubleNetwork(Network):
    """A network that computes in float64 also where its model would not."""

    def outputs(self, batch: Batch, parameters: Mapping[str, Tensor] | None = None) -> Tensor:
        with _DoublePrecision():
            return super().outputs(batch, parameters)
