"""Contrasts on digits: do they find the wrong labels behind a mistake, and does removal do what they foretell?

    python -m benchmarks.contrast [--count]

The queries are test images that the model misreads. Asked is the loss of the true label, and "why the true label rather
than the one the model says?". Counted is how many of the twenty most harmful examples have flipped labels, and how many
of the flips from the true class to the said one are among them. Then the twenty most harmful, and the twenty most
helpful, for ten contrasts are left out and the model is trained again.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.timing import RESULTS, report, save
from benchmarks.works import Work, work
from whence import Questions, attribute
from whence.demo.digits import load_digits_with_flipped_labels
from whence.validation import removal_effects

TOP, REMOVED, SEEDS = 20, 10, 5
COUNTED, TRAINED = "the 20 most harmful", "log-odds of true against said"


@dataclass(frozen=True)
class Mistakes:
    """Misread test images: as queries, the classes that the model says, and examples from the most harmful on."""

    queries: list[tuple[Tensor, Tensor]]
    said: list[int]
    ranked: dict[str, Tensor]

    @staticmethod
    def of(on: Work) -> Mistakes:
        train = on.train_set()
        model = on.fit(range(len(train)), 0).model
        x, y = on.data().test
        with torch.no_grad():
            says = model(x).argmax(1)
        misread = (says != y).nonzero().flatten()
        queries, said = [(x[i], y[i]) for i in misread], says[misread].tolist()
        ranked = {}
        for name, asked in (("loss", queries), ("contrast", Questions(queries, contrast=said))):
            result = attribute(model, train, asked, task=on.task, baseline=False, shown=1)
            ranked[name] = result.scores.argsort(dim=1, stable=True)
        return Mistakes(queries, said, ranked)


def count(found: Mistakes) -> dict[str, Any]:
    """Flipped labels among the most harmful."""
    digits = load_digits_with_flipped_labels()
    labels = digits.train.tensors[1]
    between = torch.stack(
        [
            (digits.true_labels == y) & (labels == said)
            for (_, y), said in zip(found.queries, found.said, strict=True)
        ]
    )
    shares, hits = {}, {}
    for name, order in found.ranked.items():
        shares[name] = digits.flipped[order[:, :TOP]].double().mean(1)
        hits[name] = int(between.gather(1, order[:, :TOP]).sum())
    more = shares["contrast"] - shares["loss"]
    return {
        "queries": len(found.queries),
        "flipped in all": float(digits.flipped.double().mean()),
        "share of flipped labels": {
            name: mean(each) for name, each in {**shares, "difference": more}.items()
        },
        "flipped from the true class to the said one": {"in the data": int(between.sum()), **hits},
    }


def mean(values: Tensor) -> dict[str, float]:
    return {"mean": float(values.mean()), "stderr": float(values.std() / len(values) ** 0.5)}


def trained(on: Work, found: Mistakes) -> dict[str, Any]:
    """How far the log-odds move when the ends of the rankings are left out."""
    asked = Questions(found.queries[:REMOVED], contrast=found.said[:REMOVED])
    order = found.ranked["contrast"][:REMOVED]
    groups = [*order[:, :TOP], *order.flip(1)[:, :TOP]]
    effects = removal_effects(
        on, len(on.train_set()), groups, asked, task=on.task, seeds=range(SEEDS), name=on.name
    )
    # Q is minus the log-odds: without the harmful it should fall, without the helpful rise
    places, own = torch.arange(2 * REMOVED), torch.arange(REMOVED).repeat(2)
    moved, errors = -effects.effects[places, own], effects.stderr[places, own]
    ends = {
        "without the harmful": (slice(0, REMOVED), 1.0),
        "without the helpful": (slice(REMOVED, None), -1.0),
    }
    return {
        name: {
            "moved": moved[part].tolist(),
            "stderr": errors[part].tolist(),
            "as foretold": int((sign * moved[part] > 0).sum()),
            "of": REMOVED,
        }
        for name, (part, sign) in ends.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.contrast", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--count", action="store_true", help="only count anew, beside what was trained before"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    on = work("digits")
    mistakes = Mistakes.of(on)
    counts = count(mistakes)
    moved = (
        json.loads((RESULTS / "contrast.json").read_text())["results"][TRAINED]
        if options.count
        else trained(on, mistakes)
    )
    report(
        f"flipped labels among {COUNTED} of {counts['queries']} misread digits",
        ("asked", "share", "±"),
        [
            (name, f"{r['mean']:.3f}", f"{r['stderr']:.3f}")
            for name, r in counts["share of flipped labels"].items()
        ],
    )
    print(
        f"flipped from the true class to the said one: {counts['flipped from the true class to the said one']}"
    )
    report(
        f"log-odds of the true label against the predicted, trained again ({SEEDS} seeds)",
        ("left out", "as foretold", "moved by"),
        [
            (
                name,
                f"{row['as foretold']} of {row['of']}",
                " ".join(f"{value:+.2f}" for value in row["moved"]),
            )
            for name, row in moved.items()
        ],
    )
    save("contrast", {COUNTED: counts, "seeds": SEEDS, TRAINED: moved})


if __name__ == "__main__":
    main()
