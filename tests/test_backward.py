"""Backward passes from a cotangent are autograd's own, to the last bit."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn

from whence.backward import pulled_back, seeded


def _problem() -> tuple[Tensor, list[Tensor], torch.Generator]:
    """Outputs of a network, and its parameters with one that they do not depend on."""
    random = torch.Generator().manual_seed(0)
    layers = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    for parameter in layers.parameters():
        nn.init.normal_(parameter, generator=random)
    unused = torch.zeros(3, requires_grad=True)
    return layers(torch.randn(5, 3, generator=random)), [*layers.parameters(), unused], random


@pytest.mark.parametrize("lead", [(), (3,)], ids=["one", "block"])
def test_gradients_are_those_of_autograd(lead: tuple[int, ...]) -> None:
    outputs, inputs, random = _problem()
    cotangents = torch.randn(*lead, 5, 2, generator=random)
    expected = torch.autograd.grad(
        outputs, inputs, cotangents, allow_unused=True, retain_graph=True, is_grads_batched=bool(lead)
    )
    with torch.no_grad():  # autograd does not mind, so it may be called so
        found = pulled_back(outputs, inputs, cotangents, keep_graph=True)
        again = pulled_back(outputs, inputs, cotangents)
    for mine, twice, theirs in zip(found, again, expected, strict=True):
        if theirs is None:
            assert mine is None
            assert twice is None
        else:
            assert mine is not None
            assert twice is not None
            assert torch.equal(mine, theirs)
            assert torch.equal(twice, theirs)


def test_what_arrives_at_the_outputs_themselves_is_the_cotangent() -> None:
    outputs, _, random = _problem()
    cotangent = torch.randn(5, 2, generator=random)
    (found,) = torch.autograd.grad(seeded(outputs, cotangent), outputs)
    assert torch.equal(found, cotangent)


def test_an_attribution_does_not_load_sympy() -> None:
    """It takes thirty megabytes and a quarter of a second, for shapes that are known."""
    program = """
import sys, torch, whence
random = torch.Generator().manual_seed(0)
data = [(torch.randn(3, generator=random), i % 4) for i in range(40)]
model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 4)).eval()
for accuracy in ("quick", "certified"):
    whence.attribute(model, data, data[:3], task=whence.Classification(), accuracy=accuracy)
print("sympy" in sys.modules)
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"
