"""What refinement should leave of the error, and the cheapest subset and length of path that leave little enough.

All of it from the spectral density, direction by direction: h an eigenvalue of H, ``β = h/(h + λ)``.

**The subsets' solutions.** For s terms drawn at random, ``(H_S + λ)⁻¹`` is on average nearly ``(λ'/λ)(H + λ')⁻¹``
with the ``λ' > λ`` that solves ``λ'(1 - d(λ')/s) = λ``: in steep directions the solutions are too long, by
``λ'(h + λ)/(λ(h + λ'))``. About that mean they vary by ``C·d₂(λ')/(s - d₂(λ'))``, relative to its square. Both hold for
s below d(λ), too, where ``C·d/s`` of `whence.solvers.refinement` is no use.

**The steps.** A direction's error shrinks by ``1 - a`` in a step, ``a = η(h + λ)``: the averaged points t keep
``ρ = mean_t (1 - a)^t`` of what the start was off by. The noise of step j enters with the weight
``w_j = mean_t (1 - a)^(t-j)`` over the averaged t ≥ j, and adds up to ``C β² a² Σ_j w_j² / (m|B|)`` for m chains.

**Correlation.** A common factor does not change it: of the mean's error only what differs between directions counts.
But intervals know of no bias, so all of it has to stay below the noise.

Measured on digits (κ = 100 and 1000, paths of a tenth to one half of LiSSA's): squared errors are 0.4 to 1.1 of what is
predicted here with C = 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from whence.solvers.plan import Plan
from whence.spectrum import Density, Spectrum

__all__ = ["RefinementError", "RefinementSettings", "cheapest_refinement", "refinement_error"]

#: Lengths of the path tried, in units of LiSSA's shortest; sizes of the subsets tried, in units of d(λ).
_PATHS = tuple(2.0**k for k in range(-4, 2))
_SUBSETS = tuple(2.0**k for k in range(-3, 2))
#: Where conjugate gradients stop on a subset, as in `Refinement`.
_START_ERROR = 0.05


@dataclass(frozen=True)
class RefinementError:
    """Predicted mean squares, relative to the scores'.

    Attributes:
        noise: of the steps' batches and of what is left of the subsets' differences.
        bias: of what is left of the subsets' common error.
        shape: the part of the bias that is no common factor.
        length: the mean's, in units of the solution's.
    """

    noise: float
    bias: float
    shape: float
    length: float

    @property
    def correlation(self) -> float:
        """With the exact scores."""
        return 1 / math.sqrt(1 + (self.noise + self.shape) / self.length**2)


@dataclass(frozen=True)
class RefinementSettings:
    """How to refine, and what it costs.

    Attributes:
        plan: of the steps.
        subset: terms of each chain's own subset.
        iterations: of conjugate gradients on each, predicted.
        terms: gone through, starts and steps of all chains together.
    """

    plan: Plan
    subset: int
    iterations: int
    terms: float


def refinement_error(
    density: Density, plan: Plan, subset: int, C: float, tail: float = 0.5
) -> RefinementError:
    """What `Refinement` with this plan and subset should be off by.

    Args:
        density: of H.
        plan: of the steps.
        subset: s.
        C: the constant of condition C.1.
        tail: the part of the path that is averaged.
    """
    h, weights, damping = density.nodes, density.weights, plan.damping
    rate = (plan.step_size * (h + damping)).clamp_max(1.0)
    kept, noise = _path(rate, plan.num_steps, tail)
    beta = h / (h + damping)
    energy = weights * beta.square()  # of u: E uᵀHu for a query whose gradient has the covariance H
    second = float(energy.sum())
    flatter = _flatter(h, weights, damping, subset)
    theirs = h / (h + flatter)
    mean = flatter / damping * (h + damping) / (h + flatter)  # the subsets' solutions over u
    spread = weights * theirs.square()
    size = float((energy * mean.square()).sum()) / second
    from_starts = float((spread * kept.square()).sum()) / max(subset - float(spread.sum()), 1e-3) * size
    from_steps = float((energy * noise).sum()) / plan.batch_size
    reached = 1 + (mean - 1) * kept
    length = float((energy * reached).sum()) / second
    square = float((energy * reached.square()).sum()) / second
    return RefinementError(
        noise=C * (from_starts + from_steps) / plan.chains,
        bias=max(square - 2 * length + 1, 0.0),
        shape=max(square - length**2, 0.0),
        length=length,
    )


def cheapest_refinement(
    spectrum: Spectrum,
    damping: float,
    *,
    num_terms: int,
    queries: int,
    accuracy: float,
    chains: int,
    C: float,
    generator: torch.Generator,
) -> RefinementSettings | None:
    """Subset and path that should be accurate enough for the fewest terms; None where none of those tried is.

    Args:
        spectrum: measured; its density is needed.
        damping: λ.
        num_terms: of the data.
        queries: solved together.
        accuracy: the correlation to reach.
        chains: m.
        C: the constant of condition C.1.
        generator: for the forecast of conjugate gradients.
    """
    density = spectrum.density
    if density is None:
        return None
    shortest = Plan.tuned(spectrum, damping, num_terms=num_terms, chains=chains, refine=1.0)
    dimension = max(density.dimension(damping).value, 1.0)
    iterations = math.ceil(spectrum.cg_iterations(damping, queries, tolerance=_START_ERROR))
    found: list[RefinementSettings] = []
    for share in _SUBSETS:
        subset = min(math.ceil(share * dimension), num_terms // 2)
        if subset < 2:
            continue
        for longer in _PATHS:
            plan = shortest.replace(num_steps=max(2, math.ceil(longer * shortest.num_steps)))
            error = refinement_error(density, plan, subset, C)
            if error.correlation >= accuracy and error.bias <= error.noise:
                terms = chains * subset * iterations + plan.num_term_products
                found.append(RefinementSettings(plan, subset, iterations, terms))
                break  # a longer path costs more
    return min(found, key=lambda settings: settings.terms, default=None)


def _path(rate: Tensor, steps: int, tail: float) -> tuple[Tensor, Tensor]:
    """For each direction: ρ, and ``a² Σ_j w_j²``."""
    averaged = max(1, round(tail * steps))
    decay = (1 - rate).unsqueeze(1)
    t = torch.arange(steps - averaged + 1, steps + 1, dtype=torch.float64)
    j = torch.arange(1, steps + 1, dtype=torch.float64)
    first = torch.maximum(j, t[0])
    entered = (decay ** (first - j) - decay ** (steps + 1 - j)) / averaged  # a·w_j, a geometric sum
    return (decay**t).mean(1), entered.square().sum(1)


def _flatter(h: Tensor, weights: Tensor, damping: float, subset: int) -> float:
    """λ' of a subset: ``λ'(1 - d(λ')/s) = λ``, by bisection."""
    low, high = damping, damping + float((weights * h).sum()) / subset
    for _ in range(100):
        middle = 0.5 * (low + high)
        determined = float((weights * h / (h + middle)).sum())
        low, high = (low, middle) if middle * (1 - determined / subset) > damping else (middle, high)
    return high
