"""`ErrorParts`: how much of a solution's error is bias, how much is sampling, and how much is proven.

All parts are relative to ``‖u‖_H``, the scores' own root mean square: an error e changes scores by ``‖e‖_H`` in root
mean square.

**What is left of a start.** Steps ``u ← u - ηP⁻¹[(H̃+λ)u - g]`` have the mean ``u* + (I - ηP⁻¹A)^t(u⁰ - u*)``, and
P⁻¹A is self-adjoint in the inner product of A = H + λ. With μ below its eigenvalues, the averaged steps' mean is off by

    ‖E ū - u*‖_A ≤ mean_t (1 - ημ)^t · ‖u⁰ - u*‖_A

For the start ``u⁰ = P⁻¹g = P⁻¹Au*`` more is known, ``u⁰ - u* = (P⁻¹A - I)u*``, so that an eigenvalue β of P⁻¹A leaves
``|β - 1|(1 - ηβ)^t`` of u*. Steep directions are soon forgotten, flat ones begin nearly right: the most is left of

    β = 1 + (1-η)/(η(t+1)):   (1-η)^(t+1) t^t / (η(t+1)^(t+1)),      or of   β = μ < 1:   (1-μ)(1-ημ)^t

Without a preconditioner P = λ: ``P⁻¹A = 1 + H/λ``, ηλ stands for η, and as all commute it holds in the norm of H, too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from whence.operators import Damped, LinearOperator
from whence.solvers.plan import Plan
from whence.vectors import ParamVector

__all__ = ["ErrorParts", "left_of_default_start", "left_of_start", "measured_parts", "relative_spread"]

_TINY = torch.finfo(torch.float64).tiny


@dataclass(frozen=True)
class ErrorParts:
    """Where the error of a solution comes from, per column, in units of ``‖u‖_H``. NaN where nothing is known.

    Attributes:
        bias: at most, what the start has left behind, which the spread of chains need not show.
        sampling: standard error of the chains' mean, as their spread shows it.
        certificate: the proven bound of what conjugate gradients left undone: of the solution itself, or of the starts
            that chains went on from, as far as the steps have not forgotten it.
        expected: not proven, but what the scores of the examples should be off by, in units of their own spread, as the
            steps of conjugate gradients have shown (`whence.solvers.settling`); None where they were not watched.
    """

    bias: Tensor
    sampling: Tensor
    certificate: Tensor
    expected: Tensor | None = None

    def to_json(self) -> dict[str, list[float | None]]:
        """Numbers by name; what is not known is null."""
        parts = {name: getattr(self, name) for name in ("bias", "sampling", "certificate", "expected")}
        return {
            name: [x if math.isfinite(x) else None for x in part.reshape(-1).tolist()]
            for name, part in parts.items()
            if part is not None
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Sequence[float | None]]) -> ErrorParts:
        """Inverse of `to_json`."""
        numbers = {name: [math.nan if x is None else x for x in row] for name, row in value.items()}
        return cls(**{name: torch.tensor(row, dtype=torch.float64) for name, row in numbers.items()})

    def with_more(self, rounds: int, new: ErrorParts) -> ErrorParts:
        """Of the mean over so many rounds of independent chains before, and as many new ones as in each of them."""
        return ErrorParts(
            bias=torch.maximum(self.bias, new.bias),
            sampling=torch.hypot(rounds * self.sampling, new.sampling) / (rounds + 1),
            certificate=torch.maximum(self.certificate, new.certificate),
        )


def left_of_start(plan: Plan, averaged: range) -> float:
    """``mean_t (1 - ημ)^t`` over the averaged steps: the part of a start's error that is left, at most."""
    return _mean([(1 - plan.step_size * plan.damping) ** t for t in averaged])


def left_of_default_start(plan: Plan, averaged: range, *, preconditioned: bool) -> float:
    """What is left of ``u⁰ = P⁻¹g``, at most, as a part of ``‖u*‖_A`` (without P: of ``‖u*‖_H``)."""
    step, smallest = plan.step_size, plan.damping
    if not preconditioned:
        step, smallest = step * plan.damping, 1.0
    steep = [(1 - step) / step * ((1 - step) * t / (t + 1)) ** t / (t + 1) for t in averaged]
    flat = [(1 - smallest) * (1 - step * smallest) ** t for t in averaged]
    return _mean([max(*pair) for pair in zip(steep, flat, strict=True)])


def relative_spread(
    A: Damped, vectors: Sequence[ParamVector], terms: int, generator: torch.Generator
) -> float:
    """``Σ_c ‖u_c - ū‖²_H / ((m-1)‖ū‖²_H)``, mean of the columns: the variance of one of m independent vectors."""
    held_out, mean = A.operator.subset(terms, generator), ParamVector.mean(vectors)
    spread = _squares(held_out, vectors, mean) / (len(vectors) - 1)
    return float((spread / held_out.quadratic_form(mean).clamp_min(_TINY)).mean())


def measured_parts(
    A: Damped,
    value: ParamVector,
    chains: Sequence[ParamVector],
    *,
    left: float,
    start: ParamVector | None,
    in_energy: bool,
    certificate: Tensor | None,
    terms: int,
    generator: torch.Generator,
) -> ErrorParts:
    """The parts, from quadratic forms on terms drawn anew: forwards alone.

    Args:
        A: the system.
        value: the chains' mean.
        chains: independent estimates.
        left: the part of the start's error that is left.
        start: the mean of the chains' starts; None if `left` is a part of the solution.
        in_energy: whether `left` is about the norm of A, or that of H.
        certificate: bounds of ``‖·‖_A`` per column, or None where there are none.
        terms: how many to draw.
        generator: draws them.
    """
    held_out = A.operator.subset(terms, generator)
    size = held_out.quadratic_form(value).clamp_min(_TINY).sqrt()
    distance = value if start is None else value.clone().axpy_(-1.0, start)
    bias = held_out.quadratic_form(distance)
    if in_energy:
        bias = bias + A.damping * distance.dot(distance)
    nothing = torch.full_like(size, torch.nan)
    m = len(chains)
    spread = nothing if m < 2 else _squares(held_out, chains, value) / (m * (m - 1))
    return ErrorParts(
        bias=left * bias.clamp_min(0.0).sqrt() / size,
        sampling=spread.sqrt() / size,
        certificate=nothing if certificate is None else certificate / size,
    )


def _squares(H: LinearOperator, vectors: Sequence[ParamVector], mean: ParamVector) -> Tensor:
    """``Σ_c ‖u_c - ū‖²_H``, per column."""
    return torch.stack([H.quadratic_form(u.clone().axpy_(-1.0, mean)) for u in vectors]).sum(0)


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)
