"""Groups: predicted against retrained effects of leaving out whole groups, and whether the errors of sums hold.

    python -m benchmarks.groups [NAME …] [--errors]

Digits: label × half of the data. Llama: the ten largest topics of Python's manual. Retrained effects are means over
seeds; correlations are over the groups, query by query; the slope is that of all effects together, retrained over
predicted, and its error a bootstrap over groups. Errors of sums: the quick answer and a solve at defaults against one
to rounding, in units of their stated errors.
"""

from __future__ import annotations

import argparse
from collections import Counter
from typing import Any

import torch
from torch import Tensor

from benchmarks.timing import report, save
from benchmarks.works import Work, manual_topics, work
from whence import Attribution, attribute
from whence.validation import removal_effects

NAMES, ERRORS = ("digits", "llama"), ("digits", "cancer")
SEEDS = {"digits": 10, "llama": 2}
QUERIES = 20
#: A solve that the exact one is taken from.
EXACT = {"solver": "cg", "accuracy": 0.9999999}


def groups_of(of: Work) -> list[str | None]:
    """A name for every training example."""
    count = len(of.train_set())
    if of.name == "llama":
        topics = manual_topics()
        largest = {topic for topic, _ in Counter(topics).most_common(10)}
        return [topic if topic in largest else None for topic in topics]
    return [f"{int(y)} in part {1 + 2 * i // count}" for i, (_, y) in enumerate(of.train_set())]


def retrained(of: Work) -> dict[str, Any]:
    """Predicted and retrained effects of leaving out each group."""
    train, asked, names = of.train_set(), of.asked()[:QUERIES], groups_of(of)
    model = of.fit(range(len(train)), 0).model
    result = attribute(model, train, asked, task=of.task, groups=names, baseline=False, shown=1)
    groups = result.groups()
    members = [[i for i, name in enumerate(names) if name == group] for group in groups.names]
    found = removal_effects(
        of, len(train), members, asked, task=of.task, seeds=range(SEEDS[of.name]), name=of.name
    )
    predicted, actual = groups.effects, found.effects.T
    per_query = torch.stack([_correlation(p, a) for p, a in zip(predicted, actual, strict=True)])
    drawn = torch.randint(len(members), (1000, len(members)), generator=torch.Generator().manual_seed(0))
    slopes = torch.stack([_slope(predicted[:, rows], actual[:, rows]) for rows in drawn])
    pooled = torch.stack([_correlation(predicted[:, r].flatten(), actual[:, r].flatten()) for r in drawn])
    return {
        "groups": {name: len(positions) for name, positions in zip(groups.names, members, strict=True)},
        "queries": len(asked),
        "seeds": SEEDS[of.name],
        "correlation over groups": {
            "mean over queries": float(per_query.mean()),
            "stderr": float(per_query.std() / len(per_query) ** 0.5),
        },
        "correlation of all": {
            "value": float(_correlation(predicted.flatten(), actual.flatten())),
            "stderr": float(pooled.std()),
        },
        "slope, retrained over predicted": {
            "value": float(_slope(predicted, actual)),
            "stderr": float(slopes.std()),
        },
        "predicted": predicted.tolist(),
        "retrained": actual.tolist(),
        "retrained stderr": found.stderr.T.tolist(),
    }


def errors(of: Work) -> dict[str, Any]:
    """Errors of sums in units of what they are stated to be: groups that are alike, and random ones."""
    train, asked = of.train_set(), of.asked()[:QUERIES]
    model, count = of.fit(range(len(train)), 0).model, len(train)

    def ask(**given: Any) -> Attribution:
        return attribute(model, train, asked, task=of.task, baseline=False, shown=1, **given)

    random = torch.randint(20, (count,), generator=torch.Generator().manual_seed(0)).tolist()
    kinds = {"alike": groups_of(of), "random": random}
    exact, found = ask(**EXACT), dict[str, Any]()
    for solve, given in (("quick", {"accuracy": "quick"}), ("defaults", {})):
        for kind, names in kinds.items():
            groups = ask(groups=names, **given).groups()
            off = (groups.effects - exact.groups(names).effects) / groups.stderr
            found[f"{solve}, {kind}"] = {
                "groups": len(groups.names),
                "root mean square": float(off.square().mean().sqrt()),
                "covered by 95%": float((off.abs() < 1.96).double().mean()),
            }
    return found


def _correlation(a: Tensor, b: Tensor) -> Tensor:
    return torch.corrcoef(torch.stack([a, b]))[0, 1]


def _slope(predicted: Tensor, actual: Tensor) -> Tensor:
    return (predicted * actual).sum() / predicted.square().sum()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.groups", description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", default=NAMES, metavar="NAME", help=f"of {', '.join(NAMES)}")
    parser.add_argument("--errors", action="store_true", help="only the errors of sums")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name in options.names if not options.errors else ():
        row = retrained(work(name))
        report(
            f"{name}: {len(row['groups'])} groups, {row['queries']} queries, {row['seeds']} seeds",
            ("", "value", "±"),
            [
                (what, f"{next(iter(row[what].values())):.3f}", f"{row[what]['stderr']:.3f}")
                for what in (
                    "correlation over groups",
                    "correlation of all",
                    "slope, retrained over predicted",
                )
            ],
        )
        save(f"groups_{name}", row)
    if tuple(options.names) != NAMES and not options.errors:
        return
    rows = {name: errors(work(name)) for name in ERRORS}
    report(
        "errors of groups' effects in units of what they are stated to be",
        ("work", "solve, groups", "root mean square", "covered by 95%"),
        [
            (name, what, f"{row['root mean square']:.2f}", f"{row['covered by 95%']:.3f}")
            for name, found in rows.items()
            for what, row in found.items()
        ],
    )
    save("groups_errors", rows)


if __name__ == "__main__":
    main()
