"""`validate`: as many reasons to believe a run's scores, or to doubt them, as a budget buys.

    the solver's own account → condition C.1 → fine-tuning on single examples → other dampings

Each check (`whence.validation.checks`) predicts what it will cost, does as much as fits, and is skipped with the reason
where nothing does. What is found is written down check by check and, within fine-tuning, a few examples at a time, so
that an interrupted call goes on where it was.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from whence.attribution import Attribution
VALIDATION = 'validation.json'
def read_validation(p): return None
from whence.errors import OptionError, RunDirectoryError, WhenceError
from whence.model.data import TermSet
from whence.model.gauss_newton import GaussNewton
from whence.model.importance import measure_importance
from whence.model.selection import ParameterFilter
from whence.report.checks import NAMES, Check, Comparison, Validation
from whence.runs.files import write_json
from whence.runs.fingerprint import of_data, of_model, of_value
from whence.tasks import Task
from whence.validation.checks import CHECKS, Job
from whence.validation.verdicts import skipped, solver_check

__all__ = ["validate"]


def validate(
    model: nn.Module,
    train: Any,
    queries: Any,
    result: Attribution,
    *,
    task: Task,
    params: ParameterFilter | None = None,
    budget_seconds: float = 600.0,
    points: int = 4,
    directory: str | Path | None = None,
    seed: int = 0,
) -> Validation:
    """Why should one believe these scores? Runs what is affordable, and says in words what it found.

    The page shows it: of a run directory by itself, else with ``dataclasses.replace(result, validation=…).to_html(…)``.

    Args:
        model: the one that was attributed; another is recognised and refused. So are other data and parameters.
        train: its training data.
        queries: whose losses were explained.
        result: what `whence.attribute` returned, or `whence.load` of its run directory.
        task: what the model's outputs mean.
        params: which parameters, as they were given to `whence.attribute`.
        budget_seconds: what the checks may take together. They predict their cost, and may take somewhat longer.
        points: training examples to fine-tune on, of each kind: most helpful, most harmful, random.
        directory: where ``validation.json`` is kept, such as the run directory: the next call goes on with it.
        seed: of all random numbers.

    Example:
        >>> import whence
        >>> _ = torch.manual_seed(0)
        >>> model = nn.Linear(2, 3).eval()
        >>> train = [(torch.randn(2), i % 3) for i in range(30)]
        >>> task = whence.Classification()
        >>> result = whence.attribute(model, train, train[:1], task=task)
        >>> validation = validate(model, train, train[:1], result, task=task, points=1)
        >>> validation["fine-tuning"].verdict
        'trust'
    """
    check_options(budget_seconds, points)
    settings = result.settings
    gnh = GaussNewton(
        model,
        task,
        train,
        params=params,
        product=settings.get("product", "auto"),
        micro_batch=settings.get("micro_batch"),
    )
    TermSet(queries, task, gnh.network.device)  # refuses what is no list of examples
    _recognise(gnh, queries, result)
    if result.solve.by_curvature:
        gnh.terms.importance = measure_importance(gnh).probabilities()
    notes = _Notes.open(directory, of_value([result.chain_scores, result.indices]))
    job = Job(gnh, queries, params, result, budget=budget_seconds, points=points, seed=seed)
    notes.keep(solver_check(result))
    for name, check in CHECKS.items():
        if notes.settled(name, job):
            continue
        begun = time.monotonic()
        try:
            found = check(job, notes.comparisons, notes.write)
        except (WhenceError, torch.OutOfMemoryError) as error:
            found = skipped(name, f"it failed. {error}")
        notes.keep(replace(found, seconds=time.monotonic() - begun, budget_seconds=budget_seconds))
    return notes.validation


def check_options(budget_seconds: float, points: int) -> None:
    """Refuse what cannot work before a model is loaded."""
    if not 0 < budget_seconds < math.inf:
        raise OptionError(f"the budget is {budget_seconds} seconds; give a positive number, such as 600")
    if points < 1:
        raise OptionError(f"points is {points}; fine-tune on at least one example of each kind")


@dataclass
class _Notes:
    """What was found so far, on disk after every addition."""

    path: Path | None
    about: str
    checks: dict[str, Check] = field(default_factory=dict)
    comparisons: list[Comparison] = field(default_factory=list)

    @staticmethod
    def open(directory: str | Path | None, about: str) -> _Notes:
        """Those of an earlier call about the same scores, or new ones."""
        if directory is None:
            return _Notes(None, about)
        notes = _Notes(Path(directory) / VALIDATION, about)
        found = read_validation(Path(directory))
        if found is not None and found.about == about:
            notes.checks = {check.name: check for check in found.checks}
            notes.comparisons = list(found.comparisons)
        return notes

    def keep(self, check: Check) -> None:
        self.checks[check.name] = check
        self.write()

    def write(self) -> None:
        if self.path is not None:
            write_json(self.path, self.validation.to_json())

    def settled(self, name: str, job: Job) -> bool:
        """Whether nothing is to be gained by running a check (again): more time may tell what less could not."""
        check = self.checks.get(name)
        if check is None or not check.ran:
            return False
        if name == "fine-tuning":
            return {index for index, _ in job.chosen} <= {c.index for c in self.comparisons}
        return check.verdict != "cannot tell" or job.budget <= check.budget_seconds

    @property
    def validation(self) -> Validation:
        known = [self.checks[name] for name in NAMES if name in self.checks]
        return Validation(self.about, tuple(known), tuple(self.comparisons))


def _recognise(gnh: GaussNewton, queries: Any, result: Attribution) -> None:
    """Refuse another model, other data, queries or parameters than the scores are about."""
    found = {
        "model": of_model(gnh.network.model),
        "train": of_data(gnh.terms.data),
        "queries": of_data(queries),
        "params": of_value(list(gnh.network.parameters)),
    }
    for name, fingerprint in found.items():
        known = str(result.settings.get(name, fingerprint))
        if not known.endswith(fingerprint):
            raise RunDirectoryError(
                f"the {name} given now ({fingerprint}) are not what the scores are about ({known}). Give what the run "
                "was made with, or run again with what there is now"
            )
