"""How the answer depends on λ: what each damping costs, what it keeps, and where the ranking stops changing.

One Krylov space serves every λ: solutions, residuals, scores and the effective dimension ``d(λ) = Tr H(H + λ)⁻¹`` for
all of them come from the same products. Derived in docs/math.md, 'One Krylov space for every damping'.

Nothing here retrains anything. A ranking that no longer changes with λ is not thereby right.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from whence.attribution.sweep import aligned, damping_grid
from whence.errors import OptionError, VectorError
from whence.operators import Damped, LinearOperator
from whence.solvers.base import check_system
from whence.solvers.plan import Plan, check_damping
from whence.spectrum import Spectrum, estimate_spectrum
from whence.spectrum.krylov import Krylov, krylov_spaces, nonzero_norms
from whence.validation.statistics import Ranks, standard_error
from whence.vectors import ParamVector

__all__ = ["DampingSweep", "damping_sweep"]

#: Columns run side by side while their bases together take less than this.
BASIS_BUDGET = 2 * 2**30
#: Rankings that agree by this much count as the same.
SETTLED = 0.95


@dataclass(frozen=True)
class DampingSweep:
    """What was found for each λ, largest first.

    Attributes:
        dampings: λ, ``[L]``, falling.
        chosen: where in `dampings` the λ stands that others are compared with.
        dimension: effective dimension ``d(λ) = Tr H(H + λ)⁻¹`` of the operator that was worked on, ``[L]``.
        dimension_stderr: its standard error over probes.
        dimension_bracket: the most that too short a quadrature can have cost, averaged over probes.
        residual: ``‖(H + λ)u - g‖ / ‖g‖`` of the Krylov solutions, ``[L, right-hand sides]``: measured at the smallest
            converged λ, bounds for larger ones.
        converged: whether every right-hand side's residual is within the tolerance, ``[L]``.
        tolerance: that tolerance.
        agreement: between λ and λ', averaged over right-hand sides, ``[L, L]``; NaN where either is not converged.
        agreement_stderr: its standard error over right-hand sides; NaN for a single one.
        measure: ``"Spearman"`` of the scores against functionals, or ``"cosine"`` of the solutions.
        scores: ``wᵀu``, ``[L, right-hand sides, functionals]``, where functionals were given.
        plans: the tuned plan of each λ.
        num_terms: terms in the data.
        worked_terms: terms of the operator that Krylov spaces were built on: all, or a subset.
        steps: the most vectors that a Krylov space has.
        num_products: products spent, without those of the spectrum.
    """

    dampings: Tensor
    chosen: int
    dimension: Tensor
    dimension_stderr: Tensor
    dimension_bracket: Tensor
    residual: Tensor
    converged: Tensor
    tolerance: float
    agreement: Tensor
    agreement_stderr: Tensor
    measure: Literal["Spearman", "cosine"]
    scores: Tensor | None
    plans: tuple[Plan, ...]
    num_terms: int
    worked_terms: int
    steps: int
    num_products: int

    def __post_init__(self) -> None:
        L = len(self.dampings)
        if L < 2 or not bool((self.dampings > 0).all()) or not bool((self.dampings.diff() < 0).all()):
            raise OptionError(
                f"dampings must be two or more positive numbers, falling; got {self.dampings.tolist()}"
            )
        if self.agreement.shape != (L, L) or len(self.plans) != L or not 0 <= self.chosen < L:
            raise OptionError(f"a sweep over {L} dampings needs as many plans and a square of agreements")

    @property
    def num_term_products(self) -> int:
        """Terms gone through in all products."""
        return self.num_products * self.worked_terms

    @property
    def paper_cost(self) -> Tensor:
        """T·|B| of the paper's plan, one chain, in products of one term, ``[L]``."""
        spectrum = self.plans[0].spectrum
        plans = [
            Plan.from_spectrum(spectrum, p.damping, C=spectrum.safe_constant, chains=1) for p in self.plans
        ]
        return torch.tensor([plan.num_term_products for plan in plans], dtype=torch.float64)

    @property
    def costs(self) -> Tensor:
        """Terms that the tuned plan goes through for one right-hand side, all chains together, ``[L]``."""
        return torch.tensor([plan.num_term_products for plan in self.plans], dtype=torch.float64)

    @property
    def passes(self) -> Tensor:
        """`costs` in passes over the data, ``[L]``."""
        return self.costs / self.num_terms

    def settled(self, agreement: float = SETTLED) -> int | None:
        """Where the largest λ stands from which on all converged rankings agree with one another; None if none do."""
        kept = self.converged.nonzero().flatten().tolist()
        for i, first in enumerate(kept[:-1]):
            rest = kept[i:]
            if bool((self.agreement[rest][:, rest] >= agreement).all()):
                return int(first)
        return None

    def recommended(self) -> str:
        """Where the ranking stops changing and what that costs, in words."""
        what = "rankings" if self.measure == "Spearman" else "solutions"
        kept, where = self.converged.nonzero().flatten().tolist(), self.settled()
        if len(kept) < 2:
            sentences = [f"Fewer than two λ are converged: no {what} can be compared. Raise max_products."]
        elif where is None:
            i, j = kept[-2:]
            sentences = [
                f"The {what} still change at the smallest converged λ: {self.measure} "
                f"{float(self.agreement[i, j]):.3f} between {self._name(i)} and {self._name(j)}."
            ]
        else:
            sentences = [
                f"From {self._name(where)} down to {self._name(kept[-1])} the {what} agree to "
                f"{self.measure} ≥ {SETTLED}. For one right-hand side the tuned plan goes through "
                f"{float(self.costs[where]):,.3g} terms at the first ({float(self.passes[where]):.3g} passes "
                f"over the data), {float(self.costs[kept[-1]]):,.3g} at the last."
            ]
            own = float(self.agreement[self.chosen, where])
            if self.chosen < where and math.isfinite(own):
                sentences.append(f"The chosen {self._name(self.chosen)} agrees with the first to {own:.3f}.")
        lost = ", ".join(self._name(i) for i in (~self.converged).nonzero().flatten().tolist())
        if lost:
            sentences.append(
                f"Nothing is said of {lost}: residuals above {self.tolerance:g} after {self.steps} products."
            )
        if self.worked_terms != self.num_terms:
            sentences.append(f"All this on {self.worked_terms:,} of {self.num_terms:,} terms.")
        sentences.append("It says nothing about retraining: which λ predicts that best has to be measured.")
        return " ".join(sentences)

    def _name(self, i: int) -> str:
        return f"λ = {float(self.dampings[i]):.3g} (λmax/{self.plans[i].condition_number:.4g})"

    def __str__(self) -> str:
        head = ("λ", "λmax/λ", "d(λ)", "T·|B|", "passes", "residual", "with next", "with chosen")
        rows: list[tuple[str, ...]] = [head]
        for i, plan in enumerate(self.plans):
            error = math.hypot(float(self.dimension_stderr[i]), float(self.dimension_bracket[i]))
            following = self.agreement[i, i + 1] if i + 1 < len(self.plans) else torch.tensor(math.nan)
            cells = (
                f"{float(self.dampings[i]):.3g}{'*' if i == self.chosen else ' '}",
                f"{plan.condition_number:.4g}",
                f"{float(self.dimension[i]):.4g} ± {error:.1g}",
                f"{float(self.paper_cost[i]):,.3g}",
                f"{float(self.passes[i]):.3g}",
                f"{float(self.residual[i].max()):.1e}{' ' if bool(self.converged[i]) else '!'}",
                *(f"{float(a):.3f}".replace("nan", "–") for a in (following, self.agreement[i, self.chosen])),
            )
            rows.append(cells)
        notes = f"* chosen   {self.measure} agreement   {self.num_products:,} products of {self.worked_terms:,} terms"
        if not bool(self.converged.all()):
            notes += f"   ! not converged: residual above {self.tolerance:g}"
        return "\n".join([*aligned(rows), notes, self.recommended()])


def damping_sweep(
    operator: LinearOperator,
    rhs: ParamVector,
    functionals: ParamVector | None = None,
    *,
    generator: torch.Generator,
    dampings: Sequence[float | str] | Tensor | None = None,
    chosen: float | str = "auto",
    spectrum: Spectrum | None = None,
    max_products: int = 64,
    probes: int = 8,
    max_terms: int = 4096,
    tolerance: float = 1e-3,
) -> DampingSweep:
    """Effective dimension, cost and ranking over a range of dampings, all from one set of products.

    Memory: k = ``max_products`` vectors of the parameters' size for each right-hand side or probe, beside the
    blocks given; several run side by side while that stays within two gibibytes.

    Args:
        operator: the operator, undamped.
        rhs: gradients of queries, one vector or a block.
        functionals: a block of gradients of training examples to rank, three or more. Without them, solutions are
            compared by their cosine.
        generator: draws the subset, the probes, and what the spectrum needs.
        dampings: numbers, or parts of λmax such as ``"lambda_max/50"``; λmax/2 … λmax/5000 by default.
        chosen: the λ that others are compared with; added to the range where it is missing.
        spectrum: measured before; by default it is measured here, on the whole operator.
        max_products: k, the most vectors in a Krylov space.
        probes: random sign vectors for the effective dimension.
        max_terms: with more terms than this, everything but the spectrum is computed on one subset of this size.
        tolerance: relative residual up to which a solution counts as converged.

    Example:
        >>> from whence import Dense
        >>> A = Dense(torch.diag(torch.tensor([8.0, 4.0, 2.0, 1.0], dtype=torch.float64)))
        >>> g = ParamVector({"x": torch.ones(4, dtype=torch.float64)})
        >>> sweep = damping_sweep(A, g, dampings=[4.0, 1.0], chosen=1.0, generator=torch.Generator().manual_seed(0))
        >>> sweep.dimension.round(decimals=3)  # exact for a diagonal matrix and random signs
        tensor([1.7000, 2.8560], dtype=torch.float64)
    """
    _check_vectors(operator, rhs, functionals)
    for value in (chosen, *(() if dampings is None else dampings)):
        check_damping(value if isinstance(value, str) else float(value))
    if max_products < 1 or max_terms < 1:
        raise OptionError(
            f"max_products and max_terms must be at least 1, got {max_products} and {max_terms}"
        )
    if probes < 2:
        raise OptionError(f"{probes} probes cannot give a standard error; use at least 2")
    if not 0 < tolerance < 1:
        raise OptionError(f"tolerance is {tolerance}; it is a residual relative to ‖g‖, between 0 and 1")
    if spectrum is None:
        spectrum = estimate_spectrum(operator, generator=generator)
    grid, position = damping_grid(dampings, chosen, spectrum)
    plans = tuple(Plan.tuned(spectrum, value, num_terms=operator.num_terms) for value in grid.tolist())
    fixed = operator if operator.num_terms <= max_terms else operator.subset(max_terms, generator)
    signs = ParamVector.stack([operator.zeros().rademacher_like(generator) for _ in range(probes)])
    products, steps, bounds = 0, 0, []
    for space in krylov_spaces(fixed, signs, max_products=max_products, budget=BASIS_BUDGET):
        bounds.append(space.dimension_bounds(grid))
        products += space.num_products
    lower, upper = (torch.cat(parts, dim=1) for parts in zip(*bounds, strict=True))
    del signs
    residuals, scores, cosines = [], [], []
    for space in krylov_spaces(fixed, rhs, max_products=max_products, budget=BASIS_BUDGET):
        weights, residual = space.coefficients(grid), space.residuals(grid)
        products += space.num_products + _confirm(space, fixed, grid, residual, tolerance)
        residuals.append(residual)
        if functionals is None:
            cosines.append(_cosines(weights))
        else:
            scores.append(torch.einsum("lck,ckf->lcf", weights, space.project(functionals)))
        steps = max(steps, len(space.basis))
    residual = torch.cat(residuals, dim=1)
    converged = (residual <= tolerance).all(1)
    values = torch.cat(scores, dim=1) if scores else None
    agreement = torch.cat(cosines, dim=2) if values is None else _rank_correlations(values)
    agreement[~(converged.unsqueeze(0) & converged.unsqueeze(1))] = math.nan
    return DampingSweep(
        dampings=grid,
        chosen=position,
        dimension=0.5 * (lower + upper).mean(1),
        dimension_stderr=standard_error(0.5 * (lower + upper), 1),
        dimension_bracket=0.5 * (upper - lower).mean(1),
        residual=residual,
        converged=converged,
        tolerance=tolerance,
        agreement=agreement.mean(2),
        agreement_stderr=standard_error(agreement, 2),
        measure="cosine" if values is None else "Spearman",
        scores=values,
        plans=plans,
        num_terms=operator.num_terms,
        worked_terms=fixed.num_terms,
        steps=steps,
        num_products=products,
    )


def _check_vectors(operator: LinearOperator, rhs: ParamVector, functionals: ParamVector | None) -> None:
    if isinstance(operator, Damped):
        raise OptionError("sweep over dampings of the operator itself; pass `damped.operator`")
    check_system(Damped(operator, 1.0), rhs)
    nonzero_norms(rhs)
    if functionals is not None:
        operator.zeros().check_same_space(functionals, "functionals")
        if functionals.columns is None or functionals.columns < 3:
            raise OptionError(
                f"functionals have {functionals.columns or 1} columns; a ranking to compare needs at least 3"
            )
        if not functionals.is_finite():
            raise VectorError("a functional holds NaN or infinity; check the examples it comes from")


def _confirm(
    space: Krylov, operator: LinearOperator, dampings: Tensor, residuals: Tensor, tolerance: float
) -> int:
    """Measure residuals, smallest λ first, until one is within the tolerance; returns the products spent.

    What errors of products add to a residual grows with u: what they add at the confirmed λ bounds it at larger ones.
    """
    spent = 0
    for i in reversed(range(len(dampings))):
        if bool((residuals[i] <= tolerance).all()):
            measured = space.measured_residual(operator, float(dampings[i]))
            added = (measured - residuals[i]).clamp_min(0.0)
            residuals[i] += added
            spent += len(measured)
            if bool((measured <= tolerance).all()):
                residuals[:i] = torch.maximum(residuals[:i], added)
                break
    return spent


def _cosines(rows: Tensor) -> Tensor:
    """Of each pair of λ, ``[λ, c, n]`` to ``[λ, λ, c]``."""
    units = rows / rows.norm(dim=-1, keepdim=True)
    return torch.einsum("ick,jck->ijc", units, units)


def _rank_correlations(scores: Tensor) -> Tensor:
    """Spearman's, of each pair of λ, ``[λ, c, n]`` to ``[λ, λ, c]``."""
    (ranks,) = Ranks(scores.flatten(0, 1).T).centred()
    return _cosines(ranks.T.unflatten(0, scores.shape[:2]))
