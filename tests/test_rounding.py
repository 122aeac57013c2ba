"""Weights of 16 bits: whether the scores would be the same, had these been rounded otherwise."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import whence
from whence import Attribution, Classification, attribute

pytestmark = pytest.mark.filterwarnings("ignore:the spectrum's estimates contradict")  # few examples are left


def trained(steps: int) -> tuple[nn.Module, list[tuple[torch.Tensor, int]]]:
    """A network after so many steps on points with random labels: after many, it knows them by heart."""
    random = torch.Generator().manual_seed(0)
    x, y = torch.randn(60, 4, generator=random), torch.randint(2, (60,), generator=random)
    x = x.bfloat16().float()  # so that no precision rounds the data
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model.eval(), list(zip(x, y.tolist(), strict=True))


def asked(model: nn.Module, data: list[tuple[torch.Tensor, int]], run_dir: Path | None = None) -> Attribution:
    dtype = next(model.parameters()).dtype
    given = [(x.to(dtype), y) for x, y in data]
    random = torch.Generator().manual_seed(5)
    queries = [(torch.randn(4, generator=random).bfloat16().to(dtype), k % 2) for k in range(3)]
    return attribute(
        model,
        given,
        queries,
        task=Classification(),
        solver="cg",
        damping=0.01,
        accuracy=0.99999,
        run_dir=run_dir,
    )


def agreement(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.stack([torch.corrcoef(torch.stack(pair).double())[0, 1] for pair in zip(a, b, strict=True)])


@pytest.mark.parametrize(
    ("steps", "dtype"), [(10, torch.bfloat16), (300, torch.bfloat16), (300, torch.float16)]
)
def test_what_rounding_cost_is_foretold(steps: int, dtype: torch.dtype) -> None:
    model, data = trained(steps)
    exact, rounded = asked(model, data), asked(copy.deepcopy(model).to(dtype), data)
    assert exact.rounding is None
    assert rounded.rounding is not None
    lost, foretold = 1 - agreement(exact.scores, rounded.scores), 1 - rounded.rounding
    assert 1 / 10 < float(foretold.mean() / lost.mean()) < 10


def test_what_loses_more_than_a_hundredth_is_doubted_and_kept(tmp_path: Path) -> None:
    model, data = trained(10)
    result = asked(model.bfloat16(), data, tmp_path / "run")
    again = whence.load(tmp_path / "run")
    assert again.rounding is not None
    assert result.rounding is not None
    assert torch.equal(again.rounding, result.rounding)
    assert not any("16 bits" in doubt for doubt in again.doubts)
    lost = replace(again, rounding=torch.tensor([0.999, 0.95, 0.97]))
    assert "scores of queries 1, 2 would have a correlation of 0.95" in lost.doubts[-1]
