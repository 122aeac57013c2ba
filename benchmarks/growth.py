"""How seconds and memory grow: with parameters, length of sequences, queries and data.

    python -m benchmarks.growth

A Llama with random weights, a whole `whence.attribute` each time: the quick answer (EK-FAC), and LiSSA with a fixed
number of steps. One of four sizes is varied at a time, over three values. Seconds are CPU seconds of one thread; bytes
are the most that tensors took at once beside the model (`benchmarks.memory`). The exponent is the slope of a straight
line through the logarithms: 1 is linear. Wanted: nothing that grows faster than linearly, and memory not at all with
the data.

Results go to ``benchmarks/results/growth.json``.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from time import process_time
from typing import Any

import torch
from torch import Tensor

from benchmarks.memory import watch
from benchmarks.timing import report, save
from whence import Estimate, LanguageModeling, Lissa, Plan, Spectrum, attribute

VOCABULARY, DAMPING, STEPS = 512, 1.0, 4
#: What an exponent may be: a little over 1, as attention is quadratic in the length and small matrices are slow.
LINEAR, CONSTANT = 1.15, 0.1


@dataclass(frozen=True)
class Size:
    """What is varied."""

    width: int = 128
    tokens: int = 32
    queries: int = 2
    examples: int = 24


VARIED: dict[str, tuple[int, ...]] = {
    "width": (128, 192, 288),
    "tokens": (16, 32, 64),
    "queries": (2, 4, 8),
    "examples": (24, 72, 216),
}


def llama(width: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=3,
        num_attention_heads=width // 32, max_position_embeddings=256,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def sequences(count: int, tokens: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCABULARY, (tokens,), generator=generator) for _ in range(count)]


def asking(size: Size, solver: str) -> tuple[Any, Callable[[], object]]:
    """A model, and the attribution to be measured."""
    model = llama(size.width)
    data, queries = sequences(size.examples, size.tokens, 1), sequences(size.queries, size.tokens, 2)
    given: dict[str, Any] = {"accuracy": "quick"}
    if solver == "lissa":
        one = Estimate(1.0)
        plan = Plan.from_spectrum(Spectrum(trace=one, frobenius=one, lambda_max=one), DAMPING, chains=2)
        plan = plan.replace(batch_size=4 * size.tokens, num_steps=STEPS)
        given = {"solver": Lissa(plan, recover=False, residual_batches=2)}
    task = LanguageModeling()
    return model, lambda: attribute(
        model, data, queries, task=task, damping=DAMPING, baseline=False, micro_batch=4, **given
    )


def measure(size: Size, solver: str) -> dict[str, Any]:
    model, run = asking(size, solver)
    begun = process_time()
    run()
    seconds = process_time() - begun
    return {
        **asdict(size),
        "parameters": sum(p.numel() for p in model.parameters()),
        "seconds": seconds,
        "bytes": watch(model, run).peak,
    }


def exponent(sizes: list[float], values: list[float]) -> float:
    """The slope of log(value) over log(size), by least squares."""
    x, y = ([math.log(v) for v in row] for row in (sizes, values))
    mx, my = sum(x) / len(x), sum(y) / len(y)
    return sum((a - mx) * (b - my) for a, b in zip(x, y, strict=True)) / sum((a - mx) ** 2 for a in x)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.growth", description=__doc__.split("\n")[0])
    parser.parse_args()
    torch.set_num_threads(1)
    asking(Size(examples=8), "quick")[1]()  # what a first call costs is another question
    found: dict[str, Any] = {}
    rows = []
    for solver in ("quick", "lissa"):
        for name, values in VARIED.items():
            measured = [measure(replace(Size(), **{name: value}), solver) for value in values]
            along = "parameters" if name == "width" else name
            sizes = [float(row[along]) for row in measured]
            grown = {kind: exponent(sizes, [row[kind] for row in measured]) for kind in ("seconds", "bytes")}
            allowed = CONSTANT if name == "examples" else LINEAR
            fine = grown["seconds"] <= LINEAR and grown["bytes"] <= allowed
            found[f"{solver}, {along}"] = {"measured": measured, "exponents": grown, "within": fine}
            rows.append(
                (
                    solver,
                    f"{along}: {', '.join(f'{size:,.0f}' for size in sizes)}",
                    *(", ".join(f"{row['seconds']:.1f}" for row in measured), f"{grown['seconds']:.2f}"),
                    *(", ".join(f"{row['bytes'] / 1e6:.0f}" for row in measured), f"{grown['bytes']:.2f}"),
                    "PASS" if fine else "MISS",
                )
            )
            print(rows[-1], flush=True)
            save("growth", {"steps of LiSSA": STEPS, "growth": found})  # so far
    report(
        "Growth of a whole attribution, one size varied at a time",
        ("", "varied", "CPU seconds", "exponent", "MB beside the model", "exponent", ""),
        rows,
    )


if __name__ == "__main__":
    main()
