"""Questions to a language model: what it is asked about, as examples of the task."""

from __future__ import annotations

from typing import Any

import numpy as np

from whence.errors import DataError
from whence.exhibit import Exhibit
from whence.sources.documents import Document, layout_of, read_document
from whence.sources.examples import ListedExamples
from whence.sources.records import RecordIds, Records
from whence.sources.tokens import Encoded, encode
from whence.tasks import LanguageModeling

__all__ = ["language_queries"]


def language_queries(
    records: Records,
    tokenizer: Any,
    task: LanguageModeling,
    *,
    max_length: int | None = None,
    text_field: str | None = None,
) -> ListedExamples:
    """Queries from rows with ``prompt`` and ``completion``, with ``text``, or with ``messages``.

    A prompt starts with BOS if the tokenizer adds it by itself. The loss of a text query is that of the
    whole text; of a chat, that of the assistant's last message.

    Args:
        records: the rows; an ``id`` is shown where there is one.
        tokenizer: of a Hugging Face model.
        task: makes the examples.
        max_length: tokens of a query at most: the model's context.
        text_field: the field that holds a text query; by default ``text``.
    """
    layout = layout_of(records, text_field)
    ids = RecordIds(records)
    examples, exhibits = [], []
    for row, fields in enumerate(records):
        ids.add(row, fields)
        document = read_document(records, row, fields, layout, tokenizer=tokenizer, text_field=text_field)
        encoded = encode(tokenizer, [document.text], special=document.special)[0]
        boundary = 0 if document.predicted is None else document.predicted[-1][0]
        first, length = _completion(document, encoded, boundary)
        if first == 0 and boundary > 0:  # one token swallowed the prompt and some of the completion
            encoded = _encode_apart(tokenizer, document, boundary)
            first, length = _completion(document, encoded, boundary)
        if document.predicted is None:
            first = max(first, 1)
        if not 0 < first < length:
            raise DataError(_nothing_before(records.where(row), layout, length))
        if max_length is not None and length > max_length:
            raise DataError(
                f"{records.where(row)} is {length} tokens long, and the model reads {max_length}; shorten the prompt"
            )
        examples.append(task.query(encoded.ids[:first].tolist(), encoded.ids[first:length].tolist()))
        exhibits.append(
            Exhibit(
                id=ids[row],
                prompt=document.text[:boundary] if document.predicted is not None else None,
                text=document.text[boundary:],
                tokens=_pieces(encoded, first, length, boundary),
                link=records.link(row),
            )
        )
    return ListedExamples(examples, name=records.name, exhibits=exhibits)


def _completion(document: Document, encoded: Encoded, boundary: int) -> tuple[int, int]:
    """The first token of the completion, and the number of tokens without those added after the text."""
    own = np.flatnonzero(~encoded.added)
    length = int(own[-1]) + 1 if len(own) else 0
    predicted = np.flatnonzero(encoded.overlaps(boundary, len(document.text)))
    return (int(predicted[0]) if len(predicted) else length), length


def _pieces(encoded: Encoded, first: int, length: int, boundary: int) -> tuple[str, ...]:
    """The completion's tokens as strings; a text query's first token is shown, though nothing predicts it."""
    return encoded.pieces(first if boundary or encoded.added[0] else 0, length, within=boundary)


def _encode_apart(tokenizer: Any, document: Document, boundary: int) -> Encoded:
    """Tokens of the prompt and of the completion by themselves, one after the other."""
    prompt = encode(tokenizer, [document.text[:boundary]], special=document.special)[0]
    completion = encode(tokenizer, [document.text[boundary:]], special=False)[0]
    own = np.flatnonzero(~prompt.added)
    keep = int(own[-1]) + 1 if len(own) else len(prompt.ids)
    return Encoded(
        document.text,
        np.concatenate([prompt.ids[:keep], completion.ids]),
        np.concatenate([prompt.starts[:keep], completion.starts + boundary]),
        np.concatenate([prompt.ends[:keep], completion.ends + boundary]),
        np.concatenate([prompt.added[:keep], completion.added]),
        prompt.names[: int(prompt.added[:keep].sum())],
    )


def _nothing_before(where: str, layout: str, length: int) -> str:
    if layout == "pair":
        return (
            f"{where}: nothing comes before the completion: the prompt is empty and the tokenizer adds no BOS; "
            "give at least one token of prompt"
        )
    return f"{where} has {length} token{'s' * (length != 1)}, none to predict after the first; give a longer text"
