"""Training data for language models: documents cut into passages, prompts with completions, chats."""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch

from whence.errors import DataError, OptionError
from whence.exhibit import Exhibit
from whence.sources.documents import Document, layout_of, read_document
from whence.sources.examples import Examples
from whence.sources.records import RecordIds, Records
from whence.sources.tokens import Encoded, encode
from whence.tasks.categorical import IGNORED

__all__ = ["Passages"]

#: Documents given to the tokenizer at once.
CHUNK = 64


class Passages(Examples):
    """Language-modelling examples from rows of text. Tokens are held in memory, texts are not.

    A row with ``text`` is a document: it is tokenized once, with the tokens that the tokenizer adds (BOS),
    and cut into passages of at most ``max_length`` tokens, ``id[0]``, ``id[1]``, …; a single token left over
    at the end is dropped, as it predicts nothing. A row with ``prompt`` and ``completion`` is one example
    whose prompt is not predicted; prompt and completion are tokenized as one text, and a token with
    characters of both belongs to the completion. A row with ``messages`` is a chat, laid out by the
    tokenizer's template and predicted where the assistant speaks.

    Args:
        records: the rows.
        tokenizer: of a Hugging Face model.
        max_length: tokens of an example at most; None for no limit.
        text_field: the field that holds a document; by default ``text``.
        truncate: cut prompts with completions and chats at ``max_length`` instead of refusing long ones.
        skip_empty: leave out rows without text or with nothing to predict instead of refusing them; their
            number is ``skipped``.
    """

    def __init__(
        self,
        records: Records,
        tokenizer: Any,
        *,
        max_length: int | None = None,
        text_field: str | None = None,
        truncate: bool = False,
        skip_empty: bool = False,
    ) -> None:
        if max_length is not None and max_length < 2:
            raise OptionError(
                f"max_length is {max_length}; a passage needs at least 2 tokens, one to predict"
            )
        self.name, self.skipped = records.name, 0
        self._records, self._tokenizer = records, tokenizer
        self._max_length, self._text_field = max_length, text_field
        self._truncate, self._skip_empty = truncate, skip_empty
        self._layout = layout_of(records, text_field)
        self._ids = RecordIds(records)
        tokens, predicted = array("i"), array("b")
        starts, chars = array("q", [0]), array("q")  # of each passage: first token; first and last character
        firsts, rows = array("q", [0]), array("q")  # of each document: first passage, row
        for row, document, encoded in self._encoded():
            bounds = self._bounds(row, document, encoded)
            if not bounds:
                self.skipped += 1
                continue
            begin, end = bounds[0][0], bounds[-1][1]
            tokens.frombytes(encoded.ids[begin:end].astype(np.int32).tobytes())
            if document.predicted is not None:
                predicted.frombytes(_predicted(document, encoded)[begin:end].astype(np.int8).tobytes())
            for first, last in bounds:
                starts.append(starts[-1] + last - first)
                chars.extend([int(encoded.ends[first - 1]) if first else 0, int(encoded.ends[last - 1])])
            firsts.append(firsts[-1] + len(bounds))
            rows.append(row)
        if not rows:
            raise DataError(
                f"no row of {records.name} has text to learn from; all {self.skipped} were left out"
            )
        self._tokens = np.frombuffer(tokens, dtype=np.int32)
        self._predicted = np.frombuffer(predicted, dtype=np.int8) if predicted else None
        self._starts, self._chars = (
            np.frombuffer(starts, np.int64),
            np.frombuffer(chars, np.int64).reshape(-1, 2),
        )
        self._firsts, self._rows = np.frombuffer(firsts, np.int64), np.frombuffer(rows, np.int64)
        self._last: tuple[int, Encoded] | None = (
            None  # the document shown last: its other passages may follow
        )

    # --- building ----------------------------------------------------------------------------------------

    def _documents(self) -> Iterator[tuple[int, Document]]:
        for row, fields in enumerate(self._records):
            self._ids.add(row, fields)
            if self._skip_empty and not self._has_text(fields):
                self.skipped += 1
                continue
            yield row, self._read(row, fields)

    def _has_text(self, fields: Any) -> bool:
        names = {"pair": "completion", "messages": "messages"}
        value = fields.get(names.get(self._layout, self._text_field or "text"))
        return value is not None and bool(value.strip() if isinstance(value, str) else value)

    def _read(self, row: int, fields: Any) -> Document:
        return read_document(
            self._records, row, fields, self._layout, tokenizer=self._tokenizer, text_field=self._text_field
        )

    def _encoded(self) -> Iterator[tuple[int, Document, Encoded]]:
        documents = self._documents()
        while chunk := list(islice(documents, CHUNK)):
            texts, special = [document.text for _, document in chunk], chunk[0][1].special
            for (row, document), encoded in zip(
                chunk, encode(self._tokenizer, texts, special=special), strict=True
            ):
                yield row, document, encoded

    def _bounds(self, row: int, document: Document, encoded: Encoded) -> list[tuple[int, int]]:
        """Where the document is cut: first and last token of each passage. None if there is nothing to learn."""
        length, limit = len(encoded.ids), self._max_length
        if document.predicted is None:
            size = length if limit is None else limit
            cuts = [(first, min(first + size, length)) for first in range(0, length - 1, max(size, 1))]
        else:
            if limit is not None and length > limit and not self._truncate:
                raise DataError(
                    f"{self._records.where(row)} is {length} tokens long, the limit is {limit}; shorten it, raise "
                    "the limit (--max-length), or allow cutting such rows (--truncate)"
                )
            end = length if limit is None else min(length, limit)
            cuts = [(0, end)] if _predicted(document, encoded)[1:end].any() else []
        if not cuts and not self._skip_empty:
            raise DataError(
                f"{self._records.where(row)} has {length} token{'s' * (length != 1)} and none to predict after "
                "the first; remove it, or leave such rows out (--skip-empty)"
            )
        return cuts

    # --- as data -----------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._chars)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        first, last = self._token_range(index)
        ids = torch.from_numpy(self._tokens[first:last].astype(np.int64))
        if self._predicted is None:
            return {"input_ids": ids, "labels": ids.clone()}
        predicted = torch.from_numpy(self._predicted[first:last] != 0)
        return {"input_ids": ids, "labels": ids.masked_fill(~predicted, IGNORED)}

    @property
    def num_tokens(self) -> int:
        """Tokens of all examples together."""
        return len(self._tokens)

    def _token_range(self, index: int) -> tuple[int, int]:
        index = self._checked(index)
        return int(self._starts[index]), int(self._starts[index + 1])

    def _document_of(self, index: int) -> tuple[int, int, int]:
        """The document of a passage, the passage's number in it, and how many it has."""
        index = self._checked(index)
        document = int(np.searchsorted(self._firsts, index, side="right")) - 1
        first, end = int(self._firsts[document]), int(self._firsts[document + 1])
        return document, index - first, end - first

    # --- to be shown and searched ------------------------------------------------------------------------

    def id(self, index: int) -> str:
        document, number, count = self._document_of(index)
        id = self._ids[int(self._rows[document])]
        return id if count == 1 else f"{id}[{number}]"

    def find(self, id: str) -> tuple[int, ...]:
        positions = self._passages_of(self._ids.find(id))
        numbered = re.fullmatch(r"(.*)\[(\d+)\]", id, flags=re.DOTALL)
        if not positions and numbered is not None:
            passages = self._passages_of(self._ids.find(numbered[1]))
            return tuple(passages[int(numbered[2]) : int(numbered[2]) + 1]) if len(passages) > 1 else ()
        return tuple(positions)

    def _passages_of(self, row: int | None) -> range:
        if row is None:
            return range(0)
        document = int(np.searchsorted(self._rows, row))
        if document == len(self._rows) or self._rows[document] != row:
            return range(0)  # the row was left out
        return range(int(self._firsts[document]), int(self._firsts[document + 1]))

    def text(self, index: int) -> str:
        index = self._checked(index)
        document, _, _ = self._document_of(index)
        row = int(self._rows[document])
        return self._slice(index, self._read(row, self._records[row]).text)

    def texts(self) -> Iterator[str]:
        document = 0
        for row, fields in enumerate(self._records):
            if document < len(self._rows) and self._rows[document] == row:
                text = self._read(row, fields).text
                for index in range(int(self._firsts[document]), int(self._firsts[document + 1])):
                    yield self._slice(index, text)
                document += 1

    def _slice(self, index: int, text: str) -> str:
        """The passage's part of its document's text."""
        start, end = self._chars[index].tolist()
        return text[start:end]

    def exhibit(self, index: int) -> Exhibit:
        index = self._checked(index)
        document, number, _ = self._document_of(index)
        row = int(self._rows[document])
        if self._last is None or self._last[0] != row:
            read = self._read(row, self._records[row])
            self._last = row, encode(self._tokenizer, [read.text], special=read.special)[0]
        encoded = self._last[1]
        first, last = self._token_range(index)
        begin = first - int(self._starts[index - number])
        link = self._records.link(row)
        return Exhibit(
            id=self.id(index),
            text=self._slice(index, encoded.text),
            tokens=encoded.pieces(begin, begin + last - first),
            link=link,
        )


def _predicted(document: Document, encoded: Encoded) -> Any:
    flags = np.zeros(len(encoded.ids), dtype=np.bool_)
    for start, end in document.predicted or ():
        flags |= encoded.overlaps(start, end)
    return flags
