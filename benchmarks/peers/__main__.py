"""Agreement of peers' scores with retraining, beside ours: `python -m benchmarks.peers [NAME …]`, in our environment.

Every difference to whence (`benchmarks.peers.ours`) is of the same resamples of halves and queries, so that it is known
better than either score: a peer at its defaults, and at the best of its grid, picked by the retraining itself.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.peers.answers import Answer, Answers, kept
from benchmarks.peers.ours import NAME as OURS
from benchmarks.peers.roster import ROSTER
from benchmarks.timing import RESULTS, report, save
from benchmarks.truth import DIRECTORY as TRUTHS
from benchmarks.truth import truth
from benchmarks.works import WORKS, work
from whence.validation import Outcomes, compare_datamodeling_scores, linear_datamodeling_score

#: Of the results, without its ending.
FILE = "peers_damping"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__.split(":")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(WORKS)}; all by default")
    parser.add_argument(
        "--peer", action="append", choices=[OURS, *ROSTER], help="one of them; all by default"
    )
    parser.add_argument("--show", action="store_true", help="what is there, judging nothing")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = earlier()
    for peer in [] if options.show else options.peer or [OURS, *ROSTER]:
        for name in options.names or WORKS:
            if (judged := judge_kept(peer, name)) is not None:
                results.setdefault(peer, {})[name] = judged
    results = {
        peer: {name: results[peer][name] for name in WORKS if name in results[peer]}
        for peer in (OURS, *ROSTER)
        if peer in results
    }
    if not options.show:
        save(FILE, results)
    for peer, works in results.items():
        show(peer, works)
        if peer != OURS:
            show_beside(peer, works)


def earlier() -> dict[str, Any]:
    """What was judged before, by peer and work; whence's own scores among them."""
    path = RESULTS / f"{FILE}.json"
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["results"] if path.exists() else {}
    return found


def judge_kept(peer: str, name: str) -> dict[str, Any] | None:
    """Judge what a peer answered about a work; None, and a word why, where that cannot be."""
    path = kept(peer, name)
    if not path.exists():
        return None
    answers = Answers.load(path)
    if not answers.complete:
        print(f"{name}: {peer} has not been asked at every setting yet")
        return None
    if not (TRUTHS / path.name).exists():
        print(f"{name}: no ground truth yet; see python -m benchmarks.truth")
        return None
    known = kept(OURS, name)
    ours = Answers.load(known).answers if peer != OURS and known.exists() else ()
    return judge(answers, truth(work(name)), ours)


def judge(answers: Answers, outcomes: Outcomes, ours: Sequence[Answer]) -> dict[str, Any]:
    """What is kept of a peer's scores of a work: the LDS at each setting, the best of the grid, ours, the costs."""
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
    rows = []
    for name, result in works.items():
        best, at = result["best"], ""
        if best is not None:
            ends = {result["grid"][0]["multiple"], result["grid"][-1]["multiple"]}
            at = f"{best['multiple']:.2g}" + (" (an end)" if best["multiple"] in ends else "")
        cells = [in_words(result["settings"][setting]) for setting in settings]
        rows.append((name, *cells, in_words(best) if result["grid"] else "", at, f"{seconds(result):.1f} s"))
    unit = next(iter(works.values()))["unit"]
    about = f"; dampings of the grid are multiples of the {unit}" if unit and peer != OURS else ""
    report(f"LDS of {peer}, with 95% intervals{about}", ("work", *settings, "best of ten", "at", "CPU"), rows)


def seconds(result: dict[str, Any], setting: str | None = None) -> float:
    """Of the processor, for all of a job: at one setting, or at the first there is."""
    known = result["settings"] or {"best": result["best"] or result["grid"][0]}
    spent: float = result["seconds_shared"] + known[setting or next(iter(known))]["seconds"]
    return spent


def rival(result: dict[str, Any]) -> str:
    """What of a peer is compared with ours: the best of its grid, or what it does where it has none."""
    return "best" if result["best"] is not None else next(iter(result["settings"]), "best")


def verdict(less: dict[str, float] | None) -> str:
    """Whether a difference's interval is above zero, below, or neither; a rival without numbers is beaten."""
    if less is None or less["low"] > 0:
        return "above"
    return "BELOW" if less["high"] < 0 else "undecided"


def show_beside(peer: str, works: dict[str, Any]) -> None:
    """Print by how much we are above a peer at its best, where that can be decided."""
    beside = {name: result for name, result in works.items() if result.get("ours")}
    if not beside:
        return
    ways = list(next(iter(beside.values()))["ours"])
    rows, counts = [], {way: Counter[str]() for way in ways}
    for name, result in beside.items():
        cells = []
        for way in ways:
            less = result["ours"][way]["less"].get(rival(result))
            counts[way][verdict(less)] += 1
            said = (
                "no numbers"
                if less is None
                else f"{less['by']:+.3f} [{less['low']:+.3f}, {less['high']:+.3f}]"
            )
            cells.append(f"{said} {verdict(less)}".removesuffix(" undecided"))
        rows.append((name, *cells))
    report(f"LDS of whence less that of {peer} at its best, with 95% intervals", ("work", *ways), rows)
    for way, found in counts.items():
        print(
            f"{way}: above on {found['above']}, undecided on {found['undecided']}, below on {found['BELOW']}"
        )


def in_words(judged: dict[str, Any] | None) -> str:
    """An LDS with its interval."""
    if judged is None or judged["lds"] is None:
        return "not a number"
    return f"{judged['lds']:.3f} [{judged['low']:.3f}, {judged['high']:.3f}]"


if __name__ == "__main__":
    main()
