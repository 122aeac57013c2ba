"""Finite differences through ReLU: hold the pattern of active units.

``(h(θ+δu) - h(θ-δu)) / 2δ`` is the derivative only while no unit crosses its kink in between. In float32 δ
cannot be small enough: a thousandth of the units crossing is already an error of about 1% in ``J u``. The
derivative at θ is that of the network with its activation pattern *held* at θ, so the pattern is recorded in
the pass at θ and replayed in the perturbed ones; between kinks the replayed network is smooth.

A ReLU's pattern is its output, which autograd keeps anyway, so holding it costs no memory. Smooth networks skip
all of this.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["HoldKinks", "RecordKinks"]

_aten = torch.ops.aten
_Replay = Callable[[Any, Tensor, tuple[Any, ...]], Any]


def _replay_relu(pattern: Any, x: Tensor, args: tuple[Any, ...]) -> Any:
    return _aten.threshold_backward(
        x, pattern, 0
    )  # x where the pattern is positive: what ReLU's backward does


def _replay_leaky_relu(pattern: Any, x: Tensor, args: tuple[Any, ...]) -> Tensor:
    slope = args[1] if len(args) > 1 else 0.01
    return torch.where(pattern, x, x * slope)


def _replay_hardtanh(pattern: Any, x: Tensor, args: tuple[Any, ...]) -> Tensor:
    inside, outputs = pattern
    return torch.where(inside, x, outputs)


def _replay_max_pool2d(pattern: Any, x: Tensor, args: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    return x.flatten(-2).gather(-1, pattern.flatten(-2)).reshape(pattern.shape), pattern


def _output(output: Any, args: tuple[Any, ...]) -> Any:
    return output


def _positive(output: Any, args: tuple[Any, ...]) -> Any:
    return output > 0


def _hardtanh_pattern(output: Any, args: tuple[Any, ...]) -> Any:
    low, high = (args[1], args[2]) if len(args) > 2 else (-1.0, 1.0)
    return (output > low) & (output < high), output.clone()


#: Operation -> how its pattern is read off its output, and how it is replayed.
_KINKED: dict[Any, tuple[Callable[[Any, tuple[Any, ...]], Any], _Replay]] = {
    _aten.relu.default: (_output, _replay_relu),
    _aten.relu_.default: (_output, _replay_relu),
    _aten.leaky_relu.default: (_positive, _replay_leaky_relu),
    _aten.leaky_relu_.default: (_positive, _replay_leaky_relu),
    _aten.hardtanh.default: (_hardtanh_pattern, _replay_hardtanh),
    _aten.hardtanh_.default: (_hardtanh_pattern, _replay_hardtanh),
    _aten.max_pool2d_with_indices.default: (lambda output, args: output[1], _replay_max_pool2d),
}
_IN_PLACE = {_aten.relu_.default, _aten.leaky_relu_.default, _aten.hardtanh_.default}


class RecordKinks(TorchDispatchMode):
    """Records the pattern of every kinked operation, in the order they run.

    Args:
        share_outputs: keep a ReLU's output itself. Autograd sees to it that nobody writes into outputs that a
            graph needs; without a graph somebody might, and a copy is kept.
    """

    def __init__(self, *, share_outputs: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.patterns: list[Any] = []
        self._share_outputs = share_outputs

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        if func in _KINKED:
            pattern = _KINKED[func][0](output, args)
            if pattern is output and not self._share_outputs:
                pattern = output.clone()
            self.patterns.append(pattern)
        return output


class HoldKinks(TorchDispatchMode):
    """Replays recorded patterns: the k-th kinked operation uses the k-th pattern."""

    def __init__(self, patterns: list[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._patterns = iter(patterns)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func not in _KINKED:
            return func(*args, **(kwargs or {}))
        pattern = next(self._patterns)
        if func is _aten.relu_.default:
            return _aten.threshold_backward.grad_input(args[0], pattern, 0, grad_input=args[0])
        result = _KINKED[func][1](pattern, args[0], args)
        return args[0].copy_(result) if func in _IN_PLACE else result
