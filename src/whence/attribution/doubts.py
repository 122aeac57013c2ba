"""When error bars cannot be trusted, and why: read off a finished result, in words.

Bars rest on two assumptions. That many examples carry the curvature: a certificate is shared out over a typical one by
the trace, and chains that met different examples must be alike. And that what chains have in common is small beside
their spread. A model that is certain of its data breaks the first, few or equal examples the second.
The quick answer's error is one of energy, and is shared out by the scores' own size: that too
supposes many examples, and that what they see of the solution is more than its error.
Weights of 16 bits are a third reason: bars are about the weights as they are, not about those that were rounded.
``python -m benchmarks.coverage certain`` measures how often bars hold where nothing is doubted here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from whence.attribution.result import Attribution

__all__ = ["doubts", "told"]

#: A trace with a larger relative error comes from a few examples: batches vary by twice their mean.
_UNCERTAIN = 0.25
#: By how much what the chains' start left behind may exceed their spread, which does not show it.
_HIDDEN = 4.0
#: The fewest examples that an error may be an average over: different ones, of the quick answer; of chains, those that
#: carry the curvature, of which there are as many as all terms over the constant C of the batches' noise.
_FEWEST = 20
#: How much of the solution's energy examples must see, in units of the quick answer's error.
_SEEN = 0.8
#: The least correlation with scores of weights that are rounded otherwise.
_ROUNDED = 0.99
#: Examples that are looked at for that; and what is rounding, in the largest score.
_LOOKED_AT, _ROUNDING = 2000, 1e-5


def doubts(result: Attribution) -> tuple[str, ...]:
    """Why the intervals of a result may not hold; empty where nothing speaks against them.

    Of several checkpoints, what was doubted of each.
    """
    if result.checkpoints:
        return told({each.name: each.doubts for each in result.checkpoints})
    found = (
        _few_examples(result),
        _no_gradient(result),
        _common_error(result),
        _unseen_error(result),
        _rounded_weights(result),
    )
    return tuple(filter(None, found))


def told(of: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """What is to be said of several checkpoints, by their names: once what is said of all."""
    whose: dict[str, list[str]] = {}
    for name, sentences in of.items():
        for sentence in sentences:
            whose.setdefault(sentence, []).append(name)
    return tuple(
        sentence if len(names) == len(of) else f"Checkpoint {', '.join(names)}: {sentence}"
        for sentence, names in whose.items()
    )


def _few_examples(result: Attribution) -> str:
    spectrum, drawn = result.solve.plan.spectrum, result.solve.by_curvature
    uncertain = spectrum.trace.stderr > _UNCERTAIN * spectrum.trace.value or bool(spectrum.inconsistencies())
    constant = spectrum.sampling_constant
    carrying = math.inf
    if constant is not None and constant.value > 0 and len(result.chain_scores) > 1:
        carrying = result.num_terms / constant.value
    # Drawn by curvature, the trace is known well: of what is drawn often, and of nothing else.
    if not (uncertain or drawn or carrying < _FEWEST):
        return ""
    known = f"its trace is known to {spectrum.trace} only"
    if drawn or not uncertain:
        known = (
            "batches were drawn by it"
            if drawn
            else f"no more than {carrying:.0f} terms, by the batches' noise"
        )
    return (
        "The intervals cannot be trusted: the model is so certain of most of its training data that a few examples "
        f"carry the curvature ({known}). Scores may be right, but their errors may be larger than shown. What is "
        "proven holds all the same: bounds, of solver='cg'."
    )


def _no_gradient(result: Attribution) -> str:
    lost = [str(q) for q, square in enumerate(result.query_dots.diagonal().tolist()) if not square > 0]
    if not lost:
        return ""
    return (
        f"The gradient of query {', '.join(lost)} is zero in this precision: the model is certain of the answer. "
        "Scores of 0 say nothing there. Ask about an answer that it doubts, or use the model in float64."
    )


def _common_error(result: Attribution) -> str:
    parts = result.solve.error_parts
    if len(result.chain_scores) < 2 or not bool((parts.bias > _HIDDEN * parts.sampling).any()):
        return ""
    return (
        "The intervals cannot be trusted: they are the spread of the chains, which agree much better than what their "
        f"common start may have left behind, up to {float(parts.bias.max()):.2g} of the scores' size. Use solver='cg'."
    )


def _unseen_error(result: Attribution) -> str:
    solve = result.solve
    if solve.solver != "ekfac" or solve.score_rms is None or solve.error_parts.expected is None:
        return ""
    beginning = "The intervals of the quick answer cannot be trusted:"
    end = "Ask for an exact one: accuracy=0.99."
    different = _different(result)
    if different < _FEWEST:
        only = f"only {different} {'is' if different == 1 else 'are'} different"
        return f"{beginning} its error is an average over many examples, of which {only}. {end}"
    error = solve.error_parts.expected.square() * solve.paths[0, -1]
    if not bool((solve.score_rms.square() < _SEEN * error).any()):
        return ""
    return (
        f"{beginning} most of the solution lies where the training examples have no curvature, and its error "
        f"there is larger than all that scores see of it. {end}"
    )


def _rounded_weights(result: Attribution) -> str:
    if result.rounding is None or not bool((result.rounding < _ROUNDED).any()):
        return ""
    lost = [str(q) for q, agreement in enumerate(result.rounding.tolist()) if agreement < _ROUNDED]
    whose = f"query {lost[0]}" if len(lost) == 1 else f"queries {', '.join(lost)}"
    return (
        f"The intervals are about the weights as they are, of 16 bits. Rounded otherwise in their last bit, scores of "
        f"{whose} would have a correlation of {float(result.rounding.min()):.2f} with these. If the weights were "
        "rounded after training, attribute the model of before, in float32."
    )


def _different(result: Attribution) -> int:
    """How many training examples there are whose scores differ, as far as was looked; all count if some have none."""
    scores = result.chain_scores.mean(0)
    n = scores.shape[1]
    if n < result.num_examples:
        return result.num_examples
    scores = scores / scores.abs().amax(1, keepdim=True).clamp_min(1e-300)
    some = scores[:, torch.linspace(0, n - 1, min(n, _LOOKED_AT), dtype=torch.float64).long()]
    return int(some.div(_ROUNDING).round().unique(dim=1).shape[1])
