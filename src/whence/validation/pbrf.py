"""`pbrf`: what a score should be, found by fine-tuning instead of by solving.

The proximal Bregman response function of a training example z is the minimiser θ(ε) of `BregmanObjective`; damped
influence is its derivative at ε = 0. In our sign and units, for a query q,

    score(q, z) = -(ℓ(q; θ(ε)) - ℓ(q; θ*)) / ε  →  ∇ℓ(q)ᵀ (H + λ)⁻¹ ∇ℓ(z)        as ε → 0

Nothing here uses a Gauss-Newton product, so agreement with `whence.attribute` is evidence for both. Derived in
docs/math.md, 'Proximal Bregman response'.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from whence.arguments import checked
from whence.errors import DataError, OptionError, SolverError, WhenceWarning
from whence.model.selection import ParameterFilter
from whence.progress import ticker
from whence.solvers.plan import Plan
from whence.tasks import Batch, Questions, Task
from whence.tasks.questions import Parts
from whence.threads import one_at_a_time
from whence.validation.bregman import PART, BregmanObjective
from whence.validation.statistics import standard_error
from whence.vectors import ParamVector

__all__ = ["ProximalResponse", "pbrf"]

_TAIL = 0.5  # of a minibatch path that is averaged
_RESIDUAL_BATCHES = 8
_NEWTON_STEPS = 12
_LEFT_THE_BALL = 10.0  # times ‖g‖/λ, which no minimiser is outside of


@dataclass(frozen=True)
class ProximalResponse:
    """Scores by the proximal Bregman response, and whether to believe them.

    Attributes:
        scores: ``-(ℓ(q; θ(ε)) - ℓ(q; θ*))/ε``, ``[queries, points]``.
        linear: ``-⟨∇ℓ(q), d⟩``, the first-order part of the scores. Where they differ, ε was too large for influence,
            which is linear.
        stderr: of the scores, from independent minibatch chains; zero for full batches, NaN for a single chain.
        residual: ``‖∇F/ε‖ / ‖∇ℓ(z)‖`` at the end, per point.
        residual_stderr: its standard error; zero for full batches.
        converged: per point.
        epsilon: per point.
        num_gradients: of the objective, all points together.
        num_terms: of the data that went through them.
    """

    scores: Tensor
    linear: Tensor
    stderr: Tensor
    residual: Tensor
    residual_stderr: Tensor
    converged: Tensor
    epsilon: Tensor
    num_gradients: int
    num_terms: int

    @property
    def trusted(self) -> Tensor:
        """The scores, NaN for points whose fine-tuning did not converge."""
        return self.scores.where(self.converged, float("nan"))

    @property
    def nonlinearity(self) -> Tensor:
        """``‖scores - linear‖ / ‖scores‖`` over the queries, per point."""
        apart: Tensor = (self.scores - self.linear).norm(dim=0) / self.scores.norm(dim=0).clamp_min(1e-300)
        return apart


@one_at_a_time
@checked("model", "task", "params")
def pbrf(
    model: nn.Module,
    train: Any,
    points: Any,
    queries: Any,
    *,
    task: Task,
    damping: float,
    params: ParameterFilter | None = None,
    epsilon: float | None = None,
    plan: Plan | None = None,
    generator: torch.Generator | None = None,
    tolerance: float | None = None,
    max_gradients: int = 1000,
    micro_batch: int | None = None,
    importance: Tensor | None = None,
    metric: ParamVector | None = None,
) -> ProximalResponse:
    """Scores of the points for the queries by the proximal Bregman response function.

    A response that did not converge is marked, warned of, and NaN in `ProximalResponse.trusted`.

    Args:
        model: in evaluation mode; copied into float64 on its device, not modified.
        train: its training data.
        points: training examples to fine-tune on, each by itself.
        queries: examples whose losses are looked at before and after, or `Questions`.
        task: what the outputs mean.
        damping: λ, as the attribution's (``result.solve.plan.damping``).
        params: which parameters may move; the attribution's.
        epsilon: weight of the point's loss; by default, per point, where the outputs' path is straightest.
        plan: run minibatch gradient descent with the plan's step, batch, steps and chains; Newton's method on full
            batches without.
        generator: of the minibatches; needed with a plan.
        tolerance: relative gradient at which a response is converged: 1e-4 by default for full batches. A minibatch
            average cannot be that exact: 0.3, as for LiSSA.
        max_gradients: of a full-batch response, per point.
        micro_batch: examples per pass.
        importance: the chance of each training example to be drawn into a minibatch, such as
            ``measure_importance(gnh).probabilities()``; equal ones by default.
        metric: the diagonal of D, where the proximity is ``λ/2 · (θ - θ*)ᵀD(θ - θ*)``; the identity by default.

    Example:
        >>> from whence import Classification
        >>> _ = torch.manual_seed(0)
        >>> data = [(torch.randn(3), i % 2) for i in range(20)]
        >>> response = pbrf(nn.Linear(3, 2).eval(), data, data[:2], data[5:8], task=Classification(), damping=0.1)
        >>> response.scores.shape, bool(response.converged.all())
        (torch.Size([3, 2]), True)
    """
    _check(epsilon, plan, generator, tolerance, max_gradients, damping)
    objective = BregmanObjective(
        model,
        task,
        train,
        damping=float(damping),
        params=params,
        micro_batch=micro_batch,
        importance=importance,
        metric=metric,
    )
    for name, data in (("points", points), ("queries", queries)):
        if not hasattr(data, "__len__") or len(data) == 0:
            raise DataError(f"there are no {name}; give at least one example")
    parts = Questions.of(queries).parts(task)
    asked = parts, list(objective.examples(parts.examples, objective.micro_batch))
    before = objective.losses(objective.network.zeros(), 0.0, *asked)
    if tolerance is None:
        tolerance = 1e-4 if plan is None else 0.3
    found = []
    with ticker("fine-tuning on single examples", len(points)) as tick:
        for point in objective.examples(points, 1):
            descent = _Descent(objective, point, epsilon, plan, generator)
            found.append(descent.response(asked, before, tolerance, max_gradients))
            tick()
    response = _joined(found)
    if not bool(response.converged.all()):
        worst = int(response.residual.argmax())
        warnings.warn(
            f"{int((~response.converged).sum())} of {len(points)} responses did not converge (point {worst}: relative "
            f"gradient {float(response.residual[worst]):.2g} above {tolerance:g}); do not trust them. Allow more "
            "gradients, or a plan with more steps",
            WhenceWarning,
            stacklevel=2,
        )
    return response


def _check(
    epsilon: float | None,
    plan: Plan | None,
    generator: torch.Generator | None,
    tolerance: float | None,
    max_gradients: int,
    damping: float,
) -> None:
    if not isinstance(damping, (int, float)) or not 0 < damping < math.inf:
        raise OptionError(
            f"damping is {damping!r}; the proximal objective needs a positive number, such as the one that an "
            "attribution was solved with"
        )
    if epsilon is not None and not 0 < abs(epsilon) < math.inf:
        raise OptionError(f"epsilon is {epsilon}; give a small number other than 0, or leave it out")
    if tolerance is not None and not 0 < tolerance < math.inf:
        raise OptionError(f"tolerance is {tolerance}; it must be a positive number")
    if max_gradients < 1:
        raise OptionError(f"max_gradients is {max_gradients}; it must be at least 1")
    if plan is not None and generator is None:
        raise OptionError("a plan draws minibatches; give generator=torch.Generator().manual_seed(0)")
    if plan is not None and abs(plan.damping - damping) > 1e-9 * damping:
        raise OptionError(
            f"damping is {damping}, the plan was made for {plan.damping}; make both from one value"
        )


def _joined(parts: Sequence[ProximalResponse]) -> ProximalResponse:
    """One response of all points."""
    joined: dict[str, Any] = {}
    for field in fields(ProximalResponse):
        values = [getattr(part, field.name) for part in parts]
        joined[field.name] = torch.cat(values, -1) if isinstance(values[0], Tensor) else sum(values)
    return ProximalResponse(**joined)


class _Descent:
    """Finding the minimiser for one point: on full batches, or on minibatches where there is a plan."""

    def __init__(
        self,
        objective: BregmanObjective,
        point: Batch,
        epsilon: float | None,
        plan: Plan | None,
        generator: torch.Generator | None,
    ) -> None:
        self._objective, self._point, self._plan, self._generator = objective, point, plan, generator
        self._num_gradients = self._num_terms = 0
        self._slope = objective.loss_gradient(point)
        self._norm = float(self._slope.norm())
        if not math.isfinite(self._norm):
            raise DataError("a point's loss has a gradient of NaN or infinity; check its inputs and label")
        #: No minimiser is farther away: λ‖d‖ ≤ ‖∇ℓ(z)‖ to first order.
        self._radius = self._norm / objective.damping
        self._epsilon = epsilon or (objective.straightest(self._start(), point) if self._norm > 0 else 1e-8)

    def response(
        self, asked: tuple[Parts, list[Batch]], before: Tensor, tolerance: float, max_gradients: int
    ) -> ProximalResponse:
        """From the end of one full-batch path or the ends of independent minibatch paths, and the losses before."""
        plan, losses, epsilon = self._plan, self._objective.losses, self._epsilon
        if plan is None:
            ends = [self._newton(tolerance, max_gradients)]
        else:
            ends = [self._minibatches(plan) for _ in range(plan.chains)]
        mean = ParamVector.mean(ends)
        residual, error = self._residual(mean)
        after = torch.stack([losses(end, epsilon, *asked) for end in ends])
        by_chain = (before - after) / epsilon  # removal and fine-tuning have opposite signs: flipped here
        behind, ahead = (losses(mean, sign * PART * epsilon, *asked) for sign in (-1, 1))
        stderr = standard_error(by_chain, 0) if plan is not None else torch.zeros_like(before)
        return ProximalResponse(
            scores=by_chain.mean(0).unsqueeze(1),
            linear=((behind - ahead) / (2 * PART * epsilon)).unsqueeze(1),  # by central differences
            stderr=stderr.unsqueeze(1),
            residual=torch.tensor([residual]),
            residual_stderr=torch.tensor([error]),
            converged=torch.tensor([residual <= tolerance]),
            epsilon=torch.tensor([epsilon], dtype=torch.float64),
            num_gradients=self._num_gradients,
            num_terms=self._num_terms,
        )

    def _start(self) -> ParamVector:
        """``-∇ℓ(z)/λ``, as LiSSA starts: exact in flat directions."""
        return self._slope.clone().scale_(-1 / self._objective.damping)

    def _newton(self, tolerance: float, max_gradients: int) -> ParamVector:
        """Newton's method from ``d = 0``, where the gradient is ``∇ℓ(z)``."""
        d = self._slope.zeros_like()
        gradient = self._slope.clone()
        for _ in range(_NEWTON_STEPS):
            if float(gradient.norm()) <= tolerance * self._norm or self._num_gradients >= max_gradients:
                break
            step = self._newton_step(d, gradient, 0.3 * tolerance * self._norm, max_gradients)
            for _ in range(6):  # a full step, or as long a part of it as makes the gradient smaller
                trial = d.clone().axpy_(1.0, step)
                slope = self._gradient(trial)
                if float(slope.norm()) < float(gradient.norm()):
                    d, gradient = trial, slope
                    break
                step.scale_(0.5)
            else:
                break
        return d

    def _newton_step(
        self, d: ParamVector, gradient: ParamVector, enough: float, max_gradients: int
    ) -> ParamVector:
        """``s`` with ``∇²F s = -∇F`` by conjugate gradients, curvature from differences of gradients."""
        step, residual = d.zeros_like(), gradient.clone().scale_(-1.0)
        direction, square = residual.clone(), float(residual.dot(residual))
        reach = max(float(d.norm()), 0.1 * self._radius)  # within what ε was chosen for
        while math.sqrt(square) > enough and self._num_gradients < max_gradients:
            length = reach / float(direction.norm())
            ahead = self._gradient(d.clone().axpy_(length, direction))
            product = ahead.axpy_(-1.0, gradient).scale_(1 / length)
            curvature = float(direction.dot(product))
            if curvature <= 0:  # ε is so large that the point's own loss bends the objective down
                break
            alpha = square / curvature
            step.axpy_(alpha, direction)
            residual.axpy_(-alpha, product)
            before, square = square, float(residual.dot(residual))
            direction.scale_(square / before).axpy_(1.0, residual)
        return step

    def _minibatches(self, plan: Plan) -> ParamVector:
        """``d ← d - η ∇F_B/ε`` on fresh batches; the mean of the path's second half."""
        d, average = self._start(), self._slope.zeros_like()
        burn_in = plan.num_steps - max(1, round(_TAIL * plan.num_steps))
        for step in range(1, plan.num_steps + 1):
            d.axpy_(-plan.step_size, self._gradient(d, plan.batch_size))
            if not float(d.norm()) <= _LEFT_THE_BALL * self._radius:
                raise SolverError(
                    f"fine-tuning diverged at step {step} (η = {plan.step_size:.3g}, |B| = {plan.batch_size}): the "
                    "step is too long or the batch too small. Plan with the measured constant, or use full batches"
                )
            if step > burn_in:
                average.lerp_(d, 1 / (step - burn_in))
        return average

    def _residual(self, d: ParamVector) -> tuple[float, float]:
        """``‖∇F/ε‖ / ‖∇ℓ(z)‖`` and its standard error; with a plan, estimated without bias on fresh batches."""
        if self._norm == 0:
            return 0.0, 0.0
        if self._plan is None:
            return float(self._gradient(d).norm()) / self._norm, 0.0
        total, squares, m = d.zeros_like(), 0.0, _RESIDUAL_BATCHES
        for _ in range(m):
            slope = self._gradient(d, 4 * self._plan.batch_size)
            squares += float(slope.dot(slope))
            total.axpy_(1.0, slope)
        # products of different batches only: their noise does not add up to a norm
        square = (float(total.dot(total)) - squares) / (m * (m - 1)) / self._norm**2
        error = math.sqrt(2 / (m * (m - 1))) * squares / m / self._norm**2
        norm = math.sqrt(max(square, 0.0))
        return norm, min(error / max(2 * norm, 1e-30), math.sqrt(error))

    def _gradient(self, d: ParamVector, batch_size: int | None = None) -> ParamVector:
        """Over all of the data, or over a fresh batch of so many terms."""
        terms, drawn = self._objective.terms, None
        if batch_size is not None:
            assert self._generator is not None
            drawn = terms.draw_weighted(batch_size, self._generator)
        self._num_gradients += 1
        self._num_terms += terms.num_terms if drawn is None else int(terms.counts()[drawn[0]].sum())
        return self._objective.gradient(d, self._epsilon, self._point, drawn)
