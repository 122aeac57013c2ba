"""The scale of self-influence: what exact solves for a few examples say of all.

The bounds of ``s/q`` are about a factor of ten apart where the rank is a few dozen, but from example to example the
ratio differs little: the same directions are missing from P for all of them. So a few examples are solved for, drawn
with chances proportional to q. Over such draws

    E[s(z)/q(z)] = Σ_z q(z)/Σq · s(z)/q(z) = Σs / Σq,

and values ``q · mean(s/q)`` have the right sum, with a standard error, and the order of q.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from whence.errors import OptionError
from whence.model.gauss_newton import GaussNewton
from whence.operators import Damped, LinearOperator
from whence.preconditioners import LowRank
from whence.scoring.self_influence.bounds import WORKING_VECTORS, copies_in_memory
from whence.scoring.self_influence.reading import Readings
from whence.solvers import ConjugateGradient
from whence.spectrum import Estimate

__all__ = ["Calibration", "calibrate"]

_TOLERANCE = 0.1  # of the solve; what it leaves of s is the square of that


@dataclass(frozen=True)
class Calibration:
    """What exact solves for a few examples say of ``s/q``.

    Attributes:
        value: the mean of s/q, which estimates ``Σs/Σq``.
        stderr: its standard error.
        spread: the standard deviation of s/q from example to example.
        probes: how many examples were drawn.
        num_products: products spent, each with several examples at once.
    """

    value: float
    stderr: float
    spread: float
    probes: int
    num_products: int


def calibrate(
    gnh: GaussNewton,
    preconditioner: LowRank,
    operator: LinearOperator,
    found: Readings,
    *,
    generator: torch.Generator,
    probes: int = 8,
) -> Calibration | None:
    """Solve for a few examples by conjugate gradients, and compare.

    After a step, ``gᵀx = s - ‖e‖²_A`` with proven bounds of the error e: a rough solve tells s precisely.

    Args:
        gnh: the operator; brings the data.
        preconditioner: P.
        operator: the H that P was made from, undamped.
        found: q of the examples to draw from.
        generator: draws them.
        probes: how many.

    Returns:
        None where every gradient is zero.
    """
    if probes < 2:
        raise OptionError(
            f"probes is {probes}; a mean with its error needs at least 2 examples, or 0 for none"
        )
    edges = found.forms.cumsum(0)
    if not float(edges[-1]) > 0:
        return None
    uniform = torch.rand(probes, generator=generator, device=generator.device, dtype=torch.float64).cpu()
    drawn = torch.searchsorted(edges, uniform * edges[-1]).clamp_max_(len(edges) - 1)
    chosen, times = drawn.unique(return_counts=True)
    room = (copies_in_memory(gnh) - preconditioner.rank) // WORKING_VECTORS
    solver = ConjugateGradient(tolerance=_TOLERANCE, preconditioner=preconditioner, verify=False)
    exact, spent = [], 0
    for group in found.indices[chosen].split(max(1, room)):
        rhs = gnh.gradients([gnh.terms.data[index] for index in group.tolist()])
        solution = solver.solve(Damped(operator, preconditioner.damping), rhs, generator=generator)
        assert solution.certificate is not None
        lower, upper = solution.certificate.lower.square(), solution.certificate.upper.square()
        left = torch.where(upper.isfinite(), 0.5 * (lower + upper), lower)
        exact.append(rhs.dot(solution.value).cpu() + left.cpu())
        spent += solution.num_products
    ratios = (torch.cat(exact) / found.forms[chosen]).repeat_interleave(times)
    mean = Estimate.from_samples(ratios.tolist())
    return Calibration(mean.value, mean.stderr, mean.stderr * math.sqrt(probes), probes, spent)
