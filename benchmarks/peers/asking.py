"""What all peers' scripts do: train the works, ask at every damping, keep the scores."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from benchmarks.peers.answers import Answer, Answers, kept, versions
from benchmarks.peers.roster import ROSTER
from benchmarks.works import WORKS, Checkpoint, Data, Work, mislabelled, work
from whence.tasks import Task

__all__ = ["CHECKPOINTS", "Peer", "Prepared", "ask", "main", "queries"]


#: Of training, for peers that want several.
CHECKPOINTS = 5
#: Seeds of flipped labels.
MISLABELLED = 10


class Prepared(Protocol):
    """A peer that has seen a model and its training data.

    Attributes:
        scale: what dampings of the grid are multiples of.
    """

    scale: float

    def scores(self, queries: Sequence[Tensor], damping: float | None) -> Tensor:
        """Of every training example for every query, ``[queries, train]``, positive where it helps."""
        ...


class SelfInfluence(Prepared, Protocol):
    """One that also says how much every training example influences itself."""

    def self_scores(self) -> Tensor:
        """At the defaults, ``[train]``: large where a label looks wrong."""
        ...


@dataclass(frozen=True)
class Peer:
    """How a peer is used.

    Attributes:
        name: as in `benchmarks.peers.roster`.
        package: what is installed of it; None where it is a few lines of ours.
        settings: dampings of its own, by name: its defaults and what its examples say.
        prepare: does what all dampings share, for a trained model, its task and its training data.
        unit: what `Prepared.scale` is, in words.
        multiples: the grid; empty for a method without damping.
        mislabels: whether what ``prepare`` gives is a `SelfInfluence`.
        checkpoints: whether ``prepare`` is given `CHECKPOINTS` of the training besides.
    """

    name: str
    package: str | None
    settings: Mapping[str, float | None]
    prepare: Callable[..., Prepared]
    unit: str = ""
    multiples: Sequence[float] = ()
    mislabels: bool = False
    checkpoints: bool = False

    def prepared(
        self, model: nn.Module, task: Task, train: Sequence[Tensor], checkpoints: Sequence[Checkpoint]
    ) -> Prepared:
        """Call ``prepare`` with what it takes."""
        return self.prepare(model, task, train, *([checkpoints] if self.checkpoints else []))


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
    trained = of.fit(range(len(data.train[0])), 1000, checkpoints=CHECKPOINTS if peer.checkpoints else 0)
    started = time.process_time()
    prepared = peer.prepared(trained.model, of.task, data.train, trained.checkpoints)
    answers = Answers(
        peer.name,
        of.name,
        peer.unit,
        prepared.scale,
        seconds=time.process_time() - started,
        answers=() if before is None else before.answers,
        versions=versions(*([peer.package] if peer.package else []), "torch", "whence"),
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


def ask_itself(peer: Peer, of: Work, seed: int) -> Answers:
    """How much every training example influences itself."""
    path = kept(peer.name, of.name)
    if path.exists():
        return Answers.load(path)
    data = of.data()
    trained = of.fit(range(len(data.train[0])), seed, checkpoints=CHECKPOINTS if peer.checkpoints else 0)
    started = time.process_time()
    prepared = peer.prepared(trained.model, of.task, data.train, trained.checkpoints)
    between = time.process_time()
    scores = cast("SelfInfluence", prepared).self_scores()
    answer = Answer("self", None, None, time.process_time() - between, scores.unsqueeze(0))
    known = versions(*([peer.package] if peer.package else []), "torch", "whence")
    answers = Answers(peer.name, of.name, peer.unit, prepared.scale, between - started, (answer,), known)
    answers.save()
    return answers


def main(peers: Sequence[Peer], check: Callable[[], None]) -> None:
    """The command line of a package's adapters."""
    names = [peer.name for peer in peers]
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.peers.{ROSTER[names[0]].module}")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(WORKS)}; all by default")
    parser.add_argument("--peer", action="append", choices=names, help="one of several; all by default")
    parser.add_argument(
        "--check", action="store_true", help="only compare with dense algebra on a tiny problem"
    )
    parser.add_argument(
        "--mislabels", action="store_true", help="only self-influence on digits with wrong labels"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.check:
        check()
        return
    if options.mislabels:
        for seed in range(MISLABELLED):
            for peer in peers:
                if peer.mislabels:
                    ask_itself(peer, mislabelled(seed), seed)
                    print(f"{mislabelled(seed).name}: {peer.name}", flush=True)
        return
    for name in options.names or WORKS:
        for peer in peers:
            if not (options.peer is None or peer.name in options.peer):
                continue
            if not isinstance(work(name).task, ROSTER[peer.name].tasks):
                said = f"cannot be asked about {type(work(name).task).__name__}"
            else:
                answers = ask(peer, work(name))
                seconds = answers.seconds + sum(answer.seconds for answer in answers.answers)
                said = f"{len(answers.answers)} settings, {seconds:.0f} s"
            print(f"{name}: {peer.name}, {said}", flush=True)
