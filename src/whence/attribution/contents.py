"""From an `Attribution` to what its page shows, and from a page to its file."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from whence.attribution.ranking import Row
from whence.errors import OptionError
from whence.exhibit import Exhibit
from whence.report.content import Entry, Question, Report, Trust
from whence.runs.files import write_bytes
from whence.spectrum import Estimate

if TYPE_CHECKING:
    from whence.attribution.result import Attribution

__all__ = ["contents", "write_page"]

#: Rows shown at each end of a ranking, and of the ranking by gradient dot product.
SHOWN = 20
BASELINE_SHOWN = 5

_ESTIMATES = ("trace", "frobenius", "lambda_max", "sampling_constant", "top_sampling_constant")
_LISSA_SETTINGS = ("damping", "step_size", "batch_size", "num_steps", "chains", "constant")


def contents(result: Attribution, *, confidence: float = 0.95, shown: int = SHOWN) -> Report:
    """What the page of a result shows.

    Args:
        result: to be shown.
        confidence: of the intervals.
        shown: rows at each end of a ranking.
    """
    solve, spectrum = result.solve, result.solve.plan.spectrum
    estimates = {name: getattr(spectrum, name) for name in _ESTIMATES}
    if solve.certificate is None:
        plan = {name: getattr(solve.plan, name) for name in _LISSA_SETTINGS}
    else:
        plan = {
            "damping": solve.plan.damping,
            "iterations": solve.paths.shape[1],
            "operator_terms": solve.certificate.operator_terms,
        }
    return Report(
        title=result.title,
        questions=tuple(
            _question(result, q, agreement, confidence, shown)
            for q, agreement in enumerate(result.agreement.tolist())
        ),
        trust=Trust(
            spectrum={name: (e.value, e.stderr) for name, e in estimates.items() if isinstance(e, Estimate)},
            eigenvalues=None if spectrum.eigenvalues is None else spectrum.eigenvalues.numpy(),
            plan=plan,
            events=solve.events,
            term="example" if result.num_terms == result.num_examples else "token",
            num_products=solve.num_products,
            num_term_products=solve.num_term_products,
            solver=solve.solver,
            choice=solve.choice,
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


def write_page(page: str, path: str | Path, *, example: str = "report.html") -> Path:
    """Write a page, all of it or nothing: a reader never meets half of one. Returns its path.

    Args:
        page: an HTML document.
        path: of the file.
        example: a name to suggest where ``path`` is a directory.

    Raises:
        OptionError: ``path`` is a directory.
        StorageError: the file cannot be written, as on a full disk; what was there before is still there.
    """
    target = Path(path)
    if target.is_dir():
        raise OptionError(f"{target} is a directory; give the file's name too, such as {target / example}")
    write_bytes(target, page.encode("utf-8"))
    return target


def _question(result: Attribution, q: int, agreement: float, confidence: float, shown: int) -> Question:
    helpful, harmful = (
        [_entry(result, row) for row in result.top(shown, query=q, harmful=end, confidence=confidence)]
        for end in (False, True)
    )
    by_baseline: list[int] = []
    if result.dot_products is not None:
        order = result.dot_products[q].argsort(descending=True, stable=True)[:BASELINE_SHOWN]
        by_baseline = result.indices[order].tolist()
    solve, parts = result.solve, result.solve.error_parts
    proven = None  # a bound of the scores' relative error: ‖u - u*‖_A / ‖u‖_H
    if solve.certificate is not None and solve.score_rms is not None:
        proven = float(solve.certificate.upper[q]) / max(float(solve.score_rms[q]), 1e-300)
    return Question(
        number=q,
        exhibit=result.queries[q] if q < len(result.queries) else Exhibit(id=str(q)),
        loss=float(result.query_losses[q]),
        # An example is helpful if its score is positive: with few examples the two ends would overlap.
        helpful=tuple(entry for entry in helpful if entry.score > 0),
        harmful=tuple(entry for entry in harmful if entry.score < 0),
        by_baseline=tuple(_entry(result, result.row(q, i, confidence=confidence)) for i in by_baseline),
        indices=result.indices.numpy(),
        scores=result.scored.mean[q].numpy(),
        stderr=result.scored.stderr[q].numpy(),
        residual=float(solve.residual[q]),
        residual_stderr=float(solve.residual_stderr[q]),
        converged=bool(solve.converged[q]),
        agreement=agreement,
        paths=solve.paths[:, :, q].numpy(),
        proven=proven,
        expected=None if parts is None or parts.expected is None else float(parts.expected[q]),
        parts=None
        if parts is None or solve.certificate is not None
        else (float(parts.bias[q]), float(parts.sampling[q])),
    )


def _entry(result: Attribution, row: Row) -> Entry:
    numbers = asdict(row)
    query, index = numbers.pop("query"), row.index
    return Entry(
        baseline=numbers.pop("dot_product"),
        baseline_rank=numbers.pop("dot_product_rank"),
        exhibit=result.exhibits.get(index),
        token_scores=result.token_scores.get((query, index)),
        **numbers,
    )
