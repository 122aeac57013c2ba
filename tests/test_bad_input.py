"""Bad input gets a typed error that names the value and a remedy; good models are left as they were."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules import module as torch_module
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from whence import (
    Classification,
    ConvexLoss,
    Damped,
    Estimate,
    FiniteSum,
    GaussNewton,
    LanguageModeling,
    Lissa,
    ParamVector,
    Plan,
    Regression,
    Spectrum,
    estimate_spectrum,
)
from whence.errors import (
    DataError,
    InputError,
    ModelError,
    OptionError,
    ParameterSelectionError,
    SolverError,
    VectorError,
    WhenceError,
)
from zoo import VOCABULARY, AttentionNet, images, mlp, sequences, vectors

DOUBLE = torch.float64
NOT_POSITIVE = [0.0, -1.0, math.nan, math.inf]
PRODUCTS = ["exact", "finite-difference"]
Product = Literal["auto", "exact", "finite-difference"]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def evaluated(model: nn.Module) -> nn.Module:
    return model.to(DOUBLE).eval()


def classifier() -> nn.Module:
    torch.manual_seed(0)
    return evaluated(mlp())


def operator(model: nn.Module | None = None, data: Any = None, **options: Any) -> GaussNewton:
    return GaussNewton(
        model if model is not None else classifier(),
        Classification(),
        vectors(DOUBLE) if data is None else data,
        **options,
    )


class Wrapped(nn.Module):
    """A linear layer, and a function of what it returns."""

    def __init__(self, function: Callable[[Tensor], Any], outputs: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(6, outputs)
        self.function = function
        evaluated(self)

    def forward(self, x: Tensor) -> Any:
        return self.function(self.linear(x))


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


# --- the data ------------------------------------------------------------------------------------------------


def with_a_bad_input(position: int, value: float, count: int = 20) -> list[tuple[Tensor, int]]:
    data = (vectors(DOUBLE) * (count // 20))[:count]
    x, y = data[position]
    x = x.clone()
    x[2] = value
    data[position] = (x, y)
    return data


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("position", [0, 13])
def test_nan_in_an_example_is_refused_naming_it(position: int, value: float) -> None:
    data = with_a_bad_input(position, value)
    with pytest.raises(DataError, match=rf"example {position} of the data holds NaN.*remove or repair"):
        operator(data=data)


def test_nan_in_a_tensor_dataset_is_refused_naming_the_example() -> None:
    xs, ys = zip(*with_a_bad_input(13, math.nan), strict=True)
    with pytest.raises(DataError, match="example 13 of the data holds NaN"):
        operator(data=TensorDataset(torch.stack(xs), torch.tensor(ys)))


def test_nan_in_a_target_is_refused_naming_the_example() -> None:
    data = [(x, torch.tensor([float(y)], dtype=DOUBLE)) for x, y in vectors(DOUBLE)]
    data[11][1][0] = math.nan
    with pytest.raises(DataError, match="example 11 of the data holds NaN"):
        GaussNewton(Wrapped(torch.tanh, outputs=1), Regression(), data)


@pytest.mark.parametrize("product", PRODUCTS)
def test_nan_in_an_example_beyond_the_first_look_stops_the_product(product: Product) -> None:
    position, count = 1002, 2000
    gnh = operator(data=with_a_bad_input(position, math.nan, count), product=product)
    with pytest.raises(DataError, match=f"example {position} of the data holds NaN"):
        gnh.matvec(gnh.zeros())


@pytest.mark.parametrize("label", [4, 999, -1])
@pytest.mark.parametrize("position", [0, 13, 19])
def test_a_label_out_of_range_is_refused_naming_label_and_example(label: int, position: int) -> None:
    data = vectors(DOUBLE)
    data[position] = (data[position][0], label)
    with pytest.raises(
        DataError, match=rf"label {label} \(example {position} of the data\).*labels are 0\.\.3"
    ):
        operator(data=data)


def test_a_label_out_of_range_among_many_examples_is_refused_naming_it() -> None:
    data = vectors(DOUBLE) * 20
    data[317] = (data[317][0], 10)
    with pytest.raises(DataError, match=r"label 10 \(example 317 of the data\)"):
        operator(data=data)


def test_a_token_label_out_of_range_is_refused_naming_label_and_example() -> None:
    torch.manual_seed(0)
    data = sequences(DOUBLE)
    data[1]["labels"][2] = VOCABULARY + 3
    with pytest.raises(DataError, match=r"label 20 \(example 1 of the data\).*17 outputs"):
        GaussNewton(evaluated(AttentionNet()), LanguageModeling(), data)


@pytest.mark.parametrize("position", [0, 2])
def test_a_token_outside_the_vocabulary_is_refused_naming_it(position: int) -> None:
    torch.manual_seed(0)
    data = [torch.tensor([1, 2, 3, 4]), torch.tensor([1, 2, 3, 4]), torch.tensor([1, 2, 3])]
    data[position][1] = 99
    with pytest.raises(DataError, match="99"):
        GaussNewton(evaluated(AttentionNet()), LanguageModeling(), data)


@pytest.mark.parametrize("product", PRODUCTS)
def test_an_ignored_label_beyond_the_first_look_stops_the_product(product: Product) -> None:
    data = vectors(DOUBLE) * 100
    data[1002] = (data[1002][0], -100)
    gnh = operator(data=data, product=product)
    with pytest.raises(DataError, match="example 1002 of the data has the label -100"):
        gnh.matvec(gnh.zeros())


def test_a_query_label_out_of_range_is_refused() -> None:
    queries = vectors(DOUBLE)[:3]
    queries[2] = (queries[2][0], 7)
    with pytest.raises(DataError, match=r"label 7 \(example 2 .*labels are 0\.\.3"):
        operator().gradients(queries)


@pytest.mark.parametrize("label", [1.0, torch.tensor(2.0), True], ids=["float", "float tensor", "bool"])
def test_labels_that_are_no_integers_are_refused_for_classification(label: Any) -> None:
    data = [(x, label) for x, _ in vectors(DOUBLE)]
    kind = "torch.bool" if label is True else "torch.float32"
    with pytest.raises(DataError, match=f"integer class labels, got {kind}; use Regression"):
        operator(data=data)


def test_integer_targets_are_refused_for_regression() -> None:
    with pytest.raises(DataError, match=r"real numbers, got torch\.int64; convert them with \.float\(\)"):
        GaussNewton(Wrapped(torch.tanh, outputs=1), Regression(), vectors(DOUBLE))


@pytest.mark.parametrize("data", [[], TensorDataset(torch.zeros(0, 6), torch.zeros(0).long())])
def test_an_empty_data_set_is_refused(data: Any) -> None:
    with pytest.raises(DataError, match="data set is empty"):
        operator(data=data)


class Stream(IterableDataset[tuple[Tensor, int]]):
    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        return iter(vectors(DOUBLE))


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (Stream(), "Stream"),
        ((example for example in vectors(DOUBLE)), "generator"),
        (DataLoader(vectors(DOUBLE), batch_size=4), "DataLoader"),  # type: ignore[arg-type]
        ({0, 1, 2}, "set"),
    ],
    ids=["iterable data set", "generator", "loader", "set"],
)
def test_data_without_random_access_are_refused(data: Any, kind: str) -> None:
    with pytest.raises(DataError, match=rf"the data are a {kind}.*__len__ and __getitem__ \(a list"):
        operator(data=data)


def test_a_dict_of_columns_is_refused() -> None:
    xs, ys = zip(*vectors(DOUBLE), strict=True)
    with pytest.raises(DataError, match="dict"):
        operator(data={"x": torch.stack(xs), "labels": torch.tensor(ys)})


def test_a_query_in_which_nothing_is_predicted_is_refused_naming_it() -> None:
    torch.manual_seed(0)
    gnh = GaussNewton(evaluated(AttentionNet()), LanguageModeling(), sequences(DOUBLE))
    with pytest.raises(DataError, match=r"1\b.*(predict|term|ignored|token)"):
        gnh.gradients([torch.tensor([1, 2, 3]), torch.tensor([4])])


@pytest.mark.parametrize("field", ["attention_mask", "labels"])
def test_token_fields_of_different_lengths_in_one_example_are_refused(field: str) -> None:
    torch.manual_seed(0)
    example = {"input_ids": torch.tensor([1, 2, 3]), field: torch.tensor([1, 1])}
    with pytest.raises(DataError, match=f"'{field}'"):
        GaussNewton(evaluated(AttentionNet()), LanguageModeling(), [example, example])


def test_images_of_different_sizes_are_refused_naming_the_sizes() -> None:
    data = images(DOUBLE)
    data[4] = (data[4][0][:, :10, :10], data[4][1])
    model = evaluated(
        nn.Sequential(nn.Conv2d(3, 2, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, 4))
    )
    with pytest.raises(DataError, match=r"\(3, 10, 10\), \(3, 12, 12\).*Resize or pad"):
        operator(model, data)


def test_token_fields_that_cannot_be_padded_are_refused() -> None:
    data = [{"input_ids": torch.ones(n, dtype=torch.long), "weights": torch.ones(n)} for n in (3, 4)]
    with pytest.raises(DataError, match=r"'weights' has different shapes.*\(3,\), \(4,\)"):
        LanguageModeling().collate(data)


@pytest.mark.parametrize(
    ("example", "kind"),
    [
        ((torch.tensor([1, 2, 3]), torch.tensor([2, 3, 4])), "tuple"),
        ([torch.tensor([1, 2, 3]), torch.tensor([2, 3, 4])], "list"),
        ("some text", "str"),
        (torch.tensor([0.5, 1.5]), "Tensor"),
        (torch.tensor([[1, 2], [3, 4]]), "Tensor"),
    ],
    ids=["pair", "pair as a list", "text", "real numbers", "a whole batch"],
)
def test_language_modelling_refuses_other_examples(example: Any, kind: str) -> None:
    torch.manual_seed(0)
    model = evaluated(AttentionNet())
    with pytest.raises(DataError, match=f"dict with 'input_ids' or a sequence of token ids.*{kind}"):
        GaussNewton(model, LanguageModeling(), [example] * 3)


def test_language_modelling_refuses_stacked_pairs() -> None:
    with pytest.raises(DataError, match=r"not \(x, y\): whether y is shifted already cannot be told"):
        LanguageModeling().assemble([torch.ones(2, 3).long(), torch.ones(2, 3).long()])


def test_language_modelling_names_the_fields_of_an_example_without_tokens() -> None:
    with pytest.raises(DataError, match=r"fields \['labels', 'text'\] but no 'input_ids'"):
        LanguageModeling().collate([{"text": "hello", "labels": [1]}])


def test_text_columns_beside_the_tokens_are_refused_by_name() -> None:
    with pytest.raises(DataError, match="'text' cannot become a tensor"):
        LanguageModeling().collate([{"text": "hello", "input_ids": [1, 2]}])


def test_data_in_which_nothing_is_predicted_are_refused() -> None:
    torch.manual_seed(0)
    data = [{"input_ids": torch.tensor([1, 2, 3]), "labels": torch.full((3,), -100)}]
    with pytest.raises(DataError, match=r"no example holds a term.*-100"):
        GaussNewton(evaluated(AttentionNet()), LanguageModeling(), data)


@pytest.mark.parametrize(
    ("prompt", "completion", "counts"),
    [([1, 2], [], "2 and 0"), ([], [1, 2, 3], "0 and 3"), ([], [], "0 and 0")],
    ids=["no completion", "no prompt", "neither"],
)
def test_a_query_without_tokens_is_refused(prompt: list[int], completion: list[int], counts: str) -> None:
    with pytest.raises(DataError, match=f"one prompt token and one completion token, got {counts}; start"):
        LanguageModeling().query(prompt, completion)


@pytest.mark.parametrize(
    ("prompt", "completion"),
    [
        (torch.tensor([[1, 2, 3]]), torch.tensor([[4, 5]])),
        (torch.tensor([[1, 2]]), torch.tensor([[4, 5]])),
        ("prompt", "completion"),
        (torch.tensor([0.5]), torch.tensor([1.5])),
    ],
    ids=["batches of one", "batches of one, equally long", "text", "real numbers"],
)
def test_a_query_of_anything_but_token_sequences_is_refused(prompt: Any, completion: Any) -> None:
    with pytest.raises(DataError, match="token"):
        LanguageModeling().query(prompt, completion)


# --- options -------------------------------------------------------------------------------------------------

SPECTRUM = Spectrum(trace=Estimate(4.0), frobenius=Estimate(2.0), lambda_max=Estimate(1.5))
PLAN = Plan.from_spectrum(SPECTRUM, damping=0.5)


@pytest.mark.parametrize("product", ["fd", "", None, "Exact"])
def test_an_unknown_product_is_refused_naming_the_known_ones(product: Any) -> None:
    with pytest.raises(OptionError) as caught:
        operator(product=product)
    assert f"product is {product!r}" in str(caught.value)
    assert "'auto', 'exact' or 'finite-difference'" in str(caught.value)


@pytest.mark.parametrize("micro_batch", [0, -3])
def test_a_micro_batch_without_examples_is_refused(micro_batch: int) -> None:
    with pytest.raises(OptionError, match=f"micro_batch is {micro_batch}; it must be at least 1"):
        operator(micro_batch=micro_batch)


@pytest.mark.parametrize("task", [Classification, "classification", F.cross_entropy])
def test_what_is_not_a_task_is_refused(task: Any) -> None:
    with pytest.raises(OptionError, match=r"must be a Task such as Classification\(\), got "):
        GaussNewton(classifier(), task, vectors(DOUBLE))


@pytest.mark.parametrize("damping", NOT_POSITIVE)
def test_damping_must_be_positive(damping: float) -> None:
    with pytest.raises(OptionError, match=f"damping must be a positive number, got {damping}.*λmax/200"):
        Damped(FiniteSum(torch.eye(2).repeat(3, 1, 1)), damping)


@pytest.mark.parametrize("damping", NOT_POSITIVE)
def test_a_plan_needs_positive_damping(damping: float) -> None:
    with pytest.raises(OptionError, match=f"damping must be a positive number, got {damping}.*λmax/200"):
        Plan.from_spectrum(SPECTRUM, damping=damping)
    with pytest.raises(OptionError, match=f"damping must be a positive number, got {damping}"):
        PLAN.replace(damping=damping)


@pytest.mark.parametrize("name", ["step_size", "constant"])
@pytest.mark.parametrize("value", NOT_POSITIVE)
def test_a_plan_needs_positive_numbers(name: str, value: float) -> None:
    with pytest.raises(OptionError, match=f"{name} must be a positive number, got {value}"):
        PLAN.replace(**{name: value})


@pytest.mark.parametrize("name", ["batch_size", "num_steps", "chains"])
@pytest.mark.parametrize("value", [0, -1, 1.5, math.nan, math.inf])
def test_a_plan_needs_whole_counts(name: str, value: float) -> None:
    with pytest.raises(OptionError, match=f"{name} must be a whole number of at least 1, got {value}"):
        PLAN.replace(**{name: value})


@pytest.mark.parametrize("batch_size", [0, -1, 21, 1000])
@pytest.mark.parametrize("draw", ["sample", "subset", "sample_factor"])
def test_a_batch_beyond_the_data_is_refused_naming_both(batch_size: int, draw: str) -> None:
    with pytest.raises(
        OptionError, match=rf"batch size {batch_size} is outside 1\.\.20.*Use a smaller batch"
    ):
        getattr(operator(), draw)(batch_size, generator())


@pytest.mark.parametrize("draw", ["sample", "subset"])
def test_a_batch_beyond_the_data_is_refused_through_the_damping(draw: str) -> None:
    damped = Damped(FiniteSum(torch.eye(2).repeat(3, 1, 1)), 0.5)
    with pytest.raises(OptionError, match=r"batch size 4 is outside 1\.\.3"):
        getattr(damped, draw)(4, generator())


# --- the solver ----------------------------------------------------------------------------------------------


class Untouchable(FiniteSum):
    """No product may be taken: the input has to be refused before."""

    def matvec(self, vector: ParamVector) -> ParamVector:
        raise AssertionError("work was started")

    def sample(self, batch_size: int, generator: torch.Generator) -> Any:
        raise AssertionError("work was started")


def untouchable(terms: int = 50) -> Untouchable:
    return Untouchable(torch.eye(2, dtype=DOUBLE).repeat(terms, 1, 1))


def right_hand_side(*values: float) -> ParamVector:
    return ParamVector({"x": torch.tensor(values, dtype=DOUBLE)})


def test_lissa_needs_a_damped_operator() -> None:
    with pytest.raises(OptionError, match=r"damped system; wrap the operator: Damped\(operator, 0\.5\)"):
        Lissa(PLAN).solve(untouchable(), right_hand_side(1, 2), generator=generator())  # type: ignore[arg-type]


def test_lissa_needs_the_damping_of_its_plan() -> None:
    with pytest.raises(OptionError, match=r"damping is 0\.6, the plan was made for 0\.5; make both"):
        Lissa(PLAN).solve(Damped(untouchable(), 0.6), right_hand_side(1, 2), generator=generator())


def test_lissa_refuses_a_batch_beyond_the_data() -> None:
    plan = PLAN.replace(batch_size=51)
    with pytest.raises(OptionError, match=r"batches of 51 terms, the data hold 50.*Use more data"):
        Lissa(plan).solve(Damped(untouchable(50), 0.5), right_hand_side(1, 2), generator=generator())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("columns", [None, 3])
def test_lissa_refuses_a_right_hand_side_with_nan(value: float, columns: int | None) -> None:
    rhs = right_hand_side(1, 2) if columns is None else right_hand_side(1, 2).zeros(columns)
    rhs["x"].view(-1)[-1] = value
    with pytest.raises(VectorError, match=r"right-hand side holds NaN or infinity.*[Cc]heck the query"):
        Lissa(PLAN).solve(Damped(untouchable(), 0.5), rhs, generator=generator())


def test_lissa_refuses_the_right_hand_side_of_another_space() -> None:
    rhs = ParamVector({"y": torch.ones(2, dtype=DOUBLE)})
    with pytest.raises(VectorError, match=r"another model.*missing 'x', unexpected 'y'"):
        Lissa(PLAN).solve(Damped(untouchable(), 0.5), rhs, generator=generator())


@pytest.mark.parametrize("rhs", [{"x": torch.ones(2)}, torch.ones(2), None], ids=["dict", "tensor", "None"])
def test_lissa_refuses_a_right_hand_side_that_is_no_vector(rhs: Any) -> None:
    with pytest.raises(VectorError, match=f"right-hand side.*{type(rhs).__name__}"):
        Lissa(PLAN).solve(Damped(untouchable(), 0.5), rhs, generator=generator())


def test_lissa_refuses_a_right_hand_side_of_another_shape() -> None:
    with pytest.raises(VectorError, match=r"right-hand side's 'x' has shape \(3,\), expected \(2,\)"):
        Lissa(PLAN).solve(Damped(untouchable(), 0.5), right_hand_side(1, 2, 3), generator=generator())


def small_plan() -> Plan:
    return PLAN.replace(batch_size=4, num_steps=2, chains=2)


def test_lissa_refuses_the_gradient_of_another_model() -> None:
    rhs = operator(Wrapped(torch.tanh)).gradients(vectors(DOUBLE)[:2])
    with pytest.raises(VectorError, match=r"another model.*missing '0\.weight'.*unexpected 'linear\.weight'"):
        Lissa(small_plan()).solve(Damped(operator(), 0.5), rhs, generator=generator())


@pytest.mark.parametrize("mine", [None, ["0.*"]], ids=["more parameters", "other parameters"])
def test_lissa_refuses_the_gradient_of_another_selection(mine: list[str] | None) -> None:
    model = classifier()
    rhs = operator(model, params=["4.*"]).gradients(vectors(DOUBLE)[:1])
    with pytest.raises(VectorError, match=r"missing '0\.weight'.*same `params` filter"):
        Lissa(small_plan()).solve(Damped(operator(model, params=mine), 0.5), rhs, generator=generator())


@pytest.mark.parametrize("use", ["matvec", "quadratic_form"])
def test_products_with_a_vector_of_another_selection_are_refused(use: str) -> None:
    model = classifier()
    gnh, other = operator(model, params=["4.*"]), operator(model)
    for A in (gnh, gnh.sample(4, generator())):
        with pytest.raises(VectorError, match=r"missing none, unexpected '0\.weight'"):
            getattr(A, use)(other.zeros())
    with pytest.raises(VectorError, match=r"missing '0\.weight'"):
        getattr(other, use)(gnh.zeros())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"average": "mean"}, "average is 'mean'; it must be 'tail' or 'last'"),
        ({"average": None}, "average is None; it must be 'tail' or 'last'"),
        ({"tail": 0.0}, r"tail is 0\.0; .*in \(0, 1\]"),
        ({"tail": 1.5}, r"tail is 1\.5; .*in \(0, 1\]"),
        ({"tail": math.nan}, r"tail is nan; .*in \(0, 1\]"),
        ({"residual_batches": 1}, "residual_batches is 1; .*at least 2"),
    ],
)
def test_lissa_refuses_options_that_cannot_work(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Lissa(PLAN, **options)


def test_every_refusal_is_a_value_error_of_whence() -> None:
    for kind in (OptionError, ModelError, ParameterSelectionError, DataError, VectorError):
        assert issubclass(kind, InputError)
    assert issubclass(InputError, WhenceError)
    assert issubclass(InputError, ValueError)


# --- the model is left as it was -----------------------------------------------------------------------------

_HOOKS = [
    "_forward_hooks",
    "_forward_hooks_always_called",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
]
_GLOBAL_HOOKS = [
    "_global_forward_hooks",
    "_global_forward_hooks_always_called",
    "_global_forward_hooks_with_kwargs",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
]


def _bits(tensor: Tensor | None) -> bytes | None:
    return None if tensor is None else tensor.detach().numpy().tobytes()


def state(model: nn.Module) -> dict[str, Any]:
    """Everything of a model, and of torch, that whence might change."""
    return {
        "parameters": {
            name: (id(p), p.data_ptr(), _bits(p), p.requires_grad, id(p.grad), _bits(p.grad))
            for name, p in model.named_parameters()
        },
        "parameter hooks": {
            name: (list(p._backward_hooks or ()), list(p._post_accumulate_grad_hooks or ()))
            for name, p in model.named_parameters()
        },
        "buffers": {name: (id(b), b.data_ptr(), _bits(b)) for name, b in model.named_buffers()},
        "training": {name: module.training for name, module in model.named_modules()},
        "hooks": {
            name: [list(getattr(module, hooks) or ()) for hooks in _HOOKS]
            for name, module in model.named_modules()
        },
        "attributes": {name: sorted(vars(module)) for name, module in model.named_modules()},
        "global hooks": [list(getattr(torch_module, hooks)) for hooks in _GLOBAL_HOOKS],
        "fast attention": torch.backends.mha.get_fastpath_enabled(),
        "fused attention": torch.backends.cuda.flash_sdp_enabled(),
        "random state": _bits(torch.get_rng_state()),
        "gradients enabled": torch.is_grad_enabled(),
    }


class Fuse:
    """Blows in the n-th call from when it is lit."""

    def __init__(self) -> None:
        self.calls: int | None = None
        self.error: BaseException = RuntimeError("the model's own error")

    def burn(self) -> None:
        if self.calls is not None:
            self.calls -= 1
            if self.calls == 0:
                raise self.error


class Fused(nn.Module):
    """Uses its own weight around a submodule, with the fuse where both are in use."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 8))
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 4)
        self.fuse = Fuse()

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.first(x)) * self.scale
        self.fuse.burn()
        return self.last(self.norm(h))


def used_model() -> Fused:
    """A model with a history: some gradients, a frozen layer, a hook, a harmless layer in training mode."""
    torch.manual_seed(0)
    model = Fused()
    evaluated(model)
    model.first.train()
    model.scale.grad = torch.full_like(model.scale, 7.0)
    model.last.weight.grad = torch.zeros_like(model.last.weight)
    model.norm.bias.requires_grad_(False)
    model.last.register_forward_hook(lambda module, inputs, output: None)
    model.norm.running_mean.normal_()  # type: ignore[union-attr]
    return model


USES: dict[str, Callable[[GaussNewton], object]] = {
    "construction": lambda H: None,
    "matvec": lambda H: H.matvec(H.zeros().randn_like(generator())),
    "block": lambda H: H.matvec(H.zeros(3).randn_like(generator())),
    "quadratic_form": lambda H: H.quadratic_form(H.zeros(2).randn_like(generator())),
    "sample": lambda H: [
        H.sample(4, random).matvec(H.zeros().randn_like(random)) for random in [generator()] for _ in range(5)
    ],
    "sample_factor": lambda H: H.sample_factor(8, generator()),
    "gradients": lambda H: H.gradients(vectors(DOUBLE)[:3]),
}


@pytest.mark.parametrize("micro_batch", [None, 3])
@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("use", USES)
def test_the_model_is_left_untouched(use: str, product: Product, micro_batch: int | None) -> None:
    model = used_model()
    before = state(model)
    USES[use](operator(model, product=product, micro_batch=micro_batch))
    assert state(model) == before


def test_adding_products_in_place_leaves_the_model_untouched() -> None:
    model = used_model()
    gnh = operator(model)
    before = state(model)
    v = gnh.zeros().randn_like(generator())
    Damped(gnh, 0.1).sample(4, generator()).add_matvec_(v, v, -0.5)
    assert state(model) == before


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("use", ["matvec", "block", "quadratic_form", "sample"])
@pytest.mark.parametrize("error", [RuntimeError("the model's own error"), KeyboardInterrupt()], ids=type)
@pytest.mark.parametrize("call", [1, 2, 3, 4])
def test_an_error_inside_the_model_leaves_it_untouched(
    call: int, error: BaseException, use: str, product: Product
) -> None:
    model = used_model()
    gnh = operator(model, product=product, micro_batch=5)
    if product == "exact":
        USES[use](gnh)  # the first block product tries whether columns can be vectorised, whatever the error
    before = state(model)
    model.fuse.calls, model.fuse.error = call, error
    with pytest.raises(type(error)) as caught:
        USES[use](gnh)
    assert caught.value is error
    assert state(model) == before


@pytest.mark.parametrize("call", [1, 2, 3, 4])
def test_products_after_an_error_inside_the_model_are_right(call: int) -> None:
    model = used_model()
    gnh = operator(model, product="finite-difference")
    v = gnh.zeros().randn_like(generator())
    model.fuse.calls = call
    with pytest.raises(RuntimeError, match="the model's own error"):
        gnh.matvec(v)
    model.fuse.calls = None
    expected = operator(used_model(), product="exact").matvec(v)
    for name, tensor in gnh.matvec(v).items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-7, atol=1e-9)
