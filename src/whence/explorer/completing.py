"""`complete`: what a language model says, piece by piece as it says it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from whence.errors import OptionError
from whence.threads import one_at_a_time

__all__ = ["MOST", "complete"]

MOST = 256  # tokens


def complete(
    model: nn.Module, tokenizer: Any, prompt: str, *, limit: int, context: int | None
) -> Iterator[str]:
    """The likeliest next tokens, one after the other, as text.

    Args:
        model: a language model of Hugging Face's kind.
        tokenizer: its own.
        prompt: what it is given.
        limit: tokens at most.
        context: tokens that the model reads at most.
    """
    ids = list(tokenizer(prompt)["input_ids"])
    if ids and ids[-1] == tokenizer.eos_token_id:  # some tokenizers end every text
        ids.pop()
    if not ids:
        raise OptionError("the prompt is empty; type what the model is to go on from")
    if context is not None and len(ids) >= context:
        raise OptionError(f"the prompt has {len(ids):,} tokens, and the model reads {context:,}; shorten it")
    device = next(model.parameters()).device
    start, told = len(ids), ""
    ends = {tokenizer.eos_token_id}
    room = min(limit, MOST, (context or len(ids) + limit) - len(ids))
    for _ in range(room):
        with one_at_a_time, torch.no_grad():
            logits = model(input_ids=torch.tensor([ids], device=device)).logits[0, -1]
        best = int(logits.argmax())
        if best in ends:
            return
        ids.append(best)
        # a character can be several tokens: what is not whole yet ends in the sign of replacement
        whole = tokenizer.decode(ids[start:], clean_up_tokenization_spaces=False)
        before = tokenizer.decode(ids[:start], clean_up_tokenization_spaces=False)
        both = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        text = both[len(before) :] if both.startswith(before) else whole
        if text.endswith("\ufffd"):
            continue
        yield text[len(told) :]
        told = text
