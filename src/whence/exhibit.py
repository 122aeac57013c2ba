"""`Exhibit`: what a reader is shown of an example. Plain data, so that pages need neither torch nor the model."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Exhibit"]


@dataclass(frozen=True)
class Exhibit:
    """A training example or a query as a person should see it.

    Attributes:
        id: the example's own name (a file, a row's id, a title); shown, searched and linked to.
        text: plain text, never markup.
        tokens: the text cut into the model's tokens, one string per token, for shading by score.
        prompt: for a query, the text that was given; ``text`` is then the completion.
        image: a PNG file's bytes.
        label: the example's label, in words.
        prediction: for a query, what the model says about it, in words.
        contrast: for a query, in words what it might have said instead, where it is asked "why this and not that?".
        asked: for a query, what is asked of it, in words, where that is not its loss alone.
        facts: for such a query, the numbers that it is about: a name and a text each.
        note: anything else worth showing beside it, such as "label was flipped".
        link: where the example can be found: a URL or a path.

    Example:
        >>> Exhibit(id="with", text="The with statement is used to wrap the execution of a block").id
        'with'
    """

    id: str | None = None
    text: str | None = None
    tokens: tuple[str, ...] | None = None
    prompt: str | None = None
    image: bytes | None = None
    label: str | None = None
    prediction: str | None = None
    contrast: str | None = None
    asked: str | None = None
    facts: tuple[tuple[str, str], ...] = ()
    note: str | None = None
    link: str | None = None
