"""Does the error of H cover? Scores by the H of fresh halves of the data, against the interval that two halves gave.

    python -m benchmarks.stability [NAME …]

Each work is attributed with ``damping="auto"``; then, at the same λ and in the same metric, scores are computed with
the H of other random halves, and counted within ``score ± t · data_stderr``, t of Student's distribution at 90%.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from scipy import stats

from benchmarks.timing import report, save
from benchmarks.works import WORKS, Work, work
from whence import ConjugateGradient, Damped, GaussNewton, attribute
from whence.attribution.damping import metric_again
from whence.attribution.stability import COLUMNS

NAMES = ("digits", "diabetes", "cancer", "wine", "diamonds", "digits-deep", "digits-early", "mnist")
HALVES, CONFIDENCE, SEED = 5, 0.9, 1000


def measure(of: Work) -> dict[str, Any]:
    train, asked = of.train_set(), of.asked()
    model = of.fit(range(len(train)), SEED).model
    result = attribute(model, train, asked, task=of.task, baseline=False)
    gnh = GaussNewton(model, of.task, train)
    gnh = gnh.in_metric(metric_again(gnh, result, None))
    assert result.data_stderr is not None
    width = float(stats.t.ppf(0.5 + CONFIDENCE / 2, COLUMNS)) * result.data_stderr
    system, gradients = result.solve.plan.damping, gnh.gradients(asked)
    covered, large = [], []
    for seed in range(HALVES):
        half = torch.randperm(len(train), generator=torch.Generator().manual_seed(7000 + seed))[
            : len(train) // 2
        ]
        solver = ConjugateGradient(score_error=0.02, keep_slopes=True, verify=False)
        solved = solver.solve(Damped(gnh.over(half), system), gradients, generator=torch.Generator())
        assert solved.stats.shifted is not None
        inside = (solved.stats.shifted.scores(system) - result.scores).abs() <= width
        top = result.scores.abs().topk(20, dim=1).indices
        covered.append(float(inside.double().mean()))
        large.append(float(inside.gather(1, top).double().mean()))
    assert result.stability is not None
    return {
        "agreement": result.stability.agreement_at(system),
        "coverage": sum(covered) / HALVES,
        "coverage of the 20 largest": sum(large) / HALVES,
        "halves": HALVES,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.stability", description=__doc__.split("\n")[0]
    )
    parser.add_argument("names", nargs="*", default=NAMES, metavar="NAME", help=f"of {', '.join(WORKS)}")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = {name: measure(work(name)) for name in options.names}
    report(
        f"coverage of {CONFIDENCE:.0%} intervals of H's own error, by {HALVES} fresh halves",
        ("", "agreement", "coverage", "of the 20 largest"),
        [
            (
                name,
                f"{row['agreement']:.3f}",
                f"{row['coverage']:.3f}",
                f"{row['coverage of the 20 largest']:.3f}",
            )
            for name, row in found.items()
        ],
    )
    if tuple(options.names) == NAMES:
        save("stability", found)


if __name__ == "__main__":
    main()
