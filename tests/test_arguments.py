"""Arguments of public functions are compared with the types in their signatures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from whence.arguments import check_fields, checked
from whence.errors import OptionError


@checked("own")
def function(
    number: float = 1.0,
    count: int | None = None,
    names: Sequence[str] | None = None,
    by: Literal["one", "two"] = "one",
    place: str | Path = "x",
    call: Callable[[int], int] | None = None,
    table: Mapping[str, torch.Tensor] | None = None,
    own: int = 0,
    anything: Any = None,
) -> str:
    return "done"


GOOD: list[dict[str, Any]] = [
    {}, {"number": 2}, {"number": np.float32(2)}, {"count": np.int64(3)}, {"names": ["a"]}, {"names": np.array(["a"])},
    {"names": ()}, {"by": "two"}, {"place": Path("x")}, {"call": len}, {"table": {"x": torch.ones(1)}}, {"own": "x"},
    {"anything": {1}},
]  # fmt: skip
BAD: list[tuple[dict[str, Any], str]] = [
    ({"number": "x"}, "number is 'x'; it must be a number"),
    ({"number": True}, "number is True; it must be a number"),
    ({"count": 1.0}, "count is 1.0; it must be a whole number or None"),
    ({"names": "ab"}, r"names is 'ab'; it must be a list \(a text each\) or None"),
    ({"names": ["a", 5]}, r"names is \['a', 5\]; it must be a list"),
    ({"by": "three"}, "by is 'three'; it must be 'one' or 'two'"),
    ({"by": torch.ones(2)}, "by is .*; it must be 'one' or 'two'"),
    ({"place": b"x"}, "place is b'x'; it must be a text or a Path"),
    ({"call": 5}, "call is 5; it must be a function or None"),
    ({"table": {"x": 1}}, r"it must be a dictionary \(a Tensor each\) or None"),
    ({"names": "\x1b[2J" * 3}, r"names is '(\\x1b\[2J){3}'; it must be"),
]


@pytest.mark.parametrize("given", GOOD, ids=str)
def test_what_the_signature_says_is_taken(given: dict[str, Any]) -> None:
    assert function(**given) == "done"


@pytest.mark.parametrize(("given", "told"), BAD, ids=str)
def test_anything_else_is_refused_by_name(given: dict[str, Any], told: str) -> None:
    with pytest.raises(OptionError, match=told) as caught:
        function(**given)
    assert str(caught.value).isprintable()


def test_fields_of_settings_are_compared_in_the_same_way() -> None:
    @dataclass
    class Settings:
        count: int
        own: int = 0

        def __post_init__(self) -> None:
            check_fields(self, "own")

    assert Settings(3, own="x").count == 3  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="count is 'x'; it must be a whole number"):
        Settings("x")  # type: ignore[arg-type]
