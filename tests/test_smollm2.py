"""A real language model: SmolLM2-135M's weights, unchanged Hugging Face class, fused attention."""

from __future__ import annotations

import pydoc_data.topics

import pytest
import torch

from dense import relative_error
from reproduction.assets import smollm2_directory
from whence import GaussNewton, LanguageModeling, ParamVector, lanczos

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("default"),  # transformers' own deprecations are not ours to mend
]


@pytest.fixture(scope="module")
def operators() -> dict[str, GaussNewton]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(2)
    directory = smollm2_directory()
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    topics = pydoc_data.topics.topics
    data = [
        {"input_ids": torch.tensor(tokenizer(topics[t]).input_ids[:64])} for t in ("with", "lambda", "try")
    ]

    def frozen_ends(name: str) -> bool:
        return "embed" not in name and "lm_head" not in name

    return {
        product: GaussNewton(model, LanguageModeling(), data, params=frozen_ends, product=product)
        for product in ("exact", "finite-difference")
    }


@pytest.fixture(scope="module")
def directions(operators: dict[str, GaussNewton]) -> dict[str, ParamVector]:
    exact = operators["exact"]
    generator = torch.Generator().manual_seed(0)
    top = lanczos(exact, generator=generator, keep_basis=False, want_vector=True, max_products=10).top_vector
    assert top is not None
    return {
        "random": exact.zeros().randn_like(generator),
        "gradient": exact.gradients(exact.terms.data[:1]).column(0),
        "top eigenvector": top,
    }


def test_the_unchanged_model_supports_exact_products(operators: dict[str, GaussNewton]) -> None:
    assert operators["exact"].network.model.config._attn_implementation == "sdpa"
    assert operators["exact"].num_parameters == 106_203_456


@pytest.mark.parametrize("name", ["random", "gradient", "top eigenvector"])
def test_finite_differences_against_exact_products(
    operators: dict[str, GaussNewton], directions: dict[str, ParamVector], name: str
) -> None:
    expected = operators["exact"].matvec(directions[name])
    for scale in (1e-6, 1.0, 1e6):
        vector = directions[name].clone().scale_(scale)
        actual = operators["finite-difference"].matvec(vector).scale_(1 / scale)
        assert relative_error(actual, expected) <= 1e-3


def test_parameters_are_left_bit_for_bit(
    operators: dict[str, GaussNewton], directions: dict[str, ParamVector]
) -> None:
    model = operators["finite-difference"].network.model
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    operators["finite-difference"].matvec(directions["random"])
    assert all(torch.equal(before[n], p) for n, p in model.named_parameters())
