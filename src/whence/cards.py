"""What small objects show of themselves in a notebook: a title over a table of names and values.

Plain HTML in the notebook's own letters and colours, dark or light. Pages and figures are of `whence.report`, which no
solver knows.
"""

from __future__ import annotations

from collections.abc import Iterable

from markupsafe import Markup

__all__ = ["table_card"]

_BOX = "border:1px solid #8888;border-radius:6px;padding:.4em .9em .6em;display:inline-block"
_NAME = "text-align:left;padding:.1em 1.2em .1em 0;opacity:.75"
_VALUE = "text-align:left;padding:.1em 0"


def table_card(title: str, rows: Iterable[tuple[str, str]], notes: Iterable[str] = ()) -> str:
    """A title, names with their values, and sentences under them.

    Example:
        >>> card = table_card("A plan", [("batch", "a < b")], ["Expect it to end."])
        >>> "a &lt; b" in card, "Expect it to end." in card
        (True, True)
    """
    body = Markup().join(
        Markup('<tr><td style="{}">{}</td><td style="{}">{}</td></tr>').format(_NAME, name, _VALUE, value)
        for name, value in rows
    )
    said = Markup().join(Markup('<p style="margin:.4em 0 0">{}</p>').format(note) for note in notes)
    return Markup(
        '<div style="{}"><strong>{}</strong><table style="margin:.3em 0 0">{}</table>{}</div>'
    ).format(_BOX, title, body, said)
