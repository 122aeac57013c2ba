"""When error bars cannot be trusted, and why: read off a finished result, in words.

Bars rest on two assumptions. That many examples carry the curvature: a certificate is shared out over a typical one by
the trace, and chains that met different examples must be alike. And that what chains have in common is small beside
their spread. A model that is certain of its data breaks the first, few or equal examples the second.
``python -m benchmarks.coverage certain`` measures how often bars hold where nothing is doubted here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from whence.attribution.result import Attribution

__all__ = ["doubts"]

#: A trace with a larger relative error comes from a few examples: batches vary by twice their mean.
_UNCERTAIN = 0.25
#: By how much what the chains' start left behind may exceed their spread, which does not show it.
_HIDDEN = 4.0


def doubts(result: Attribution) -> tuple[str, ...]:
    """Why the intervals of a result may not hold; empty where nothing speaks against them."""
    return tuple(filter(None, (_few_examples(result), _no_gradient(result), _common_error(result))))


def _few_examples(result: Attribution) -> str:
    spectrum, drawn = result.solve.plan.spectrum, result.solve.by_curvature
    uncertain = spectrum.trace.stderr > _UNCERTAIN * spectrum.trace.value or bool(spectrum.inconsistencies())
    # Drawn by curvature, the trace is known well: of what is drawn often, and of nothing else.
    if not (uncertain or drawn):
        return ""
    known = "batches were drawn by it" if drawn else f"its trace is known to {spectrum.trace} only"
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
