"""How much damping is right? Agreement with retraining over λ, on all works, and of what `damping="auto"` takes.

    python -m benchmarks.damping [NAME …]      measures what is missing, then shows the table and draws the curves

For every work: the linear datamodeling score over a grid of λ with no metric, with that of the gradients' second moment
measured at θ, and with that of the optimizer; the strain over λ in both metrics; and what `attribute` finds with and
without the training's recipe. The constants of `whence.attribution.damping` are then chosen anew with each work left
out, and the work is judged with those.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import replace
from time import process_time
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.timing import RESULTS, environment, report
from benchmarks.truth import truth
from benchmarks.works import WORKS, Trained, Work, work
from whence import ConjugateGradient, Damped, GaussNewton, Options, attribute, linear_datamodeling_score
from whence.attribution import damping as rule
from whence.attribution.budget import way_for
from whence.attribution.planning import SCALE
from whence.attribution.strain import measure_strain
from whence.model.second_moment import factored, root_second_moment
from whence.preconditioners.ekfac import ekfac
from whence.solvers.shifted import Shifted
from whence.training import Training
from whence.validation import Outcomes

DIRECTORY = RESULTS / "damping"
SEED = 1000
#: What is measured of a work, in the order of use.
PARTS = {"without", "with", "scalar", "measured", "optimizer", "strain", "strain of the recipe"}
#: Queries that dear works are asked: a product costs as much as there are columns.
FEWER = {"llama": 5, "gpt2": 5, "cifar10-cnn": 10}
#: Iterations of a solve, at most; and of a very dear work, whose smallest λ have not settled after these.
ITERATIONS, FEWER_ITERATIONS = 40, {"llama": 14}
#: λ in units of a part of λmax, and of 1/τ or √v.
KAPPAS = [float(k) for k in np.logspace(-0.5, 3.5, 17)]
TIMES = [float(c) for c in np.logspace(-1, 2.5, 15)]


def measure(of: Work) -> None:
    """Everything about one work that its file has not yet, part by part: a part that was measured is not lost."""
    path = DIRECTORY / f"{of.name}.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"environment": environment()}
    if found.keys() >= PARTS:
        return
    train, asked = of.train_set(), of.asked()[: FEWER.get(of.name)]
    trained = of.fit(range(len(train)), SEED)
    whole = truth(of)
    outcomes = Outcomes(whole.losses[:, :, : len(asked)], whole.subsets, whole.seeds)
    gnh = GaussNewton(trained.model, of.task, train)
    recipe, most = recipe_of(trained), FEWER_ITERATIONS.get(of.name, ITERATIONS)
    found |= {"name": of.name, "about": of.about, "examples": len(train), "queries": len(asked)}
    found["parameters"], found["time"], found["adaptive"] = gnh.num_parameters, recipe.time, recipe.adaptive
    found["terms"] = gnh.terms.terms_per_example

    def scalar() -> dict[str, Any]:
        top, shifted = solved(gnh, asked, 1 / KAPPAS[-1], most=most, relative=True)
        found["lambda_max"] = top
        found["dot product"] = lds(shifted.scores(1e12 * top), outcomes)
        return {"kappa": KAPPAS, "lds": curve(shifted, [top / k for k in KAPPAS], outcomes)}

    def measured() -> dict[str, Any]:
        within = gnh.in_metric(root_second_moment(gnh, generator=torch.Generator().manual_seed(0)))
        _, shifted = solved(within, asked, TIMES[0], most=most)
        return {"damping": TIMES, "lds": curve(shifted, TIMES, outcomes)}

    def optimizer() -> dict[str, Any] | None:
        if recipe.root_moment is None:
            return None
        own = gnh.in_metric(factored(recipe.root_moment, gnh.network))
        _, shifted = solved(own, asked, TIMES[0] / recipe.time, most=most)
        return {"times": TIMES, "lds": curve(shifted, [c / recipe.time for c in TIMES], outcomes)}

    def strain(of_gnh: GaussNewton, dampings: list[float]) -> list[float]:
        """By EK-FAC where `attribute` answers by EK-FAC."""
        random = torch.Generator().manual_seed(2)
        way = way_for(of_gnh, of.queries, Options())
        factors = ekfac(of_gnh, 1.0, generator=random).with_scale(SCALE) if way.factored else None
        return [measure_strain(of_gnh, d, generator=random, factors=factors) for d in dampings]

    def auto(training: Training | None) -> dict[str, Any]:
        begun = process_time()
        result = attribute(trained.model, train, asked, task=of.task, training=training, baseline=False)
        return {
            "damping": result.solve.plan.damping,
            "words": result.solve.damping_words,
            "cpu_seconds": process_time() - begun,
            **score(result.scores, outcomes),
        }

    parts: dict[str, Callable[[], Any]] = {
        "without": lambda: auto(None),
        "with": lambda: auto(recipe),
        "scalar": scalar,
        "measured": measured,
        "optimizer": optimizer,
        "strain": lambda: strain(
            gnh.in_metric(root_second_moment(gnh, generator=torch.Generator().manual_seed(0))), TIMES
        ),
        "strain of the recipe": lambda: strain(
            gnh if recipe.root_moment is None else gnh.in_metric(factored(recipe.root_moment, gnh.network)),
            [c / recipe.time for c in TIMES],
        ),
    }
    assert parts.keys() == PARTS
    for name, part in parts.items():
        if name not in found:
            found[name] = part()
            path.write_text(json.dumps(found, indent=1) + "\n")
            print(f"{of.name}: {name} written", flush=True)


def recipe_of(trained: Trained) -> Training:
    """What is known of a work's training; its rates to the step."""
    group = trained.optimizer.param_groups[0]
    rate, steps = sum(trained.rates) / len(trained.rates), len(trained.rates)
    if "betas" in group:
        return replace(Training.read(trained.optimizer, trained.model), rate=rate, steps=steps)
    return Training(rate, steps, momentum=group["momentum"], weight_decay=group["weight_decay"])


def solved(
    gnh: GaussNewton, asked: list[Any], damping: float, *, most: int, relative: bool = False
) -> tuple[float, Shifted]:
    """λmax and scores for all λ, from a solve at the smallest."""
    gradients, top = gnh.gradients(asked), 1.0
    if relative:
        first = ConjugateGradient(tolerance=0.5, keep_slopes=True, max_iterations=6, verify=False)
        early = first.solve(Damped(gnh, 1.0), gradients, generator=torch.Generator()).stats.shifted
        assert early is not None
        top = float(torch.linalg.eigvalsh(early.T)[-1])
    solver = ConjugateGradient(score_error=0.1, keep_slopes=True, verify=False, max_iterations=most)
    found = solver.solve(Damped(gnh, damping * top), gradients, generator=torch.Generator()).stats.shifted
    assert found is not None
    return top, found


def curve(shifted: Shifted, dampings: list[float], outcomes: Outcomes) -> list[float]:
    return [lds(shifted.scores(damping), outcomes) for damping in dampings]


def lds(scores: Tensor, outcomes: Outcomes) -> float:
    return score(scores, outcomes)["lds"]


def score(scores: Tensor, outcomes: Outcomes) -> dict[str, float]:
    found = linear_datamodeling_score(
        scores, outcomes, generator=torch.Generator().manual_seed(0), bootstrap=200
    )
    return {"lds": found.value, "low": found.low, "high": found.high}


# --- the rule, with other constants ----------------------------------------------------------------------------


#: The grids that a rule is measured against: those that can be had without the recipe, or all.
WITHOUT, ALL = ("scalar", "measured"), ("scalar", "measured", "optimizer")


def best(row: dict[str, Any], grids: tuple[str, ...] = ALL) -> float:
    """The LDS of the best λ of these grids."""
    return max(max(row[name]["lds"]) for name in grids if row[name] is not None)


def raised(row: dict[str, Any], strain: str, guess: float, allowed: float) -> float:
    """λ after it was raised for the strain, in units of the grid."""
    found = float(np.interp(math.log(guess), np.log(TIMES), row[strain]))
    return guess * max(1.0, (found / allowed) ** 2)


def without_recipe(row: dict[str, Any], guess: float, allowed: float) -> float:
    """The LDS that the rule with these constants would have had."""
    at = raised(row, "strain", guess * math.sqrt(row["terms"]), allowed)
    return float(np.interp(math.log(at), np.log(TIMES), row["measured"]["lds"]))


def with_recipe(row: dict[str, Any], constant: float, allowed: float) -> float:
    at = raised(row, "strain of the recipe", constant, allowed)
    if row["optimizer"] is not None:
        return float(np.interp(math.log(at), np.log(TIMES), row["optimizer"]["lds"]))
    kappa = row["lambda_max"] * row["time"] / at
    return float(np.interp(math.log(kappa), np.log(KAPPAS), row["scalar"]["lds"]))


#: Constants to choose among: λ before it is raised, and how much strain there may be.
STRAINS = (0.08, 0.1, 0.12, 0.14, 0.16, 0.2, 0.25, 0.3, math.inf)
GUESSES = [(guess, allowed) for guess in (2, 2.5, 3, 3.5, 4, 4.5, 5, 6, 8) for allowed in STRAINS]
CONSTANTS = [(c, allowed) for c in (1, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 8) for allowed in STRAINS]


def left_out(
    rows: list[dict[str, Any]], judge: Any, choices: list[Any], limit: float, grids: tuple[str, ...]
) -> dict[str, tuple[Any, float]]:
    """For every work, its LDS with the constants that are best on all others.

    Best is: below the dot product on the fewest works, then further than ``limit`` from the best λ on the fewest, then
    the least lost on average.
    """

    def worth(choice: Any, name: str) -> tuple[float, ...]:
        others = [(row, judge(row, *choice)) for row in rows if row["name"] != name]
        lost = [best(row, grids) - value for row, value in others]
        below = sum(value < row["dot product"] for row, value in others)
        return below, sum(loss > limit for loss in lost), sum(lost)

    found = {}
    for row in rows:
        chosen = min(choices, key=lambda choice: worth(choice, row["name"]))
        found[row["name"]] = (chosen, judge(row, *chosen))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.damping", description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(WORKS)}; all by default")
    parser.add_argument("--show", action="store_true", help="what is there, measuring nothing")
    options = parser.parse_args()
    torch.set_num_threads(1)
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    for name in [] if options.show else options.names or WORKS:
        measure(work(name))
    rows = [json.loads(p.read_text()) for name in WORKS if (p := DIRECTORY / f"{name}.json").exists()]
    rows = [row for row in rows if row.keys() >= PARTS]
    show(rows)
    draw(rows)


def show(rows: list[dict[str, Any]]) -> None:
    guesses = left_out(rows, without_recipe, GUESSES, 0.04, WITHOUT)
    recipes = left_out(rows, with_recipe, CONSTANTS, 0.02, ALL)
    report(
        f"LDS: λ = {rule.GUESS:g}√m without the recipe, {rule.RECIPE:g}/τ with it, strain at most {rule.STRAIN:g}",
        (
            "",
            "dot product",
            "λmax/200",
            "best λ",
            "auto",
            "left out",
            "best, recipe",
            "auto, recipe",
            "left out",
        ),
        [
            (
                row["name"],
                f"{row['dot product']:.3f}",
                f"{float(np.interp(math.log(200), np.log(KAPPAS), row['scalar']['lds'])):.3f}",
                f"{best(row, WITHOUT):.3f}",
                f"{row['without']['lds']:.3f}",
                f"{guesses[row['name']][1]:.3f} {guesses[row['name']][0]}",
                f"{best(row):.3f}",
                f"{row['with']['lds']:.3f}",
                f"{recipes[row['name']][1]:.3f} {recipes[row['name']][0]}",
            )
            for row in rows
        ],
    )
    for name, found, limit, grids in (("without", guesses, 0.04, WITHOUT), ("with", recipes, 0.02, ALL)):
        near = sum(best(row, grids) - row[name]["lds"] <= limit for row in rows)
        out = sum(best(row, grids) - found[row["name"]][1] <= limit for row in rows)
        above = sum(row[name]["lds"] >= row["dot product"] for row in rows)
        print(
            f"{name} the recipe: within {limit} of the best λ on {near} of {len(rows)} works, {out} with each left "
            f"out; at least the dot product on {above}"
        )


def draw(rows: list[dict[str, Any]]) -> None:
    """LDS over λ, a panel for each work."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    columns = 4
    figure, axes = plt.subplots(
        -(-len(rows) // columns), columns, figsize=(14, 2.7 * -(-len(rows) // columns)), squeeze=False
    )
    for axis in axes.flat[len(rows) :]:
        axis.set_axis_off()
    for axis, row in zip(axes.flat, rows, strict=False):
        first = row["measured"]["damping"]
        axis.semilogx(first, row["measured"]["lds"], "o-", ms=3, label="in the gradients' second moment")
        if row["optimizer"] is not None:
            axis.semilogx(
                [c / row["time"] for c in TIMES],
                row["optimizer"]["lds"],
                "s-",
                ms=3,
                label="in the optimizer's",
            )
        axis.axvline(row["without"]["damping"], color="C0", lw=1, ls=":")
        axis.axhline(max(row["scalar"]["lds"]), color="0.4", lw=1, ls="--", label="best λ without a metric")
        axis.axhline(row["dot product"], color="0.7", lw=1, label="gradient dot product")
        axis.set_title(row["about"], fontsize=8)
        axis.tick_params(labelsize=7)
    axes[0, 0].legend(fontsize=6)
    figure.supxlabel("λ (dotted: what damping='auto' takes)", fontsize=9)
    figure.supylabel("LDS", fontsize=9)
    figure.tight_layout()
    figure.savefig(RESULTS / "damping.png", dpi=110)
    figure.savefig(RESULTS / "damping.svg")
    plt.close(figure)


if __name__ == "__main__":
    main()
