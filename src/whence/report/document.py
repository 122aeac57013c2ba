"""`document`: a page as one HTML file that needs nothing but itself; and `Item`, an example in one of its lists.

Styles, scripts, figures and images are inside, and the page's own policy forbids everything else: no request to
any host, no script but the ones in ``templates/``, allowed by their hashes, whatever the data contain.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from whence.exhibit import Exhibit
from whence.report import formatting
from whence.report.figures import verdict_mark
from whence.report.untrusted import href, picture, script_json, visible
from whence.units import format_duration

__all__ = [
    "Item",
    "Page",
    "Token",
    "document",
    "explorer_document",
    "plain_document",
    "shade",
    "words_to_filter",
]

MOST_WORDS = 40  # to choose from, where a list can be filtered
LEVELS = 10  # depths of shading, each a class in style.css: the page's policy allows no inline styles


@dataclass(frozen=True, kw_only=True)
class Page:
    """What every page says of itself.

    Attributes:
        num_examples: training examples in all; ``num_scored`` of them were scored.
        not_scored: in words, what was left out and why; empty where everything was scored.
        score_method: how scores were computed, in words.
        settings, versions: what reproduces the run: name -> value.
        seconds: phase -> duration.
    """

    title: str
    num_examples: int
    num_scored: int
    not_scored: str
    score_method: str
    settings: Mapping[str, str]
    versions: Mapping[str, str]
    seconds: Mapping[str, float]


@dataclass(frozen=True)
class Item:
    """A training example in a list.

    Attributes:
        index: its position in the training data.
        anchor: its address on the page.
        value: its score; ``score`` and ``interval`` are what stands on the page, ``whisker`` the figure of both.
        keys: what else the list can be sorted and filtered by, under the names that ``lists.js`` knows.
        lines: further numbers: each a name, a text, and what to show at the pointer (nothing if empty).
        tied: whether it could change places with the next.
        disagrees: whether the model says something else than the label.
    """

    index: int
    rank: int
    anchor: str
    exhibit: Exhibit
    value: float
    score: str
    interval: str
    whisker: Markup
    keys: Mapping[str, float | str]
    lines: Sequence[tuple[str, str, str]]
    tokens: tuple[Token, ...] = ()
    tied: bool = False
    disagrees: bool = False

    @property
    def side(self) -> str:
        """Class name of its sign."""
        return "neg" if self.value < 0 else "pos" if self.value > 0 else "neither"

    @property
    def strongest(self) -> list[Token]:
        """The tokens with the largest scores, for readers who see no colours or have no pointer."""
        known = [token for token in self.tokens if math.isfinite(token.score) and token.score != 0]
        return sorted(known, key=lambda token: -abs(token.score))[:5]


@dataclass(frozen=True)
class Token:
    """A token with its share of the example's score, and its class names in ``style.css``."""

    text: str
    score: float
    look: str


def shade(exhibit: Exhibit, scores: Sequence[float] | None) -> tuple[Token, ...]:
    """The exhibit's tokens with their shading, deepest at the text's own largest score.

    Empty if there are no tokens, or if scores and tokens do not match one to one: a shading that is off by one
    would mislead, plain text does not.

    Example:
        >>> [t.look for t in shade(Exhibit(tokens=("a", "b", "c")), (2.0, -1.0, math.nan))]
        ['t p10', 't n5', 't']
    """
    if not exhibit.tokens or scores is None or len(scores) != len(exhibit.tokens):
        return ()
    largest = max((abs(score) for score in scores if math.isfinite(score)), default=0.0)
    tokens = []
    for text, score in zip(exhibit.tokens, scores, strict=True):
        level = round(LEVELS * abs(score) / largest) if largest > 0 and math.isfinite(score) else 0
        shading = f" {'p' if score > 0 else 'n'}{level}" if level else ""
        line_break = " nl" if text.strip(" ") == "\n" else ""
        tokens.append(Token(text, score, f"t{shading}{line_break}"))
    return tuple(tokens)


def words_to_filter(words: Iterable[str | None]) -> list[str]:
    """What to offer where a list can be filtered by words."""
    return sorted({word for word in words if word})[:MOST_WORDS]


def document(
    template: str, report: Page, *, reproduce: Mapping[str, Any] | None = None, **values: Any
) -> str:
    """A page as one HTML file, with the styles, the scripts and the policy that all pages share.

    Args:
        template: its name in ``templates/``.
        report: what the page says of itself.
        reproduce: what the page offers to copy, beside settings and versions.
        values: what else the template uses.
    """
    style = _style()
    theme, script = Markup(_source("theme.js")), Markup(_source("lists.js") + _source("reading.js"))
    copied = {"settings": dict(report.settings), **(reproduce or {}), "versions": dict(report.versions)}
    return (
        _environment()
        .get_template(template)
        .render(
            report=report,
            style=style,
            theme=theme,
            script=script,
            policy=_policy(style, theme, script),
            reproduce=copied,
            **values,
        )
    )


def plain_document(template: str, **values: Any) -> str:
    """A page without scripts, in the same style and under the same policy."""
    style = _style()
    return _environment().get_template(template).render(style=style, policy=_policy(style), **values)


def explorer_document(**values: Any) -> tuple[str, str]:
    """The explorer's page, and its policy: as `document`, but it may ask its own server and show its answers."""
    style = _style() + Markup(_source("explorer.css"))
    theme, script = Markup(_source("theme.js")), Markup(_source("explorer.js"))
    policy = f"{_policy(style, theme, script)}; connect-src 'self'; frame-src 'self'; frame-ancestors 'none'"
    template = _environment().get_template("explorer.html.j2")
    return template.render(style=style, theme=theme, script=script, **values), policy


def _style() -> Markup:
    return Markup(_source("style.css") + _source("figures.css") + _source("narrow_and_print.css"))


def _policy(style: str, *scripts: str) -> str:
    """A Content-Security-Policy under which only these very styles and scripts work."""
    sources = " ".join(_hash(script) for script in scripts) or "'none'"
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
        duration=format_duration,
        href=href,
        percentage=formatting.percentage,
        picture=picture,
        plus_minus=formatting.plus_minus,
        pretty_json=lambda value: json.dumps(value, indent=2, ensure_ascii=False),
        script_json=script_json,
        signed=formatting.signed,
        verdict_mark=verdict_mark,
    )
    environment.tests["finite"] = math.isfinite
    return environment
