"""`Validation`: what speaks for the scores and what against, as plain data that a page shows and a file keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from whence.libraries import data_frame

__all__ = ["LIMITS", "NAMES", "Check", "Comparison", "Validation", "Verdict"]

Verdict = Literal["trust", "doubt", "cannot tell"]

#: All checks, in the order in which they are run, with the question that each of them answers.
NAMES = {
    "solver": "Did the solver find what it looked for?",
    "batch": "Was its batch large enough?",
    "fine-tuning": "Does fine-tuning agree with the scores?",
    "damping": "Would another damping rank differently?",
}

LIMITS = (
    "None of these checks retrains the model. They tell whether the scores are the influence that they claim to be, "
    "not whether influence predicts what training without an example would do. In Python, "
    "whence.validation.removal_effects and whence.validation.linear_datamodeling_score measure that."
)


@dataclass(frozen=True)
class Check:
    """One check of the scores.

    Attributes:
        name: one of `NAMES`.
        verdict: ``"trust"``, ``"doubt"`` or ``"cannot tell"``.
        sentence: what was done and found, in plain words; why not, where it was not run.
        numbers: name -> (value, standard error); an error of 0 where the value is exact.
        ran: whether it was run. What was not is tried again the next time.
        seconds: that it took.
        budget_seconds: of the call that ran it.
    """

    name: str
    verdict: Verdict
    sentence: str
    numbers: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    ran: bool = True
    seconds: float = 0.0
    budget_seconds: float = 0.0

    def __post_init__(self) -> None:
        if self.verdict not in get_args(Verdict):
            raise ValueError(f"a verdict is one of {', '.join(get_args(Verdict))}, not {self.verdict!r}")

    @property
    def question(self) -> str:
        """What it answers."""
        return NAMES.get(self.name, self.name)


@dataclass(frozen=True)
class Comparison:
    """One training example's scores for all queries, by influence and by fine-tuning on it.

    Attributes:
        index: its position in the training data.
        kind: why it was chosen: ``"most helpful"``, ``"most harmful"`` or ``"random"``.
        converged: whether the fine-tuning did. If not, it says nothing.
        full_batch: whether it went through all of the data at every step.
        influence, influence_error: scores and half of their 95% intervals, one for each query.
        fine_tuned, fine_tuned_error: the same by fine-tuning; the error is two standard errors and what ε bends.
    """

    index: int
    kind: str
    converged: bool
    full_batch: bool
    influence: tuple[float, ...]
    influence_error: tuple[float, ...]
    fine_tuned: tuple[float, ...]
    fine_tuned_error: tuple[float, ...]

    def __post_init__(self) -> None:
        sizes = {len(getattr(self, name)) for name in _SCORES}
        if len(sizes) != 1:
            raise ValueError(f"example {self.index} has scores for different numbers of queries: {sizes}")


_SCORES = ("influence", "influence_error", "fine_tuned", "fine_tuned_error")


@dataclass(frozen=True)
class Validation:
    """What all checks together say; prints as a summary.

    Attributes:
        about: fingerprint of the scores that were checked.
        checks: in the order of `NAMES`, as far as they are done.
        comparisons: of scores with fine-tuning.

    Example:
        >>> solver = Check("solver", "trust", "It converged.")
        >>> contradicted = Check("fine-tuning", "doubt", "Fine-tuning says otherwise.")
        >>> Validation("", (solver,)).verdict, Validation("", (solver, contradicted)).verdict
        ('cannot tell', 'doubt')
    """

    about: str
    checks: tuple[Check, ...]
    comparisons: tuple[Comparison, ...] = ()

    def __getitem__(self, name: str) -> Check:
        """The check of this name."""
        return {check.name: check for check in self.checks}[name]

    def to_pandas(self) -> Any:
        """A `pandas.DataFrame` with a row for each check."""
        rows = ("name", "verdict", "sentence", "ran", "seconds")
        return data_frame([{row: getattr(check, row) for row in rows} for check in self.checks])

    @property
    def verdict(self) -> Verdict:
        """Doubt if any check doubts; trust only where the solver and fine-tuning both speak for the scores."""
        if any(check.verdict == "doubt" for check in self.checks):
            return "doubt"
        trusted = {check.name for check in self.checks if check.verdict == "trust"}
        return "trust" if {"solver", "fine-tuning"} <= trusted else "cannot tell"

    @property
    def finished(self) -> bool:
        """Whether every check had its turn."""
        return not self._missing

    @property
    def _missing(self) -> list[str]:
        return [name for name in NAMES if name not in {check.name for check in self.checks}]

    @property
    def summary(self) -> str:
        """The verdict in words."""
        said = {
            verdict: [c.name for c in self.checks if c.verdict == verdict] for verdict in get_args(Verdict)
        }
        if doubted := said["doubt"]:
            give = "gives" if len(doubted) == 1 else "give"
            text = f"Not as they stand: {_listed(doubted)} {give} reason to doubt these scores."
        elif self.verdict == "trust":
            text = (
                "As far as can be told without retraining, yes: the solver found what it looked for, and fine-tuning "
                "the model on single examples gives the same scores."
            )
        else:
            text = "Nothing that was checked speaks against these scores, and it is not enough to speak for them."
        if said["cannot tell"]:
            text += f" Left open: {_listed(said['cannot tell'])}."
        if missing := self._missing:
            are = "is" if len(missing) == 1 else "are"
            text += f" Not all was checked yet: {_listed(missing)} {are} missing."
        return text

    def __str__(self) -> str:
        lines = [f"{check.verdict:>11}  {check.question} {check.sentence}" for check in self.checks]
        return "\n".join([self.summary, *lines, LIMITS])


def _listed(names: Sequence[str]) -> str:
    words = [f"the {name}" if name in ("solver", "batch", "damping") else name for name in names]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
