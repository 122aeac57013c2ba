"""Every public function with an argument that is none: a result, or a typed error, and never another exception."""

from __future__ import annotations

import inspect
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import nn

import whence
from fuzz.fuzzing import fuzzed
from whence.errors import WhenceError, WhenceWarning

TASK = whence.Classification()
DATA = [(torch.tensor([float(i % 3), 1.0, -0.3 * i]), i % 2) for i in range(8)]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 2).eval()


def operator() -> whence.GaussNewton:
    return whence.GaussNewton(model(), TASK, DATA)


def trainer(subset: Any, seed: int) -> nn.Module:
    torch.manual_seed(seed + len(subset))
    return nn.Linear(3, 2).eval()


def random() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def result() -> whence.Attribution:
    return whence.attribute(model(), DATA, DATA[:1], task=TASK, damping=0.1, solver="cg")


def right_hand_side() -> whence.ParamVector:
    return operator().gradients(DATA[:1])


SPECTRUM = whence.Spectrum(
    trace=whence.Estimate(10.0), frobenius=whence.Estimate(5.0), lambda_max=whence.Estimate(4.0)
)
PLAN = whence.Plan.from_spectrum(SPECTRUM, 0.5)

#: Public functions, and arguments that they take; all of these are put wrong, and all others that they have.
CALLS: dict[str, tuple[Callable[..., Any], Callable[[], dict[str, Any]]]] = {
    "attribute": (
        whence.attribute,
        lambda: {"model": model(), "train": DATA, "queries": DATA[:1], "task": TASK, "damping": 0.1},
    ),
    "clean": (whence.clean, lambda: {"model": model(), "train": DATA, "task": TASK, "exact_solves": 2}),
    "validate": (
        whence.validate,
        lambda: {"model": model(), "train": DATA, "queries": DATA[:1], "result": result(), "task": TASK,
                 "budget_seconds": 0.01, "points": 1},
    ),
    "tune": (
        whence.tune,
        lambda: {"model": model(), "train_set": DATA, "queries": DATA[:2], "trainer": trainer, "task": TASK,
                 "halves": 6, "multiples": [2.0]},
    ),
    "pbrf": (
        whence.pbrf,
        lambda: {"model": model(), "train": DATA, "points": DATA[:1], "queries": DATA[:1], "task": TASK,
                 "damping": 1.0, "max_gradients": 3},
    ),
    "load": (whence.load, lambda: {"directory": "nowhere"}),
    "estimate_spectrum": (
        whence.estimate_spectrum, lambda: {"operator": operator(), "generator": random(), "probes": 4},
    ),
    "lanczos": (whence.lanczos, lambda: {"operator": operator(), "generator": random()}),
    "sketch": (whence.sketch, lambda: {"operator": operator(), "dimension": 4, "seed": 0}),
    "GaussNewton": (whence.GaussNewton, lambda: {"model": model(), "task": TASK, "data": DATA}),
    "Damped": (whence.Damped, lambda: {"operator": operator(), "damping": 0.1}),
    "Plan.from_spectrum": (whence.Plan.from_spectrum, lambda: {"spectrum": SPECTRUM, "damping": 0.1}),
    "Plan.tuned": (whence.Plan.tuned, lambda: {"spectrum": SPECTRUM, "num_terms": 100}),
    "Lissa": (whence.Lissa, lambda: {"plan": PLAN}),
    "ConjugateGradient": (whence.ConjugateGradient, dict),
    "solve": (
        lambda **given: whence.ConjugateGradient(max_iterations=3).solve(**given),
        lambda: {"A": whence.Damped(operator(), 0.1), "rhs": right_hand_side(), "generator": random()},
    ),
    "Training.read": (whence.Training.read, lambda: {"source": {"optimizer": "sgd", "rate": 0.1, "steps": 5}}),
    "ParamVector": (whence.ParamVector, lambda: {"tensors": {"x": torch.ones(2)}}),
    "Dense": (whence.Dense, lambda: {"matrix": torch.eye(2)}),
    "FiniteSum": (whence.FiniteSum, lambda: {"matrices": [torch.eye(2)]}),
    "top": (lambda **given: result().top(**given), lambda: {"k": 1}),
    "row": (lambda **given: result().row(**given), lambda: {"query": 0, "index": 0}),
    "interval": (lambda **given: result().interval(**given), lambda: {"confidence": 0.9}),
    "over_damping": (lambda **given: result().over_damping(**given), lambda: {"dampings": [0.1]}),
    "to_html": (lambda **given: result().to_html(**given), lambda: {"path": "page.html"}),
    "save": (lambda **given: result().save(**given), lambda: {"directory": "saved"}),
}  # fmt: skip
#: Of methods that are called through a function of ours.
METHODS: dict[str, Callable[..., Any]] = {
    "solve": whence.ConjugateGradient.solve, "top": whence.Attribution.top, "row": whence.Attribution.row,
    "interval": whence.Attribution.interval, "over_damping": whence.Attribution.over_damping,
    "to_html": whence.Attribution.to_html, "save": whence.Attribution.save,
}  # fmt: skip
ODD: list[Any] = [
    None, 5, 0, -1, 2**70, 1.5, float("nan"), float("inf"), True, "", "x", "\x1b[2J\x00", b"x", [], [None], [5], {},
    {"x": 1}, (), object(), print, int, torch.tensor(1.0), torch.ones(2, 2), nn.Linear(2, 2), Path("/dev/null/x"),
    set(), iter(()), random(), DATA, TASK, 1j,
]  # fmt: skip


def arguments(name: str) -> list[str]:
    function = METHODS.get(name, CALLS[name][0])
    known = inspect.signature(function).parameters.values()
    return [p.name for p in known if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL) and p.name != "self"]


#: Arguments that are functions of the user's: what these raise is not ours.
FUNCTIONS = ("params", "describe", "on_run", "trainer")


def check_call(name: str, argument: int, value: int) -> None:
    function, usual = CALLS[name]
    known = arguments(name)
    wrong = known[argument % len(known)]
    if wrong in FUNCTIONS and callable(ODD[value]):
        return
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", WhenceWarning)
            try:
                function(**{**usual(), wrong: ODD[value]})
            except WhenceError:
                pass
            except Exception as error:
                said = f"{name}({wrong}={ODD[value]!r}): {type(error).__name__}: {error}"
                raise AssertionError(said) from error


test_calls, test_calls_long = fuzzed(
    check_call,
    quick=60,
    long=5_000,
    name=st.sampled_from(list(CALLS)),
    argument=st.integers(0, 20),
    value=st.integers(0, len(ODD) - 1),
)
