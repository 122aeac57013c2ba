"""Python's language reference as training data.

`pydoc_data.topics` comes with every CPython: 79 documents of the language reference. They are cut into passages
of whole sentences, each within one topic, so that "which training example is behind this answer" has an answer
that a reader can check.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor

__all__ = ["START", "VOCABULARY", "Passage", "corpus", "passages", "train_tokenizer"]

VOCABULARY = 1500
LONGEST = 80  # tokens of a passage, the start token included
#: Every passage and every prompt begins with it, so that the first word is predicted too.
START = "<|start|>"

_UNDERLINE = re.compile(r"\s*([*=~^-])\1{2,}\s*")
_SENTENCE_END = re.compile(r"(?<=[.:;])\s+")


@dataclass(frozen=True)
class Passage:
    """Some sentences of one topic, named ``topic[k]``; ``input_ids`` begin with the start token."""

    name: str
    topic: str
    text: str
    input_ids: Tensor


def corpus() -> dict[str, list[str]]:
    """The paragraphs of every topic, each on one line, without underlines.

    A fifth of the reference is there twice: `compound` holds `with`, `try` and `for`, and so on. A repeated
    paragraph stays only in the shortest of its topics, so that every passage has one topic.
    """
    paragraphs = {topic: list(dict.fromkeys(_paragraphs(text))) for topic, text in sorted(topics.items())}
    size = {topic: sum(map(len, texts)) for topic, texts in paragraphs.items()}
    owner: dict[str, str] = {}
    for topic in sorted(size, key=lambda topic: (size[topic], topic)):
        for paragraph in paragraphs[topic]:
            owner.setdefault(paragraph, topic)
    return {topic: [p for p in texts if owner[p] == topic] for topic, texts in paragraphs.items()}


def _paragraphs(text: str) -> Iterator[str]:
    for block in text.split("\n\n"):
        lines = [line for line in block.splitlines() if not _UNDERLINE.fullmatch(line)]
        paragraph = " ".join(" ".join(lines).split())
        if paragraph:
            yield paragraph


def train_tokenizer(documents: Mapping[str, Sequence[str]]) -> Any:
    """A byte-level BPE tokenizer of the corpus; `START` is token 0."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[START],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["\n".join(texts) for texts in documents.values()], trainer)
    return tokenizer


def passages(documents: Mapping[str, Sequence[str]], tokenizer: Any) -> list[Passage]:
    """Every topic, cut into passages of as many whole sentences as fit into `LONGEST` tokens."""
    result = []
    for topic, paragraphs in documents.items():
        for k, ids in enumerate(_pack(paragraphs, tokenizer, LONGEST - 1)):
            tokens = torch.tensor([tokenizer.token_to_id(START), *ids])
            result.append(Passage(f"{topic}[{k}]", topic, tokenizer.decode(ids), tokens))
    return result


def _pack(paragraphs: Sequence[str], tokenizer: Any, room: int) -> Iterator[list[int]]:
    current: list[int] = []
    for paragraph in paragraphs:
        for position, sentence in enumerate(_SENTENCE_END.split(paragraph)):
            separator = "" if not current else " " if position else "\n"
            ids = tokenizer.encode(separator + sentence).ids
            if len(current) + len(ids) > room:
                if current:
                    yield current
                current, ids = [], tokenizer.encode(sentence).ids
            while len(ids) > room:  # a sentence that is too long by itself, such as a grammar or a listing
                yield ids[:room]
                ids = ids[room:]
            current = current + ids
    if current:
        yield current
