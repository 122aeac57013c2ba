"""EK-FAC against dense float64 Hessians: its eigenvalues, its scale, what it covers, and what it leaves alone."""

from __future__ import annotations

import copy
import functools
import math
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from conformance import basis
from dense import dense_gauss_newton, per_example_matrices, relative_error
from digits import exact_hessian, flatten, load, unflatten
from small import DOUBLE, NOT_POSITIVE, classifier, evaluated, generator, operator
from test_untouched import state, used_model
from whence import (
    Classification,
    ConvexLoss,
    Dense,
    Estimate,
    GaussNewton,
    LanguageModeling,
    ParamVector,
    Regression,
)
from whence.errors import ModelError, OptionError, VectorError
from whence.preconditioners.ekfac import Ekfac, KroneckerBlock, ekfac
from whence.runs import read_value, write_value
from zoo import CASES, VOCABULARY, sequences, vectors

ZOO = {case.name: case for case in CASES}


def from_zoo(name: str) -> GaussNewton:
    case = ZOO[name]
    return GaussNewton(case.model(DOUBLE), case.task, case.data(DOUBLE))


def llama() -> GaussNewton:
    """A Llama of one layer on ragged sequences, some labels ignored."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        intermediate_size=12, max_position_embeddings=16, initializer_range=0.4, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return GaussNewton(evaluated(LlamaForCausalLM(config)), LanguageModeling(), sequences(DOUBLE))


class Bigrams(nn.Module):
    """The smallest language model."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 5)
        self.head = nn.Linear(5, VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.embed(input_ids))


def bigrams() -> GaussNewton:
    torch.manual_seed(0)
    return GaussNewton(evaluated(Bigrams()), LanguageModeling(), sequences(DOUBLE))


@functools.cache
def digits_mlp() -> tuple[GaussNewton, Tensor]:
    """64-8-10, trained on digits: the operator in float64 and its dense Hessian."""
    train, _ = load()
    x, y = train.tensors
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=1e-4)
    for _ in range(20):
        for index in torch.randperm(len(x)).split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[index]), y[index]).backward()
            optimizer.step()
    gnh = GaussNewton(evaluated(model), Classification(), TensorDataset(x.double(), y))
    return gnh, exact_hessian(model, x)


def dense(gnh: GaussNewton) -> Tensor:
    return dense_gauss_newton(gnh).matrix


def as_matrix(function: Callable[[ParamVector], ParamVector], gnh: GaussNewton) -> Tensor:
    return flatten(function(unflatten(torch.eye(gnh.num_parameters, dtype=DOUBLE), gnh)))


def positions(gnh: GaussNewton, name: str) -> Tensor:
    """Where a parameter stands in the rows of the dense matrix."""
    start = 0
    for other, tensor in gnh.zeros().items():
        if other == name:
            return torch.arange(start, start + tensor.numel())
        start += tensor.numel()
    raise KeyError(name)


def rows_of(block: KroneckerBlock, gnh: GaussNewton) -> Tensor:
    """Rows of the dense matrix in the order of ``Q_G ⊗ Q_A``: outputs first, a bias as the last input."""
    outputs = len(block.eigenvalues)
    return torch.cat([positions(gnh, n).reshape(outputs, -1) for n in block.names], 1).flatten()


def basis_of(block: KroneckerBlock) -> Tensor:
    """``Q_G ⊗ Q_A``; of an embedding, the left factor is the identity."""
    left = torch.eye(len(block.eigenvalues), dtype=DOUBLE) if block.left is None else block.left
    return torch.kron(left, block.right)


def assert_diagonal_of(P: Ekfac, H: Tensor, gnh: GaussNewton, tolerance: float = 1e-10) -> None:
    """P's eigenvalues are H's diagonal in P's basis, which is orthonormal."""
    for block in P.blocks:
        rows = rows_of(block, gnh)
        Q = basis_of(block)
        torch.testing.assert_close(Q.T @ Q, torch.eye(len(Q), dtype=DOUBLE))
        expected = (Q.T @ H[rows][:, rows] @ Q).diagonal().reshape(block.eigenvalues.shape)
        torch.testing.assert_close(
            block.eigenvalues, expected, rtol=0, atol=tolerance * float(expected.max())
        )


def covered_trace(P: Ekfac, H: Tensor, gnh: GaussNewton) -> float:
    return sum(float(H.diagonal()[rows_of(block, gnh)].sum()) for block in P.blocks)


# --- against the dense Hessian -------------------------------------------------------------------------------------


def test_eigenvalues_on_digits_are_the_diagonal_of_the_hessian() -> None:
    gnh, H = digits_mlp()
    P = ekfac(gnh, 0.1, generator=generator())
    assert P.curvature == "exact"
    assert not P.uncovered
    assert_diagonal_of(P, H, gnh)
    assert math.isclose(P.trace, float(H.trace()), rel_tol=1e-10)


def test_the_basis_on_digits_is_that_of_inputs_and_gradients() -> None:
    gnh, _ = digits_mlp()
    first, last = ekfac(gnh, 0.1, generator=generator()).blocks
    x = gnh.terms.data.tensors[0]
    inputs = torch.cat([x, x.new_ones(len(x), 1)], 1)
    with torch.no_grad():
        p = gnh.network.model(x).softmax(-1)
    for Q, moments in (
        (first.right, inputs.T @ inputs / len(x)),
        (last.left, torch.diag(p.mean(0)) - p.T @ p / len(x)),  # the mean of S
    ):
        rotated = Q.T @ moments @ Q
        torch.testing.assert_close(rotated, torch.diag(rotated.diagonal()))


@pytest.mark.parametrize("name", ["mlp", "convnet", "opt"])
def test_eigenvalues_are_the_diagonal_of_the_hessian(name: str) -> None:
    gnh = from_zoo(name)
    H = dense(gnh)
    P = ekfac(gnh, 0.1, generator=generator(), curvature="exact")
    assert_diagonal_of(P, H, gnh)
    assert math.isclose(P.trace, covered_trace(P, H, gnh), rel_tol=1e-10)
    assert {n for b in P.blocks for n in b.names} | set(P.uncovered) == set(gnh.network.parameters)


def test_a_llama_on_ragged_sequences() -> None:
    gnh = llama()
    H = dense(gnh)
    P = ekfac(gnh, 0.1, generator=generator(), curvature="exact")
    assert_diagonal_of(P, H, gnh, tolerance=1e-5)  # its norms work in float32
    assert math.isclose(P.trace, covered_trace(P, H, gnh), rel_tol=1e-5)
    assert len(P.blocks) == 9
    assert list(P.uncovered) == [
        "model.layers.0.input_layernorm.weight",
        "model.layers.0.post_attention_layernorm.weight",
        "model.norm.weight",
    ]
    assert P.uncovered["model.norm.weight"].startswith("a parameter of LlamaRMSNorm")
    v = gnh.zeros().randn_like(generator())
    for name in P.uncovered:  # P is λ there
        torch.testing.assert_close(P.solve(v)[name], v[name] / 0.1)
        torch.testing.assert_close(P.root_solve(v)[name], v[name] / math.sqrt(0.1))


def test_a_sampled_curvature_of_sequences_is_unbiased() -> None:
    gnh = bigrams()
    H = dense(gnh)
    random = generator()
    draws = [ekfac(gnh, 0.1, generator=random, curvature="sampled") for _ in range(100)]
    found = Estimate.from_samples([P.trace for P in draws])
    assert found.stderr < 0.03 * found.value
    assert abs(found.value - covered_trace(draws[0], H, gnh)) <= 4 * found.stderr
    assert {P.curvature for P in draws} == {"sampled"}
    more = [ekfac(gnh, 0.1, generator=random, curvature="sampled", samples=8).trace for _ in range(25)]
    several = Estimate.from_samples(more)
    assert abs(several.value - covered_trace(draws[0], H, gnh)) <= 4 * several.stderr
    assert torch.tensor(more).std() < 0.5 * torch.tensor([P.trace for P in draws]).std()  # 1/√8 of it


def test_draws_of_a_sampled_curvature_approach_its_diagonal() -> None:
    gnh, H = digits_mlp()
    P = ekfac(gnh, 0.1, generator=generator(), curvature="sampled", samples=20)
    for block in P.blocks:
        rows = rows_of(block, gnh)
        Q = basis_of(block)
        expected = (Q.T @ H[rows][:, rows] @ Q).diagonal().reshape(block.eigenvalues.shape)
        assert float((block.eigenvalues - expected).norm() / expected.norm()) < 0.1


@pytest.mark.parametrize("curvature", ["exact", "sampled"])
def test_one_linear_layer_under_squared_error_is_a_kronecker_product(curvature: Any) -> None:
    torch.manual_seed(0)
    data = [(x, torch.randn(3, dtype=DOUBLE)) for x, _ in vectors(DOUBLE)]
    gnh = GaussNewton(evaluated(nn.Linear(6, 3)), Regression(variance=0.5), data)
    P = ekfac(gnh, 0.3, generator=generator(), curvature=curvature, samples=50)
    x = torch.stack([torch.cat([x, torch.ones(1, dtype=DOUBLE)]) for x, _ in data])
    rows = rows_of(P.blocks[0], gnh)
    H = torch.zeros(21, 21, dtype=DOUBLE)
    H[rows[:, None], rows] = torch.kron(torch.eye(3, dtype=DOUBLE), x.T @ x / len(x)) / 0.5
    inverse = torch.linalg.inv(H + 0.3 * torch.eye(21, dtype=DOUBLE))
    tolerance = 1e-10 if curvature == "exact" else 0.1
    assert float((as_matrix(P.solve, gnh) - inverse).norm() / inverse.norm()) < tolerance


def test_one_linear_layer_whose_predictions_are_all_alike_is_a_kronecker_product() -> None:
    model = evaluated(nn.Linear(6, 4))
    with torch.no_grad():
        model.weight.zero_()
    gnh = operator(model)
    P = ekfac(gnh, 0.02, generator=generator())
    inverse = torch.linalg.inv(dense(gnh) + 0.02 * torch.eye(28, dtype=DOUBLE))
    torch.testing.assert_close(as_matrix(P.solve, gnh), inverse)


@pytest.mark.parametrize("outputs", ["several", "one"])
def test_any_convex_loss(outputs: str) -> None:
    torch.manual_seed(0)
    task = ConvexLoss(lambda h, y: (h - y.reshape(h.shape)).cosh().log().reshape(len(h), -1).sum(1))
    width = 3 if outputs == "several" else 1
    layers: list[nn.Module] = [nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, width)]
    model = evaluated(nn.Sequential(*layers, *([nn.Flatten(0)] if outputs == "one" else [])))
    gnh = GaussNewton(model, task, [(x, torch.randn(width, dtype=DOUBLE)) for x, _ in vectors(DOUBLE)])
    P = ekfac(gnh, 0.1, generator=generator())
    assert P.curvature == "exact"
    assert_diagonal_of(P, as_matrix(gnh.matvec, gnh), gnh)
    with pytest.raises(OptionError, match="curvature='exact'"):
        ekfac(gnh, 0.1, generator=generator(), curvature="sampled")


def test_single_precision() -> None:
    gnh, _ = digits_mlp()
    model = copy.deepcopy(gnh.network.model).float()
    data = TensorDataset(gnh.terms.data.tensors[0].float(), gnh.terms.data.tensors[1])
    single = ekfac(GaussNewton(model, Classification(), data), 0.05, generator=generator())
    wide = ekfac(gnh, 0.05, generator=generator())
    v = gnh.zeros().randn_like(generator())
    narrow = ParamVector({name: tensor.float() for name, tensor in v.items()})
    assert single.solve(narrow)["0.weight"].dtype == torch.float32
    assert relative_error(single.solve(narrow), wide.solve(v)) < 1e-3
    assert relative_error(single.root_solve(single.root_solve(narrow)), single.solve(narrow)) < 1e-5


# --- as a preconditioner -------------------------------------------------------------------------------------------


def iterations(A: Tensor, b: Tensor, precondition: Callable[[Tensor], Tensor], tolerance: float) -> int:
    """Conjugate gradients until the error in the norm of A is ``tolerance`` of the solution's."""
    exact = torch.linalg.solve(A, b)
    x, r = torch.zeros_like(b), b.clone()
    z = precondition(r)
    p, rz = z.clone(), r @ z
    for k in range(1, 1000):
        Ap = A @ p
        x += rz / (p @ Ap) * p
        r -= rz / (p @ Ap) * Ap
        if (x - exact) @ A @ (x - exact) <= tolerance**2 * (exact @ A @ exact):
            return k
        z = precondition(r)
        p, rz = z + (r @ z) / rz * p, r @ z
    raise AssertionError("conjugate gradients did not converge")


@pytest.mark.parametrize("curvature", ["exact", "sampled"])
def test_conjugate_gradients_need_fewer_iterations(curvature: Any) -> None:
    gnh, H = digits_mlp()
    damping = float(torch.linalg.eigvalsh(H)[-1]) / 1000
    A = H + damping * torch.eye(len(H), dtype=DOUBLE)
    P = ekfac(gnh, damping, generator=generator(), curvature=curvature)
    inverse = as_matrix(P.solve, gnh)
    _, test = load()
    queries = flatten(gnh.gradients([(test[i][0].double(), test[i][1]) for i in range(5)]))
    for tolerance in (1e-2, 1e-6):
        plain = [iterations(A, b, lambda r: r, tolerance) for b in queries]
        preconditioned = [iterations(A, b, lambda r: inverse @ r, tolerance) for b in queries]
        assert max(preconditioned) < 0.8 * min(plain), (plain, preconditioned)


def test_inverse_and_root_on_a_model_with_uncovered_parameters() -> None:
    gnh = from_zoo("convnet")
    P = ekfac(gnh, 0.2, generator=generator())
    assert P.uncovered
    inverse, root = as_matrix(P.solve, gnh), as_matrix(P.root_solve, gnh)
    torch.testing.assert_close(inverse, inverse.T)
    torch.testing.assert_close(root, root.T)
    torch.testing.assert_close(root @ root, inverse)
    values = torch.linalg.eigvalsh(root)
    assert float(values[0]) > 0
    assert math.isclose(float(values[0]), P.largest**-0.5, rel_tol=1e-9)
    assert math.isclose(float(values[-1]), 0.2**-0.5, rel_tol=1e-9)
    A = dense(gnh) + 0.2 * torch.eye(len(inverse), dtype=DOUBLE)
    assert 0 < P.smallest <= float(torch.linalg.eigvalsh(root @ A @ root)[0])


def check_that_a_block_is_solved_column_by_column(P: Ekfac, gnh: GaussNewton) -> None:
    block = gnh.zeros(3).randn_like(generator())
    before = block.clone()
    for function in (P.solve, P.root_solve):
        result = function(block)
        for k in range(3):
            assert relative_error(result.column(k), function(block.column(k))) < 1e-12
    assert relative_error(block, before) == 0.0


def test_a_block_is_solved_column_by_column() -> None:
    gnh = from_zoo("convnet")
    P = ekfac(gnh, 0.2, generator=generator())
    check_that_a_block_is_solved_column_by_column(P, gnh)


def test_draws_have_the_inverse_as_covariance() -> None:
    gnh = operator(evaluated(nn.Linear(6, 4)))
    P = ekfac(gnh, 0.1, generator=generator())
    w = gnh.zeros().randn_like(generator(1))
    random = generator(2)
    squares = Estimate.from_samples([float(w.dot(P.draw(gnh.zeros(), random))) ** 2 for _ in range(1500)])
    assert abs(squares.value - float(w.dot(P.solve(w)))) <= 4 * squares.stderr


def test_another_damping_at_no_cost() -> None:
    gnh = operator()
    P = ekfac(gnh, 0.1, generator=generator())
    other = P.with_damping(3.0)
    assert other.damping == 3.0
    assert all(
        a.left is b.left and a.eigenvalues is b.eigenvalues
        for a, b in zip(P.blocks, other.blocks, strict=True)
    )
    again = ekfac(gnh, 3.0, generator=generator())
    v = gnh.zeros().randn_like(generator())
    assert relative_error(other.solve(v), again.solve(v)) == 0.0
    with pytest.raises(OptionError, match="damping"):
        P.with_damping(0.0)


def test_its_fields_are_all_there_is() -> None:
    gnh = bigrams()
    P = ekfac(gnh, 0.1, generator=generator())
    blocks = tuple(KroneckerBlock(**vars(block)) for block in P.blocks)
    again = Ekfac(**{**vars(P), "blocks": blocks})
    P.solve(v := gnh.zeros().randn_like(generator()))
    assert set(vars(P)) == {field.name for field in fields(P)}  # nothing is remembered beside them
    assert relative_error(again.solve(v), P.solve(v)) == 0.0


def test_saving(tmp_path: Path) -> None:
    gnh = from_zoo("convnet")
    P = ekfac(gnh, 0.1, generator=generator())
    write_value(tmp_path / "P.safetensors", P)
    again = read_value(tmp_path / "P.safetensors", Ekfac)
    for before, after in zip(P.blocks, again.blocks, strict=True):
        assert (after.weight, after.bias) == (before.weight, before.bias)
        for part in ("left", "right", "eigenvalues"):
            assert torch.equal(getattr(after, part), getattr(before, part))
    v = gnh.zeros().randn_like(generator())
    assert relative_error(again.solve(v), P.solve(v)) < 1e-14
    assert {**vars(again), "blocks": P.blocks} == vars(P)
    assert repr(again) == repr(P)


# --- the data ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("examples", [1, 2, 3])
def test_some_examples_stand_for_all_with_unbiased_weights(examples: int) -> None:
    gnh = bigrams()
    P = ekfac(gnh, 0.1, generator=generator(5), examples=examples, curvature="exact")
    drawn = torch.randperm(4, generator=generator(5))[:examples]
    sums = per_example_matrices(gnh)  # of 5, 2, 4 and 4 terms
    weight = 4 / (gnh.num_terms * examples)  # and not one over the terms that were drawn
    assert_diagonal_of(P, weight * sums[drawn].sum(0), gnh)
    assert P.terms == sum(gnh.terms.counts()[drawn].tolist())


def test_what_it_cost() -> None:
    gnh = operator()
    exact = ekfac(gnh, 0.1, generator=generator(), examples=7)
    assert (exact.terms, exact.num_passes) == (7, 2 * 4)
    sampled = ekfac(gnh, 0.1, generator=generator(), curvature="sampled", samples=3)
    assert (sampled.terms, sampled.num_passes) == (20, 2 * 3)
    tokens = ekfac(
        bigrams(), 0.1, generator=generator()
    )  # 6 tokens times 17 are too many for an exact curvature; the embedding has passes of its own
    assert (tokens.curvature, tokens.terms, tokens.num_passes) == ("sampled", 15, 2 + 2)


def test_micro_batches_do_not_matter() -> None:
    v = operator().zeros().randn_like(generator())
    whole, parts = (
        ekfac(operator(micro_batch=size), 0.1, generator=generator()).solve(v) for size in (None, 3)
    )
    assert relative_error(parts, whole) < 1e-9


def test_randomness_comes_from_the_generator() -> None:
    gnh = operator()
    v = gnh.zeros().randn_like(generator())
    options: dict[str, Any] = {"curvature": "sampled", "examples": 12}
    first, same, other = (ekfac(gnh, 0.1, generator=generator(s), **options).solve(v) for s in (0, 0, 1))
    assert relative_error(same, first) == 0.0
    assert relative_error(other, first) > 1e-3


# --- what is covered -----------------------------------------------------------------------------------------------


class Narrow(nn.Linear):
    """Takes more inputs than it uses."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input[..., :3])


class Twice(nn.Module):
    """One layer in some odd way, between two that are as they should be."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.first, self.odd, self.last = nn.Linear(6, 5), nn.Linear(5, 5), nn.Linear(5, 4)
        if way == "tied":
            self.twin = nn.Linear(5, 5)
            self.twin.weight = self.odd.weight
        elif way == "transposed":
            self.twin = nn.Linear(5, 5)
            self.twin.weight = nn.Parameter(self.odd.weight.data)  # another parameter, the same numbers
        elif way == "hooked":
            self.odd.register_forward_hook(lambda module, inputs, output: 2 * output)
        elif way == "narrow":
            self.odd = Narrow(3, 5)
        elif way == "parametrised":
            nn.utils.parametrizations.weight_norm(self.odd)
        elif way == "half":
            self.odd.bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        if self.way == "called twice":
            h = torch.tanh(self.odd(torch.tanh(self.odd(h))))
        elif self.way == "never called":
            h = nn.functional.linear(h, self.odd.weight, self.odd.bias)
        elif self.way == "also used":
            h = self.odd(h) + self.odd.weight.sum()
        elif self.way in ("tied", "transposed"):
            h = torch.tanh(self.odd(h)) + self.twin(h)
        elif self.way == "keyword":
            h = self.odd(input=h)
        elif self.way == "rows of all examples":
            h = self.odd(torch.stack([h, h * h], 1).flatten(0, 1)).reshape(len(h), 2, 5).sum(1)
        elif self.way == "examples second":
            h = self.odd(torch.stack([h, h * h])).sum(0)
        elif self.way == "half":
            h = self.odd(h.bfloat16()).to(x.dtype)
        else:
            h = self.odd(h)
        return self.last(torch.relu_(h) if self.way == "hooked" else torch.tanh(h))


@pytest.mark.parametrize(
    ("way", "reason"),
    [
        ("called twice", "called 2 times"),
        ("never called", "called 0 times"),
        ("also used", "used in another way than by calling"),
        ("tied", "also in 'twin'"),
        ("transposed", "also in 'twin'"),
        ("keyword", "not called with one tensor"),
        ("rows of all examples", "not one row for each"),
        ("examples second", "not one row for each"),
        ("hooked", "used in another way"),
        ("narrow", "used in another way"),
        ("parametrised", "parameter of (ParametrizationList|ParametrizedLinear)"),
        ("half", "torch.bfloat16; the factors need float32"),
    ],
)
def test_layers_that_would_come_out_wrong_are_left_out(way: str, reason: str) -> None:
    import re

    torch.manual_seed(0)
    model = Twice(way).eval()
    for part in (model.first, model.last) if way == "half" else (model,):
        part.to(DOUBLE)
    if way == "transposed":
        model.twin.weight.data = model.odd.weight.data
    gnh = operator(model)
    P = ekfac(gnh, 0.1, generator=generator())
    assert {block.weight for block in P.blocks} >= {"first.weight", "last.weight"}
    odd = [name for name in P.uncovered if "odd" in name and "weight" in name]
    assert odd
    assert all(re.search(reason, P.uncovered[name]) for name in odd), P.uncovered
    if way != "half":
        assert_diagonal_of(P, dense(gnh), gnh)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"groups": 3}, "3 groups"),
        ({"padding": 1, "padding_mode": "circular"}, "'circular'"),
        pytest.param(
            {"padding": "same", "kernel_size": 2},
            "'same'",
            marks=pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel"),
        ),
        ({"padding": "same"}, None),
        ({"padding": "valid", "stride": 2, "bias": False}, None),
        ({"padding": (1, 0), "dilation": 2}, None),
    ],
    ids=["groups", "circular", "uneven", "same", "strided", "dilated"],
)
def test_convolutions(options: dict[str, Any], reason: str | None) -> None:
    torch.manual_seed(0)
    convolution = nn.Conv2d(3, 6, **({"kernel_size": 3} | options))
    model = evaluated(
        nn.Sequential(convolution, nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(24, 4))
    )
    gnh = GaussNewton(model, Classification(), ZOO["convnet"].data(DOUBLE))
    P = ekfac(gnh, 0.1, generator=generator())
    if reason is None:
        assert not P.uncovered
    else:
        assert list(P.uncovered) == ["0.weight", "0.bias"]
        assert reason in P.uncovered["0.weight"]
    assert_diagonal_of(P, dense(gnh), gnh)


def test_wide_layers_are_left_out() -> None:
    P = ekfac(operator(), 0.1, generator=generator(), widest=10)  # 6-10-8-4, and an input for the bias
    assert list(P.uncovered) == ["2.weight", "2.bias"]
    assert "11 wide; widest is 10" in P.uncovered["2.weight"]


@pytest.mark.parametrize("name", ["gpt2", "attention"])
def test_a_model_without_layers_that_it_covers(name: str) -> None:
    with pytest.raises(OptionError, match=r"none of the parameters \(.*tied.*Nyström"):
        ekfac(from_zoo(name), 0.1, generator=generator())


class OnlyForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grad: Tensor) -> Tensor:
        raise AssertionError("a gradient was asked for")


class Guarded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 5), nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(OnlyForward.apply(self.body(x))))


def test_gradients_of_other_parameters_are_not_asked_for() -> None:
    torch.manual_seed(0)
    model = evaluated(Guarded())
    gnh = operator(model, params=["head.*"], product="finite-difference")
    P = ekfac(gnh, 0.1, generator=generator())
    assert [block.names for block in P.blocks] == [("head.weight", "head.bias")]
    assert_diagonal_of(P, dense(gnh), gnh)
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("kind", ["weight", "bias"])
def test_weights_or_biases_alone(kind: str) -> None:
    gnh = operator(params=[f"*.{kind}"])
    P = ekfac(gnh, 0.1, generator=generator())
    assert [block.names for block in P.blocks] == [(f"{k}.{kind}",) for k in (0, 2, 4)]
    H = dense(gnh)
    assert_diagonal_of(P, H, gnh)
    assert relative_error(P.root_solve(P.root_solve(basis(gnh))), P.solve(basis(gnh))) < 1e-10


def test_a_layer_that_is_sometimes_called_twice() -> None:
    class Moody(Twice):
        def forward(self, x: Tensor) -> Tensor:
            self.way = "called twice" if bool((x == vectors(DOUBLE)[7][0]).all(1).any()) else "once"
            return super().forward(x)

    model = evaluated(Moody("once"))
    before = state(model)
    with pytest.raises(
        ModelError, match=r"'odd' is in a layer called 2 times.*depends on its inputs.*Nyström"
    ):
        ekfac(operator(model, micro_batch=5), 0.1, generator=generator())
    assert state(model) == before


# --- the model is left as it was -----------------------------------------------------------------------------------


@pytest.mark.parametrize("curvature", ["exact", "sampled"])
def test_the_model_is_left_untouched(curvature: Any) -> None:
    model = used_model()
    gnh = operator(model)
    before = state(model)
    P = ekfac(gnh, 0.1, generator=generator(), curvature=curvature)
    assert list(P.uncovered) == ["scale", "norm.weight"]
    assert state(model) == before
    with torch.no_grad():
        ekfac(gnh, 0.1, generator=generator())
    assert state(model) == before


@pytest.mark.parametrize("error", [RuntimeError("the model's own error"), KeyboardInterrupt()], ids=type)
@pytest.mark.parametrize("call", [1, 2, 3, 5, 8])
def test_an_error_inside_the_model_leaves_it_untouched(call: int, error: BaseException) -> None:
    model = used_model()
    gnh = operator(model, micro_batch=5)  # two forwards to try the layers, four for the basis, four for E
    before = state(model)
    model.fuse.calls, model.fuse.error = call, error
    with pytest.raises(type(error)) as caught:
        ekfac(gnh, 0.1, generator=generator())
    assert caught.value is error
    assert state(model) == before


# --- bad input -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damping", NOT_POSITIVE)
def test_damping_must_be_positive(damping: float) -> None:
    with pytest.raises(OptionError, match=f"damping must be a positive number, got {damping}"):
        ekfac(operator(), damping, generator=generator())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"examples": 0}, r"examples is 0; it must be in 1\.\.20"),
        ({"examples": 21}, r"examples is 21; it must be in 1\.\.20"),
        ({"curvature": "empirical"}, "curvature is 'empirical'"),
        ({"samples": 0}, "samples is 0; it must be at least 1"),
        ({"widest": 0}, "widest is 0; it must be at least 1"),
    ],
    ids=["no examples", "too many examples", "curvature", "samples", "widest"],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        ekfac(operator(), 0.1, generator=generator(), **options)


def test_a_matrix_has_no_layers() -> None:
    with pytest.raises(OptionError, match="give a GaussNewton, not a Dense"):
        ekfac(Dense(torch.eye(2)), 0.1, generator=generator())  # type: ignore[arg-type]


def test_too_many_outputs_for_an_exact_curvature() -> None:
    torch.manual_seed(0)
    model = nn.Linear(2, 9000).eval()
    gnh = GaussNewton(model, Classification(), [(torch.ones(2), 0), (torch.zeros(2), 1)])
    with pytest.raises(OptionError, match=r"9,000 backward passes.*use curvature='sampled'"):
        ekfac(gnh, 0.1, generator=generator(), curvature="exact")


def test_a_missing_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "curvlinops", None)
    with pytest.raises(OptionError, match=r'curvlinops is needed.*pip install "whence\[curvlinops\]"'):
        ekfac(operator(), 0.1, generator=generator())


def test_vectors_of_another_model() -> None:
    P = ekfac(operator(), 0.1, generator=generator())
    with pytest.raises(VectorError, match=r"differ in .*'2.bias'"):
        P.solve(ParamVector({"0.weight": torch.zeros(10, 6, dtype=DOUBLE)}))
    wrong = operator().zeros()
    swapped = ParamVector(
        {n: t if n != "2.weight" else torch.zeros(8, 9, dtype=DOUBLE) for n, t in wrong.items()}
    )
    with pytest.raises(VectorError, match=r"'2.weight' has shape \(8, 9\).*made for 8 × 10"):
        P.solve(swapped)


def test_outputs_that_are_not_finite() -> None:
    model = classifier()
    gnh = operator(model)
    with torch.no_grad():
        model[4].bias[0] = math.nan
    before = {name: p.data_ptr() for name, p in model.named_parameters()}
    with pytest.raises(ModelError, match="NaN or infinity"):
        ekfac(gnh, 0.1, generator=generator())
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == before
