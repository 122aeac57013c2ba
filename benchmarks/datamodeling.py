"""Do scores predict retraining? The linear datamodeling score of whence beside simpler answers, on digits.

A small network is retrained on random halves of scikit-learn's digits, with several seeds. Each method scores the
training images for test images with one model trained on all of them; its LDS is the rank correlation of summed scores
with what the retrained models' losses turned out to be.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from benchmarks.timing import report, save
from whence import Classification, Damped, GaussNewton, Lissa, Plan, attribute, linear_datamodeling_score
from whence.demo.digits import load_digits_with_flipped_labels, train_digits
from whence.validation import DatamodelingScore, compare_datamodeling_scores, half_subsets, retrain

WHENCE, DOTS, LAST = "whence, defaults", "gradient dot product", "LiSSA at the paper's plan, last iterate"


def train_on(subset: Sequence[int], seed: int) -> nn.Module:
    """Trains on some of the digits; at the top level, so that other processes find it."""
    data = load_digits_with_flipped_labels().train
    chosen = torch.tensor(list(subset))
    return train_digits(TensorDataset(*(tensor[chosen] for tensor in data.tensors)), seed=seed)


def last_iterate(model: nn.Module, train: TensorDataset, queries: list[Any], result_plan: Plan) -> Tensor:
    """The paper's plan as it stands: C = 2, central estimates, one chain, no averaging."""
    gnh = GaussNewton(model, Classification(), train)
    plan = Plan.from_spectrum(result_plan.spectrum, result_plan.damping, chains=1, errors=0.0)
    solution = Lissa(plan, average="last").solve(
        Damped(gnh, plan.damping), gnh.gradients(queries), generator=torch.Generator().manual_seed(1)
    )
    return solution.value.gram(gnh.gradients(train))


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.datamodeling", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--subsets", type=int, default=60, help="random halves (60)")
    parser.add_argument("--seeds", type=int, default=4, help="seeds for each (4)")
    parser.add_argument("--queries", type=int, default=100, help="test images (100)")
    parser.add_argument("--processes", type=int, default=2, help="that train side by side (2)")
    parser.add_argument(
        "--directory", type=Path, help="keeps retrained losses, to go on after an interruption"
    )
    parser.add_argument("--quick", action="store_true", help="8 subsets, 1 seed, 10 queries, nothing saved")
    options = parser.parse_args()
    if options.quick:
        options.subsets, options.seeds, options.queries = 8, 1, 10
    digits = load_digits_with_flipped_labels()
    queries = [digits.test[i] for i in range(options.queries)]
    generator = torch.Generator().manual_seed(0)
    subsets = half_subsets(len(digits.train), options.subsets, generator=generator)
    with tempfile.TemporaryDirectory() as scratch:
        outcomes = retrain(
            train_on,
            subsets,
            range(options.seeds),
            queries,
            task=Classification(),
            processes=options.processes,
            directory=options.directory or scratch,
            name="digits, train_digits",
        )
    model = train_digits(digits.train, seed=1000)
    result = attribute(model, digits.train, queries, task=Classification())
    methods = {
        WHENCE: result.scores,
        DOTS: result.gradient_dot_products,
        LAST: last_iterate(model, digits.train, queries, result.solve.plan),
    }
    found: dict[str, DatamodelingScore] = {
        name: linear_datamodeling_score(scores, outcomes, generator=torch.Generator().manual_seed(2))
        for name, scores in methods.items()
    }
    differences = {
        name: compare_datamodeling_scores(
            methods[WHENCE], scores, outcomes, generator=torch.Generator().manual_seed(3)
        )
        for name, scores in methods.items()
        if name != WHENCE
    }
    first = found[WHENCE]
    report(
        f"LDS on digits: {options.subsets} halves × {options.seeds} seeds, {options.queries} queries, "
        f"λ = {result.solve.plan.damping:.3g}"
        + (f", noise ceiling {first.ceiling:.3f}" if first.ceiling is not None else ""),
        ("", "LDS", "95% interval", "whence is better by"),
        [
            (
                name,
                f"{score.value:.3f}",
                f"{score.low:.3f} to {score.high:.3f}",
                ""
                if name == WHENCE
                else f"{(d := differences[name]).value:+.3f} ({d.low:+.3f} to {d.high:+.3f})",
            )
            for name, score in found.items()
        ],
    )
    if not options.quick:
        save(
            "datamodeling",
            {
                "settings": {k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items()},
                "damping": result.solve.plan.damping,
                "scores": {name: _numbers(score) for name, score in found.items()},
                "whence_less": {
                    name: {"value": d.value, "low": d.low, "high": d.high} for name, d in differences.items()
                },
            },
        )


def _numbers(score: DatamodelingScore) -> dict[str, Any]:
    numbers = asdict(score)
    return {
        **numbers,
        "per_query": score.per_query.tolist(),
        "undefined": dict(score.undefined),
        "ceiling": score.ceiling,
    }


if __name__ == "__main__":
    main()
