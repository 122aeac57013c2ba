"""Contrasts on digits: do they find the wrong labels behind a mistake, and does removal do what they foretell?

    python -m benchmarks.contrast

The queries are test images that the model misreads. Asked is the loss of the true label, and "why the true label rather
than the one the model says?". Counted is how many of the twenty most harmful examples have flipped labels; then the
twenty most harmful, and the twenty most helpful, for ten contrasts are left out and the model is trained again.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor

from benchmarks.timing import report, save
from benchmarks.works import Work, work
from whence import Questions, attribute
from whence.demo.digits import load_digits_with_flipped_labels
from whence.validation import removal_effects

TOP, REMOVED, SEEDS = 20, 10, 10


def measure(of: Work) -> dict[str, Any]:
    train = of.train_set()
    model = of.fit(range(len(train)), 0).model
    flipped = load_digits_with_flipped_labels().flipped
    x, y = of.data().test
    with torch.no_grad():
        says = model(x).argmax(1)
    misread = (says != y).nonzero().flatten()
    queries = [(x[i], y[i]) for i in misread]
    contrasts = Questions(queries, contrast=[int(says[i]) for i in misread])
    harmful: dict[str, Tensor] = {}
    shares: dict[str, Tensor] = {}
    for name, asked in (("loss", queries), ("contrast", contrasts)):
        scores = attribute(model, train, asked, task=of.task, baseline=False, shown=1).scores
        order = scores.argsort(dim=1, stable=True)
        harmful[name] = order
        shares[name] = flipped[order[:, :TOP]].double().mean(1)
        if name == "contrast":
            helpful = order.flip(1)
    more = shares["contrast"] - shares["loss"]
    fewest = Questions(queries[:REMOVED], contrast=list(contrasts.contrast or ())[:REMOVED])
    groups = [*harmful["contrast"][:REMOVED, :TOP], *helpful[:REMOVED, :TOP]]
    found = removal_effects(of, len(train), groups, fewest, task=of.task, seeds=range(SEEDS), name=of.name)
    own = torch.arange(REMOVED).repeat(2)
    # Q is minus the log-odds: without the harmful it should fall, without the helpful rise
    moved = -found.effects[torch.arange(2 * REMOVED), own]
    errors = found.stderr[torch.arange(2 * REMOVED), own]
    halves = {"without the harmful": slice(0, REMOVED), "without the helpful": slice(REMOVED, None)}
    signs = {"without the harmful": 1.0, "without the helpful": -1.0}
    return {
        "queries": len(queries),
        "flipped in all": float(flipped.double().mean()),
        "share of flipped labels among the 20 most harmful": {
            name: {"mean": float(share.mean()), "stderr": float(share.std() / len(share) ** 0.5)}
            for name, share in shares.items()
        },
        "more by contrast": {"mean": float(more.mean()), "stderr": float(more.std() / len(more) ** 0.5)},
        "seeds": SEEDS,
        "log-odds of true against said": {
            name: {
                "moved": moved[part].tolist(),
                "stderr": errors[part].tolist(),
                "as foretold": int((signs[name] * moved[part] > 0).sum()),
                "of": REMOVED,
            }
            for name, part in halves.items()
        },
    }


def main() -> None:
    argparse.ArgumentParser(
        prog="python -m benchmarks.contrast", description=__doc__.split("\n")[0]
    ).parse_args()
    torch.set_num_threads(1)
    found = measure(work("digits"))
    shares = found["share of flipped labels among the 20 most harmful"]
    report(
        f"flipped labels among the {TOP} most harmful of {found['queries']} misread digits",
        ("asked", "share", "±"),
        [(name, f"{row['mean']:.3f}", f"{row['stderr']:.3f}") for name, row in shares.items()]
        + [
            (
                "difference",
                f"{found['more by contrast']['mean']:.3f}",
                f"{found['more by contrast']['stderr']:.3f}",
            )
        ],
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
            for name, row in found["log-odds of true against said"].items()
        ],
    )
    save("contrast", found)


if __name__ == "__main__":
    main()
