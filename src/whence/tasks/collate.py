"""Stacking examples into batches, padding what may be padded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from whence.errors import DataError

__all__ = ["pad", "stack_columns", "stack_values"]

#: Fields of token sequences that may be padded on the right, and with what.
PADDING = {
    "input_ids": 0,
    "attention_mask": 0,
    "token_type_ids": 0,
    "position_ids": 0,
    "decoder_input_ids": 0,  # on the right, where a decoder never looks
    "decoder_attention_mask": 0,
    "labels": -100,
}


def stack_columns(examples: Sequence[Any]) -> Any:
    """Turn a list of ``(x, y)`` or of dicts into ``(xs, ys)`` or a dict of batched tensors.

    Token fields of different lengths are padded on the right, and an attention mask is added if absent; not beside
    position ids, from which a model tells packed sequences apart as long as there is no mask.
    """
    if len(examples) == 0:
        raise DataError("cannot build a batch from no examples")
    first = examples[0]
    if isinstance(first, Mapping):
        names = list(first)
        for position, example in enumerate(examples):
            if not isinstance(example, Mapping) or set(example) != set(names):
                raise DataError(
                    f"example {position} of the batch does not have the fields {sorted(names)} of the first"
                )
        if "input_ids" in names and not {"attention_mask", "position_ids"} & set(names):
            lengths = [len(example["input_ids"]) for example in examples]
            if len(set(lengths)) > 1:
                ones = [torch.ones(length, dtype=torch.long) for length in lengths]
                padded = {"attention_mask": stack_values("attention_mask", ones)}
                return padded | {n: stack_values(n, [e[n] for e in examples]) for n in names}
        return {name: stack_values(name, [example[name] for example in examples]) for name in names}
    if isinstance(first, (tuple, list)):
        for example in examples:
            if not isinstance(example, (tuple, list)) or len(example) != 2:
                kind = (
                    f"{len(example)} items" if isinstance(example, (tuple, list)) else type(example).__name__
                )
                raise DataError(f"an example must be (x, y) or a dict with 'labels', got {kind}")
        xs, ys = zip(*examples, strict=True)
        inputs = stack_columns(xs) if isinstance(xs[0], Mapping) else stack_values("input", xs)
        return inputs, stack_values("target", ys)
    raise DataError(f"an example must be (x, y) or a dict with 'labels', got a {type(first).__name__}")


def stack_values(name: str, values: Sequence[Any]) -> Tensor:
    """Stack one field of all examples, padding token fields whose lengths differ."""
    try:
        tensors = [torch.as_tensor(value) for value in values]
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"the field {name!r} cannot become a tensor: {error}") from error
    kinds = {tensor.dtype for tensor in tensors}
    if len(kinds) > 1 and any(kind.is_floating_point or kind == torch.bool for kind in kinds):
        odd = next(i for i, tensor in enumerate(tensors) if tensor.dtype != tensors[0].dtype)
        raise DataError(
            f"the field {name!r} mixes {tensors[0].dtype} and {tensors[odd].dtype} (example {odd} of its batch); "
            "convert all examples to one dtype"
        )
    shapes = {tuple(tensor.shape) for tensor in tensors}
    if len(shapes) == 1:
        return torch.stack(tensors)
    if name in PADDING and all(tensor.ndim == 1 for tensor in tensors):
        return pad(tensors, PADDING[name])
    raise DataError(
        f"the field {name!r} has different shapes in one batch: {sorted(shapes)[:3]}. "
        "Resize or pad the examples to one shape"
    )


def pad(rows: Sequence[Tensor], value: int) -> Tensor:
    """Stack 1-D tensors, padded on the right to the longest."""
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=value)
