"""Gathering what a page will show: the queries, the examples at the ends of the rankings, and their tokens' shares."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from whence.attribution.ranking import rank_examples
from whence.attribution.uncertainty import Scored
from whence.errors import DataError
from whence.exhibit import Exhibit
from whence.model.data import TermSet
from whence.model.gauss_newton import GaussNewton
from whence.progress import track
from whence.runs.scores import PartOfScores
from whence.scoring import Scorer
from whence.tasks.categorical import CategoricalTask
from whence.vectors import ParamVector

__all__ = ["ask", "describer", "ends_of_rankings", "token_shares"]


def ask(
    gnh: GaussNewton, queries: TermSet, show: Callable[[int], Exhibit], class_names: Sequence[str] | None
) -> tuple[Tensor, tuple[Exhibit, ...]]:
    """The queries' losses, and what to show of them, with the model's own answer.

    Raises:
        DataError: a query whose loss is NaN or infinite, or that has no term.
    """
    losses, exhibits = [], []
    for position in range(len(queries)):
        batch = queries.fetch(torch.tensor([position]))
        with torch.no_grad():
            outputs = gnh.network.outputs(batch)
        gnh.task.check(outputs, batch)
        loss = float(gnh.task.query_losses(outputs, batch).sum())
        if not torch.isfinite(torch.tensor(loss)):
            raise DataError(f"the loss of query {position} is {loss}; check its inputs and label")
        losses.append(loss)
        exhibit = show(position)
        if exhibit.prediction is None and isinstance(gnh.task, CategoricalTask) and batch.targets.ndim == 1:
            probabilities = outputs[0].float().softmax(-1)
            best = int(probabilities.argmax())
            name = class_names[best] if class_names is not None and best < len(class_names) else str(best)
            exhibit = replace(exhibit, prediction=f"{name} ({float(probabilities[best]):.0%})")
        exhibits.append(exhibit)
    return torch.tensor(losses, dtype=torch.float64), tuple(exhibits)


def ends_of_rankings(scores: PartOfScores, shown: int, baseline: int = 5) -> list[set[int]]:
    """For each query, the positions (among the scored) of the examples that its page shows."""
    chosen = []
    for q in range(scores.chains.shape[1]):
        ends = {
            position
            for harmful in (False, True)
            for position, _, _ in rank_examples(
                Scored(scores.chains[:, q]), shown, harmful=harmful, confidence=0.95
            )
        }
        if scores.dots is not None:
            ends |= set(scores.dots[q].argsort(descending=True, stable=True)[:baseline].tolist())
        chosen.append(ends)
    return chosen


def token_shares(
    gnh: GaussNewton, chains: list[ParamVector], positions: list[list[int]]
) -> dict[tuple[int, int], tuple[float, ...]]:
    """Each token's share of the shown scores: (query, position) -> one number per token.

    The prediction of token j + 1 is made at token j, so the first token has none.
    """
    shares: dict[tuple[int, int], tuple[float, ...]] = {}
    for q, wanted in enumerate(track(positions, "scores of tokens")):
        mean = chains[0].column(q).clone()
        for count, chain in enumerate(chains[1:], start=2):
            mean.lerp_(chain.column(q), 1 / count)
        scorer = Scorer(gnh, mean, method="directional")
        for position, row in zip(wanted, scorer.term_shares(torch.tensor(wanted)), strict=True):
            shares[q, position] = (0.0, *row[0, :-1].tolist())
    return shares


def describer(data: Any, guess: Callable[[Any, int], Exhibit]) -> Callable[[int], Exhibit]:
    """How to show an example: the data's own ``exhibit(index)`` where it has one, else a guess."""
    own = getattr(data, "exhibit", None)
    if callable(own):
        return lambda index: own(index)
    return lambda index: guess(data[index], index)
