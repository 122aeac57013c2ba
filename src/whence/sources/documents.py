"""What a row says to a language model: a text, and which parts of it the model learns to predict."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from whence.errors import DataError, ModelError, OptionError
from whence.sources.records import Records, field_of, text_of

__all__ = ["Document", "Layout", "layout_of", "read_document"]

#: How rows are written: a text, a prompt with its completion, or a list of chat messages.
Layout = Literal["text", "pair", "messages"]


@dataclass(frozen=True)
class Document:
    """A text and the character ranges in it that are predicted; None for all of it.

    ``special`` says whether the tokenizer puts its own tokens around it: a chat template has done so already.
    """

    text: str
    predicted: tuple[tuple[int, int], ...] | None = None
    special: bool = True


def layout_of(records: Records, text_field: str | None) -> Layout:
    """How the rows are written, by the fields of the first one."""
    if text_field is not None:
        return "text"
    first = records[0]
    if "messages" in first:
        return "messages"
    # One of the two without the other is a row that lacks a field, and is said to be.
    return "pair" if ("prompt" in first or "completion" in first) and "text" not in first else "text"


def read_document(
    records: Records,
    row: int,
    fields: Mapping[str, Any],
    layout: Layout,
    *,
    tokenizer: Any,
    text_field: str | None = None,
) -> Document:
    """The row as a `Document`, or a `DataError` that names the row and field."""
    assert layout in get_args(Layout)
    if layout == "messages":
        return _chat(records, row, fields, tokenizer)
    if layout == "pair":
        prompt = text_of(records, row, fields, "prompt", may_be_empty=True)
        completion = text_of(records, row, fields, "completion")
        return Document(prompt + completion, ((len(prompt), len(prompt) + len(completion)),))
    return Document(text_of(records, row, fields, "text" if text_field is None else text_field))


def _chat(records: Records, row: int, fields: Mapping[str, Any], tokenizer: Any) -> Document:
    """A conversation as the model sees it, predicted where the assistant speaks."""
    if not getattr(tokenizer, "chat_template", None):
        raise OptionError(
            f"{records.where(row)} holds chat messages, but the tokenizer has no chat template; give the "
            "conversation as 'text' or as 'prompt' and 'completion'"
        )
    messages = _messages(records, row, fields)
    whole = _rendered(records, row, tokenizer, messages)
    spans = []
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = _rendered(records, row, tokenizer, messages[:number], answer_next=True) if number else ""
        through = _rendered(records, row, tokenizer, messages[: number + 1])
        if not (whole.startswith(through) and through.startswith(before)):
            raise DataError(
                f"{records.where(row)}: the chat template rewrites earlier messages, so where message "
                f"{number + 1} stands cannot be told; give the conversation as 'prompt' and 'completion'"
            )
        spans.append((len(before), len(through)))
    if not spans:
        raise DataError(
            f"{records.where(row)}: no message of 'messages' has the role 'assistant', so nothing is "
            "predicted; give a conversation with an answer"
        )
    return Document(whole, tuple(spans), special=False)


def _messages(records: Records, row: int, fields: Mapping[str, Any]) -> list[dict[str, str]]:
    messages = field_of(records, row, fields, "messages")
    if not isinstance(messages, (list, tuple)) or not messages:
        raise DataError(
            f"{records.where(row)}: 'messages' must be a list of objects with 'role' and 'content', got "
            f"{str(messages)[:60]!r}"
        )
    checked = []
    for number, message in enumerate(messages):
        values = [message.get(name) for name in ("role", "content")] if isinstance(message, Mapping) else []
        if not values or not all(isinstance(value, str) for value in values):
            raise DataError(
                f"{records.where(row)}: message {number + 1} of 'messages' is {str(message)[:60]!r}; it must "
                "have the texts 'role' and 'content'"
            )
        checked.append({"role": str(values[0]), "content": str(values[1])})
    return checked


def _rendered(
    records: Records, row: int, tokenizer: Any, messages: list[dict[str, str]], *, answer_next: bool = False
) -> str:
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=answer_next)
    except ImportError as error:
        raise ModelError(f"chat templates cannot be used: {error}; install jinja2") from error
    except Exception as error:  # the template's own complaint, such as roles that do not alternate
        raise DataError(
            f"{records.where(row)}: the chat template refuses the messages: {error}; repair the row"
        ) from error
    return str(text)
