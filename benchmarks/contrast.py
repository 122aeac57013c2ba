"""Contrasts on digits: do they find the wrong labels behind a mistake, and does removal do what they foretell?

    python -m benchmarks.contrast

The queries are test images that the model misreads. Asked is the loss of the true label, and "why the true label rather
than the one the model says?". Counted is how many of the twenty most harmful examples have flipped labels, and how many
of the flips from the true class to the said one are among them. Then the twenty most harmful for ten contrasts, the
twenty most helpful, and the twenty most harmful for the losses are left out and the model is trained again.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.timing import report, save
from benchmarks.works import Work, work
from whence import Questions, attribute
from whence.demo.digits import load_digits_with_flipped_labels
from whence.validation import removal_effects

TOP, REMOVED, SEEDS = 20, 10, 2
#: Keeps what is trained, so that an interrupted call goes on.
SCRATCH = Path("runs") / "contrast"


def measure(of: Work) -> dict[str, Any]:
    train = of.train_set()
    model = of.fit(range(len(train)), 0).model
    digits = load_digits_with_flipped_labels()
    flipped, labels = digits.flipped, digits.train.tensors[1]
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
    between = torch.stack([(digits.true_labels == y[i]) & (labels == says[i]) for i in misread])
    found_between = {name: int(between.gather(1, order[:, :TOP]).sum()) for name, order in harmful.items()}
    more = shares["contrast"] - shares["loss"]
    fewest = Questions(queries[:REMOVED], contrast=list(contrasts.contrast or ())[:REMOVED])
    left_out = {
        "the most harmful": (harmful["contrast"][:REMOVED, :TOP], 1.0),
        "the most helpful": (harmful["contrast"].flip(1)[:REMOVED, :TOP], -1.0),
        "the most harmful for the loss": (harmful["loss"][:REMOVED, :TOP], 1.0),
    }
    groups = [group for ends, _ in left_out.values() for group in ends]
    found = removal_effects(
        of, len(train), groups, fewest, task=of.task, seeds=range(SEEDS), directory=SCRATCH, name=of.name
    )
    places, own = torch.arange(len(groups)), torch.arange(REMOVED).repeat(len(left_out))
    # Q is minus the log-odds
    moved, errors = (
        -found.effects[places, own].reshape(-1, REMOVED),
        found.stderr[places, own].reshape(-1, REMOVED),
    )
    return {
        "queries": len(queries),
        "flipped in all": float(flipped.double().mean()),
        "share of flipped labels among the 20 most harmful": {
            name: {"mean": float(share.mean()), "stderr": float(share.std() / len(share) ** 0.5)}
            for name, share in shares.items()
        },
        "more by contrast": {"mean": float(more.mean()), "stderr": float(more.std() / len(more) ** 0.5)},
        "flipped from the true class to the said one": {
            "in the data": int(between.sum()),
            **{f"among the 20 most harmful by {name}": count for name, count in found_between.items()},
        },
        "seeds": SEEDS,
        "log-odds of true against said": {
            name: {
                "moved": moved[place].tolist(),
                "stderr": errors[place].tolist(),
                "mean": float(moved[place].mean()),
                "as foretold": int((sign * moved[place] > 0).sum()),
                "of": REMOVED,
            }
            for place, (name, (_, sign)) in enumerate(left_out.items())
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
        ("left out", "as foretold", "mean", "moved by"),
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
