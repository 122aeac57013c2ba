"""`measure_strain`: how far first-order theory is stretched, in nats.

A score says by how much the loss of a query changes without a training example, to first order. Where an example is
predicted to change *its own* loss by a nat, its outputs would move so far that the theory is no longer about them. What
is wrong about single examples averages out where many carry the gradients, as one over the root of their number. So

    strain(λ) = Σ_z w_z effect(z, z) / √N,      w_z ∝ ‖∇ℓ(z)‖²,      N = 1 / Σ_z w_z²

with ``effect(z, z)`` the predicted change of z's own loss by its removal. It is large where a model is certain of all
but a handful of examples, which then decide every score.

The mean is taken over a few examples that stand for equal parts of the sum: of the examples by falling ``‖∇ℓ(z)‖²``,
those in the middle of each part. Where there are many, lengths are measured of some: the half of these are the examples
whose loss has the longest gradients in the outputs, which one forward pass over all tells, so that a handful which
carries everything is never missed; the others are drawn from the rest, and stand for it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from whence.model.gauss_newton import GaussNewton
from whence.operators import Damped
from whence.preconditioners.ekfac import Ekfac
from whence.progress import ticker
from whence.scoring.scorer import Method, Scorer
from whence.solvers.cg import ConjugateGradient

__all__ = ["AMONG", "AMONG_FACTORED", "PROBES", "measure_strain"]

#: Examples that stand for all.
PROBES = 8
#: Examples that these are found among: where the system is solved, and where EK-FAC stands in for it.
AMONG, AMONG_FACTORED = 4096, 256
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
    positions, standing = _looked_at(gnh, AMONG if factors is None else AMONG_FACTORED, generator)
    # estimated lengths would be too rough for what stands for all
    method: Method = "gradients" if gnh.example_gradients().missing else "layers"
    _, norms = Scorer(gnh, gnh.zeros(1), method=method, norms=True).score_with_norms(positions)
    squares = norms.double().square()
    chosen, parts = _stand_for_all(squares * standing)
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
    carrying = float((squares * standing).sum() ** 2 / (squares.square() * standing).sum())
    return effect / math.sqrt(carrying)


def _looked_at(gnh: GaussNewton, among: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Positions of at most so many examples, and of how many each of them stands for."""
    n = len(gnh.terms)
    if n <= among:
        return torch.arange(n), torch.ones(n, dtype=torch.float64)
    order = _output_gradients(gnh).argsort(descending=True, stable=True)
    surely, rest = order[: among // 2], order[among // 2 :]
    drawn = torch.randperm(len(rest), generator=generator, device=generator.device)[: among - len(surely)]
    standing = torch.ones(among, dtype=torch.float64)
    standing[len(surely) :] = len(rest) / len(drawn)
    return torch.cat([surely, rest[drawn.cpu()]]), standing


def _output_gradients(gnh: GaussNewton) -> Tensor:
    """``‖∂ℓ(z)/∂h‖²`` of the mean loss over each example's terms, ``[n]``: one forward pass over the data."""
    found = torch.zeros(len(gnh.terms), dtype=torch.float64)
    positions = gnh.terms.by_length(torch.arange(len(gnh.terms)))
    with ticker("gradients in the outputs", len(positions)) as tick:
        for chunk in positions.split(gnh.micro_batch):
            batch = gnh.terms.fetch(chunk).shared(gnh.network.ranks)
            if not batch.held and not gnh.lockstep:
                continue
            with torch.no_grad():
                outputs = gnh.network.outputs(batch)
            leaf = outputs.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(gnh.task.query_losses(leaf, batch).sum(), leaf)
            squares = gradient.double().square().reshape(batch.size, -1).sum(1)
            start = 0 if batch.share is None else batch.share.start
            found[chunk[start : start + batch.held]] = squares[: batch.held].cpu()
            for _ in range(len(chunk)):
                tick()
    return gnh.network.ranks.sum(found)


def _stand_for_all(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Where the middles of equal parts of the sum of the weights lie, by falling weight; and of how many parts each."""
    order = weights.argsort(descending=True)
    sums = weights[order].cumsum(0)
    if len(sums) == 0 or not float(sums[-1]) > 0:
        return torch.empty(0, dtype=torch.long), torch.empty(0)
    middles = (torch.arange(PROBES, dtype=sums.dtype) + 0.5) / PROBES * sums[-1]
    found, counts = torch.searchsorted(sums, middles).clamp_max(len(order) - 1).unique(return_counts=True)
    return order[found], counts.double()
