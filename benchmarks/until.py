"""Does ``until="top-10 stable"`` stop, and is the claimed set the right one? A hundred seeded runs on digits.

Every run asks about another test image, with another seed. A claim is right if the ten examples it names are the ten
best by exact scores, which conjugate gradients in float64 have proven to a millionth of their size.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from typing import Any

import torch
from scipy.stats import binomtest

import whence
from benchmarks.problems import exact_scores_of_digits
from benchmarks.timing import RESULTS, report, save
from reproduction.provenance import commit
from whence import Classification
from whence.attribution.ranking import top_is_separated
from whence.demo.digits import load_digits_with_flipped_labels, train_digits
from whence.errors import WhenceWarning
from whence.progress import track

#: Solver, λ, accuracy of the first round: LiSSA's cost grows with λmax/λ, so it is asked at a larger λ.
SETTINGS = (("auto", "auto", 0.995), ("lissa", "lambda_max/20", 0.99))


def runs(solver: Any, damping: str, accuracy: float, count: int) -> dict[str, Any]:
    """Claims, and how many of them are right."""
    data = load_digits_with_flipped_labels()
    model = train_digits(data.train)
    begun, claimed, right = time.perf_counter(), 0, 0
    for seed in track(range(count), f"runs with {solver}"):
        options: dict[str, Any] = {
            "task": Classification(),
            "damping": damping,
            "baseline": False,
            "seed": seed,
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", WhenceWarning)
            found = whence.attribute(
                model, data.train, [data.test[seed]], solver=solver, accuracy=accuracy, until="top-10 stable",
                budget=32.0, **options,
            )  # fmt: skip
        exact = exact_scores_of_digits(model, range(seed, seed + 1), found.solve.plan.damping)
        sets = [{row.index for row in found.top(10)}, set(exact[0].topk(10).indices.tolist())]
        if bool(top_is_separated(found.scored, 10, 0.95)):
            claimed += 1
            right += sets[0] == sets[1]
    share = binomtest(right, claimed).proportion_ci(0.95, "wilson") if claimed else None
    return {
        "solver": solver, "damping": damping, "runs": count, "claimed": claimed, "right": right,
        "low": share and share.low, "high": share and share.high, "seconds": time.perf_counter() - begun,
    }  # fmt: skip


def main() -> None:
    names = [solver for solver, _, _ in SETTINGS]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.until", description=__doc__.split("\n")[0])
    parser.add_argument(
        "solvers", nargs="*", help=f"of {', '.join(names)} (all); the others' results are kept"
    )
    parser.add_argument("--runs", type=int, default=100, help="seeded runs of each solver (100)")
    options = parser.parse_args()
    unknown = set(options.solvers) - set(names)
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    torch.set_num_threads(1)  # many small products
    saved = RESULTS / "until.json"
    rows = (
        {row["solver"]: row for row in json.loads(saved.read_text())["results"]["rows"]}
        if saved.exists()
        else {}
    )
    for settings in SETTINGS:
        if settings[0] in (options.solvers or names):
            rows[settings[0]] = {**runs(*settings, options.runs), "commit": commit()}
    report(
        'until="top-10 stable" at a confidence of 0.95',
        ("solver", "λ", "stopped with a claim", "right claims", "95% interval"),
        [
            (
                row["solver"],
                row["damping"],
                f"{row['claimed']} of {row['runs']}",
                f"{row['right']} of {row['claimed']}",
                f"{row['low']:.3f} to {row['high']:.3f}" if row["claimed"] else "",
            )
            for row in rows.values()
        ],
    )
    save("until", {"rows": list(rows.values())})


if __name__ == "__main__":
    main()
