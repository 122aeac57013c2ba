"""Questions to a language model: what it is asked about, as examples of the task."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from whence.errors import DataError
from whence.exhibit import Exhibit
from whence.sources.examples import ListedExamples, nothing_left
from whence.sources.records import RecordIds, Records, Row
from whence.sources.text import DocumentReader
from whence.sources.tokenizers import Encoded, encode
from whence.tasks import LanguageModeling

__all__ = ["language_queries"]


def language_queries(
    records: Records,
    tokenizer: Any,
    task: LanguageModeling,
    *,
    max_length: int | None = None,
    text_field: str | None = None,
    skip_empty: bool = False,
) -> ListedExamples:
    """Queries from rows with ``prompt`` and ``completion``, with ``text``, or with ``messages``.

    A prompt starts with BOS if the tokenizer adds it by itself. The loss of a text query is that of the
    whole text; of a chat, that of the assistant's last message. A field ``contrast`` holds what might have been said
    instead, and is asked about with it.

    Args:
        records: the rows; an ``id`` is shown where there is one.
        tokenizer: of a Hugging Face model.
        task: makes the examples.
        max_length: tokens of a query at most: the model's context.
        text_field: the field that holds a text query; by default ``text``.
        skip_empty: leave out rows without text instead of refusing them.
    """
    reader, ids = DocumentReader(records, tokenizer, text_field), RecordIds(records)
    examples, exhibits, fields, contrasts = [], [], [], []
    for number, row in ids.read():
        if skip_empty and not reader.has_text(row):
            continue
        example, exhibit = _query(reader, tokenizer, task, row, max_length)
        contrast = None
        if (other := _other(reader, row)) is not None:
            contrast, shown = _query(reader, tokenizer, task, other, max_length)
            exhibit = replace(exhibit, contrast=shown.text)
        examples.append(example)
        exhibits.append(replace(exhibit, id=ids[number]))
        fields.append(row.fields)
        contrasts.append(contrast)
    if not examples:
        raise nothing_left(records.name, len(records))
    compared = contrasts if any(contrast is not None for contrast in contrasts) else None
    return ListedExamples(examples, name=records.name, exhibits=exhibits, fields=fields, contrasts=compared)


def _query(
    reader: DocumentReader, tokenizer: Any, task: LanguageModeling, row: Row, max_length: int | None
) -> tuple[dict[str, Tensor], Exhibit]:
    """A row as an example, and what to show of it."""
    document = reader.read(row)
    whole = document.predicted is None
    boundary = document.predicted[-1][0] if document.predicted else 0  # where the completion starts
    encoded = reader.encode(document)[0]
    first = _completion(encoded, boundary)
    if first == 0 and boundary > 0:  # one token swallowed the prompt and some of the completion
        encoded = _encode_apart(tokenizer, document.text, boundary, special=reader.special)
        first = _completion(encoded, boundary)
    first, length = max(first, 1) if whole else first, encoded.own_end
    if not 0 < first < length:
        raise DataError(
            f"{row.where} has {length} token{'s' * (length != 1)}, of which the first can only be given, not "
            "predicted; give a longer text, or at least one token of prompt before the completion"
        )
    if max_length is not None and length > max_length:
        raise DataError(
            f"{row.where} is {length} tokens long, and the model reads {max_length}; shorten the prompt"
        )
    # A text's first token is shown, though nothing predicts it.
    shown = first if boundary or encoded.added[0] else 0
    exhibit = Exhibit(
        prompt=None if whole else document.text[:boundary],
        text=document.text[boundary:],
        tokens=encoded.pieces(shown, length, within=boundary),
        link=row.link,
    )
    return task.query(encoded.ids[:first].tolist(), encoded.ids[first:length].tolist()), exhibit


def _other(reader: DocumentReader, row: Row) -> Row | None:
    """The row with what its field ``contrast`` says in the place of its own completion, text or last answer."""
    if row.fields.get("contrast") is None:
        return None
    said, fields = row.text("contrast"), dict(row.fields)
    if reader.layout == "messages":
        messages = list(fields["messages"])
        last = max(number for number, message in enumerate(messages) if message["role"] == "assistant")
        fields["messages"] = [*messages[:last], {"role": "assistant", "content": said}]
    else:
        fields["completion" if reader.layout == "pair" else reader.text_field] = said
    return replace(row, fields=fields, where=f"the contrast of {row.where}")


def _completion(encoded: Encoded, boundary: int) -> int:
    """The first token with a character of the completion."""
    predicted = np.flatnonzero(encoded.overlaps(boundary, len(encoded.text)))
    return int(predicted[0]) if len(predicted) else encoded.own_end


def _encode_apart(tokenizer: Any, text: str, boundary: int, *, special: bool) -> Encoded:
    """Tokens of the prompt and of the completion by themselves, one after the other."""
    prompt = encode(tokenizer, [text[:boundary]], special=special)[0]
    completion = encode(tokenizer, [text[boundary:]], special=False)[0]
    keep = prompt.own_end
    return Encoded(
        text,
        np.concatenate([prompt.ids[:keep], completion.ids]),
        np.concatenate([prompt.starts[:keep], completion.starts + boundary]),
        np.concatenate([prompt.ends[:keep], completion.ends + boundary]),
        np.concatenate([prompt.added[:keep], completion.added]),
        prompt.names[: int(prompt.added[:keep].sum())],
    )
