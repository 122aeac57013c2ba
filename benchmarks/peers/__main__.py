"""Agreement of peers' scores with retraining, beside ours: `python -m benchmarks.peers [NAME …]`, in our environment.

Every difference to whence (`benchmarks.peers.ours`) is of the same resamples of halves and queries, so that it is known
better than either score: a peer at its defaults, and at the best of its grid, picked by the retraining itself.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.peers.answers import Answer, Answers, kept
from benchmarks.peers.ours import NAME as OURS
from benchmarks.timing import RESULTS, report, save
from benchmarks.truth import DIRECTORY as TRUTHS
from benchmarks.truth import truth
from benchmarks.works import WORKS, work
from whence.validation import Outcomes, compare_datamodeling_scores, linear_datamodeling_score

PEERS = ("kronfluence", "dattri", "bergson")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__.split(":")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(WORKS)}; all by default")
    options = parser.parse_args()
    torch.set_num_threads(1)
    earlier = RESULTS / "peers_damping.json"
    results = json.loads(earlier.read_text(encoding="utf-8"))["results"] if earlier.exists() else {}
    judged = 0
    for peer in PEERS:
        for name in options.names or WORKS:
            path = kept(peer, work(name).name)
            if not path.exists():
                continue
            answers = Answers.load(path)
            if not answers.complete:
                print(f"{name}: {peer} has not been asked at every damping yet")
                continue
            if not (TRUTHS / path.name).exists():
                print(f"{name}: no ground truth yet; see python -m benchmarks.truth")
                continue
            known = kept(OURS, work(name).name)
            ours = Answers.load(known).answers if known.exists() else ()
            results.setdefault(peer, {})[name] = judge(answers, truth(work(name)), ours)
            judged += 1
    results = {
        peer: {name: results[peer][name] for name in WORKS if name in results[peer]} for peer in results
    }
    if judged:
        save("peers_damping", results)
    for peer, works in results.items():
        show(peer, works)
        show_beside(peer, works)


def judge(answers: Answers, outcomes: Outcomes, ours: Sequence[Answer]) -> dict[str, Any]:
    """What is kept of a peer's scores of a work: the LDS at each damping, the best of the grid, ours, the costs."""
    judged = [judge_one(answer, outcomes) for answer in answers.answers]
    grid = [each for each in judged if each["setting"] == "grid"]
    known = [each for each in grid if each["lds"] is not None]
    best = max(known, key=lambda each: each["lds"]) if known else None
    rivals = {answer.setting: answer.scores for answer in answers.answers if answer.setting != "grid"}
    if best is not None:
        rivals["best"] = answers.answers[judged.index(best)].scores
    return {
        "ours": {
            own.setting: {
                "lds": linear_datamodeling_score(own.scores, outcomes, generator=_drawn()).value,
                "less": {name: _difference(own.scores, theirs, outcomes) for name, theirs in rivals.items()},
            }
            for own in ours
        },
        "settings": {each["setting"]: each for each in judged if each["setting"] != "grid"},
        "grid": grid,
        "best": best,
        "unit": answers.unit,
        "scale": answers.scale,
        "seconds_shared": round(answers.seconds, 2),
        "versions": answers.versions,
    }


def judge_one(answer: Answer, outcomes: Outcomes) -> dict[str, Any]:
    """The LDS at one damping; None where scores are not numbers."""
    about = {
        "setting": answer.setting,
        "damping": answer.damping,
        "multiple": answer.multiple,
        "seconds": round(answer.seconds, 2),
    }
    if broken := broken_queries(answer.scores):
        return {**about, "lds": None, "low": None, "high": None, "ceiling": None, "broken_queries": broken}
    score = linear_datamodeling_score(answer.scores, outcomes, generator=_drawn())
    interval = {"lds": score.value, "low": score.low, "high": score.high, "ceiling": score.ceiling}
    return {**about, **interval, "broken_queries": 0}


def _drawn() -> torch.Generator:
    return torch.Generator().manual_seed(2)


def _difference(ours: Tensor, theirs: Tensor, outcomes: Outcomes) -> dict[str, float] | None:
    """By how much our LDS is above theirs, with its 95% interval; None where their scores are no numbers."""
    if broken_queries(theirs):
        return None
    found = compare_datamodeling_scores(ours, theirs, outcomes, generator=_drawn())
    return {"by": found.value, "low": found.low, "high": found.high}


def broken_queries(scores: Tensor) -> int:
    """How many queries have scores that are NaN or infinite."""
    return int((~torch.isfinite(scores)).any(1).sum())


def show(peer: str, works: dict[str, Any]) -> None:
    """Print a peer's table."""
    settings = list(next(iter(works.values()))["settings"])
    unit = next(iter(works.values()))["unit"]
    rows = []
    for name, result in works.items():
        best = result["best"]
        at_the_end = best is not None and best["multiple"] in (
            result["grid"][0]["multiple"],
            result["grid"][-1]["multiple"],
        )
        seconds = result["seconds_shared"] + result["settings"][settings[0]]["seconds"]
        rows.append(
            (
                name,
                *(in_words(result["settings"][setting]) for setting in settings),
                in_words(best),
                "" if best is None else f"{best['ceiling']:.3f}",
                "" if best is None else f"{best['multiple']:.2g}" + (" (an end)" if at_the_end else ""),
                f"{seconds:.1f} s",
            )
        )
    report(
        f"LDS of {peer}, with 95% intervals; dampings of the grid are multiples of the {unit}",
        ("work", *settings, "best of ten", "ceiling", "at", f"CPU, {settings[0]}"),
        rows,
    )


def show_beside(peer: str, works: dict[str, Any]) -> None:
    """Print by how much we are above a peer at its best damping, where that can be decided."""
    beside = {name: result["ours"] for name, result in works.items() if result.get("ours")}
    if not beside:
        return
    ways = list(next(iter(beside.values())))
    rows, counts = [], {way: [0, 0, 0] for way in ways}
    for name, ours in beside.items():
        cells = []
        for way in ways:
            less = ours[way]["less"].get("best")
            if less is None:
                cells.append("")
                continue
            verdict = 0 if less["low"] > 0 else 2 if less["high"] < 0 else 1
            counts[way][verdict] += 1
            mark = ("above", "", "BELOW")[verdict]
            cells.append(f"{less['by']:+.3f} [{less['low']:+.3f}, {less['high']:+.3f}] {mark}")
        rows.append((name, *cells))
    report(
        f"LDS of whence less that of {peer} at its best damping, with 95% intervals", ("work", *ways), rows
    )
    for way, (above, undecided, below) in counts.items():
        print(f"{way}: above on {above}, undecided on {undecided}, below on {below}")


def in_words(judged: dict[str, Any] | None) -> str:
    """An LDS with its interval."""
    if judged is None or judged["lds"] is None:
        return "not a number"
    return f"{judged['lds']:.3f} [{judged['low']:.3f}, {judged['high']:.3f}]"


if __name__ == "__main__":
    main()
