"""What the page of an attribution shows, as plain data: `Report` holds `Question`s, which hold `Entry`s, and `Trust`.

Pages are made from these alone, so a saved run can be shown without torch, the model or the data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from whence.exhibit import Exhibit
from whence.report.checks import Validation
from whence.report.document import Page
from whence.report.figures import Floats

__all__ = ["Entry", "Question", "Report", "Trust"]


@dataclass(frozen=True)
class Entry:
    """One training example in a question's ranking.

    Attributes:
        rank: 1 for the most helpful (or most harmful) example.
        index: its position in the training data.
        score, low, high: its score and the ends of its confidence interval.
        effect, effect_low, effect_high: nats by which the query's loss would change if it were removed.
        separated: whether its score differs from the next rank's beyond their errors.
        baseline: the plain gradient dot product, if computed, and ``baseline_rank`` its rank by that.
        exhibit: what to show of it; None where nothing was kept.
        token_scores: each token's share of the score, one per token of the exhibit.
    """

    rank: int
    index: int
    score: float
    low: float
    high: float
    effect: float
    effect_low: float
    effect_high: float
    separated: bool
    baseline: float | None = None
    baseline_rank: int | None = None
    exhibit: Exhibit | None = None
    token_scores: tuple[float, ...] | None = None


@dataclass(frozen=True)
class Question:
    """One query and the training examples behind it.

    Attributes:
        number: position among the queries.
        exhibit: what was asked.
        loss: the query's loss in nats.
        helpful, harmful: the ends of the ranking, best or worst first.
        by_baseline: the ranking's top by plain gradient dot product, if computed.
        indices: of the scored examples.
        scores, stderr: of all scored examples, in the order of ``indices``.
        residual, residual_stderr: of the solve, relative to ‖g‖.
        converged: whether the solve counts as converged.
        agreement: mean correlation between the chains' scores, pair by pair; NaN where there is one.
        paths: ``[chains, steps]``: gᵀu along every chain, what the solver's path looked like.
        proven: what a certificate bounds the scores' error by, relative to the scores, in root mean square; or None.
        expected: what the examples' scores should be off by, relative to their spread; or None.
        parts: what the chains' start has left behind, at most, and what sampling has added, relative to the scores; or
            None.
    """

    number: int
    exhibit: Exhibit
    loss: float
    helpful: tuple[Entry, ...]
    harmful: tuple[Entry, ...]
    by_baseline: tuple[Entry, ...]
    indices: npt.NDArray[np.int64]
    scores: Floats
    stderr: Floats
    residual: float
    residual_stderr: float
    converged: bool
    agreement: float
    paths: Floats | None = None
    proven: float | None = None
    expected: float | None = None
    parts: tuple[float, float] | None = None


@dataclass(frozen=True)
class Trust:
    """Why the solver's result can be believed, or not.

    Attributes:
        spectrum: name -> (value, standard error): ``trace``, ``frobenius``, ``lambda_max``, ``sampling_constant``.
        eigenvalues: the top of the spectrum, largest first, or None.
        plan: the solver's settings: ``damping``, ``step_size``, ``batch_size``, ``num_steps``, ``chains`` and
            ``constant``; or ``damping``, ``iterations`` and ``operator_terms``.
        events: what the solver had to change on the way, in words; empty if nothing.
        term: what a term is: "example" or "token".
        num_products, num_term_products: what was spent.
        solver: ``"lissa"`` or ``"cg"``.
        choice: why that one, in words; empty where it was asked for.
    """

    spectrum: Mapping[str, tuple[float, float]]
    eigenvalues: Floats | None
    plan: Mapping[str, float]
    events: tuple[str, ...]
    term: str
    num_products: int
    num_term_products: int
    solver: str = "lissa"
    choice: str = ""


@dataclass(frozen=True, kw_only=True)
class Report(Page):
    """Everything on the page of an attribution.

    Attributes:
        questions: one per query.
        trust: why to believe it.
        confidence: of the intervals, such as 0.95.
        validation: what checks of the scores found; None where they were not checked.
    """

    questions: tuple[Question, ...]
    trust: Trust
    confidence: float
    validation: Validation | None = None
