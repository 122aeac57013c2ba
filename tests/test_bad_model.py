"""A model or a parameter filter that cannot work gets a typed error that names the value and a remedy."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from small import DOUBLE, PRODUCTS, Product, Wrapped, classifier, evaluated, generator, operator
from whence import (
    Classification,
    ConvexLoss,
    GaussNewton,
    LanguageModeling,
    Regression,
    attribute,
    estimate_spectrum,
)
from whence.errors import (
    ModelError,
    OptionError,
    ParameterSelectionError,
    SolverError,
)
from zoo import VOCABULARY, vectors

# --- the model -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [None, lambda x: x, nn.Linear], ids=["None", "function", "class"])
def test_what_is_not_a_module_is_refused(model: Any) -> None:
    with pytest.raises(ModelError, match=f"must be a torch.nn.Module, got a {type(model).__name__}"):
        GaussNewton(model, Classification(), vectors(DOUBLE))


def test_training_mode_is_refused() -> None:
    with pytest.raises(ModelError, match=r"in training mode.*Call model\.eval\(\)"):
        operator(classifier().train())


@pytest.mark.parametrize(
    "layer",
    [nn.Dropout(0.5), nn.AlphaDropout(0.5), nn.BatchNorm1d(10)],
    ids=lambda layer: type(layer).__name__,
)
def test_a_layer_left_in_training_mode_is_refused_by_name(layer: nn.Module) -> None:
    model = evaluated(nn.Sequential(nn.Linear(6, 10), nn.Sequential(nn.Tanh(), layer), nn.Linear(10, 4)))
    layer.train()
    kind = type(layer).__name__
    with pytest.raises(
        ModelError, match=rf"layer '1\.1' \({kind}\) is in training mode.*Call model\.eval\(\)"
    ):
        operator(model)


def test_a_layer_in_training_mode_without_effect_is_accepted() -> None:
    model = classifier()
    model[1].train()  # type: ignore[index]
    assert operator(model).num_terms == 20


def test_functional_dropout_is_refused_with_the_size_of_the_difference() -> None:
    model = Wrapped(lambda h: F.dropout(h, 0.5, training=True), outputs=64)
    with pytest.raises(ModelError, match=r"not deterministic: .* differ by \d.*[Dd]ropout.*switch it off"):
        operator(model)


def test_attention_dropout_left_in_training_mode_is_refused() -> None:
    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(6, 2, dropout=0.5, batch_first=True)
            self.head = nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Tensor:
            sequence = torch.stack([x, 2 * x, 3 * x, x.flip(1), x * x, -x], dim=1)
            return self.head(self.attention(sequence, sequence, sequence, need_weights=False)[0].mean(1))

    model = evaluated(Attending())
    assert operator(model).num_terms == 20
    model.attention.train()  # type: ignore[union-attr]
    with pytest.raises(ModelError, match="not deterministic"):
        operator(model)


def test_a_model_without_parameters_is_refused() -> None:
    with pytest.raises(ModelError, match="Flatten has no parameters"):
        operator(nn.Flatten().eval())


@pytest.mark.parametrize("broken", [math.inf, math.nan])
def test_broken_weights_are_refused(broken: float) -> None:
    model = classifier()
    with torch.no_grad():
        model[4].weight[2, 3] = broken  # type: ignore[index,operator]
    with pytest.raises(ModelError, match=r"NaN or infinity.*[Cc]heck the weights"):
        operator(model)


def test_an_infinite_loss_of_finite_outputs_is_refused() -> None:
    data = [(x, torch.zeros(4, dtype=DOUBLE)) for x, _ in vectors(DOUBLE)]
    task = ConvexLoss(lambda h, y: (h - y).square().sum(1) - y.sum(1).log())
    with pytest.raises(ModelError, match=r"loss is NaN or infinite.*Evaluate the model on its training data"):
        GaussNewton(classifier(), task, data)


@pytest.mark.parametrize("product", PRODUCTS)
def test_weights_that_break_on_later_examples_only_stop_the_product(product: Product) -> None:
    model = evaluated(nn.Sequential(nn.Embedding(VOCABULARY, 4), nn.Tanh(), nn.Linear(4, VOCABULARY)))
    with torch.no_grad():
        model[0].weight[9] = math.nan  # type: ignore[index,operator]
    data = [torch.tensor(row) for row in ([1, 2, 3, 4], [5, 6, 7, 8], [9, 9])]
    gnh = GaussNewton(model, LanguageModeling(), data, product=product)
    v = gnh.zeros().randn_like(generator())
    with pytest.raises(ModelError, match=r"NaN or infinity on a batch.*[Cc]heck the weights"):
        gnh.matvec(v)
    with pytest.raises(ModelError, match=r"NaN or infinity on a batch.*[Cc]heck the weights"):
        gnh.quadratic_form(v)


@pytest.mark.parametrize(
    ("function", "shape"),
    [
        (lambda h: h[:, 0], "(2,)"),
        (lambda h: h.unsqueeze(1), "(2, 1, 4)"),
        (lambda h: h.mean(0, keepdim=True), "(1, 4)"),
        (lambda h: h.sum(), "()"),
    ],
    ids=["one number each", "a dimension too many", "averaged over the batch", "one number"],
)
def test_outputs_of_another_shape_are_refused_for_classification(
    function: Callable[[Tensor], Tensor], shape: str
) -> None:
    with pytest.raises(ModelError) as caught:
        operator(Wrapped(function))
    message = str(caught.value)
    assert f"outputs have shape {shape} for targets of shape (2,)" in message
    assert "logits [*targets.shape, classes]" in message


@pytest.mark.parametrize(
    ("function", "shape"),
    [
        (lambda h: h, "(2, 4)"),
        (lambda h: h[:, :1].mean(0), "(1,)"),
        (lambda h: h.sum(), "()"),
        (lambda h: h[:1, :2], "(1, 2)"),
    ],
    ids=["too many", "averaged over the batch", "one number", "one row for two examples"],
)
def test_outputs_of_another_shape_are_refused_for_regression(
    function: Callable[[Tensor], Tensor], shape: str
) -> None:
    data = [(x, torch.ones(1, dtype=DOUBLE)) for x, _ in vectors(DOUBLE)]
    with pytest.raises(ModelError) as caught:
        GaussNewton(Wrapped(function), Regression(), data)
    assert f"outputs have shape {shape} for targets of shape (2, 1)" in str(caught.value)


def test_outputs_of_another_shape_are_refused_for_language_models() -> None:
    model = evaluated(nn.Sequential(nn.Embedding(VOCABULARY, 4), nn.Flatten(), nn.LazyLinear(VOCABULARY)))
    rows = [torch.tensor([1, 2, 3]), torch.tensor([3, 2, 1])]
    model(torch.stack(rows))
    with pytest.raises(ModelError, match=r"shape \(2, 17\) for targets of shape \(2, 3\).*LanguageModeling"):
        GaussNewton(model, LanguageModeling(), rows)


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (lambda h: "a string", "str"),
        (lambda h: None, "NoneType"),
        (lambda h: {"scores": h}, "dict"),
        (lambda h: ("state", h), "tuple"),
        (lambda h: [h], "list"),
    ],
    ids=["string", "None", "dict without logits", "tuple of something else", "list"],
)
def test_a_model_that_returns_something_else_is_refused(function: Callable[[Tensor], Any], kind: str) -> None:
    with pytest.raises(ModelError, match=rf"returned a {kind}.*`\.logits`.*Wrap the model in a module"):
        operator(Wrapped(function))


def test_integer_outputs_are_refused() -> None:
    with pytest.raises(ModelError, match=r"torch\.int64"):
        operator(Wrapped(lambda h: h.round().long()))


@pytest.mark.parametrize("product", PRODUCTS)
def test_outputs_without_a_graph_are_refused(product: Product) -> None:
    class Cut(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 4)

        @torch.no_grad()
        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x)

    with pytest.raises(ModelError, match="grad"):
        operator(evaluated(Cut()), product=product)


@pytest.mark.parametrize("others_frozen", [False, True], ids=["others trainable", "others frozen"])
def test_selecting_only_parameters_that_the_outputs_do_not_use_is_found_out(others_frozen: bool) -> None:
    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 4).requires_grad_(not others_frozen)
            self.unused = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x)

    def measure() -> None:
        gnh = operator(evaluated(Unused()), params=["unused"])
        estimate_spectrum(gnh, generator=generator(), probes=4)

    with pytest.raises((SolverError, ModelError, ParameterSelectionError), match="selected"):
        measure()


# --- forward-mode differentiation ----------------------------------------------------------------------------


class Sine(torch.autograd.Function):
    """Without ``jvp``, as most custom functions are."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * x.cos()


def test_exact_products_of_a_model_without_forward_mode_are_refused() -> None:
    with pytest.raises(ModelError, match=r"forward-mode.*jvp.*product='finite-difference' \(or 'auto'\)"):
        operator(Wrapped(Sine.apply), product="exact")


def test_auto_falls_back_to_finite_differences_and_says_why() -> None:
    gnh = operator(Wrapped(Sine.apply))
    assert gnh.product == "finite-difference"
    assert "forward-mode AD fails" in gnh.product_reason
    assert "jvp" in gnh.product_reason
    assert gnh.product_reason in repr(gnh)
    reference = operator(Wrapped(torch.sin), product="exact")
    v = gnh.zeros().randn_like(generator())
    for name, expected in reference.matvec(v).items():
        torch.testing.assert_close(gnh.matvec(v)[name], expected, rtol=1e-8, atol=1e-9)


def test_auto_is_exact_where_the_model_supports_it() -> None:
    gnh = operator(Wrapped(torch.sin))
    assert gnh.product == "exact"
    assert gnh.product_reason == "the model supports forward-mode AD"


@pytest.mark.parametrize("product", PRODUCTS)
def test_a_product_that_was_asked_for_says_so(product: Product) -> None:
    gnh = operator(product=product)
    assert (gnh.product, gnh.product_reason) == (product, "asked for")


# --- the parameters ------------------------------------------------------------------------------------------


def test_a_model_with_frozen_parameters_only_is_refused() -> None:
    with pytest.raises(ParameterSelectionError, match=r"none of the model's 6 .*requires_grad_\(True\)"):
        operator(classifier().requires_grad_(False))


def test_a_filter_that_matches_nothing_lists_what_it_could_match() -> None:
    with pytest.raises(ParameterSelectionError) as caught:
        operator(params=["transformer.h.*"])
    message = str(caught.value)
    assert "['transformer.h.*'] matches nothing" in message
    for name, _ in classifier().named_parameters():
        assert name in message


@pytest.mark.parametrize("params", [lambda name: False, []], ids=["predicate", "empty list"])
def test_an_empty_selection_lists_what_it_could_match(params: Any) -> None:
    with pytest.raises(ParameterSelectionError, match=r"matches nothing; it could match: 0\.weight, 0\.bias"):
        operator(params=params)


def test_the_candidates_of_a_large_model_are_cut_short() -> None:
    model = evaluated(nn.Sequential(*[nn.Linear(6, 6) for _ in range(9)], nn.Linear(6, 4)))
    with pytest.raises(ParameterSelectionError, match=r"0\.weight, .*… \(20 in all\)"):
        operator(model, params=["nothing"])


def test_a_filter_that_matches_frozen_parameters_only_names_them() -> None:
    model = classifier()
    model[0].requires_grad_(False)  # type: ignore[index]
    with pytest.raises(
        ParameterSelectionError, match=r"frozen.*\(0\.weight, 0\.bias\).*requires_grad_\(True\)"
    ):
        operator(model, params=["0.*"])


def test_a_filter_given_as_a_string_is_refused_with_the_list_to_write() -> None:
    with pytest.raises(OptionError, match=r"write \['4\.\*'\]"):
        operator(params="4.*")


def test_patterns_that_are_no_strings_are_refused() -> None:
    with pytest.raises(OptionError, match="name patterns, got 4"):
        operator(params=["0.*", 4])


# --- models that are no functions of an example ------------------------------------------------------------------


def test_outputs_that_depend_on_the_rest_of_the_batch_are_refused() -> None:
    with pytest.raises(
        ModelError, match=r"differ by \d.* when it is run alone and with others.*batch statistics"
    ):
        operator(Wrapped(lambda h: h - h.mean(0)))


def test_sequences_that_are_padded_in_company_are_no_dependence() -> None:
    torch.manual_seed(0)
    model = evaluated(nn.Sequential(nn.Embedding(VOCABULARY, 4), nn.Linear(4, VOCABULARY)))
    rows = [torch.arange(2 + i) for i in range(6)]
    assert GaussNewton(model, LanguageModeling(), rows).num_terms == 1 + 2 + 3 + 4 + 5 + 6


def test_sequences_that_look_at_the_rest_of_the_batch_are_refused() -> None:
    class Mixing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(VOCABULARY, 4), nn.Linear(4, VOCABULARY)

        def forward(self, input_ids: Tensor) -> Tensor:
            hidden = self.embedding(input_ids)
            return self.head(hidden * len(input_ids))

    torch.manual_seed(0)
    with pytest.raises(ModelError, match="alone and with others"):
        GaussNewton(evaluated(Mixing()), LanguageModeling(), [torch.arange(2 + i) for i in range(6)])


def test_batch_normalisation_without_running_statistics_is_refused_by_name() -> None:
    norm = nn.BatchNorm1d(10, track_running_stats=False)
    with pytest.raises(
        ModelError, match=r"layer '1' \(BatchNorm1d\) has no running statistics.*rest of the batch"
    ):
        operator(evaluated(nn.Sequential(nn.Linear(6, 10), norm, nn.Linear(10, 4))))


@pytest.mark.parametrize("certain", [1.0, 50.0])
def test_probabilities_in_place_of_logits_are_refused(certain: float) -> None:
    with pytest.raises(ModelError, match=r"outputs are probabilities.*leave out the softmax"):
        operator(Wrapped(lambda h: (certain * h).softmax(-1)))


def test_logarithms_of_probabilities_are_logits() -> None:
    assert operator(Wrapped(lambda h: h.log_softmax(-1))).num_terms == 20


class Tiring(nn.Module):
    """Gives other answers once it was called so many times."""

    def __init__(self, after: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.left = nn.Linear(6, 4), after
        evaluated(self)

    def forward(self, x: Tensor) -> Tensor:
        self.left -= 1
        return self.linear(x) * (1.0 if self.left > 0 else 1.5)


@pytest.mark.parametrize("accuracy", ["auto", "quick"])
def test_a_model_that_changes_on_the_way_gives_no_result(accuracy: str) -> None:
    data = vectors(DOUBLE)
    with pytest.raises(
        ModelError, match=r"loss of query 0 was .* at the start and is .* now.*how often it was called"
    ):
        attribute(Tiring(30), data, data[:1], task=Classification(), accuracy=accuracy)
    assert (
        attribute(Tiring(10**9), data, data[:1], task=Classification(), accuracy=accuracy)
        .scores.isfinite()
        .all()
    )


# --- models that cannot be looked into ---------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own, on import
def test_a_compiled_model_is_refused_before_it_is_compiled() -> None:
    compiled: Any = torch.compile(classifier())
    with pytest.raises(ModelError, match=r"the model was compiled.*model\._orig_mod"):
        operator(compiled)
    model = classifier()
    model.compile()
    with pytest.raises(ModelError, match="the model was compiled"):
        operator(model)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_scripted_model_is_refused() -> None:
    scripted: Any = torch.jit.script(classifier())
    with pytest.raises(ModelError, match=r"TorchScript.*Give the Python module that it was made from"):
        operator(scripted)


def test_a_model_without_numbers_is_refused() -> None:
    with pytest.raises(ModelError, match=r"on the meta device.*load its weights"):
        operator(classifier().to("meta"))


@pytest.mark.parametrize("error", [ValueError, KeyError, ZeroDivisionError, AssertionError])
def test_what_a_model_raises_is_told_with_the_example(error: type[Exception]) -> None:
    def fail(h: Tensor) -> Tensor:
        raise error("inside")

    with pytest.raises(
        ModelError, match=f"the model failed on example 0 of the data.*{error.__name__}.*inside"
    ):
        operator(Wrapped(fail))


def test_what_a_model_raises_on_a_later_example_is_told_with_the_example() -> None:
    data = vectors(DOUBLE) * 100
    data[1002] = (data[1002][0] + 100, data[1002][1])

    def fail(h: Tensor) -> Tensor:
        if float(h.detach().abs().max()) > 20:
            raise ValueError("too large")
        return h

    gnh = operator(Wrapped(fail), data, micro_batch=1, product="finite-difference")
    with pytest.raises(
        ModelError, match="the model failed on example 1002 of the data: ValueError: too large"
    ):
        gnh.matvec(gnh.zeros().randn_like(generator()))


def test_a_filter_that_is_no_list_is_refused() -> None:
    with pytest.raises(OptionError, match="params is 5; give a list of patterns"):
        operator(params=5)


def test_a_model_that_device_map_has_spread_is_refused():
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4, device="meta")).eval()
    model.hf_device_map = {"0": "cpu", "1": "disk"}
    with pytest.raises(ModelError, match=r"several devices \(cpu, meta\).*docs/many-gpus.md"):
        operator(model)
