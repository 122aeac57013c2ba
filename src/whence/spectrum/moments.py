"""Trace, Frobenius norm and the constant of condition C.1, by random probes.

    quadratic forms     Tr(H)   = E vᵀ H̃ v                   v of independent signs; forwards only
    two-batch products  ‖H‖_F²  = E ⟨H̃ v, Ĥ v⟩               H̃, Ĥ from independent batches
    sampled gradients   Tr(H)   = E ‖g‖²,  ‖H‖_F² = E ⟨g, g'⟩²    g with E[g gᵀ] = H: one backward each
    condition C.1       C       = |B| (E Tr H̃² - Tr H²) / Tr(H)²  from the same two batches
                        C(v)    = |B| (E‖H̃v‖² - ‖Hv‖²) / (Tr(H) vᵀHv)   along one direction

Every mean comes with the standard error of independent repetitions.
"""

from __future__ import annotations

import math

import torch

from whence.errors import OptionError
from whence.operators import LinearOperator
from whence.progress import track
from whence.spectrum.estimate import Estimate
from whence.vectors import ParamVector

__all__ = [
    "check_probes",
    "frobenius_from_products",
    "sampling_constant",
    "trace_and_frobenius_from_gradients",
    "trace_from_quadratic_forms",
]


def trace_from_quadratic_forms(
    operator: LinearOperator, *, probes: int, batch_size: int | None, generator: torch.Generator
) -> Estimate:
    """``Tr(H)`` as the mean of ``vᵀ H̃ v``, with a fresh batch and fresh signs ``v`` for each probe.

    ``batch_size=None`` uses the whole operator in every probe.
    """
    check_probes(probes)
    values = []
    for _ in track(range(probes), "trace"):
        vector = operator.zeros().rademacher_like(generator)
        values.append(float(_drawn(operator, batch_size, generator).quadratic_form(vector)))
    return Estimate.from_samples(values)


def frobenius_from_products(
    operator: LinearOperator, *, probes: int, batch_size: int, generator: torch.Generator
) -> Estimate:
    """``‖H‖_F`` from the mean of ``⟨H̃ v, Ĥ v⟩`` over independent pairs of batches."""
    check_probes(probes)
    values = []
    for _ in track(range(probes), "Frobenius norm"):
        vector = operator.zeros().randn_like(generator)
        first = operator.sample(batch_size, generator).matvec(vector)
        values.append(float(first.dot(operator.sample(batch_size, generator).matvec(vector))))
    return Estimate.from_samples(values).sqrt()


def trace_and_frobenius_from_gradients(
    operator: LinearOperator, *, probes: int, batch_size: int, generator: torch.Generator
) -> tuple[Estimate, Estimate]:
    """``Tr(H)`` and ``‖H‖_F`` from ``probes`` gradients with sampled labels, used in pairs."""
    check_probes(probes)
    squares, products = [], []
    for _ in track(range(probes // 2), "trace and Frobenius norm"):
        first = operator.sample_factor(batch_size, generator)
        second = operator.sample_factor(batch_size, generator)
        squares += [float(first.dot(first)), float(second.dot(second))]
        products.append(float(first.dot(second)) ** 2)
    return Estimate.from_samples(squares), Estimate.from_samples(products).sqrt()


def sampling_constant(
    operator: LinearOperator,
    trace: Estimate,
    *,
    probes: int,
    batch_size: int,
    generator: torch.Generator,
    along: tuple[ParamVector, float] | None = None,
) -> Estimate:
    """``Ĉ = |B| (E Tr H̃² - Tr H²) / Tr(H)²``, what the paper assumes to be about 2.

    C.1 is an inequality of matrices, ``E H̃² - H² ≼ (C·Tr(H)/|B|) H``. The trace says that it holds on average over
    directions; ``C(v) = |B| (E‖H̃v‖² - ‖Hv‖²) / (Tr(H) vᵀHv)`` says whether it holds along v: ask that of the top
    eigenvector, where a long step hurts most. See docs/math.md, "Condition C.1".

    Args:
        operator: H, a mean over terms.
        trace: Tr(H), measured.
        probes: pairs of products.
        batch_size: |B|, in terms.
        generator: draws the batches and v.
        along: a direction v and its curvature ``vᵀHv``; by default the average over directions.
    """
    check_probes(probes)
    if trace.value <= 0:
        raise OptionError(f"the trace is {trace.value:.3g}: the operator is zero, and C.1 says nothing")
    values = []
    for _ in track(range(probes), "sampling constant" + ("" if along is None else " of the top eigenvector")):
        vector = operator.zeros().randn_like(generator) if along is None else along[0]
        sampled = operator.sample(batch_size, generator)
        difference = sampled.matvec(vector)
        operator.sample(batch_size, generator).add_matvec_(difference, vector, -1.0)
        values.append(0.5 * sampled.num_terms * float(difference.dot(difference)))
    gap = Estimate.from_samples(values)
    value = gap.value / (trace.value * (trace.value if along is None else along[1]))
    powers = 2 if along is None else 1  # of the trace
    relative = math.hypot(gap.stderr / max(gap.value, 1e-300), powers * trace.stderr / trace.value)
    return Estimate(value, value * relative)


def _drawn(operator: LinearOperator, batch_size: int | None, generator: torch.Generator) -> LinearOperator:
    return operator if batch_size is None else operator.sample(batch_size, generator)


def check_probes(probes: int) -> None:
    """Refuse numbers of probes that no error can be told from, or that are beyond all."""
    if not 2 <= probes < 2**40:
        raise OptionError(f"probes is {probes}; a standard error needs at least 2, and 64 are many")
