"""Causal language modelling: one term per predicted token."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from whence.errors import DataError, ModelError
from whence.tasks.base import Batch, accepts, read_outputs, without_cache
from whence.tasks.categorical import IGNORED, CategoricalTask

__all__ = ["LanguageModeling", "token_ids"]

#: Outputs may differ by this part of their spread for other reasons than seeing later tokens.
_SAME = 1e-3


class LanguageModeling(CategoricalTask):
    """Next-token cross-entropy: logits ``[n, L, V]``; position ``j`` predicts token ``j + 1``.

    Examples are dicts with ``input_ids``, and optionally ``attention_mask`` and ``labels`` (-100 where a
    token is not predicted; by default all but the first are), or plain sequences of token ids. Sequences of
    different lengths are padded on the right. As in Hugging Face models, ``labels`` are *not* shifted: the
    task shifts them. A model that sees later tokens is refused.

    Args:
        label_smoothing: ε, what of a label's weight is spread evenly over the vocabulary.

    Example:
        >>> task = LanguageModeling()
        >>> query = task.query(prompt=[5, 6, 7], completion=[8, 9])
        >>> query["labels"].tolist()
        [-100, -100, -100, 8, 9]
        >>> task.count_terms(query)
        2
    """

    terms_per_example = None

    def query(self, prompt: Sequence[int] | Tensor, completion: Sequence[int] | Tensor) -> dict[str, Tensor]:
        """An example that asks for ``completion`` after ``prompt``.

        Its `query_losses` is ``-(1/c) Σ_j log p(completion_j | prompt, completion_<j)``.
        """
        prompt_ids, completion_ids = token_ids(prompt).long(), token_ids(completion).long()
        if prompt_ids.numel() == 0 or completion_ids.numel() == 0:
            raise DataError(
                f"a query needs at least one prompt token and one completion token, got "
                f"{prompt_ids.numel()} and {completion_ids.numel()}; start the prompt with the model's BOS"
            )
        return {
            "input_ids": torch.cat([prompt_ids, completion_ids]),
            "labels": torch.cat([torch.full_like(prompt_ids, IGNORED), completion_ids]),
        }

    def contrasting(self, example: Any, other: Any) -> Any:
        """The example's prompt with other tokens after it; a dict is taken as it is."""
        if isinstance(other, Mapping):
            return other
        fields = self._as_fields(example)
        ids = torch.as_tensor(fields["input_ids"]).long()
        labels = torch.as_tensor(fields.get("labels", ids))
        first = int((labels != IGNORED).long().argmax())
        if first == 0 or not set(fields) <= {"input_ids", "labels", "attention_mask"}:
            raise DataError(
                "a query is compared with another completion of its prompt, and this one has no prompt, or fields "
                f"beside its tokens ({sorted(fields)}); give the contrast as an example of its own"
            )
        made = self.query(ids[:first], other)
        return made | (
            {"attention_mask": torch.ones_like(made["input_ids"])} if "attention_mask" in fields else {}
        )

    def collate(self, examples: Sequence[Any]) -> Batch:
        return super().collate([self._as_fields(example) for example in examples])

    def assemble(self, columns: Mapping[str, Tensor] | Sequence[Any]) -> Batch:
        if not isinstance(columns, Mapping):
            raise DataError(
                "a language-modelling example must be a dict with 'input_ids' or a sequence of token ids, "
                "not (x, y): whether y is shifted already cannot be told"
            )
        inputs = {name: t if t.is_floating_point() else t.long() for name, t in columns.items()}
        for name in ("labels", "attention_mask"):
            if name in inputs and inputs[name].shape != inputs["input_ids"].shape:
                raise DataError(
                    f"{name!r} has shape {tuple(inputs[name].shape)} beside 'input_ids' of shape "
                    f"{tuple(inputs['input_ids'].shape)}; they must be equally long in every example"
                )
        labels = inputs.pop("labels", inputs["input_ids"])
        if "attention_mask" in inputs:
            labels = labels.masked_fill(inputs["attention_mask"] == 0, IGNORED)
        targets = torch.full_like(labels, IGNORED)
        targets[:, :-1] = labels[:, 1:]
        if "attention_mask" in inputs:  # a padding position predicts nothing, on whichever side it is
            targets.masked_fill_(inputs["attention_mask"] == 0, IGNORED)
        return Batch((), inputs, targets)

    def count_terms(self, example: Any) -> int:
        fields = self._as_fields(example)
        labels = torch.as_tensor(fields.get("labels", fields["input_ids"]))[1:]
        kept = labels != IGNORED
        if "attention_mask" in fields:
            mask = torch.as_tensor(fields["attention_mask"]) != 0
            kept &= mask[1:] & mask[:-1]
        return int(kept.sum())

    def outputs(self, model: nn.Module, batch: Batch) -> Tensor:
        inputs = dict(batch.kwargs)
        # Padding is on the right, where a causal model never looks, so a model without a mask needs none.
        if "attention_mask" in inputs and not accepts(model, "attention_mask"):
            del inputs["attention_mask"]
        inputs = without_cache(model, inputs)
        if not accepts(model, "input_ids"):
            return read_outputs(model(inputs.pop("input_ids"), **inputs))
        return read_outputs(model(**inputs))

    def check_model(self, run: Callable[[Batch], Tensor], outputs: Tensor, batch: Batch) -> None:
        """Refuse a model that sees the token it is asked to predict: change the last one, and look before it."""
        tokens = batch.kwargs["input_ids"].clone()
        real = batch.kwargs.get("attention_mask", torch.ones_like(tokens)) != 0
        last = tokens.shape[1] - 1 - real.long().flip(1).argmax(1)
        rows = torch.arange(len(tokens), device=tokens.device)
        tokens[rows, last] = torch.where(tokens[rows, last] > 0, 0, 1)
        changed = run(replace(batch, kwargs={**batch.kwargs, "input_ids": tokens}))
        places = torch.arange(tokens.shape[1], device=tokens.device)
        before = (places < last.unsqueeze(1)) & (batch.targets != IGNORED)
        moved = (changed - outputs)[before].abs()
        if moved.numel() and float(moved.max()) > _SAME * float(outputs[before].float().std()):
            raise ModelError(
                "the model is no causal language model: what it says at a token depends on later ones, so it has seen "
                "what LanguageModeling asks for. Use MaskedLanguageModeling for a masked language model (BERT), "
                "TokenClassification for labels of tokens"
            )

    @staticmethod
    def _as_fields(example: Any) -> Mapping[str, Any]:
        if isinstance(example, Mapping):
            if "input_ids" not in example:
                raise DataError(f"an example has the fields {sorted(example)} but no 'input_ids'")
            return example
        return {"input_ids": token_ids(example)}


def token_ids(value: Any) -> Tensor:
    """A 1-D tensor of integers, or a `DataError`."""
    try:
        ids = None if isinstance(value, (tuple, str)) else torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        ids = None
    if ids is not None and ids.numel() == 0:
        return ids.reshape(-1).long()
    if ids is None or ids.ndim != 1 or ids.is_floating_point():
        raise DataError(
            "a language-modelling example must be a dict with 'input_ids' or a sequence of token ids, "
            f"got a {type(value).__name__}; tokenize text first"
        )
    return ids
