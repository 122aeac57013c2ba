"""From what was measured to a verdict in plain words: trust, doubt, or cannot tell.

A check says *trust* where what it measured is good by itself, *doubt* where it is bad beyond its errors, and that it
*cannot tell* in between. A check that was skipped cannot tell either, and says why it was skipped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from whence.attribution import Attribution
from whence.attribution.over_damping import OverDamping
from whence.attribution.page import accuracy_words
from whence.attribution.scored import Scored
from whence.report.checks import Check, Comparison, Verdict
from whence.solvers.plan import Plan
from whence.spectrum import Spectrum
from whence.validation.statistics import Ranks, rank_correlations, standard_error

__all__ = [
    "DAMPINGS",
    "batch_check",
    "damping_check",
    "fine_tuning_check",
    "scored_at",
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
#: Dampings to compare, in units of the run's own, falling.
DAMPINGS = {"× 4": 4.0, "× 2": 2.0, "× 1": 1.0, "× ½": 0.5, "× ¼": 0.25}
FEWEST_POINTS = 3
#: Error, as a part of a query's scores, below which queries count alike.
RESOLVED = 0.1

Pair = tuple[float, float]  # a number and its standard error


def terms_in(result: Attribution, count: float) -> str:
    """A number of terms in words: examples or tokens."""
    word = "example" if result.num_terms == result.num_examples else "token"
    return f"{round(count):,} {word}{'' if round(count) == 1 else 's'}"


def scored_at(result: Attribution, indices: Sequence[int]) -> Scored:
    """The scores of these training examples."""
    return result.scored.at(
        slice(None), [int((result.indices == index).nonzero()[0, 0]) for index in indices]
    )


def skipped(name: str, reason: str) -> Check:
    """A check that was not run."""
    return Check(name, "cannot tell", f"Not run: {reason}", ran=False)


def _check(name: str, verdict: Verdict, sentence: str, numbers: Mapping[str, float | Pair]) -> Check:
    """With all numbers that are known; an error that is not known counts as none."""
    pairs = {key: value if isinstance(value, tuple) else (value, 0.0) for key, value in numbers.items()}
    known = {
        key: (float(value), error if math.isfinite(error) else 0.0)
        for key, (value, error) in pairs.items()
        if math.isfinite(value)
    }
    return Check(name, verdict, sentence.strip(), known)


def solver_check(result: Attribution) -> Check:
    """What the run knows about its own solve."""
    solve, agreement = result.solve, float(result.agreement.min())
    queries, converged = len(solve.converged), int(solve.converged.sum())
    worst = int(solve.residual.argmax())
    residual = float(solve.residual[worst])
    numbers: dict[str, float | Pair] = {
        "converged solves": converged,
        "of": queries,
        "largest residual": (residual, float(solve.residual_stderr[worst])),
        "least agreement of chains": agreement,
    }
    whose = "the question" if queries == 1 else f"all {queries} questions"
    verdict: Verdict
    if solve.solver == "ekfac" or (solve.limited and converged < queries):
        verdict = "cannot tell"
        how = (
            "EK-FAC answered, and nothing was solved"
            if solve.solver == "ekfac"
            else "The budget ended the solve"
        )
        text = f"{how}. {accuracy_words(result)} Ask for accuracy=0.99 to have more."
    elif converged < queries:
        verdict = "doubt"
        text = (
            f"It did not, for {queries - converged} of {queries} questions: put back into their equation, solutions "
            f"miss by up to {residual:.0%}. A larger damping or a larger refine helps."
        )
    elif solve.certificate is not None and solve.score_rms is not None:
        verdict = "trust"
        proven = float((solve.certificate.upper / solve.score_rms.clamp_min(1e-300)).max())
        numbers["largest proven error"] = proven
        text = (
            f"For {whose} it converged, and proved it: the scores are within {proven:.1%} of their size of the exact "
            "ones, in root mean square over the training data with labels that the model would give."
        )
        if solve.error_parts is not None and solve.error_parts.expected is not None:
            expected = float(solve.error_parts.expected.max())
            numbers["largest expected error"] = expected
            text += f" Going by its last iterations, scores of the examples are off by {expected:.1%} of their spread."
    elif not agreement >= AGREED:
        verdict = "cannot tell"
        text = (
            f"It stopped where it should, but independent repetitions agree only roughly: their scores correlate "
            f"{agreement:.2f}. A larger refine brings them together."
        )
    else:
        verdict = "trust"
        text = (
            f"For {whose} it converged, on data it had not seen, and {len(result.chain_scores)} independent "
            f"repetitions give nearly the same scores: they correlate at least {agreement:.3f}."
        )
    if result.doubts and verdict == "trust":  # what it proved holds, what it says of single scores may not
        verdict = "cannot tell"
    return _check("solver", verdict, " ".join([text, *result.doubts, *solve.events]), numbers)


def batch_check(result: Attribution, plan: Plan, drawn: float, spectrum: Spectrum, pairs: int) -> Check:
    """Whether batches of so many ``drawn`` terms are above ``C·Tr(H) / (1/η - λ)``, with C and Tr(H) measured anew."""
    average, top = spectrum.sampling_constant, spectrum.top_sampling_constant
    assert average is not None
    assert top is not None
    room = 1 / plan.step_size - plan.damping
    per_constant = spectrum.trace.value / room if room > 0 else math.inf
    enough = max(average.upper(), top.upper()) * per_constant
    least = max(average.lower(), top.lower()) * per_constant
    verdict: Verdict
    if drawn < least:
        verdict = "doubt"
        text = (
            f"By their noise, measured anew, batches of at least {terms_in(result, math.ceil(least))} are needed: "
            "errors may be larger than the error bars say. Run again with a larger refine or a larger damping."
        )
    elif contradictions := spectrum.inconsistencies():
        verdict = "cannot tell"
        text = (
            f"How noisy such batches are could not be measured well: {contradictions[0]}. A larger budget measures "
            "more of them."
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
    numbers: dict[str, float | Pair] = {
        "batch": round(drawn),
        "stable from": math.ceil(enough),
        "noise of batches": (average.value, average.stderr),
        "steepest direction": (top.value, top.stderr),
        "measurements": pairs,
    }
    opening = f"Every step of the solver looked at {terms_in(result, drawn)}."
    return _check("batch", verdict, f"{opening} {text}", numbers)


def fine_tuning_check(result: Attribution, comparisons: Sequence[Comparison], *, planned: int) -> Check:
    """Scores by influence against scores by fine-tuning on examples, of which so many were planned."""
    used = [comparison for comparison in comparisons if comparison.converged]
    lost, missing = len(comparisons) - len(used), planned - len(comparisons)
    notes = f" Fine-tuning on {lost} more did not converge; they are left out." if lost else ""
    notes += f" For {missing} more the budget did not suffice." if missing > 0 else ""
    counts: dict[str, float | Pair] = {"examples": len(used), **({"not converged": lost} if lost else {})}
    found = None if len(used) < FEWEST_POINTS else _agreement(result, used)
    if found is None:
        text = f"The model was fine-tuned on {len(used)} single training examples, " + (
            "too few to compare." if len(used) < FEWEST_POINTS else "and no question’s loss moved by it."
        )
        return _check("fine-tuning", "cannot tell", text + notes, counts)
    (correlation, _), (slope, _) = found
    within = [near for comparison in used for near in _within_errors(comparison)]
    how = (
        f"all {terms_in(result, result.num_terms)} of the training data"
        if used[0].full_batch
        else "random batches of the training data, so that both sides carry noise"
    )
    kinds = ", ".join(dict.fromkeys(comparison.kind for comparison in used))
    measured = f"correlation {correlation:.3f}, slope {slope:.2f}; 1 and 1 would be perfect".replace("-", "−")
    verdict: Verdict
    if correlation >= CORRELATED and abs(slope - 1) <= SLOPE:
        verdict, text = "trust", f"The questions’ losses moved as the scores say: {measured}."
    elif sum(within) < len(within) / 2:
        verdict = "doubt"
        text = (
            f"The questions’ losses did not move as the scores say: {measured}. {len(within) - sum(within)} of "
            f"{len(within)} differences are larger than the error bars allow. Do not rely on these scores."
        )
    else:
        verdict = "cannot tell"
        text = (
            f"The questions’ losses moved somewhat as the scores say: {measured}. Most differences are within the "
            "error bars, but those are wide: run again with a larger refine."
        )
    opening = (
        f"The model was fine-tuned on {len(used)} training examples, each by itself ({kinds}), while held to its own "
        f"answers on {how}."
    )
    agreed = {"within error bars": sum(within), "of": len(within)}
    numbers = {"correlation": found[0], "slope": found[1], **agreed, **counts}
    return _check("fine-tuning", verdict, f"{opening} {text}{notes}", numbers)


def _within_errors(comparison: Comparison) -> list[bool]:
    """For each query, whether influence and fine-tuning differ by no more than their errors allow."""
    c = comparison
    rows = zip(c.influence, c.fine_tuned, c.influence_error, c.fine_tuned_error, strict=True)
    return [abs(score - truth) <= math.hypot(width, error) for score, truth, width, error in rows]


def _agreement(result: Attribution, used: Sequence[Comparison]) -> tuple[Pair, Pair] | None:
    """Correlation and slope over examples, pooled over queries; None where fine-tuning moved nothing.

    Queries are weighted by how well their scores are resolved: one for which no chosen example matters has nothing but
    noise to show. Above ten to one they count alike, or a single precise query would hide the others.
    """
    scored = scored_at(result, [comparison.index for comparison in used])
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
    """A statistic of the scores and its standard error: by leaving out each chain, or by moving a single one."""
    chains = scored.chains.double()
    value, count = float(statistic(chains.mean(0))), len(chains)
    if count > 1:
        without = torch.stack([statistic((chains.sum(0) - chain) / (count - 1)) for chain in chains])
        return value, float(((without - without.mean()).square().sum() * (count - 1) / count).sqrt())
    generator = torch.Generator().manual_seed(0)
    moves = torch.randn(32, *chains.shape[1:], generator=generator, dtype=torch.float64)
    return value, float(torch.stack([statistic(chains[0] + move * scored.stderr) for move in moves]).std())


def damping_check(result: Attribution, over: OverDamping, ranked: Sequence[int], *, queries: int) -> Check:
    """Whether the settled ones of `DAMPINGS` put these examples in the same order, for the first so many queries."""
    chosen = torch.isin(over.indices, torch.tensor(ranked))
    ranks = [Ranks(scores[:queries, chosen].T) for scores in over.scores]
    own = ranks[list(DAMPINGS).index("× 1")]
    near: dict[str, Pair] = {}
    for name, other, settled in zip(DAMPINGS, ranks, over.settled, strict=True):
        if settled and other is not own:
            (agreement,) = rank_correlations(other, own)
            near[name] = (float(agreement.mean()), float(standard_error(agreement, 0)))
    words = {"× 2": "twice", "× ½": "half"}
    known = {
        words[name]: value for name, (value, _) in near.items() if name in words and math.isfinite(value)
    }
    changed = f"with {' or '.join(known)} the damping"
    measured = (
        f"rank correlation {' and '.join(f'{value:.2f}' for value in known.values())}; 1 is the same order"
    )
    verdict: Verdict
    if not known:
        verdict, text = "cannot tell", "The scores of some question do not differ, so that nothing is ranked."
    elif min(known.values()) >= SAME_ORDER:
        verdict = "trust"
        text = f"Hardly: {changed}, examples keep nearly their order ({measured})."
    elif min(known.values()) < OTHER_ORDER:
        verdict = "doubt"
        text = (
            f"Yes: {changed}, the order is another one ({measured}). The damping is a choice that the data do not "
            "make, so read the ranking as one of several."
        )
    else:
        verdict = "cannot tell"
        text = f"Somewhat: {changed}, examples change places ({measured})."
    if "× ½" not in near:
        text += " Half the damping was not compared: the solve was too short for it."
    counts = {"examples ranked": int(chosen.sum()), "questions": queries}
    where = f"(With {counts['examples ranked']} examples and {queries} of {len(result.queries)} questions.)"
    numbers = {f"damping {name}": pair for name, pair in near.items()}
    return _check("damping", verdict, f"{text} {where}", {**numbers, **counts})
