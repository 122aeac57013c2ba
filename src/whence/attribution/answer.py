"""Rounds of solving and scoring, until the answer is as good as was asked for."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from whence.attribution import phases
from whence.attribution.result import Solve
from whence.attribution.rounds import Rounds
from whence.attribution.settings import Settings
from whence.attribution.stopping import Until, top_is_separated
from whence.attribution.uncertainty import Scored
from whence.model.gauss_newton import GaussNewton
from whence.runs import Run, ScoreParts
from whence.runs.scores import PartOfScores
from whence.scoring import Scorer
from whence.vectors import ParamVector

__all__ = ["Answer", "timed"]


class Answer:
    """What the rounds have found so far.

    Args:
        run: where everything is kept.
        rounds: of solving.
        gnh: the operator.
        positions: of the examples to score.
        rhs: gradients of the queries.
        settings: what was asked for.
        part_size: examples per part of the scores on disk.
    """

    def __init__(
        self,
        run: Run,
        rounds: Rounds,
        gnh: GaussNewton,
        positions: Tensor,
        rhs: ParamVector,
        settings: Settings,
        part_size: int | None,
    ) -> None:
        self._run, self._rounds, self._gnh = run, rounds, gnh
        self._positions, self._rhs, self._settings, self._part_size = positions, rhs, settings, part_size
        #: Solutions that the scores come from, a block for each chain.
        self.solved: list[ParamVector] = []
        #: How the scores were computed, in words.
        self.score_method = ""
        #: Where on disk they are, and in how many parts.
        self.directory, self.parts = "scores", 0
        self._scores: PartOfScores | None = None
        self._solve: Solve | None = None

    @property
    def scores(self) -> PartOfScores:
        """Of all chains."""
        assert self._scores is not None
        return self._scores

    @property
    def solve(self) -> Solve:
        """How the solver fared."""
        assert self._solve is not None
        return self._solve

    def between_queries(self) -> Tensor:
        """``∇ℓ(query)ᵀu`` between the queries by every chain."""
        return torch.stack([chain.gram(self._rhs).T for chain in self.solved]).cpu()

    def work_out(self, seconds: dict[str, float]) -> None:
        """Solve and score, in as many rounds as it takes; adds the time that both took."""
        until = None if self._settings.until is None else Until.parse(self._settings.until)
        first = 0
        while True:
            with timed(seconds, "solve"):
                self._solve = self._rounds.next()
            with timed(seconds, "scores"):
                self._score()
            if until is None:
                break
            separated = top_is_separated(self._scored(), until.k, until.confidence)
            first = first or self.solve.num_term_products
            ended = "" if bool(separated.all()) else self._ended(first)
            if ended or bool(separated.all()):
                said = until.words(separated, self._rounds.count, ended=ended)
                self._solve = replace(self.solve, events=(*self.solve.events, said))
                break
        self._rounds.clear()
        if self._rounds.count > 1 and self._run.path is not None:
            self.directory, self.parts = "scores-of-all-rounds", 1
            ScoreParts(self._run.path / self.directory).write(0, self.scores)

    def _ended(self, first: int) -> str:
        """Why there can be no further round; empty where there can."""
        solve = self.solve
        if self._rounds.exhausted:
            return "no further iteration can make the solution better in this precision"
        spent = solve.num_term_products
        following = first if self._rounds.adds_chains else spent / max(1, solve.num_products)
        return "the budget ended" if spent + following > self._settings.budget * first else ""

    def _score(self) -> None:
        """Score along what the last round found, and put it with what there is."""
        first, latest = self._scores is None, self._rounds.latest
        certified = self.solve.certificate is not None
        baseline = self._rhs if self._settings.baseline and first else None
        along = phases.directions(latest, baseline)
        scorer = Scorer(self._gnh, along, method=self._settings.method, norms=certified and first)
        parts = phases.parts_of(scorer, self._positions, self._part_size)
        name = "scores" if first else f"scores-{self._rounds.count}"
        queries = self._rhs.columns or 1
        found = phases.score(self._run, scorer, parts, len(latest), queries, name=name)
        if first:
            self.parts, self.score_method = len(parts), scorer.describe()
        chains = found.chains
        if self._scores is not None:
            found = replace(found, dots=self._scores.dots, norms=self._scores.norms)
            if self._rounds.adds_chains:
                chains = torch.cat([self._scores.chains, chains])
        self.solved = [*self.solved, *latest] if self._rounds.adds_chains else latest
        self._scores = replace(found, chains=chains)

    def _scored(self) -> Scored:
        certificate, norms = self.solve.certificate, self.scores.norms
        if certificate is None or norms is None:
            return Scored(self.scores.chains)
        trace = self.solve.plan.spectrum.trace.value
        return Scored(self.scores.chains, certificate.score_error(norms, trace))


@contextmanager
def timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    """Add what this takes to a phase's time."""
    begun = time.perf_counter()
    yield
    seconds[phase] = seconds.get(phase, 0.0) + time.perf_counter() - begun
