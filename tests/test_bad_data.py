"""Data that cannot be used get a typed error that names the example and a remedy."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from small import DOUBLE, PRODUCTS, Product, Wrapped, evaluated, operator
from whence import (
    GaussNewton,
    LanguageModeling,
    Regression,
)
from whence.attribution.exhibits import describer
from whence.attribution.job import query_terms, scored_positions
from whence.errors import DataError, OptionError
from zoo import VOCABULARY, AttentionNet, images, sequences, vectors

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


# --- data that are not what they seem --------------------------------------------------------------------------


class Augmented:
    """As a data set with a random transform, which half of the time does nothing."""

    def __init__(self) -> None:
        self.examples, self.random = vectors(DOUBLE), torch.Generator().manual_seed(0)

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        x, y = self.examples[index]
        return (x.flip(0) if torch.rand((), generator=self.random) < 0.5 else x), y


def test_data_that_change_at_every_access_are_refused_naming_the_cause() -> None:
    with pytest.raises(
        DataError, match=r"is another one at every access, as random augmentation.*Switch that off"
    ):
        operator(data=Augmented())


def test_queries_that_change_at_every_access_are_refused() -> None:
    with pytest.raises(DataError, match=r"the queries cannot be used: .* is another one at every access"):
        query_terms(Augmented(), operator())


class Lost:
    """Examples of which one cannot be read."""

    def __init__(self, at: int, count: int) -> None:
        self.examples, self.at = vectors(DOUBLE) * (count // 20), at

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if index == self.at:
            raise KeyError("lost.png")
        return self.examples[index]


def test_an_example_that_cannot_be_read_is_named() -> None:
    with pytest.raises(
        DataError, match=r"example 13 of the data cannot be read: KeyError: 'lost\.png'.*__getitem__"
    ):
        operator(data=Lost(13, 20))


def test_an_example_that_cannot_be_read_beyond_the_first_look_is_named() -> None:
    gnh = operator(data=Lost(1002, 2000))
    with pytest.raises(DataError, match="example 1002 of the data cannot be read"):
        gnh.matvec(gnh.zeros())


def test_a_stream_that_has_a_length_is_refused() -> None:
    class Long(Stream):
        def __len__(self) -> int:
            return 20

    with pytest.raises(DataError, match="the data are a Long; whence needs random access"):
        operator(data=Long())


def test_a_length_beyond_all_data_is_refused() -> None:
    class Endless(Lost):
        def __len__(self) -> int:
            return 2**62

    with pytest.raises(DataError, match="hold 4611686018427387904 examples; more than"):
        operator(data=Endless(0, 20))


def test_a_length_that_fails_is_refused() -> None:
    class Broken(Lost):
        def __len__(self) -> int:
            raise OSError("no index file")

    with pytest.raises(DataError, match="number of examples cannot be told: OSError: no index file"):
        operator(data=Broken(0, 20))


def test_one_real_label_among_whole_ones_is_refused() -> None:
    data: list[Any] = vectors(DOUBLE)
    data[7] = (data[7][0], 1.0)
    with pytest.raises(DataError, match=r"'target' mixes torch\.int64 and torch\.float32.*one dtype"):
        operator(data=data)


@pytest.mark.parametrize("micro_batch", [1, 8])
def test_one_input_of_another_precision_is_refused(micro_batch: int) -> None:
    data = vectors(DOUBLE) * 100
    data[1002] = (data[1002][0].float(), data[1002][1])  # beyond the first look
    gnh = operator(data=data, micro_batch=micro_batch)
    with pytest.raises(DataError, match=r"'input'.*float"):
        gnh.matvec(gnh.zeros())


def test_a_query_of_another_precision_is_refused() -> None:
    queries = [(x.float(), y) for x, y in vectors(DOUBLE)[:1]]
    with pytest.raises(DataError, match="'input' of example 0 of the data is float32, and float64 elsewhere"):
        query_terms(queries, operator())


@pytest.mark.parametrize(
    ("candidates", "message"),
    [
        (torch.ones(20, dtype=torch.bool), r"torch\.bool.*nonzero"),
        ([0.5, 1.2], "whole numbers"),
        (["a"], "whole numbers"),
    ],
    ids=["mask", "real numbers", "texts"],
)
def test_candidates_that_are_no_positions_are_refused(candidates: Any, message: str) -> None:
    with pytest.raises(OptionError, match=f"candidates .*{message}"):
        scored_positions(candidates, 20)


def test_what_to_show_of_an_example_is_an_exhibit_or_an_error_that_names_it() -> None:
    def fail(example: Any, index: int) -> Any:
        raise KeyError("picture")

    with pytest.raises(DataError, match="what to show of example 3 cannot be told: KeyError: 'picture'"):
        describer(vectors(DOUBLE), fail, None, None)(3)
    with pytest.raises(DataError, match=r"what to show of example 3 is a str; return a whence.Exhibit"):
        describer(vectors(DOUBLE), lambda example, index: "text", None, None)(3)  # type: ignore[arg-type,return-value]
