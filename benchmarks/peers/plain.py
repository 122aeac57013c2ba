"""What needs no library: dot products and cosines of gradients, and BM25 of texts.

    python -m benchmarks.peers.plain [--check] [--peer NAME] [NAME …]

In our environment. `--check` compares gradients with dense ones, and BM25 with its formula, term by term.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.peers import tiny
from benchmarks.peers.asking import Peer, main
from benchmarks.works import mean_loss
from whence import Classification, LanguageModeling
from whence.tasks import Task


class Gradients:
    """Dot products of the gradients of all parameters, or their cosines."""

    scale = 1.0  # there is no grid

    def __init__(self, model: nn.Module, task: Task, train: Sequence[Tensor], *, cosine: bool) -> None:
        self.model, self.task, self.train, self.cosine = model, task, train, cosine
        self.parameters = [p for p in model.parameters() if p.requires_grad]

    def scores(self, queries: Sequence[Tensor], damping: float | None) -> Tensor:
        asked = torch.stack([self._gradient(row) for row in zip(*queries, strict=True)])
        columns = [asked @ self._gradient(row) for row in zip(*self.train, strict=True)]
        return torch.stack(columns, 1)

    def _gradient(self, example: Sequence[Tensor]) -> Tensor:
        loss = mean_loss(self.model, self.task, [part.unsqueeze(0) for part in example])
        gradient = torch.cat([part.flatten() for part in torch.autograd.grad(loss, self.parameters)])
        return (
            F.normalize(gradient, dim=0) if self.cosine else gradient
        )  # of an example without loss it is zero


class Bm25:
    """Okapi BM25 of rows of tokens, with the usual k1 = 1.5 and b = 0.75."""

    scale, k1, b = 1.0, 1.5, 0.75

    def __init__(self, model: nn.Module, task: Task, train: Sequence[Tensor]) -> None:
        self.rows = [Counter(row.tolist()) for row in train[0]]
        self.containing = Counter(token for row in self.rows for token in row)
        self.mean_length = sum(row.total() for row in self.rows) / len(self.rows)

    def scores(self, queries: Sequence[Tensor], damping: float | None) -> Tensor:
        return torch.tensor(
            [[self._score(Counter(q.tolist()), row) for row in self.rows] for q in queries[0]]
        )

    def _score(self, query: Counter[int], row: Counter[int]) -> float:
        long = self.k1 * (1 - self.b + self.b * row.total() / self.mean_length)
        return sum(
            times * self._rarity(token) * row[token] * (self.k1 + 1) / (row[token] + long)
            for token, times in query.items()
            if token in row
        )

    def _rarity(self, token: int) -> float:
        having = self.containing[token]
        return math.log(1 + (len(self.rows) - having + 0.5) / (having + 0.5))


_DOT, _COSINE = (
    Peer(
        name,
        None,
        settings={"default": None},
        prepare=partial(Gradients, cosine=cosine),
    )
    for name, cosine in (("dot", False), ("cosine", True))
)
_BM25 = Peer("bm25", None, settings={"default": None}, prepare=Bm25)
PEERS = (_DOT, _COSINE, _BM25)


def check() -> None:
    for problem in (tiny.network, tiny.picture_network):
        model, train, queries = problem()
        expected = tiny.dot_products(model, train, queries)
        sizes = [tiny.dot_products(model, data, data).diagonal().sqrt() for data in (queries, train)]
        for cosine, dense in ((False, expected), (True, expected / torch.outer(*sizes))):
            found = Gradients(model, Classification(), train, cosine=cosine).scores(queries, None)
            tiny.agree(f"{problem.__name__}, cosine {cosine}, dense gradients", found, dense)
    model, train, queries = tiny.language_model()
    rows, expected = train[0], torch.zeros(len(queries[0]), len(train[0]), dtype=torch.float64)
    for i, query in enumerate(queries[0]):
        for j, row in enumerate(rows):
            for token in query:  # all rows are as long as their mean
                inside, having = int((row == token).sum()), int((rows == token).any(1).sum())
                rarity = math.log((len(rows) + 1) / (having + 0.5))
                expected[i, j] += rarity * 2.5 * inside / (inside + 1.5)
    tiny.agree("language model, BM25", Bm25(model, LanguageModeling(), train).scores(queries, None), expected)


if __name__ == "__main__":
    main(PEERS, check)
