"""How much damping: the metric D and the λ of ``H + λD`` that ``damping="auto"`` takes.

*With the training's recipe*, ``λ = 3/τ`` with τ the sum of all learning rates (`whence.training`), in the optimizer's
own metric: D = √v̂ for Adam, the identity for SGD.

*Without*, as if Adam had trained the model for a time of 0.6: ``λ = 5√m`` in the metric of √v, the second moment
of gradients measured at the parameters as they are. √v is of batches of 32 examples, and an example has m terms: a
passage as many as it has tokens. The mean over more terms makes √v smaller by √m, and λ makes that good, so that it
does not matter how text is cut into passages.

*Either way*, more where first-order theory would be stretched too far: where the strain is above 0.1 nats
(`whence.attribution.strain`), λ is multiplied by ``(strain / 0.1)²``. Strain falls about as the root of λ, so this
brings it there; at most a hundredfold, where scores are gradient dot products as a rule.

``damping="auto/4"`` is a quarter of that λ, in the same metric: what `whence.tune` finds can be given so.

The three numbers are from ``python -m benchmarks.damping``: many works, each left out in turn.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import torch

from whence.attribution.job import Job
from whence.attribution.result import Attribution
from whence.attribution.stability import Stability, measure_stability
from whence.attribution.strain import measure_strain
from whence.errors import OptionError, RunDirectoryError
from whence.model.gauss_newton import GaussNewton
from whence.model.second_moment import factored, root_second_moment
from whence.options import Options, RunOptions
from whence.preconditioners.ekfac import Ekfac
from whence.runs import Run, holds, read
from whence.solvers.plan import part_of_auto, resolve_damping
from whence.spectrum import Spectrum
from whence.training import Training
from whence.vectors import ParamVector

__all__ = [
    "GUESS",
    "RECIPE",
    "STRAIN",
    "Metric",
    "Weighed",
    "first_damping",
    "in_metric",
    "metric_again",
    "metric_of",
    "raise_for",
    "weigh",
]

#: λ times the training's time.
RECIPE = 3.0
#: λ where the training is not known, in the metric of √v, for examples of one term.
GUESS = 5.0
#: How much strain there may be, in nats, and what λ is multiplied by at most.
STRAIN, _MOST = 0.1, 100.0
#: λ that stability is measured for: so many, each this many times the one before.
_GRID, _STEP = 12, 2.0


@dataclass(frozen=True)
class Metric:
    """The diagonal of D; None for the identity."""

    diagonal: ParamVector | None


def in_metric(run: Run, job: Job) -> Job:
    """The job in the coordinates in which its damping is a number; as it is for a solver that brings its own λ."""
    if job.own_plan is not None:
        return job

    def compute() -> Metric:
        return Metric(metric_of(job.gnh, job.training, job.options))

    metric = run.keep("metric", Metric, compute, operator=job.gnh, device=job.device).diagonal
    return job if metric is None else replace(job, gnh=job.gnh.in_metric(metric))


def metric_of(gnh: GaussNewton, training: Training | None, options: RunOptions) -> ParamVector | None:
    """The diagonal of D; None for the identity: where λ is given without a training, and for SGD."""
    if training is not None and training.root_moment is not None:
        return factored(_selected(training.root_moment, gnh), gnh.network)
    adaptive = part_of_auto(options.damping) is not None if training is None else training.adaptive
    return root_second_moment(gnh, generator=options.generator(5)) if adaptive else None


def metric_again(gnh: GaussNewton, result: Attribution, directory: str | Path | None) -> ParamVector | None:
    """The metric that a finished attribution was made in: from its directory, or measured as it was then.

    Raises:
        RunDirectoryError: it came from an optimizer, and there is no directory that keeps it.
    """
    if not result.solve.in_metric:
        return None
    if directory is not None and holds(directory, "metric"):
        return read(directory, "metric", Metric).diagonal
    if result.settings.get("training"):
        raise RunDirectoryError(
            "the metric of this attribution's damping came from an optimizer and is kept in the run's directory alone; "
            "give that directory"
        )
    return metric_of(gnh, None, Options(damping="auto", seed=cast(int, result.settings["seed"])))


def _selected(moment: ParamVector, gnh: GaussNewton) -> ParamVector:
    """The part of an optimizer's state that belongs to the parameters asked about."""
    zeros = gnh.zeros()
    missing = [name for name in zeros if name not in moment]
    if missing:
        raise OptionError(
            f"the optimizer has no second moment of {missing[0]!r} and {len(missing) - 1} others of the parameters "
            "asked about: it did not train them. Select by params= what it trained"
        )
    return zeros.like({name: zeros.own_rows(name, moment[name]).to(part) for name, part in zeros.items()})


@dataclass(frozen=True)
class Weighed:
    """The λ to use.

    Attributes:
        damping: λ.
        words: how it was found.
        stability: what two halves of the data say; None where it was not asked for.
        strain: of scores at the λ that was found before any was raised; None where λ was given.
    """

    damping: float
    words: str
    stability: Stability | None
    strain: float | None = None


def weigh(
    run: Run,
    job: Job,
    gradients: ParamVector,
    spectrum: Spectrum,
    *,
    halves: bool,
    factors: Ekfac | None = None,
) -> Weighed:
    """λ, as given, from the recipe or by the rule at the top of this file; and how stable scores are with it.

    Halves of the data are asked where that was asked for, or where ``halves`` says that it is cheap beside the rest.
    With factors, these tell the strain.
    """
    if job.own_plan is not None:
        return Weighed(job.own_plan.damping, "λ is that of the solver's plan.", None)

    def compute() -> Weighed:
        options, part = job.options, part_of_auto(job.options.damping)
        given = options.damping if part is None else "auto"
        found, words = first_damping(given, job.training, spectrum, job.gnh)
        strain = None
        if part is not None:
            strain = measure_strain(job.gnh, found, generator=options.generator(8), factors=factors)
            times = raise_for(strain)
            if times > 1:
                words += (
                    f" There, a few examples carry the gradients and would change their own losses so much that "
                    f"first-order theory is not about them any more (a strain of {strain:.2g} nats, where "
                    f"{STRAIN:g} would do), so λ was raised {times:.3g} times."
                )
            found, words = _divided(found * times, words, part)
        stability = None
        if options.stability or (part is not None and halves):
            grid = found * torch.logspace(0, _GRID - 1, _GRID, base=_STEP, dtype=torch.float64)
            stability = measure_stability(job.gnh, gradients, grid, generator=options.generator(6))
        return Weighed(found, words, stability, strain)

    return run.keep("damping", Weighed, compute, operator=job.gnh)


def raise_for(strain: float) -> float:
    """What λ is multiplied by at this strain.

    Example:
        >>> raise_for(0.05), raise_for(2 * STRAIN), raise_for(1000.0)
        (1.0, 4.0, 100.0)
    """
    return min(max(1.0, (strain / STRAIN) ** 2), _MOST)


def first_damping(
    damping: float | str, training: Training | None, spectrum: Spectrum, gnh: GaussNewton
) -> tuple[float, str]:
    """λ as given, from the recipe, or as it is before the strain was asked for; and how it was found.

    A λ that is given must leave digits to λmax beside it.
    """
    part = part_of_auto(damping)
    if part is None:
        return resolve_damping(damping, spectrum, rounding=gnh.rounding), "λ was given."
    if training is None:
        terms = gnh.terms.terms_per_example
        each = "" if terms == 1 else f"√{terms:.4g}"
        words = f"λ = {GUESS:g}{each} in the metric of the gradients' second moment, as if Adam had trained the model"
        words += "." if terms == 1 else f"; an example has {terms:.4g} terms."
        return _divided(GUESS * math.sqrt(terms), words, part)
    time = training.time
    words = f"λ = {RECIPE:g}/τ from the training, τ = {time:.3g} the sum of its learning rates."
    return _divided(RECIPE / time, words, part)


def _divided(damping: float, words: str, part: float | None) -> tuple[float, str]:
    """A part of the λ that was found, as asked for."""
    if part is None or part == 1:
        return damping, words
    return damping / part, f"{words} Divided by {part:g}, as asked for."
