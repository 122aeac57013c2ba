"""How much damping: the metric D and the λ of ``H + λD`` that ``damping="auto"`` takes.

*With the training's recipe*, ``λ = 4/τ`` with τ the sum of all learning rates (`whence.training`), in the optimizer's
own metric: D = √v̂ for Adam, the identity for SGD.

*Without*, as if Adam had trained the model for a time of one half: ``λ = 8`` in the metric of √v, the second moment of
gradients measured at the parameters as they are; and more than that where scores would depend too much on which half of
the data H is measured on: λ is raised until the scores by two halves agree to 0.8 (`whence.attribution.stability`).

The three numbers are from ``python -m benchmarks.damping``: twelve works, each left out in turn.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from whence.attribution.job import Job
from whence.attribution.stability import Stability, measure_stability
from whence.errors import OptionError
from whence.model.second_moment import floored, root_second_moment
from whence.runs import Run
from whence.solvers.plan import resolve_damping
from whence.spectrum import Spectrum
from whence.vectors import ParamVector

__all__ = ["AGREEMENT", "GUESS", "RECIPE", "Weighed", "in_metric", "weigh"]

#: λ times the training's time.
RECIPE = 4.0
#: λ where the training is not known, in the metric of √v.
GUESS = 8.0
#: What scores by two halves of the data must agree to.
AGREEMENT = 0.8
#: λ that stability is measured for: so many, each this many times the one before.
_GRID, _STEP = 12, 2.0


@dataclass(frozen=True)
class Metric:
    """The diagonal of D; None for the identity."""

    diagonal: ParamVector | None


def in_metric(run: Run, job: Job) -> Job:
    """The job in the coordinates in which its damping is a number."""

    def compute() -> Metric:
        training, random = job.training, job.options.generator(5)
        if training is not None and training.root_moment is not None:
            return Metric(floored(_selected(training.root_moment, job)))
        adaptive = job.options.damping == "auto" if training is None else training.adaptive
        return Metric(root_second_moment(job.gnh, generator=random) if adaptive else None)

    metric = run.keep("metric", Metric, compute, operator=job.gnh, device=job.device).diagonal
    return job if metric is None else replace(job, gnh=job.gnh.in_metric(metric))


def _selected(moment: ParamVector, job: Job) -> ParamVector:
    """The part of an optimizer's state that belongs to the parameters asked about."""
    zeros = job.gnh.zeros()
    missing = [name for name in zeros if name not in moment]
    if missing:
        raise OptionError(
            f"the optimizer has no second moment of {missing[0]!r} and {len(missing) - 1} others of the parameters "
            "asked about: it did not train them. Select by params= what it trained"
        )
    return ParamVector({name: moment[name].to(part) for name, part in zeros.items()})


@dataclass(frozen=True)
class Weighed:
    """The λ to use.

    Attributes:
        damping: λ.
        words: how it was found.
        stability: what two halves of the data say; None where it was not asked for.
    """

    damping: float
    words: str
    stability: Stability | None


def weigh(run: Run, job: Job, gradients: ParamVector, spectrum: Spectrum) -> Weighed:
    """λ, as given, from the recipe or by the rule at the top of this file; and how stable scores are with it."""

    def compute() -> Weighed:
        damping, training = job.options.damping, job.training
        if damping != "auto":
            least = resolve_damping(damping, spectrum)
            words = "λ was given."
        elif training is not None:
            least = RECIPE / training.time
            words = f"λ = {RECIPE:g}/τ from the training: τ = {training.time:.3g} is the sum of its learning rates."
        else:
            least = GUESS
            words = f"λ = {GUESS:g} in the metric of the gradients' second moment, as if Adam had trained the model."
        if not job.options.stability:
            return Weighed(least, words, None)
        grid = least * torch.logspace(0, _GRID - 1, _GRID, base=_STEP, dtype=torch.float64)
        stability = measure_stability(job.gnh, gradients, grid, generator=job.options.generator(6))
        found = stability.damping_for(AGREEMENT) if damping == "auto" and training is None else least
        if found > least:
            words += (
                f" There, scores by two halves of the data agree to {float(stability.agreement[0]):.2f} only, so it "
                f"was raised {found / least:.3g} times, to where they agree to {AGREEMENT:g}."
            )
        return Weighed(found, words, stability)

    return run.keep("damping", Weighed, compute, operator=job.gnh)
