"""`Question`: what was typed or chosen on the explorer's page, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from whence.errors import DataError, OptionError

__all__ = ["Question"]

_LONGEST = 100_000  # characters of a text
_SHOWN = 60  # of a prompt, in a title


@dataclass(frozen=True)
class Question:
    """One question: a completion of a prompt, a query of the run, or a training example asked about as if it were one.

    Attributes:
        prompt, completion: what the model was given, and what it said.
        contrast: another completion, for "why this rather than that"; empty for none.
        query, example: position among the run's queries, or in the training data; None for a text.
    """

    prompt: str = ""
    completion: str = ""
    contrast: str = ""
    query: int | None = None
    example: int | None = None

    @classmethod
    def read(cls, said: Any, *, queries: int, examples: int) -> Question:
        """From a request.

        Args:
            said: what the page sent.
            queries: how many of them there are to choose from.
            examples: of training examples.

        Example:
            >>> Question.read({"prompt": "2 + 2 =", "completion": " 4"}, queries=0, examples=10).title
            '2 + 2 = 4'
        """
        if not isinstance(said, Mapping):
            raise DataError("a question must be a JSON object")
        query = _position(said, "query", queries, "queries of the run")
        example = _position(said, "example", examples, "training examples")
        if query is not None and example is not None:
            raise OptionError("ask about a query or about a training example, not both at once")
        prompt, completion, contrast = (_text(said, name) for name in ("prompt", "completion", "contrast"))
        question = cls(prompt, completion, contrast, query, example)
        if question.of_text and not completion.strip():
            raise OptionError(
                "there is nothing to explain yet: type what the model said, or let it complete the prompt"
            )
        return question

    @property
    def of_text(self) -> bool:
        """Whether it is about a text that was typed."""
        return self.query is None and self.example is None

    @property
    def title(self) -> str:
        """In a line."""
        if self.query is not None:
            return f"Query {self.query}"
        if self.example is not None:
            return f"Training example {self.example}: what else is like it?"
        rather = f", rather than {self.contrast.strip()!r}" if self.contrast else ""
        before = " ".join(self.prompt.split())
        if len(before) > _SHOWN:
            before = f"…{before[-_SHOWN:].partition(' ')[2] or before[-_SHOWN:]}"
        said = f"{before} {self.completion}{rather}"
        return " ".join(said.split())[:160]

    def row(self) -> dict[str, str]:
        """As a row of a file of queries."""
        row = {"prompt": self.prompt, "completion": self.completion}
        return row | ({"contrast": self.contrast} if self.contrast else {})


def _position(said: Mapping[str, Any], name: str, count: int, whose: str) -> int | None:
    number = said.get(name)
    if number is None:
        return None
    if type(number) is not int or not 0 <= number < count:
        raise OptionError(f"{name} is {number!r:.40}; the {count:,} {whose} are numbered from 0")
    return number


def _text(said: Mapping[str, Any], name: str) -> str:
    text = said.get(name, "")
    if not isinstance(text, str) or len(text) > _LONGEST:
        raise DataError(f"{name} must be a text of at most {_LONGEST:,} characters")
    return text
