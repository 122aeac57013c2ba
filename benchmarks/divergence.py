"""Does a solve diverge, and what does that cost? Seeded runs of LiSSA where tails are heavy, and of the defaults.

    python -m benchmarks.divergence [PART …] [--seeds N] [--code NAME]

`tails`: linear regression on 2,000 random inputs, of which one in a hundred is six times as long, by the paper's plan
(C = 2). `measured`: the same by the plan that `whence.attribute` makes, from a spectrum measured with the run's seed.
`llama`: LiSSA on the fine-tuned Llama by the paper's plan, one chain. `default`: `whence.attribute` with nothing but a
seed, on the Llama. Rows are kept by part, code and seed in ``benchmarks/results/divergence.json``, and those that are
there are not measured again. To compare with other code, check that out beside this and put it first in PYTHONPATH,
with a name.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.damping import SEED
from benchmarks.timing import RESULTS, environment, report
from benchmarks.works import work
from whence import (
    ConjugateGradient,
    Damped,
    GaussNewton,
    Lissa,
    ParamVector,
    Plan,
    Regression,
    attribute,
    estimate_spectrum,
)
from whence.errors import DivergenceError
from whence.scoring import Scorer

PATH = RESULTS / "divergence.json"
KAPPA = 50.0
#: Inputs and their dimension; one of how many is long, and how much longer.
INPUTS, WIDTH, RARE, LONGER = 2000, 50, 100, 6.0


@cache
def llama() -> tuple[Any, Any, Any, Any]:
    of = work("llama")
    train = of.train_set()
    return of.fit(range(len(train)), SEED).model, of.task, train, of.asked()


@cache
def problem(name: str) -> tuple[GaussNewton, Plan, ParamVector, Tensor]:
    """The operator, the paper's plan, a query's gradient and its exact scores."""
    if name == "tails":
        x = torch.randn(INPUTS, WIDTH, generator=torch.Generator().manual_seed(0))
        x[::RARE] *= LONGER
        examples = list(zip(x, torch.zeros(INPUTS, 1), strict=True))
        gnh = GaussNewton(nn.Linear(WIDTH, 1, bias=False).eval(), Regression(), examples)
        asked = [(torch.randn(WIDTH, generator=torch.Generator().manual_seed(1)), torch.ones(1))]
    else:
        model, task, train, asked = llama()
        gnh = GaussNewton(model, task, train)
    spectrum = estimate_spectrum(gnh, generator=torch.Generator().manual_seed(0))
    chains = 4 if name == "tails" else 1
    plan = Plan.from_spectrum(spectrum, spectrum.lambda_max.value / KAPPA, chains=chains)
    g = gnh.gradients(asked[:1]).column(0)
    if name != "tails":
        return gnh, plan, g, torch.empty(0)  # exact scores would take longer than all the rest
    exact = ConjugateGradient(tolerance=1e-4).solve(Damped(gnh, plan.damping), g, generator=torch.Generator())
    return gnh, plan, g, scores(gnh, exact.value)


def scores(gnh: GaussNewton, u: ParamVector) -> Tensor:
    return Scorer(gnh, ParamVector.stack([u])).score(torch.arange(len(gnh.terms)))[0]


def by_lissa(name: str, seed: int) -> dict[str, Any]:
    gnh, plan, g, exact = problem("llama" if name == "llama" else "tails")
    if name == "measured":
        spectrum = estimate_spectrum(gnh, generator=torch.Generator().manual_seed(seed))
        plan = Plan.tuned(spectrum, plan.damping, num_terms=gnh.num_terms, refine=1.0)
    try:
        found = Lissa(plan).solve(Damped(gnh, plan.damping), g, generator=torch.Generator().manual_seed(seed))
    except DivergenceError as error:
        return {"gave_up": True, "why": str(error)}
    row = {
        "gave_up": False,
        "diverged": sum("diverged" in event for event in found.stats.events),
        "cost": found.stats.num_term_products / plan.num_term_products,
        "batch": [plan.batch_size, None if found.stats.plan is None else found.stats.plan.batch_size],
        "residual": float(found.residual),
    }
    if len(exact):
        row["correlation"] = float(torch.corrcoef(torch.stack([scores(gnh, found.value), exact]))[0, 1])
    return row


def by_default(_: str, seed: int) -> dict[str, Any]:
    model, task, train, asked = llama()
    found = attribute(model, train, asked, task=task, seed=seed, baseline=False)
    return {
        "gave_up": False,
        "solver": found.solve.solver,
        "diverged": sum("diverged" in event for event in found.solve.events),
        "accuracy": found.accuracy,
        "finite": bool(found.scores.isfinite().all() & found.stderr.isfinite().all()),
    }


PARTS: dict[str, tuple[Callable[[str, int], dict[str, Any]], int]] = {
    "tails": (by_lissa, 20),
    "measured": (by_lissa, 20),
    "llama": (by_lissa, 5),
    "default": (by_default, 100),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.divergence", description=__doc__.split("\n")[0]
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all by default")
    parser.add_argument("--seeds", type=int, help="how many, in place of 20, 5 and 100")
    parser.add_argument("--code", default="this", help="a name for the code that runs")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # what is warned of is counted
    found = json.loads(PATH.read_text()) if PATH.exists() else {"runs": {}}
    for part in options.parts or PARTS:
        run, seeds = PARTS[part]
        rows = found["runs"].setdefault(f"{part}, {options.code}", {})
        for seed in range(options.seeds or seeds):
            if str(seed) in rows:
                continue
            begun = time.process_time()
            row = run(part, seed)
            rows[str(seed)] = {**row, "cpu_seconds": time.process_time() - begun}
            found["environment"] = environment()
            PATH.write_text(json.dumps(found, indent=1) + "\n")
            print(part, options.code, seed, rows[str(seed)], flush=True)
    report(
        "seeded runs; cost in that of the plan",
        ("", "runs", "diverged", "times", "gave up", "mean cost", "dearest", "least correlation"),
        [line(name, list(rows.values())) for name, rows in found["runs"].items()],
    )


def line(name: str, rows: list[dict[str, Any]]) -> tuple[str, ...]:
    ended = [row for row in rows if not row["gave_up"]]
    costs = [row["cost"] for row in ended if "cost" in row]
    correlations = [row["correlation"] for row in ended if "correlation" in row]
    return (
        name,
        str(len(rows)),
        str(sum(row["diverged"] > 0 for row in ended)),
        str(sum(row["diverged"] for row in ended)),
        str(len(rows) - len(ended)),
        f"{sum(costs) / len(costs):.2f}" if costs else "",
        f"{max(costs):.2f}" if costs else "",
        f"{min(correlations):.3f}" if correlations else "",
    )


if __name__ == "__main__":
    main()
