"""Condition C.1, measured: how much a batch's square exceeds the square of the whole, as in the paper's Figure 4.

    E H̃² - H²  ≼  (C / |B|) Tr(H) H                                                                          (C.1)

is what the batch size of a plan rests on, with C = 2 assumed. One probe v is multiplied by two independent batches,
a = H̃v and b = Ĥv: ``½‖a - b‖²`` has the mean ``vᵀ(E H̃² - H²)v``. Random signs v give the trace of C.1's left side, the
top eigenvector gives C.1 along the direction where a long step hurts most. Derived in docs/math.md, 'Condition C.1'.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from whence.errors import OptionError, SolverError
from whence.model.gauss_newton import GaussNewton
from whence.operators import LinearOperator
from whence.progress import track
from whence.spectrum import Estimate, lanczos
from whence.vectors import ParamVector

__all__ = ["ConditionCheck", "ConditionPoint", "check_condition"]

_PAPERS_CONSTANT = 2.0


@dataclass(frozen=True)
class ConditionPoint:
    """Both sides of C.1 at one batch size.

    Attributes:
        batch_size: |B|, the expected number of terms in a batch.
        gap: ``Tr(E H̃² - H²)``.
        bound: ``Tr(H)² / |B|``, what the gap is measured against.
        constant: ``Ĉ = gap / bound``.
        top_constant: ``|B| v₁ᵀ(E H̃² - H²)v₁ / (Tr(H) v₁ᵀHv₁)``, the same along the top eigenvector.
    """

    batch_size: float
    gap: Estimate
    bound: Estimate
    constant: Estimate
    top_constant: Estimate


@dataclass(frozen=True)
class ConditionCheck:
    """What was measured of condition C.1.

    Attributes:
        points: one for each batch size, smallest first.
        slope: of log gap over log |B|, by least squares weighted with the errors; None where a gap is exactly zero.
        constant: Ĉ on average over directions, pooled over batch sizes.
        top_constant: Ĉ along the top eigenvector, pooled over batch sizes.
        trace: ``Tr(H)``.
        curvature: ``v₁ᵀHv₁``, a lower bound of λmax.
        realisations: pairs of products at each batch size.
        largest_share: the most that one realisation contributed to a mean. Standard errors are to be believed only
            where this is small.
        num_products: products spent, with those of Lanczos.
        num_term_products: terms gone through in them.
    """

    points: tuple[ConditionPoint, ...]
    slope: Estimate | None
    constant: Estimate
    top_constant: Estimate
    trace: Estimate
    curvature: Estimate
    realisations: int
    largest_share: float
    num_products: int
    num_term_products: int

    def holds(self, C: float = _PAPERS_CONSTANT, *, errors: float = 2.0) -> bool | None:
        """Whether C.1 survives with this C, on average and along the top eigenvector; None where errors leave it open.

        Both are necessary for the inequality of matrices, neither is sufficient: False refutes, True does not prove.
        """
        measured = (self.constant, self.top_constant)
        if any(estimate.lower(errors) > C for estimate in measured):
            return False
        return True if all(estimate.upper(errors) <= C for estimate in measured) else None

    @property
    def falls_as_inverse(self) -> bool:
        """Whether the slope is -1 within three standard errors."""
        return self.slope is None or abs(self.slope.value + 1) <= 3 * self.slope.stderr

    @property
    def heavy_tailed(self) -> bool:
        """Whether single realisations dominate the means, so that their errors are too small."""
        return self.largest_share > max(0.1, 8 / self.realisations)

    @property
    def recommended_constant(self) -> float:
        """The C to plan with: 2, or the upper end of what was measured where that is more."""
        measured = [self.constant, self.top_constant]
        if not self.falls_as_inverse:  # pooling means nothing then
            measured += [e for point in self.points for e in (point.constant, point.top_constant)]
        return max(_PAPERS_CONSTANT, *(estimate.upper() for estimate in measured))

    @property
    def smallest_batch(self) -> int:
        """``C·Tr(H) / v₁ᵀHv₁``, the Corollary's batch with the recommended C."""
        return max(1, math.ceil(self.recommended_constant * self.trace.value / self.curvature.value))

    @property
    def verdict(self) -> str:
        """Whether C = 2 holds, which C to plan with, and what to doubt."""
        opening = {
            True: "C = 2 holds in what was measured",
            False: "C = 2 does not hold",
            None: "C = 2 is neither confirmed nor refuted",
        }[self.holds()]
        sentences = [
            f"{opening}: Ĉ = {self.constant} on average over directions, {self.top_constant} along the top one.",
            f"Plan with C = {self.recommended_constant:.3g}: batches of at least {self.smallest_batch:,} terms.",
        ]
        if self.slope is None:
            sentences.append("A gap is exactly zero: batches do not differ, and any batch size will do.")
        elif self.falls_as_inverse:
            sentences.append(f"The gap falls as |B|^({self.slope}); it must be -1.")
        else:
            sentences.append(
                f"The gap falls as |B|^({self.slope}) where it must be -1: products carry noise of their own (finite "
                "differences, low precision), or draws are not independent. Ĉ holds for the measured batches only."
            )
        if self.heavy_tailed:
            sentences.append(
                f"One realisation of {self.realisations} made up {self.largest_share:.0%} of a mean: the errors are "
                "too small. Use more realisations, and a C above the one measured."
            )
        return " ".join(sentences)


def check_condition(
    operator: LinearOperator,
    batch_sizes: Sequence[int],
    *,
    generator: torch.Generator,
    realisations: int,
    spectrum_terms: int = 4096,
) -> ConditionCheck:
    """Measure condition C.1 at several batch sizes, each number with its standard error.

    Every realisation draws signs v and two independent batches, and multiplies both v and the top eigenvector by each.
    The paper averages 1,000 realisations at each of four batch sizes.

    Args:
        operator: the operator, undamped; a mean over terms that can be sampled.
        batch_sizes: |B| in terms, as `LinearOperator.sample` takes it; at least two that draw different numbers of
            examples.
        generator: all randomness comes from here.
        realisations: pairs of products at each batch size.
        spectrum_terms: the top eigenvector is found on a subset of at most so many terms. What is measured along it is
            unbiased all the same: its curvature comes from the sampled products.
    """
    sizes = _distinct(operator, batch_sizes, generator)
    whole = operator.num_terms <= spectrum_terms
    found = lanczos(
        operator if whole else operator.subset(spectrum_terms, generator),
        generator=generator,
        max_products=40,
        want_vector=True,
    )
    assert found.top_vector is not None
    if not found.lambda_max.value > 0:
        raise _no_curvature(found.lambda_max.value)
    draws = [
        _realise(operator, size, found.top_vector, realisations, generator)
        for _, size in sorted(sizes.items())
    ]
    each = 4 * realisations  # two batches times a block of two
    products = found.num_products + each * len(sizes)
    terms = found.num_products * min(operator.num_terms, spectrum_terms) + round(each * sum(sizes))
    return _summarise(torch.stack(draws, dim=1), sorted(sizes), products, terms)


def _expected_terms(operator: LinearOperator, batch_size: int, generator: torch.Generator) -> float:
    """|B| of a draw: what was drawn is its `num_terms`, rounded; with examples of many terms, undo the rounding."""
    drawn = operator.sample(batch_size, generator).num_terms
    per_example = operator.terms.terms_per_example if isinstance(operator, GaussNewton) else 1.0
    return drawn if per_example <= 1 else max(1, round(drawn / per_example)) * per_example


def _distinct(operator: LinearOperator, sizes: Sequence[int], generator: torch.Generator) -> dict[float, int]:
    """|B| -> what to ask `sample` for; refuses sizes that draw the same."""
    if len(sizes) < 2:
        raise OptionError(f"batch_sizes are {list(sizes)}; a slope needs at least two")
    found: dict[float, int] = {}
    for size in sizes:
        expected = _expected_terms(operator, size, generator)
        if expected in found:
            raise OptionError(
                f"batch sizes {found[expected]} and {size} both draw about {expected:.4g} terms, as examples are drawn "
                "whole; give sizes that are further apart"
            )
        found[expected] = size
    return found


def _realise(
    operator: LinearOperator, size: int, top: ParamVector, realisations: int, generator: torch.Generator
) -> Tensor:
    """``½‖a - b‖²`` and ``½vᵀ(a + b)`` for random signs, then both for the top eigenvector, ``[4, realisations]``."""
    block = operator.zeros(2)
    block.column(1).copy_(top)
    values = torch.empty(4, realisations, dtype=torch.float64)
    for i in track(range(realisations), f"condition C.1 at |B| = {size:,}"):
        block.column(0).copy_(top.rademacher_like(generator))
        difference = operator.sample(size, generator).matvec(block)
        forms = block.dot(difference)
        operator.sample(size, generator).add_matvec_(difference, block, -1.0)
        forms -= 0.5 * block.dot(difference)  # vᵀa - ½vᵀ(a - b)
        values[0::2, i] = (0.5 * difference.dot(difference)).cpu()
        values[1::2, i] = forms.cpu()
    return values


def _summarise(values: Tensor, sizes: Sequence[float], products: int, terms: int) -> ConditionCheck:
    """From the ``[4, batch sizes, realisations]`` of `_realise` to estimates, their errors to first order."""
    if not bool(torch.isfinite(values).all()):
        raise SolverError("a product holds NaN or infinity; check the model's outputs and its precision")
    for form in values[1::2].mean((1, 2)).tolist():
        if not form > 0:
            raise _no_curvature(form)
    batches = torch.tensor(sizes, dtype=torch.float64)

    def both_sides(means: Tensor) -> Tensor:
        gaps, forms, top_gaps, top_forms = means
        trace, curvature = forms.mean(), top_forms.mean()
        constants = batches * gaps / trace**2
        top_constants = batches * top_gaps / (trace * curvature)
        pooled = torch.stack([trace, curvature, constants.mean(), top_constants.mean()])
        return torch.cat([pooled, gaps, trace**2 / batches, constants, top_constants])

    found = _estimates_of(both_sides, values)
    trace, curvature, constant, top_constant = found[:4]
    columns = [found[4 + k :: len(sizes)] for k in range(len(sizes))]
    points = tuple(ConditionPoint(size, *column) for size, column in zip(sizes, columns, strict=True))
    shares = values[0::2].amax(-1) / values[0::2].sum(-1).clamp_min(torch.finfo(torch.float64).tiny)
    return ConditionCheck(
        points=points,
        slope=_slope(points),
        constant=constant,
        top_constant=top_constant,
        trace=trace,
        curvature=curvature,
        realisations=values.shape[-1],
        largest_share=float(shares.max()),
        num_products=products,
        num_term_products=terms,
    )


def _estimates_of(function: Callable[[Tensor], Tensor], samples: Tensor) -> list[Estimate]:
    """Functions of means, their errors to first order.

    Args:
        function: from means ``[quantities, groups]`` to a vector.
        samples: ``[quantities, groups, n]``. The quantities of one sample may depend on one another, samples and groups
            may not.
    """
    means = samples.mean(-1)
    slopes: Tensor = torch.func.jacrev(function)(means)
    moves = torch.einsum("okg,kgn->ogn", slopes, samples)
    errors = (moves.var(-1).sum(-1) / samples.shape[-1]).sqrt()
    return [Estimate(*pair) for pair in zip(function(means).tolist(), errors.tolist(), strict=True)]


def _slope(points: Sequence[ConditionPoint]) -> Estimate | None:
    if any(point.gap.value == 0 or point.gap.stderr == 0 for point in points):
        return None
    x = np.log([point.batch_size for point in points])
    y = np.log([point.gap.value for point in points])
    weights = [point.gap.value / point.gap.stderr for point in points]
    line, covariance = np.polyfit(x, y, 1, w=weights, cov="unscaled")
    return Estimate(float(line[0]), math.sqrt(float(covariance[0, 0])))


def _no_curvature(value: float) -> SolverError:
    return SolverError(
        f"the operator's curvature is {value:.3g}: the outputs do not depend on the selected parameters, or the model "
        "is certain of every answer. There is nothing for C.1 to bound"
    )
