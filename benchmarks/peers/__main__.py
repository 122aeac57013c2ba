"""Agreement of peers' scores with retraining, beside ours: `python -m benchmarks.peers [NAME …]`, in our environment.

Every difference to whence (`benchmarks.peers.ours`) is of the same resamples of halves and queries, so that it is known
better than either score: a peer at its defaults, and at the best of its grid, picked by the retraining itself.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Mapping, Sequence
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
from whence.validation.datamodeling import Bench

#: Of the results, without its ending.
FILE = "peers_damping"


#: LDS of every query, and in every resample: what a `Bench` makes of scores; None where they are no numbers.
Correlations = tuple[Tensor, Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__.split(":")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(WORKS)}; all by default")
    parser.add_argument("--peer", action="append", choices=ROSTER, help="one of them; all by default")
    parser.add_argument("--show", action="store_true", help="what is there, judging nothing")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = earlier()
    for name in [] if options.show else options.names or WORKS:
        for peer, judged in judge_work(name, options.peer or list(ROSTER)).items():
            results.setdefault(peer, {})[name] = judged
        results = {
            peer: {each: results[peer][each] for each in WORKS if each in results[peer]}
            for peer in (OURS, *ROSTER)
            if peer in results
        }
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


def judge_work(name: str, peers: Sequence[str]) -> dict[str, Any]:
    """What whence and the peers answered about a work, by name; without those that were not asked yet."""
    known = {peer: Answers.load(path) for peer in (OURS, *peers) if (path := kept(peer, name)).exists()}
    for peer in [peer for peer, answers in known.items() if not answers.complete]:
        print(f"{name}: {peer} has not been asked at every setting yet")
        del known[peer]
    if known and not (TRUTHS / f"{name}.safetensors").exists():
        print(f"{name}: no ground truth yet; see python -m benchmarks.truth")
        return {}
    if not known:
        return {}
    bench = Bench(truth(work(name)), 0.95, 1000, torch.Generator().manual_seed(2))
    ours: dict[str, Correlations] = {}
    if OURS in known:
        ours = {answer.setting: bench.correlations(answer.scores) for answer in known[OURS].answers}
    return {peer: judge(answers, bench, {} if peer == OURS else ours) for peer, answers in known.items()}


def judge(answers: Answers, bench: Bench, ours: Mapping[str, Correlations]) -> dict[str, Any]:
    """What is kept of a peer's scores of a work: the LDS at each setting, the best of the grid, ours, the costs."""
    settings, rivals, grid = {}, {}, []
    for answer in answers.answers:
        if answer.setting == "grid":
            few = None if broken_queries(answer.scores) else bench.correlations(answer.scores, bench.rows[:1])
            grid.append({**about(answer), "lds": None if few is None else float(few[0].nanmean())})
        else:
            rivals[answer.setting], settings[answer.setting] = judge_one(answer, bench)
    best = max((one["lds"] for one in grid if one["lds"] is not None), default=None)
    if best is not None:
        place = [one["lds"] for one in grid].index(best)
        rivals["best"], judged = judge_one([a for a in answers.answers if a.setting == "grid"][place], bench)
    return {
        "ours": {
            way: {"less": {name: _difference(own, theirs, bench) for name, theirs in rivals.items()}}
            for way, own in ours.items()
        },
        "settings": settings,
        "grid": grid,
        "best": None if best is None else judged,
        "unit": answers.unit,
        "scale": answers.scale,
        "seconds_shared": round(answers.seconds, 2),
        "versions": answers.versions,
    }


def about(answer: Answer) -> dict[str, Any]:
    """What is known of a setting before its scores are judged."""
    return {
        "setting": answer.setting,
        "damping": answer.damping,
        "multiple": answer.multiple,
        "seconds": round(answer.seconds, 2),
        "broken_queries": broken_queries(answer.scores),
    }


def judge_one(answer: Answer, bench: Bench) -> tuple[Correlations | None, dict[str, Any]]:
    """The LDS at one setting, with its interval; None where scores are not numbers."""
    if broken_queries(answer.scores):
        return None, {**about(answer), "lds": None, "low": None, "high": None, "ceiling": None}
    found = bench.correlations(answer.scores)
    score = bench.score(*found)
    interval = {"lds": score.value, "low": score.low, "high": score.high, "ceiling": score.ceiling}
    return found, {**about(answer), **interval}


def _difference(ours: Correlations, theirs: Correlations | None, bench: Bench) -> dict[str, float] | None:
    """By how much our LDS is above theirs, with its 95% interval; None where their scores are no numbers."""
    if theirs is None:
        return None
    found = bench.difference(ours, theirs)
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
    """The setting at which a peer is best, be it one of its own or of the grid, by the retraining itself."""
    known = {**result["settings"], "best": result["best"]}
    found = {
        name: each["lds"] for name, each in known.items() if each is not None and each["lds"] is not None
    }
    return max(found, key=lambda name: found[name], default=next(iter(known)))


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
