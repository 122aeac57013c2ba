"""Results before a change beside those after it, in one table, from ``results/before`` and ``results``.

``python -m benchmarks.compare`` prints Markdown: ratios and shares, and seconds of one core where nothing else is there
to compare. A row stands where both sides have a number, and the second is the later one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.curves import AUTO, Curve, Point
from benchmarks.timing import RESULTS

Rows = Iterator[tuple[str, str]]


def _solvers(results: dict[str, Any]) -> Rows:
    for row in results["rows"]:
        curve = next((curve for curve in row["curves"] if curve["method"] == AUTO), None)
        if curve is None or not curve["points"]:
            continue
        made = Curve(AUTO, [Point(**point) for point in curve["points"]])
        point = made.points[-1]
        missed = "" if made.at_target() else ", **below 0.99**"
        yield f"auto, {row['name']}", f"{point.seconds:.3g} s, {point.correlation:.4f}{missed}"
    for margin in results.get("marginal", []):
        one, many = (float(margin["seconds"][count]) for count in ("1", "32"))
        yield f"attribute, {margin['name']}", f"{many:.3g} s ({many / one:.1f} × one query)"


def _coverage(results: dict[str, Any]) -> Rows:
    for row in results["rows"]:
        of = row.get("condition_number")
        name = row["solver"] if of is None else f"{row['solver']}, κ = {of:g}"
        yield f"coverage of 95% intervals, {name}", f"{row['covered']:.3f}"


def _until(results: dict[str, Any]) -> Rows:
    for row in results["rows"]:
        yield f"until, {row['solver']}: right of claimed", f"{row['right']} of {row['claimed']}"


def _datamodeling(results: dict[str, Any]) -> Rows:
    for name, score in results["scores"].items():
        yield f"LDS on digits, {name}", f"{score['value']:.3f} ({score['low']:.3f} to {score['high']:.3f})"


def _products(results: dict[str, Any]) -> Rows:
    for workload, found in results["workloads"].items():
        for name, row in found["contenders"].items():
            if name.startswith("whence"):
                yield f"product / gradient, {workload}, {name}", f"{row['gradients']['median']:.2f}"


def _memory(results: dict[str, Any]) -> Rows:
    for case in results["cases"]:
        name = f"{case['product']}, {case['average']}, {case['chains']} chains, {case['passes']} passes"
        yield f"copies of the model at the peak, {name}", f"{case['peak_copies']:.2f}"


def _scoring(results: dict[str, Any]) -> Rows:
    for name, row in results["one_query"].items():
        if "two plain" not in name:
            yield (
                f"scoring, times as fast as a backward, {name}",
                f"{row['times_as_fast_as_backward']['median']:.2f}",
            )


_READERS = {
    "solvers_digits": _solvers,
    "solvers_resnet": _solvers,
    "solvers_llama": _solvers,
    "solvers_million": _solvers,
    "coverage": _coverage,
    "until": _until,
    "datamodeling": _datamodeling,
    "products": _products,
    "memory": _memory,
    "scoring": _scoring,
}


def _read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def main() -> None:
    print("| | before | after |\n|---|---|---|")
    for name, rows in _READERS.items():
        before, after = (directory / f"{name}.json" for directory in (RESULTS / "before", RESULTS))
        if not before.exists() or not after.exists():
            continue
        earlier, later = _read(before), _read(after)
        if later["environment"]["date"] <= earlier["environment"]["date"]:
            continue  # not measured since
        was, now = (dict(rows(found["results"])) for found in (earlier, later))
        for key in (key for key in was if key in now):
            print(f"| {key} | {was[key]} | {now[key]} |")


if __name__ == "__main__":
    main()
