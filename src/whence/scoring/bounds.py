"""How far a low-rank P can be from H + λ, and with it ``q = wᵀP⁻¹w`` from ``s = wᵀ(H + λ)⁻¹w``.

Let a and b be the ends of the spectrum of ``P⁻¹(H + λ)``. Then ``aP ≼ H + λ ≼ bP``, inverses are ordered the other way,
and for every w

    q/b ≤ s ≤ q/a.

*a* is proven (`LowRank.smallest`). Nyström's ``N = UΛUᵀ`` has ``N ≼ H``, so that P lies below H + λ and a is 1 but for
rounding: q is an upper bound of s.

*b* is measured by k steps of Lanczos from a random start in dimension p, whose Ritz value θ may miss a part ε of the
spectrum's width (docs/math.md, "The largest eigenvalue by Lanczos"). The spectrum begins at a, so

    b ≤ a + (θ - a)/(1 - ε),       ε = (log(1.648·√p/δ) / (2k - 1))²,       with probability 1 - δ.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from whence.errors import OptionError
from whence.model.gauss_newton import GaussNewton
from whence.model.memory import half_of_memory
from whence.operators import LinearOperator
from whence.preconditioners import LowRank, measure_quality
from whence.units import format_bytes

__all__ = [
    "AT_ONCE",
    "RANK",
    "WORKING_VECTORS",
    "Bounds",
    "affordable_rank",
    "copies_in_memory",
    "measure_bounds",
]

#: Columns of U, where memory allows.
RANK = 32
#: Vectors beside U: what conjugate gradients need for one right-hand side.
WORKING_VECTORS = 10
_FEWEST_COLUMNS = 8  # that Nyström works with whatever the rank
#: Nyström's columns that products take together, at three vectors each.
AT_ONCE = 8


@dataclass(frozen=True)
class Bounds:
    """Between which multiples of P the system lies: ``smallest·P ≼ H + λ ≼ largest·P``.

    Attributes:
        smallest: a, proven.
        largest: b, with probability `confidence` over Lanczos' random start.
        confidence: 1 - δ.
        operator_terms: how many terms H averages.
        num_products: spent on measuring.
        problems: what is wrong with P and what to do, in words; empty if nothing is.
    """

    smallest: float
    largest: float
    confidence: float
    operator_terms: int
    num_products: int
    problems: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not 0 < self.smallest <= self.largest < math.inf:
            raise OptionError(f"bounds {self.smallest} and {self.largest} are not positive and in order")

    @property
    def ratio(self) -> float:
        """b/a: the upper bound of s over the lower one."""
        return self.largest / self.smallest


def measure_bounds(
    preconditioner: LowRank,
    operator: LinearOperator,
    *,
    generator: torch.Generator,
    products: int = 16,
    confidence: float = 0.99,
) -> Bounds:
    """Measure b, beside the a that P knows.

    Args:
        preconditioner: P.
        operator: the H that it was made from, undamped.
        generator: draws Lanczos' start, independently of P.
        products: Lanczos' steps.
        confidence: 1 - δ.
    """
    if not 0 < confidence < 1:
        raise OptionError(f"confidence is {confidence}; it is a probability, such as 0.99")
    missed = _missed(products, preconditioner.vectors.numel, confidence)
    # λmax only tells what P improves on; P's own top eigenvalue is near enough for that, and costs nothing.
    top = float(preconditioner.eigenvalues[0])
    quality = measure_quality(
        preconditioner, operator, generator=generator, products=products, lambda_max=top
    )
    if quality.num_products < products:  # Lanczos came to the end of the space that its start lies in
        missed = 0.0
    a, ritz = quality.proven, max(quality.largest.value, quality.proven)
    return Bounds(
        smallest=a,
        largest=a + (ritz - a) / (1 - missed),
        confidence=confidence,
        operator_terms=operator.num_terms,
        num_products=quality.num_products,
        problems=() if quality.remedy is None else (*quality.problems, quality.remedy),
    )


def _missed(steps: int, dimension: int, confidence: float) -> float:
    """ε: the part of the spectrum's width that the top Ritz value may miss."""
    if steps >= dimension:
        return 0.0
    part = (math.log(1.648 * math.sqrt(dimension) / (1 - confidence)) / (2 * steps - 1)) ** 2
    if part >= 1:
        raise OptionError(
            f"products is {steps}; in {dimension:,} dimensions so few bound nothing with probability "
            f"{confidence:g}. Use more (16 by default)"
        )
    return part


def affordable_rank(gnh: GaussNewton) -> tuple[int, int]:
    """The rank that half of the memory holds, at most 32; and how many columns to multiply at once while making P.

    Raises:
        OptionError: where not even the smallest P fits.
    """
    copies = copies_in_memory(gnh)
    if copies < _FEWEST_COLUMNS + WORKING_VECTORS:
        raise OptionError(
            f"self-influence needs {_FEWEST_COLUMNS + WORKING_VECTORS} vectors of the parameters' size, and half of "
            f"the memory holds {copies} of {format_bytes(_vector_bytes(gnh))}; select fewer parameters (params, "
            "--params), such as the last layers"
        )
    rank = min(RANK, copies - WORKING_VECTORS)
    return min(rank, gnh.num_parameters), min(AT_ONCE, (copies - rank) // 3)


def copies_in_memory(gnh: GaussNewton) -> int:
    """How many vectors of the parameters' size half of the memory holds; many, where the system does not tell."""
    memory = half_of_memory(gnh.network.device)
    return 1000 if memory is None else int(memory // _vector_bytes(gnh))


def _vector_bytes(gnh: GaussNewton) -> int:
    return sum(p.numel() * max(p.element_size(), 4) for p in gnh.network.parameters.values())
