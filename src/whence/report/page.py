"""`render` and `write`: a `Report` as one self-contained HTML file."""

from __future__ import annotations

import math
import os
import uuid
from pathlib import Path

from whence.errors import OptionError
from whence.report import figures, words
from whence.report.content import Report
from whence.report.document import document
from whence.report.views import question_view, validation_view

__all__ = ["render", "write"]


def render(report: Report) -> str:
    """The report as one self-contained HTML document."""
    questions = [question_view(question, report) for question in report.questions]
    damping = report.trust.plan.get("damping", float("nan"))
    return document(
        "page.html.j2",
        report=report,
        questions=questions,
        unconverged=[view for view in questions if not view.question.converged],
        validation=validation_view(report.validation),
        eigenvalues=figures.eigenvalues(report.trust.eigenvalues, damping),
        facts={
            "What was measured": list(words.spectrum_facts(report.trust)),
            "What was chosen from it": list(words.plan_facts(report.trust)),
            "What it cost": list(words.spent_facts(report.trust)),
        },
        reproduce=_reproduce(report),
    )


def write(report: Report, path: str | os.PathLike[str]) -> Path:
    """Write the report to ``path``, all of it or nothing: a reader never meets half a page."""
    target = Path(path)
    if target.is_dir():
        raise OptionError(
            f"{target} is a directory; give the file's name too, such as {target / 'report.html'}"
        )
    data = render(report).encode("utf-8")
    target.parent.mkdir(parents=True, exist_ok=True)
    # Not `tempfile`: its files are private to their owner, and a report is made to be passed on.
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
    return target


def _reproduce(report: Report) -> dict[str, object]:
    """What the page offers to copy."""
    plan = report.trust.plan.items()
    return {
        "settings": dict(report.settings),
        "plan": {name: x if math.isfinite(x) else str(x) for name, x in plan},  # JSON has no NaN
        "versions": dict(report.versions),
    }
