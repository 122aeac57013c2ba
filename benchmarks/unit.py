"""Unit gradients: are the same examples at the top of every list, and does ranking per unit of gradient end that?

    python -m benchmarks.unit

Overlap is the share of two queries' twenty first examples that they have in common, averaged over pairs of queries.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from benchmarks.timing import report, save
from benchmarks.works import Work, work
from whence import attribute

NAMES, TOP = ("digits", "cancer"), 20


def measure(of: Work) -> dict[str, Any]:
    train, asked = of.train_set(), of.asked()
    model = of.fit(range(len(train)), 0).model
    result = attribute(model, train, asked, task=of.task, norms=True, shown=1)
    found = {}
    for by in ("score", "unit", "gradient dot product"):
        for harmful in (False, True):
            if by == "gradient dot product":
                ranked = (-1 if harmful else 1) * result.gradient_dot_products
                tops = ranked.argsort(dim=1, descending=True, stable=True)[:, :TOP]
            else:
                rows = result.top(TOP, by=by, harmful=harmful)
                tops = torch.tensor([row.index for row in rows]).reshape(len(asked), -1)
            holds = torch.zeros(len(asked), len(train)).scatter_(1, tops, 1.0)
            shared = holds @ holds.T / TOP
            pairs = ~torch.eye(len(asked), dtype=torch.bool)
            found[f"{by}, {'harmful' if harmful else 'helpful'}"] = {
                "overlap": float(shared[pairs].mean()),
                "examples in any list": int((holds.sum(0) > 0).sum()),
                "lists that hold the commonest": int(holds.sum(0).max()),
            }
    return {"queries": len(asked), "examples": len(train), "lists": found}


def main() -> None:
    argparse.ArgumentParser(prog="python -m benchmarks.unit", description=__doc__.split("\n")[0]).parse_args()
    torch.set_num_threads(1)
    rows = {name: measure(work(name)) for name in NAMES}
    report(
        f"top {TOP} of different queries",
        ("work", "by", "overlap", "examples in any list", "lists that hold the commonest"),
        [
            (
                name,
                by,
                f"{found['overlap']:.3f}",
                f"{found['examples in any list']} of {row['examples']}",
                f"{found['lists that hold the commonest']} of {row['queries']}",
            )
            for name, row in rows.items()
            for by, found in row["lists"].items()
        ],
    )
    save("unit", rows)


if __name__ == "__main__":
    main()
