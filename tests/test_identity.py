"""Another model, another task or other data behind the same names are refused, with what differs."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whence
from small import DOUBLE, Wrapped, operator
from tiny_hf import gpt2_directory
from whence import Classification, LanguageModeling, Regression
from whence.attribution.identity import Portrait
from whence.errors import RunDirectoryError
from whence.runs import holds
from whence.sources import load_model
from whence.tasks import ConvexLoss, Task
from zoo import vectors

OPTIONS: dict[str, Any] = {"damping": "lambda_max/10", "solver": "cg"}


def chain(activation: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), activation(), nn.Linear(5, 4)).to(DOUBLE).eval()


def ask(path: Path, model: nn.Module, data: Any = None, task: Task | None = None, **options: Any) -> Any:
    data = vectors(DOUBLE) if data is None else data
    task = Classification() if task is None else task
    return whence.attribute(model, data, data[:1], task=task, run_dir=path, **OPTIONS, **options)


def unfinished(monkeypatch: pytest.MonkeyPatch, path: Path, *args: Any, **options: Any) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("whence.attribution.pipeline.solve", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            ask(path, *args, **options)
    assert holds(path, "spectrum")
    assert not holds(path, "result")


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module], str]] = {
    "another module": (
        lambda: chain(nn.Tanh),
        lambda: chain(nn.ReLU),
        r"module 1: 'Tanh\(\)' there, 'ReLU\(\)' now",
    ),
    "another setting": (
        lambda: chain(lambda: nn.LeakyReLU(0.1)),
        lambda: chain(lambda: nn.LeakyReLU(0.2)),
        r"module 1: 'LeakyReLU\(negative_slope=0.1\)' there",
    ),
    "other code": (
        lambda: Wrapped(torch.tanh),
        lambda: Wrapped(lambda x: torch.tanh(1.001 * x)),
        r"outputs on two of the examples: off by",
    ),
}


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize("kind", MODELS)
def test_another_model_of_the_same_weights_is_refused(
    kind: str, finished: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, told = MODELS[kind]
    if finished:
        ask(tmp_path, first())
    else:
        unfinished(monkeypatch, tmp_path, first())
    with pytest.raises(RunDirectoryError, match=f"another model of the same weights.*{told}.*Give another"):
        ask(tmp_path, second())
    assert torch.isfinite(ask(tmp_path, first()).scores).all()


def test_clean_and_validate_know_the_model_too(tmp_path: Path) -> None:
    data = vectors(DOUBLE)
    told = r"module 1: 'Tanh\(\)' there, 'ReLU\(\)' now"
    whence.clean(chain(nn.Tanh), data, task=Classification(), rank=2, run_dir=tmp_path / "clean")
    with pytest.raises(RunDirectoryError, match=told):
        whence.clean(chain(nn.ReLU), data, task=Classification(), rank=2, run_dir=tmp_path / "clean")
    result = ask(tmp_path / "run", chain(nn.Tanh))
    with pytest.raises(RunDirectoryError, match=told):
        whence.validate(
            chain(nn.ReLU), data, data[:1], result, task=Classification(), directory=tmp_path / "run"
        )


def test_another_configuration_of_a_hugging_face_model_is_refused_by_its_entry(tmp_path: Path) -> None:
    directory = gpt2_directory(tmp_path / "model")
    data = [{"input_ids": torch.arange(3, 9) + i} for i in range(4)]
    ask(tmp_path / "run", load_model(directory).model, data, LanguageModeling())
    moved = directory.rename(tmp_path / "elsewhere")  # where it lies is no matter
    ask(tmp_path / "run", load_model(moved).model, data, LanguageModeling())
    config = json.loads((moved / "config.json").read_text())
    (moved / "config.json").write_text(json.dumps({**config, "activation_function": "relu"}))
    with pytest.raises(RunDirectoryError, match=r"configuration activation_function: .*gelu_new.*'relu'"):
        ask(tmp_path / "run", load_model(moved).model, data, LanguageModeling())


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize("index", [0, 131, 399])
def test_any_other_example_is_refused(
    index: int, finished: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = vectors(DOUBLE) * 20
    if finished:
        ask(tmp_path, chain(nn.Tanh), data)
    else:
        unfinished(monkeypatch, tmp_path, chain(nn.Tanh), data)
    data[index] = (data[index][0] + 1e-9, data[index][1])
    with pytest.raises(RunDirectoryError, match=r"another configuration.*train: '400 examples"):
        ask(tmp_path, chain(nn.Tanh), data)


def test_another_loss_is_refused(tmp_path: Path) -> None:
    data = [(x, torch.ones(4, dtype=DOUBLE)) for x, _ in vectors(DOUBLE)]
    ask(tmp_path / "a", chain(nn.Tanh), data, Regression(variance=1.0))
    with pytest.raises(RunDirectoryError, match="task: 'Regression"):
        ask(tmp_path / "a", chain(nn.Tanh), data, Regression(variance=2.0))

    def cosh(times: float) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda h, y: (times * (h - y)).cosh().log().sum(-1)

    ask(tmp_path / "b", chain(nn.Tanh), data, ConvexLoss(cosh(1.0)))
    ask(tmp_path / "b", chain(nn.Tanh), data, ConvexLoss(cosh(1.0)))
    with pytest.raises(RunDirectoryError, match="losses on two of the examples: off by"):
        ask(tmp_path / "b", chain(nn.Tanh), data, ConvexLoss(cosh(1.1)))


def test_another_own_solver_is_refused(tmp_path: Path) -> None:
    data = vectors(DOUBLE)

    def with_solver(tolerance: float) -> None:
        whence.attribute(
            chain(nn.Tanh), data, data[:1], task=Classification(), run_dir=tmp_path, damping=0.1,
            solver=whence.ConjugateGradient(tolerance=tolerance),
        )  # fmt: skip

    with_solver(1e-5)
    with_solver(1e-5)
    with pytest.raises(RunDirectoryError, match="own solver: 'ConjugateGradient "):
        with_solver(1e-6)


def test_the_last_digits_are_another_machines_and_the_first_another_models() -> None:
    portrait = Portrait.of(operator())
    assert list(portrait.different(portrait)) == []
    for off, count in ((1e-10, 0), (1e-6, 1)):
        other = replace(portrait, outputs=portrait.outputs + off * portrait.outputs.abs().max())
        assert len(list(portrait.different(other))) == count
    shorter = replace(portrait, losses=portrait.losses[1:])
    assert list(portrait.different(shorter)) == [
        "losses: (2,) of torch.float64 there, (1,) of torch.float64 now"
    ]
