"""Which way of scoring is cheaper: a cost model in counted work, never in measured time.

A choice made by a stop-watch would differ between two runs of the same job, and with it the last bits of the
scores. So the work of one example is *counted*: F floating-point operations and O kernel launches of a
forward pass, N parameters; and every way is priced in the same currency, the time of one flop inside a large
matrix product. For k directions and batches of b examples:

    exact, one by one      k (3F + 3cO/b)                      a dual forward is three forwards' work
    exact, vectorised      F + 2kF + 3cO/b
    finite differences     k (2F + 2(cO + wN)/b)               each forward also writes the perturbed parameters
    layers                 2F + 2cO/b + min(kF, F + mN + 2kN)  a backward pass to the layers' outputs; then k products,
                                                               or examples' gradients, with m = 10w
    gradients              s(3F) + 3cO + w(2 + k)N             one example at a time, small matrices; then k products

c: flops in the time of a launch; w: flops in the time to move a number through memory; s: how much slower the
matrix products of one example run than a batch's. ``python -m benchmarks.scoring`` measures where the ways
really cross, beside what this model says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from whence.model.gauss_newton import GaussNewton
from whence.tasks import Batch

__all__ = ["Work", "count_work"]

#: Flops that a device does in the time of (launching one kernel, moving one number through memory).
_EXCHANGE = {"cpu": (1.5e6, 15.0), "cuda": (5e7, 40.0)}
_SLOWER_ALONE = 1.2
#: What an entry of examples' gradients costs, in numbers moved: it is written, copied and read, beyond the cache.
_TIMES_MOVED = 10


@dataclass(frozen=True)
class Work:
    """The counted work of scoring one example.

    Attributes:
        flops: of its forward pass.
        launches: kernels of a forward pass, of one example or of a batch.
        parameters: N.
        batch: examples per pass where they can be batched.
        device: ``"cpu"`` or ``"cuda"``.
    """

    flops: float
    launches: int
    parameters: int
    batch: int
    device: str = "cpu"

    @property
    def launching(self) -> float:
        """Flops' worth of starting a forward pass."""
        return self._exchange[0] * self.launches

    @property
    def _exchange(self) -> tuple[float, float]:
        return _EXCHANGE.get(self.device, _EXCHANGE["cpu"])

    def directional(self, directions: int, *, exact: bool, vectorised: bool) -> float:
        """Flops' worth of directional derivatives, per example."""
        overhead = self.launching / self.batch
        if not exact:
            moving = self._exchange[1] * self.parameters / self.batch
            return directions * (2 * self.flops + 2 * (overhead + moving))
        if vectorised:
            return (1 + 2 * directions) * self.flops + 3 * overhead
        return directions * (3 * self.flops + 3 * overhead)

    def gradients(self, directions: int) -> float:
        """Flops' worth of one backward per example and its products with all directions."""
        passes = 3 * (_SLOWER_ALONE * self.flops + self.launching)
        return passes + self._exchange[1] * (2 + directions) * self.parameters

    def layers(self, directions: int, *, norms: bool) -> float:
        """Flops' worth of examples' gradients from a backward pass over a batch, or of products without them."""
        moving = _TIMES_MOVED * self._exchange[1] * (2 if norms else 1)
        gradients = self.flops + (moving + 2 * directions) * self.parameters
        products = gradients if norms else min(directions * self.flops, gradients)
        return 2 * self.flops + 2 * self.launching / self.batch + products

    def switch_point(self, *, exact: bool, vectorised: bool) -> int:
        """The smallest number of directions for which gradients are cheaper."""
        for directions in range(1, 100_000):
            if self.gradients(directions) < self.directional(directions, exact=exact, vectorised=vectorised):
                return directions
        return 100_000


def count_work(gnh: GaussNewton, pilot: Batch | None = None) -> Work:
    """Count one forward pass over the pilot; by default, over the two longest examples of the operator's data."""
    network, counter = gnh.network, _Counter()
    pilot = gnh.terms.fetch(gnh.terms.longest(2)) if pilot is None else pilot
    with torch.no_grad(), counter:
        network.outputs(pilot)
    return Work(
        flops=counter.flops / pilot.size,
        launches=counter.launches,
        parameters=sum(p.numel() for p in network.parameters.values()),
        batch=gnh.micro_batch,
        device=network.device.type,
    )


class _Counter(TorchDispatchMode):
    """Counts operations that compute something, for views are free, and their flops by torch's own formulas."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.launches, self.flops = 0, 0.0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler, for two seconds, only to leave it out

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is not torch.ops.prim.device.default and func._overloadpacket not in flop_registry:
            with self:  # such as an attention that is made of others
                parts = func.decompose(*args, **(kwargs or {}))
            if parts is not NotImplemented:
                return parts
        self.launches += not func.is_view
        result = func(*args, **(kwargs or {}))
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            self.flops += formula(*args, **(kwargs or {}), out_val=result)
        return result
