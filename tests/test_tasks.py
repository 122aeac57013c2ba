"""Tasks against `torch.nn.functional`, autograd's Hessians, and hand-computed log-probabilities."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from whence import Classification, ConvexLoss, GaussNewton, LanguageModeling, Regression
from whence.errors import DataError, ModelError, OptionError
from whence.tasks import Batch, Task
from zoo import CASES, VOCABULARY, sequences, vectors

EXACT = {"rtol": 1e-12, "atol": 1e-13}
MODELS = {case.name: case for case in CASES}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def with_targets(targets: Tensor) -> Batch:
    return Batch((), {}, targets)


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="none")


LABELS = torch.tensor([2, 0, 4, -100, 1])
TOKENS = torch.tensor([[3, 1, 0, -100], [2, -100, 4, -100], [0, 0, 1, 2]])
PROBLEMS = [
    pytest.param(Classification(), normal(5, 5, seed=1) * 2, LABELS, id="classification"),
    pytest.param(LanguageModeling(), normal(3, 4, 5, seed=2) * 2, TOKENS, id="language modelling"),
    pytest.param(Regression(variance=0.3), normal(5, 3, seed=3), normal(5, 3, seed=4), id="regression"),
    pytest.param(Regression(), normal(5, 1, seed=3), normal(5, seed=4), id="regression, flat targets"),
    pytest.param(ConvexLoss(cross_entropy), normal(5, 4, seed=5), LABELS % 4, id="convex cross-entropy"),
    pytest.param(
        ConvexLoss(lambda h, y: (h - y).cosh().log().sum((1, 2))),
        normal(5, 2, 2, seed=5),
        normal(5, 2, 2, seed=6),
        id="convex log-cosh",
    ),
]


# --- losses ----------------------------------------------------------------------------------------------


def test_classification_losses_are_cross_entropy_with_ignored_labels() -> None:
    outputs = normal(5, 5)
    expected = F.cross_entropy(outputs, LABELS, ignore_index=-100, reduction="none")
    losses = Classification().losses(outputs, with_targets(LABELS))
    torch.testing.assert_close(losses, expected, **EXACT)
    assert float(losses[3]) == 0.0


def test_language_modelling_losses_are_next_token_cross_entropy() -> None:
    task = LanguageModeling()
    labels = torch.tensor([[5, 1, 2, 3], [4, 4, -100, 0]])
    batch = task.collate([{"input_ids": torch.tensor([5, 1, 2, 3]), "labels": row} for row in labels])
    outputs = normal(2, 4, 6)
    losses = task.losses(outputs, batch)
    assert losses.shape == (2, 4)
    expected = F.cross_entropy(outputs[:, :-1].mT, labels[:, 1:], ignore_index=-100, reduction="none")
    torch.testing.assert_close(losses[:, :-1], expected, **EXACT)
    assert losses[:, -1].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("variance", [1.0, 0.3])
def test_regression_losses_are_half_the_scaled_squared_error(variance: float) -> None:
    outputs, targets = normal(5, 3, seed=1), normal(5, 3, seed=2)
    losses = Regression(variance=variance).losses(outputs, with_targets(targets))
    torch.testing.assert_close(
        losses, F.mse_loss(outputs, targets, reduction="none").sum(1) / (2 * variance), **EXACT
    )


def test_regression_losses_are_gaussian_log_likelihoods_up_to_a_constant() -> None:
    outputs, targets, variance = normal(5, 3, seed=1), normal(5, 3, seed=2), 0.3
    losses = Regression(variance=variance).losses(outputs, with_targets(targets))
    likelihood = torch.distributions.Normal(outputs, math.sqrt(variance)).log_prob(targets).sum(1)
    constant = 1.5 * math.log(2 * math.pi * variance)
    torch.testing.assert_close(losses + constant, -likelihood, **EXACT)


def test_regression_does_not_broadcast_flat_targets() -> None:
    outputs, targets = normal(5, 1, seed=1), normal(5, seed=2)
    losses = Regression().losses(outputs, with_targets(targets))
    assert losses.shape == (5,)
    torch.testing.assert_close(losses, (outputs[:, 0] - targets).square() / 2, **EXACT)


def test_convex_losses_are_the_function_itself() -> None:
    outputs, targets = normal(5, 4), LABELS % 4
    losses = ConvexLoss(cross_entropy).losses(outputs, with_targets(targets))
    assert torch.equal(losses, cross_entropy(outputs, targets))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_losses_of_half_precision_logits_are_computed_in_float32(dtype: torch.dtype) -> None:
    outputs = (normal(5, 5) * 8).to(dtype)
    losses = Classification().losses(outputs, with_targets(LABELS))
    assert losses.dtype == torch.float32
    expected = F.cross_entropy(outputs.double(), LABELS, reduction="none").float()
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32])
def test_labels_of_any_integer_type_are_read(dtype: torch.dtype) -> None:
    outputs = normal(5, 5)
    task = Classification()
    batch = task.collate([(torch.zeros(1), label) for label in LABELS.to(dtype)])
    torch.testing.assert_close(
        task.losses(outputs, batch), task.losses(outputs, with_targets(LABELS)), **EXACT
    )


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
@pytest.mark.parametrize("with_labels", [False, True], ids=["tokens", "labels"])
def test_tokens_of_any_integer_type_are_read(dtype: torch.dtype, with_labels: bool) -> None:
    task, tokens = LanguageModeling(), torch.tensor([4, 1, 2, 3])
    fields = {"input_ids": tokens, "labels": tokens.to(dtype)} if with_labels else tokens.to(dtype)
    batch = task.collate([fields])
    assert batch.targets.tolist() == [[1, 2, 3, -100]]
    assert batch.kwargs["input_ids"].dtype == torch.int64
    outputs = normal(1, 4, 6)
    expected = F.cross_entropy(outputs[0, :-1], tokens[1:], reduction="none")
    torch.testing.assert_close(task.losses(outputs, batch)[0, :-1], expected, **EXACT)


@pytest.mark.parametrize(("task", "outputs", "targets"), PROBLEMS)
def test_query_losses_average_each_examples_terms(task: Task, outputs: Tensor, targets: Tensor) -> None:
    batch = with_targets(targets)
    losses = task.losses(outputs, batch).reshape(len(outputs), -1)
    kept = [int((row != -100).sum()) if not targets.is_floating_point() else 1 for row in targets]
    expected = torch.stack([row.sum() / max(count, 1) for row, count in zip(losses, kept, strict=True)])
    torch.testing.assert_close(task.query_losses(outputs, batch), expected, **EXACT)


# --- the Hessian in the outputs --------------------------------------------------------------------------


def output_hessian(task: Task, outputs: Tensor, batch: Batch) -> Tensor:
    """``[N, N]`` for N output numbers, by autograd twice."""
    full = torch.autograd.functional.hessian(lambda h: task.losses(h, batch).sum(), outputs)
    return full.reshape(outputs.numel(), outputs.numel())


@pytest.mark.parametrize(("task", "outputs", "targets"), PROBLEMS)
def test_hessian_product_is_the_hessian_of_the_loss_times_the_tangent(
    task: Task, outputs: Tensor, targets: Tensor
) -> None:
    batch, tangents = with_targets(targets), normal(*outputs.shape, seed=9)
    expected = (output_hessian(task, outputs, batch) @ tangents.reshape(-1)).reshape(outputs.shape)
    torch.testing.assert_close(task.hessian_product(outputs, tangents, batch), expected, **EXACT)


@pytest.mark.parametrize(("task", "outputs", "targets"), PROBLEMS)
def test_hessian_product_of_a_block_is_that_of_each_tangent(
    task: Task, outputs: Tensor, targets: Tensor
) -> None:
    batch, tangents = with_targets(targets), normal(3, *outputs.shape, seed=9)
    expected = torch.stack([task.hessian_product(outputs, tangent, batch) for tangent in tangents])
    torch.testing.assert_close(task.hessian_product(outputs, tangents, batch), expected, **EXACT)


@pytest.mark.parametrize(("task", "outputs", "targets"), PROBLEMS)
def test_hessian_product_leaves_its_arguments_alone(task: Task, outputs: Tensor, targets: Tensor) -> None:
    batch, tangents = with_targets(targets), normal(*outputs.shape, seed=9)
    point = outputs.clone()
    task.hessian_product(point, tangents, batch).zero_()
    assert torch.equal(point, outputs)
    assert torch.equal(tangents, normal(*outputs.shape, seed=9))


def test_hessian_product_of_confident_logits_stays_finite_and_positive() -> None:
    outputs = torch.tensor([[200.0, -200.0, 0.0], [1e4, 1e4, -1e4]])
    tangents = torch.tensor([[1.0, -1.0, 2.0], [1.0, -1.0, 0.0]])
    product = Classification().hessian_product(outputs, tangents, with_targets(torch.tensor([1, 2])))
    torch.testing.assert_close(product, torch.tensor([[0.0, 0.0, 0.0], [0.5, -0.5, 0.0]]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_hessian_product_of_half_precision_logits_is_taken_in_float32(dtype: torch.dtype) -> None:
    outputs, tangents = normal(5, 5).to(dtype), normal(5, 5, seed=1).float()
    product = Classification().hessian_product(outputs, tangents, with_targets(LABELS))
    assert product.dtype == torch.float32
    expected = Classification().hessian_product(outputs.double(), tangents.double(), with_targets(LABELS))
    torch.testing.assert_close(product.double(), expected, rtol=1e-5, atol=1e-7)


def test_a_linear_loss_has_no_curvature() -> None:
    task = ConvexLoss(lambda h, y: (h * y).sum(1))
    outputs, targets = normal(5, 3), normal(5, 3, seed=1)
    product = task.hessian_product(outputs, normal(5, 3, seed=2), with_targets(targets))
    assert torch.equal(product, torch.zeros(5, 3, dtype=torch.float64))


# --- positions without a term ----------------------------------------------------------------------------

CATEGORICAL = [
    pytest.param(Classification(), normal(5, 5, seed=1), LABELS, id="classification"),
    pytest.param(LanguageModeling(), normal(3, 4, 5, seed=2), TOKENS, id="language modelling"),
]


@pytest.mark.parametrize(("task", "outputs", "targets"), CATEGORICAL)
def test_ignored_terms_contribute_exactly_zero(task: Task, outputs: Tensor, targets: Tensor) -> None:
    batch, ignored = with_targets(targets), targets == -100
    generator = torch.Generator().manual_seed(0)
    residual = task.sample_residual(outputs, batch, generator)
    product = task.hessian_product(outputs, normal(2, *outputs.shape), batch)
    assert residual is not None
    assert not task.losses(outputs, batch)[ignored].any()
    assert not product[:, ignored].any()
    assert not residual[ignored].any()
    assert product[:, ~ignored].abs().sum(-1).gt(0).all()
    assert residual[~ignored].abs().sum(-1).gt(0).all()


@pytest.mark.parametrize(("task", "outputs", "targets"), CATEGORICAL)
def test_ignored_terms_are_not_counted(task: Task, outputs: Tensor, targets: Tensor) -> None:
    expected = (targets != -100).reshape(len(targets), -1).sum(1)
    assert task.num_terms(with_targets(targets)).tolist() == expected.tolist()


def test_what_the_model_says_at_ignored_positions_does_not_matter() -> None:
    task, batch = LanguageModeling(), with_targets(TOKENS)
    outputs = normal(3, 4, 5)
    garbage = outputs.clone()
    garbage[TOKENS == -100] = 1e4 * normal(3, 5, seed=8)
    tangents = normal(3, 4, 5, seed=9)
    for function in (task.losses, task.query_losses):
        assert torch.equal(function(garbage, batch), function(outputs, batch))
    assert torch.equal(
        task.hessian_product(garbage, tangents, batch), task.hessian_product(outputs, tangents, batch)
    )


def test_an_ignored_label_is_refused_naming_the_example() -> None:
    data = vectors(torch.float64)
    data[8] = (data[8][0], -100)
    with pytest.raises(DataError, match=r"example 8 of the data has the label -100.*leave it out"):
        GaussNewton(MODELS["mlp"].model(torch.float64), Classification(), data)


# --- language modelling: labels, masks, padding, queries ---------------------------------------------------


def test_labels_are_shifted_by_the_task() -> None:
    batch = LanguageModeling().collate([{"input_ids": torch.tensor([7, 8, 9]), "labels": [1, 2, 3]}])
    assert batch.targets.tolist() == [[2, 3, -100]]
    assert batch.kwargs["input_ids"].tolist() == [[7, 8, 9]]
    assert "labels" not in batch.kwargs


@pytest.mark.parametrize("example", [torch.tensor([7, 8, 9]), [7, 8, 9], {"input_ids": [7, 8, 9]}])
def test_without_labels_every_token_but_the_first_is_predicted(example: Any) -> None:
    task = LanguageModeling()
    batch = task.collate([example])
    assert batch.kwargs["input_ids"].tolist() == [[7, 8, 9]]
    assert batch.targets.tolist() == [[8, 9, -100]]
    assert task.count_terms(example) == 2


def test_tokens_under_an_attention_mask_of_zero_are_not_predicted() -> None:
    task = LanguageModeling()
    example = {"input_ids": torch.tensor([7, 8, 9, 0]), "attention_mask": torch.tensor([1, 1, 1, 0])}
    batch = task.collate([example])
    assert batch.targets.tolist() == [[8, 9, -100, -100]]
    assert batch.kwargs["attention_mask"].tolist() == [[1, 1, 1, 0]]
    assert task.count_terms(example) == 2


def test_padding_on_the_left_adds_no_term() -> None:
    task = LanguageModeling()
    example = {"input_ids": torch.tensor([0, 0, 7, 8, 9]), "attention_mask": torch.tensor([0, 0, 1, 1, 1])}
    assert task.count_terms(example) == 2
    assert task.collate([example]).targets.tolist() == [[-100, -100, 8, 9, -100]]


@pytest.mark.parametrize(
    "example",
    [
        {"input_ids": [1, 2, 3, 4]},
        {"input_ids": [1, 2, 3, 4], "labels": [1, -100, 3, -100]},
        {"input_ids": [1, 2, 3, 4], "labels": [-100, 2, 3, 4]},
        {"input_ids": [1, 2, 3, 4], "labels": [1, -100, -100, -100]},
        {"input_ids": [1, 2, 3, 4], "attention_mask": [1, 1, 0, 0]},
        {"input_ids": [1, 2, 3, 4], "attention_mask": [1, 1, 1, 0], "labels": [1, -100, 3, 4]},
        {"input_ids": [1]},
    ],
)
def test_terms_counted_without_the_model_are_those_of_the_batch(example: dict[str, list[int]]) -> None:
    task = LanguageModeling()
    fields = {name: torch.tensor(value) for name, value in example.items()}
    longer = {name: torch.ones(6, dtype=torch.long) for name in fields}
    batch = task.collate([fields, longer])
    assert task.num_terms(batch).tolist() == [task.count_terms(fields), 5]
    counted = (task.losses(normal(2, 6, 9), batch) > 0).sum(1)
    assert counted.tolist() == [task.count_terms(fields), 5]


def test_ragged_sequences_are_padded_on_the_right() -> None:
    rows = [torch.tensor([5, 6, 7]), torch.tensor([8]), torch.tensor([9, 9])]
    batch = LanguageModeling().collate([{"input_ids": row, "labels": row} for row in rows])
    assert batch.kwargs["input_ids"].tolist() == [[5, 6, 7], [8, 0, 0], [9, 9, 0]]
    assert batch.kwargs["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0], [1, 1, 0]]
    assert batch.targets.tolist() == [[6, 7, -100], [-100, -100, -100], [9, -100, -100]]


def test_sequences_of_one_length_get_no_mask() -> None:
    assert set(LanguageModeling().collate([[1, 2], [3, 4]]).kwargs) == {"input_ids"}


def test_a_given_attention_mask_is_padded_with_zeros() -> None:
    rows = [{"input_ids": [5, 6, 7], "attention_mask": [1, 1, 1]}, {"input_ids": [8], "attention_mask": [1]}]
    batch = LanguageModeling().collate(rows)
    assert batch.kwargs["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch.targets.tolist() == [[6, 7, -100], [-100, -100, -100]]


@pytest.mark.parametrize(("name", "tolerance"), [("attention", 1e-12), ("gpt2", 1e-12), ("llama", 1e-6)])
def test_padded_batches_have_the_losses_of_their_sequences(name: str, tolerance: float) -> None:
    task, model = LanguageModeling(), MODELS[name].model(torch.float64)
    rows = sequences(torch.float64)
    with torch.no_grad():
        padded = task.collate(rows)
        together = task.losses(task.outputs(model, padded), padded)
        for row, losses in zip(rows, together, strict=True):
            alone = task.collate([row])
            expected = task.losses(task.outputs(model, alone), alone)[0]
            torch.testing.assert_close(losses[: len(expected)], expected, rtol=tolerance, atol=tolerance)
            assert not losses[len(expected) :].any()


@pytest.mark.parametrize(("name", "tolerance"), [("gpt2", 1e-11), ("llama", 1e-6)])
def test_query_loss_is_minus_the_mean_log_probability_of_the_completion(name: str, tolerance: float) -> None:
    task, model = LanguageModeling(), MODELS[name].model(torch.float64)
    prompt, completion = [3, 14, 1], [5, 9, 2, 6]
    batch = task.collate([task.query(prompt, completion), task.query([4], [4])])
    with torch.no_grad():
        loss = task.query_losses(task.outputs(model, batch), batch)[0]
        total, prefix = 0.0, list(prompt)
        for token in completion:
            logits = model(torch.tensor([prefix])).logits[0, -1]
            total += math.log(float(logits.exp()[token] / logits.exp().sum()))
            prefix.append(token)
    assert float(loss) == pytest.approx(-total / len(completion), rel=tolerance)


def test_query_gradients_are_those_of_the_query_loss() -> None:
    task, model = LanguageModeling(), MODELS["attention"].model(torch.float64)
    gnh = GaussNewton(model, task, sequences(torch.float64))
    queries = [task.query([3, 14], [5, 9, 2]), task.query([1], [2])]
    block = gnh.gradients(queries)
    for k, query in enumerate(queries):
        tokens, completion = query["input_ids"], int((query["labels"] != -100).sum())
        log_probabilities = model(tokens[None, :-1])[0].log_softmax(-1)
        chosen = log_probabilities.gather(1, tokens[1:, None])[-completion:]
        expected = torch.autograd.grad(-chosen.mean(), list(gnh.network.parameters.values()))
        for name, gradient in zip(gnh.network.parameters, expected, strict=True):
            torch.testing.assert_close(block[name][k], gradient, rtol=1e-10, atol=1e-12)


def test_query_accepts_lists_and_tensors() -> None:
    task = LanguageModeling()
    as_lists, as_tensors = task.query([5, 6], [7]), task.query(torch.tensor([5, 6]), torch.tensor([7]))
    for query in (as_lists, as_tensors):
        assert query["input_ids"].tolist() == [5, 6, 7]
        assert query["labels"].tolist() == [-100, -100, 7]


def test_attention_mask_reaches_a_model_that_takes_one_and_no_other() -> None:
    seen: list[Tensor | None] = []

    class WithMask(nn.Module):
        def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            seen.append(attention_mask)
            return torch.zeros(*input_ids.shape, VOCABULARY)

    class WithoutMask(nn.Module):
        def forward(self, tokens: Tensor) -> Tensor:
            return torch.zeros(*tokens.shape, VOCABULARY)

    task = LanguageModeling()
    batch = task.collate([[1, 2, 3], [4]])
    assert task.outputs(WithMask(), batch).shape == (2, 3, VOCABULARY)
    assert seen[0] is not None
    assert seen[0].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert task.outputs(WithoutMask(), batch).shape == (2, 3, VOCABULARY)


@pytest.mark.parametrize("form", ["tensor", "tuple", "dict", "object"])
def test_outputs_are_found_in_what_models_return(form: str) -> None:
    class Returning(nn.Module):
        def forward(self, x: Tensor) -> Any:
            if form == "object":
                return type("Output", (), {"logits": 2 * x})()
            return {"tensor": 2 * x, "tuple": (2 * x, "state"), "dict": {"logits": 2 * x, "loss": x}}[form]

    x = normal(2, 3)
    assert torch.equal(Classification().outputs(Returning(), Batch((x,), {}, torch.zeros(2).long())), 2 * x)


# --- sampled residuals -----------------------------------------------------------------------------------


def sampled_residuals(task: Task, outputs: Tensor, batch: Batch, draws: int) -> Tensor:
    """``[draws, N]`` for N output numbers."""
    generator = torch.Generator().manual_seed(5)
    drawn = [task.sample_residual(outputs, batch, generator) for _ in range(draws)]
    return torch.stack([r for r in drawn if r is not None]).reshape(draws, -1)


@pytest.mark.parametrize(
    ("task", "outputs", "targets"),
    [
        pytest.param(Classification(), normal(4, 3, seed=1), torch.tensor([2, 0, -100, 1]), id="classes"),
        pytest.param(LanguageModeling(), normal(2, 2, 3, seed=2), torch.tensor([[1, -100], [0, 2]]), id="lm"),
        pytest.param(Regression(variance=0.3), normal(3, 3, seed=3), normal(3, 3, seed=4), id="regression"),
    ],
)
def test_residuals_have_the_hessian_as_second_moment_and_are_independent_across_terms(
    task: Task, outputs: Tensor, targets: Tensor
) -> None:
    batch, draws = with_targets(targets), 4000
    residuals = sampled_residuals(task, outputs, batch, draws)
    products = residuals.unsqueeze(2) * residuals.unsqueeze(1)
    error = (products.mean(0) - output_hessian(task, outputs, batch)).abs()
    stderr = products.std(0) / math.sqrt(draws)
    assert (error <= 4 * stderr).all()
    assert float(stderr.max()) < 0.07 * float(products.mean(0).max())


def test_categorical_residuals_are_probabilities_minus_a_drawn_label() -> None:
    outputs = normal(2000, 4, seed=1)[:1].expand(2000, 4)
    batch = with_targets(torch.zeros(2000, dtype=torch.long))
    residual = Classification().sample_residual(outputs, batch, torch.Generator().manual_seed(0))
    one_hot = outputs.softmax(-1) - residual
    torch.testing.assert_close(one_hot, one_hot.round(), rtol=0, atol=1e-12)
    assert one_hot.round().sum(1).eq(1).all()
    p = outputs[0].softmax(-1)
    errors = (one_hot.mean(0) - p).abs() / (p * (1 - p) / 2000).sqrt()
    assert float(errors.max()) <= 4


def test_a_certain_model_draws_its_own_answer() -> None:
    outputs = torch.full((50, 3), -1e3)
    outputs[:, 1] = 1e3
    batch = with_targets(torch.zeros(50, dtype=torch.long))
    residual = Classification().sample_residual(outputs, batch, torch.Generator().manual_seed(0))
    assert not residual.any()


@pytest.mark.parametrize(("task", "outputs", "targets"), PROBLEMS[:3])
def test_residuals_are_reproducible_from_their_generator(
    task: Task, outputs: Tensor, targets: Tensor
) -> None:
    first, again, other = (
        task.sample_residual(outputs, with_targets(targets), torch.Generator().manual_seed(seed))
        for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_a_convex_loss_offers_no_residuals() -> None:
    task, batch = ConvexLoss(cross_entropy), with_targets(LABELS % 4)
    assert task.sample_residual(normal(5, 4), batch, torch.Generator()) is None
    gnh = GaussNewton(MODELS["mlp"].model(torch.float64), task, vectors(torch.float64))
    assert not gnh.has_factors
    with pytest.raises(OptionError, match="ConvexLoss cannot sample residuals"):
        gnh.sample_factor(2, torch.Generator())


# --- memory ----------------------------------------------------------------------------------------------


class LiveBytes(TorchDispatchMode):
    """Follows the storages of all results, and how many bytes of them are alive at once."""

    def __init__(self, *inputs: Tensor) -> None:
        super().__init__()
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0
        self._note(inputs)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self._note(tree_leaves(result))
        return result

    def _note(self, results: Any) -> None:
        for tensor in results:
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                reference = StorageWeakRef(storage)
                self._alive[reference.cdata] = (reference, storage.nbytes())
        self._alive = {key: entry for key, entry in self._alive.items() if not entry[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._alive.values()))


def test_live_bytes_counts_what_is_alive_at_once() -> None:
    x = torch.zeros(100)
    with LiveBytes(x) as memory:
        y = x + 1
        y.view(10, 10).mul_(2)
        for _ in range(5):
            z = y * 2
            del z
    assert memory.peak == 3 * 400


Work = Callable[[Task, Tensor, Tensor, Batch], object]


@pytest.mark.parametrize("task", [Classification(), LanguageModeling()], ids=lambda task: type(task).__name__)
@pytest.mark.parametrize(
    "work",
    [
        pytest.param(lambda task, h, t, batch: task.hessian_product(h, t, batch), id="hessian_product"),
        pytest.param(
            lambda task, h, t, batch: task.sample_residual(h, batch, torch.Generator()), id="sample_residual"
        ),
        pytest.param(lambda task, h, t, batch: task.losses(h, batch), id="losses"),
    ],
)
def test_fifty_thousand_classes_cost_a_few_tensors_of_the_logits_size(task: Task, work: Work) -> None:
    shape = (8,) if isinstance(task, Classification) else (2, 4)
    targets = torch.arange(8).reshape(shape)
    targets.view(-1)[3] = -100
    outputs, tangents = torch.randn(*shape, 50_000), torch.randn(*shape, 50_000)
    with LiveBytes(outputs, tangents) as memory:
        work(task, outputs, tangents, with_targets(targets))
    logits = outputs.numel() * outputs.element_size()
    assert 2 * logits < memory.peak <= 5.01 * logits


# --- convex losses ---------------------------------------------------------------------------------------


def test_convex_cross_entropy_equals_classification() -> None:
    outputs, batch = normal(5, 5) * 3, with_targets(LABELS % 5)
    convex, reference = ConvexLoss(cross_entropy), Classification()
    torch.testing.assert_close(convex.losses(outputs, batch), reference.losses(outputs, batch), **EXACT)
    tangents = normal(3, 5, 5, seed=1)
    torch.testing.assert_close(
        convex.hessian_product(outputs, tangents, batch),
        reference.hessian_product(outputs, tangents, batch),
        **EXACT,
    )


def test_the_operator_of_convex_cross_entropy_equals_that_of_classification() -> None:
    model, data = MODELS["mlp"].model(torch.float64), vectors(torch.float64)
    convex, reference = (GaussNewton(model, t, data) for t in (ConvexLoss(cross_entropy), Classification()))
    block = reference.zeros(2).randn_like(torch.Generator().manual_seed(0))
    for name, expected in reference.matvec(block).items():
        torch.testing.assert_close(convex.matvec(block)[name], expected, rtol=1e-10, atol=1e-13)
    torch.testing.assert_close(convex.quadratic_form(block), reference.quadratic_form(block), **EXACT)


@pytest.mark.parametrize(
    "loss",
    [
        pytest.param(lambda h, y: -(h - y).square().sum(1), id="negative square"),
        pytest.param(lambda h, y: -(h - y).cosh().log().sum(1), id="negative log-cosh"),
        pytest.param(lambda h, y: -torch.exp(-(h - y).square()).sum(1) + 1, id="far from a Gaussian well"),
    ],
)
def test_a_loss_that_is_not_convex_is_refused(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    data = [(x, torch.full((4,), 2.0, dtype=torch.float64)) for x, _ in vectors(torch.float64)]
    model = MODELS["mlp"].model(torch.float64)
    with pytest.raises(ModelError, match=r"not convex in the outputs.* is -\d.*needs a convex loss"):
        GaussNewton(model, ConvexLoss(loss), data)


def test_a_loss_that_is_averaged_over_the_batch_is_refused() -> None:
    task = ConvexLoss(lambda h, y: F.cross_entropy(h, y))
    with pytest.raises(ModelError, match=r"shape \(\) for 5 examples.*reduction='none'"):
        task.check(normal(5, 4), with_targets(LABELS % 4))


# --- collating ------------------------------------------------------------------------------------------


def test_pairs_are_stacked() -> None:
    batch = Classification().collate([(torch.zeros(2), 1), (torch.ones(2), 0)])
    assert batch.args[0].tolist() == [[0.0, 0.0], [1.0, 1.0]]
    assert batch.targets.tolist() == [1, 0]
    assert batch.size == 2


@pytest.mark.parametrize("field", ["labels", "label"])
def test_dicts_become_keyword_arguments_and_labels_targets(field: str) -> None:
    batch = Classification().collate(
        [{"pixels": torch.zeros(2), field: 1}, {"pixels": torch.ones(2), field: 0}]
    )
    assert batch.args == ()
    assert batch.kwargs["pixels"].tolist() == [[0.0, 0.0], [1.0, 1.0]]
    assert set(batch.kwargs) == {"pixels"}
    assert batch.targets.tolist() == [1, 0]


def test_a_dict_beside_a_label_becomes_keyword_arguments() -> None:
    batch = Classification().collate([({"input_ids": [1, 2, 3]}, 1), ({"input_ids": [4]}, 0)])
    assert batch.kwargs["input_ids"].tolist() == [[1, 2, 3], [4, 0, 0]]
    assert batch.kwargs["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch.targets.tolist() == [1, 0]


@pytest.mark.parametrize(
    ("examples", "message"),
    [
        ([], "no examples"),
        ([{"x": 1.0}], r"fields \['x'\] but no 'labels'; add the target under 'labels'"),
        ([{"x": 1.0, "labels": 0}, {"z": 1.0, "labels": 0}], r"example 1 .* fields \['labels', 'x'\]"),
        ([(1.0, 2, 3)], "got 3 items"),
        ([(1.0, 2), (1.0, 2, 3)], "3 items"),
        ([(1.0, 2), 7], "int"),
        ([5.0], "got a float"),
        ([("text", 1)], "'input' cannot become a tensor"),
    ],
    ids=["nothing", "no labels", "other fields", "triple", "mixed triple", "mixed number", "number", "text"],
)
def test_examples_that_cannot_be_collated_are_refused(examples: list[Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        Classification().collate(examples)


def test_moving_a_batch_changes_the_dtype_of_real_numbers_only() -> None:
    batch = Batch((torch.zeros(2, 1),), {"ids": torch.zeros(2).long()}, torch.zeros(2).long())
    moved = batch.to(torch.device("cpu"), torch.float64)
    assert moved.args[0].dtype == torch.float64
    assert moved.kwargs["ids"].dtype == torch.int64
    assert moved.targets.dtype == torch.int64


def test_non_finite_examples_are_found_in_inputs_and_targets() -> None:
    inputs, extra, targets = torch.zeros(5, 2), torch.zeros(5), torch.zeros(5, 1)
    inputs[1, 1], extra[4], targets[2, 0] = math.nan, math.inf, -math.inf
    assert Batch((inputs,), {"extra": extra}, targets).non_finite().tolist() == [1, 2, 4]
    assert Batch((torch.zeros(5, 2),), {}, torch.zeros(5, 1)).non_finite().tolist() == []


@pytest.mark.parametrize("variance", [0.0, -1.0, math.nan, math.inf])
def test_regression_needs_a_positive_variance(variance: float) -> None:
    with pytest.raises(OptionError, match=f"variance must be a positive number, got {variance}"):
        Regression(variance=variance)


@pytest.mark.parametrize("scale", [1.0, 100.0], ids=["likely labels", "a label of no chance"])
@pytest.mark.parametrize("columns", [None, 3])
def test_derivatives_are_read_off_the_hessian_product(columns: int | None, scale: float) -> None:
    """Also where the label's probability is too small to divide by, and zero where there is no term."""
    torch.manual_seed(0)
    task = LanguageModeling()
    batch = task.collate([{"input_ids": torch.tensor([1, 2, 3, 4])}, {"input_ids": torch.tensor([4, 0])}])
    outputs = scale * torch.randn(*batch.targets.shape, 5)
    tangents = torch.randn(*(() if columns is None else (columns,)), *outputs.shape)
    product = task.hessian_product(outputs, tangents, batch)
    found = task.derivatives_beside(outputs, tangents, product, batch)
    expected = task.loss_derivatives(outputs, tangents, batch)
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    smallest = float(torch.exp(-task.losses(outputs, batch)).min())
    assert (smallest < 1e-25) == (scale > 1)
