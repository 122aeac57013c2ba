"""Models that are not on the CPU: every tensor where it belongs, and how often the host waits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whence
from tests.dense import relative_error
from tests.device import DEVICE, StrayTensorError, is_there, on_device, to_device
from whence import Classification, GaussNewton, LanguageModeling
from whence.errors import ModelError

DATA = [(torch.randn(6, generator=torch.Generator().manual_seed(k)), k % 4) for k in range(10)]


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).eval()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(9, 6), nn.Linear(6, 9)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embed(input_ids).cumsum(1)))


SENTENCES = [
    torch.tensor([1, 4, 2, 7, 3]),
    torch.tensor([2, 8, 1]),
    torch.tensor([5, 5, 6, 1]),
    torch.tensor([3, 1]),
]


def test_the_device_tells_stray_tensors() -> None:
    with on_device() as waits:
        layer, x = to_device(nn.Linear(3, 2)), torch.ones(4, 3)
        assert next(layer.parameters()).device == DEVICE
        with pytest.raises(StrayTensorError, match=r"CPU tensor of shape \(4, 3\)"):
            layer(x)
        y = layer(x.to(DEVICE))
        assert y.device == DEVICE
        with pytest.raises(StrayTensorError, match="mul"):
            y * torch.arange(2)
        with pytest.raises(StrayTensorError, match="draws on"):
            torch.rand(3, generator=torch.Generator(), device=DEVICE)
        torch.rand(3, generator=torch.Generator(DEVICE), device=DEVICE)
        assert waits == []
        float(y.detach().sum())
        assert not is_there(y.cpu())
        assert waits == ["__float__", "cpu"]


def test_a_task_that_makes_a_cpu_tensor_is_caught() -> None:
    """What the tests below would say of a mistake in whence itself."""

    class Careless(Classification):
        def hessian_product(self, outputs: Tensor, tangents: Tensor, batch: Any) -> Tensor:
            return super().hessian_product(outputs, tangents, batch) * torch.ones(outputs.shape[-1])

    with on_device():
        operator = GaussNewton(to_device(mlp()), Careless(), DATA)
        with pytest.raises(StrayTensorError):
            operator.matvec(operator.zeros())


@pytest.mark.parametrize(("product", "waits_each"), [("exact", 1), ("finite-difference", 20)])
def test_products(product: Any, waits_each: int) -> None:
    """Of exact ones the host waits once a micro-batch: for whether the outputs are finite."""
    here = GaussNewton(mlp(), Classification(), DATA, product=product, micro_batch=5)
    expected = here.matvec(here.zeros().randn_like(torch.Generator().manual_seed(0)))
    with on_device() as waits:
        there = GaussNewton(to_device(mlp()), Classification(), DATA, product=product, micro_batch=5)
        vector = there.zeros().randn_like(torch.Generator().manual_seed(0))
        block = there.zeros(3).randn_like(torch.Generator().manual_seed(0))
        waits.clear()
        found = there.matvec(vector)
        assert len(waits) <= 2 * waits_each
        assert all(is_there(part) for part in found.values())
        waits.clear()
        there.matvec(block)
        assert len(waits) <= 2 * (1 if product == "exact" else 3 * waits_each)
        assert there.loop_reason is None
    assert relative_error(found, expected) <= (1e-6 if product == "exact" else 1e-3)


@pytest.mark.parametrize(
    "given",
    [
        {"solver": "cg", "damping": 0.1},
        pytest.param({"solver": "lissa", "damping": 0.1}, marks=pytest.mark.slow),
        {"accuracy": "quick"},
    ],
    ids=lambda given: "-".join(map(str, given.values())),
)
def test_attributions(given: dict[str, Any]) -> None:
    task = Classification()
    expected = whence.attribute(mlp(), DATA, DATA[:2], task=task, **given)
    with on_device():
        found = whence.attribute(to_device(mlp()), DATA, DATA[:2], task=task, **given)
    assert found.scores.device.type == "cpu"
    assert float((found.scores - expected.scores).norm() / expected.scores.norm()) <= 0.05


@pytest.mark.slow
def test_a_language_model_and_cleaning() -> None:
    task = LanguageModeling()
    expected = whence.attribute(
        Recurrent().eval(), SENTENCES, SENTENCES[:1], task=task, damping=0.1, solver="cg"
    )
    with on_device():
        model = to_device(Recurrent().eval())
        found = whence.attribute(model, SENTENCES, SENTENCES[:1], task=task, damping=0.1, solver="cg")
        whence.clean(to_device(mlp()), DATA, task=Classification(), damping=0.1)
    torch.testing.assert_close(found.scores, expected.scores, rtol=1e-2, atol=1e-4)


def test_autocast_is_refused() -> None:
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ModelError, match="autocast is on"):
        GaussNewton(mlp(), Classification(), DATA)
