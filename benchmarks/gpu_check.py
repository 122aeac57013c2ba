"""Does whence work on this machine's GPU? Run once by a person who has one; prints a verdict.

    python -m benchmarks.gpu_check        (or: make gpu-check)

On a GPU and on the CPU, from the same weights: products, gradients and a whole attribution of a small network and a
small Llama, compared; the times that the host waits for the GPU in a product (`torch.cuda.set_sync_debug_mode`); and
seconds of a product over a Llama of 25 million parameters. Without a GPU it says so, and that nothing was checked.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
import warnings
from typing import Any

import torch
from torch import nn

from benchmarks.growth import llama, sequences
from whence import Classification, GaussNewton, LanguageModeling, ParamVector, attribute
from whence.tasks import Task

#: Relative differences that rounding in another order explains, TF32 switched off.
ALLOWED = {"exact": 1e-4, "finite-difference": 1e-2, "scores": 1e-2}
#: Waits in one product over one micro-batch: whether the outputs are finite.
WAITS = 1


def subjects() -> dict[str, tuple[nn.Module, Task, list[Any]]]:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)).eval()
    data = [(torch.randn(16), k % 4) for k in range(64)]
    return {
        "a network": (network, Classification(), data),
        "a Llama": (llama(64), LanguageModeling(), sequences(32, 24, 1)),
    }


def difference(found: ParamVector, expected: ParamVector) -> float:
    here = ParamVector({name: part.cpu() for name, part in found.items()}, columns=found.columns)
    return float((here.axpy_(-1.0, expected).norm() / expected.norm()).max())


def waits(operator: GaussNewton, vector: ParamVector) -> int:
    """How often the host waited in one product."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            operator.matvec(vector)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(warning.message) for warning in caught)


def check(device: torch.device) -> bool:
    fine = True

    def say(what: str, value: float, allowed: float) -> None:
        nonlocal fine
        fine &= value <= allowed
        print(
            f"{'PASS' if value <= allowed else 'FAIL'}  {what}: {value:.3g}, allowed {allowed:g}", flush=True
        )

    for name, (model, task, data) in subjects().items():
        there = copy.deepcopy(model).to(device)
        for product in ("exact", "finite-difference"):
            near = GaussNewton(model, task, data, product=product, micro_batch=len(data))
            far = GaussNewton(there, task, data, product=product, micro_batch=len(data))
            vector = near.zeros().randn_like(torch.Generator().manual_seed(0))
            sent = ParamVector({k: part.to(device) for k, part in vector.items()})
            say(
                f"{name}, {product} product",
                difference(far.matvec(sent), near.matvec(vector)),
                ALLOWED[product],
            )
            if product == "exact":
                say(f"{name}, waits in a product", waits(far, sent), WAITS)
                say(f"{name}, gradients", difference(far.gradients(data[:2]), near.gradients(data[:2])), 1e-4)
        for given in ({"solver": "cg"}, {"accuracy": "quick"}):
            ours, theirs = (
                attribute(which, data, data[:2], task=task, damping=0.1, **given).scores
                for which in (there, model)
            )
            say(f"{name}, scores ({given})", float((ours - theirs).norm() / theirs.norm()), ALLOWED["scores"])
    big = GaussNewton(llama(768).to(device), LanguageModeling(), sequences(32, 128, 1))
    vector = big.zeros().randn_like(torch.Generator().manual_seed(0))
    big.matvec(vector)
    torch.cuda.synchronize()
    begun = time.perf_counter()
    big.matvec(vector)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - begun
    print(
        f"      a product over 4,096 tokens, {big.num_parameters / 1e6:.0f} million parameters: {seconds:.3f} s"
    )
    print(f"      peak memory: {torch.cuda.max_memory_allocated() / 1e9:.2f} GB")
    return fine


def main() -> int:
    argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_check", description=__doc__.split("\n")[0]
    ).parse_args()
    if not torch.cuda.is_available():
        print("VERDICT: nothing was checked. PyTorch sees no GPU here (torch.cuda.is_available() is False).")
        return 2
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    fine = check(torch.device("cuda", torch.cuda.current_device()))
    print(
        f"VERDICT: {'whence works on this GPU.' if fine else 'something is wrong on this GPU: see FAIL above.'}"
    )
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
