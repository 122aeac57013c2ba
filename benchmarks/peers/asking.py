"""What all peers' scripts do: train the works, ask at every damping, keep the scores."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor, nn

from benchmarks.peers.answers import Answer, Answers, kept, versions
from benchmarks.works import WORKS, Data, Work, work
from whence.tasks import Task

__all__ = ["Peer", "Prepared", "ask", "main", "queries"]


class Prepared(Protocol):
    """A peer that has seen a model and its training data.

    Attributes:
        scale: what dampings of the grid are multiples of.
    """

    scale: float

    def scores(self, queries: Sequence[Tensor], damping: float | None) -> Tensor:
        """Of every training example for every query, ``[queries, train]``, positive where it helps."""
        ...


@dataclass(frozen=True)
class Peer:
    """How a peer is used.

    Attributes:
        name: of its package and of its files.
        unit: what `Prepared.scale` is, in words.
        settings: dampings of its own, by name: its defaults and what its examples say.
        multiples: the grid.
        prepare: does what all dampings share, for a trained model, its task and its training data.
        tasks: what it can be asked about.
    """

    name: str
    unit: str
    settings: Mapping[str, float | None]
    multiples: Sequence[float]
    prepare: Callable[[nn.Module, Task, Sequence[Tensor]], Prepared]
    tasks: tuple[type[Task], ...]


def queries(data: Data, count: int) -> list[Tensor]:
    """The first test examples, as `Work.asked` has them, but as tensors."""
    return [tensor[:count] for tensor in data.test]


def ask(peer: Peer, of: Work) -> Answers:
    """Train a work on all of its data and score it at every damping, keeping each; what is kept is not asked again."""
    path = kept(peer.name, of.name)
    before = Answers.load(path) if path.exists() else None
    if before is not None and before.complete:
        return before
    data = of.data()
    trained = of.fit(range(len(data.train[0])), 1000)
    started = time.process_time()
    prepared = peer.prepare(trained.model, of.task, data.train)
    answers = Answers(
        peer.name,
        of.name,
        peer.unit,
        prepared.scale,
        seconds=time.process_time() - started,
        answers=() if before is None else before.answers,
        versions=versions(peer.name, "torch", "whence"),
        complete=False,
    )
    asked = [(setting, damping, None) for setting, damping in peer.settings.items()]
    asked += [("grid", multiple * prepared.scale, multiple) for multiple in peer.multiples]
    for setting, damping, multiple in asked[len(answers.answers) :]:
        started = time.process_time()
        scores = prepared.scores(queries(data, of.queries), damping)
        answer = Answer(setting, damping, multiple, time.process_time() - started, scores)
        answers = replace(answers, answers=(*answers.answers, answer))
        answers.save()
    answers = replace(answers, complete=True)
    answers.save()
    return answers


def main(peer: Peer, check: Callable[[], None]) -> None:
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.peers.{peer.name}")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(WORKS)}; all by default")
    parser.add_argument(
        "--check", action="store_true", help="only compare with dense algebra on a tiny problem"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.check:
        check()
        return
    for name in options.names or WORKS:
        if not isinstance(work(name).task, peer.tasks):
            print(f"{name}: {peer.name} cannot be asked about {type(work(name).task).__name__}", flush=True)
            continue
        answers = ask(peer, work(name))
        seconds = answers.seconds + sum(answer.seconds for answer in answers.answers)
        print(f"{name}: {len(answers.answers)} dampings, {seconds:.0f} s", flush=True)
