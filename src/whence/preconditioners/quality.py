"""Whether a preconditioner is as good as it looks: the ends of the spectrum of ``P⁻¹(H + λ)``, measured.

A preconditioner made from too few terms, or from eigenvectors that have not converged, is still positive definite, and
solvers run with it; they are only slow. A few products of Lanczos show it; Ritz values lie inside the spectrum.

    largest     rank k promises about (Λ_k + λ)/λ; much more means that U misses top eigenvectors of H
    smallest    1 for eigenvectors of H; much less means that P has curvature which H does not have
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from whence.errors import OptionError
from whence.operators import Damped, LinearOperator
from whence.preconditioners.base import Preconditioned, Preconditioner
from whence.preconditioners.low_rank import LowRank
from whence.spectrum import Estimate, LanczosResult, lanczos

__all__ = ["Quality", "measure_quality"]

_MUCH_LARGER = 2.0  # times the promised largest eigenvalue
_FAR_BELOW = 0.5  # of the eigenvalue 1
_RESOLVED = 0.01  # relative: a difference that rounding does not make
_NEVER = -1.0  # a tolerance at which Lanczos does not stop: the lower end takes all the products


@dataclass(frozen=True)
class Quality:
    """What was measured of a preconditioner P for ``H + λ``.

    Attributes:
        largest, smallest: Ritz values of ``P⁻¹(H + λ)``, with the bounds of their errors: an eigenvalue is that near.
        plain_condition_number: of ``H + λ``, without P.
        proven: P's own lower bound of the smallest.
        num_terms: of H.
        num_products: spent on measuring.
        promised, rank, terms: of a `LowRank` P the largest eigenvalue that it promises, its rank, and how many terms it
            was made from; None for others.
    """

    largest: Estimate
    smallest: Estimate
    plain_condition_number: float
    proven: float
    num_terms: int
    num_products: int
    promised: float | None = None
    rank: int | None = None
    terms: int | None = None

    @property
    def condition_number(self) -> float:
        """Largest over smallest eigenvalue of ``P⁻¹(H + λ)``, as far as they were measured."""
        return self.largest.value / self.smallest.value if self.smallest.value > 0 else math.inf

    @property
    def improves(self) -> bool:
        """Whether the condition number is smaller with P than without."""
        return self.condition_number < self.plain_condition_number

    @property
    def problems(self) -> tuple[str, ...]:
        """What is wrong with P, with numbers; empty if nothing is."""
        return self._diagnosis()[0]

    @property
    def remedy(self) -> str | None:
        """What the problems come from and what to do about them; None if there are none."""
        return self._diagnosis()[1]

    def _diagnosis(self) -> tuple[tuple[str, ...], str | None]:
        largest, smallest = self.largest.value, self.smallest.value
        misses = self.promised is not None and largest > _MUCH_LARGER * self.promised
        contradicts = smallest < (1 - _RESOLVED) * self.proven
        invents = smallest < _FAR_BELOW
        found = []
        if misses:
            found.append(
                f"the largest eigenvalue of P⁻¹(H + λ) is {largest:.3g}, where rank {self.rank} promises "
                f"{self.promised:.3g}: P misses top eigenvectors of H"
            )
        if contradicts:
            found.append(
                f"the smallest eigenvalue of P⁻¹(H + λ) is {smallest:.3g}, below the {self.proven:.3g} proven for the "
                "operator that P was made from: this is another one, or its products are inaccurate"
            )
        elif invents:
            found.append(
                f"the smallest eigenvalue of P⁻¹(H + λ) is {smallest:.3g}, far below 1: P has curvature that H does "
                "not have"
            )
        if not self.improves:
            found.append(
                f"the condition number is {self.condition_number:.3g} with P, and without it "
                f"{self.plain_condition_number:.3g}"
            )
        if not found:
            return (), None
        if self.terms is None or contradicts:
            return tuple(found), "Make P from this operator, or solve without it"
        if not (misses or invents):
            return tuple(found), "Solve without P, or with a larger rank"
        cause, more = "P's eigenvectors have not converged", "more products (for Nyström, a larger rank)"
        if self.terms < self.num_terms:
            cause = f"{self.terms:,} of {self.num_terms:,} terms are too few to make P from, or {cause}"
            more = f"more terms, or {more}"
        return tuple(found), f"Most likely {cause}. Use {more}"

    def __str__(self) -> str:
        sentences = [
            f"P brings the condition number from {self.plain_condition_number:.3g} to {self.condition_number:.3g}; the "
            f"eigenvalues of P⁻¹(H + λ) lie between {self.smallest.value:.3g} and {self.largest.value:.3g}",
        ]
        if self.remedy is not None:
            sentences += ["But " + "; and ".join(self.problems), self.remedy]
        return ". ".join(sentences) + "."


def measure_quality(
    preconditioner: Preconditioner,
    operator: LinearOperator,
    *,
    generator: torch.Generator,
    products: int = 16,
    lambda_max: float | None = None,
) -> Quality:
    """Measure both ends of the spectrum of ``P⁻¹(H + λ)``, and of ``H + λ`` beside it.

    Args:
        preconditioner: P.
        operator: H, undamped: the one that will be solved with, or a subset for which P was not made.
        generator: draws the starts of Lanczos.
        products: products spent on P, and as many again on ``H + λ``.
        lambda_max: λmax of H, if known: then nothing is spent on ``H + λ``, whose condition number is taken to be
            (λmax + λ)/λ.
    """
    if isinstance(operator, Damped):
        raise OptionError("measure with the operator itself; pass `damped.operator`")
    if products < 2:
        raise OptionError(f"products is {products}; Lanczos needs at least 2 to see two ends of a spectrum")
    of_low_rank: dict[str, Any] = {}
    if isinstance(preconditioner, LowRank):
        P = preconditioner = preconditioner.for_operator(operator)
        of_low_rank = {"promised": P.promised_largest, "rank": P.rank, "terms": P.terms}
    system = Damped(operator, preconditioner.damping)
    found = _ends(Preconditioned(system, preconditioner), products, generator)
    spent = found.num_products
    if lambda_max is None:
        plain = _ends(system, products, generator)
        spent += plain.num_products
        plain_condition = plain.lambda_max.value / max(float(plain.eigenvalues[-1]), system.damping)
    else:
        plain_condition = (lambda_max + system.damping) / system.damping
    return Quality(
        largest=found.lambda_max,
        smallest=Estimate(float(found.eigenvalues[-1]), float(found.residuals[-1])),
        plain_condition_number=plain_condition,
        proven=preconditioner.smallest,
        num_terms=operator.num_terms,
        num_products=spent,
        **of_low_rank,
    )


def _ends(operator: LinearOperator, products: int, generator: torch.Generator) -> LanczosResult:
    # A stream of its own: from the seed that P was drawn with, Lanczos would start where P is exact.
    seed = int(torch.randint(2**62, (), generator=generator, device=generator.device))
    own = torch.Generator(generator.device).manual_seed(seed)
    return lanczos(operator, generator=own, max_products=products, relative_error=_NEVER)
