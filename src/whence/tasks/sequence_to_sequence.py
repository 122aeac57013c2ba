"""Sequence-to-sequence models: one term per token of the answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from whence.errors import DataError, ModelError
from whence.tasks.base import Batch, read_outputs, without_cache
from whence.tasks.categorical import IGNORED, CategoricalTask
from whence.tasks.language_modeling import token_ids

__all__ = ["SequenceToSequence"]


class SequenceToSequence(CategoricalTask):
    """Cross-entropy of an encoder-decoder's answer: logits ``[n, L, V]``, at position j of the answer's token j.

    Examples are dicts with ``input_ids`` (and optionally ``attention_mask``) for the encoder, and ``labels``: the
    answer, -100 where a token is not predicted. What the decoder reads is ``decoder_input_ids`` where an example has
    them, else the model makes them from the labels, shifted by one, as Hugging Face models do.

    Args:
        label_smoothing: ε, what of a label's weight is spread evenly over the vocabulary.

    Example:
        >>> task = SequenceToSequence()
        >>> query = task.query(prompt=[5, 6, 7], completion=[8, 1])
        >>> task.count_terms(query)
        2
    """

    terms_per_example = None

    def query(self, prompt: Sequence[int] | Tensor, completion: Sequence[int] | Tensor) -> dict[str, Tensor]:
        """An example that asks for ``completion`` as answer to ``prompt``."""
        given, answer = token_ids(prompt).long(), token_ids(completion).long()
        if given.numel() == 0 or answer.numel() == 0:
            raise DataError(
                f"a query needs tokens of a prompt and of a completion, got {given.numel()} and {answer.numel()}"
            )
        return {"input_ids": given, "labels": answer}

    def contrasting(self, example: Any, other: Any) -> Any:
        """The example with other tokens as its answer; a dict is taken as it is."""
        if isinstance(other, Mapping):
            return other
        if "decoder_input_ids" in example:
            raise DataError(
                "a query says itself what the decoder reads (decoder_input_ids); give the contrast as an example of "
                "its own"
            )
        return {**example, "labels": token_ids(other).long()}

    def assemble(self, columns: Mapping[str, Tensor] | Sequence[Any]) -> Batch:
        if not isinstance(columns, Mapping):
            raise DataError(
                "a sequence-to-sequence example must be a dict with 'input_ids' and 'labels', not (x, y)"
            )
        batch = super().assemble(
            {name: t if t.is_floating_point() else t.long() for name, t in columns.items()}
        )
        decoded = batch.kwargs.get("decoder_input_ids")
        if decoded is not None and decoded.shape != batch.targets.shape:
            raise DataError(
                f"'decoder_input_ids' has shape {tuple(decoded.shape)} beside 'labels' of shape "
                f"{tuple(batch.targets.shape)}; they must be equally long in every example"
            )
        return batch

    def count_terms(self, example: Any) -> int:
        if not isinstance(example, Mapping) or "labels" not in example:
            raise DataError("a sequence-to-sequence example must be a dict with 'input_ids' and 'labels'")
        return int((torch.as_tensor(example["labels"]) != IGNORED).sum())

    def outputs(self, model: nn.Module, batch: Batch) -> Tensor:
        inputs = without_cache(model, batch.kwargs)
        if "decoder_input_ids" not in inputs:
            shift = getattr(model, "prepare_decoder_input_ids_from_labels", None)
            if shift is None:
                raise ModelError(
                    f"{type(model).__name__} does not say what its decoder reads for given labels (it has no "
                    "prepare_decoder_input_ids_from_labels); add 'decoder_input_ids' to the examples"
                )
            inputs["decoder_input_ids"] = shift(labels=batch.targets)
        return read_outputs(model(**inputs))
