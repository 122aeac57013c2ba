"""Calls in threads of one process: each ends as it would alone."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import whence
from small import DOUBLE, classifier, generator
from test_untouched import state
from whence import Classification
from zoo import vectors

DATA, MODEL = vectors(DOUBLE), classifier()


def attribute(query: int, **options: Any) -> torch.Tensor:
    options = {"damping": "lambda_max/10", "solver": "cg", "baseline": False, **options}
    return whence.attribute(MODEL, DATA, DATA[query : query + 1], task=Classification(), **options).scores


def differences(query: int) -> torch.Tensor:
    return attribute(query, product="finite-difference", method="directional")


def exact(query: int) -> torch.Tensor:
    return attribute(query, product="exact", method="directional")


def self_influence(seed: int) -> torch.Tensor:
    found = whence.clean(MODEL, DATA, task=Classification(), rank=3, seed=seed, exact_solves=0)
    return torch.tensor([suspect.self_influence for suspect in found.top(20)])


def trace(seed: int) -> torch.Tensor:
    gnh = whence.GaussNewton(MODEL, Classification(), DATA, product="finite-difference")
    return torch.tensor(whence.estimate_spectrum(gnh, generator=generator(seed)).trace.value)


@pytest.fixture(autouse=True)
def hurried() -> Iterator[None]:
    """Threads change as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize("call", [differences, exact, self_influence])
def test_calls_in_threads_end_as_they_do_alone(call: Callable[[int], torch.Tensor]) -> None:
    before, alone = state(MODEL), [call(number) for number in range(3)]
    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(call, range(3)))
    assert all(torch.equal(a, b) for a, b in zip(alone, found, strict=True))
    assert state(MODEL) == before


def test_one_call_is_not_begun_while_another_is_under_way() -> None:
    """Also of other functions of whence; calls inside a call are."""
    under_way = threading.Event()
    order: list[str] = []

    def describe(example: Any, index: int) -> whence.Exhibit:
        if not under_way.is_set():
            under_way.set()
            other.join(0.3)
            trace(0)  # inside
            order.append("first")
        return whence.Exhibit()

    def second() -> None:
        under_way.wait()
        trace(1)
        order.append("second")

    other = threading.Thread(target=second)
    other.start()
    attribute(0, describe=describe)
    other.join()
    assert order == ["first", "second"]
