"""From what was measured to a verdict in plain words: trust, doubt, or cannot tell.

A check says *trust* where what it measured is good by itself, *doubt* where it is bad beyond its errors, and that it
*cannot tell* in between. A check that was skipped cannot tell either, and says why it was skipped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from whence.attribution import Attribution
from whence.attribution.scored import Scored
from whence.report.checks import Check, Comparison, Verdict
from whence.solvers.plan import Plan
from whence.validation.condition import ConditionCheck
from whence.validation.damping import DampingSweep

__all__ = [
    "batch_check",
    "damping_check",
    "fine_tuning_check",
    "places_of",
    "skipped",
    "solver_check",
    "terms_in",
]

#: Chains whose scores correlate by this much count as agreeing, as on the page.
AGREED = 0.8
#: Agreement with fine-tuning: correlation at least, and slope at most so far from 1.
CORRELATED, SLOPE = 0.9, 0.2
#: Rank correlation with the neighbouring dampings: the same order above, another below.
SAME_ORDER, OTHER_ORDER = 0.9, 0.75
FEWEST_POINTS = 3
#: Error, as a part of a query's scores, below which queries count alike.
RESOLVED = 0.1


def terms_in(result: Attribution, count: float) -> str:
    """A number of terms in words: examples or tokens."""
    word = "example" if result.num_terms == result.num_examples else "token"
    return f"{round(count):,} {word}{'' if round(count) == 1 else 's'}"


def places_of(result: Attribution, indices: Sequence[int]) -> list[int]:
    """Where these training examples stand among the scored ones."""
    return [int((result.indices == index).nonzero()[0, 0]) for index in indices]


def skipped(name: str, reason: str) -> Check:
    """A check that was not run."""
    return Check(name, "cannot tell", f"Not run: {reason}", ran=False)


def solver_check(result: Attribution) -> Check:
    """What the run knows about its own solve."""
    solve, agreement = result.solve, float(result.agreement.min())
    queries, converged = len(solve.converged), int(solve.converged.sum())
    worst = int(solve.residual.argmax())
    residual, error = float(solve.residual[worst]), float(solve.residual_stderr[worst])
    numbers = {"converged solves": (float(converged), 0.0), "of": (float(queries), 0.0)}
    if math.isfinite(residual):
        numbers["largest residual"] = residual, _finite(error)
    if math.isfinite(agreement):
        numbers["least agreement of chains"] = agreement, 0.0
    changes = f" {' '.join(solve.events)}" if solve.events else ""
    if converged < queries:
        text = (
            f"It did not, for {queries - converged} of {queries} questions: put back into their equation, solutions "
            f"miss by up to {residual:.0%}. A larger damping or a larger refine helps."
        )
        return Check("solver", "doubt", text + changes, numbers)
    whose = "the question" if queries == 1 else f"all {queries} questions"
    if solve.certificate is not None and solve.score_rms is not None:
        proven = float((solve.certificate.upper / solve.score_rms.clamp_min(1e-300)).max())
        numbers["largest proven error"] = _finite(proven), 0.0
        text = (
            f"For {whose} it converged, and proved it: the scores are within {proven:.1%} of their size of the exact "
            "ones, in root mean square over the training data with labels that the model would give."
        )
        parts = solve.error_parts
        if parts is not None and parts.expected is not None:
            expected = _finite(float(parts.expected.max()))
            numbers["largest expected error"] = expected, 0.0
            text += f" Going by its last iterations, scores of the examples are off by {expected:.1%} of their spread."
        return Check("solver", "trust", text + changes, numbers)
    if not agreement >= AGREED:
        text = (
            f"It stopped where it should, but independent repetitions agree only roughly: their scores correlate "
            f"{agreement:.2f}. A larger refine brings them together."
        )
        return Check("solver", "cannot tell", text + changes, numbers)
    text = (
        f"For {whose} it converged, on data it had not seen, and {len(result.chain_scores)} independent "
        f"repetitions give nearly the same scores: they correlate at least {agreement:.3f}."
    )
    return Check("solver", "trust", text + changes, numbers)


def batch_check(result: Attribution, plan: Plan, drawn: float, found: ConditionCheck) -> Check:
    """Whether the plan's batch is above ``C·Tr(H) / (1/η - λ)`` with the C that was measured now.

    Args:
        result: whose terms are counted.
        plan: with which the run was solved.
        drawn: terms in a batch: examples are drawn whole.
        found: condition C.1, measured.
    """
    room = 1 / plan.step_size - plan.damping
    per_constant = found.trace.value / room if room > 0 else math.inf
    measured = (found.constant, found.top_constant)
    enough = max(estimate.upper() for estimate in measured) * per_constant
    least = max(estimate.lower() for estimate in measured) * per_constant
    numbers = {
        "batch": (float(round(drawn)), 0.0),
        "stable from": (float(math.ceil(enough)), 0.0),
        "noise of batches": (found.constant.value, _finite(found.constant.stderr)),
        "steepest direction": (found.top_constant.value, _finite(found.top_constant.stderr)),
        "measurements": (float(found.realisations), 0.0),
    }
    opening = f"Every step of the solver looked at {terms_in(result, drawn)}."
    verdict: Verdict
    if drawn < least:
        verdict = "doubt"
        text = (
            f"By their noise, measured anew, batches of at least {terms_in(result, math.ceil(least))} are needed: "
            "errors may be larger than the error bars say. Run again with a larger refine or a larger damping."
        )
    elif found.heavy_tailed or not found.falls_as_inverse:
        verdict = "cannot tell"
        text = (
            "How noisy such batches are could not be measured well: "
            + (
                "a few unusual batches dominate."
                if found.heavy_tailed
                else "larger ones are not less so, as they must be."
            )
            + " A larger budget measures more of them."
        )
    elif drawn >= enough:
        verdict = "trust"
        text = (
            f"The noise of such batches was measured anew: those of {terms_in(result, math.ceil(enough))} are enough "
            "for steps of this length to be stable."
        )
    else:
        verdict = "cannot tell"
        text = (
            f"As far as was measured, something between {round(least):,} and {terms_in(result, math.ceil(enough))} is "
            "enough for steps of this length to be stable. A larger budget narrows it down."
        )
    return Check("batch", verdict, f"{opening} {text}", numbers)


def fine_tuning_check(result: Attribution, comparisons: Sequence[Comparison], *, planned: int) -> Check:
    """Scores by influence against scores by fine-tuning: correlation and slope, with errors from the chains.

    Args:
        result: whose chains tell the errors of its scores.
        comparisons: what was fine-tuned on.
        planned: how many examples were asked for.
    """
    used = [comparison for comparison in comparisons if comparison.converged]
    notes = _notes_on(len(used), len(comparisons) - len(used), planned)
    numbers = {"examples": (float(len(used)), 0.0)}
    if len(used) < len(comparisons):
        numbers["not converged"] = float(len(comparisons) - len(used)), 0.0
    found = None if len(used) < FEWEST_POINTS else _agreement(result, used)
    if found is None:
        text = f"The model was fine-tuned on {len(used)} single training examples, " + (
            "too few to compare." if len(used) < FEWEST_POINTS else "and no question’s loss moved by it."
        )
        return Check("fine-tuning", "cannot tell", f"{text} {notes}".strip(), numbers)
    correlation, slope = found
    pairs = [pair for comparison in used for pair in _pairs(comparison)]
    within = sum(abs(score - truth) <= reach for score, truth, reach in pairs)
    numbers = {
        "correlation": correlation,
        "slope": slope,
        "within error bars": (float(within), 0.0),
        "of": (float(len(pairs)), 0.0),
        **numbers,
    }
    how = (
        f"all {terms_in(result, result.num_terms)} of the training data"
        if used[0].full_batch
        else "random batches of the training data, so that both sides carry noise"
    )
    kinds = ", ".join(dict.fromkeys(comparison.kind for comparison in used))
    opening = (
        f"The model was fine-tuned on {len(used)} training examples, each by itself ({kinds}), while held to its own "
        f"answers on {how}."
    )
    measured = f"correlation {correlation[0]:.3f}, slope {slope[0]:.2f}; 1 and 1 would be perfect".replace(
        "-", "−"
    )
    verdict: Verdict
    if correlation[0] >= CORRELATED and abs(slope[0] - 1) <= SLOPE:
        verdict, text = "trust", f"The questions’ losses moved as the scores say: {measured}."
    elif within < len(pairs) / 2:
        verdict = "doubt"
        text = (
            f"The questions’ losses did not move as the scores say: {measured}. {len(pairs) - within} of {len(pairs)} "
            "differences are larger than the error bars allow. Do not rely on these scores."
        )
    else:
        verdict = "cannot tell"
        text = (
            f"The questions’ losses moved somewhat as the scores say: {measured}. Most differences are within the "
            "error bars, but those are wide: run again with a larger refine."
        )
    return Check("fine-tuning", verdict, f"{opening} {text} {notes}".strip(), numbers)


def damping_check(result: Attribution, sweep: DampingSweep) -> Check:
    """Whether the dampings next to the chosen one put examples in the same order."""
    assert sweep.scores is not None
    near, i = {}, sweep.chosen
    for name, j in (("× 4", i - 2), ("× 2", i - 1), ("× ½", i + 1), ("× ¼", i + 2)):
        value, error = float(sweep.agreement[i, j]), float(sweep.agreement_stderr[i, j])
        if math.isfinite(value):
            near[name] = (value, _finite(error))
    queries, ranked = sweep.scores.shape[1:]
    numbers = {f"damping {name}": pair for name, pair in near.items()}
    numbers |= {"examples ranked": (float(ranked), 0.0), "questions": (float(queries), 0.0)}
    part = "all of the data"
    if sweep.worked_terms < sweep.num_terms:
        part = f"a draw of {sweep.worked_terms:,} from {terms_in(result, sweep.num_terms)}"
    where = f"(On {part}, with {ranked} examples and {queries} of {len(result.queries)} questions.)"
    if not {"× 2", "× ½"} <= set(near):
        text = f"The solution with another damping was not found within {sweep.steps} products. {where}"
        return Check("damping", "cannot tell", text, numbers)
    twice, half = near["× 2"][0], near["× ½"][0]
    measured = f"rank correlation {twice:.2f} and {half:.2f}; 1 is the same order"
    verdict: Verdict
    if min(twice, half) >= SAME_ORDER:
        verdict = "trust"
        text = f"Hardly: with twice or half the damping, examples keep nearly their order ({measured})."
    elif min(twice, half) < OTHER_ORDER:
        verdict = "doubt"
        text = (
            f"Yes: with twice or half the damping, the order is another one ({measured}). The damping is a choice that "
            "the data do not make, so read the ranking as one of several."
        )
    else:
        verdict = "cannot tell"
        text = f"Somewhat: with twice or half the damping, examples change places ({measured})."
    return Check("damping", verdict, f"{text} {where}", numbers)


# --- agreement with fine-tuning ------------------------------------------------------------------------------

Pair = tuple[float, float]


def _agreement(result: Attribution, used: Sequence[Comparison]) -> tuple[Pair, Pair] | None:
    """Correlation and slope over examples, pooled over queries; None where fine-tuning moved nothing.

    Queries are weighted by how well their scores are resolved: one for which no chosen example matters has nothing but
    noise to show. Above ten to one they count alike, or a single precise query would hide the others.
    """
    places = places_of(result, [comparison.index for comparison in used])
    scored = result.scored.at(slice(None), places)
    truth = torch.tensor([comparison.fine_tuned for comparison in used], dtype=torch.float64).T
    noise = torch.tensor([comparison.fine_tuned_error for comparison in used], dtype=torch.float64).T / 2
    moved = truth.std(1) > 0
    if not bool(moved.any()):
        return None
    scored, truth, noise = scored.at(moved), truth[moved], noise[moved]
    error = scored.stderr.double().square() + noise.square()
    weight = 1 / (error + (RESOLVED * truth).square()).mean(1, keepdim=True)

    def correlation(scores: Tensor) -> Tensor:
        a, b = (x - x.mean(1, keepdim=True) for x in (scores, truth))
        norms: Tensor = ((weight * a * a).sum() * (weight * b * b).sum()).sqrt()
        return (weight * a * b).sum() / norms.clamp_min(1e-300)

    def slope(scores: Tensor) -> Tensor:
        # of influence over fine-tuning; noise in the latter would flatten the line, and is taken out
        squares: Tensor = (weight * truth * truth).sum()
        without_noise = squares - (weight * noise * noise).sum()
        return (weight * scores * truth).sum() / without_noise.clamp_min(0.01 * float(squares))

    return _with_error(correlation, scored), _with_error(slope, scored)


def _with_error(statistic: Callable[[Tensor], Tensor], scored: Scored) -> Pair:
    """A statistic of the scores and its standard error: leaving out one chain at a time, or by moving a single one."""
    chains, count = scored.chains.double(), len(scored.chains)
    if count == 1:
        generator = torch.Generator().manual_seed(0)
        moves = torch.randn(32, *chains.shape[1:], generator=generator, dtype=torch.float64)
        moved = torch.stack([statistic(chains[0] + move * scored.stderr) for move in moves])
        return float(statistic(chains[0])), float(moved.std())
    without = torch.stack([statistic((chains.sum(0) - chain) / (count - 1)) for chain in chains])
    error = ((without - without.mean()).square().sum() * (count - 1) / count).sqrt()
    return float(statistic(chains.mean(0))), float(error)


def _pairs(comparison: Comparison) -> list[tuple[float, float, float]]:
    """Score, fine-tuned, and how far apart the errors allow them to be."""
    return [
        (score, truth, math.hypot(width, error))
        for score, width, truth, error in zip(
            comparison.influence,
            comparison.influence_error,
            comparison.fine_tuned,
            comparison.fine_tuned_error,
            strict=True,
        )
    ]


def _notes_on(used: int, lost: int, planned: int) -> str:
    """What was left out."""
    notes = []
    if lost:
        notes.append(f"Fine-tuning on {lost} more did not converge; they are left out.")
    if used + lost < planned:
        notes.append(f"For {planned - used - lost} more the budget did not suffice.")
    return " ".join(notes)


def _finite(error: float) -> float:
    return error if math.isfinite(error) else 0.0
