"""`Scorer`: ``∇ℓ(z)ᵀu`` for every example z of a data set and every direction u, in the cheapest way.

``ℓ(z)`` is the mean loss of z's terms, as for a query, so ``score(query, z)`` is symmetric in its two arguments. A
sequence's score is the mean of its tokens' ``∇ℓ_iᵀu``; `Scorer.term_shares` gives each token's share of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from whence.errors import OptionError, VectorError
from whence.model.data import TermSet
from whence.model.gauss_newton import GaussNewton
from whence.scoring.cost import Work, count_work
from whence.scoring.derivatives import DirectionalDerivatives, gradient_products, layer_products
from whence.tasks import Batch
from whence.vectors import ParamVector

__all__ = ["Method", "Scorer"]

#: Random directions that the lengths of gradients are estimated from, where no gradient is computed.
_PROBES = 8
Method = Literal["auto", "directional", "layers", "gradients"]


class Scorer:
    """Scores examples along a block of directions, a batch at a time; nothing is kept between batches.

    What an example's scores come out as, bit for bit, depends on the batch it stands in, and on nothing that
    was computed before.

    Args:
        gnh: the operator that the directions were solved for; brings the network, task and data.
        directions: ``u``, a block of k columns.
        data: what to score; the operator's own data by default.
        method: ``"directional"`` (forwards only), ``"layers"`` (one backward per batch, where all of the model's layers
            can be read so), ``"gradients"`` (one backward per example), or ``"auto"``: by the cost model of
            `whence.scoring.cost`.
        norms: whether the lengths of the examples' gradients will be asked for. They are a by-product of gradients; the
            other way estimates them from the derivatives along a few random directions, which has a price.
        exact: whether these lengths must be exact: ``"auto"`` then chooses among the ways that have gradients.

    Example:
        >>> from whence import Classification
        >>> torch.manual_seed(0)  # doctest: +ELLIPSIS
        <torch...>
        >>> model = torch.nn.Linear(2, 3).eval()
        >>> data = [(torch.tensor([1.0, 2.0]), 0), (torch.tensor([0.0, 1.0]), 2)]
        >>> gnh = GaussNewton(model, Classification(), data)
        >>> scorer = Scorer(gnh, gnh.gradients(data))
        >>> scores = scorer.score(torch.tensor([0, 1]))
        >>> bool(torch.allclose(scores, scores.T))
        True
    """

    def __init__(
        self,
        gnh: GaussNewton,
        directions: ParamVector,
        *,
        data: Any = None,
        method: Method = "auto",
        norms: bool = False,
        exact: bool = False,
    ) -> None:
        if method not in get_args(Method):
            raise OptionError(
                f"method is {method!r}; it must be 'auto', 'directional', 'layers' or 'gradients'"
            )
        if not isinstance(directions, ParamVector):
            raise VectorError(
                f"directions are a {type(directions).__name__}; give a ParamVector, such as a solution's value"
            )
        if directions.columns is None:
            directions = ParamVector.stack([directions])
        gnh.zeros().check_same_space(directions, "direction")
        if not directions.is_finite():
            raise VectorError("a direction holds NaN or infinity: its solve did not end well. Solve it again")
        self.gnh, self.directions = gnh, directions
        #: As passes take them; see `whence.model.network`.
        self._opened = gnh.network.opened(directions)
        self.terms = gnh.terms if data is None else TermSet(data, gnh.task, gnh.network.device)
        self.terms.expect(gnh.terms.width, gnh.terms.kinds)
        self._pilot = self.terms.fetch(self.terms.longest(2))
        #: The counted work of one example, and what the choice was made from.
        self.work: Work = count_work(gnh, self._pilot)
        by_dual_numbers = gnh.product == "exact"
        vectorised = by_dual_numbers and gnh.vectorises(self._pilot, self._opened)
        #: Whether lengths of gradients can be asked for.
        self.norms = norms
        self._count, self._probes = directions.columns or 1, _PROBES if norms else 0
        together = self._count + self._probes
        self._costs = {
            "directional": self.work.directional(together, exact=by_dual_numbers, vectorised=vectorised),
            "gradients": self.work.gradients(self._count),
        }
        missing = gnh.example_gradients().missing if method in ("auto", "layers") else {}
        if method == "layers" and missing:
            name, reason = next(iter(missing.items()))
            raise OptionError(
                f"method is 'layers', and examples' gradients of {name!r} cannot be read: {reason}. Use 'auto'"
            )
        if not missing:
            self._costs["layers"] = self.work.layers(self._count, norms=norms)
        #: ``"directional"``, ``"layers"`` or ``"gradients"``.
        self.method: str = method
        if method == "auto":
            ways = [way for way in self._costs if not (exact and way == "directional")]
            self.method = min(ways, key=self._costs.__getitem__)
        #: Examples per pass along all directions together, whose tangents are the largest.
        self._at_once = gnh.examples_at_once(self._opened)
        self._derivatives: DirectionalDerivatives | None = None

    @property
    def cost(self) -> float:
        """Flops' worth of work per example, in the chosen way."""
        return self._costs[self.method]

    def describe(self) -> str:
        """How scores are computed and why, in words."""
        how = {
            "directional": f"directional derivatives ({self.gnh.product})",
            "layers": "every example's gradient, layer by layer",
            "gradients": "one gradient per example",
        }[self.method]
        ratio = min(cost for way, cost in self._costs.items() if way != self.method) / self.cost
        along = f"{self._count} direction{'' if self._count == 1 else 's'}"
        if ratio < 1:
            return f"{how}, as asked for; another way would cost 1/{1 / ratio:.2g} of it for {along}"
        return f"{how}, {ratio:.2g} times cheaper than any other way for {along}"

    def score(self, positions: Tensor) -> Tensor:
        """``[k, len(positions)]`` in float64."""
        return self._score(positions)[0]

    def score_with_norms(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The same, and ``‖∇ℓ(z)‖``, ``[len(positions)]``; of a scorer that was made for ``norms``."""
        rows, squares = self._score(positions)
        if squares is None:
            raise OptionError("this scorer was made without norms=True; make another one")
        return rows, squares.sqrt()

    def _score(self, positions: Tensor) -> tuple[Tensor, Tensor | None]:
        """Every process scores its share of the examples."""
        k, ranks = self._count, self.gnh.network.ranks
        result = torch.zeros(k + self._probes, len(positions), dtype=torch.float64)
        squares = torch.zeros(len(positions), dtype=torch.float64)
        if self.method == "gradients":
            for column, position in enumerate(positions.tolist()):
                # all processes of a sharded model pass together, and each multiplies its rows
                if self.gnh.network.together or column % ranks.size == ranks.rank:
                    batch = self.terms.fetch(torch.tensor([position]))
                    products, squares[column] = gradient_products(self.gnh, self._opened, batch)
                    result[:k, column] = products.cpu()
        elif self.method == "layers":
            for columns, batch in self._batches(positions, self.gnh.micro_batch):
                products, lengths = layer_products(self.gnh, self._opened, batch, norms=self.norms)
                held = len(columns)
                result[:k, columns], squares[columns] = products[:, :held].cpu(), lengths[:held].cpu()
        else:
            for columns, shares in self._shares(self._batches(positions, self._at_once)):
                result[:, columns] = shares[:, : len(columns)].sum(2)
        result, squares = ranks.sum(result), ranks.sum(squares)
        if not self._probes:
            return result, None
        return result[:k], squares if self.method != "directional" else result[k:].square().mean(0)

    def _batches(
        self, positions: Tensor, size: int, *, all_alike: bool = False
    ) -> Iterator[tuple[Tensor, Batch]]:
        """Micro-batches of similar lengths, and the columns of this process's share of each; or all of it on all."""
        for columns in self.terms.by_length(positions).split(size) if len(positions) else ():
            batch = self.terms.fetch(positions[columns])
            batch = batch if all_alike else batch.shared(self.gnh.network.ranks)
            if batch.share is not None:
                columns = columns[batch.share.start : batch.share.start + batch.share.held]
            if len(columns) or self.gnh.lockstep:
                yield columns, batch

    def term_shares(self, positions: Tensor) -> list[Tensor]:
        """Each term's share of each example's score, ``[k, terms]`` per example; they add up to it.

        For `LanguageModeling`, entry j belongs to the *prediction made at* token j, of token j + 1. Costs what
        directional derivatives cost, whichever way scores are computed in.
        """
        result = [torch.empty(0)] * len(positions)
        alike = self._batches(positions, self._at_once, all_alike=True)
        for columns, shares in self._shares(alike):
            for row, column in enumerate(columns.tolist()):
                alone = self.terms.fetch(positions[column : column + 1])  # without its batch's padding
                result[column] = shares[: self._count, row, : alone.targets[0].numel()]
        return result

    def _shares(self, batches: Iterable[tuple[Tensor, Batch]]) -> Iterator[tuple[Tensor, Tensor]]:
        """Of micro-batches: their columns, and ``[k, examples, terms]``."""
        for columns, batch in batches:
            counts = self.gnh.task.num_terms(batch).clamp_min(1).reshape(1, -1, 1)
            rows = self._of_terms(batch)
            yield columns, (rows.reshape(len(rows), batch.size, -1) / counts).cpu()

    def _of_terms(self, batch: Batch) -> Tensor:
        if self._derivatives is None:
            self._derivatives = DirectionalDerivatives(self.gnh, self._with_probes(), self._pilot)
        return self._derivatives.of_terms(batch)

    def _with_probes(self) -> ParamVector:
        """The directions, and normal ones ξ: ``E (∇ℓ(z)ᵀξ)² = ‖∇ℓ(z)‖²``."""
        if not self._probes:
            return self._opened
        probes = self.directions.zeros(self._probes).randn_like(torch.Generator().manual_seed(0))
        return ParamVector.join([self._opened, self.gnh.network.opened(probes)])
