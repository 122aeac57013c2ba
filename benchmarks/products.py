"""What a Gauss-Newton product costs, in gradients of the training loss on the same batch.

    python -m benchmarks.products [--repeats N] [--quick] [--models gpt2 llama resnet]

Contenders, interleaved in one run: whence's exact product, its central differences, one step of LiSSA by
one-sided differences of random sign, and the exact product of curvlinops. They are compared numerically before
they are timed. Targets are printed beside the measurements; missing one is not an error.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

from benchmarks.models import IGNORED, WORKLOADS, Workload
from benchmarks.timing import interleaved, ratios, report, save
from whence import Damped, GaussNewton, ParamVector, keep_freed_memory
from whence.model.gauss_newton import SampledGaussNewton

GRADIENT, EXACT, CENTRAL, STEP = "gradient", "whence exact", "whence central", "whence LiSSA step"
PEER = "curvlinops GGN"
#: Contender -> gradients that it may cost.
TARGETS = {EXACT: 2.2, CENTRAL: 1.9, STEP: 1.5}
#: Relative difference that a product may have from curvlinops'; for a step of LiSSA see `one_sided`.
TOLERANCE = {EXACT: 1e-3, CENTRAL: 1e-3, STEP: 5e-2}
CONDITION_NUMBER = 200.0


@dataclass
class LissaStep:
    """One chain of LiSSA on the whole batch: ``u ← u - η[(H̃ + λ)u - g]``, with a fresh draw each time."""

    system: Damped
    gradient: ParamVector
    step_size: float
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))

    def __post_init__(self) -> None:
        self.iterate = self.gradient.clone().scale_(1 / self.system.damping)

    def __call__(self) -> None:
        sampled = self.system.sample(self.system.num_terms, self.generator)
        sampled.add_matvec_(self.iterate, self.iterate, -self.step_size)
        self.iterate.axpy_(self.step_size, self.gradient)


def curvlinops_product(workload: Workload, vector: ParamVector) -> Callable[[], list[torch.Tensor]]:
    """The product of curvlinops' operator with ``vector``, on the same batch and parameters."""
    from curvlinops import GGNLinearOperator

    operator = GGNLinearOperator(
        workload.logits,
        nn.CrossEntropyLoss(reduction="mean", ignore_index=IGNORED),
        list(workload.parameters.values()),
        [(workload.inputs, workload.targets)],
        check_deterministic=False,
    )
    entries = [vector[name] for name in workload.parameters]
    return lambda: operator @ entries


def largest_eigenvalue(operator: GaussNewton, start: ParamVector, products: int = 4) -> float:
    """Power iteration: near enough for a step size."""
    vector = start
    for _ in range(products):
        image = operator.matvec(vector)
        value = float(image.norm() / vector.norm())
        vector = image.scale_(1 / float(image.norm()))
    return value


def one_sided(differences: GaussNewton, vector: ParamVector) -> ParamVector:
    """The product that a step of LiSSA takes, on the whole batch in place of a draw from it.

    Its error is of first order in the step δ; the random signs of a path make it cancel on average.
    """
    return SampledGaussNewton(differences, torch.arange(len(differences.terms)), sign=1).matvec(vector)


def relative_error(product: ParamVector, reference: ParamVector) -> float:
    return float(product.clone().axpy_(-1.0, reference).norm() / reference.norm())


def prepare(workload: Workload) -> tuple[dict[str, Callable[[], object]], dict[str, float]]:
    """The contenders on one workload, warmed up, and their relative errors against curvlinops.

    Raises:
        RuntimeError: where a product is not what curvlinops computes, or LiSSA diverged.
    """
    one_pass = len(workload.data)  # the gradient takes the batch in one pass, so everybody does
    exact, differences = (
        GaussNewton(workload.model, workload.task, workload.data, product=product, micro_batch=one_pass)
        for product in ("exact", "finite-difference")
    )
    vector = exact.zeros().randn_like(torch.Generator().manual_seed(0))
    peer = curvlinops_product(workload, vector)
    for _ in range(3):  # the first finite differences spend forwards on finding their step
        differences.matvec(vector)

    reference = ParamVector(dict(zip(workload.parameters, peer(), strict=True)))
    errors = {
        EXACT: relative_error(exact.matvec(vector), reference),
        CENTRAL: relative_error(differences.matvec(vector), reference),
        STEP: relative_error(one_sided(differences, vector), reference),
    }
    for name, error in errors.items():
        if not error <= TOLERANCE[name]:
            raise RuntimeError(f"{workload.name}: {name} differs from curvlinops by {error:.2g}, relatively")

    # LiSSA has its own operator, so that its step δ follows its iterate and not the vector of the others.
    along_path = GaussNewton(
        workload.model, workload.task, workload.data, product="finite-difference", micro_batch=one_pass
    )
    lambda_max = largest_eigenvalue(exact, vector)
    damping = lambda_max / CONDITION_NUMBER
    gradient = ParamVector(dict(zip(workload.parameters, workload.gradient(), strict=True)))
    step = LissaStep(Damped(along_path, damping), gradient, 0.5 / (lambda_max + damping))
    for _ in range(10):
        step()
    if not step.iterate.is_finite():
        raise RuntimeError(f"{workload.name}: LiSSA diverged")
    contenders: dict[str, Callable[[], object]] = {
        GRADIENT: workload.gradient,
        EXACT: lambda: exact.matvec(vector),
        CENTRAL: lambda: differences.matvec(vector),
        STEP: step,
        PEER: peer,
    }
    return contenders, errors


def measure(workload: Workload, repeats: int, clock: Callable[[], float]) -> dict[str, Any]:
    """Time one workload, print its table and return what goes to disk."""
    contenders, errors = prepare(workload)
    seconds = interleaved(contenders, repeats, clock=clock)
    to_gradient, to_peer = ratios(seconds, GRADIENT), ratios(seconds, PEER)
    rows, results = [], {}
    for name in contenders:
        target = TARGETS.get(name)
        within = None if target is None else to_gradient[name].median <= target
        faster = None if target is None else to_peer[name].median < 1
        results[name] = {
            "gradients": asdict(to_gradient[name]),
            "of_curvlinops": asdict(to_peer[name]),
            "relative_error": errors.get(name),
            "target": target,
            "within_target": within,
            "faster_than_curvlinops": faster,
            "seconds": seconds[name],
        }
        rows.append(
            (
                name,
                f"{sorted(seconds[name])[repeats // 2] * 1e3:.0f} ms",
                to_gradient[name],
                "" if target is None else f"≤ {target}",
                _verdict(within),
                to_peer[name],
                _verdict(faster),
                f"{errors[name]:.0e}" if name in errors else "",
            )
        )
    count = sum(parameter.numel() for parameter in workload.parameters.values())
    title = f"{workload.name}: {count:,} parameters, batch {tuple(workload.inputs.shape)}, {repeats} rounds"
    report(
        title,
        ("", "median", "gradients", "target", "", "of curvlinops", "faster", "error"),
        rows,
    )
    return {"parameters": count, "batch": list(workload.inputs.shape), "contenders": results}


def _verdict(passed: bool | None) -> str:
    return "" if passed is None else "PASS" if passed else "MISS"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.products", description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=21, help="timed rounds (21)")
    parser.add_argument(
        "--quick", action="store_true", help="3 rounds, nothing saved: whether it runs, not how fast"
    )
    parser.add_argument("--models", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--threads", type=int, help="threads of torch (its own default)")
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="one thread's CPU time in place of the wall's: for a machine that is busy with other things",
    )
    parser.add_argument(
        "--default-malloc", action="store_true", help="let glibc return freed memory to the kernel"
    )
    options = parser.parse_args()
    kept = not options.default_malloc and keep_freed_memory()
    if options.cpu_time or options.threads:
        torch.set_num_threads(1 if options.cpu_time else options.threads)
    repeats = 3 if options.quick else options.repeats
    clock = time.process_time if options.cpu_time else time.perf_counter
    results = {name: measure(WORKLOADS[name](), repeats, clock) for name in options.models}
    settings = {"repeats": repeats, "clock": clock.__name__, "freed_memory_kept": kept}
    if not options.quick:
        save("products", {"settings": settings, "workloads": results})


if __name__ == "__main__":
    main()
