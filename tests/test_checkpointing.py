"""Models that checkpoint their activations: computed again in the backward pass, with their own parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import whence
from tests.dense import relative_error
from whence import Classification, GaussNewton
from whence.errors import ModelError

DATA = [(torch.randn(6, generator=torch.Generator().manual_seed(k)), k % 4) for k in range(10)]


class Checkpointed(nn.Module):
    def __init__(self, **how: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.how = nn.Linear(6, 12), nn.Linear(12, 4), how
        self.body = nn.Sequential(nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 12))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        return self.last(checkpoint(self.body, x, **self.how) if self.how else self.body(x))


def test_products_are_by_differences_and_right() -> None:
    plain = GaussNewton(Checkpointed().eval(), Classification(), DATA)
    model = Checkpointed(use_reentrant=False).eval()
    found = GaussNewton(model, Classification(), DATA)
    assert (plain.product, found.product) == ("exact", "finite-difference")
    block = plain.zeros(3).randn_like(torch.Generator().manual_seed(1))
    assert relative_error(found.matvec(block), plain.matvec(block)) <= 2e-4
    assert relative_error(found.gradients(DATA[:2]), plain.gradients(DATA[:2])) <= 1e-6
    ours, theirs = (
        whence.attribute(
            gnh.network.model, DATA, DATA[:2], task=Classification(), damping=0.1, solver="cg"
        ).scores
        for gnh in (found, plain)
    )
    assert float((ours - theirs).norm() / theirs.norm()) <= 1e-3
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("product", ["auto", "finite-difference"])
@pytest.mark.parametrize("trained", [True, False])
def test_what_writes_into_the_models_own_gradients_is_refused(product: Any, trained: bool) -> None:
    model = Checkpointed(use_reentrant=True).eval().requires_grad_(trained)
    model.first.requires_grad_(True)
    with pytest.raises(ModelError, match="checkpoints its activations"):
        GaussNewton(model, Classification(), DATA, product=product)


def test_low_precision_is_refused() -> None:
    model = Checkpointed(use_reentrant=False).bfloat16().eval()
    data = [(x.bfloat16(), y) for x, y in DATA]
    with pytest.raises(ModelError, match="give a float32 model"):
        GaussNewton(model, Classification(), data)


def test_exact_products_are_refused() -> None:
    with pytest.raises(ModelError, match="checkpoints its activations"):
        GaussNewton(Checkpointed(use_reentrant=False).eval(), Classification(), DATA, product="exact")


def test_transformers_checkpoint_in_training_alone() -> None:
    """So a model that was trained with checkpointing has exact products, and no less memory."""
    pytest.importorskip("transformers")
    from tests.test_hf import llama

    model = llama()
    model.gradient_checkpointing_enable()
    rows = [torch.tensor([1, 5, 7, 9]), torch.tensor([2, 6, 3])]
    found = GaussNewton(model.eval(), whence.LanguageModeling(), rows)
    plain = GaussNewton(llama().eval(), whence.LanguageModeling(), rows)
    assert found.product == "exact"
    vector = plain.zeros().randn_like(torch.Generator().manual_seed(1))
    assert relative_error(found.matvec(vector), plain.matvec(vector)) <= 1e-6
