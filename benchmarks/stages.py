"""What each stage costs, how far it is from the exact scores, and what retraining says of it.

    python -m benchmarks.stages [NAME …]      measures what is missing, then shows the tables and draws the figure

For every work: the quick answer, what `attribute` does by default, an accuracy of 0.99 and a certified one, in seconds
of one core and in passes (a gradient over all of the training data, timed beside them), with the LDS.
And of the quick answer and the default, whether what they say of themselves is true: the stated correlation with the
exact damped scores, and how many of these lie within the 90% intervals.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from statistics import median
from time import process_time
from typing import Any

import torch
from torch import Tensor

from benchmarks.damping import SEED, score
from benchmarks.timing import RESULTS, environment, report
from benchmarks.truth import truth
from benchmarks.works import WORKS, Work, work
from whence import ConjugateGradient, Damped, GaussNewton, LanguageModeling, Options, attribute
from whence.attribution import Attribution
from whence.attribution.damping import metric_of
from whence.preconditioners.ekfac import ekfac
from whence.scoring import Scorer
from whence.validation import Outcomes

DIRECTORY = RESULTS / "stages"
WAYS: dict[str, dict[str, Any]] = {
    "quick": {"accuracy": "quick"},
    "default": {},
    "0.99": {"accuracy": 0.99},
    "certified": {"accuracy": "certified"},
}
#: Where the exact scores, and what is proven, take hours: these ways are left out, and few queries solved exactly.
DEAR = {"llama": ("certified",), "gpt2": ("certified", "0.99"), "cifar10-cnn": ("certified", "0.99")}
FEW = {"llama": 2, "gpt2": 4, "cifar10-cnn": 4}
#: The scores' error at which a solve counts as exact; where solves are dear.
EXACT, DEAR_EXACT = 0.003, 0.05


def missing(of: Work, found: dict[str, Any]) -> list[str]:
    """The ways that a work was not measured by yet."""
    return [name for name in WAYS if name not in found.get("ways", {}) and name not in DEAR.get(of.name, ())]


def measure(of: Work, known: dict[str, Any]) -> dict[str, Any]:
    """The ways of one work that are missing, one after the other, each beside a pass."""
    train, asked = of.train_set(), of.asked()
    model = of.fit(range(len(train)), SEED).model
    whole = truth(of)
    outcomes = Outcomes(whole.losses[:, :, : len(asked)], whole.subsets, whole.seeds)
    found: dict[str, Any] = {"name": of.name, "about": of.about, "queries": len(asked), "ways": {}, **known}
    attribute(model, train[:64], asked[:1], task=of.task)  # what a first call costs is another question
    exact: dict[float, Tensor] = {}
    for name in missing(of, found):
        options = WAYS[name]
        before, begun = seconds_of_pass(model, of, train), process_time()
        result = attribute(model, train, asked, task=of.task, baseline=False, **options)
        seconds = process_time() - begun
        each = median([before, seconds_of_pass(model, of, train)])
        row = {
            "cpu_seconds": seconds,
            "passes": seconds / each,
            "pass_seconds": each,
            "solver": result.solve.solver,
            "products": result.solve.num_products,
            "damping": result.solve.plan.damping,
            **score(result.scores, outcomes),
        }
        if name in ("quick", "default"):
            few = FEW.get(of.name, len(asked))
            damping = result.solve.plan.damping
            if damping not in exact:
                exact[damping] = exact_scores(model, of, train, asked[:few], damping)
            row |= judge(result, exact[damping])
        found["ways"][name] = row
        print(f"{of.name}, {name}: {row}", flush=True)
    return found


def many(of: Work) -> dict[str, Any]:
    """What the quick answer costs for five times as many queries."""
    train = of.train_set()
    model = of.fit(range(len(train)), SEED).model
    attribute(model, train[:64], of.asked()[:1], task=of.task)
    found: dict[str, Any] = {"name": of.name, "environment": environment()}
    for count in (of.queries, 5 * of.queries):
        asked, each = replace(of, queries=count).asked(), seconds_of_pass(model, of, train)
        assert len(asked) == count
        begun = process_time()
        attribute(model, train, asked, task=of.task, baseline=False, accuracy="quick")
        found[f"{count} queries"] = {
            "cpu_seconds": process_time() - begun,
            "passes": (process_time() - begun) / each,
        }
    return found


def seconds_of_pass(model: torch.nn.Module, of: Work, train: list[Any]) -> float:
    """A gradient over all of the training data; the median of three where it is short."""
    gnh = GaussNewton(model, of.task, train)
    times = []
    for _ in range(1 if isinstance(of.task, LanguageModeling) else 5):
        begun = process_time()
        gnh.training_gradient(torch.arange(len(train)))
        times.append(process_time() - begun)
    return median(times)


def exact_scores(
    model: torch.nn.Module, of: Work, train: list[Any], asked: list[Any], damping: float
) -> Tensor:
    """Scores by a solve to an error of 0.3%, or of 5%, in the metric that `attribute` takes."""
    gnh = GaussNewton(model, of.task, train)
    gnh = gnh.in_metric(metric_of(gnh, None, Options()))
    factors = ekfac(gnh, damping, generator=torch.Generator().manual_seed(0))
    error = DEAR_EXACT if of.name in FEW else EXACT
    solver = ConjugateGradient(score_error=error, preconditioner=factors, verify=False, max_iterations=40)
    solution = solver.solve(Damped(gnh, damping), gnh.gradients(asked), generator=torch.Generator())
    return Scorer(gnh, solution.value).score(torch.arange(len(train)))


def judge(result: Attribution, exact: Tensor) -> dict[str, Any]:
    """What a result says of itself, beside the truth."""
    scores = result.scores[: len(exact)]
    low, high = (end[: len(exact)] for end in result.interval(0.9))
    inside = ((exact >= low) & (exact <= high)).double()
    largest = scores.abs().topk(min(20, scores.shape[1]), dim=1).indices
    centred = [side - side.mean(1, keepdim=True) for side in (scores, exact)]
    product = (centred[0] * centred[1]).sum(1)
    correlations = product / (centred[0].norm(dim=1) * centred[1].norm(dim=1))
    assert result.accuracy is not None
    return {
        "correlation": float(correlations.mean()),
        "stated": list(result.accuracy),
        "covered": float(inside.mean()),
        "covered_largest": float(inside.gather(1, largest).mean()),
        "size": float((scores * exact).sum() / exact.square().sum()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stages", description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(WORKS)}; all by default")
    parser.add_argument("--many", action="store_true", help="the quick answer for five times as many queries")
    parser.add_argument("--show", action="store_true", help="what is there, measuring nothing")
    options = parser.parse_args()
    torch.set_num_threads(1)
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    if options.many:
        for name in options.names or ["llama"]:
            found = many(work(name))
            print(found)
            (RESULTS / f"many_queries_{name}.json").write_text(json.dumps(found, indent=1) + "\n")
        return
    for name in [] if options.show else options.names or WORKS:
        path = DIRECTORY / f"{name}.json"
        known = json.loads(path.read_text()) if path.exists() else {}
        if missing(work(name), known):
            found = {"environment": environment(), **measure(work(name), known)}
            path.write_text(json.dumps(found, indent=1) + "\n")
    rows = [json.loads(p.read_text()) for name in WORKS if (p := DIRECTORY / f"{name}.json").exists()]
    show(rows)
    draw(rows)


def show(rows: list[dict[str, Any]]) -> None:
    """The two tables."""
    report(
        "LDS, seconds of one core, and passes over the training data",
        ("", "queries", *WAYS),
        [
            (
                row["name"],
                str(row["queries"]),
                *(
                    f"{way['lds']:.3f}, {way['cpu_seconds']:.2g} s, {way['passes']:.2g} ({way['solver']})"
                    if (way := row["ways"].get(name))
                    else "–"
                    for name in WAYS
                ),
            )
            for row in rows
        ],
    )
    for name in ("quick", "default"):
        told = [(row["name"], row["ways"][name]) for row in rows]
        report(
            f"{name}: what is said, and what is so",
            ("", "correlation", "said (90%)", "within 90%", "of the 20 largest", "size"),
            [
                (
                    of,
                    f"{way['correlation']:.3f}",
                    "{:.3f} ({:.3f} to {:.3f})".format(*way["stated"]),
                    f"{way['covered']:.3f}",
                    f"{way['covered_largest']:.3f}",
                    f"{way['size']:.2f}",
                )
                for of, way in told
            ],
        )
        true = sum(way["stated"][1] <= way["correlation"] <= way["stated"][2] for _, way in told)
        print(f"{name}: the interval of the correlation holds on {true} of {len(told)} works")


def draw(rows: list[dict[str, Any]]) -> None:
    """LDS against seconds, a panel for each work, beside Kronfluence."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    peers = json.loads((RESULTS / "peers_damping.json").read_text())["results"]["kronfluence"]
    columns = 5
    lines = -(-len(rows) // columns)
    figure, axes = plt.subplots(lines, columns, figsize=(15, 2.9 * lines), squeeze=False)
    for axis in axes.flat[len(rows) :]:
        axis.set_axis_off()
    for axis, row in zip(axes.flat, rows, strict=False):
        ways = row["ways"].items()
        for k, (name, way) in enumerate(ways):
            spread = [[way["lds"] - way["low"]], [way["high"] - way["lds"]]]
            axis.errorbar(
                way["cpu_seconds"],
                way["lds"],
                yerr=spread,
                fmt="o",
                ms=5,
                color=f"C{k}",
                label=f"whence, {name}",
            )
        known = peers.get(row["name"])
        if known is not None:
            for marker, setting in (("s", "default"), ("D", "heuristic")):
                found = known["settings"][setting]
                seconds = known["seconds_shared"] + found["seconds"]
                spread = [[found["lds"] - found["low"]], [found["high"] - found["lds"]]]
                axis.errorbar(
                    seconds,
                    found["lds"],
                    yerr=spread,
                    fmt=marker,
                    ms=5,
                    color="0.45",
                    label=f"Kronfluence, {setting}",
                )
        axis.set_xscale("log")
        low, high = axis.get_xlim()
        ticks = [tick for tick in (0.1, 0.3, 1, 3, 10, 30, 100) if low <= tick <= high]
        axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.minorticks_off()
        axis.set_title(row["about"], fontsize=8)
        axis.tick_params(labelsize=7)
    axes[0, 0].legend(fontsize=6)
    figure.supxlabel("seconds of one core, from the model to the scores", fontsize=9)
    figure.supylabel("LDS", fontsize=9)
    figure.tight_layout()
    figure.savefig(RESULTS / "stages.png", dpi=110)
    figure.savefig(RESULTS / "stages.svg")
    plt.close(figure)


if __name__ == "__main__":
    main()
