"""`render` and `write`: a `Report` as one HTML file that needs nothing but itself.

Styles, scripts, figures and images are inside, and the page's own policy forbids everything else: no request to
any host, no script but the ones in ``templates/``, allowed by their hashes, whatever the data contain.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import uuid
from functools import cache
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from whence.errors import OptionError
from whence.report import figures, formatting, words
from whence.report.content import Report
from whence.report.untrusted import script_json, visible
from whence.report.views import question_view, validation_view

__all__ = ["render", "write"]


def render(report: Report) -> str:
    """The report as one self-contained HTML document."""
    environment = _environment()
    style = Markup(_source("style.css") + _source("figures.css") + _source("narrow_and_print.css"))
    theme, script = Markup(_source("theme.js")), Markup(_source("lists.js") + _source("reading.js"))
    questions = [question_view(question, report) for question in report.questions]
    damping = report.trust.plan.get("damping", float("nan"))
    return environment.get_template("page.html.j2").render(
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
        style=style,
        theme=theme,
        script=script,
        policy=_policy(style, theme, script),
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


def _policy(style: str, *scripts: str) -> str:
    """A Content-Security-Policy under which only these very styles and scripts work."""
    sources = " ".join(_hash(script) for script in scripts)
    return (
        f"default-src 'none'; style-src {_hash(style)}; script-src {sources}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _hash(source: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(source.encode('utf-8')).digest()).decode('ascii')}'"


def _source(name: str) -> str:
    """A style sheet or a script, as it stands."""
    environment = _environment()
    assert environment.loader is not None
    return environment.loader.get_source(environment, name)[0]


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("whence.report", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        # Whatever a template prints goes through here, so that no template can forget it.
        finalize=lambda value: visible(value) if type(value) is str else value,
    )
    environment.filters.update(
        brief=formatting.brief,
        count=formatting.count,
        duration=formatting.duration,
        percentage=formatting.percentage,
        pretty_json=lambda value: json.dumps(value, indent=2, ensure_ascii=False),
        script_json=script_json,
    )
    return environment
