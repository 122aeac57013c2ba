"""What an attribution will cost, told before anything long starts."""

from __future__ import annotations

from dataclasses import dataclass

from whence.model.gauss_newton import GaussNewton
from whence.scoring.cost import count_work
from whence.solvers.auto import Alternative, Passes
from whence.solvers.plan import Plan

__all__ = ["Forecast", "count_passes", "forecast"]


@dataclass(frozen=True)
class Forecast:
    """Predicted cost of solving and scoring.

    Attributes:
        solve_seconds, score_seconds: None where the spectrum measured no time.
        memory_bytes: of vectors, beside the model and one batch's activations.
        disk_bytes: of a run directory at its largest.
    """

    solve_seconds: float | None
    score_seconds: float | None
    memory_bytes: int
    disk_bytes: int


def forecast(
    gnh: GaussNewton,
    plan: Plan,
    *,
    queries: int,
    examples: int | None = None,
    baseline: bool = True,
    solver: Alternative | None = None,
) -> Forecast:
    """Predict the cost of an attribution from its plan and the counted work of a forward pass.

    Args:
        gnh: the operator.
        plan: of the solve.
        queries: right-hand sides solved together: they share every batch and its pass at θ.
        examples: to be scored; all by default.
        baseline: whether gradient dot products are computed too.
        solver: the one that was chosen; the plan's LiSSA by default.
    """
    scored = len(gnh.terms) if examples is None else examples
    work = count_work(gnh)
    chains = 1 if solver is not None and solver.solver == "cg" else plan.chains
    copies = plan.memory_copies if solver is None else solver.memory_copies
    solving = plan.seconds if solver is None else solver.seconds
    directions = queries * (chains + baseline)
    exact = gnh.product == "exact"
    score = min(work.directional(directions, exact=exact, vectorised=exact), work.gradients(directions))
    product = work.gradients(1) + 2 * work.flops  # a forward, a tangent and a backward of one example
    per_term = plan.spectrum.seconds_per_term
    vector = sum(t.numel() * t.element_size() for t in gnh.zeros().values())
    rows = queries * scored * (chains + 5) * 8
    return Forecast(
        solve_seconds=None if solving is None else solving * (1 + 4 * queries) / 5,
        score_seconds=None
        if per_term is None
        else scored * gnh.terms.terms_per_example * per_term * score / product,
        memory_bytes=vector * queries * max(copies, 2 * chains + 1 + baseline),
        disk_bytes=vector * queries * (chains + copies) + rows,
    )


def count_passes(gnh: GaussNewton, queries: int) -> Passes:
    """What starting a pass is worth, in terms: counted in launches and flops, as `whence.scoring.cost` does.

    A product of q columns is 1 + 4q forwards. Exact products start five of them, whatever q; finite differences all.
    """
    work = count_work(gnh)
    forwards = 1 + 4 * queries
    started = 5 if gnh.product == "exact" else forwards
    per_term = forwards * work.flops / gnh.terms.terms_per_example
    return Passes(
        start=started * work.launching / max(per_term, 1.0),
        terms=gnh.micro_batch * gnh.terms.terms_per_example,
    )
