"""Jacobian products by finite differences: forwards only, so they run wherever the model runs.

    central      t = (h(θ+δu) - h(θ-δu)) / 2δ        error O(δ²); extrapolated to O(δ⁴) where that is not enough
    one-sided    t = (h(θ+sδu) - h(θ)) / sδ          error O(δ), but O(δ²) on average over random signs s = ±1

The one-sided form reuses ``h(θ)``, which the backward pass needs anyway: two forwards in place of three.

**The step.** δ is set by how much the *outputs* move, not by ‖θ‖/‖u‖: rounding and curvature balance at about
the same output change for every direction, while the δ that produces it differs by orders of magnitude
between a random direction and a top eigenvector. How far the outputs moved last time, per unit of ‖u‖, and how
curved their path was predict the next δ for free; a prediction off by more than a factor of two is
corrected at the price of a forward or two.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from whence.model.kinks import HoldKinks, RecordKinks
from whence.model.network import Network, widened
from whence.model.perturbation import ParameterUses, observe_uses, perturbed
from whence.model.quantised import is_quantised
from whence.tasks import Batch
from whence.vectors import ParamVector

__all__ = ["BaseForward", "FiniteDifferences", "StepMemory"]

_ACCEPT = 2.0  # an output change within this factor of the aim is good enough
_COARSEST = torch.finfo(torch.float32).eps
_MAX_CORRECTIONS = 12
_NUMBERS_LOOKED_AT = 100_000
_EXTRAPOLATE_ABOVE = 1.5e-3  # expected relative error beyond which central differences are extrapolated

_EXTRAPOLATE_SCORES_ABOVE = 1e-2  # the same for scores, whose solver's error is larger than that


@dataclass
class BaseForward:
    """The pass at θ: outputs, some of their numbers, the leaves of their graph (if any), and the pattern of kinks."""

    outputs: Tensor
    some: Tensor
    leaves: dict[str, Tensor] = field(default_factory=dict)
    patterns: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class StepMemory:
    """What earlier differences taught about the step: all that makes one product depend on those before it.

    Attributes:
        gain: RMS output change per unit of ‖δu‖.
        curvature: relative second difference per unit of output change.
        epsilon: precision that the outputs were found to have.
    """

    gain: float | None
    curvature: float | None
    epsilon: float


_NOTHING = BaseForward(torch.empty(0), torch.empty(0))


class FiniteDifferences:
    """Finite-difference tangents for a `Network`, its parameters' uses observed on one batch."""

    def __init__(self, network: Network, batch: Batch) -> None:
        self.network = network
        # A low-precision model is perturbed in float32, or δu would be rounded away. The float32 layers then
        # need float32 everywhere, so all its tensors are swapped, not only the selected ones.
        # Those of quantised weights cannot be written into; they are put in place of the whole model's.
        self._quantised = {name for name, tensor in network.narrow_rest.items() if is_quantised(tensor)}
        self._tensors: dict[str, Tensor] = {
            name: tensor
            for name, tensor in {**network.parameters, **network.narrow_rest}.items()
            if name not in self._quantised
        }
        with torch.no_grad(), RecordKinks() as recorder:
            self._uses: ParameterUses = observe_uses(
                network.model, self._tensors, lambda: network.as_it_is(batch)
            )
        #: Kinks that no process met in these examples may be met in others.
        self._kinked = float(network.ranks.largest(torch.tensor(float(bool(recorder.patterns))))) > 0
        first = next(iter(network.parameters.values()))
        self._precision = torch.finfo(torch.promote_types(first.dtype, torch.float32)).eps
        self._epsilon = self._precision
        #: RMS output change per unit of ‖δu‖ in the last product: predicts the next δ.
        self.gain: float | None = None
        #: Relative second difference per unit of output change in the last central product.
        self.curvature: float | None = None

    @property
    def memory(self) -> StepMemory:
        """What to save and restore for a product to come out bit for bit the same again."""
        return StepMemory(self.gain, self.curvature, self._epsilon)

    @memory.setter
    def memory(self, memory: StepMemory) -> None:
        self.gain, self.curvature, self._epsilon = memory.gain, memory.curvature, memory.epsilon

    def base(self, batch: Batch, *, graph: bool) -> BaseForward:
        """The pass at θ, with a graph for the backward pass where asked."""
        record = RecordKinks(share_outputs=graph) if self._kinked else nullcontext()
        with torch.set_grad_enabled(graph), record as recorder:
            leaves = self.network.leaves() if graph else {}
            outputs = self.network.outputs(batch, leaves or None)
        patterns = recorder.patterns if recorder is not None else []
        return BaseForward(outputs, self._some(outputs, batch), leaves, patterns)

    def tangent(
        self, base: BaseForward, batch: Batch, vector: ParamVector, sign: int | None = None
    ) -> Tensor:
        """``J u``: central differences, or one-sided where a sign is given.

        The first product is central in any case, to measure curvature.
        """
        norm = float(vector.norm())
        if norm == 0.0:
            return torch.zeros_like(base.outputs)
        origin = base.outputs.detach()
        if sign is not None and self.curvature is not None:
            ahead, _, step = self._ahead(sign, base, batch, vector, norm)
            return ahead.sub_(origin).div_(sign * step)
        return self._central(base, batch, vector, norm)

    def calibrate(self, batch: Batch, vector: ParamVector) -> tuple[StepMemory, float]:
        """What `loss_derivatives` needs to know of a direction, measured on one batch: memory and δ."""
        self.memory = StepMemory(None, None, self._precision)
        base = self.base(batch, graph=False)
        self.tangent(base, batch, vector)
        norm = float(vector.norm())
        return self.memory, self._first_guess(self._aim(base.some)) / norm if norm else 1.0

    def loss_derivatives(
        self,
        batch: Batch,
        vector: ParamVector,
        calibration: tuple[StepMemory, float],
        losses: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """``(ℓ(θ+δu) - ℓ(θ-δu)) / 2δ`` of every term's loss: two forwards, no pass at θ and no backward.

        Depends on the batch and the calibration only, not on what was computed before. The step suits the example
        that moves most. Where no step is good enough, differences are extrapolated at the price of two more
        forwards; where the network has kinks, a pass at θ records them first.
        """
        self.memory, step = calibration
        kinks = self.base(batch, graph=False) if self._kinked else _NOTHING
        for attempt in range(_MAX_CORRECTIONS):
            ahead = self._outputs_at(step, kinks, batch, vector)
            behind = self._outputs_at(-step, kinks, batch, vector)
            some = self._some(ahead, batch)
            aim, moved = self._aim(some), self._largest_rms(ahead, behind, batch) / 2
            near = aim / (2 * _ACCEPT) <= moved <= aim * _ACCEPT
            if moved == 0.0 or near or attempt == _MAX_CORRECTIONS - 1:
                break
            step *= _correction(aim, moved)
        fine = (losses(ahead) - losses(behind)).div_(2 * step)
        if moved == 0.0 or self._expected_error(some, moved) <= _EXTRAPOLATE_SCORES_ABOVE:
            return fine
        del ahead, behind
        far = losses(self._outputs_at(2 * step, kinks, batch, vector))
        far -= losses(self._outputs_at(-2 * step, kinks, batch, vector))
        return fine.mul_(4).sub_(far.div_(4 * step)).div_(3)

    def _central(self, base: BaseForward, batch: Batch, vector: ParamVector, norm: float) -> Tensor:
        """Central differences; their second differences show whether δ was well chosen."""
        for _ in range(_MAX_CORRECTIONS):
            ahead, plus, step = self._ahead(1, base, batch, vector, norm)
            behind = self._outputs_at(-step, base, batch, vector)
            zero, minus = base.some, self._some(behind, batch)
            moved = _rms(plus - minus) / 2
            if moved == 0.0:
                break
            curved = _rms(plus + minus - 2 * zero) / (2 * moved)
            if self._epsilon < _COARSEST and curved > 100 * self._epsilon ** (1 / 3):
                # The path cannot be that curved over so short a step: it is rounding, coarser than the
                # dtype's. (A float64 Llama normalises in float32.) Plan with float32's precision.
                self._epsilon = _COARSEST
                continue
            self.curvature = curved / moved
            if moved <= self._aim(base.some) * _ACCEPT:
                if self._expected_error(base.some, moved) > _EXTRAPOLATE_ABOVE:
                    return self._extrapolated(step / moved, base, batch, vector)
                break
        return ahead.sub_(behind).div_(2 * step)

    def _extrapolated(
        self, per_change: float, base: BaseForward, batch: Batch, vector: ParamVector
    ) -> Tensor:
        """``(4 t(δ) - t(2δ)) / 3``, whose error is O(δ⁴), for directions in which no δ is good enough.

        Such are the top eigenvectors of a real language model, along which a path of the outputs is so
        curved that the δ it allows drowns in rounding. Two forwards more buy a δ several times as long.
        """
        assert self.curvature is not None
        change = 1.5 * (1.34 * self._rounding(base.some) / (16 * self.curvature**4)) ** (1 / 5)
        change = min(change, 0.15 * self.network.task.output_scale(base.some))
        step = per_change * change
        fine, coarse = (
            self._outputs_at(k * step, base, batch, vector)
            .sub_(self._outputs_at(-k * step, base, batch, vector))
            .div_(2 * k * step)
            for k in (1, 2)
        )
        return fine.mul_(4).sub_(coarse).div_(3)

    def _ahead(
        self,
        side: int,
        base: BaseForward,
        batch: Batch,
        vector: ParamVector,
        norm: float,
    ) -> tuple[Tensor, Tensor, float]:
        """``h(θ ± δu)``, some of its numbers, and δ, such that the outputs move as far as they should."""
        aim = self._aim(base.some)
        step = self._first_guess(aim) / norm
        for attempt in range(_MAX_CORRECTIONS):
            ahead = self._outputs_at(side * step, base, batch, vector)
            some = self._some(ahead, batch)
            moved = _rms(some - base.some)
            if 0 < moved < float("inf"):
                self.gain = moved / (step * norm)
            if aim / _ACCEPT <= moved <= aim * _ACCEPT or attempt == _MAX_CORRECTIONS - 1:
                break
            step *= _correction(aim, moved)
        return ahead, some, step

    def _aim(self, some: Tensor) -> float:
        """RMS change of the outputs to aim for.

        For a change r, rounding leaves a relative error of about ``σ/r`` in the tangent, σ = 10·ε·rms(h), and
        the third derivative about ``(κr)²``, with κ twice the relative curvature that second differences
        measure on the way. The sum is least at ``r = (σ / 2κ²)^⅓``.
        """
        scale = self.network.task.output_scale(some)
        curvature = 2 * max(self.curvature or 0.5 / scale, 0.1 / scale)
        return float((self._rounding(some) / (2 * curvature**2)) ** (1 / 3))

    def _rounding(self, some: Tensor) -> float:
        """σ: how finely the outputs are computed. A deep network rounds more than once, hence the factor."""
        return 10 * self._epsilon * max(_rms(some), self.network.task.output_scale(some))

    def _expected_error(self, some: Tensor, change: float) -> float:
        """Relative error of central differences at this change of the outputs; see `_aim`."""
        assert self.curvature is not None
        return self._rounding(some) / change + (2 * self.curvature * change) ** 2

    def _first_guess(self, aim: float) -> float:
        """‖δu‖ that should move the outputs by ``aim``."""
        if self.gain is not None:
            return aim / self.gain
        scale = self.network.length()
        return 1e-3 * aim * (scale or 1.0)

    def _some(self, outputs: Tensor, batch: Batch) -> Tensor:
        """An even selection of the numbers, of all shares: statistics of a vocabulary's logits do not need all."""
        share, numbers = batch.share, outputs.numel()
        if share is not None:
            numbers = numbers // batch.size * share.whole
        stride = max(1, numbers // _NUMBERS_LOOKED_AT) | 1  # odd, so as not to walk down one column
        found = outputs.detach().reshape(-1)[::stride]
        if share is None:
            return found
        each = outputs.numel() // batch.size
        counts = [-(-each * held // stride) for held in share.of_all(self.network.ranks)]
        return self.network.ranks.joined(found if batch.held else found[:0], counts)

    def _largest_rms(self, ahead: Tensor, behind: Tensor, batch: Batch) -> float:
        """RMS change of the example that moved most."""
        share, rows = batch.share, ahead.shape[0]
        whole = rows if share is None else rows // batch.size * share.whole
        stride = max(1, ahead[0].numel() * whole // (_NUMBERS_LOOKED_AT * max(whole // 8, 1))) | 1
        change = ahead.reshape(rows, -1)[:, ::stride] - behind.reshape(rows, -1)[:, ::stride]
        norms = torch.linalg.vector_norm(change, dim=1)
        largest = norms.max() if batch.held else norms.new_zeros(())
        if share is not None:
            largest = self.network.ranks.largest(largest)
        return float(largest) / math.sqrt(max(change.shape[1], 1))

    def _outputs_at(self, delta: float, base: BaseForward, batch: Batch, vector: ParamVector) -> Tensor:
        def value(module: nn.Module, name: str, tensor: Tensor) -> Tensor:
            wide = widened(tensor)
            if name not in vector:
                return wide
            moved = wide.add(self.network.scaled(name, vector[name]), alpha=delta)
            if isinstance(module, nn.Embedding) and module.padding_idx is not None:
                moved[module.padding_idx] = wide[module.padding_idx]  # it has no gradient, so no tangent
            return moved

        held = HoldKinks(base.patterns) if base.patterns else nullcontext()
        moved = self.network.moved(vector, delta) or perturbed(self._tensors, self._uses, value)
        with moved, held:
            instead = {name: widened(self.network.narrow_rest[name]) for name in self._quantised}
            return self.network.as_it_is(batch.map(widened) if self.network.low_precision else batch, instead)


def _rms(change: Tensor) -> float:
    return float(torch.linalg.vector_norm(change)) / math.sqrt(max(change.numel(), 1))


def _correction(aim: float, moved: float) -> float:
    """Factor on δ. Outputs that did not move, or blew up, only say in which direction to go."""
    if not moved < float("inf"):
        return 1e-3
    if moved == 0.0:
        return 1e3
    return float(min(max(aim / moved, 1e-4), 1e4))
