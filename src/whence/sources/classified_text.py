"""Training data for text classifiers: a text and its label."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from whence.errors import DataError
from whence.exhibit import Exhibit
from whence.sources.examples import Examples
from whence.sources.labels import Labels, labels_for
from whence.sources.records import RecordIds, Records, field_of, text_of
from whence.sources.tokens import encode

__all__ = ["ClassifiedTexts"]


class ClassifiedTexts(Examples):
    """Texts with labels, as a sequence classifier reads them. Tokens are held in memory, texts are not.

    Args:
        records: the rows.
        tokenizer: of a Hugging Face model.
        labels: the classes; by default those that the data name.
        text_field, label_field: where the text and the label are.
        max_length: tokens of a text at most: the model's context.
        truncate: cut longer texts instead of refusing them.
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
    ) -> None:
        self.name, self._records, self._tokenizer = records.name, records, tokenizer
        self._text_field = text_field
        self._ids = RecordIds(records)
        tokens, starts = array("i"), array("q", [0])
        values = []
        for row, fields in enumerate(records):
            self._ids.add(row, fields)
            ids = encode(tokenizer, [text_of(records, row, fields, text_field)])[0].ids
            values.append(field_of(records, row, fields, label_field))
            if max_length is not None and len(ids) > max_length:
                if not truncate:
                    raise DataError(
                        f"{records.where(row)} is {len(ids)} tokens long, the limit is {max_length}; shorten it, or "
                        "allow cutting such rows (--truncate)"
                    )
                # Let the tokenizer cut, so that the tokens it adds at the end stay.
                text = fields[text_field]
                ids = tokenizer(text, truncation=True, max_length=max_length, verbose=False)["input_ids"]
            tokens.frombytes(np.asarray(ids, dtype=np.int32).tobytes())
            starts.append(len(tokens))
        self.labels = labels_for(values, labels, records.class_names(label_field))
        numbers = [self.labels.number(value, records.where(row)) for row, value in enumerate(values)]
        self._targets = torch.tensor(numbers)
        self._tokens, self._starts = np.frombuffer(tokens, np.int32), np.frombuffer(starts, np.int64)

    def __len__(self) -> int:
        return len(self._targets)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        index = self._checked(index)
        ids = self._tokens[self._starts[index] : self._starts[index + 1]].astype(np.int64)
        return {
            "input_ids": torch.from_numpy(ids),
            "attention_mask": torch.ones(len(ids), dtype=torch.long),
            "labels": self._targets[index],
        }

    def id(self, index: int) -> str:
        return self._ids[self._checked(index)]

    def find(self, id: str) -> tuple[int, ...]:
        row = self._ids.find(id)
        return () if row is None else (row,)

    def text(self, index: int) -> str:
        return str(self._records[self._checked(index)][self._text_field])

    def texts(self) -> Iterator[str]:
        return (str(fields[self._text_field]) for fields in self._records)

    def exhibit(self, index: int) -> Exhibit:
        index = self._checked(index)
        text = self.text(index)
        count = int(self._starts[index + 1] - self._starts[index])
        return Exhibit(
            id=self.id(index),
            text=text,
            tokens=encode(self._tokenizer, [text])[0].pieces(0, count),
            label=self.labels.names[int(self._targets[index])],
            link=self._records.link(index),
        )
