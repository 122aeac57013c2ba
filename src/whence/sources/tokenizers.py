"""A model's tokenizer, and whether it is the model's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from whence.errors import ModelError
from whence.libraries import load_library

__all__ = ["check_tokenizer", "load_tokenizer"]

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
    try:
        return transformers.AutoTokenizer.from_pretrained(source, local_files_only=local)
    except Exception as error:  # missing files, wrong files, libraries that a tokenizer needs
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelError(f"the tokenizer in {source} cannot be loaded: {reason}; {REMEDY}") from error


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
