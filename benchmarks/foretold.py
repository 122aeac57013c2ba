"""Does `whence plan` foretell what then happens? Seconds of the whole attribution, foretold and taken.

    python -m benchmarks.foretold [NAME …]

Seconds of the processor, one thread, on both sides: `whence plan` tells those of the clock, which other jobs disturb.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from time import process_time
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.damping import SEED
from benchmarks.timing import RESULTS, environment, report
from benchmarks.works import Work, work
from whence import GaussNewton, Options, attribute, estimate_spectrum
from whence.attribution.budget import way_for
from whence.attribution.cost import forecast, spectrum_terms
from whence.attribution.damping import first_damping, metric_of
from whence.attribution.planning import choice_for
from whence.solvers.plan import Plan

PATH = RESULTS / "foretold.json"
NAMES = ("digits", "mnist", "mnist-cnn", "cifar10-cnn", "llama")


def measure(of: Work) -> dict[str, Any]:
    train, asked = of.train_set(), of.asked()
    model = of.fit(range(len(train)), SEED).model
    found: dict[str, Any] = {"about": of.about, "queries": len(asked)}
    attribute(model, train[:64], asked[:1], task=of.task)  # what a first call costs is another question
    for name, options in (
        ("quick", Options(accuracy="quick", baseline=False)),
        ("default", Options(baseline=False)),
    ):
        begun = process_time()
        gnh = GaussNewton(model, of.task, train)
        way = way_for(gnh, len(asked), options)
        plan = solver = None
        if not way.factored:
            gnh = gnh.in_metric(metric_of(gnh, None, options))
            terms = spectrum_terms(gnh, len(asked), options)
            spectrum = estimate_spectrum(gnh, generator=options.generator(1), terms=terms)
            damping, _ = first_damping(options.damping, None, spectrum, gnh)
            solver = choice_for(gnh, spectrum, damping, len(asked), options).best
            plan = Plan.tuned(spectrum, damping, num_terms=gnh.num_terms, chains=options.chains)
        told = forecast(gnh, way, options, queries=len(asked), plan=plan, solver=solver)
        planning = process_time() - begun
        begun = process_time()
        result = attribute(model, train, asked, task=of.task, options=options)
        found[name] = {
            "solver": result.solve.solver,
            "foretold": told.seconds,
            "taken": process_time() - begun,
            "planning": planning,
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.foretold", description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"by default {', '.join(NAMES)}")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with patch("whence.attribution.cost.perf_counter", process_time):
        tell(options.names or NAMES)


def tell(names: Sequence[str]) -> None:
    """Measure, keep and print."""
    found = json.loads(PATH.read_text()) if PATH.exists() else {"works": {}}
    for name in names:
        found["works"][name] = measure(work(name))
        found["environment"] = environment()
        PATH.write_text(json.dumps(found, indent=1) + "\n")
    report(
        "seconds of an attribution, foretold and taken",
        ("", "", "solver", "foretold", "taken", "ratio", "planning"),
        [
            (
                row["about"],
                name,
                row[name]["solver"],
                f"{row[name]['foretold']:.2f}",
                f"{row[name]['taken']:.2f}",
                f"{row[name]['foretold'] / row[name]['taken']:.2f}",
                f"{row[name]['planning']:.2f}",
            )
            for row in found["works"].values()
            for name in ("quick", "default")
        ],
    )


if __name__ == "__main__":
    main()
