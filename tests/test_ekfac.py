"""EK-FAC against dense float64 Hessians: its eigenvalues and bases for every parameter, and as a preconditioner."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from conformance import assert_mean
from dense import dense_gauss_newton, per_example_matrices, relative_error, softmax_hessian
from digits import exact_hessian, flatten, load, unflatten
from small import DOUBLE, NOT_POSITIVE, classifier, evaluated, generator, operator
from test_layers import READABLE, UNREADABLE, language_model, moody, tokens
from test_layers import operator as made_of
from test_untouched import state, used_model
from whence import (
    Classification,
    ConvexLoss,
    Dense,
    GaussNewton,
    LanguageModeling,
    ParamVector,
)
from whence.errors import ModelError, OptionError, VectorError
from whence.preconditioners.ekfac import Ekfac, KroneckerBlock, ekfac
from whence.runs import read_value, write_value
from zoo import CASES, VOCABULARY, sequences, vectors

ZOO = {case.name: case for case in CASES}


def from_zoo(name: str, **options: Any) -> GaussNewton:
    case = ZOO[name]
    return GaussNewton(case.model(DOUBLE), case.task, case.data(DOUBLE), **options)


def tied_language_model(**options: Any) -> GaussNewton:
    """Ragged sequences, some labels ignored; the embedding is also the head."""
    return made_of(language_model, sequences, LanguageModeling(), **options)


class Bigrams(nn.Module):
    """The smallest language model."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 5)
        self.head = nn.Linear(5, VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.embed(input_ids))


def bigrams(**options: Any) -> GaussNewton:
    return made_of(Bigrams, sequences, LanguageModeling(), **options)


def by_hand(**options: Any) -> GaussNewton:
    """A layer that is not called, between others that are: it has gradients of batches alone."""
    build, data, _ = UNREADABLE["by hand"]
    return made_of(build, data, **options)


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


def rows_of(block: KroneckerBlock, gnh: GaussNewton) -> Tensor:
    """Rows of the dense matrix in the order of ``Q_G ⊗ Q_A``: outputs first, a bias as the last input."""
    places, start = {}, 0
    for name, tensor in gnh.zeros().items():
        places[name] = torch.arange(start, start + tensor.numel()).reshape(tensor.shape)
        start += tensor.numel()
    return block.matrix.pack(places).flatten()


def basis_of(block: KroneckerBlock) -> Tensor:
    """``Q_G ⊗ Q_A``, where None is the identity."""
    sides = zip((block.left, block.right), block.matrix.shape, strict=True)
    return torch.kron(*(torch.eye(width, dtype=DOUBLE) if q is None else q for q, width in sides))


def diagonal_in_basis(block: KroneckerBlock, H: Tensor, gnh: GaussNewton) -> Tensor:
    rows, Q = rows_of(block, gnh), basis_of(block)
    return (Q.T @ H[rows][:, rows] @ Q).diagonal().reshape(block.matrix.shape)


def assert_diagonal_of(P: Ekfac, H: Tensor, gnh: GaussNewton, tolerance: float = 1e-8) -> None:
    """P's eigenvalues are H's diagonal in P's basis, which is orthonormal; its trace is H's; nothing is left out."""
    assert sorted(n for b in P.blocks for n in b.matrix.names) == sorted(gnh.network.parameters)
    for block in P.blocks:
        Q = basis_of(block)
        torch.testing.assert_close(Q.T @ Q, torch.eye(len(Q), dtype=DOUBLE))
        expected = diagonal_in_basis(block, H, gnh)
        assert block.eigenvalues.shape == block.matrix.shape
        error = float((block.eigenvalues - expected).abs().max())
        assert error <= tolerance * float(expected.max()) + 1e-14 * float(H.trace()), block.matrix
    assert math.isclose(P.trace, float(H.trace()), rel_tol=tolerance)


# --- against the dense Hessian -------------------------------------------------------------------------------------


def test_eigenvalues_on_digits_are_the_diagonal_of_the_hessian() -> None:
    gnh, H = digits_mlp()
    P = ekfac(gnh, 0.1, generator=generator(), curvature="exact")
    assert_diagonal_of(P, H, gnh)
    assert (P.by_batch, P.terms, P.num_passes, P.scale) == ({}, 1400, 2, 1.0)


def test_the_basis_on_digits_is_that_of_inputs_and_gradients() -> None:
    gnh, _ = digits_mlp()
    first, last = ekfac(gnh, 0.1, generator=generator(), curvature="exact").blocks
    x = gnh.terms.data.tensors[0]
    inputs = torch.cat([x, x.new_ones(len(x), 1)], 1)
    with torch.no_grad():
        hidden = torch.tanh(gnh.network.model[0](x))
        p = gnh.network.model(x).softmax(-1)
    inside = torch.cat([hidden, x.new_ones(len(x), 1)], 1)
    S = torch.diag_embed(p) - p.unsqueeze(2) * p.unsqueeze(1)
    J = gnh.network.model[2].weight.detach() * (1 - hidden.square()).unsqueeze(1)  # [n, outputs, hidden]
    for Q, moments in (
        (first.right, inputs.T @ inputs),
        (first.left, (J.mT @ S @ J).sum(0)),
        (last.right, inside.T @ inside),
        (last.left, S.sum(0)),
    ):
        rotated = Q.T @ moments @ Q
        off = rotated - torch.diag(rotated.diagonal())
        assert float(off.abs().max()) < 1e-10 * float(rotated.diagonal().max())


@pytest.mark.parametrize(
    "name",
    [case.name for case in CASES if case.name not in ("attention", "opt", "llama", "mistral", "qwen2")],
)
def test_eigenvalues_are_the_diagonal_of_the_hessian(name: str) -> None:
    gnh = from_zoo(name)
    P = ekfac(gnh, 0.1, generator=generator(), curvature="exact")
    assert not P.by_batch
    assert_diagonal_of(P, dense(gnh), gnh)


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2"])
def test_models_whose_norms_work_in_single_precision(name: str) -> None:
    gnh = from_zoo(name)
    P = ekfac(gnh, 0.1, generator=generator(), curvature="exact")
    assert not P.by_batch
    assert_diagonal_of(P, dense(gnh), gnh, tolerance=1e-5)


@pytest.mark.parametrize("name", ["attention", "opt"])
def test_batches_of_one_example_are_exact_for_what_has_no_gradients_of_examples(name: str) -> None:
    gnh = from_zoo(name, micro_batch=1)
    P = ekfac(gnh, 0.1, generator=generator(), curvature="exact")
    assert P.by_batch == gnh.example_gradients().missing
    assert P.by_batch
    assert_diagonal_of(P, dense(gnh), gnh)


@pytest.mark.parametrize("name", [name for name in READABLE if name != "a number"])
def test_every_kind_of_layer(name: str) -> None:
    build, data = READABLE[name]
    gnh = made_of(build, data)
    assert_diagonal_of(ekfac(gnh, 0.1, generator=generator(), curvature="exact"), dense(gnh), gnh)


@pytest.mark.parametrize("name", UNREADABLE)
def test_every_way_of_using_a_layer(name: str) -> None:
    build, data, _ = UNREADABLE[name]
    gnh = made_of(build, data, micro_batch=1)
    P = ekfac(gnh, 0.1, generator=generator(), curvature="exact")
    assert {n.split(".")[0] for n in P.by_batch} == {"odd"}
    assert_diagonal_of(P, dense(gnh), gnh)


@pytest.mark.parametrize("widest", [1, 16384])
def test_parameters_whose_gradients_are_one_tensor(widest: int) -> None:
    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = (nn.Parameter(torch.randn(1, dtype=DOUBLE)) for _ in range(2))
            self.left, self.right = (nn.Parameter(torch.randn(6, dtype=DOUBLE)) for _ in range(2))
            self.head = nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x + (self.left + self.right)) * (self.one + self.other)

    gnh = made_of(Sums, vectors, micro_batch=1)
    P = ekfac(gnh, 0.1, generator=generator(), curvature="exact", widest=widest)
    assert_diagonal_of(P, dense(gnh), gnh)


def test_ragged_sequences_with_tied_weights() -> None:
    gnh = tied_language_model()
    P = ekfac(gnh, 0.1, generator=generator(), curvature="exact")
    assert_diagonal_of(P, dense(gnh), gnh)
    (tied,) = (block for block in P.blocks if block.matrix.weight == "one.weight")
    assert tied.left is None  # one-hot inputs have a diagonal moment
    assert tied.right is not None


def test_the_basis_of_an_embedding_is_that_of_the_gradients_at_every_position() -> None:
    build, _ = READABLE["padding"]
    gnh = made_of(build, tokens)
    model = gnh.network.model
    moments = torch.zeros(3, 3, dtype=DOUBLE)
    for x, _ in gnh.terms.data:
        h = model.embed(x[None]).detach().requires_grad_()
        logits = model.head(torch.tanh(h).square().mean(1))[0]
        J = torch.stack([torch.autograd.grad(logit, h, retain_graph=True)[0][0] for logit in logits])
        moments += torch.einsum("kto,kl,ltp->op", J, softmax_hessian(logits.detach()), J)
    block = ekfac(gnh, 0.1, generator=generator(), curvature="exact").blocks[0]
    assert block.matrix.names == ("embed.weight",)
    assert block.left is None
    rotated = block.right.T @ moments @ block.right
    off = rotated - torch.diag(rotated.diagonal())
    assert float(off.abs().max()) < 1e-10 * float(rotated.diagonal().max())
    padding = model.embed.padding_idx
    assert not block.eigenvalues[padding].any()


@pytest.mark.parametrize("kind", ["weight", "bias"])
def test_weights_or_biases_alone(kind: str) -> None:
    gnh = operator(params=[f"*.{kind}"])
    P = ekfac(gnh, 0.1, generator=generator(), curvature="exact")
    assert [block.matrix.names for block in P.blocks] == [(f"{k}.{kind}",) for k in (0, 2, 4)]
    assert_diagonal_of(P, dense(gnh), gnh)


@pytest.mark.parametrize("outputs", [3, 1])
def test_any_convex_loss(outputs: int) -> None:
    torch.manual_seed(0)
    task = ConvexLoss(lambda h, y: (h - y.reshape(h.shape)).cosh().log().reshape(len(h), -1).sum(1))
    layers: list[nn.Module] = [nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, outputs)]
    model = evaluated(nn.Sequential(*layers, *([nn.Flatten(0)] if outputs == 1 else [])))
    gnh = GaussNewton(model, task, [(x, torch.randn(outputs, dtype=DOUBLE)) for x, _ in vectors(DOUBLE)])
    assert not gnh.has_factors
    H = as_matrix(gnh.matvec, gnh)
    assert_diagonal_of(ekfac(gnh, 0.1, generator=generator(), curvature="exact"), H, gnh)
    if outputs == 1:
        assert_diagonal_of(ekfac(gnh, 0.1, generator=generator()), H, gnh)
        return
    random = generator()
    draws = [ekfac(gnh, 0.1, generator=random, curvature="sampled", samples=1).trace for _ in range(200)]
    assert_mean(torch.tensor(draws), float(H.trace()), resolution=0.02)


# --- sampled -------------------------------------------------------------------------------------------------------


def block_traces(gnh: GaussNewton, count: int, **options: Any) -> dict[str, Tensor]:
    random = generator()
    found: dict[str, list[float]] = {}
    for _ in range(count):
        for block in ekfac(gnh, 0.1, generator=random, **options).blocks:
            found.setdefault(block.matrix.weight, []).append(float(block.eigenvalues.sum()))
    return {name: torch.tensor(values, dtype=DOUBLE) for name, values in found.items()}


@pytest.mark.parametrize(
    ("build", "options", "by_batch"),
    [
        (bigrams, {"curvature": "sampled", "samples": 1}, 0),
        (tied_language_model, {"curvature": "sampled", "samples": 2}, 0),
        (by_hand, {"curvature": "sampled", "samples": 2}, 2),
        (by_hand, {"curvature": "exact"}, 2),  # whose batches have random signs
    ],
    ids=["bigrams", "tied", "batches", "batches, exact"],
)
def test_the_mean_over_draws_is_right(build: Any, options: dict[str, Any], by_batch: int) -> None:
    gnh = build()
    H = dense(gnh)
    P = ekfac(gnh, 0.1, generator=generator(), **options)
    assert len(P.by_batch) == by_batch
    draws = block_traces(gnh, 200, **options)
    for block in P.blocks:
        truth = float(H.diagonal()[rows_of(block, gnh)].sum())
        if options["curvature"] == "exact" and block.matrix.weight not in P.by_batch:
            assert float(draws[block.matrix.weight].std()) < 1e-12 * truth
        else:
            assert_mean(draws[block.matrix.weight], truth, resolution=0.06)


@pytest.mark.parametrize("make", [digits_mlp, by_hand], ids=["digits", "batches"])
def test_many_draws_approach_the_diagonal_of_the_hessian(make: Any) -> None:
    gnh, H = digits_mlp() if make is digits_mlp else (by_hand(), dense(by_hand()))
    P = ekfac(
        gnh, 0.1, generator=generator(), curvature="sampled", samples=20 if make is digits_mlp else 2000
    )
    for block in P.blocks:
        expected = diagonal_in_basis(block, H, gnh)
        assert float((block.eigenvalues - expected).norm() / expected.norm()) < 0.1


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


def test_bases_from_a_part_of_the_data_leave_the_eigenvalues_to_all_of_it() -> None:
    torch.manual_seed(0)
    x = torch.randn(800, 6, dtype=DOUBLE)
    gnh = GaussNewton(classifier(), Classification(), TensorDataset(x, torch.arange(800) % 4))
    seen: list[int] = []
    gnh.network.model.register_forward_hook(lambda module, inputs, output: seen.append(len(output)))
    P = ekfac(gnh, 0.1, generator=generator(), curvature="sampled", samples=40)
    assert 800 + 11 * 32 <= sum(seen) <= 1.5 * 800  # the widest side has 11 columns
    H = exact_hessian(gnh.network.model, x)
    for block in P.blocks:
        expected = diagonal_in_basis(block, H, gnh)
        assert float((block.eigenvalues - expected).norm() / expected.norm()) < 0.1


@pytest.mark.parametrize("make", [operator, tied_language_model], ids=["classifier", "language model"])
def test_micro_batches_do_not_matter(make: Any) -> None:
    v = make().zeros().randn_like(generator())
    whole, *parts = (
        ekfac(make(micro_batch=size), 0.1, generator=generator(), curvature="exact").solve(v)
        for size in (None, 1, 3)
    )
    for part in parts:
        assert relative_error(part, whole) < 1e-8


def test_randomness_comes_from_the_generator() -> None:
    gnh = by_hand()
    v = gnh.zeros().randn_like(generator())
    options: dict[str, Any] = {"curvature": "sampled", "examples": 12}
    first, same, other = (ekfac(gnh, 0.1, generator=generator(s), **options).solve(v) for s in (0, 0, 1))
    assert relative_error(same, first) == 0.0
    assert relative_error(other, first) > 1e-3


# --- precision, wide sides -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.bfloat16, 0.1)], ids=str)
def test_lower_precision(dtype: torch.dtype, tolerance: float) -> None:
    gnh, _ = digits_mlp()
    model = copy.deepcopy(gnh.network.model).to(dtype)
    x, y = gnh.terms.data.tensors
    low = GaussNewton(model, Classification(), TensorDataset(x.to(dtype), y))
    narrow, wide = (ekfac(H, 0.05, generator=generator(), curvature="exact") for H in (low, gnh))
    for block in narrow.blocks:
        assert block.eigenvalues.dtype == block.left.dtype == block.right.dtype == torch.float32
        torch.testing.assert_close(block.left.T @ block.left, torch.eye(len(block.left)), rtol=0, atol=1e-5)
    v = gnh.zeros().randn_like(generator())
    single = ParamVector({name: tensor.float() for name, tensor in v.items()})
    assert relative_error(narrow.solve(single), wide.solve(v)) < tolerance
    assert relative_error(narrow.root_solve(narrow.root_solve(single)), narrow.solve(single)) < 1e-5


def test_wide_sides_have_the_identity() -> None:
    gnh = operator()  # 6-10-8-4, and an input for the bias
    P = ekfac(gnh, 0.1, generator=generator(), curvature="exact", widest=8)
    sides = [(block.left is None, block.right is None) for block in P.blocks]
    assert sides == [(True, False), (False, True), (False, True)]  # 10 × 7, 8 × 11, 4 × 9
    assert_diagonal_of(P, dense(gnh), gnh)
    none = ekfac(gnh, 0.1, generator=generator(), curvature="exact", widest=1)
    assert all(block.left is None and block.right is None for block in none.blocks)
    diagonal = torch.cat([none.blocks[k].eigenvalues[:, :-1].flatten() for k in range(3)])
    weights = torch.cat(
        [rows_of(block, gnh).reshape(block.matrix.shape)[:, :-1].flatten() for block in P.blocks]
    )
    torch.testing.assert_close(diagonal, dense(gnh).diagonal()[weights])


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
    inverse = as_matrix(ekfac(gnh, damping, generator=generator(), curvature=curvature).solve, gnh)
    _, test = load()
    queries = flatten(gnh.gradients([(test[i][0].double(), test[i][1]) for i in range(5)]))
    for tolerance in (1e-2, 1e-6):
        plain = [iterations(A, b, lambda r: r, tolerance) for b in queries]
        preconditioned = [iterations(A, b, lambda r: inverse @ r, tolerance) for b in queries]
        assert max(preconditioned) < 0.8 * min(plain), (plain, preconditioned)


@pytest.mark.parametrize("name", ["convnet", "gpt2", "attention"])
def test_inverse_and_root_against_a_dense_matrix(name: str) -> None:
    gnh = from_zoo(name)
    P = ekfac(gnh, 0.2, generator=generator()).with_scale(1.7)
    matrix = 0.2 * torch.eye(gnh.num_parameters, dtype=DOUBLE)
    for block in P.blocks:
        rows, Q = rows_of(block, gnh), basis_of(block)
        matrix[rows[:, None], rows] += 1.7 * Q @ torch.diag(block.eigenvalues.flatten()) @ Q.T
    values, basis = torch.linalg.eigh(matrix)
    inverse, root = as_matrix(P.solve, gnh), as_matrix(P.root_solve, gnh)
    torch.testing.assert_close(inverse, torch.linalg.inv(matrix), rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(root, basis @ torch.diag(values.rsqrt()) @ basis.T, rtol=1e-8, atol=1e-8)
    assert math.isclose(P.largest, float(values[-1]), rel_tol=1e-10)
    assert math.isclose(P.trace, (float(values.sum()) - 0.2 * len(values)) / 1.7, rel_tol=1e-10)
    A = as_matrix(gnh.matvec, gnh) + 0.2 * torch.eye(len(matrix), dtype=DOUBLE)
    assert 0 < P.smallest <= float(torch.linalg.eigvalsh(root @ A @ root)[0]) * (1 + 1e-9)
    block = gnh.zeros(3).randn_like(generator())
    before = block.clone()
    for function in (P.solve, P.root_solve):
        result = function(block)
        assert all(relative_error(result.column(k), function(block.column(k))) < 1e-12 for k in range(3))
    assert relative_error(block, before) == 0.0


def test_another_damping_or_scale_at_no_cost() -> None:
    gnh = operator()
    P = ekfac(gnh, 0.1, generator=generator())
    v = gnh.zeros().randn_like(generator())
    other = P.with_damping(3.0)
    assert (other.damping, other.blocks is P.blocks) == (3.0, True)
    assert relative_error(other.solve(v), ekfac(gnh, 3.0, generator=generator()).solve(v)) == 0.0
    scaled = P.with_scale(4.0)  # 4E + λ is 4(E + λ/4)
    assert (scaled.scale, scaled.blocks is P.blocks, scaled.trace) == (4.0, True, P.trace)
    assert relative_error(scaled.solve(v), P.with_damping(0.1 / 4).solve(v).scale_(1 / 4)) < 1e-14
    for bad in NOT_POSITIVE:
        with pytest.raises(OptionError, match="damping"):
            P.with_damping(bad)
        with pytest.raises(OptionError, match="scale of EK-FAC"):
            P.with_scale(bad)


@pytest.mark.parametrize("make", [tied_language_model, by_hand], ids=["tied", "batches"])
def test_saving(make: Any, tmp_path: Path) -> None:
    gnh = make()
    P = ekfac(gnh, 0.1, generator=generator()).with_scale(1.5)
    write_value(tmp_path / "P.safetensors", P)
    again = read_value(tmp_path / "P.safetensors", Ekfac)
    for before, after in zip(P.blocks, again.blocks, strict=True):
        assert after.matrix == before.matrix
        for part in ("left", "right", "eigenvalues"):
            one, other = getattr(after, part), getattr(before, part)
            assert (one is None) == (other is None)
            assert one is None or torch.equal(one, other)
    v = gnh.zeros().randn_like(generator())
    assert relative_error(again.solve(v), P.solve(v)) == 0.0
    assert set(vars(P)) == {field.name for field in fields(P)}  # nothing is remembered beside them
    assert {**vars(again), "blocks": P.blocks} == vars(P)
    assert repr(again) == repr(P)


# --- the model is left as it was -----------------------------------------------------------------------------------


@pytest.mark.parametrize("curvature", ["exact", "sampled"])
def test_the_model_is_left_untouched(curvature: Any) -> None:
    model = used_model()
    gnh = operator(model)
    before = state(model)
    first = ekfac(gnh, 0.1, generator=generator(), curvature=curvature)
    assert list(first.by_batch) == ["scale"]
    fresh = operator(model)
    with torch.no_grad():
        again = ekfac(fresh, 0.1, generator=generator(), curvature=curvature)
    assert state(model) == before
    v = gnh.zeros().randn_like(generator())
    assert relative_error(again.solve(v), first.solve(v)) == 0.0


# --- bad input -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damping", NOT_POSITIVE)
def test_damping_must_be_positive(damping: float) -> None:
    with pytest.raises(OptionError, match=f"damping must be a positive number, got {damping}"):
        ekfac(operator(), damping, generator=generator())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"examples": 0}, "examples is 0; give a whole number of at least 1"),
        ({"examples": 21}, "examples is 21, and there are 20"),
        ({"examples": True}, "examples is True; give a whole number"),
        ({"curvature": "empirical"}, "curvature is 'empirical'"),
        ({"samples": 0}, "samples is 0; give a whole number of at least 1"),
        ({"samples": 1.5}, "samples is 1.5; give a whole number"),
        ({"widest": -1}, "widest is -1; give a whole number of at least 1"),
    ],
    ids=str,
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
    with pytest.raises(OptionError, match=r"too large for 9,000 outputs; use curvature='sampled'"):
        ekfac(gnh, 0.1, generator=generator(), curvature="exact")


def test_vectors_of_another_model() -> None:
    P = ekfac(operator(), 0.1, generator=generator())
    with pytest.raises(VectorError, match=r"differ in .*'0.bias'"):
        P.solve(ParamVector({"0.weight": torch.zeros(10, 6, dtype=DOUBLE)}))
    for name, shape in (("2.weight", (8, 9)), ("2.bias", (9,))):
        parts = dict(operator().zeros()) | {name: torch.zeros(shape, dtype=DOUBLE)}
        with pytest.raises(VectorError, match=rf"'{name}' has shape \({shape[0]},.*in the vector"):
            P.root_solve(ParamVector(parts))


def test_a_layer_that_is_called_otherwise_on_other_inputs() -> None:
    gnh = made_of(moody(lambda m, x: m.odd(input=x)), vectors, micro_batch=5)
    before = state(gnh.network.model)
    with pytest.raises(ModelError, match=r"odd\.weight, odd\.bias is not called .*depends on its inputs"):
        ekfac(gnh, 0.1, generator=generator())
    assert state(gnh.network.model) == before


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_outputs_that_are_not_finite(number: float) -> None:
    model = classifier()
    gnh = operator(model)
    with torch.no_grad():
        model[4].bias[0] = number
    with pytest.raises(ModelError, match="NaN or infinity"):
        ekfac(gnh, 0.1, generator=generator())


def test_gradients_that_are_not_finite() -> None:
    class Steep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(6, 5), nn.Linear(5, 4)

        def forward(self, x: Tensor) -> Tensor:
            h = self.body(x)
            return self.head((h - h.detach()).abs().sqrt() + h)  # the root's slope at zero

    with pytest.raises(ModelError, match=r"gradients of 'body.weight' are not finite"):
        ekfac(made_of(Steep, vectors), 0.1, generator=generator())
