"""EK-FAC of embeddings against dense float64 Hessians: eigenvalues, basis, what is covered, and what it saves."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dense import relative_error, softmax_hessian
from digits import flatten
from small import DOUBLE, evaluated, generator
from test_ekfac import (
    as_matrix,
    assert_diagonal_of,
    basis_of,
    bigrams,
    check_that_a_block_is_solved_column_by_column,
    dense,
    from_zoo,
    iterations,
    rows_of,
)
from test_untouched import state
from whence import Classification, GaussNewton, LanguageModeling
from whence.errors import ModelError, OptionError
from whence.preconditioners.ekfac import Ekfac, KroneckerBlock, ekfac
from whence.runs import read_value, write_value

TOKENS, WIDTH, CLASSES, LENGTH = 7, 3, 4, 5


class Bag(nn.Module):
    """A classifier of short texts; ``way`` is what it does with its embedding."""

    def __init__(self, way: str = "", **options: Any) -> None:
        super().__init__()
        self.way = way
        self.embed = nn.Embedding(TOKENS, WIDTH, **options)
        self.head = nn.Linear(WIDTH, CLASSES)
        if way == "positions":
            self.places = nn.Embedding(LENGTH, WIDTH)
        elif way == "tied":
            self.twin = nn.Linear(WIDTH, TOKENS, bias=False)
            self.twin.weight = self.embed.weight
        elif way == "hooked":
            self.embed.register_forward_hook(lambda module, inputs, output: 2 * output)

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "called twice":
            h = self.embed(x) + self.embed(x.flip(1)).square()
        elif self.way == "also used":
            h = self.embed(x) + self.embed.weight.square().sum()
        elif self.way == "never called":
            h = nn.functional.embedding(x, self.embed.weight)
        elif self.way == "keyword":
            h = self.embed(input=x)
        elif self.way == "in one row":
            h = self.embed(x.flatten()).reshape(*x.shape, WIDTH)
        elif self.way == "positions":
            h = self.embed(x) + self.places(torch.arange(x.shape[1])[None])
        elif self.way == "tied":
            h = self.embed(x) + self.twin(self.embed(x).detach()).tanh().mean(-1, keepdim=True)
        elif self.way == "in place":
            h = self.embed(x).mul_(2.0).add_(1.0)
        else:
            h = self.embed(x)
        return self.head(torch.tanh(h).square().mean(1) + h[:, 0])


def texts(examples: int = 12) -> list[tuple[Tensor, int]]:
    """Five of six tokens each: there are always repeated ones in some, and token 6 is in none."""
    x = torch.randint(TOKENS - 1, (examples, LENGTH), generator=generator(4))
    return [(row, k % CLASSES) for k, row in enumerate(x)]


def bag(way: str = "", *, data: Any = None, gnh: dict[str, Any] | None = None, **options: Any) -> GaussNewton:
    torch.manual_seed(0)
    return GaussNewton(
        evaluated(Bag(way, **options)), Classification(), texts() if data is None else data, **gnh or {}
    )


def embedding_of(P: Ekfac, name: str = "embed.weight") -> KroneckerBlock:
    (block,) = (block for block in P.blocks if block.weight == name)
    assert block.left is None
    return block


def expected_eigenvalues(block: KroneckerBlock, H: Tensor, gnh: GaussNewton) -> Tensor:
    rows, Q = rows_of(block, gnh), basis_of(block)
    return (Q.T @ H[rows][:, rows] @ Q).diagonal().reshape(block.eigenvalues.shape)


def without_embedding(P: Ekfac, name: str) -> Ekfac:
    blocks = tuple(block for block in P.blocks if block.weight != name)
    return replace(P, blocks=blocks, uncovered={**P.uncovered, name: "left out"})


# --- against the dense Hessian -------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["", "in place"])
def test_eigenvalues_of_a_classifier_are_the_diagonal_of_the_hessian(way: str) -> None:
    gnh = bag(way)
    P = ekfac(gnh, 0.1, generator=generator())
    assert P.curvature == "exact"
    assert [block.names for block in P.blocks] == [("embed.weight",), ("head.weight", "head.bias")]
    assert not P.uncovered
    H = dense(gnh)
    assert_diagonal_of(P, H, gnh)
    block = embedding_of(P)
    assert block.right.shape == (WIDTH, WIDTH)
    assert float(block.eigenvalues[:-1].min()) > 0
    assert not block.eigenvalues[-1].any()  # the token of no example
    assert math.isclose(P.trace, float(H.trace()), rel_tol=1e-10)


def test_the_basis_is_that_of_the_gradients_at_every_position() -> None:
    gnh = bag(padding_idx=1)
    moments = torch.zeros(WIDTH, WIDTH, dtype=DOUBLE)
    model = gnh.network.model
    for x, _ in gnh.terms.data:
        h = model.embed(x[None]).detach().requires_grad_()
        logits = model.head(torch.tanh(h).square().mean(1) + h[:, 0])[0]
        J = torch.stack([torch.autograd.grad(logit, h, retain_graph=True)[0][0] for logit in logits])
        J = J[:, x != 1]  # those of padding reach no parameter
        moments += torch.einsum("kto,kl,ltp->op", J, softmax_hessian(logits.detach()), J)
    Q = embedding_of(ekfac(gnh, 0.1, generator=generator())).right
    rotated = Q.T @ moments @ Q
    torch.testing.assert_close(rotated, torch.diag(rotated.diagonal()))
    assert float(rotated.diagonal().diff().min()) > 1e-3 * float(
        rotated.diagonal().max()
    )  # no other basis is


def language_model() -> GaussNewton:
    """Mixes the positions; ragged sequences with the same tokens again and again, some labels ignored."""

    class Averages(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(TOKENS, WIDTH)
            self.head = nn.Linear(WIDTH, TOKENS, bias=False)

        def forward(self, input_ids: Tensor) -> Tensor:
            h = self.embed(input_ids)
            before = h.cumsum(1) / torch.arange(1, h.shape[1] + 1).unsqueeze(1)
            return self.head(torch.tanh(h + before))

    torch.manual_seed(0)
    rows = [[1, 2, 1, 1, 3], [4, 4, 4], [5, 2, 5, 2, 5, 2, 0], [3, 1], [2, 2, 3, 3, 2, 2]]
    data = [{"input_ids": torch.tensor(row), "labels": torch.tensor(row)} for row in rows]
    data[2]["labels"][:3] = -100
    return GaussNewton(evaluated(Averages()), LanguageModeling(), data)


def test_eigenvalues_of_a_language_model_with_repeated_tokens() -> None:
    gnh = language_model()
    H = dense(gnh)
    P = ekfac(gnh, 0.1, generator=generator(), curvature="exact")
    assert not P.uncovered
    assert_diagonal_of(P, H, gnh)
    assert math.isclose(P.trace, float(H.trace()), rel_tol=1e-10)


@pytest.mark.parametrize("samples", [1, 4])
def test_a_sampled_curvature_is_unbiased_in_every_token(samples: int) -> None:
    gnh = language_model()
    H = dense(gnh)
    random = generator()
    # whatever the basis, its sum over a token's row is the same
    draws = torch.stack([
        embedding_of(ekfac(gnh, 0.1, generator=random, curvature="sampled", samples=samples)).eigenvalues.sum(1)
        for _ in range(400 // samples)
    ])  # fmt: skip
    mean, stderr = draws.mean(0), draws.std(0) / math.sqrt(len(draws))
    block = embedding_of(ekfac(gnh, 0.1, generator=random, curvature="exact"))
    expected = H.diagonal()[rows_of(block, gnh)].reshape(TOKENS, WIDTH).sum(1)
    seen = expected > 0
    assert seen.tolist() == [False, True, True, True, True, True, False]  # token 0 is only ever the last
    assert ((mean - expected).abs() <= 4 * stderr).all(), (mean, expected, stderr)
    assert float((stderr[seen] / expected[seen]).max()) < 0.15


def test_many_draws_approach_the_diagonal_of_the_hessian() -> None:
    gnh = bag(gnh={"params": ["embed.*"]})
    P = ekfac(gnh, 0.1, generator=generator(), curvature="sampled", samples=200)
    block = embedding_of(P)
    expected = expected_eigenvalues(block, dense(gnh), gnh)
    assert float((block.eigenvalues - expected).norm() / expected.norm()) < 0.1


@pytest.mark.parametrize("examples", [1, 2, 3])
def test_some_examples_stand_for_all_with_unbiased_weights(examples: int) -> None:
    gnh = language_model()
    P = ekfac(gnh, 0.1, generator=generator(5), examples=examples, curvature="exact")
    drawn = torch.randperm(5, generator=generator(5))[:examples].tolist()
    part = GaussNewton(gnh.network.model, LanguageModeling(), [gnh.terms.data[k] for k in drawn])
    weight = 5 * part.num_terms / (gnh.num_terms * examples)
    assert_diagonal_of(P, weight * dense(part), gnh)


def test_one_token_for_each_example() -> None:
    class Category(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.tanh(self.embed(x)))

    torch.manual_seed(0)
    data = [(x[0], y) for x, y in texts()]
    gnh = GaussNewton(evaluated(Category()), Classification(), data)
    P = ekfac(gnh, 0.1, generator=generator())
    assert not P.uncovered
    assert_diagonal_of(P, dense(gnh), gnh)


def test_nothing_but_embeddings_needs_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    class Means(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.other = nn.Embedding(TOKENS, CLASSES), nn.Embedding(TOKENS, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            return self.embed(x).mean(1) + torch.tanh(self.other(x[:, :2])).sum(1)

    monkeypatch.setitem(sys.modules, "curvlinops", None)
    torch.manual_seed(0)
    gnh = GaussNewton(evaluated(Means()), Classification(), texts())
    P = ekfac(gnh, 0.1, generator=generator())
    assert (len(P.blocks), P.num_passes) == (2, 2 * CLASSES)
    assert_diagonal_of(P, dense(gnh), gnh)
    with pytest.raises(OptionError, match="curvlinops is needed"):
        ekfac(bag(), 0.1, generator=generator())


def test_single_precision() -> None:
    double = bag()
    gnh = GaussNewton(bag().network.model.float(), Classification(), texts())
    block, wide = (embedding_of(ekfac(operator, 0.1, generator=generator())) for operator in (gnh, double))
    assert block.eigenvalues.dtype == block.right.dtype == torch.float32
    torch.testing.assert_close(block.eigenvalues.double(), wide.eigenvalues, rtol=1e-3, atol=1e-6)


# --- padding, micro-batches, cost ----------------------------------------------------------------------------------


def test_the_row_of_padding_has_no_curvature() -> None:
    # first in the example that the layers are tried on, where its output has a gradient
    padding = int(texts()[0][0][0])
    gnh = bag(padding_idx=padding)
    P = ekfac(gnh, 0.1, generator=generator())
    assert not P.uncovered
    values = embedding_of(P).eigenvalues
    assert [token for token in range(TOKENS) if not values[token].any()] == [padding, TOKENS - 1]
    assert_diagonal_of(P, dense(gnh), gnh)
    v = gnh.zeros().randn_like(generator())
    assert float(gnh.matvec(v)["embed.weight"][padding].norm()) == 0.0  # as the operator has it
    torch.testing.assert_close(P.solve(v)["embed.weight"][padding], v["embed.weight"][padding] / 0.1)


@pytest.mark.parametrize("make", [bag, language_model], ids=["classifier", "language model"])
def test_micro_batches_do_not_matter(make: Callable[[], GaussNewton]) -> None:
    found = []
    for size in (None, 1, 2):
        whole = make()
        gnh = GaussNewton(whole.network.model, whole.task, whole.terms.data, micro_batch=size)
        assert size is None or gnh.micro_batch == size
        found.append(ekfac(gnh, 0.1, generator=generator(), curvature="exact"))
    v = make().zeros().randn_like(generator())
    for other in found[1:]:
        torch.testing.assert_close(embedding_of(other).eigenvalues, embedding_of(found[0]).eigenvalues)
        # of the linear layers, padding may change the basis
        torch.testing.assert_close(other.solve(v)["embed.weight"], found[0].solve(v)["embed.weight"])


def test_the_passes_of_embeddings_count() -> None:
    exact = ekfac(bag(), 0.1, generator=generator(), examples=7)
    assert (exact.terms, exact.num_passes) == (7, 4 * CLASSES)
    sampled = ekfac(bag(), 0.1, generator=generator(), curvature="sampled", samples=3)
    assert sampled.num_passes == 4 * 3
    alone = ekfac(bag(gnh={"params": ["embed.*"]}), 0.1, generator=generator())
    assert [block.names for block in alone.blocks] == [("embed.weight",)]
    assert alone.num_passes == 2 * CLASSES
    rest = ekfac(bag(gnh={"params": ["head.*"]}), 0.1, generator=generator())
    assert [block.names for block in rest.blocks] == [("head.weight", "head.bias")]
    assert rest.num_passes == 2 * CLASSES


def test_randomness_comes_from_the_generator() -> None:
    gnh = bag()
    options: dict[str, Any] = {"curvature": "sampled", "examples": 8}
    first, same, other = (
        embedding_of(ekfac(gnh, 0.1, generator=generator(s), **options)).eigenvalues for s in (0, 0, 1)
    )
    assert torch.equal(first, same)
    assert float((first - other).norm()) > 1e-3 * float(first.norm())


# --- what is covered -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("way", "options", "reason"),
    [
        ("called twice", {}, "in a layer called 2 times in a forward pass"),
        ("never called", {}, "in a layer called 0 times in a forward pass"),
        ("also used", {}, "used in another way than by calling its layer"),
        ("hooked", {}, "used in another way than by calling its layer"),
        ("keyword", {}, "in a layer that is not called with one tensor"),
        ("in one row", {}, "in a layer whose inputs (5,) are not one row for each of 1 examples"),
        ("tied", {}, "tied: it is also in 'twin'"),
        ("", {"max_norm": 100.0}, "in an embedding with max_norm"),
        ("", {"scale_grad_by_freq": True}, "in an embedding with scale_grad_by_freq"),
        ("", {"sparse": True}, "in an embedding with sparse gradients"),
    ],
)
def test_embeddings_that_would_come_out_wrong_are_left_out(
    way: str, options: dict[str, Any], reason: str
) -> None:
    gnh = bag(way, **options)
    P = ekfac(gnh, 0.1, generator=generator())
    assert P.uncovered == {"embed.weight": reason}
    assert [block.names for block in P.blocks] == [("head.weight", "head.bias")]


def test_embeddings_of_positions_are_left_out() -> None:
    gnh = bag("positions")
    P = ekfac(gnh, 0.1, generator=generator())
    assert P.uncovered == {
        "places.weight": "in a layer whose inputs (1, 5) are not one row for each of 2 examples"
    }
    assert_diagonal_of(P, dense(gnh), gnh)
    assert embedding_of(P).names == ("embed.weight",)


def test_lower_precision_is_left_out() -> None:
    class Half(Bag):
        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.embed(x).mean(1).to(DOUBLE))

    torch.manual_seed(0)
    model = evaluated(Half())
    model.embed.bfloat16()
    P = ekfac(GaussNewton(model, Classification(), texts()), 0.1, generator=generator())
    assert P.uncovered == {"embed.weight": "in torch.bfloat16; the factors need float32"}


def test_an_embedding_that_changes_its_tokens_is_left_out() -> None:
    class Hashed(nn.Embedding):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward((input * 5) % TOKENS)

    class Shifted(nn.Embedding):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input - 100)

    for kind, move, reason in (
        (Hashed, 0, "used in another way than by calling its layer"),
        (Shifted, 100, "in an embedding that is not called with the numbers of its rows"),
    ):
        torch.manual_seed(0)
        model = Bag()
        model.embed = kind(TOKENS, WIDTH)
        data = [(x + move, y) for x, y in texts()]
        P = ekfac(GaussNewton(evaluated(model), Classification(), data), 0.1, generator=generator())
        assert P.uncovered == {"embed.weight": reason}


def test_other_parameters_of_an_embedding_are_left_out() -> None:
    class Biased(nn.Embedding):
        def __init__(self) -> None:
            super().__init__(TOKENS, WIDTH)
            self.bias = nn.Parameter(torch.ones(WIDTH))

        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) + self.bias

    torch.manual_seed(0)
    model = Bag()
    model.embed = Biased()
    gnh = GaussNewton(evaluated(model), Classification(), texts())
    P = ekfac(gnh, 0.1, generator=generator())
    assert P.uncovered == {
        "embed.bias": "a parameter of Biased; only Linear, Conv2d and Embedding are covered"
    }
    assert embedding_of(P).names == ("embed.weight",)
    assert_diagonal_of(P, dense(gnh), gnh)


def test_of_an_embedding_the_width_counts_and_not_the_vocabulary() -> None:
    assert TOKENS > CLASSES > WIDTH
    assert not ekfac(bag(), 0.1, generator=generator(), widest=WIDTH + 1).uncovered  # the head has a bias
    narrow = bag(gnh={"params": ["embed.*"]})
    assert not ekfac(narrow, 0.1, generator=generator(), widest=WIDTH).uncovered
    with pytest.raises(OptionError, match=r"'embed\.weight' is in a layer 3 wide; widest is 2"):
        ekfac(narrow, 0.1, generator=generator(), widest=WIDTH - 1)


def test_bert_has_both_kinds() -> None:
    gnh = from_zoo("bert")
    P = ekfac(gnh, 0.1, generator=generator())
    assert P.curvature == "exact"
    prefix = "bert.embeddings"
    assert {b.weight for b in P.blocks if b.left is None} == {
        f"{prefix}.word_embeddings.weight",
        f"{prefix}.token_type_embeddings.weight",
    }
    assert "not one row for each of 2 examples" in P.uncovered[f"{prefix}.position_embeddings.weight"]
    assert_diagonal_of(P, dense(gnh), gnh)


def test_an_embedding_that_is_sometimes_called_twice() -> None:
    class Moody(Bag):
        def forward(self, x: Tensor) -> Tensor:
            self.way = "called twice" if bool((x == texts()[7][0]).all(1).any()) else ""
            return super().forward(x)

    torch.manual_seed(0)
    model = evaluated(Moody())
    before = state(model)
    gnh = GaussNewton(model, Classification(), texts(), params=["embed.*"], micro_batch=2)
    with pytest.raises(ModelError, match=r"'embed' is in a layer called 2 times.*depends on its inputs"):
        ekfac(gnh, 0.1, generator=generator())
    assert state(model) == before


def test_the_model_is_left_untouched() -> None:
    gnh = bag()
    before = state(gnh.network.model)
    ekfac(gnh, 0.1, generator=generator())
    with torch.no_grad():
        assert len(ekfac(gnh, 0.1, generator=generator(), curvature="sampled").blocks) == 2
    assert state(gnh.network.model) == before
    assert all(p.grad is None and p.requires_grad for p in gnh.network.model.parameters())


# --- as a preconditioner -------------------------------------------------------------------------------------------


def test_inverse_and_root_against_a_dense_matrix() -> None:
    gnh = bag("positions")
    P = ekfac(gnh, 0.2, generator=generator())
    matrix = 0.2 * torch.eye(gnh.num_parameters, dtype=DOUBLE)
    for block in P.blocks:
        rows, Q = rows_of(block, gnh), basis_of(block)
        matrix[rows[:, None], rows] += Q @ torch.diag(block.eigenvalues.flatten()) @ Q.T
    values, vectors = torch.linalg.eigh(matrix)
    torch.testing.assert_close(as_matrix(P.solve, gnh), torch.linalg.inv(matrix))
    torch.testing.assert_close(as_matrix(P.root_solve, gnh), vectors @ torch.diag(values.rsqrt()) @ vectors.T)
    assert math.isclose(P.largest, float(values[-1]), rel_tol=1e-10)
    assert math.isclose(P.trace, float(values.sum()) - 0.2 * len(values), rel_tol=1e-10)
    assert repr(P).startswith("Ekfac(λ = 0.2, 2 layers, 1 parameters not covered")
    check_that_a_block_is_solved_column_by_column(P, gnh)


def test_conjugate_gradients_need_fewer_iterations_than_without_the_embedding() -> None:
    gnh = bigrams()
    H = dense(gnh)
    damping = float(torch.linalg.eigvalsh(H)[-1]) / 1000
    A = H + damping * torch.eye(len(H), dtype=DOUBLE)
    P = ekfac(gnh, damping, generator=generator(), curvature="exact")
    assert not P.uncovered
    covered, left_out = (as_matrix(p.solve, gnh) for p in (P, without_embedding(P, "embed.weight")))
    queries = flatten(gnh.gradients(gnh.terms.data))
    for tolerance in (1e-2, 1e-4):
        fewer = [iterations(A, b, lambda r: covered @ r, tolerance) for b in queries]
        more = [iterations(A, b, lambda r: left_out @ r, tolerance) for b in queries]
        assert sum(fewer) < 0.9 * sum(more), (fewer, more)


def test_saving(tmp_path: Path) -> None:
    gnh = bag()
    P = ekfac(gnh, 0.1, generator=generator())
    write_value(tmp_path / "P.safetensors", P)
    again = read_value(tmp_path / "P.safetensors", Ekfac)
    assert [block.left is None for block in P.blocks] == [True, False]  # the identity is not written
    for before, after in zip(P.blocks, again.blocks, strict=True):
        assert (after.left is None) == (before.left is None)
        assert before.left is None or torch.equal(after.left, before.left)
        assert torch.equal(after.right, before.right)
        assert torch.equal(after.eigenvalues, before.eigenvalues)
    v = gnh.zeros().randn_like(generator())
    assert relative_error(again.solve(v), P.solve(v)) < 1e-14
    assert repr(again) == repr(P)
