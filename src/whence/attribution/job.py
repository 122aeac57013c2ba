"""`Job`: everything that the steps of an attribution work on, checked before any work."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from whence.attribution.groups import Grouping
from whence.errors import DataError, OptionError
from whence.exhibit import Exhibit
from whence.model.data import TermSet
from whence.model.gauss_newton import GaussNewton
from whence.options import Options
from whence.solvers import Solver
from whence.solvers.plan import Plan
from whence.sources.candidates import Shortlist
from whence.sources.models import context_length
from whence.tasks import LanguageModeling, Questions
from whence.tasks.questions import Parts
from whence.training import Training

__all__ = ["Candidates", "Job", "check_own_solver", "query_terms", "scored_positions"]

#: Positions, or a shortlist that says how it was chosen.
Candidates = Shortlist | Sequence[int] | Tensor


@dataclass(frozen=True)
class Job:
    """What is asked.

    Attributes:
        gnh: the operator; brings the network, task and data.
        questions: what is to be explained.
        parts: the examples that the questions are made of.
        terms: the same, to be fetched.
        positions: of the examples to score.
        not_scored: what that leaves out, in words.
        identity: what this is about, for recognising it: name -> fingerprint.
        options: the rest of what was asked.
        own_solver: the user's, in place of a chosen one.
        show_query, show_example: what to show of a query or a training example.
        class_names: labels in words.
        tokenizer: turns tokens into words.
        training: how the model was trained, where that is known.
        grouping: of the training examples, where groups were named.
    """

    gnh: GaussNewton
    questions: Questions
    parts: Parts
    terms: TermSet
    positions: Tensor
    not_scored: str
    identity: Mapping[str, str]
    options: Options
    own_solver: Solver[Any] | None
    show_query: Callable[[int], Exhibit]
    show_example: Callable[[int], Exhibit]
    class_names: Sequence[str] | None
    tokenizer: Any = None
    training: Training | None = None
    grouping: Grouping | None = None

    @property
    def own_plan(self) -> Plan | None:
        """What a solver of the user's was made for, where it needs a plan."""
        return None if self.own_solver is None else self.own_solver.made_for()

    @property
    def device(self) -> torch.device:
        """Where vectors live."""
        return self.gnh.network.device


def check_own_solver(solver: Solver[Any] | None, options: Options) -> None:
    """Refuse a solver whose plan contradicts the options, or has no error bars."""
    plan = None if solver is None else solver.made_for()
    if plan is None:
        return
    if options.damping not in ("auto", plan.damping):
        raise OptionError(
            f"damping is {options.damping}, the solver's plan was made for {plan.damping}; give one of them"
        )
    if plan.chains < 2:
        raise OptionError(
            f"chains is {plan.chains}; error bars need at least 2 independent chains (4 by default)"
        )


def query_terms(queries: Any, gnh: GaussNewton) -> tuple[Parts, TermSet]:
    """What questions are made of; refuses what is no list of examples, and what the model's context does not hold."""
    questions = Questions.of(queries)
    if isinstance(questions.queries, (dict, tuple, Tensor, nn.Module)):
        raise DataError(
            f"queries are a {type(questions.queries).__name__}; give a list of examples, even if there is only one: "
            "[query]"
        )
    try:
        if not hasattr(questions.queries, "__len__"):
            TermSet(questions.queries, gnh.task, gnh.network.device)  # says what they lack
        parts = questions.parts(gnh.task)
        terms = TermSet(parts.examples, gnh.task, gnh.network.device)
        terms.expect(gnh.terms.width, gnh.terms.kinds)
        terms.look_through(len(terms))
        terms.check_repeatable()
    except DataError as error:
        raise DataError(f"the queries cannot be used: {error}") from error
    limit = context_length(getattr(gnh.network.model, "config", None))
    if limit is not None and isinstance(gnh.task, LanguageModeling):
        for number in range(len(terms)):
            length = terms.fetch(torch.tensor([number])).targets.shape[1]
            if length > limit:
                raise DataError(
                    f"{parts.name(number)} has {length} tokens, the model's context holds {limit}; shorten its prompt"
                )
    return parts, terms


def scored_positions(candidates: Candidates | None, examples: int) -> tuple[Tensor, str]:
    """Positions to score, and what is left out, in words."""
    if candidates is None:
        return torch.arange(examples), ""
    given = candidates.positions if isinstance(candidates, Shortlist) else candidates
    positions = _whole_numbers(given).flatten().unique()
    if len(positions) == 0:
        raise OptionError("the list of candidates is empty; give at least one, or None for all examples")
    for end in (int(positions[0]), int(positions[-1])):
        if not 0 <= end < examples:
            raise OptionError(
                f"candidate {end} does not exist: the training data are numbered 0..{examples - 1}"
            )
    if len(positions) == examples:
        return positions, ""
    if isinstance(candidates, Shortlist):
        return positions, candidates.describe()
    left = f"{len(positions):,} of {examples:,} examples were scored, as asked for; the others have no score"
    return positions, left


def _whole_numbers(given: Any) -> Tensor:
    """Positions as a tensor; a mask or real numbers would be read as other positions than were meant."""
    try:
        found = torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise OptionError(f"candidates must be positions, whole numbers, such as [0, 7]: {error}") from error
    if found.numel() and (found.is_floating_point() or found.is_complex() or found.dtype == torch.bool):
        remedy = "write mask.nonzero()" if found.dtype == torch.bool else "give whole numbers, such as [0, 7]"
        raise OptionError(f"candidates are {found.dtype}; they are positions: {remedy}")
    return found.long()
