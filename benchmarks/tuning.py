"""Does `whence.tune` choose well? λ chosen on 20 halves of each work, judged on all of its other halves.

    python -m benchmarks.tuning [NAME …]

Every draw takes other halves, one seed each, of the kept ground truth (`benchmarks.truth`) to choose on. The truth is
the linear datamodeling score on the remaining halves, all seeds together.
"""

from __future__ import annotations

import argparse
from statistics import fmean
from typing import Any

import torch

from benchmarks.damping import SEED, recipe_of
from benchmarks.timing import report, save
from benchmarks.truth import truth
from benchmarks.works import WORKS, Work, work
from whence import Tuning, attribute, linear_datamodeling_score
from whence.validation import Outcomes

#: Works that are quick to solve for.
NAMES = ("cancer", "wine", "diabetes", "diamonds", "digits", "digits-deep")
HALVES, PARTS = 20, [2.0**k for k in range(-6, 6)]


def measure(of: Work, *, with_recipe: bool, draws: int) -> dict[str, Any]:
    """Means over draws of what tuning claims and what came of it."""
    trained = of.fit(range(len(of.train_set())), SEED)
    solve = attribute(
        trained.model,
        of.train_set(),
        of.asked(),
        task=of.task,
        training=recipe_of(trained) if with_recipe else None,
        damping=f"auto/{PARTS[-1]:g}",
        solver="cg",
        baseline=False,
    )
    auto = solve.solve.plan.damping * PARTS[-1]
    dampings, whole = [auto / part for part in PARTS], truth(of)
    generator = torch.Generator().manual_seed(1)
    rows = []
    for draw in range(draws):
        order = torch.randperm(len(whole.subsets), generator=generator)
        used, rest = order[:HALVES], order[HALVES:]
        seed = [draw % len(whole.seeds)]
        few = Outcomes(whole.losses[used][:, seed], whole.subsets[used], (0,))
        found = Tuning.of(solve, few, auto=auto, dampings=dampings, generator=generator)
        others = Outcomes(whole.losses[rest], whole.subsets[rest], whole.seeds)
        true = [
            linear_datamodeling_score(scores, others, bootstrap=40, generator=generator).value
            for scores in solve.over_damping(dampings).scores[:, :, solve.indices.argsort()]
        ]
        chosen, own = dampings.index(found.damping), dampings.index(auto)
        gained = true[chosen] - true[own]
        rows.append(
            {
                "auto": true[own],
                "possible": max(true) - true[own],
                "gain": found.gain.value,
                "held_out": found.held_out,
                "true": gained,
                "advised": found.worthwhile,
                "followed": gained if found.worthwhile else 0.0,
                "sure": found.sure,
                "right": abs(true.index(max(true)) - chosen) <= 1,
            }
        )
    means = {name: fmean(row[name] for row in rows) for name in rows[0]}
    return {"name": of.name, "recipe": with_recipe, "draws": draws, **means}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tuning", description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(WORKS)}; by default {NAMES}")
    parser.add_argument("--draws", type=int, default=12, help="of halves to choose on (12)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name in options.names or NAMES:
        for with_recipe in (False, True):
            rows.append(measure(work(name), with_recipe=with_recipe, draws=options.draws))
            print(rows[-1], flush=True)
    save("tuning", {"halves": HALVES, "works": rows})
    report(
        f"LDS gained over damping='auto' by λ chosen on {HALVES} halves, judged on others",
        ("", "auto", "best λ", "claimed", "held out", "chosen", "advised", "as advised", "sure", "right"),
        [
            (
                f"{row['name']}{', recipe' if row['recipe'] else ''}",
                f"{row['auto']:.3f}",
                *(f"{row[key]:+.3f}" for key in ("possible", "gain", "held_out", "true")),
                f"{row['advised']:.0%}",
                f"{row['followed']:+.3f}",
                f"{row['sure']:.2f}",
                f"{row['right']:.2f}",
            )
            for row in rows
        ],
    )


if __name__ == "__main__":
    main()
