"""From an `Attribution` to what its page shows."""

from __future__ import annotations

from whence.attribution.ranking import Ranking, Row
from whence.attribution.result import Attribution
from whence.exhibit import Exhibit
from whence.report.content import Entry, Question, Report, Trust
from whence.spectrum import Estimate

__all__ = ["contents"]

#: Rows shown at each end of a ranking.
SHOWN = 20
_BASELINE_SHOWN = 5


def contents(result: Attribution, *, confidence: float = 0.95, shown: int = SHOWN) -> Report:
    """The page of a result."""
    spectrum = result.solve.plan.spectrum
    agreement = result.agreement.tolist()
    estimates = {
        "trace": spectrum.trace,
        "frobenius": spectrum.frobenius,
        "lambda_max": spectrum.lambda_max,
        "sampling_constant": spectrum.sampling_constant,
        "top_sampling_constant": spectrum.top_sampling_constant,
    }
    return Report(
        title=result.title,
        questions=tuple(_question(result, q, confidence, shown, agreement[q]) for q in range(len(agreement))),
        trust=Trust(
            spectrum={name: (e.value, e.stderr) for name, e in estimates.items() if isinstance(e, Estimate)},
            eigenvalues=None if spectrum.eigenvalues is None else spectrum.eigenvalues.numpy(),
            plan=_settings(result),
            events=result.solve.events,
            term="example" if result.num_terms == result.num_examples else "token",
            num_products=result.solve.num_products,
            num_term_products=result.solve.num_term_products,
            solver=result.solve.solver,
            choice=result.solve.choice,
        ),
        confidence=confidence,
        num_examples=result.num_examples,
        num_scored=len(result.indices),
        not_scored=result.not_scored,
        score_method=result.score_method,
        settings={name: str(value) for name, value in result.settings.items()},
        versions=result.versions,
        seconds=result.seconds,
        validation=result.validation,
    )


def _settings(result: Attribution) -> dict[str, float]:
    """The settings of the solver that was used."""
    solve = result.solve
    if solve.certificate is not None:
        iterations = solve.paths.shape[1]
        return {
            "damping": solve.plan.damping,
            "iterations": iterations,
            "operator_terms": solve.certificate.operator_terms,
        }
    names = ("damping", "step_size", "batch_size", "num_steps", "chains", "constant")
    return {name: getattr(solve.plan, name) for name in names}


def _question(result: Attribution, q: int, confidence: float, shown: int, agreement: float) -> Question:
    ends = [result.top(shown, query=q, harmful=harmful, confidence=confidence) for harmful in (False, True)]
    helpful, harmful = (_entries(result, end) for end in ends)
    solve = result.solve
    return Question(
        number=q,
        exhibit=result.queries[q] if q < len(result.queries) else Exhibit(id=str(q)),
        loss=float(result.query_losses[q]),
        # An example is helpful if its score is positive: with few examples the two ends would overlap.
        helpful=tuple(entry for entry in helpful if entry.score > 0),
        harmful=tuple(entry for entry in harmful if entry.score < 0),
        by_baseline=_by_baseline(result, q, confidence),
        indices=result.indices.numpy(),
        scores=result.scored.mean[q].numpy(),
        stderr=result.scored.stderr[q].numpy(),
        residual=float(solve.residual[q]),
        residual_stderr=float(solve.residual_stderr[q]),
        converged=bool(solve.converged[q]),
        agreement=agreement,
        paths=solve.paths[:, :, q].numpy(),
        proven=_proven(result, q),
        expected=_expected(result, q),
        parts=_parts(result, q),
    )


def _proven(result: Attribution, q: int) -> float | None:
    """A bound of the scores' relative error: ``‖u - u*‖_A / ‖u‖_H``."""
    solve = result.solve
    if solve.certificate is None or solve.score_rms is None:
        return None
    return float(solve.certificate.upper[q]) / max(float(solve.score_rms[q]), 1e-300)


def _expected(result: Attribution, q: int) -> float | None:
    """What the examples' scores should be off by, where the solver watched them settle."""
    parts = result.solve.error_parts
    return None if parts is None or parts.expected is None else float(parts.expected[q])


def _parts(result: Attribution, q: int) -> tuple[float, float] | None:
    """Bias and sampling, relative to the scores, where chains tell them."""
    parts = result.solve.error_parts
    if parts is None or result.solve.certificate is not None:
        return None
    return float(parts.bias[q]), float(parts.sampling[q])


def _entries(result: Attribution, ranking: Ranking) -> list[Entry]:
    return [_entry(result, row) for row in ranking]


def _entry(result: Attribution, row: Row) -> Entry:
    return Entry(
        rank=row.rank,
        index=row.index,
        score=row.score,
        low=row.low,
        high=row.high,
        effect=row.effect,
        effect_low=row.effect_low,
        effect_high=row.effect_high,
        separated=row.separated,
        baseline=row.dot_product,
        baseline_rank=row.dot_product_rank,
        exhibit=result.exhibits.get(row.index),
        token_scores=result.token_scores.get((row.query, row.index)),
    )


def _by_baseline(result: Attribution, q: int, confidence: float) -> tuple[Entry, ...]:
    """The first few by gradient dot product, with their scores by influence."""
    if result.dot_products is None:
        return ()
    order = result.dot_products[q].argsort(descending=True, stable=True)[:_BASELINE_SHOWN]
    rows = [result.row(q, index, confidence=confidence) for index in result.indices[order].tolist()]
    return tuple(_entry(result, row) for row in rows)
