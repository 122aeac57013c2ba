"""What objects show of themselves in a notebook: pages and cards in frames of their own.

A frame keeps the page's styles and the notebook's apart, and runs the page's own scripts alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from whence.report.document import plain_document

__all__ = ["card", "framed"]


def framed(page: str, *, title: str, height: int) -> str:
    """An HTML document as a part of another one, so many pixels high.

    Example:
        >>> framed("<p>One & two</p>", title="A page", height=80)[:53]
        '<iframe title="A page" sandbox="allow-scripts" style='
    """
    frame = Markup(
        '<iframe title="{}" sandbox="allow-scripts" style="width:100%;height:{}px;border:0" srcdoc="{}"></iframe>'
    )
    return str(frame.format(title, height, page))


def card(title: str, words: Sequence[str], figure: Markup | None = None, *, height: int = 300) -> str:
    """A title, sentences and a figure in the style of the pages."""
    page = plain_document("card.html.j2", title=title, words=list(words), figure=figure)
    return framed(page, title=title, height=height)
