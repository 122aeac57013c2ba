"""`measure_strain`: how far first-order theory is stretched, in nats.

A score says by how much the loss of a query changes without a training example, to first order. Where an example is
predicted to change *its own* loss by a nat, its outputs would move so far that the theory is no longer about them. What
is wrong about single examples averages out where many carry the gradients, as one over the root of their number. So

    strain(λ) = Σ_z w_z effect(z, z) / √N,      w_z ∝ ‖∇ℓ(z)‖²,      N = 1 / Σ_z w_z²

with ``effect(z, z)`` the predicted change of z's own loss by its removal. It is large where a model is certain of all
but a handful of examples, which then decide every score.

The mean is taken over a few examples that stand for equal parts of the sum: of the examples by falling ``‖∇ℓ(z)‖²``,
those in the middle of each part.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from whence.model.gauss_newton import GaussNewton
from whence.operators import Damped
from whence.preconditioners.ekfac import Ekfac
from whence.scoring.scorer import Method, Scorer
from whence.solvers.cg import ConjugateGradient

__all__ = ["PROBES", "measure_strain"]

#: Examples that stand for all.
PROBES = 8
#: Examples that these are found among: where the system is solved, and where EK-FAC stands in for it.
_AMONG, _AMONG_FACTORED = 4096, 256
#: The error that a solve may leave, and its iterations.
_SCORE_ERROR, _ITERATIONS = 0.15, 40


def measure_strain(
    gnh: GaussNewton, damping: float, *, generator: torch.Generator, factors: Ekfac | None = None
) -> float:
    """The strain at λ; 0 where no example has a gradient.

    Args:
        gnh: H over all of the data.
        damping: λ.
        generator: draws the examples that are looked at, where there are many.
        factors: EK-FAC in place of H; by default the system is solved.
    """
    n, among = len(gnh.terms), _AMONG if factors is None else _AMONG_FACTORED
    positions = torch.arange(n)
    if n > among:
        drawn = torch.randperm(n, generator=generator, device=generator.device)[:among]
        positions = drawn.sort().values.cpu()
    # estimated lengths would be too rough for what stands for all
    method: Method = "gradients" if gnh.example_gradients().missing else "layers"
    _, norms = Scorer(gnh, gnh.zeros(1), method=method, norms=True).score_with_norms(positions)
    squares = norms.double().square()
    chosen, parts = _stand_for_all(squares)
    if len(chosen) == 0:
        return 0.0
    chosen = positions[chosen]
    examples = [gnh.terms.data[int(gnh.terms.indices[position])] for position in chosen]
    gradients = gnh.gradients(examples)
    if factors is not None:
        solution = factors.with_damping(damping).solve(gradients)
    else:
        solver = ConjugateGradient(score_error=_SCORE_ERROR, max_iterations=_ITERATIONS, verify=False)
        solution = solver.solve(Damped(gnh, damping), gradients, generator=torch.Generator()).value
    shares = gnh.terms.counts()[chosen].double() / gnh.num_terms
    effect = float((gradients.dot(solution).double().cpu() * shares * parts).sum() / parts.sum())
    carrying = n / len(positions) * float(squares.sum() ** 2 / squares.square().sum())
    return effect / math.sqrt(carrying)


def _stand_for_all(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Where the middles of equal parts of the sum of the weights lie, by falling weight; and of how many parts each."""
    order = weights.argsort(descending=True)
    sums = weights[order].cumsum(0)
    if len(sums) == 0 or not float(sums[-1]) > 0:
        return torch.empty(0, dtype=torch.long), torch.empty(0)
    middles = (torch.arange(PROBES, dtype=sums.dtype) + 0.5) / PROBES * sums[-1]
    found, counts = torch.searchsorted(sums, middles).clamp_max(len(order) - 1).unique(return_counts=True)
    return order[found], counts.double()
