"""One way to fuzz: a check with random arguments, quick in every run, long in `make test-faults`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from whence.errors import WhenceError

__all__ = ["JUNK", "fuzzed", "refused_or_fine"]

#: Values that no option and no field expects, beside some that they do.
JUNK: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 5),
    st.sampled_from([2**31, 2**40, 2**63, 2**70, -(2**70), 10**400, 10**5000]),
    st.floats(),
    st.text(max_size=12),
    st.sampled_from(
        ["auto", "auto/0", "lambda_max/1e400", "10%", "nan%", "5min", "-1h", "top-0 stable", "cg"]
    ),
    st.lists(st.integers(0, 3), max_size=2),
    st.just({}),
    st.just(object()),
)


@contextmanager
def refused_or_fine() -> Any:
    """What happens in here ends well, or in a `WhenceError`; anything else fails the test."""
    with suppress(WhenceError):
        yield


def fuzzed(
    check: Callable[..., None], *, quick: int, long: int, **arguments: st.SearchStrategy[Any]
) -> tuple[Callable[..., None], Callable[..., None]]:
    """The check as a test of ``quick`` examples, the same ones in every run, and as one of ``long`` fresh ones."""
    common: dict[str, Any] = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}
    first = settings(max_examples=quick, derandomize=True, **common)(given(**arguments)(check))
    second = settings(max_examples=long, **common)(given(**arguments)(check))
    return first, pytest.mark.faults(second)
