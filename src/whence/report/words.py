"""What the solver's numbers mean, in plain words."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from whence.report.content import Question, Trust
from whence.report.formatting import brief, count, percentage, plus_minus

__all__ = ["Fact", "agreement", "plan_facts", "residual", "spectrum_facts", "spent_facts", "verdict"]


@dataclass(frozen=True)
class Fact:
    """A row of a table: what it is called, what it is, what it means."""

    name: str
    value: str
    meaning: str


_PLAN = {
    "damping": (
        "Damping λ",
        "Added to the curvature in every direction, so that directions which the data hardly determine do not "
        "dominate. Larger makes scores smoother and the solve shorter.",
    ),
    "step_size": (
        "Step η",
        "How far one step of the solver goes. The longest stable one is 1/(λmax + λ).",
    ),
    "batch_size": ("Batch |B|", "{term}s drawn afresh for every step."),
    "num_steps": ("Steps T", "Steps in every chain: enough for the starting point to be forgotten."),
    "chains": ("Chains", "Independent repetitions. Their mean is the answer, their spread is its error."),
    "constant": ("Constant C", "Safety factor: the batch is at least C · trace / λmax."),
    "iterations": ("Iterations", "Products with all questions at once; each makes every answer better."),
    "operator_terms": ("{term}s in every product", "All of the data, so nothing is left to chance."),
    "tail": ("Averaged part", "The last part of every path, whose average is the chain’s answer."),
}

_SPECTRUM = {
    "trace": (
        "Trace of H",
        "The sum of the curvatures in all directions. It sets how noisy a batch is, hence how large it must be.",
    ),
    "frobenius": (
        "Frobenius norm of H",
        "The root of the sum of squared curvatures: close to λmax if few directions matter, far above if many do.",
    ),
    "lambda_max": ("Largest curvature λmax", "The steepest direction. It limits the length of a step."),
    "sampling_constant": (
        "Measured constant Ĉ",
        "How noisy batches really are, on average over directions. The theory assumes about 2.",
    ),
    "top_sampling_constant": (
        "Ĉ along the steepest direction",
        "The same where it matters most. The plan’s C is at least as large as both, with their errors.",
    ),
}


def plan_facts(trust: Trust) -> Iterator[Fact]:
    """The plan's settings, explained; settings without an explanation are listed all the same."""
    for key, value in trust.plan.items():
        name, meaning = _PLAN.get(key, (key, ""))
        text = percentage(value) if key == "tail" else brief(value)
        term = trust.term.capitalize()
        yield Fact(name.format(term=term), text, meaning.format(term=term))


def spectrum_facts(trust: Trust) -> Iterator[Fact]:
    """What was measured of H's spectrum, explained."""
    for key, (value, error) in trust.spectrum.items():
        name, meaning = _SPECTRUM.get(key, (key, ""))
        yield Fact(name, plus_minus(value, error), meaning)
    damping = trust.plan.get("damping", math.nan)
    largest = trust.spectrum.get("lambda_max", (math.nan, 0.0))[0]
    if damping > 0 and math.isfinite(largest):
        yield Fact(
            "Condition number λmax/λ",
            brief(largest / damping, 3),
            "The steepest curvature against the damping. The number of steps is proportional to it.",
        )


def spent_facts(trust: Trust) -> Iterator[Fact]:
    """What the solve cost."""
    what = "over all chains" if trust.solver != "cg" else "with the vectors of all questions together"
    yield Fact("Products", count(trust.num_products), f"Products of H with a vector, {what}.")
    yield Fact(
        f"{trust.term.capitalize()}s gone through",
        count(trust.num_term_products),
        f"Each product goes through a batch of {trust.term}s. The time is proportional to this.",
    )


def residual(question: Question) -> str:
    """How far the equation is from being satisfied."""
    value, error = question.residual, question.residual_stderr
    if not math.isfinite(value):
        return "The residual could not be measured."
    spread = f" ± {percentage(error, 2)}" if math.isfinite(error) and question.proven is None else ""
    part = f"{percentage(value)}{spread} of the question’s gradient"
    missed = f"Put back into its equation, the solution misses by {part}"
    if question.proven is not None:
        return f"{missed}, over all of the data that the solver used."
    return f"{missed}, measured on data that the solver had not used."


def agreement(question: Question) -> str:
    """How alike the chains' scores are, or what is proven of them."""
    if question.proven is not None:
        said = (
            f"Proven: compared with the exact ones, the scores are wrong by at most {percentage(question.proven, 2)} "
            "of their size, in root mean square over the training data with labels that the model would give."
        )
        if question.expected is None or not math.isfinite(question.expected):
            return said
        return (
            f"The scores have settled: going by the solver’s last iterations, those of the training examples should be "
            f"off by {percentage(question.expected, 2)} of their spread. {said}"
        )
    value = question.agreement
    if not math.isfinite(value):
        return "Whether the chains agree could not be measured."
    how = (
        "The chains agree closely"
        if value >= 0.95
        else "The chains agree"
        if value >= 0.8
        else "The chains agree roughly"
        if value >= 0.5
        else "The chains disagree"
    )
    said = f"{how}: their scores correlate {brief(value, 3)} on average (1 is perfect, 0 is none)."
    return said if question.parts is None else f"{said} {_parts(*question.parts)}"


def _parts(bias: float, sampling: float) -> str:
    """Where the error comes from."""
    return (
        f"Sampling leaves the scores wrong by about {percentage(sampling, 2)} of their size, which the intervals show; "
        f"where the chains began, by at most {percentage(bias, 2)} more, which they do not."
    )


def verdict(question: Question) -> str:
    """The conclusion, in one sentence."""
    if question.converged:
        return "The solve counts as converged."
    return "The solve did not converge: read the order of the examples as a hint and no more."
