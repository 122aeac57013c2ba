"""What to show of an example when nobody says: text from tokens, pictures from tensors, labels from numbers."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from whence.errors import DataError, WhenceError
from whence.exhibit import Exhibit

__all__ = ["Describe", "class_name", "describer", "exhibit_of", "png"]

#: From an example and its position to what a reader is shown of it.
Describe = Callable[[Any, int], Exhibit]
_SMALLEST_PICTURE = 4


def describer(
    data: Any, describe: Describe | None, tokenizer: Any, class_names: Sequence[str] | None
) -> Callable[[int], Exhibit]:
    """How to show an example of the data: as asked, else by the data's own ``exhibit(index)``, else by a guess."""
    own = getattr(data, "exhibit", None)

    def show(index: int) -> Exhibit:
        if describe is not None:
            return describe(data[index], index)
        if callable(own):
            return cast(Exhibit, own(index))
        return exhibit_of(data[index], index, tokenizer=tokenizer, class_names=class_names)

    def checked(index: int) -> Exhibit:
        try:
            shown = show(index)
        except WhenceError:
            raise
        except Exception as error:  # whatever a stranger's code raises
            raise DataError(
                f"what to show of example {index} cannot be told: {type(error).__name__}: {error}. Mend describe=, or "
                "the data's exhibit()"
            ) from error
        if not isinstance(shown, Exhibit):
            raise DataError(
                f"what to show of example {index} is a {type(shown).__name__}; return a whence.Exhibit"
            )
        return shown

    return checked


def exhibit_of(
    example: Any, index: int, *, tokenizer: Any = None, class_names: Sequence[str] | None = None
) -> Exhibit:
    """A guess at what a person should see of an example: its tokens, its picture, its label.

    Args:
        example: as in the training data.
        index: its position, used as its id.
        tokenizer: decodes token ids; without it they are shown as numbers.
        class_names: labels in words.
    """
    fields = example if isinstance(example, Mapping) else {}
    if "input_ids" in fields or _is_tokens(example):
        labels = fields.get("labels")
        ids = torch.as_tensor(fields["input_ids"] if fields else example).tolist()
        per_token = None if labels is None else torch.as_tensor(labels)
        words = [_decode(tokenizer, token) for token in ids]
        if per_token is None or per_token.ndim == 0:  # whole text, perhaps with one label for all of it
            return Exhibit(
                id=str(index), text="".join(words), tokens=tuple(words), label=_name(per_token, class_names)
            )
        if len(per_token) != len(ids):  # an answer, which an encoder-decoder gives to these tokens
            answer = [_decode(tokenizer, token) for token in per_token.tolist() if token != -100]
            return Exhibit(id=str(index), prompt="".join(words), text="".join(answer), tokens=tuple(answer))
        asked = (per_token != -100).tolist()
        start = asked.index(True) if True in asked else 0
        return Exhibit(
            id=str(index),
            prompt="".join(words[:start]) or None,
            text="".join(words[start:]),
            tokens=tuple(words),
        )
    if fields:
        x = next((fields[name] for name in ("pixel_values", "image", "x") if name in fields), None)
        y = fields.get("labels", fields.get("label"))
        text = fields.get("text")
        return Exhibit(
            id=str(fields.get("id", index)),
            text=text if isinstance(text, str) else None,
            image=png(x),
            label=_name(y, class_names),
        )
    if isinstance(example, (tuple, list)) and len(example) == 2:
        return Exhibit(id=str(index), image=png(example[0]), label=_name(example[1], class_names))
    return Exhibit(id=str(index))


def png(x: Any) -> bytes | None:
    """A PNG file of a tensor ``[H, W]`` or ``[C, H, W]``, or None if it does not look like a picture.

    Values in [0, 1] are taken as they are, others are stretched to it.
    """
    if not isinstance(x, Tensor) or x.ndim not in (2, 3):
        return None
    picture = x.detach().cpu().float()
    if picture.ndim == 2:
        picture = picture.unsqueeze(0)
    if picture.shape[0] not in (1, 3) or min(picture.shape[1:]) < _SMALLEST_PICTURE:
        return None
    low, high = float(picture.min()), float(picture.max())
    if low < 0 or high > 1:
        picture = (picture - low) / max(high - low, 1e-30)
    from PIL import Image

    array = (picture * 255).round().byte().permute(1, 2, 0).numpy()
    file = io.BytesIO()
    Image.fromarray(array.squeeze(2) if array.shape[2] == 1 else array).save(file, format="PNG")
    return file.getvalue()


def _is_tokens(example: Any) -> bool:
    return (isinstance(example, Tensor) and example.ndim == 1 and not example.is_floating_point()) or (
        isinstance(example, list) and bool(example) and all(isinstance(token, int) for token in example)
    )


def _decode(tokenizer: Any, token: int) -> str:
    return f"{token} " if tokenizer is None else str(tokenizer.decode([token]))


def _name(label: Any, class_names: Sequence[str] | None) -> str | None:
    if label is None:
        return None
    value = torch.as_tensor(label)
    if value.numel() != 1:
        return None
    if value.is_floating_point():
        return f"{float(value):.4g}"
    return class_name(int(value), class_names)


def class_name(number: int, names: Sequence[str] | None) -> str:
    """A class in words where they are known, else its number."""
    return str(names[number]) if names is not None and number < len(names) else str(number)
