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
from whence.spectrum.estimate import Estimate
from whence.spectrum.krylov import counted_once, krylov_spaces
from whence.spectrum.lanczos import BASIS_BUDGET
from whence.vectors import ParamVector

__all__ = ["Density", "spectral_density"]


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
    signs = ParamVector.stack([operator.zeros().rademacher_like(generator) for _ in range(probes)])
    fits = min(2, probes) * products * signs.nbytes // probes <= BASIS_BUDGET
    gauss, radau, found, spent = [], [], [], 0
    for space in krylov_spaces(fixed, signs, max_products=products, budget=BASIS_BUDGET, keep_basis=fits):
        counts = space.multiplicities()
        gauss.append(counted_once(*space.gauss(), counts))
        radau.append(counted_once(*space.radau(), counts))
        found.append(sum(counts))
        spent += space.num_products
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
