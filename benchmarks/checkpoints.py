"""Several checkpoints: agreement with retraining of the mean over 1, 2, 4 and 8, and what their spread foretells.

    python -m benchmarks.checkpoints [NAME …]      measures what is missing, then shows the tables

Of every work eight models are trained on all of its data, with seeds that the ground truth has not. The linear
datamodeling score is that of every set of one, two and four of them, averaged over the sets, so that none is lucky. Of
every four it is asked how often the 90% interval for one more checkpoint contains the scores of each of the others.

*Points of one training* are models of one seed after 70, 80, 90 and 100% of its epochs, of works whose rate stays as it
is: for three seeds.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from time import process_time
from typing import Any

import torch
from torch import Tensor

from benchmarks.timing import RESULTS, environment, report
from benchmarks.truth import SCRATCH, truth
from benchmarks.works import WORKS, Work, work
from whence import Attribution, attribute, load
from whence.attribution.several import joined
from whence.runs import holds
from whence.validation.datamodeling import Bench

FILE, RUNS = RESULTS / "checkpoints.json", SCRATCH.parent / "checkpoints"
NAMES = ("digits", "diabetes", "wine", "cancer", "diamonds", "mnist")
SEEDS, OF_POINTS = range(1000, 1008), range(1000, 1003)
SIZES, POINTS = (1, 2, 4, 8), (0.7, 0.8, 0.9, 1.0)
CONFIDENCE, LARGEST = 0.9, 20


def attributed(of: Work, seed: int, part: float = 1.0) -> Attribution:
    """The scores of a model of this seed after a part of its epochs, as kept."""
    train, epochs = of.train_set(), max(1, round(part * of.epochs))
    place = RUNS / of.name / f"{seed}-{epochs}"
    if holds(place, "result"):
        return load(place)
    model = replace(of, epochs=epochs).fit(range(len(train)), seed).model
    return attribute(model, train, of.asked(), task=of.task, baseline=False, run_dir=place)


def measure(of: Work) -> dict[str, Any]:
    begun = process_time()
    singles = {str(seed): attributed(of, seed) for seed in SEEDS}
    seconds = (process_time() - begun) / len(singles)
    bench = bench_of(of)
    found: dict[str, Any] = {"about": of.about, "cpu_seconds_of_each": seconds, "seeds": list(SEEDS)}
    correlations: dict[int, tuple[Tensor, Tensor]] = {}
    for size in SIZES:
        sets = [bench.correlations(mean_of(singles, chosen)) for chosen in combinations(singles, size)]
        correlations[size] = (
            torch.stack([each for each, _ in sets]).mean(0),
            torch.stack([each for _, each in sets]).mean(0),
        )
        values = torch.tensor([float(each.nanmean()) for each, _ in sets])
        found[f"lds of {size}"] = {
            "mean": float(values.mean()),
            "least": float(values.min()),
            "most": float(values.max()),
            "sets": len(sets),
        }
    for size in SIZES[1:]:
        more, one = correlations[size], correlations[1]
        value, low, high, _ = bench.interval(more[0] - one[0], more[1] - one[1])
        found[f"gain of {size}"] = {"value": value, "low": low, "high": high}
    found["agreement"] = float(joined(singles).agreement.mean())
    found["coverage"] = coverage(singles)
    found["larger error"] = joined(dict(list(singles.items())[:4])).dominant_error
    return found


def bench_of(of: Work) -> Bench:
    return Bench(truth(of), 0.95, 200, torch.Generator().manual_seed(0))


def mean_of(results: dict[str, Attribution], chosen: Sequence[str]) -> Tensor:
    some = {name: results[name] for name in chosen}
    return (joined(some) if len(some) > 1 else some[chosen[0]]).scores


def coverage(singles: dict[str, Attribution]) -> dict[str, Any]:
    """Of four checkpoints' interval for one more, over all ways to choose both: of all scores and of the largest."""
    every, largest = [], []
    for chosen in combinations(singles, 4):
        four = joined({name: singles[name] for name in chosen})
        low, high = four.interval_of_another(CONFIDENCE)
        top = four.scores.abs().topk(LARGEST, dim=1).indices
        for name in singles.keys() - set(chosen):
            other = singles[name].scores
            inside = ((low <= other) & (other <= high)).double()
            every.append(float(inside.mean()))
            largest.append(float(inside.gather(1, top).mean()))
    return {
        "all scores": math.fsum(every) / len(every),
        "least": min(every),
        "most": max(every),
        f"the {LARGEST} largest": math.fsum(largest) / len(largest),
        "pairs": len(every),
    }


def points(of: Work, seed: int, bench: Bench) -> dict[str, Any]:
    """The LDS of every point of one training, and of the mean over them."""
    along = {str(part): attributed(of, seed, part) for part in POINTS}
    *each, mean = (float(bench.correlations(r.scores)[0].nanmean()) for r in (*along.values(), joined(along)))
    return {"seed": seed, "each": each, "mean": mean, "agreement": float(joined(along).agreement.mean())}


def show(found: dict[str, Any]) -> None:
    rows = [(name, row) for name, row in found.items() if name != "environment"]

    def gain(row: dict[str, Any], size: int) -> str:
        each = row[f"gain of {size}"]
        return f"{each['value']:+.3f} [{each['low']:+.3f}, {each['high']:+.3f}]"

    report(
        "LDS of the mean over checkpoints of other seeds, averaged over which ones",
        ("", "1 (least, most)", "2", "4", "8", "4 over 1", "s each"),
        [
            (
                name,
                f"{row['lds of 1']['mean']:.3f} ({row['lds of 1']['least']:.3f}, {row['lds of 1']['most']:.3f})",
                *(f"{row[f'lds of {size}']['mean']:.3f}" for size in SIZES[1:]),
                gain(row, 4),
                f"{row['cpu_seconds_of_each']:.1f}",
            )
            for name, row in rows
        ],
    )
    report(
        "How often the 90% interval of four contains the score of a fifth",
        ("", "all scores", "least", "most", f"the {LARGEST} largest", "correlation of two"),
        [
            (
                name,
                *(f"{row['coverage'][part]:.3f}" for part in ("all scores", "least", "most")),
                f"{row['coverage'][f'the {LARGEST} largest']:.3f}",
                f"{row['agreement']:.3f}",
            )
            for name, row in rows
        ],
    )
    report(
        "Points of one training: LDS of the worst, of the best, of the last, and of the mean over four",
        ("", *(f"seed {seed}" for seed in OF_POINTS)),
        [
            (
                name,
                *(
                    f"{min(p['each']):.3f} {max(p['each']):.3f} {p['each'][-1]:.3f} → {p['mean']:.3f}"
                    for p in row["points"]
                ),
            )
            for name, row in rows
            if "points" in row
        ],
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.checkpoints", description=__doc__.split("\n")[0]
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(WORKS)}; {', '.join(NAMES)}")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = json.loads(FILE.read_text()) if FILE.exists() else {"environment": environment()}
    for name in options.names or NAMES:
        of = work(name)
        if name not in found:
            found[name] = measure(of)
            FILE.write_text(json.dumps(found, indent=1) + "\n")
            print(f"{name} written", flush=True)
        if not of.cosine and "points" not in found[name]:
            found[name]["points"] = [points(of, seed, bench_of(of)) for seed in OF_POINTS]
            FILE.write_text(json.dumps(found, indent=1) + "\n")
            print(f"{name}: points written", flush=True)
    show(found)


if __name__ == "__main__":
    main()
