"""A label at some positions of a sequence: token classification, and masked language modelling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from whence.errors import DataError
from whence.tasks.base import Batch
from whence.tasks.categorical import IGNORED, CategoricalTask

__all__ = ["MaskedLanguageModeling", "TokenClassification"]


class TokenClassification(CategoricalTask):
    """Cross-entropy at every labelled token: logits ``[n, L, K]``, labels ``[n, L]``, position j's belongs to token j.

    Examples are dicts with ``input_ids`` and ``labels`` of the same length (-100 where a token has none), or pairs
    ``(x, y)`` of one length. Sequences of different lengths are padded on the right.

    Args:
        label_smoothing: ε, what of a label's weight is spread evenly over all classes.
        class_weights: ``[K]``; by default 1 for each. Means are over tokens, not over their weights.

    Example:
        >>> task = TokenClassification()
        >>> task.count_terms({"input_ids": [5, 6, 7], "labels": [1, 0, -100]})
        2
    """

    terms_per_example = None

    def assemble(self, columns: Mapping[str, Tensor] | Sequence[Any]) -> Batch:
        batch = super().assemble(columns)
        inputs, targets = batch.kwargs, batch.targets
        if targets.ndim < 2:
            raise DataError(
                f"labels have shape {tuple(targets.shape)}; {type(self).__name__} reads one at every token, -100 where "
                "there is none. Use Classification for one label per example"
            )
        if "input_ids" in inputs and inputs["input_ids"].shape != targets.shape:
            raise DataError(
                f"'labels' has shape {tuple(targets.shape)} beside 'input_ids' of shape "
                f"{tuple(inputs['input_ids'].shape)}; they must be equally long in every example"
            )
        if "attention_mask" in inputs:
            targets = targets.masked_fill(inputs["attention_mask"] == 0, IGNORED)
        return Batch(batch.args, inputs, targets)

    def count_terms(self, example: Any) -> int:
        fields = example if isinstance(example, Mapping) else {"labels": example[-1]}
        if "labels" not in fields:
            raise DataError(f"an example has the fields {sorted(fields)} but no 'labels' of its tokens")
        kept = torch.as_tensor(fields["labels"]) != IGNORED
        if "attention_mask" in fields:
            kept &= torch.as_tensor(fields["attention_mask"]) != 0
        return int(kept.sum())


class MaskedLanguageModeling(TokenClassification):
    """Cross-entropy of masked tokens: logits ``[n, L, V]``, at position j of token j itself.

    Examples are dicts with ``input_ids``, in which tokens are masked, and ``labels``: the tokens that were there, and
    -100 wherever none was masked. What is masked is part of an example: mask once, with a fixed seed, in no collator.

    Args:
        label_smoothing: ε, what of a label's weight is spread evenly over the vocabulary.

    Example:
        >>> task = MaskedLanguageModeling()
        >>> task.count_terms({"input_ids": [5, 103, 7], "labels": [-100, 6, -100]})
        1
    """
