"""The spectral density of H, measured once, and what follows from it for every λ.

From a vector v of random signs, k products give a Gauss quadrature of v's spectral measure, and
``E vᵀf(H)v = Tr f(H)`` for every f at once. For ``x/(x + λ)`` Gauss' rule is never too small, and the Gauss-Radau rule,
with one more node at zero, never too large; for other functions that concern us they err to opposite sides as well.
Values here are the middle of both, and half their distance is part of the error. See docs/math.md, "Quadratures and
traces".

A density measured on m of the terms is that of the subset: its effective dimension is too small.
`Density.sampling_error` at m terms says how far it can be trusted; where that is not small, it cannot.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from whence.errors import OptionError, SolverError
from whence.operators import Damped, LinearOperator, check_damping
from whence.progress import ticker
from whence.spectrum.estimate import Estimate
from whence.spectrum.lanczos import BASIS_BUDGET, BlockLanczos, found_within, tridiagonal
from whence.vectors import ParamVector

__all__ = ["Density", "Krylov", "spectral_density"]

#: Shares of a Gram matrix of Ritz vectors above this are directions of their own.
_DIRECTION = 0.005


@dataclass(frozen=True)
class Density:
    """Quadratures of the eigenvalue density, for each probe: ``Σ weight·f(node) ≈ Tr f(H)`` in each row.

    Attributes:
        gauss_nodes, gauss_weights: by Gauss' rule, ``[probes, k]`` in float64. No node is negative, and every row of
            weights adds up to the number of parameters.
        radau_nodes, radau_weights: by the rule of Gauss-Radau, ``[probes, k + 1]``; None if there is none.
        found: eigenvalues that were found and counted once, in the probe with fewest.
        num_terms: terms of the operator that was worked on.
        data_terms: terms in the data; more than `num_terms` where a subset was worked on.
        num_products: products spent, all probes together.

    Example:
        >>> from whence import Dense
        >>> A = Dense(torch.diag(torch.tensor([4.0, 2.0, 1.0, 1.0], dtype=torch.float64)))
        >>> density = spectral_density(A, generator=torch.Generator().manual_seed(0))
        >>> round(density.dimension(1.0).value, 6)  # 4/5 + 2/3 + 1/2 + 1/2
        2.466667
    """

    gauss_nodes: Tensor
    gauss_weights: Tensor
    radau_nodes: Tensor | None = None
    radau_weights: Tensor | None = None
    found: int = 0
    num_terms: int = 1
    data_terms: int = 1
    num_products: int = 0

    def __post_init__(self) -> None:
        if (self.radau_nodes is None) != (self.radau_weights is None):
            raise OptionError("a rule of Gauss-Radau needs both nodes and weights")
        for nodes, weights in self.rules:
            if nodes.ndim != 2 or nodes.shape != weights.shape or not nodes.numel():
                raise OptionError(
                    f"a density needs nodes and weights of one shape [probes, k], got {tuple(nodes.shape)} and "
                    f"{tuple(weights.shape)}"
                )
            # `not all ≥ 0` refuses NaN, too
            if not all(bool((part >= 0).all()) and float(part.max()) > 0 for part in (nodes, weights)):
                raise OptionError("a density's nodes and weights must be zero or positive, and not all zero")
            totals = weights.sum(1)
            if not bool(((totals - totals[0]).abs() <= 1e-6 * totals[0]).all()):
                raise OptionError(
                    f"every row of weights must add up to the number of parameters, got {totals.tolist()}"
                )

    # --- the measure -------------------------------------------------------------------------------------

    @property
    def rules(self) -> list[tuple[Tensor, Tensor]]:
        """Nodes and weights, ``[probes, …]``, by each rule that is there."""
        rules = [(self.gauss_nodes, self.gauss_weights)]
        if self.radau_nodes is not None and self.radau_weights is not None:
            rules.append((self.radau_nodes, self.radau_weights))
        return rules

    @property
    def probes(self) -> int:
        """How many."""
        return len(self.gauss_nodes)

    @property
    def num_parameters(self) -> int:
        """Dimension of the space."""
        return round(float(self.gauss_weights[0].sum()))

    def trace_of(self, function: Callable[[Tensor], Tensor]) -> Estimate:
        """``Tr f(H)``, of an f that is smooth on the scale of the eigenvalues' distances where they were not found.

        The error is that over probes (infinite for one alone) and half the distance of the two rules. From four probes
        it is itself known to 40%: intervals are Student's with three degrees of freedom.
        """
        return _summarised(self._by_rule(function))

    # --- what λ changes ----------------------------------------------------------------------------------

    def dimension(self, damping: float) -> Estimate:
        """``d(λ) = Tr H(H + λ)⁻¹``, the effective dimension: directions that the data determine more than λ does."""
        check_damping(damping)
        return self.trace_of(partial(_kept, damping=damping))

    def dimension_bounds(self, damping: float) -> tuple[float, float]:
        """Below and above the mean of ``vᵀH(H + λ)⁻¹v`` over the probes: d(λ) by Gauss-Radau and by Gauss."""
        check_damping(damping)
        by_rule = self._by_rule(partial(_kept, damping=damping)).mean(1)
        return float(by_rule.min()), float(by_rule[0])

    def second_dimension(self, damping: float) -> Estimate:
        """``d₂(λ) = Tr H²(H + λ)⁻²``, never above d(λ): what the error of sampling grows with."""
        check_damping(damping)
        return self.trace_of(lambda x: _kept(x, damping).square())

    def agreement(self, damping: float, other: float) -> Estimate:
        """Correlation to expect between the scores of two dampings, ``D(λ,λ')/√(D(λ,λ)D(λ',λ'))``.

        ``D(λ, λ') = Tr H(H + λ)⁻¹H(H + λ')⁻¹``: exact for queries and examples whose gradients are independent and have
        the covariance H. Derived in docs/math.md, "Agreement of two dampings".

        It is a correlation of scores, which the large ones decide. Most scores are small, and Spearman's correlation
        over all examples falls faster: on digits, 0.49 between λmax/200 and λmax/5000 where the scores' is 0.74.

        The standard error is a jackknife's over probes, and half the distance of the two rules.
        """
        check_damping(damping)
        check_damping(other)
        first, second = (partial(_kept, damping=value) for value in (damping, other))
        parts = torch.stack(
            [
                self._by_rule(lambda x: first(x) * second(x)),
                self._by_rule(lambda x: first(x).square()),
                self._by_rule(lambda x: second(x).square()),
            ]
        )

        def ratio(means: Tensor) -> Tensor:
            return (means[0] / (means[1] * means[2]).sqrt()).clamp_max(1.0)

        value, by_rule, n = float(ratio(parts.mean((1, 2)))), ratio(parts.mean(2)), self.probes
        if n == 1:
            return Estimate(value, math.inf)
        each = parts.mean(1)
        without = ratio((each.sum(1, keepdim=True) - each) / (n - 1))
        jackknife = math.sqrt((n - 1) / n * float((without - without.mean()).square().sum()))
        return Estimate(value, math.hypot(jackknife, _half_range(by_rule)))

    def sampling_error(self, damping: float, terms: int, C: float = 2.0) -> Estimate:
        """``√(C·d₂(λ)/terms)``: root mean square error of scores from so many independent terms, relative to theirs.

        A correlation with the exact scores is then about ``1/√(1 + C·d₂/N)``. It holds where it is small, and says
        nothing about the part of an iterate that a start has left. C is the constant of condition C.1, 2 in the paper.
        Derived in docs/math.md, "Error of sampling".
        """
        if not terms >= 1 or not 0 < C < math.inf:
            raise OptionError(f"terms must be at least 1 and C a positive number, got {terms} and {C}")
        second = self.second_dimension(damping)
        return Estimate(C * second.value / terms, C * second.stderr / terms).sqrt()

    def _by_rule(self, function: Callable[[Tensor], Tensor]) -> Tensor:
        """``Σ weight·f(node)``, ``[rules, probes]``."""
        return torch.stack([(weights * function(nodes)).sum(1) for nodes, weights in self.rules])


def spectral_density(
    operator: LinearOperator,
    *,
    generator: torch.Generator,
    probes: int = 4,
    products: int = 24,
    terms: int | None = 4096,
) -> Density:
    """Measure the density of H's eigenvalues by Lanczos from random signs.

    Memory: ``products`` vectors of the parameters' size for each probe, several of them side by side while that
    stays within two gibibytes; where not even two fit, three vectors for each probe suffice, and no eigenvalue is
    counted once.

    Args:
        operator: the operator, undamped.
        generator: draws the subset and the signs.
        probes: random starts; their spread is the error.
        products: k, for each start.
        terms: with more terms than this, all is measured on one subset of this size; None for all terms.
    """
    if isinstance(operator, Damped):
        raise OptionError("measure the density of the operator itself; pass `damped.operator`")
    if probes < 1 or products < 1 or (terms is not None and terms < 1):
        raise OptionError(
            f"probes, products and terms must be at least 1, got {probes}, {products} and {terms}"
        )
    whole = terms is None or operator.num_terms <= terms
    fixed = operator if terms is None or whole else operator.subset(terms, generator)
    signs = [operator.zeros().rademacher_like(generator) for _ in range(probes)]
    size = products * signs[0].nbytes
    fits, at_once = min(2, probes) * size <= BASIS_BUDGET, max(1, BASIS_BUDGET // size)
    gauss, radau, found, spent = [], [], [], 0
    for first in range(0, probes, at_once):
        starts = ParamVector.stack(signs[first : first + at_once])
        space = Krylov.span(fixed, starts, products=products, keep_basis=fits)
        counts = space.multiplicities()
        gauss.append(_counted_once(*space.gauss(), counts))
        radau.append(_counted_once(*space.radau(), counts))
        found.append(sum(counts))
        spent += space.diagonal.numel()
    nodes, weights = _joined(gauss)
    if not float(nodes.max()) > 0:
        raise SolverError(
            "every product is zero: the outputs do not depend on the selected parameters, or the model is certain of "
            "every answer. There is no curvature to measure"
        )
    return Density(nodes, weights, *_joined(radau), min(found), fixed.num_terms, operator.num_terms, spent)


def _joined(rules: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Rules of all groups, made as long as the longest by nodes without weight."""
    longest = max(nodes.shape[1] for nodes, _ in rules)
    parts = [[torch.nn.functional.pad(part, (0, longest - part.shape[1])) for part in rule] for rule in rules]
    nodes, weights = (torch.cat(group) for group in zip(*parts, strict=True))
    return nodes, weights


def _kept(x: Tensor, damping: float) -> Tensor:
    return x / (x + damping)


def _summarised(by_rule: Tensor) -> Estimate:
    """From ``[rules, probes]``: the mean, with the error over probes and half the distance of the rules."""
    over_probes = Estimate.from_samples(by_rule.mean(0).tolist())
    return Estimate(over_probes.value, math.hypot(over_probes.stderr, _half_range(by_rule.mean(1))))


def _half_range(values: Tensor) -> float:
    return 0.5 * float(values.max() - values.min())


# --- one quadrature for each probe ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Krylov:
    """Krylov spaces of one operator from the columns of a block, k products each: ``HQ = QT + βqeₖᵀ``.

    T, tridiagonal, is a Gauss quadrature of a start's spectral measure: ``Σ weight·f(node) ≈ gᵀf(H)g``.

    Attributes:
        basis: Q: k orthonormal blocks, one column for each start; empty where it was not kept.
        diagonal: of T, ``[columns, k]`` in float64.
        off_diagonal: ``[columns, k]``; the last one is β, the way out of the space.
        norms: ‖g‖ of the starts, ``[columns]``.
    """

    basis: tuple[ParamVector, ...]
    diagonal: Tensor
    off_diagonal: Tensor
    norms: Tensor

    @classmethod
    def span(
        cls, operator: LinearOperator, starts: ParamVector, *, products: int, keep_basis: bool
    ) -> Krylov:
        """Lanczos from a block of vectors, side by side.

        A column whose space is exhausted (β = 0) goes on with zeros, which change nothing of what is read from it.
        Without a basis three vectors for each column suffice, and are not reorthogonalised. Copies of eigenvalues,
        which rounding then breeds, share a weight: quadratures stand.
        """
        state, norms, _ = BlockLanczos.begin(starts, apart=True, keep_basis=keep_basis)
        steps = min(products, starts.numel)
        with ticker(f"Krylov space of {starts.columns} columns", steps) as tick:
            for _ in range(steps):
                state.step(operator)
                tick()
                if state.current is None:
                    break
        return cls(tuple(vectors for vectors, _ in state.basis or ()), *state.T.columns(), norms)

    def tridiagonal(self) -> Tensor:
        """T, ``[columns, k, k]``."""
        return tridiagonal(self.diagonal, self.off_diagonal)

    def gauss(self) -> tuple[Tensor, Tensor]:
        """Nodes, rising, and weights with ``Σ weight·f(node) ≈ gᵀf(H)g``, each ``[columns, k]``, by Gauss' rule."""
        return self._rule(self.tridiagonal())

    def radau(self) -> tuple[Tensor, Tensor]:
        """The same with one more node, at zero: the rule of Gauss-Radau, each ``[columns, k + 1]``."""
        T, beta = self.tridiagonal(), self.off_diagonal[:, -1]
        columns, k = self.diagonal.shape
        values = torch.linalg.eigvalsh(T)
        # A node at zero needs T positive definite; where it is singular to rounding, the node goes just below.
        node = values[:, 0].clamp_max(0.0) - 1e-10 * values[:, -1].clamp_min(torch.finfo(T.dtype).tiny)
        last = torch.eye(k, dtype=T.dtype)[-1]
        shifted = T - torch.diag_embed(node.unsqueeze(1).expand(columns, k))
        longer = torch.nn.functional.pad(T, (0, 1, 0, 1))
        longer[:, k - 1, k] = longer[:, k, k - 1] = beta
        longer[:, k, k] = node + beta.square() * torch.linalg.solve(shifted, last.expand(columns, k))[:, -1]
        return self._rule(longer)

    def _rule(self, matrix: Tensor) -> tuple[Tensor, Tensor]:
        nodes, vectors = torch.linalg.eigh(matrix)
        return nodes.clamp_min(0.0), self.norms.square().unsqueeze(1) * vectors[:, 0].square()

    def multiplicities(self) -> list[int]:
        """Multiplicities of the eigenvalues that every column has found, from the largest on.

        The columns' Ritz vectors of an eigenvalue span its eigenspace, and show its multiplicity where there are more
        columns than that. The list ends where they do not, or where rounding has begun to add copies.
        """
        columns, k = self.diagonal.shape
        if columns < 2 or not self.basis:
            return []  # one vector cannot show a multiplicity
        values, vectors = (part.flip(-1) for part in torch.linalg.eigh(self.tridiagonal()))
        rounding = self.basis[0].rounding * values[:, :1].abs()
        residuals = self.off_diagonal[:, -1:] * vectors[:, -1].abs() + rounding
        room = found_within(values)
        counts: list[int] = []
        for i in range(k):
            differ = float(values[:, i].max() - values[:, i].min())
            if not bool((residuals < room)[:, i].all()) or differ > 2 * float(room[:, i].min()):
                break
            ritz = self.basis[0].zeros_like()
            for j, block in enumerate(self.basis):
                ritz.axpy_(vectors[:, j, i], block)
            shares = torch.linalg.eigvalsh(ritz.gram(ritz).cpu()) / columns
            directions = int((shares > _DIRECTION).sum())
            if directions == columns:
                break  # as many as there are starts, or more
            counts.append(directions)
        return counts


def _counted_once(nodes: Tensor, weights: Tensor, counts: list[int]) -> tuple[Tensor, Tensor]:
    """A rule, largest node first, in which an eigenvalue that was found m times over is m nodes of weight 1.

    Args:
        nodes: of a quadrature from random signs, rising, ``[columns, k]``.
        weights: the start's shares. That in an eigenvector has mean 1 and variance about 2: putting the mean in its
            place leaves the quadrature unbiased and takes this part of its variance away.
        counts: multiplicities of the largest eigenvalues.
    """
    nodes, weights = nodes.flip(1), weights.flip(1)
    if not counts:
        return nodes, weights
    found, rest = nodes[:, : len(counts)], weights[:, len(counts) :]
    ones = weights.new_ones(len(weights), sum(counts))
    left = (weights.sum(1, keepdim=True) - sum(counts)).clamp_min(0.0)
    rest = rest * (left / rest.sum(1, keepdim=True).clamp_min(torch.finfo(rest.dtype).tiny))
    repeated = found.repeat_interleave(torch.tensor(counts), dim=1)
    return torch.cat([repeated, nodes[:, len(counts) :]], dim=1), torch.cat([ones, rest], dim=1)
