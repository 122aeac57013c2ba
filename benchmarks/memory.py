"""Memory that LiSSA takes beside the model, in copies of the parameters.

    python -m benchmarks.memory [--quick]

The claim (see `whence.solvers.lissa`): a step holds the right-hand side, the iterate and one average per chain;
and one gradient where a batch needs several passes. The residual at the end of a solve holds the right-hand
side, the chains' results, their mean and two more. The model here is a deep network of equal layers on a batch of a
few examples, so that parameters dominate activations and one layer is a small part of a copy. A step needs
some layers beside the copies: the weights that are perturbed, or the gradient that is being handed over.
"""

from __future__ import annotations

import argparse
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.timing import report, save
from whence import Classification, Damped, Estimate, GaussNewton, Lissa, ParamVector, Plan, Spectrum

EXAMPLES = 8
#: Layers' worth of memory that a step may take beside whole copies.
ALLOWANCE = 3
_DAMPING, _LAMBDA_MAX, _TRACE = 1.0, 9.0, 18.0


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all tensors that are alive, and the most there ever were.

    Every storage that an operation returns is counted until it is freed. What an operation allocates and
    frees within itself is not seen; matrix products and element-wise operations allocate nothing of note.

    Args:
        ignored: tensors that do not count: the model.
    """

    def __init__(self, ignored: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self.peak_in = ""
        self._ignored = {tensor.untyped_storage()._cdata for tensor in ignored}
        self._known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.count(leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
        return result

    def count(self, tensors: Iterable[Tensor]) -> None:
        """Count tensors from now on: those that operations return, and others made before."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            if key in self._ignored or key in self._known:
                continue
            self._known[key] = weakref.ref(storage, lambda _, key=key, size=size: self._forget(key, size))
            self.live += size
            if self.live > self.peak:
                self.peak, self.peak_in = self.live, _solver_function()

    def _forget(self, key: int, size: int) -> None:
        del self._known[key]
        self.live -= size


@dataclass(frozen=True)
class Case:
    """One way to run LiSSA, and the copies of the parameters that it should need at most.

    Attributes:
        product: ``"exact"`` or ``"finite-difference"``.
        average: the solver's option.
        chains: 1 advances a single chain; more run a whole solve, with its residual.
        passes: passes that a batch of 4 examples takes.
    """

    product: Literal["exact", "finite-difference"]
    average: Literal["tail", "last"]
    chains: int = 1
    passes: int = 1

    @property
    def name(self) -> str:
        what = "steps" if self.chains == 1 else f"solve with {self.chains} chains"
        passes = "" if self.passes == 1 else f", {self.passes} passes a batch"
        return f"{self.product} {what}, {self.average}{passes}"

    @property
    def claim(self) -> int:
        """For steps: right-hand side, iterate, average, and a gradient where there are several passes.

        With ``average="last"`` the iterate is the result. For a solve, its residual needs most.
        """
        if self.chains > 1:
            return self.chains + 4
        return 2 + (self.average == "tail") + (self.passes > 1)


CASES = [
    Case("finite-difference", "last"),
    Case("finite-difference", "tail"),
    Case("finite-difference", "tail", passes=4),
    Case("exact", "last"),
    Case("exact", "tail"),
    Case("exact", "tail", passes=4),
    Case("finite-difference", "last", chains=3),
    Case("finite-difference", "tail", chains=3),
    Case("finite-difference", "tail", chains=3, passes=4),
    Case("exact", "tail", chains=3),
]


def network(layers: int, width: int) -> nn.Sequential:
    """Equal layers without biases, initialised to pass signals on at their size."""
    torch.manual_seed(0)
    parts: list[nn.Module] = []
    for _ in range(layers):
        linear = nn.Linear(width, width, bias=False)
        nn.init.xavier_normal_(linear.weight)
        parts += [linear, nn.Tanh()]
    return nn.Sequential(*parts[:-1]).eval()


def watch(model: nn.Module, run: Callable[[], object], before: Iterable[Tensor] = ()) -> LiveBytes:
    """Count bytes while ``run`` runs, the model's left out and ``before``'s included."""
    with LiveBytes(ignored=[*model.parameters(), *model.buffers()]) as watched:
        watched.count(before)
        run()
    return watched


def measure(case: Case, layers: int, width: int, steps: int) -> dict[str, Any]:
    """Peaks of one case, in copies of the parameters."""
    model = network(layers, width)
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(EXAMPLES, width, generator=generator)
    data = [(x, i) for i, x in enumerate(inputs)]
    batch = 4 if case.passes > 1 else 2
    # A batch of the residual is four times as large, but no larger than the data: it fits in a pass as well.
    micro_batch = batch // case.passes if case.passes > 1 else EXAMPLES
    operator = GaussNewton(model, Classification(), data, product=case.product, micro_batch=micro_batch)
    system = Damped(operator, _DAMPING)
    rhs = operator.gradients([data[0]]).column(0).clone()
    spectrum = Spectrum(
        trace=Estimate(_TRACE), frobenius=Estimate(_LAMBDA_MAX), lambda_max=Estimate(_LAMBDA_MAX)
    )
    plan = Plan.from_spectrum(spectrum, _DAMPING, chains=case.chains)
    plan = plan.replace(batch_size=batch, num_steps=steps)
    solver = Lissa(plan, average=case.average, tail=1.0, recover=False)

    def advance() -> None:
        state = solver.begin(system, rhs, generator=generator)
        while not solver.done(state):
            solver.step(system, rhs, state)

    def solve() -> None:
        solver.solve(system, rhs, generator=generator)

    watched = watch(model, advance if case.chains == 1 else solve, before=rhs.values())
    peak = watched.peak / rhs.nbytes
    return {
        **asdict(case),
        "claimed_copies": case.claim,
        "peak_copies": peak,
        "peak_in": watched.peak_in,
        "activations": activation_copies(model, inputs[:micro_batch], rhs),
        "one_layer": 1 / layers,
        "within_claim": peak <= case.claim + ALLOWANCE / layers,
        "planned_copies": plan.memory_copies,
    }


def activation_copies(model: nn.Module, inputs: Tensor, copy: ParamVector) -> float:
    """What a forward pass over one micro-batch keeps for its backward, in copies: to see that it is little."""
    kept: list[Tensor] = []
    return watch(model, lambda: kept.append(model(inputs)), before=[inputs.clone()]).peak / copy.nbytes


def _solver_function() -> str:
    """The innermost function of whence's solvers that is running."""
    frame = sys._getframe()
    while frame is not None and not frame.f_globals.get("__name__", "").startswith("whence.solvers"):
        frame = frame.f_back
    return "" if frame is None else frame.f_code.co_name


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a smaller model, nothing saved")
    options = parser.parse_args()
    layers, width, steps = (16, 256, 3) if options.quick else (32, 1024, 4)
    results = [measure(case, layers, width, steps) for case in CASES]
    rows = [
        (
            case.name,
            case.claim,
            f"{result['peak_copies']:.2f}",
            "PASS" if result["within_claim"] else "MISS",
            result["peak_in"],
            result["planned_copies"],
            f"{result['activations']:.3f}",
        )
        for case, result in zip(CASES, results, strict=True)
    ]
    report(
        f"Copies of the parameters beside the model: {layers} layers of {width}×{width}, each {1 / layers:.3f} of a "
        f"copy; {ALLOWANCE} layers are allowed on top of the claim",
        ("", "claimed", "measured", "", "peak in", "Plan.memory_copies", "activations"),
        rows,
    )
    settings = {"layers": layers, "width": width, "steps": steps, "allowed_layers": ALLOWANCE}
    if not options.quick:
        save("memory", {"settings": settings, "cases": results})


if __name__ == "__main__":
    main()
