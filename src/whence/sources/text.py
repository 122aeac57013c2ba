"""Training data in words: documents, prompts with completions and chats for language models; texts with labels."""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from whence.errors import DataError, OptionError
from whence.exhibit import Exhibit
from whence.sources.examples import Examples, LabelledRows, nothing_left
from whence.sources.files import refusing
from whence.sources.labels import Labels
from whence.sources.records import RecordIds, Records, Row, shown
from whence.sources.tokenizers import Encoded, encode
from whence.tasks.categorical import IGNORED

__all__ = ["ClassifiedTexts", "Document", "DocumentReader", "Passages"]

#: Documents given to the tokenizer at once.
CHUNK = 64


@dataclass(frozen=True)
class Document:
    """What a row says to a language model.

    Attributes:
        text: the whole text.
        predicted: the character ranges in it that the model learns to predict; None for all of it.
    """

    text: str
    predicted: tuple[tuple[int, int], ...] | None = None


class DocumentReader:
    """Reads rows as documents; the fields of the first one say how all are written.

    Attributes:
        layout: how the rows are written: a text, a prompt with its completion, or a list of chat messages.
        text_field: where a text is.
        special: whether the tokenizer puts its own tokens around a document; a chat template has done so already.
    """

    def __init__(self, records: Records, tokenizer: Any, text_field: str | None) -> None:
        first = records[0].fields
        self.layout: Literal["text", "pair", "messages"] = "text"
        self._tokenizer, self.text_field = tokenizer, text_field or "text"
        if text_field is None and "messages" in first:
            self.layout = "messages"
        # One of the two without the other is a row that lacks a field, and is said to be.
        elif text_field is None and "text" not in first and ("prompt" in first or "completion" in first):
            self.layout = "pair"
        self.special = self.layout != "messages"

    def has_text(self, row: Row) -> bool:
        """Whether the row holds anything to learn from."""
        fields = {"text": self.text_field, "pair": "completion", "messages": "messages"}
        return not row.is_empty(fields[self.layout])

    def read(self, row: Row) -> Document:
        """The row's document, or a `DataError` that names the row and field."""
        if self.layout == "messages":
            return self._chat(row)
        if self.layout == "pair":
            prompt, completion = row.text("prompt", may_be_empty=True), row.text("completion")
            return Document(prompt + completion, ((len(prompt), len(prompt) + len(completion)),))
        return Document(row.text(self.text_field))

    def encode(self, *documents: Document) -> list[Encoded]:
        """The documents' tokens."""
        return encode(self._tokenizer, [document.text for document in documents], special=self.special)

    def _chat(self, row: Row) -> Document:
        if not getattr(self._tokenizer, "chat_template", None):
            raise OptionError(
                f"{row.where} holds chat messages, but the tokenizer has no chat template; give the "
                "conversation as 'text' or as 'prompt' and 'completion'"
            )
        messages = _messages(row)
        whole = self._rendered(row, messages)
        spans = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._rendered(row, messages[:number], answer_next=True) if number else ""
            through = self._rendered(row, messages[: number + 1])
            if not (whole.startswith(through) and through.startswith(before)):
                raise DataError(
                    f"{row.where}: the chat template rewrites earlier messages, so where message "
                    f"{number + 1} stands cannot be told; give the conversation as 'prompt' and 'completion'"
                )
            spans.append((len(before), len(through)))
        if not spans:
            raise DataError(
                f"{row.where}: no message of 'messages' has the role 'assistant', so nothing is "
                "predicted; give a conversation with an answer"
            )
        return Document(whole, tuple(spans))

    def _rendered(self, row: Row, messages: list[dict[str, str]], *, answer_next: bool = False) -> str:
        # The template complains of roles that do not alternate, for instance.
        with refusing(DataError, f"{row.where}: the chat template refuses the messages", "repair the row"):
            template = self._tokenizer.apply_chat_template
            return str(template(messages, tokenize=False, add_generation_prompt=answer_next))


def _messages(row: Row) -> list[dict[str, str]]:
    messages = row.value("messages")
    wrong = [messages]
    if isinstance(messages, (list, tuple)) and messages:
        wrong = [message for message in messages if not _is_message(message)]
    if wrong:
        raise DataError(
            f"{row.where}: 'messages' holds {shown(wrong[0])}; give a list of objects with the texts 'role' and "
            "'content'"
        )
    return [{"role": message["role"], "content": message["content"]} for message in messages]


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(value.get(key), str) for key in ("role", "content"))


class _Lists:
    """Lists of integers of an `array`'s ``kind``, end to end; ``starts`` says where each begins."""

    def __init__(self, kind: str) -> None:
        self._values, self.starts = array(kind), array("q", [0])

    def append(self, values: npt.NDArray[Any]) -> None:
        self._values.frombytes(values.astype(self._values.typecode).tobytes())
        self.starts.append(len(self._values))

    def __getitem__(self, index: int) -> torch.Tensor:
        values = np.frombuffer(self._values, self._values.typecode)
        return torch.from_numpy(values[self.starts[index] : self.starts[index + 1]].astype(np.int64))


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
        self._records, self._ids = records, RecordIds(records)
        self._reader = DocumentReader(records, tokenizer, text_field)
        self._max_length, self._truncate, self._skip_empty = max_length, truncate, skip_empty
        # Of a passage: its tokens; which of them are predicted; its characters in the row's text; its row.
        self._tokens, self._predicted = _Lists("i"), _Lists("b")
        chars, rows = array("q"), array("q")
        for number, document, encoded in self._encoded():
            flags = None if document.predicted is None else _predicted(document.predicted, encoded)
            cuts = self._cuts(number, flags, len(encoded.ids))
            self.skipped += not cuts
            for first, last in cuts:
                self._tokens.append(encoded.ids[first:last])
                if flags is not None:
                    self._predicted.append(flags[first:last])
                chars.extend([int(encoded.ends[first - 1]) if first else 0, int(encoded.ends[last - 1])])
                rows.append(number)
        if not rows:
            raise nothing_left(self.name, self.skipped)
        self._chars = np.frombuffer(chars, np.int64).reshape(-1, 2)
        self._rows = np.frombuffer(rows, np.int64)
        self._shown: tuple[int, Encoded] | None = None  # the row shown last: its other passages may follow

    def _encoded(self) -> Iterator[tuple[int, Document, Encoded]]:
        documents = self._documents()
        while chunk := list(islice(documents, CHUNK)):
            encoded = self._reader.encode(*(document for _, document in chunk))
            for (number, document), tokens in zip(chunk, encoded, strict=True):
                yield number, document, tokens

    def _documents(self) -> Iterator[tuple[int, Document]]:
        for number, row in self._ids.read():
            if self._skip_empty and not self._reader.has_text(row):
                self.skipped += 1
            else:
                yield number, self._reader.read(row)

    def _cuts(
        self, number: int, predicted: npt.NDArray[np.bool_] | None, length: int
    ) -> list[tuple[int, int]]:
        """Where a document is cut: first and last token of each passage. Empty if there is nothing to learn."""
        limit = length if self._max_length is None else self._max_length
        if predicted is None:
            cuts = [(first, min(first + limit, length)) for first in range(0, length - 1, max(limit, 1))]
        else:
            if length > limit and not self._truncate:
                raise DataError(
                    f"{self._records[number].where} is {length} tokens long, the limit is {limit}; shorten it, "
                    "raise the limit (--max-length), or allow cutting such rows (--truncate)"
                )
            end = min(length, limit)
            cuts = [(0, end)] if predicted[1:end].any() else []
        if not cuts and not self._skip_empty:
            raise DataError(
                f"{self._records[number].where} has {length} token{'s' * (length != 1)} and none to predict "
                "after the first; remove it, or leave such rows out (--skip-empty)"
            )
        return cuts

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        index = self._checked(index)
        ids = self._tokens[index]
        if self._reader.layout == "text":
            return {"input_ids": ids, "labels": ids.clone()}
        return {"input_ids": ids, "labels": ids.masked_fill(self._predicted[index] == 0, IGNORED)}

    def _passages_of(self, number: int | None) -> range:
        """The passages of a row; none if it was left out, or is None."""
        if number is None:
            return range(0)
        return range(*(int(np.searchsorted(self._rows, number, side)) for side in ("left", "right")))

    def id(self, index: int) -> str:
        index = self._checked(index)
        passages = self._passages_of(int(self._rows[index]))
        id = self._ids[int(self._rows[index])]
        return id if len(passages) == 1 else f"{id}[{index - passages.start}]"

    def find(self, id: str) -> tuple[int, ...]:
        found = self._passages_of(self._ids.find(id))
        numbered = re.fullmatch(r"(.*)\[(\d+)\]", id, flags=re.DOTALL)
        if not found and numbered is not None:
            passages = self._passages_of(self._ids.find(numbered[1]))
            found = passages[int(numbered[2]) : int(numbered[2]) + 1] if len(passages) > 1 else found
        return tuple(found)

    def column(self, name: str) -> list[Any]:
        found = [row.fields.get(name) for row in self._records]
        if name == "id" and all(value is None for value in found):
            return [self._ids[number] for number in self._rows.tolist()]
        if all(value is None for value in found):
            return super().column(name)
        return [found[number] for number in self._rows.tolist()]

    def texts(self) -> Iterator[str]:
        for number, row in enumerate(self._records):
            if passages := self._passages_of(number):
                text = self._reader.read(row).text
                yield from (self._slice(index, text) for index in passages)

    def _slice(self, index: int, text: str) -> str:
        """The passage's part of its document's text."""
        start, end = self._chars[index].tolist()
        return text[start:end]

    def exhibit(self, index: int) -> Exhibit:
        index = self._checked(index)
        number = int(self._rows[index])
        row = self._records[number]
        if self._shown is None or self._shown[0] != number:
            self._shown = number, self._reader.encode(self._reader.read(row))[0]
        encoded = self._shown[1]
        starts, first = self._tokens.starts, self._passages_of(number).start
        return Exhibit(
            id=self.id(index),
            text=self._slice(index, encoded.text),
            tokens=encoded.pieces(starts[index] - starts[first], starts[index + 1] - starts[first]),
            link=row.link,
        )


def _predicted(spans: Sequence[tuple[int, int]], encoded: Encoded) -> npt.NDArray[np.bool_]:
    """Which tokens have a character in one of the spans."""
    flags = np.zeros(len(encoded.ids), dtype=np.bool_)
    for start, end in spans:
        flags |= encoded.overlaps(start, end)
    return flags


class ClassifiedTexts(LabelledRows):
    """Texts with labels, as a sequence classifier reads them. Tokens are held in memory, texts are not.

    Args:
        records: the rows.
        tokenizer: of a Hugging Face model.
        labels: the classes; by default those that the data name.
        text_field, label_field: where the text and the label are.
        max_length: tokens of a text at most: the model's context.
        truncate: cut longer texts instead of refusing them.
        skip_empty: leave out rows without text instead of refusing them; their number is ``skipped``.
    """

    def __init__(
        self,
        records: Records,
        tokenizer: Any,
        *,
        labels: Labels | None = None,
        text_field: str = "text",
        label_field: str = "label",
        max_length: int | None = None,
        truncate: bool = False,
        skip_empty: bool = False,
    ) -> None:
        needed = text_field if skip_empty else None
        super().__init__(records, labels=labels, label_field=label_field, needed=needed)
        self._tokenizer, self._text_field = tokenizer, text_field
        self._max_length, self._truncate = max_length, truncate
        self._tokens = _Lists("i")
        for row in self._rows():
            self._tokens.append(self._encoded(row).ids)

    def _encoded(self, row: Row) -> Encoded:
        """What the model sees of a row."""
        encoded, limit = encode(self._tokenizer, [row.text(self._text_field)])[0], self._max_length
        if limit is None or len(encoded.ids) <= limit:
            return encoded
        if not self._truncate:
            raise DataError(
                f"{row.where} is {len(encoded.ids)} tokens long, the limit is {limit}; shorten it, or allow cutting "
                "such rows (--truncate)"
            )
        return encoded.cut(limit, side=getattr(self._tokenizer, "truncation_side", "right"))

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        index = self._checked(index)
        ids = self._tokens[index]
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": self.targets[index]}

    def texts(self) -> Iterator[str]:
        if not self._truncate:  # then all are whole
            return (row.text(self._text_field) for row in self._rows())
        return (self._encoded(row).text for row in self._rows())

    def exhibit(self, index: int) -> Exhibit:
        index = self._checked(index)
        row = self._row(index)
        encoded = self._encoded(row)
        return Exhibit(
            id=self.id(index),
            text=encoded.text,
            tokens=encoded.pieces(),
            label=self.label(index),
            link=row.link,
        )
