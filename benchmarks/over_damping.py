"""What twelve λ cost beside one: a solve at the smallest with its scores, alone and with those of all larger λ.

    python -m benchmarks.over_damping [NAME …] [--rounds N]

Both solve for all queries of a work in the metric of the gradients' second moment, at a sixteenth of the λ that
``damping="auto"`` begins with, and score the training examples: one along the solution, one by what its products
showed of the examples, for twelve λ from there on. Seconds of one core, in turn.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict
from typing import Any

import torch

from benchmarks.damping import SEED
from benchmarks.timing import Quartiles, interleaved, ratios, report, save
from benchmarks.works import WORKS, Work, work
from whence import ConjugateGradient, Damped, GaussNewton
from whence.attribution.damping import GUESS
from whence.model.second_moment import root_second_moment
from whence.scoring import Scorer

NAMES = ("digits", "diabetes", "diamonds", "mnist")
COUNT, BELOW = 12, 16.0


def measure(of: Work, rounds: int) -> dict[str, Any]:
    """Seconds of both ways, and their ratio."""
    train = of.train_set()
    gnh = GaussNewton(of.fit(range(len(train)), SEED).model, of.task, train)
    gnh = gnh.in_metric(root_second_moment(gnh, generator=torch.Generator().manual_seed(0)))
    gradients, smallest = gnh.gradients(of.asked()), GUESS / BELOW
    dampings = [smallest * 2**k for k in range(COUNT)]

    def one() -> object:
        solver = ConjugateGradient(score_error=0.05, verify=False)
        solved = solver.solve(Damped(gnh, smallest), gradients, generator=torch.Generator())
        return Scorer(gnh, solved.value).score(torch.arange(len(train)))

    def all_of_them() -> object:
        solver = ConjugateGradient(score_error=0.05, verify=False, keep_slopes=True)
        solved = solver.solve(Damped(gnh, smallest), gradients, generator=torch.Generator())
        assert solved.stats.shifted is not None
        return [solved.stats.shifted.scores(damping) for damping in dampings]

    ways = {"one": one, "twelve": all_of_them}
    seconds = interleaved(ways, rounds, warmup=1, clock=time.process_time)
    return {
        "queries": of.queries,
        "seconds": {name: asdict(Quartiles.of(each)) for name, each in seconds.items()},
        "ratio": asdict(ratios(seconds, "one")["twelve"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.over_damping", description=__doc__.split("\n")[0]
    )
    parser.add_argument("names", nargs="*", default=NAMES, metavar="NAME", help=f"of {', '.join(WORKS)}")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = {name: measure(work(name), options.rounds) for name in options.names}
    report(
        f"{COUNT} λ from one solve, beside one",
        ("", "one", "twelve", "ratio"),
        [
            (
                name,
                *(f"{row['seconds'][way]['median']:.2f} s" for way in ("one", "twelve")),
                f"{row['ratio']['median']:.2f}",
            )
            for name, row in found.items()
        ],
    )
    if tuple(options.names) == NAMES:
        save("over_damping", found)


if __name__ == "__main__":
    main()
