"""The linear datamodeling score of peers' scores: `python -m benchmarks.peers [NAME …]`, in our environment."""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch
from torch import Tensor

from benchmarks.peers.answers import Answer, Answers, kept
from benchmarks.timing import RESULTS, report, save
from benchmarks.truth import DIRECTORY as TRUTHS
from benchmarks.truth import truth
from benchmarks.works import WORKS, work
from whence.validation import Outcomes, linear_datamodeling_score

PEERS = ("kronfluence", "dattri", "bergson")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__.split(":")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(WORKS)}; all by default")
    options = parser.parse_args()
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
            results.setdefault(peer, {})[name] = judge(answers, truth(work(name)))
            judged += 1
    results = {
        peer: {name: results[peer][name] for name in WORKS if name in results[peer]} for peer in results
    }
    if judged:
        save("peers_damping", results)
    for peer, works in results.items():
        show(peer, works)


def judge(answers: Answers, outcomes: Outcomes) -> dict[str, Any]:
    """What is kept of a peer's scores of a work: the LDS at each damping, the best of the grid, and the costs."""
    judged = [judge_one(answer, outcomes) for answer in answers.answers]
    grid = [each for each in judged if each["setting"] == "grid"]
    known = [each for each in grid if each["lds"] is not None]
    return {
        "settings": {each["setting"]: each for each in judged if each["setting"] != "grid"},
        "grid": grid,
        "best": max(known, key=lambda each: each["lds"]) if known else None,
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
    score = linear_datamodeling_score(answer.scores, outcomes, generator=torch.Generator().manual_seed(2))
    interval = {"lds": score.value, "low": score.low, "high": score.high, "ceiling": score.ceiling}
    return {**about, **interval, "broken_queries": 0}


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


def in_words(judged: dict[str, Any] | None) -> str:
    """An LDS with its interval."""
    if judged is None or judged["lds"] is None:
        return "not a number"
    return f"{judged['lds']:.3f} [{judged['low']:.3f}, {judged['high']:.3f}]"


if __name__ == "__main__":
    main()
