"""Class labels: from the names in the data to the numbers of the model's outputs."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whence.errors import DataError
from whence.sources.plain_text import read_text

__all__ = ["Labels", "names_of"]


@dataclass(frozen=True)
class Labels:
    """The classes' names, in the order of the model's outputs.

    Example:
        >>> labels = Labels(("cat", "dog"))
        >>> labels.number("dog", "pets.csv, line 2"), labels.number(0, "pets.csv, line 3")
        (1, 0)
    """

    names: tuple[str, ...]

    def __post_init__(self) -> None:
        repeated = sorted({name for name in self.names if self.names.count(name) > 1})
        if repeated:
            raise DataError(f"the label {repeated[0]!r} is listed twice; every class needs a name of its own")

    def __len__(self) -> int:
        return len(self.names)

    def number(self, value: Any, where: str) -> int:
        """The class of a label given by name or by number, or a `DataError` that says where it was."""
        if isinstance(value, str) and value in self.names:
            return self.names.index(value)
        number = _whole_number(value)
        if number is None:
            raise DataError(f"{where} has the label {value!r}; the labels are {self._listed()}")
        if not 0 <= number < len(self.names):
            raise DataError(
                f"{where} has the label {number}, which is out of range: there are {len(self.names)} classes, "
                f"0 to {len(self.names) - 1}"
            )
        return number

    def check_outputs(self, outputs: int, name: str) -> None:
        """Raise `DataError` when there are more classes than the model has outputs."""
        if len(self.names) > outputs:
            raise DataError(
                f"{name} has {len(self.names)} classes ({self._listed()}), the model has {outputs} outputs; give "
                "the data that the model was trained on"
            )

    def _listed(self) -> str:
        shown = ", ".join(map(repr, self.names[:8]))
        return shown if len(self.names) <= 8 else f"{shown} and {len(self.names) - 8} more"

    @classmethod
    def numbered(cls, count: int) -> Labels:
        """Classes without names."""
        return cls(tuple(str(number) for number in range(count)))

    @classmethod
    def from_file(cls, path: str | Path) -> Labels:
        """Read ``labels.json``: a list of names, or an object from name to number or from number to name."""
        place = Path(path)
        if not place.is_file():
            raise DataError(f"there is no file {str(path)!r} of labels; check the name")
        try:
            content = json.loads(read_text(place))
        except ValueError as error:
            if isinstance(error, DataError):
                raise
            raise DataError(f"{path} is not JSON: {error}; write a list of class names") from error
        if isinstance(content, list) and content and all(isinstance(name, str) for name in content):
            return cls(tuple(content))
        names = names_of(content) if isinstance(content, dict) else None
        if names is None:
            raise DataError(
                f"{path} must hold a list of class names, or an object that numbers them from 0, such as "
                '{"cat": 0, "dog": 1}'
            )
        return cls(names)


def names_of(mapping: Mapping[Any, Any]) -> tuple[str, ...] | None:
    """Names in order from ``{"cat": 0, "dog": 1}`` or ``{"0": "cat", "1": "dog"}``; None if it is neither.

    Example:
        >>> names_of({0: "cat", 1: "dog"}), names_of({"cat": 5})
        (('cat', 'dog'), None)
    """
    for pairs in (mapping.items(), ((number, name) for name, number in mapping.items())):
        numbered = [(_whole_number(number), name) for number, name in pairs]
        if sorted(-1 if n is None else n for n, _ in numbered) == list(range(len(mapping))) and all(
            isinstance(name, str) for _, name in numbered
        ):
            return tuple(name for _, name in sorted(numbered, key=lambda pair: pair[0] or 0)) or None
    return None


def real_names(id2label: Mapping[Any, Any] | None) -> tuple[str, ...] | None:
    """The classes' names in a model's configuration; None where they are placeholders (``LABEL_0``)."""
    names = names_of(id2label or {})
    return None if names is None or all(re.fullmatch(r"LABEL_\d+", name) for name in names) else names


def labels_for(values: Sequence[Any], given: Labels | None, stored: tuple[str, ...] | None) -> Labels:
    """The labels of a data set: those given, those its format stores, or what its values are."""
    if given is not None:
        return given
    if stored is not None:
        return Labels(stored)
    numbers = [_whole_number(value) for value in values]
    known = [number for number in numbers if number is not None]
    if len(known) == len(values) and min(known, default=0) >= 0:
        return Labels.numbered(max(known) + 1)
    return Labels(tuple(sorted({str(value) for value in values})))


def _whole_number(value: Any) -> int | None:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and re.fullmatch(r"-?[0-9]+", value):
        return int(value)
    return None
