"""Noticing that a stochastic solve diverges, telling why, and answering it.

The solution is never longer than ``‖g‖/λ``: leaving that ball by a factor of `SLACK` means divergence. If, along the
direction v of escape, ``η(vᵀHv + λ)`` exceeds 1.5 on a large fresh batch, the step is too long: λmax was
underestimated. If not, the batch is too small (the paper's condition). With a preconditioner ``‖Av‖²_{P⁻¹} / vᵀAv``
takes the place of ``vᵀHv + λ``. See docs/math.md, "Divergence, and its cause".
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from whence.errors import DivergenceError
from whence.operators import Damped
from whence.preconditioners import Preconditioner
from whence.solvers.plan import Plan
from whence.vectors import ParamVector

__all__ = ["Divergence", "answer", "left_the_ball"]

SLACK = 3.0
_ATTEMPTS = 6
_STEP_LIMIT = 1.5


def left_the_ball(iterate: ParamVector, radius: Tensor) -> bool:
    """Whether any column is non-finite or longer than `SLACK` times the longest possible solution."""
    norm = iterate.norm()
    return not bool(((norm <= SLACK * radius) | ((radius == 0) & (norm == 0))).all())


@dataclass(frozen=True)
class Divergence:
    """A path that left the ball: where, when, under which settings, and on which batch."""

    iterate: ParamVector
    step: int
    radius: Tensor
    system: Damped
    plan: Plan
    preconditioner: Preconditioner | None = None
    batch: Damped | None = None

    @cached_property
    def _direction(self) -> ParamVector | None:
        """v, of unit length; None if the path is not finite."""
        columns = self.iterate.unstack()
        growth = self.iterate.norm() / self.radius
        worst = columns[int(growth.reshape(-1).nan_to_num(math.inf).argmax())]
        return worst.clone().scale_(1 / float(worst.norm())) if worst.is_finite() else None

    @cached_property
    def _large(self) -> Damped:
        """The system on a large fresh batch."""
        terms = min(self.system.num_terms, max(10 * self.plan.batch_size, 1000))
        return self.system.subset(terms, torch.Generator().manual_seed(self.step), distinct=True)

    @cached_property
    def curvature(self) -> float:
        """``vᵀHv + λ`` (or its preconditioned version) along the direction of escape; NaN if the path is not finite."""
        if (direction := self._direction) is None:
            return math.nan
        if self.preconditioner is None:
            return float(self._large.quadratic_form(direction))
        product = self._large.matvec(direction)
        return float(product.dot(self.preconditioner.solve(product)) / direction.dot(product))

    @cached_property
    def _heaviest(self) -> tuple[str, float] | None:
        """Whose curvature it was: the example of the last batch that has most of it along the path."""
        direction = self._direction
        return None if self.batch is None or direction is None else self.batch.heaviest_term(direction)

    @property
    def needed(self) -> int:
        """Terms of a batch that the heaviest example does not upset: its part of ``ηH̃`` along the path is at most 1.

        With ``ρ = vᵀH_z v`` of this example alone, the mean square along v stays bounded where ``η(ρ/|B| + vᵀHv + λ)``
        is below 2, |B| in examples.
        """
        if self._heaviest is None or self.preconditioner is not None:
            return 1
        examples = math.ceil(self.plan.step_size * self._heaviest[1])
        return examples * self.system.sample(1, torch.Generator().manual_seed(self.step)).num_terms

    @cached_property
    def _whose(self) -> str:
        """The same in words, beside the data."""
        if self._heaviest is None or self._direction is None:
            return ""
        name, own = self._heaviest
        usual = float(self._large.operator.quadratic_form(self._direction))
        return f" In the last batch, {name} alone has a curvature of {own:.3g} along the path, the data {usual:.3g}."

    @property
    def step_too_long(self) -> bool:
        """Whether the step exceeds what the curvature along the escape allows."""
        return not self.plan.step_size * self.curvature <= _STEP_LIMIT

    @property
    def message(self) -> str:
        """What happened and why, in a sentence or two."""
        what = (
            f"LiSSA diverged at step {self.step} of {self.plan.num_steps}: the iterate left the ball of radius "
            f"‖g‖/λ that holds the solution."
        )
        if self.step_too_long:
            return (
                f"{what} The step η = {self.plan.step_size:.3g} is too long: the curvature along the path, damping "
                f"included, is {self.curvature:.3g}, the plan assumed λmax = {self.plan.spectrum.lambda_max}."
            )
        return f"{what} The batch |B| = {self.plan.batch_size:,} is too small for this step.{self._whose}"


def answer(divergence: Divergence, A: Damped, plan: Plan, *, attempt: int, recover: bool) -> Plan:
    """A more cautious plan, or a `DivergenceError` that names the cause."""
    too_long = divergence.step_too_long
    if not recover or attempt >= _ATTEMPTS:
        advice = (
            f"estimate λmax on more data, or use step_size ≤ {plan.step_size / 2:.3g}"
            if too_long
            else f"use batch_size ≥ {2 * plan.batch_size} (measure Ĉ with estimate_spectrum and plan with it)"
        )
        raise DivergenceError(f"{divergence.message} Try: {advice}, or a larger damping.")
    # examples are drawn whole: twice a batch of half a sequence would be the same one sequence
    drawn = A.sample(plan.batch_size, torch.Generator().manual_seed(divergence.step)).num_terms
    least = max(2 * plan.batch_size, 2 * drawn, plan.smallest_stable_batch)
    larger = min(max(least, divergence.needed), A.num_terms)
    if not too_long and larger >= least:
        return plan.replace(batch_size=larger)
    return plan.replace(step_size=plan.step_size / 2, num_steps=2 * plan.num_steps)
