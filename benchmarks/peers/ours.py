"""whence's own scores of the works, kept beside those of the peers: `python -m benchmarks.peers.ours [NAME …]`.

In our environment. `python -m benchmarks.peers` then tells by how much they differ from each peer's, on the same
resamples of halves and queries.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from typing import Any

import torch

from benchmarks.damping import recipe_of
from benchmarks.peers.answers import Answer, Answers, kept, versions
from benchmarks.works import WORKS, Work, work
from whence import attribute

__all__ = ["NAME"]

NAME = "whence"


def ask(of: Work) -> Answers:
    """Scores at the quick answer, at the defaults, and with what is known of the training, each kept once made."""
    path = kept(NAME, of.name)
    before = Answers.load(path) if path.exists() else None
    if before is not None and before.complete:
        return before
    train, queries = of.train_set(), of.asked()
    trained = of.fit(range(len(train)), 1000)
    settings: dict[str, dict[str, Any]] = {
        "quick": {"accuracy": "quick"},
        "default": {},
        "training": {"training": recipe_of(trained)},
    }
    made = () if before is None else tuple(before.answers)
    answers = Answers(
        NAME, of.name, "λ", 1.0, 0.0, answers=made, versions=versions("torch", "whence"), complete=False
    )
    for name, options in list(settings.items())[len(made) :]:
        started = time.process_time()
        found = attribute(trained.model, train, queries, task=of.task, baseline=False, **options)
        seconds = time.process_time() - started
        answer = Answer(name, found.solve.plan.damping, None, seconds, found.scores)
        answers = replace(answers, answers=(*answers.answers, answer))
        answers.save()
    answers = replace(answers, complete=True)
    answers.save()
    return answers


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers.ours", description=__doc__.split(":")[0]
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(WORKS)}; all by default")
    torch.set_num_threads(1)
    for name in parser.parse_args().names or WORKS:
        said = ", ".join(f"{each.setting} {each.seconds:.1f} s" for each in ask(work(name)).answers)
        print(f"{name}: {said}", flush=True)


if __name__ == "__main__":
    main()
