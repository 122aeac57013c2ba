"""`Asked`: the questions of an attribution, ready to be solved for, with what a reader is shown of them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from whence.attribution.exhibits import class_name, exhibit_of
from whence.attribution.job import Job
from whence.errors import DataError, ModelError
from whence.exhibit import Exhibit
from whence.report.formatting import brief, shorten, signed
from whence.runs import Run
from whence.tasks import Batch, BinaryClassification
from whence.tasks.categorical import CategoricalTask
from whence.vectors import ParamVector

__all__ = ["Asked", "ask", "check_unchanged"]

#: Queries of a group that are named, and letters of an answer in a sentence.
_NAMED, _LETTERS = 3, 48


@dataclass(frozen=True)
class Asked:
    """The questions: right-hand sides, a column each; what they are worth, in nats; what to show of them."""

    gradients: ParamVector
    losses: Tensor
    exhibits: tuple[Exhibit, ...]

    def plain(self, job: Job) -> ParamVector:
        """The direction whose slope is the plain dot product of gradients, whatever the coordinates: ``D ∇``."""
        metric = job.gnh.network.metric
        return self.gradients if metric is None else self.gradients.clone().mul_(metric)


def ask(run: Run, job: Job) -> Asked:
    """Gradients and worth of the questions."""

    def compute() -> Asked:
        worth, said = [], []
        for position in range(len(job.terms)):
            batch, outputs, value = _run(job, position)
            if not math.isfinite(value):
                raise DataError(
                    f"the {job.parts.measure} of {job.parts.name(position)} is {value}; check its inputs and label"
                )
            worth.append(value)
            said.append(_prediction(job, batch, outputs))
        values = torch.tensor(worth, dtype=torch.float64)
        shown = tuple(_exhibit(job, number, values, said) for number in range(len(job.questions)))
        return Asked(job.gnh.gradients(job.questions), job.parts.together(values), shown)

    return run.keep("queries", Asked, compute, operator=job.gnh, device=job.device)


def check_unchanged(job: Job, asked: Asked) -> None:
    """Refuse to conclude where the queries' losses are others than they were: the model changed on the way."""
    values = torch.tensor([_run(job, position)[2] for position in range(len(job.terms))], dtype=torch.float64)
    for number, (before, after) in enumerate(
        zip(asked.losses.tolist(), job.parts.together(values).tolist(), strict=True)
    ):
        if abs(after - before) > 1e-3 * max(1.0, abs(before)):
            raise ModelError(
                f"the loss of query {number} was {before:.6g} at the start and is {after:.6g} now: the model's "
                "outputs depend on how often it was called, or something changed it meanwhile. Make its forward a "
                "function of its inputs, and run again"
            )


def _run(job: Job, position: int) -> tuple[Batch, Tensor, float]:
    """An example that is asked about, the model's outputs for it, and what it is worth."""
    gnh, batch = job.gnh, job.terms.fetch(torch.tensor([position]))
    with torch.no_grad():
        outputs = gnh.network.outputs(batch)
    gnh.task.check(outputs, batch)
    return batch, outputs, float(job.parts.worth(outputs, batch).sum())


def _prediction(job: Job, batch: Batch, outputs: Tensor) -> str | None:
    """What a classifier says of an example."""
    if not isinstance(job.gnh.task, CategoricalTask) or batch.targets.ndim != 1:
        return None
    probabilities = outputs[0].float().softmax(-1)
    best = int(probabilities.argmax())
    return f"{class_name(best, job.class_names)} ({float(probabilities[best]):.0%})"


def _exhibit(job: Job, number: int, worth: Tensor, said: list[str | None]) -> Exhibit:
    """What is shown of a question: of its query, or of its group."""
    parts, members = job.parts, job.questions.members[number]
    own = (parts.question == number).nonzero().flatten().tolist()
    compared = bool(parts.contrast[own].any())
    measure = parts.measure if compared or parts.measure == "margin" else "loss"
    name, total = job.questions.group(number), float(parts.together(worth)[number])
    if name is not None:
        shown = [job.show_query(position).id or str(position) for position in members[:_NAMED]]
        more = f" and {len(members) - _NAMED} more" if len(members) > _NAMED else ""
        about = f"the mean over {len(members)} {'query' if len(members) == 1 else 'queries'}"
        return Exhibit(
            id=name,
            asked=f"{_WHY[measure]}, {about} ({', '.join(shown)}{more})",
            facts=((f"Mean {_NAMES[measure]}", _nats(measure, total)),),
        )
    exhibit = job.show_query(members[0])
    exhibit = replace(exhibit, prediction=exhibit.prediction or said[own[0]])
    terms = int(job.gnh.task.num_terms(job.terms.fetch(torch.tensor(own[:1]))).sum())
    unit = "" if terms == 1 else ", sum over tokens" if parts.reduce == "sum" else " per token"
    if not compared:
        if measure == "loss" and (parts.reduce == "mean" or terms == 1):
            return exhibit
        facts = [(_NAMES[measure].capitalize(), f"{_nats(measure, total)}{unit}")]
        if measure == "margin" and terms == 1:
            facts.append(("Probability", f"{1 / (1 + math.exp(min(total, 700.0))):.2%}"))
        return replace(exhibit, asked=_WHY[measure], facts=tuple(facts))
    other = exhibit.contrast or _answer(job, own[1], members[0])
    answer = _shown(exhibit)
    values = [float(worth[position]) for position in own]
    facts = [("Difference of log p" if terms > 1 else "Log-odds", f"{signed(-total)} nats{unit}")]
    chances = terms == 1 and isinstance(job.gnh.task, (CategoricalTask, BinaryClassification))
    for what, value in zip((answer, other), values, strict=True):
        chance = f"probability {math.exp(-value):.2%}" if chances else f"loss {brief(value, 3)} nats{unit}"
        facts.append((f"“{shorten(what, _LETTERS)}”", chance))
    asked = f"why “{shorten(answer, _LETTERS)}” rather than “{shorten(other, _LETTERS)}”"
    return replace(exhibit, contrast=other, asked=asked, facts=tuple(facts))


#: What is asked, by `Parts.measure`, and what its number is called.
_WHY = {"loss": "why this", "margin": "why this and nothing else", "contrast": "why this rather than that"}
_NAMES = {"loss": "loss", "margin": "log-odds", "contrast": "log-odds"}


def _nats(measure: str, worth: float) -> str:
    return f"{brief(worth, 3)} nats" if measure == "loss" else f"{signed(-worth)} nats"


def _answer(job: Job, position: int, query: int) -> str:
    """In words what the model might have said instead."""
    made = exhibit_of(
        job.parts.examples[position], query, tokenizer=job.tokenizer, class_names=job.class_names
    )
    return _shown(made)


def _shown(exhibit: Exhibit) -> str:
    return exhibit.label if exhibit.label is not None else exhibit.text or "this"
