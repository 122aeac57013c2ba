"""Every example's gradient from one backward pass, against autograd on each example alone; and what has none."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from small import DOUBLE, evaluated, generator
from test_untouched import state, used_model
from whence import Classification, GaussNewton, LanguageModeling
from whence.errors import ModelError
from whence.model.layers import Call, ExampleGradients, Passed, matrices
from whence.model.network import Network
from whence.preconditioners.ekfac import ekfac
from whence.scoring import Scorer
from whence.tasks import Batch, Task
from zoo import CASES, VOCABULARY, Case, images, sequences, vectors

OTHER_WAY = "used in another way than by calling its layer with a row for each example"
NOT_ONE_TENSOR = "not called with one tensor, or returns something else"
LENGTH, WIDTH, CLASSES = 5, 6, 4


def tokens(dtype: torch.dtype = DOUBLE) -> list[tuple[Tensor, int]]:
    """Five of six tokens each: some are repeated."""
    rows = torch.randint(WIDTH, (8, LENGTH), generator=generator(4))
    return [(row, k % CLASSES) for k, row in enumerate(rows)]


def features(dtype: torch.dtype = DOUBLE) -> list[tuple[Tensor, int]]:
    rows = torch.randn(7, LENGTH, WIDTH, generator=generator(5), dtype=dtype)
    return [(row, k % CLASSES) for k, row in enumerate(rows)]


class Model(nn.Module):
    """Modules and parameters by name, and what is done with them."""

    def __init__(self, run: Callable[[Any, Tensor], Tensor], **parts: nn.Module | nn.Parameter) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


class Affine(nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.scale, self.bias = nn.Parameter(torch.randn(shape)), nn.Parameter(torch.randn(shape))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + self.bias


def tied(one: nn.Module, other: nn.Module) -> dict[str, nn.Module]:
    other.weight = one.weight
    return {"one": one, "other": other}


def conv1d(outputs: int, inputs: int) -> nn.Module:
    from transformers.pytorch_utils import Conv1D

    layer = Conv1D(outputs, inputs)
    nn.init.normal_(layer.bias)
    return layer


def head(width: int = WIDTH) -> nn.Module:
    return nn.Linear(width, CLASSES)


def square() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def after_convolution(layer: nn.Module, **options: Any) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, **options), nn.ReLU(), nn.AdaptiveAvgPool2d(2), layer, nn.Flatten(), head(24)
    )


def convolution(**options: Any) -> Callable[[], nn.Module]:
    return lambda: after_convolution(nn.Identity(), **options)


def normalised(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        layer = make()
        if isinstance(layer, nn.BatchNorm2d):
            layer.running_mean.normal_(0, 0.3)  # type: ignore[union-attr]
            layer.running_var.uniform_(0.5, 2.0)  # type: ignore[union-attr]
        return after_convolution(layer)

    return build


def language_model() -> nn.Module:
    """Tied weights, positions that all examples share, and a mean over those before."""

    def run(model: Any, x: Tensor) -> Tensor:
        h = model.one(x) + model.places(torch.arange(x.shape[1])[None])
        return model.other(torch.tanh(h + h.cumsum(1) / 7))

    both = tied(nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY))
    return Model(run, places=nn.Embedding(16, WIDTH), **both)


def called_twice() -> nn.Module:
    return Model(lambda m, x: m.head(m.layer(torch.tanh(m.layer(x)))), layer=square(), head=head())


def shared_module() -> nn.Module:
    layer = square()
    return nn.Sequential(layer, nn.Tanh(), layer, nn.Tanh(), head())


def run_padded(model: Any, x: Tensor) -> Tensor:
    return model.head(torch.tanh(model.embed(x)).square().mean(1))


def run_in_turn(model: Any, x: Tensor) -> Tensor:
    return model.head(torch.tanh(model.other(torch.tanh(model.one(x)))))


#: What has the gradients of every example, for all parameters.
READABLE: dict[str, tuple[Callable[[], nn.Module], Callable[[torch.dtype], list[Any]]]] = {
    "called twice": (called_twice, vectors),
    "rows of all examples": (
        lambda: Model(
            lambda m, x: m.head(torch.tanh(m.layer(x.flatten(0, 1))).reshape(x.shape).sum(1)),
            layer=nn.Linear(WIDTH, WIDTH),
            head=head(),
        ),
        features,
    ),
    "called twice, with a row": (
        lambda: Model(lambda m, x: m.head(m.layer(torch.tanh(m.layer(x)))), layer=Affine(1, 6), head=head()),
        vectors,
    ),
    "a number": (
        lambda: Model(lambda m, x: m.head(m.layer(torch.tanh(m.layer(x)))), layer=Affine(), head=head()),
        vectors,
    ),
    "shared module": (shared_module, vectors),
    "tied": (
        lambda: Model(
            run_in_turn, head=head(), **tied(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False))
        ),
        vectors,
    ),
    "tied, kept as inputs by outputs": (
        lambda: Model(
            lambda m, x: m.head(torch.tanh(m.one(x)) + m.other(x * x)),
            head=head(5),
            **tied(conv1d(5, WIDTH), conv1d(5, WIDTH)),
        ),
        vectors,
    ),
    "tied, one transposed": (
        lambda: Model(run_in_turn, head=head(), **tied(conv1d(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))),
        vectors,
    ),
    "changed in place": (
        lambda: Model(
            lambda m, x: m.head(m.layer(x).mul_(2.0).tanh_()), layer=nn.Linear(WIDTH, 5), head=head(5)
        ),
        vectors,
    ),
    "not used": (
        lambda: Model(lambda m, x: m.head(x), layer=nn.Linear(3, 2), head=head()),
        vectors,
    ),
    "positions": (lambda: nn.Sequential(nn.Linear(WIDTH, 3), nn.Tanh(), nn.Flatten(), head(15)), features),
    "recomputed": (
        lambda: Model(
            lambda m, x: m.head(torch.tanh(checkpoint(m.layer, x, use_reentrant=False))),
            layer=nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, 5)),
            head=head(5),
        ),
        vectors,
    ),
    "padding": (
        lambda: Model(
            run_padded, embed=nn.Embedding(WIDTH, 3, padding_idx=int(tokens()[0][0][0])), head=head(3)
        ),
        tokens,
    ),
    "bag": (
        lambda: Model(lambda m, x: m.head(m.bag(x)), bag=nn.EmbeddingBag(WIDTH, 3), head=head(3)),
        tokens,
    ),
    "groups": (convolution(groups=3), images),
    "circular": (convolution(padding=1, padding_mode="circular"), images),
    "same": (convolution(padding="same"), images),
    "strided": (convolution(padding="valid", stride=2, bias=False), images),
    "dilated": (convolution(padding=(1, 0), dilation=2), images),
    "one dimension": (
        lambda: nn.Sequential(nn.Conv1d(LENGTH, 4, 3), nn.Tanh(), nn.Flatten(), head(16)),
        features,
    ),
    "transposed convolution": (normalised(lambda: nn.ConvTranspose2d(6, 6, 1)), images),
    "layer norm": (normalised(lambda: nn.LayerNorm([6, 2, 2])), images),
    "rms norm": (normalised(lambda: nn.RMSNorm([6, 2, 2])), images),
    "batch norm": (normalised(lambda: nn.BatchNorm2d(6)), images),
    "group norm": (normalised(lambda: nn.GroupNorm(2, 6)), images),
    "prelu": (normalised(lambda: nn.PReLU(6)), images),
}


class Narrow(nn.Linear):
    """Takes more inputs than it uses."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input[..., :3])


class Hashed(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward((input * 5 + 1) % WIDTH)


def odd(run: Callable[[Any, Tensor], Tensor], layer: nn.Module | None = None) -> Callable[[], nn.Module]:
    return lambda: Model(run, odd=square() if layer is None else layer, head=head())


def embedded(
    run: Callable[[Any, Tensor], Tensor], layer: Callable[[], nn.Module] = lambda: nn.Embedding(LENGTH, WIDTH)
) -> Callable[[], nn.Module]:
    """A model of tokens, with another embedding, ``odd``."""
    return lambda: Model(
        lambda m, x: m.head(torch.tanh(m.embed(x) + run(m, x)).mean(1)),
        embed=nn.Embedding(WIDTH, WIDTH),
        odd=layer(),
        head=head(),
    )


def hooked() -> nn.Module:
    model = odd(lambda m, x: m.head(torch.tanh(m.odd(x))))()
    model.odd.register_forward_hook(lambda module, inputs, output: 2 * output)  # type: ignore[union-attr,operator]
    return model


def run_sum_of_rows(model: Any, x: Tensor) -> Tensor:
    return model.odd(torch.zeros(1, 1, dtype=torch.long)).sum(0)  # which rows for each example would change


MADE_OF_OTHERS = "which is made of other modules"
#: Models in which ``odd``, or else what is named, has no gradients of examples: how, the data, the reason.
UNREADABLE: dict[str, tuple[Callable[[], nn.Module], Callable[[torch.dtype], list[Any]], str]] = {
    "by hand": (
        odd(lambda m, x: m.head(torch.tanh(F.linear(x, m.odd.weight, m.odd.bias)))),
        vectors,
        OTHER_WAY,
    ),
    "only the weight": (odd(lambda m, x: m.head(torch.tanh(F.linear(x, m.odd.weight)))), vectors, OTHER_WAY),
    "only the bias": (odd(lambda m, x: m.head(torch.tanh(x + m.odd.bias))), vectors, OTHER_WAY),
    "weight also used": (
        odd(lambda m, x: m.head(torch.tanh(m.odd(x) + m.odd.weight.sum()))),
        vectors,
        OTHER_WAY,
    ),
    "bias also used": (odd(lambda m, x: m.head(torch.tanh(m.odd(x) * m.odd.bias))), vectors, OTHER_WAY),
    "hooked": (hooked, vectors, OTHER_WAY),
    "narrow": (odd(lambda m, x: m.head(torch.tanh(m.odd(x))), Narrow(3, WIDTH)), vectors, OTHER_WAY),
    "keyword": (odd(lambda m, x: m.head(torch.tanh(m.odd(input=x)))), vectors, NOT_ONE_TENSOR),
    "two tensors": (
        odd(lambda m, x: m.head(m.odd(x, x.square())), nn.Bilinear(WIDTH, WIDTH, WIDTH)),
        vectors,
        NOT_ONE_TENSOR,
    ),
    "recurrent": (
        odd(lambda m, x: m.head(m.odd(x)[0].mean(1)), nn.LSTM(WIDTH, WIDTH, batch_first=True)),
        features,
        NOT_ONE_TENSOR,
    ),
    "rows of all examples, positions first": (
        odd(
            lambda m, x: m.head(
                torch.tanh(m.odd(x.transpose(0, 1).flatten(0, 1))).reshape(-1, len(x), WIDTH).sum(0)
            )
        ),
        features,
        OTHER_WAY,
    ),
    "examples second": (
        odd(lambda m, x: m.head(torch.tanh(m.odd(torch.stack([x, x.square()]))).sum(0))),
        vectors,
        OTHER_WAY,  # there are two rows, as there are two examples
    ),
    "parametrised": (
        odd(
            lambda m, x: m.head(torch.tanh(m.odd(x))),
            nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
        ),
        vectors,
        MADE_OF_OTHERS,
    ),
    "of a container": (
        lambda: Model(lambda m, x: m.head(x * m.odd), odd=nn.Parameter(torch.randn(WIDTH)), head=head()),
        vectors,
        MADE_OF_OTHERS,
    ),
    "hashed": (embedded(lambda m, x: m.odd(x), lambda: Hashed(WIDTH, WIDTH)), tokens, OTHER_WAY),
    "positions without a row": (embedded(lambda m, x: m.odd(torch.arange(LENGTH))), tokens, r"inputs \(5,\)"),
    "positions' first row": (embedded(lambda m, x: m.odd(torch.arange(LENGTH)[None])[0]), tokens, OTHER_WAY),
    "positions in a view": (
        embedded(lambda m, x: m.odd(torch.arange(LENGTH)[None]).view(LENGTH, WIDTH)),
        tokens,
        r"inputs \(1, 5\)",
    ),
    "repeated": (
        embedded(lambda m, x: m.odd(torch.zeros(1, 1, dtype=torch.long)).repeat(len(x), 1, 1)),
        tokens,
        r"inputs \(1, 1\)",
    ),
    "sum of rows": (embedded(run_sum_of_rows), tokens, r"inputs \(1, 1\)"),
}


def operator(
    build: Callable[[], nn.Module], data: Any, task: Task | None = None, **options: Any
) -> GaussNewton:
    torch.manual_seed(0)
    options = {"product": "finite-difference"} | options  # which any model can do
    return GaussNewton(evaluated(build()), task or Classification(), data(DOUBLE), **options)


def from_zoo(case: Case) -> GaussNewton:
    return GaussNewton(case.model(DOUBLE), case.task, case.data(DOUBLE), product="finite-difference")


def gradients_of_losses(task: Task, batch: Batch) -> Callable[[Tensor], Sequence[Tensor]]:
    def cotangents(outputs: Tensor) -> Sequence[Tensor]:
        with torch.enable_grad():
            leaf = outputs.requires_grad_()
            (found,) = torch.autograd.grad(task.losses(leaf, batch).sum(), leaf)
        return [found]

    return cotangents


def read(gnh: GaussNewton, *, others: bool = False) -> Passed:
    batch = gnh.terms.fetch(torch.arange(len(gnh.terms)))
    (found,) = gnh.example_gradients().passes(batch, gradients_of_losses(gnh.task, batch), others=others)
    return found


def one_by_one(gnh: GaussNewton) -> dict[str, Tensor]:
    """The gradient of every example's loss, alone and without padding."""
    found: dict[str, list[Tensor]] = {name: [] for name in gnh.network.parameters}
    for example in gnh.terms.data:
        batch = gnh.task.collate([example])
        leaves = gnh.network.leaves()
        total = gnh.task.losses(gnh.network.outputs(batch, leaves), batch).sum()
        gradients = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
        for (name, leaf), gradient in zip(leaves.items(), gradients, strict=True):
            found[name].append(torch.zeros_like(leaf) if gradient is None else gradient)
    return {name: torch.stack(parts) for name, parts in found.items()}


def assert_right(gnh: GaussNewton) -> None:
    """Examples' gradients where there are any, and the batch's for the rest, relative to the size of their matrix."""
    passed, expected = read(gnh, others=True), one_by_one(gnh)
    missing = gnh.example_gradients().missing
    directions = gnh.zeros(3).randn_like(generator())
    for matrix in matrices(gnh.network):
        size = math.hypot(*(float(expected[name].norm()) for name in matrix.names))
        for name in matrix.names:
            zeros = torch.zeros_like(expected[name])
            if name in missing:
                found, truth = passed.others.get(name, zeros.sum(0)), expected[name].sum(0)
                assert passed.gradients(name) is None
            else:
                each = passed.gradients(name)
                found, truth = zeros if each is None else each, expected[name]
                along = passed.products(name, directions[name])
                if along is not None:
                    expected_along = torch.einsum("k...,n...->kn", directions[name], truth)
                    torch.testing.assert_close(along, expected_along, rtol=1e-9, atol=1e-9 * size)
            assert float((found - truth).norm()) <= 1e-9 * size, name


# --- gradients ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_gradients_of_every_kind_of_model(case: Case) -> None:
    gnh = from_zoo(case)
    assert_right(gnh)
    missing = gnh.example_gradients().missing
    if case.name == "attention":
        assert set(missing) == {n for n in gnh.network.parameters if n.startswith("attention.")}
        assert "MultiheadAttention" in missing["attention.in_proj_weight"]
        assert missing["attention.out_proj.bias"] == OTHER_WAY
    elif case.name == "opt":
        assert missing == {"model.decoder.embed_positions.weight": NOT_ONE_TENSOR}
    else:
        assert not missing


@pytest.mark.parametrize("name", READABLE)
def test_gradients_of_every_kind_of_layer(name: str) -> None:
    build, data = READABLE[name]
    gnh = operator(build, data)
    assert not gnh.example_gradients().missing
    assert_right(gnh)


@pytest.mark.parametrize("name", UNREADABLE)
def test_what_cannot_be_read_says_why_and_the_rest_is_read(name: str) -> None:
    build, data, reason = UNREADABLE[name]
    gnh = operator(build, data)
    missing = gnh.example_gradients().missing
    assert set(missing) == {n for n in gnh.network.parameters if n.split(".")[0] == "odd"}
    assert all(re.search(reason, found) for found in missing.values()), missing
    assert_right(gnh)


def test_an_embedding_whose_gradient_is_no_derivative_has_none_of_examples() -> None:
    network = Network(
        model := Model(
            run_padded, embed=nn.Embedding(WIDTH, 3, scale_grad_by_freq=True), head=head(3)
        ).eval(),
        Classification(),
        dict(model.named_parameters()),
    )
    assert "embed.weight" in ExampleGradients(network, Classification().collate(tokens()[:2])).missing


@pytest.mark.parametrize("option", [{"max_norm": 100.0}, {"sparse": True}], ids=str)
def test_embeddings_whose_gradients_are_not_those_of_examples(option: dict[str, Any]) -> None:
    build = lambda: Model(run_padded, embed=nn.Embedding(WIDTH, 3, **option), head=head(3))  # noqa: E731
    missing = operator(build, tokens).example_gradients().missing
    assert missing == {"embed.weight": "in an embedding that changes or scales its gradients"}


def test_ragged_sequences_with_tied_weights_and_shared_positions() -> None:
    gnh = operator(language_model, sequences, LanguageModeling())
    assert not gnh.example_gradients().missing
    assert len({len(row["input_ids"]) for row in gnh.terms.data}) == 4
    assert_right(gnh)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_batches_of_any_size(size: int) -> None:
    gnh = operator(language_model, sequences, LanguageModeling())
    expected = one_by_one(gnh)
    layers = gnh.example_gradients()
    for positions in torch.arange(len(gnh.terms)).split(size):
        batch = gnh.terms.fetch(positions)
        (passed,) = layers.passes(batch, gradients_of_losses(gnh.task, batch))
        for name, truth in expected.items():
            found = passed.gradients(name)
            assert found is not None
            assert float((found - truth[positions]).norm()) <= 1e-9 * float(truth.norm())


def test_several_cotangents_share_a_forward_pass() -> None:
    gnh = operator(called_twice, vectors)
    batch = gnh.terms.fetch(torch.arange(5))
    draws = list(torch.randn(3, 5, CLASSES, generator=generator(), dtype=DOUBLE))
    layers = gnh.example_gradients()
    together = [p.gradients("layer.weight") for p in layers.passes(batch, lambda outputs: draws)]
    for draw, found in zip(draws, together, strict=True):
        (alone,) = layers.passes(batch, lambda outputs, draw=draw: [draw])  # type: ignore[misc]
        torch.testing.assert_close(found, alone.gradients("layer.weight"), rtol=1e-12, atol=0)


def test_gradients_can_be_asked_for_more_than_once() -> None:
    gnh = operator(READABLE["called twice, with a row"][0], vectors)
    passed, expected = read(gnh), one_by_one(gnh)
    for name in ("layer.bias", "layer.scale", "layer.bias"):
        torch.testing.assert_close(passed.gradients(name), expected[name], rtol=1e-9, atol=1e-12)


def test_selected_parameters_alone() -> None:
    for params in (["*.bias"], ["layer.weight"], ["head.*"]):
        gnh = operator(called_twice, vectors, params=params)
        assert not gnh.example_gradients().missing
        assert_right(gnh)


def test_without_gradients_switched_on() -> None:
    gnh = operator(language_model, sequences, LanguageModeling())
    with torch.no_grad():
        assert not gnh.example_gradients().missing
        found = read(gnh).gradients("one.weight")
    torch.testing.assert_close(found, one_by_one(gnh)["one.weight"], rtol=1e-9, atol=1e-12)


def test_one_example_is_enough() -> None:
    gnh = operator(called_twice, lambda dtype: vectors(dtype)[:1])
    assert not gnh.example_gradients().missing
    assert_right(gnh)


def test_a_model_of_which_nothing_can_be_read() -> None:
    by_hand = operator(lambda: Model(lambda m, x: F.linear(x, m.odd.weight), odd=nn.Linear(6, 4)), vectors)
    assert list(by_hand.example_gradients().missing) == ["odd.weight", "odd.bias"]
    assert read(by_hand).calls == {}
    assert_right(by_hand)


# --- models that change their ways -------------------------------------------------------------------------------


def moody(run: Callable[[Any, Tensor], Tensor]) -> Callable[[], nn.Module]:
    """Uses its layer in another way for example 7."""
    special = vectors(DOUBLE)[7][0]

    def either(model: Any, x: Tensor) -> Tensor:
        strange = bool((x == special).all(1).any())
        return model.head(torch.tanh(run(model, x) if strange else model.odd(x)))

    return lambda: Model(either, odd=square(), head=head())


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        (lambda m, x: m.odd(input=x), "odd.weight, odd.bias is not called with one tensor"),
        (
            lambda m, x: m.odd(torch.cat([x, x]))[: len(x)],
            r"called with inputs \(10, 6\), .* each of 5 examples",
        ),
        (lambda m, x: m.odd(x.mean(0, keepdim=True)), r"called with inputs \(1, 6\)"),
    ],
    ids=["keyword", "more rows", "one row"],
)
def test_a_layer_that_is_called_otherwise_on_other_inputs(run: Any, reason: str) -> None:
    gnh = operator(moody(run), vectors)
    layers = gnh.example_gradients()
    assert not layers.missing
    before = state(gnh.network.model)
    first, other = (gnh.terms.fetch(torch.arange(start, start + 5)) for start in (0, 5))
    assert len(list(layers.passes(first, lambda outputs: [outputs]))) == 1
    with pytest.raises(ModelError, match=f"{reason}.* from example 5 of the data on.*depends on its inputs"):
        list(layers.passes(other, lambda outputs: [outputs]))
    assert state(gnh.network.model) == before


def test_a_layer_that_is_called_twice_on_other_inputs() -> None:
    gnh = operator(moody(lambda m, x: m.odd(torch.tanh(m.odd(x)))), vectors)
    assert not gnh.example_gradients().missing
    batch = gnh.terms.fetch(torch.tensor([7]))
    (passed,) = gnh.example_gradients().passes(batch, gradients_of_losses(gnh.task, batch))
    found = passed.gradients("odd.weight")
    assert found is not None
    torch.testing.assert_close(found[0], one_by_one(gnh)["odd.weight"][7], rtol=1e-9, atol=1e-12)


# --- the model is left as it was ---------------------------------------------------------------------------------


def test_the_model_is_left_untouched() -> None:
    model = used_model()
    gnh = GaussNewton(model, Classification(), vectors(DOUBLE))
    before = state(model)
    assert list(gnh.example_gradients().missing) == ["scale"]
    read(gnh, others=True).gradients("norm.weight")
    assert state(model) == before


@pytest.mark.parametrize("error", [RuntimeError("the model's own error"), KeyboardInterrupt()], ids=type)
@pytest.mark.parametrize("call", [1, 2, 3])
def test_an_error_inside_the_model_leaves_it_untouched(call: int, error: BaseException) -> None:
    model = used_model()
    gnh = GaussNewton(model, Classification(), vectors(DOUBLE))
    before = state(model)
    model.fuse.calls, model.fuse.error = call, error
    told = ModelError if isinstance(error, Exception) else type(error)
    with pytest.raises(told) as caught:  # twice to find out, once to read
        read(gnh)
    assert (caught.value.__cause__ if isinstance(error, Exception) else caught.value) is error
    assert state(model) == before


# --- parameters as matrices --------------------------------------------------------------------------------------


def test_every_parameter_is_in_one_matrix() -> None:
    for case in CASES:
        gnh = from_zoo(case)
        found = matrices(gnh.network)
        names = [name for matrix in found for name in matrix.names]
        assert sorted(names) == sorted(gnh.network.parameters)
        for columns in (None, 3):
            vector = gnh.zeros(columns).randn_like(generator())
            for matrix in found:
                packed = matrix.pack(vector, () if columns is None else (columns,))
                assert packed.shape[-2:] == matrix.shape
                parts = matrix.unpack(packed, vector.shape_of(matrix.weight))
                assert set(parts) == set(matrix.names)
                assert all(torch.equal(part, vector[name]) for name, part in parts.items())


def test_rows_are_outputs_and_the_bias_is_the_last_column() -> None:
    gnh = operator(
        lambda: Model(lambda m, x: m.head(m.first(x)), first=conv1d(5, WIDTH), head=head(5)), vectors
    )
    first, last = matrices(gnh.network)
    assert (first.names, first.transposed, first.shape) == (("first.weight", "first.bias"), True, (5, 7))
    assert (last.names, last.transposed, last.shape) == (("head.weight", "head.bias"), False, (4, 6))
    v = gnh.zeros().randn_like(generator())
    assert torch.equal(first.pack(v), torch.cat([v["first.weight"].T, v["first.bias"][:, None]], 1))
    convolved = matrices(operator(convolution(), images).network)[0]
    assert (convolved.names, convolved.shape) == (("0.weight", "0.bias"), (6, 28))
    one, bias, places = matrices(operator(language_model, sequences, LanguageModeling()).network)
    assert {one.shape, bias.shape, places.shape} == {(VOCABULARY, WIDTH), (VOCABULARY, 1), (16, WIDTH)}


def test_few_examples_gradients_are_held_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    gnh = operator(lambda: Model(lambda m, x: m.head(x), head=head(WIDTH)), vectors)
    largest = max(p.numel() * p.element_size() for p in gnh.network.parameters.values())
    directions, everything = gnh.zeros(2).randn_like(generator()), torch.arange(len(gnh.terms))
    together = Scorer(gnh, directions, method="layers", norms=True).score_with_norms(everything)
    plain = Scorer(gnh, directions, method="layers").score(everything)
    factors = ekfac(gnh, 1.0, generator=generator())
    sizes: list[tuple[int, int]] = []
    of_few = Call.of_few

    def noting(self: Call, numbers: int) -> Any:
        for few in of_few(self, numbers):
            sizes.append((numbers, len(few.gradient)))
            yield few

    monkeypatch.setattr(Call, "of_few", noting)
    monkeypatch.setattr("whence.model.layers._MOVING", -1000)  # no products without gradients
    monkeypatch.setattr("whence.model.layers._AT_ONCE", 3 * largest + 1)

    def held() -> int:
        """The most examples whose gradients of the largest parameter were there together, since last asked."""
        most = max(sizes)
        sizes.clear()
        return most[1]

    found = Scorer(gnh, directions, method="layers", norms=True).score_with_norms(everything)
    assert held() == 3
    for mine, theirs in zip(found, together, strict=True):
        torch.testing.assert_close(mine, theirs)
    torch.testing.assert_close(Scorer(gnh, directions, method="layers").score(everything), plain)
    assert held() == 3
    again = ekfac(gnh, 1.0, generator=generator())
    # weight and bias are one matrix, of which fewer fit
    assert held() == 2
    for mine, theirs in zip(again.blocks, factors.blocks, strict=True):
        torch.testing.assert_close(mine.eigenvalues, theirs.eigenvalues)
