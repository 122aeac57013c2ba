"""`document`: one of the templates as an HTML file that needs nothing but itself.

Styles, scripts, figures and images are inside, and the page's own policy forbids everything else: no request to
any host, no script but the ones in ``templates/``, allowed by their hashes, whatever the data contain.
"""

from __future__ import annotations

import base64
import hashlib
import json
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from whence.report import formatting
from whence.report.untrusted import script_json, visible

__all__ = ["document"]


def document(template: str, **values: Any) -> str:
    """The template with these values, and with the styles, the scripts and the policy that all pages share."""
    style = Markup(_source("style.css") + _source("figures.css") + _source("narrow_and_print.css"))
    theme, script = Markup(_source("theme.js")), Markup(_source("lists.js") + _source("reading.js"))
    policy = _policy(style, theme, script)
    shared = {"style": style, "theme": theme, "script": script, "policy": policy}
    return _environment().get_template(template).render(**values, **shared)


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
