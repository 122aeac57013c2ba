"""A model's tokenizer: whether it is the model's, and texts as tokens with their places in the text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import nn

from whence.errors import ModelError, OptionError
from whence.libraries import load_library
from whence.sources.files import refusing

__all__ = ["Encoded", "check_tokenizer", "decoded_pieces", "encode", "load_tokenizer"]

Integers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
#: Models round their vocabulary up for speed; more rows than this beyond the tokenizer's are another tokenizer's.
SPARE_ROWS = 0.1
#: Files that a tokenizer may consist of.
FILES = ("tokenizer.json", "tokenizer_config.json", "*.model", "vocab.*", "*.tiktoken", "tekken.json")
REMEDY = (
    "put the model's tokenizer files (tokenizer.json, tokenizer_config.json) beside it, or name another directory "
    "(--tokenizer)"
)
#: Ordinary text, with digits, accents and a script without spaces.
PROBE = "The answer is 42; où est la réponse? 答えは"


def load_tokenizer(source: str, *, local: bool = True) -> Any:
    """The tokenizer in a model directory."""
    transformers = load_library("transformers", "hf", "to load a tokenizer")
    if local and not any(path for pattern in FILES for path in Path(source).glob(pattern)):
        # The library would make an empty one for some models.
        raise ModelError(f"{source} has no tokenizer (no tokenizer.json or tokenizer.model); {REMEDY}")
    with refusing(ModelError, f"the tokenizer in {source} cannot be loaded", REMEDY):
        return transformers.AutoTokenizer.from_pretrained(
            source, local_files_only=local, trust_remote_code=False
        )


def check_tokenizer(tokenizer: Any, model: nn.Module) -> None:
    """Raise `ModelError` unless the tokenizer can be the one that the model was trained with."""
    rows = _embedding_rows(model)
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    if not vocabulary:
        raise ModelError("the tokenizer has an empty vocabulary; give the model's own tokenizer")
    largest = max(vocabulary.values())
    if rows is not None and largest >= rows:
        raise ModelError(
            f"the tokenizer does not fit the model: its largest token id is {largest}, the model embeds {rows} "
            "tokens (ids below that); give the model's own tokenizer"
        )
    if rows is not None and rows - len(vocabulary) > SPARE_ROWS * rows:
        raise ModelError(
            f"the tokenizer does not fit the model: it has {len(vocabulary)} tokens, the model embeds {rows}; give "
            "the model's own tokenizer, or say that it is (check_vocabulary=False)"
        )
    ids = tokenizer(PROBE, add_special_tokens=False)["input_ids"]
    unknown = getattr(tokenizer, "unk_token_id", None)
    if not ids or all(token == unknown for token in ids):
        raise ModelError(
            f"the tokenizer turns {PROBE!r} into {'nothing' if not ids else 'unknown tokens only'}; its files are "
            "damaged or belong to another model"
        )


def _embedding_rows(model: nn.Module) -> int | None:
    try:
        embeddings = model.get_input_embeddings()  # type: ignore[operator]  # Hugging Face models have it
    except (AttributeError, NotImplementedError):
        return None
    weight = getattr(embeddings, "weight", None)
    return None if weight is None else int(weight.shape[0])


# --- texts as tokens ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Encoded:
    """A text's tokens and where each stands in the text.

    Attributes:
        text: the text.
        ids: the tokens.
        starts, ends: of each token's characters; ``ends`` never decreases. The bytes of one character may be
            several tokens, which then share it.
        added: the tokens that the tokenizer put around the text, such as BOS.
        names: of the added tokens, in order.
    """

    text: str
    ids: Integers
    starts: Integers
    ends: Integers
    added: Flags
    names: tuple[str, ...]

    @property
    def own_end(self) -> int:
        """Number of tokens without those that the tokenizer added after the text."""
        own = np.flatnonzero(~self.added)
        return int(own[-1]) + 1 if len(own) else len(self.ids)

    def overlaps(self, start: int, end: int) -> Flags:
        """Tokens with a character in ``[start, end)``, and added ones at the text's end if that is the end."""
        inside: Flags = (self.ends > start) & (self.starts < end) & ~self.added
        if end == len(self.text):
            after_text = np.cumsum(~self.added) > 0
            inside |= self.added & after_text
        return inside

    def pieces(self, start: int = 0, stop: int | None = None, *, within: int = 0) -> tuple[str, ...]:
        """The strings of tokens ``start`` to ``stop``; joined, they are the text between.

        A character whose bytes are several tokens is shown at the first of them. Added tokens are shown by
        name. No piece reaches before the character ``within``.
        """
        stop = len(self.ids) if stop is None else stop
        befores = np.concatenate([[0], self.ends[:-1]])
        names = iter(self.names[int(self.added[:start].sum()) :])
        return tuple(
            next(names) if self.added[i] else self.text[max(int(befores[i]), within) : int(self.ends[i])]
            for i in range(start, stop)
        )

    def cut(self, length: int, *, side: str = "right") -> Encoded:
        """As many of the text's tokens as fit between the added ones, and their part of the text.

        Args:
            length: tokens of the result, with the added ones.
            side: where tokens are dropped, ``right`` or ``left``: a tokenizer's ``truncation_side``.
        """
        own = np.flatnonzero(~self.added)
        room = length - int(self.added.sum())
        if room < 1:
            raise OptionError(
                f"a limit of {length} tokens leaves no room for text: the tokenizer adds {length - room} of its own; "
                "raise the limit (--max-length)"
            )
        own = own[-room:] if side == "left" else own[:room]
        kept = np.union1d(own, np.flatnonzero(self.added))
        before = int(self.ends[own[0] - 1]) if own[0] else 0
        # Bytes of one character may be parted by the cut; it is shown whole.
        first, last = min(before, int(self.starts[own[0]])), int(self.ends[own[-1]])
        starts, ends = (np.clip(places[kept] - first, 0, last - first) for places in (self.starts, self.ends))
        return Encoded(self.text[first:last], self.ids[kept], starts, ends, self.added[kept], self.names)


def encode(tokenizer: Any, texts: Sequence[str], *, special: bool = True) -> list[Encoded]:
    """Tokenize texts, with the tokens that the tokenizer itself adds if ``special``."""
    if not getattr(tokenizer, "is_fast", False):
        return [_encode_by_decoding(tokenizer, text, special) for text in texts]
    output = tokenizer(
        list(texts),
        add_special_tokens=special,
        return_offsets_mapping=True,
        return_special_tokens_mask=True,
        return_attention_mask=False,
        truncation=False,
        padding=False,
        verbose=False,  # texts longer than the model's context are cut later on
    )
    encoded = []
    for text, ids, spans, mask in zip(
        texts, output["input_ids"], output["offset_mapping"], output["special_tokens_mask"], strict=True
    ):
        offsets = np.asarray(spans, dtype=np.int64).reshape(-1, 2)
        # A token that is written out in the text is special too, but has characters of its own.
        added = (np.asarray(mask, dtype=np.int64) == 1) & (offsets[:, 0] == offsets[:, 1])
        encoded.append(_encoded(tokenizer, text, ids, offsets[:, 0], offsets[:, 1], added))
    return encoded


def decoded_pieces(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """The string of each token, found by decoding: what it adds to the tokens before it.

    Tokens that end inside a character add nothing; the token that completes it adds the character.
    """

    def decode(part: Sequence[int]) -> str:
        text = tokenizer.decode(list(part), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return str(text)

    pieces: list[str] = []
    context = shown = 0  # decode from `context`; tokens before `shown` are in pieces already
    for position in range(len(ids)):
        known, text = decode(ids[context:shown]), decode(ids[context : position + 1])
        if text.endswith("\ufffd") and position + 1 < len(ids):
            pieces.append("")
            continue
        pieces.append(text[len(known) :])
        context, shown = shown, position + 1
    return pieces


def _encode_by_decoding(tokenizer: Any, text: str, special: bool) -> Encoded:
    """For tokenizers written in Python, which do not tell where their tokens come from."""
    inner = list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    ids, before = inner, 0
    if special:
        ids = list(tokenizer(text, add_special_tokens=True, verbose=False)["input_ids"])
        positions = range(len(ids) - len(inner) + 1)
        before = next((i for i in positions if ids[i : i + len(inner)] == inner), -1)
    pieces = decoded_pieces(tokenizer, inner)
    if before < 0 or "".join(pieces) != text:
        raise ModelError(
            f"the tokenizer {type(tokenizer).__name__} does not say where its tokens stand in the text, and "
            f"decoding {text[:40]!r} does not give it back; use a fast tokenizer (one with a tokenizer.json)"
        )
    ends = np.cumsum([len(piece) for piece in pieces], dtype=np.int64)
    starts = np.concatenate([[0], ends[:-1]])[: len(ends)]
    after = len(ids) - before - len(inner)
    added = np.array([True] * before + [False] * len(inner) + [True] * after, dtype=np.bool_)
    padding = ((before, after),)
    return _encoded(tokenizer, text, ids, np.pad(starts, padding), np.pad(ends, padding), added)


def _encoded(
    tokenizer: Any, text: str, ids: Sequence[int], starts: Integers, ends: Integers, added: Flags
) -> Encoded:
    ends = np.maximum.accumulate(ends) if len(ends) else ends
    own = np.flatnonzero(~added)
    if len(own):
        ends[own[-1] :] = len(text)  # white space that the tokenizer dropped at the end
    names = tokenizer.convert_ids_to_tokens([ids[i] for i in np.flatnonzero(added).tolist()])
    return Encoded(text, np.asarray(ids, dtype=np.int64), starts, ends, added, tuple(map(str, names)))
