"""Finite differences through ReLU and routers: hold the pattern of active units and of what was chosen.

``(h(θ+δu) - h(θ-δu)) / 2δ`` is the derivative only while no unit crosses its kink in between, and no router sends a
token to another expert. In float32 δ cannot be small enough: a thousandth of the units crossing is already an error of
about 1% in ``J u``, and one token that changes experts is more. The derivative at θ is that of the network with its
pattern *held* at θ, so the pattern is recorded in the pass at θ and replayed in the perturbed ones; in between, the
replayed network is smooth.

A ReLU's pattern is its output, which autograd keeps anyway, so holding it costs no memory; that of a choice (top-k,
sorting, the larger of numbers, a comparison) is what was chosen. Smooth networks skip all of this.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from whence.errors import ModelError

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


def _replay_clamp(pattern: Any, x: Tensor, args: tuple[Any, ...]) -> Tensor:
    inside, outputs = pattern
    return torch.where(inside, x, outputs)


def _replay_max_pool2d(pattern: Any, x: Tensor, args: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    return x.flatten(-2).gather(-1, pattern.flatten(-2)).reshape(pattern.shape), pattern


def _replay_chosen(place: int) -> _Replay:
    """What stands at the places that were chosen along a dimension, which is the argument of this number."""

    def replay(pattern: Any, x: Tensor, args: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
        dim = args[place] if len(args) > place else -1
        if pattern.ndim < x.ndim:  # the dimension is gone, as after `max`
            return x.gather(dim, pattern.unsqueeze(dim)).squeeze(dim), pattern
        return x.gather(dim, pattern), pattern

    return replay


def _replay_decision(pattern: Any, x: Tensor, args: tuple[Any, ...]) -> Any:
    return pattern


def _output(output: Any, args: tuple[Any, ...]) -> Any:
    return output


def _second(output: Any, args: tuple[Any, ...]) -> Any:
    return output[1]


def _positive(output: Any, args: tuple[Any, ...]) -> Any:
    return output > 0


def _unclamped(output: Any, args: tuple[Any, ...]) -> Any:
    return output == args[0], output.clone()


def _hardtanh_pattern(output: Any, args: tuple[Any, ...]) -> Any:
    low, high = (args[1], args[2]) if len(args) > 2 else (-1.0, 1.0)
    return (output > low) & (output < high), output.clone()


_Kinked = tuple[Callable[[Any, tuple[Any, ...]], Any], _Replay]
_CLAMPED: _Kinked = (_unclamped, _replay_clamp)
_CHOSEN: _Kinked = (_second, _replay_chosen(1))
_DECIDED: _Kinked = (_output, _replay_decision)
#: Operation -> how its pattern is read off its output, and how it is replayed.
_KINKED: dict[Any, _Kinked] = {
    _aten.relu.default: (_output, _replay_relu),
    _aten.relu_.default: (_output, _replay_relu),
    _aten.leaky_relu.default: (_positive, _replay_leaky_relu),
    _aten.leaky_relu_.default: (_positive, _replay_leaky_relu),
    _aten.hardtanh.default: (_hardtanh_pattern, _replay_clamp),
    _aten.hardtanh_.default: (_hardtanh_pattern, _replay_clamp),
    _aten.max_pool2d_with_indices.default: (_second, _replay_max_pool2d),
    _aten.topk.default: (_second, _replay_chosen(2)),
    **dict.fromkeys((_aten.clamp.default, _aten.clamp_min.default, _aten.clamp_max.default), _CLAMPED),
    **dict.fromkeys((_aten.sort.default, _aten.sort.stable, _aten.max.dim, _aten.min.dim), _CHOSEN),
    **dict.fromkeys((_aten.argmax.default, _aten.argmin.default), _DECIDED),
    **dict.fromkeys((_aten.gt.Scalar, _aten.gt.Tensor, _aten.lt.Scalar, _aten.lt.Tensor), _DECIDED),
    **dict.fromkeys((_aten.ge.Scalar, _aten.ge.Tensor, _aten.le.Scalar, _aten.le.Tensor), _DECIDED),
}
_IN_PLACE = {_aten.relu_.default, _aten.leaky_relu_.default, _aten.hardtanh_.default}


def _is_kinked(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether the operation depends on the parameters with a kink, as one on whole numbers cannot."""
    return func in _KINKED and isinstance(args[0], Tensor) and args[0].is_floating_point()


class RecordKinks(TorchDispatchMode):
    """Records the pattern of every kinked operation, in the order they run.

    Args:
        share_outputs: keep a ReLU's output itself. Autograd sees to it that nobody writes into outputs that a
            graph needs; without a graph somebody might, and a copy is kept.
    """

    def __init__(self, *, share_outputs: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        #: Of every kinked operation: itself, and its pattern.
        self.patterns: list[tuple[Any, Any]] = []
        self._share_outputs = share_outputs

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        if _is_kinked(func, args):
            pattern = _KINKED[func][0](output, args)
            if pattern is output and not self._share_outputs:
                pattern = output.clone()
            self.patterns.append((func, pattern))
        return output


class HoldKinks(TorchDispatchMode):
    """Replays recorded patterns: the k-th kinked operation uses the k-th pattern."""

    def __init__(self, patterns: list[tuple[Any, Any]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._patterns = iter(patterns)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if not _is_kinked(func, args):
            return func(*args, **(kwargs or {}))
        recorded, pattern = next(self._patterns, (None, None))
        if recorded is not func:
            raise ModelError(
                f"the model does other operations at other parameters ({func} in place of {recorded}), so finite "
                "differences of its outputs are no derivatives. Use product='exact', or make it do the same always"
            )
        if func is _aten.relu_.default:
            return _aten.threshold_backward.grad_input(args[0], pattern, 0, grad_input=args[0])
        if func is _aten.sort.stable:  # takes its dimension by name
            args = (args[0], (kwargs or {}).get("dim", -1))
        result = _KINKED[func][1](pattern, args[0], args)
        return args[0].copy_(result) if func in _IN_PLACE else result
