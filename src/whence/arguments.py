"""`checked`: what a public function was given is compared with the types in its signature, before anything is done.

The annotations say what every argument may be; so they are what is checked, and nothing is written twice. Only the kind
is looked at: a damping of -1 is a number, and refused by whoever needs it to be positive.
"""

from __future__ import annotations

import inspect
import numbers
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import cache, wraps
from itertools import islice
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np

from whence.errors import OptionError

__all__ = ["check_fields", "checked"]

F = TypeVar("F", bound=Callable[..., Any])

#: Elements of a sequence that are looked at.
_LOOKED_AT = 100
#: What numbers may be, by the annotation: numpy's too.
_NUMBERS: dict[Any, tuple[type, ...]] = {int: (numbers.Integral,), float: (numbers.Real,)}
_WORDS = {
    int: "a whole number",
    float: "a number",
    str: "a text",
    bool: "True or False",
    types.NoneType: "None",
}


def checked(*own: str) -> Callable[[F], F]:
    """Refuse arguments of another kind than the function's annotations say.

    Args:
        *own: those that the function refuses itself, in better words.

    Raises:
        OptionError: names the argument, shows what was given, and says what it may be.

    Example:
        >>> @checked()
        ... def halved(value: float) -> float:
        ...     return value / 2
        >>> halved("much")
        Traceback (most recent call last):
        whence.errors.OptionError: value is 'much'; it must be a number
    """

    def decorate(function: F) -> F:
        signature = inspect.signature(function)
        several = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        looked_at = {p.name for p in signature.parameters.values() if p.kind not in several} - set(own)
        hints = cache(lambda: get_type_hints(function))  # at the first call, when all names are there

        @wraps(function)
        def call(*args: Any, **given: Any) -> Any:
            for name, value in signature.bind(*args, **given).arguments.items():
                if name in looked_at:
                    _check(name, value, hints().get(name, Any))
            return function(*args, **given)

        return call  # type: ignore[return-value]

    return decorate


def check_fields(settings: Any, *own: str) -> None:
    """The same for the fields of a dataclass, in its ``__post_init__``."""
    cls: Any = type(settings)
    for name, hint in _fields(cls).items():
        if name not in own:
            _check(name, getattr(settings, name), hint)


@cache
def _fields(cls: Any) -> dict[str, Any]:
    hints = get_type_hints(cls)
    return {each.name: hints[each.name] for each in fields(cls)}


def _check(name: str, value: Any, hint: Any) -> None:
    if not _fits(value, hint):
        shown = repr(value)
        shown = shown if shown.isprintable() and len(shown) <= 60 else f"a {type(value).__name__}"
        raise OptionError(f"{name} is {shown}; it must be {_words(hint)}")


def _fits(given: object, hint: Any) -> bool:
    value: Any = given
    origin, inside = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return any(_fits(value, each) for each in inside)
    if origin is Literal:
        return any(type(value) is type(each) and value == each for each in inside)
    if origin is Callable:  # its shape is seen when it is called
        return callable(value)
    kind = hint if origin is None else origin
    if getattr(kind, "_is_protocol", False):
        return all(hasattr(value, name) for name in _asked(kind))
    if origin is Sequence and not isinstance(value, (str, bytes)) and hasattr(value, "__array__"):
        return bool(np.ndim(value) > 0)
    if kind is None:
        return value is None
    if kind is Any or not isinstance(kind, type):
        return True
    if isinstance(given, (bool, np.bool_)):
        return kind in (bool, object)
    if not isinstance(given, _NUMBERS.get(kind, (kind,))):
        return False
    if kind in (Sequence, list) and inside:
        return not isinstance(value, (str, bytes)) and all(
            _fits(each, inside[0]) for each in islice(value, _LOOKED_AT)
        )
    if kind in (Mapping, dict) and inside:
        return all(_fits(k, inside[0]) and _fits(v, inside[1]) for k, v in islice(value.items(), _LOOKED_AT))
    return True


def _asked(protocol: type) -> list[str]:
    """What a protocol wants its objects to have."""
    return [name for name in vars(protocol) if not name.startswith("_") or name == "__call__"]


def _words(hint: Any) -> str:
    origin, inside = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        *first, last = (_words(each) for each in inside)
        return f"{', '.join(first)} or {last}"
    if origin is Literal:
        return " or ".join(map(repr, inside))
    if origin is Callable or (getattr(hint, "_is_protocol", False) and "__call__" in _asked(hint)):
        return "a function"
    if origin in (Sequence, list):
        return "a list" if inside[0] is Any else f"a list ({_words(inside[0])} each)"
    if origin in (Mapping, dict):
        return "a dictionary" if inside[1] is Any else f"a dictionary ({_words(inside[1])} each)"
    kind = hint if origin is None else origin
    return _WORDS.get(kind, f"a {getattr(kind, '__name__', kind)}")
