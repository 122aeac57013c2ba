"""Class labels: from the names in the data to the numbers of the model's outputs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whence.errors import DataError
from whence.sources.files import parse_json, read_text

__all__ = ["Labels", "labels_for"]

#: More classes than any model has outputs.
_MOST_CLASSES = 10**7


@dataclass(frozen=True)
class Labels:
    """The classes' names, in the order of the model's outputs.

    Example:
        >>> labels = Labels(("cat", "dog"))
        >>> labels.number("dog"), labels.number(0), labels.number("bird")
        (1, 0, None)
    """

    names: tuple[str, ...]

    def __post_init__(self) -> None:
        repeated = sorted({name for name in self.names if self.names.count(name) > 1})
        if repeated:
            raise DataError(f"the label {repeated[0]!r} is listed twice; every class needs a name of its own")

    def __len__(self) -> int:
        return len(self.names)

    def number(self, value: Any) -> int | None:
        """The class of a label given by name or by number; None if there is no such class."""
        if isinstance(value, str) and value in self.names:
            return self.names.index(value)
        number = _whole_number(value)
        return number if number is not None and 0 <= number < len(self.names) else None

    def unknown(self, value: Any, where: str) -> DataError:
        """What to raise for a label that is no class."""
        return DataError(
            f"{where} has the label {value!r}; give one of {self._listed()}, or a number from 0 to {len(self) - 1}"
        )

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
    def from_file(cls, path: str | Path) -> Labels:
        """Read ``labels.json``: a list of names, or an object from name to number or from number to name."""
        content = parse_json(read_text(Path(path)), str(path), "write a list of class names")
        names = _ordered_names(content) if isinstance(content, dict) else None
        if isinstance(content, list) and content and all(isinstance(name, str) for name in content):
            names = tuple(content)
        if names is None or len(set(names)) < len(names):
            raise DataError(
                f"{path} must hold a list of different class names, or an object that numbers them from 0, such as "
                '{"cat": 0, "dog": 1}'
            )
        return cls(names)

    @classmethod
    def from_config(cls, id2label: Mapping[Any, Any] | None) -> Labels | None:
        """The classes in a model's configuration; None where their names are placeholders (``LABEL_0``).

        Classes that share a name are told apart by their number: two of ImageNet's are called "crane".

        Example:
            >>> Labels.from_config({0: "crane", 1: "cat", 2: "crane"}).names
            ('crane (0)', 'cat', 'crane (2)')
        """
        names = _ordered_names(id2label or {})
        if names is None or all(re.fullmatch(r"LABEL_\d+", name) for name in names):
            return None
        return cls(tuple(f"{name} ({k})" if names.count(name) > 1 else name for k, name in enumerate(names)))


def labels_for(values: Sequence[Any], given: Labels | None, stored: Sequence[str] | None) -> Labels:
    """The labels of a data set: those given, those its format stores, or what its values are.

    Example:
        >>> labels_for([2, 0], None, None).names, labels_for(["dog", "cat", "dog"], None, None).names
        (('0', '1', '2'), ('cat', 'dog'))
    """
    if given is not None:
        return given
    if stored is not None:
        return Labels(tuple(stored))
    numbers = [_whole_number(value) for value in values]
    known = [number for number in numbers if number is not None]
    if len(known) == len(values) and min(known, default=0) >= 0:
        if max(known) >= _MOST_CLASSES:
            raise DataError(
                f"the label {max(known)} would mean as many classes; give labels as names, or number them from 0"
            )
        return Labels(tuple(map(str, range(max(known) + 1))))
    return Labels(tuple(sorted({str(value) for value in values})))


def _ordered_names(mapping: Mapping[Any, Any]) -> tuple[str, ...] | None:
    """Names in order from ``{"cat": 0, "dog": 1}`` or ``{"0": "cat", "1": "dog"}``; None if it is neither."""
    for pairs in (mapping.items(), ((number, name) for name, number in mapping.items())):
        by_number = {_whole_number(number): name for number, name in pairs}
        names = tuple(by_number.get(number) for number in range(len(mapping)))
        if names and all(isinstance(name, str) for name in names):
            return names  # type: ignore[return-value]  # texts, as checked
    return None


def _whole_number(value: Any) -> int | None:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and re.fullmatch(r"-?[0-9]{1,18}", value):
        return int(value)
    return None
