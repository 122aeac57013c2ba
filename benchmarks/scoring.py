"""Scoring a training set: directional derivatives beside one backward per example and vmap(grad).

Two questions, each answered in interleaved rounds. How fast is each way for one query, on a 6-layer 384-wide Llama
and 128 tokens? And where do directional derivatives and per-example gradients really cross, as the number of
directions grows, beside where the cost model of `whence.scoring.cost` says that they do?
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from benchmarks.models import TOKENS, VOCABULARY, Workload, gpt2, llama, resnet
from benchmarks.timing import Quartiles, interleaved, report, save
from whence import Classification, GaussNewton, ParamVector, keep_freed_memory
from whence.scoring import Scorer
from whence.scoring.cost import count_work
from whence.scoring.derivatives import DirectionalDerivatives, gradient_products
from whence.tasks import Batch

SEQUENCES = 32
BACKWARD = "one backward per example"
EXACT = "directional, exact"
CENTRAL = "directional, two forwards"
VMAP = "vmap(grad)"
FLOOR = "two plain forwards: the floor"
#: How many times as fast as one backward per example, and as vmap, each must be.
TARGETS = {EXACT: 1.5, CENTRAL: 2.3}
TIMES_VMAP = 8.0
DIRECTIONS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)


def sequences(count: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [{"input_ids": torch.randint(VOCABULARY, (TOKENS,), generator=generator)} for _ in range(count)]


def backward_per_example(model: nn.Module, direction: ParamVector, tokens: Tensor) -> Tensor:
    """What one writes by hand: a gradient, and its inner product with the direction."""
    parameters = dict(model.named_parameters())
    scores = []
    for row in tokens:
        logits = model(input_ids=row.unsqueeze(0), use_cache=False).logits[0, :-1]
        loss = nn.functional.cross_entropy(logits, row[1:])
        gradients = torch.autograd.grad(loss, list(parameters.values()))
        scores.append(sum((g * direction[n]).sum() for n, g in zip(parameters, gradients, strict=True)))
    return torch.stack(scores).detach()


def vmapped(model: nn.Module, direction: ParamVector, tokens: Tensor) -> Tensor:
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(theta: dict[str, Tensor], row: Tensor) -> Tensor:
        logits = functional_call(model, theta, (), {"input_ids": row.unsqueeze(0), "use_cache": False}).logits
        return nn.functional.cross_entropy(logits[0, :-1], row[1:])

    gradients = vmap(grad(loss), in_dims=(None, 0))(parameters, tokens)
    return torch.stack([(g * direction[n]).flatten(1).sum(1) for n, g in gradients.items()]).sum(0)


def plain_forwards(model: nn.Module, tokens: Tensor, at_once: int) -> Tensor:
    """What no difference of two forwards can be faster than."""
    with torch.no_grad():
        for rows in tokens.split(at_once):
            for _ in range(2):
                logits = model(input_ids=rows, use_cache=False).logits
    return logits


def one_query(repeats: int) -> dict[str, Any]:
    """The Llama, one direction; sequences per pass as whence chooses them."""
    workload, (query, *data) = llama(), sequences(1 + SEQUENCES)
    model = workload.model
    tokens = torch.stack([row["input_ids"] for row in data])
    ways: dict[str, Callable[[], Tensor]] = {}
    for name, product in ((EXACT, "exact"), (CENTRAL, "finite-difference")):
        gnh = GaussNewton(model, workload.task, data, product=product)
        direction = gnh.gradients([query])
        scorer = Scorer(gnh, direction, method="directional")
        ways[name] = lambda scorer=scorer: scorer.score(torch.arange(SEQUENCES))[0]
    column = direction.column(0)
    ways[BACKWARD] = lambda: backward_per_example(model, column, tokens)
    ways[VMAP] = lambda: vmapped(model, column, tokens)
    truth = ways[BACKWARD]().double()
    errors = {name: float(((way() - truth).abs() / truth.abs().max()).max()) for name, way in ways.items()}
    errors[FLOOR] = float("nan")  # it computes no score
    ways[FLOOR] = lambda: plain_forwards(model, tokens, gnh.micro_batch)
    seconds = interleaved(ways, repeats)
    rows, results = [], {}
    for name in ways:
        faster, than_vmap = (
            Quartiles.of([b / a for a, b in zip(seconds[name], seconds[base], strict=True)])
            for base in (BACKWARD, VMAP)
        )
        target = TARGETS.get(name)
        passed = None if target is None else faster.median >= target
        beats_vmap = None if target is None else than_vmap.median >= TIMES_VMAP
        results[name] = {
            "times_as_fast_as_backward": asdict(faster),
            "times_as_fast_as_vmap": asdict(than_vmap),
            "error": None if name == FLOOR else errors[name],
            "target": target,
            "passed": passed,
            "target_of_vmap": None if target is None else TIMES_VMAP,
            "passed_vmap": beats_vmap,
            "seconds": seconds[name],
        }
        median = sorted(seconds[name])[repeats // 2]
        verdict = (
            "" if passed is None else f"{_verdict(passed)}; {TIMES_VMAP:g} × vmap: {_verdict(beats_vmap)}"
        )
        rows.append(
            (
                name,
                f"{median:.2f} s",
                faster,
                than_vmap,
                "" if name == FLOOR else f"{errors[name]:.0e}",
                target or "",
                verdict,
            )
        )
    report(
        f"One query, {SEQUENCES} sequences of {TOKENS} tokens, {repeats} rounds",
        ("", "median", "× backward's speed", "× vmap's speed", "error", "target", ""),
        rows,
    )
    return results


def digits() -> Workload:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 32), nn.Tanh(), nn.Linear(32, 10)
    ).eval()
    x, y = torch.rand(256, 64), torch.randint(10, (256,))
    return Workload("MLP", model, Classification(), list(zip(x, y, strict=True)), model, x, y)


def switch_point(workload: Workload, product: str, repeats: int) -> dict[str, Any]:
    """Where per-example gradients become cheaper, measured and as the model has it."""
    gnh = GaussNewton(workload.model, workload.task, workload.data, product=product)
    size = min(len(gnh.terms), gnh.micro_batch)
    batch, alone = gnh.terms.fetch(torch.arange(size)), gnh.terms.fetch(torch.arange(1))
    vectorised = product == "exact" and gnh.vectorises(batch, gnh.gradients(workload.data[:1]))
    work = replace(count_work(gnh, batch), batch=size)
    predicted = work.switch_point(exact=product == "exact", vectorised=vectorised)
    ratio: list[float] = []
    for k in DIRECTIONS:
        block = gnh.zeros(k).randn_like(torch.Generator().manual_seed(0))
        seconds = interleaved(
            {"directional": _directional(gnh, block, batch), "gradients": _gradients(gnh, block, alone)},
            repeats,
            warmup=1,
        )
        pairs = zip(seconds["directional"], seconds["gradients"], strict=True)
        ratio.append(Quartiles.of([d / size / g for d, g in pairs]).median)
        if ratio[-1] > 1:
            break
    return {
        "workload": workload.name,
        "product": product,
        "vectorised": vectorised,
        "predicted": predicted,
        "measured": crossing(ratio),
        "largest_tried": DIRECTIONS[-1],
        "directional_over_gradients": dict(zip(DIRECTIONS, ratio, strict=False)),
    }


def crossing(ratio: list[float]) -> float | None:
    """Directions at which the ratio is one, between the two that were measured around it; None if beyond them."""
    if ratio[-1] <= 1:
        return None
    if len(ratio) == 1:
        return float(DIRECTIONS[0])
    (below, above), (low, high) = DIRECTIONS[len(ratio) - 2 : len(ratio)], ratio[-2:]
    return below + (above - below) * (1 - low) / (high - low)


def _directional(gnh: GaussNewton, block: ParamVector, batch: Batch) -> Callable[[], Tensor]:
    derivatives = DirectionalDerivatives(gnh, block, batch)
    return lambda: derivatives.of_terms(batch)


def _gradients(gnh: GaussNewton, block: ParamVector, batch: Batch) -> Callable[[], Tensor]:
    return lambda: gradient_products(gnh, block, batch)


def _verdict(passed: bool | None) -> str:
    return "PASS" if passed else "MISS"


def _agrees(row: dict[str, Any]) -> bool:
    """Within a factor of two; beyond what was tried, both must be beyond."""
    if row["measured"] is None:
        return bool(row["predicted"] > row["largest_tried"] / 2)
    return bool(0.5 <= row["predicted"] / row["measured"] <= 2)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scoring", description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=11, help="timed rounds (11)")
    parser.add_argument("--quick", action="store_true", help="2 rounds, nothing saved")
    parser.add_argument(
        "--default-malloc", action="store_true", help="let glibc return freed memory to the kernel"
    )
    options = parser.parse_args()
    kept = not options.default_malloc and keep_freed_memory()
    repeats = 2 if options.quick else options.repeats
    speeds = one_query(repeats)
    points = []
    for build in (llama, gpt2, resnet, digits):
        for product in ("exact", "finite-difference"):
            points.append(switch_point(build(), product, max(repeats // 2, 2)))
    report(
        "Directions from which one gradient per example is cheaper",
        ("", "product", "predicted", "measured", "within a factor of two"),
        [
            (
                row["workload"],
                row["product"] + (", vectorised" if row["vectorised"] else ""),
                row["predicted"],
                f"> {row['largest_tried']}" if row["measured"] is None else f"{row['measured']:.1f}",
                _verdict(_agrees(row)),
            )
            for row in points
        ],
    )
    if not options.quick:
        save(
            "scoring",
            {
                "settings": {"repeats": repeats, "freed_memory_kept": kept},
                "one_query": speeds,
                "switch_points": points,
            },
        )


if __name__ == "__main__":
    main()
