"""What is read of a training: optimizers, their states, Trainer's files, numbers."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from whence.errors import OptionError
from whence.training import Training
from whence.vectors import ParamVector


def trained(kind: Any, steps: int = 5, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    optimizer = kind(model.parameters(), **options)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 3)).square().mean().backward()
        optimizer.step()
    return model, optimizer


def test_adam_brings_its_second_moment() -> None:
    model, optimizer = trained(torch.optim.AdamW, lr=0.01, weight_decay=0.1, betas=(0.9, 0.99))
    found = Training.read(optimizer, model)
    assert (found.rate, found.steps, found.weight_decay, found.momentum) == (0.01, 5, 0.1, 0.0)
    assert found.time == pytest.approx(0.05)
    assert found.adaptive
    assert found.root_moment is not None
    kept = optimizer.state[model[0].weight]["exp_avg_sq"] / (1 - 0.99**5)  # type: ignore[index]
    torch.testing.assert_close(found.root_moment["0.weight"], kept.sqrt() + 1e-8)


def test_a_state_dict_says_the_same() -> None:
    model, optimizer = trained(torch.optim.Adam, lr=0.01)
    one, other = Training.read(optimizer, model), Training.read(optimizer.state_dict(), model)
    assert one.identity == other.identity


def test_a_state_dict_with_groups_is_read_as_trainer_makes_them() -> None:
    model, _ = trained(torch.optim.Adam, lr=0.01)
    decayed = [model[0].weight, model[2].weight]  # type: ignore[index]
    rest = [p for p in model.parameters() if all(p is not d for d in decayed)]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    )
    model(torch.randn(8, 3)).square().mean().backward()
    optimizer.step()
    one, other = Training.read(optimizer, model), Training.read(optimizer.state_dict(), model)
    assert one.identity == other.identity
    assert other.root_moment is not None
    assert set(other.root_moment) == {name for name, _ in model.named_parameters()}


def test_the_state_of_another_model_is_refused() -> None:
    _, optimizer = trained(torch.optim.Adam, lr=0.01)
    with pytest.raises(OptionError, match="do not match the model's 2"):
        Training.read(optimizer.state_dict(), nn.Linear(7, 2))
    with pytest.raises(OptionError, match="not the model's"):
        Training.read(optimizer, nn.Linear(7, 2))


def test_a_schedule_counts_by_its_mean() -> None:
    model, optimizer = trained(torch.optim.Adam, steps=1, lr=0.01)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=4)
    for _ in range(4):
        optimizer.step()
        scheduler.step()
    assert Training.read(optimizer, model).rate == pytest.approx(0.005)


def test_sgd_keeps_no_count_and_says_so() -> None:
    model, optimizer = trained(torch.optim.SGD, lr=0.1, momentum=0.9)
    with pytest.raises(OptionError, match="how many steps"):
        Training.read(optimizer, model)


def test_an_optimizer_whose_state_is_not_read_is_refused() -> None:
    model, optimizer = trained(torch.optim.RMSprop, lr=0.01)
    with pytest.raises(OptionError, match="RMSprop"):
        Training.read(optimizer, model)


@pytest.mark.parametrize(
    ("optim", "schedule", "time"),
    [
        ("adamw_torch", "linear", 0.05),
        ("sgd", "constant", 0.1),
        ("adafactor", "linear", None),
        ("sgd", "polynomial", None),
    ],
)
def test_training_arguments(optim: str, schedule: str, time: float | None) -> None:
    given = SimpleNamespace(
        learning_rate=1e-3, max_steps=100, weight_decay=0.0, optim=optim, lr_scheduler_type=schedule
    )
    if time is None:
        with pytest.raises(OptionError, match="too little is known"):
            Training.read(given)
        return
    found = Training.read(given)
    assert (found.time, found.adaptive) == (pytest.approx(time), optim.startswith("adam"))


@pytest.mark.parametrize(
    ("given", "time"),
    [
        ({"optimizer": "sgd", "rate": 0.1, "steps": 100, "momentum": 0.9}, 100.0),
        ("optimizer=adamw,rate=1e-3,steps=1000,schedule=cosine", 0.5),
    ],
)
def test_numbers(given: Any, time: float) -> None:
    assert Training.read(given).time == pytest.approx(time)


@pytest.mark.parametrize(
    "given",
    [
        {"rate": 0.1, "steps": 100},
        {"optimizer": "sgd", "rate": 0.1},
        {"optimizer": "sgd", "rate": -0.1, "steps": 1},
        {"optimizer": "sgd", "rate": "fast", "steps": 1},
        {"optimizer": "sgd", "rate": 0.1, "steps": 1, "momentum": 1.0},
        {"optimizer": "lion", "rate": 0.1, "steps": 1},
        "nowhere",
        3.0,
    ],
)
def test_what_says_nothing_is_refused(given: Any) -> None:
    with pytest.raises(OptionError, match="training"):
        Training.read(given)


def test_a_checkpoint_of_trainer(tmp_path: Path) -> None:
    model, optimizer = trained(torch.optim.AdamW, lr=0.01)
    history = [
        {"step": 10, "learning_rate": 4e-3},
        {"step": 20, "learning_rate": 2e-3},
        {"step": 20, "loss": 1.0},
    ]
    (tmp_path / "trainer_state.json").write_text(json.dumps({"global_step": 20, "log_history": history}))
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    found = Training.read(tmp_path, model)
    assert found.time == pytest.approx(10 * 4e-3 + 10 * 2e-3)
    assert found.root_moment is not None
    alone = Training.read(tmp_path / "trainer_state.json")
    assert (alone.time, alone.adaptive, alone.root_moment) == (found.time, True, None)


def test_a_damaged_state_is_refused(tmp_path: Path) -> None:
    (tmp_path / "trainer_state.json").write_text("{")
    with pytest.raises(OptionError, match=r"trainer_state\.json"):
        Training.read(tmp_path)


def test_other_moments_of_the_same_length_are_another_training() -> None:
    first = ParamVector({"x": torch.tensor([1.0, 2.0])})
    told = {
        Training(0.1, 5, adaptive=True, root_moment=m).identity
        for m in (first, first.like({"x": first["x"].flip(0)}))
    }
    assert len(told) == 2
