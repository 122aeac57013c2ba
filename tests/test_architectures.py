"""Every architecture that docs/data.md names: products and scores against dense float64 matrices."""

from __future__ import annotations

import functools
from typing import Literal

import pytest
import torch

from dense import dense_gauss_newton, relative_error
from whence import Dense, GaussNewton, ParamVector, attribute
from whence.model.layers import ExampleGradients
from whence.scoring.cost import count_work
from zoo import ARCHITECTURES, Case

#: What finite differences in float32 may be off by.
CLOSE = 5e-3
#: No layer of these computes in float32 when the model is float64.
ALL_FLOAT64 = {"falcon", "lstm", "low-rank adapters", "vit", "swin", "convnext", "deberta-v2", "bart"}
ALL_FLOAT64 |= {"bert, masked", "bert, tokens"}
# DeBERTa scripts functions when it is imported, which torch no longer likes.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
MIXTURES = [case for case in ARCHITECTURES if case.name in ("mixtral", "gpt-oss", "qwen2-moe")]


def operator(
    case: Case, dtype: torch.dtype, product: Literal["auto", "finite-difference"] = "auto"
) -> GaussNewton:
    return GaussNewton(case.model(dtype), case.task, case.data(dtype), product=product)


@functools.cache
def reference(case: Case) -> tuple[GaussNewton, Dense]:
    gnh = operator(case, torch.float64)
    return gnh, dense_gauss_newton(gnh)


def narrow(vector: ParamVector) -> ParamVector:
    return ParamVector({n: t.float() for n, t in vector.items()}, columns=vector.columns)


@pytest.mark.parametrize("case", ARCHITECTURES, ids=lambda case: case.name)
def test_products_equal_the_dense_matrix(case: Case) -> None:
    gnh, dense = reference(case)
    random = gnh.zeros().randn_like(torch.Generator().manual_seed(5))
    block = ParamVector.stack([random, gnh.gradients(case.data(torch.float64)[:1]).column(0)])
    expected = dense.matvec(block)
    assert relative_error(gnh.matvec(block), expected) <= (1e-10 if case.name in ALL_FLOAT64 else 2e-6)
    single = operator(case, torch.float32)
    found = relative_error(single.matvec(narrow(block)), expected)
    assert found <= (1e-4 if single.product == "exact" else CLOSE)
    assert count_work(single).flops > 0
    differences = operator(case, torch.float32, "finite-difference")
    assert relative_error(differences.matvec(narrow(block)), expected) <= CLOSE


@pytest.mark.parametrize("case", MIXTURES, ids=lambda case: case.name)
def test_fused_experts_have_exact_products(case: Case) -> None:
    gnh = operator(case, torch.float32)
    assert gnh.network.model.config._experts_implementation == "grouped_mm"
    assert gnh.product == "exact", gnh.product_reason
    assert gnh.vectorises(gnh.terms.fetch(torch.arange(2)), gnh.zeros(1))


@pytest.mark.parametrize("case", MIXTURES[:1], ids=lambda case: case.name)
def test_the_quick_answer_of_a_mixture_is_near_the_dense_one(case: Case) -> None:
    gnh, dense = reference(case)
    data, damping = case.data(torch.float64), 0.1 * float(torch.linalg.matrix_norm(dense.matrix, 2))
    gradients = torch.stack([dense.flatten(g) for g in gnh.gradients(data).unstack()])
    damped = dense.matrix + damping * torch.eye(len(dense.matrix), dtype=torch.float64)
    expected = gradients[:2] @ torch.linalg.solve(damped, gradients.T)
    model = case.model(torch.float32)
    result = attribute(model, data, data[:2], task=case.task, damping=damping, accuracy="quick")
    for found, row in zip(result.scores.double(), expected, strict=True):
        assert float(torch.corrcoef(torch.stack([found, row]))[0, 1]) >= 0.98


@pytest.mark.parametrize("case", MIXTURES, ids=lambda case: case.name)
def test_examples_gradients_leave_fused_experts_to_whole_batches(case: Case) -> None:
    """What is read off layers is every example's own gradient; of experts, whose rows are mixed, none is read."""
    gnh = operator(case, torch.float32)
    batch = gnh.terms.fetch(torch.arange(2))
    layers = ExampleGradients(gnh.network, batch)
    assert any("experts" in name for name in layers.missing)
    assert not any("embed_tokens" in name or "self_attn.q_proj" in name for name in layers.missing)
    (passed,) = layers.passes(batch, lambda outputs: [torch.ones_like(outputs)], others=True)
    leaves = gnh.network.leaves()
    expected = torch.autograd.grad(gnh.network.outputs(batch, leaves).sum(), list(leaves.values()))
    for name, whole in zip(leaves, expected, strict=True):
        own = passed.gradients(name)
        found = passed.others[name] if own is None else own.sum(0)
        torch.testing.assert_close(found, whole, rtol=1e-3, atol=1e-3)
