"""`Stability`: how far scores depend on which half of the data H was measured on.

H is a mean over the training data, so scores would come out differently had other examples been drawn. Two halves A and
B of the data, each with an H of its own, show by how much: for a few right-hand sides g, ``(H_A + λ)u = g`` and
``(H_B + λ)u = g`` are solved for every λ at once (`whence.solvers.shifted`), and the scores of all examples compared.

    agreement(λ) = mean over g of the correlation of scores by A with scores by B
    spread_z(λ)  = √ mean over g of ((s_A(z) - s_B(z)) / 2 std_z s)²
    relative(λ)  = √ Σ (s_A - s_B)² / Σ (s_A + s_B)², over each g's largest scores

A score s of a query and z then has the variance ``(spread_z · std_z s)² + (relative · s)²`` from H, as measured on half
of the data: examples differ in how well they are known, and the scores of examples that are much like the query stand
or fall with the directions that both share.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from whence.model.gauss_newton import GaussNewton
from whence.operators import Damped
from whence.solvers.cg import ConjugateGradient
from whence.solvers.shifted import Shifted
from whence.vectors import ParamVector

__all__ = ["COLUMNS", "Stability", "measure_stability"]

#: Right-hand sides that stability is measured with.
COLUMNS = 4
#: Fewer examples than this have no halves to speak of.
_HALVED = 4
#: The scores' error that solving for a half may leave.
_SCORE_ERROR = 0.15
#: One score in so many counts as large.
_LARGE = 50
#: Scores whose spread is less than this part of their size are all the same.
_SAME = 1e-5
_TINY = torch.finfo(torch.float64).tiny


@dataclass(frozen=True)
class Stability:
    """What two halves of the data say of scores, for a grid of λ.

    Attributes:
        dampings: λ, rising, ``[L]``.
        agreement: of scores by one half with those by the other, ``[L]``.
        spread: of every example's score, relative to the scores of its query, ``[L, n]``.
        relative: of large scores, relative to themselves, ``[L]``.
    """

    dampings: Tensor
    agreement: Tensor
    spread: Tensor
    relative: Tensor

    def agreement_at(self, damping: float) -> float:
        """At the grid's nearest λ."""
        return float(self.agreement[self._nearest(damping)])

    def stderr(self, scores: Tensor, indices: Tensor, damping: float) -> Tensor:
        """Of scores ``[queries, examples]`` of these examples, at the grid's nearest λ."""
        nearest = self._nearest(damping)
        spread = scores.std(1, keepdim=True) * self.spread[nearest, indices].to(scores)
        return torch.hypot(spread, float(self.relative[nearest]) * scores)

    def _nearest(self, damping: float) -> int:
        return int((self.dampings.log() - torch.tensor(damping).log()).abs().argmin())


def measure_stability(
    gnh: GaussNewton, gradients: ParamVector, dampings: Tensor, *, generator: torch.Generator
) -> Stability | None:
    """Solve for a few mixtures of the queries' gradients on two halves of the data.

    None where there is nothing to measure: fewer than four examples, or gradients that are zero.

    Args:
        gnh: H over all of the data.
        gradients: of the queries, a block.
        dampings: λ, rising; solved at the smallest, which serves them all.
        generator: draws the halves and the mixtures.
    """
    n = len(gnh.terms)
    if n < _HALVED:
        return None
    rhs = _mixtures(gnh, gradients, generator)
    order = torch.randperm(n, generator=generator, device=generator.device).cpu()
    solved = [_solved(gnh, half, rhs, float(dampings[0])) for half in (order[: n // 2], order[n // 2 :])]
    halves = [shifted for shifted in solved if shifted is not None]
    if len(halves) < 2:
        return None
    agreement, spread, relative = [], [], []
    many = max(1, n // _LARGE)
    for damping in dampings.tolist():
        one, other = (shifted.scores(damping) for shifted in halves)
        size = (0.5 * (one + other)).std(1, keepdim=True).clamp_min(_TINY)
        spread.append(((one - other) / (2 * size)).square().mean(0).sqrt())
        agreement.append(float(_correlations(one, other).mean()))
        large = (one + other).abs().topk(many, dim=1).indices
        off, whole = (side.gather(1, large).square().sum() for side in (one - other, one + other))
        relative.append(float((off / whole.clamp_min(_TINY)).sqrt()))
    return Stability(
        dampings,
        torch.tensor(agreement, dtype=torch.float64),
        torch.stack(spread).float(),
        torch.tensor(relative, dtype=torch.float64),
    )


def _solved(gnh: GaussNewton, half: Tensor, rhs: ParamVector, damping: float) -> Shifted | None:
    solver = ConjugateGradient(score_error=_SCORE_ERROR, keep_slopes=True, verify=False)
    return solver.solve(Damped(gnh.over(half), damping), rhs, generator=torch.Generator()).stats.shifted


def _mixtures(gnh: GaussNewton, gradients: ParamVector, generator: torch.Generator) -> ParamVector:
    """Random sums of the queries' gradients, each of length one; few queries stand for themselves, beside examples."""
    columns = gradients.columns or 1
    if columns < COLUMNS:
        drawn = torch.randperm(len(gnh.terms), generator=generator)[: COLUMNS - columns].tolist()
        more = gnh.gradients([gnh.terms.data[int(gnh.terms.indices[i])] for i in drawn])
        block = ParamVector.stack([*gradients.unstack(), *more.unstack()])
    else:
        block = gradients
    lengths = block.norm().cpu()
    unit = torch.diag(torch.where(lengths > 0, 1 / lengths, torch.zeros_like(lengths)))
    if columns < COLUMNS:
        return block.mix(unit)
    signs = torch.randint(0, 2, (columns, COLUMNS), generator=generator).double() * 2 - 1
    return block.mix(unit @ signs)


def _correlations(left: Tensor, right: Tensor) -> Tensor:
    """Row by row; 1 where neither side tells examples apart, so that there is nothing to disagree about."""
    sizes = [side.norm(dim=1) for side in (left, right)]
    left, right = (side - side.mean(1, keepdim=True) for side in (left, right))
    product = left.norm(dim=1) * right.norm(dim=1)
    found: Tensor = (left * right).sum(1) / product.clamp_min(_TINY)
    return torch.where(product > _SAME**2 * sizes[0] * sizes[1], found, torch.ones_like(found))
