"""Retraining and removal: against least squares solved by numpy, interrupted, shared by processes; and on digits."""

from __future__ import annotations

import functools
import itertools
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from whence import Classification, ConvexLoss, LanguageModeling, Regression
from whence.errors import DataError, ModelError, OptionError, RunDirectoryError, WhenceError
from whence.validation import (
    Brittleness,
    Outcomes,
    RemovalEffects,
    brittleness,
    half_subsets,
    removal_effects,
    retrain,
)
from whence.validation.retraining import as_masks, query_losses

RIDGE = 0.1


@dataclass(frozen=True)
class LeastSquares:
    """Ridge regression, solved; targets get some noise of the seed's own."""

    x: Tensor
    y: Tensor
    noise: float = 0.1

    def targets(self, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return self.y + self.noise * torch.randn(len(self.y), generator=generator, dtype=self.y.dtype)

    def __call__(self, subset: Sequence[int], seed: int) -> nn.Module:
        x, y = self.x[subset], self.targets(seed)[subset]
        strength = RIDGE * len(self.x) * torch.eye(x.shape[1], dtype=x.dtype)
        model = nn.Linear(x.shape[1], 1, bias=False, dtype=x.dtype)
        model.weight.data = torch.linalg.solve(x.T @ x + strength, x.T @ y).unsqueeze(0)
        return model


def regression(
    n: int = 30, p: int = 4, noise: float = 0.1
) -> tuple[LeastSquares, list[tuple[Tensor, Tensor]]]:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(n + 5, p, generator=g, dtype=torch.float64)
    y = x @ torch.randn(p, generator=g, dtype=torch.float64) + torch.randn(n + 5, generator=g).double()
    return LeastSquares(x[:n], y[:n], noise), [(x[i], y[i : i + 1]) for i in range(n, n + 5)]


def numpy_losses(
    train: LeastSquares, queries: list[tuple[Tensor, Tensor]], subset: Any, seed: int
) -> np.ndarray:
    """The same by other means: an augmented least-squares problem."""
    x, y = train.x.numpy()[subset], train.targets(seed).numpy()[subset]
    p = x.shape[1]
    extra = np.sqrt(RIDGE * len(train.x)) * np.eye(p)
    theta = np.linalg.lstsq(np.vstack([x, extra]), np.concatenate([y, np.zeros(p)]), rcond=None)[0]
    return np.array([0.5 * (float(q.numpy() @ theta) - float(t[0])) ** 2 for q, t in queries])


SUBSETS = [[0, 3, 4, 9, 12, 20], [1, 2, 5, 7, 29], list(range(30))]


def run(train: Any, directory: Path | None = None, **changes: Any) -> Outcomes:
    queries = regression()[1]
    settings = {
        "subsets": SUBSETS,
        "seeds": (3, 8),
        "queries": queries,
        "task": Regression(),
        "num_examples": 30,
    }
    return retrain(train, directory=directory, **{**settings, **changes})


# --- losses ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [2, 256])
def test_losses_are_those_of_models_trained_elsewhere(batch_size: int) -> None:
    train, queries = regression()
    outcomes = run(train, batch_size=batch_size)
    assert outcomes.losses.shape == (3, 2, 5)
    assert outcomes.losses.dtype == torch.float64
    for row, subset in enumerate(SUBSETS):
        assert outcomes.subsets[row].nonzero().flatten().tolist() == subset
        for column, seed in enumerate((3, 8)):
            expected = numpy_losses(train, queries, subset, seed)
            np.testing.assert_allclose(outcomes.losses[row, column].numpy(), expected, rtol=1e-9)


def test_a_mask_and_lists_of_positions_are_the_same_subsets() -> None:
    train, _ = regression()
    shuffled = [list(reversed(subset)) for subset in SUBSETS]
    mask = as_masks(SUBSETS, 30)
    assert torch.equal(
        run(train, subsets=mask, num_examples=None).losses, run(train, subsets=shuffled).losses
    )


def test_mean_and_standard_error_over_seeds() -> None:
    outcomes = run(regression()[0], seeds=range(5))
    losses = outcomes.losses.numpy()
    np.testing.assert_allclose(outcomes.mean.numpy(), losses.mean(1))
    np.testing.assert_allclose(outcomes.stderr.numpy(), losses.std(1, ddof=1) / np.sqrt(5))
    assert bool(run(regression()[0], seeds=[0]).stderr.isnan().all())


def forgetful(subset: Sequence[int], seed: int) -> nn.Module:
    return nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 1).double())


def test_models_are_put_into_evaluation_mode() -> None:
    queries = regression()[1]
    losses = run(forgetful, seeds=[7]).losses[0, 0]
    torch.manual_seed(7)
    model = nn.Linear(4, 1).double().requires_grad_(False)
    expected = [float((model(x) - y).square() / 2) for x, y in queries]
    np.testing.assert_allclose(losses.numpy(), expected)


class Bigrams(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 11)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.table(input_ids)


def test_queries_of_different_lengths_keep_their_places() -> None:
    """Batches put similar lengths together; the losses must come back in the queries' order."""
    g = torch.Generator().manual_seed(0)
    task = LanguageModeling()
    queries = [
        task.query(torch.randint(11, (2,), generator=g), torch.randint(11, (length,), generator=g))
        for length in (7, 1, 5, 2, 9, 3)
    ]
    torch.manual_seed(0)
    model = Bigrams().eval()
    logits = model.table.weight.detach().double().log_softmax(1)
    expected = [
        -float(torch.stack([logits[a, b] for a, b in itertools.pairwise(ids[1:])]).mean())
        for ids in (query["input_ids"].tolist() for query in queries)
    ]
    for batch_size in (1, 2, 6):
        losses = query_losses(model, queries, task, batch_size=batch_size)
        np.testing.assert_allclose(losses.numpy(), expected, rtol=1e-6)


# --- randomness, threads, processes ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Mlp:
    """Takes its random numbers from torch without seeding them, as users' code does."""

    x: Tensor
    y: Tensor

    def __call__(self, subset: Sequence[int], seed: int) -> nn.Module:
        x, y = self.x[subset], self.y[subset]
        model = nn.Sequential(nn.Linear(64, 24), nn.Tanh(), nn.Linear(24, 10))
        parameters = list(model.parameters())
        for _ in range(5):
            for index in torch.randperm(len(x)).split(50):
                loss = nn.functional.cross_entropy(model(x[index]), y[index])
                for parameter, slope in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
                    parameter.data -= 0.5 * slope
        return model


@functools.cache
def digits() -> tuple[Mlp, list[tuple[Tensor, Tensor]]]:
    """A trainer on 1,400 images, and 200 others to ask about."""
    from digits import load  # only where needed: every process that is started imports this file

    train, test = load(flip=0.0)
    return Mlp(*train.tensors), [test[i] for i in range(200)]


def test_two_processes_give_the_same_bits_as_one_and_the_caller_notices_nothing() -> None:
    subsets = half_subsets(1400, 3, fraction=0.1, generator=torch.Generator().manual_seed(0))
    train, queries = digits()
    torch.set_num_threads(2)
    states = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    try:
        one, two = (
            retrain(train, subsets, (0, 1), queries, task=Classification(), processes=processes)
            for processes in (1, 2)
        )
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
    assert torch.equal(one.losses, two.losses)
    assert one.losses[:, 0].ne(one.losses[:, 1]).any()  # seeds make a difference
    assert torch.equal(states[0], torch.get_rng_state())
    assert (states[1] == np.random.get_state()[1]).all()
    assert states[2] == random.getstate()


def threads_used(subset: Sequence[int], seed: int) -> nn.Module:
    """A model whose prediction is the number of threads that it was trained with."""
    model = nn.Linear(4, 1).double()
    nn.init.zeros_(model.weight)
    nn.init.constant_(model.bias, torch.get_num_threads())
    torch.set_num_threads(2)  # what a user's own script might do
    return model


def test_training_has_one_thread_each_time() -> None:
    zero = [(torch.zeros(4).double(), torch.zeros(1).double())]
    assert run(threads_used, queries=zero).losses.unique().tolist() == [0.5]
    assert torch.get_num_threads() == 1


def dies_on_a_small_subset(subset: Sequence[int], seed: int) -> nn.Module:
    if len(subset) == 5:
        os._exit(1)
    return regression()[0](subset, seed)


def test_a_process_that_dies_is_an_error_and_what_was_finished_is_kept(tmp_path: Path) -> None:
    with pytest.raises(WhenceError, match="ended abruptly"):
        run(dies_on_a_small_subset, tmp_path, processes=2)
    counting = Counting(regression()[0])
    assert torch.equal(run(counting, tmp_path).losses, run(regression()[0]).losses)
    assert len(counting.calls) < 6  # the first two were trained before


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"train": lambda subset, seed: nn.Linear(4, 1)}, "train cannot be pickled"),
        ({"task": ConvexLoss(lambda h, y: (h - y).square().sum(-1))}, "task cannot be pickled"),
    ],
    ids=["train", "task"],
)
def test_what_cannot_be_sent_to_processes_is_named(changes: dict[str, Any], what: str) -> None:
    with pytest.raises(OptionError, match=what) as caught:
        run(changes.pop("train", regression()[0]), processes=2, **changes)
    assert "processes=1" in str(caught.value)


# --- interruption ----------------------------------------------------------------------------------------------


class Counting:
    """Notes what it is asked to train, and fails at one of its calls."""

    def __init__(self, train: Any, fail_at: int | None = None) -> None:
        self.train, self.fail_at, self.calls = train, fail_at, list[tuple[int, int]]()

    def __call__(self, subset: Sequence[int], seed: int) -> nn.Module:
        if len(self.calls) == self.fail_at:
            raise ZeroDivisionError("out of luck")
        self.calls.append((len(subset), seed))
        return self.train(subset, seed)


def test_an_interrupted_job_goes_on_with_what_is_missing(tmp_path: Path) -> None:
    train, _ = regression()
    whole = run(train)
    broken = Counting(train, fail_at=4)
    with pytest.raises(
        ModelError, match=r"subset 2 \(30 of 30 examples\) with seed 3 .*ZeroDivisionError: out of"
    ) as caught:
        run(broken, tmp_path)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    with pytest.raises(RunDirectoryError, match="no finished retraining"):
        Outcomes.load(tmp_path)
    mended = Counting(train)
    assert torch.equal(run(mended, tmp_path).losses, whole.losses)
    assert broken.calls + mended.calls == [(len(subset), seed) for subset in SUBSETS for seed in (3, 8)]
    idle = Counting(train)
    assert torch.equal(run(idle, tmp_path).losses, whole.losses)
    assert idle.calls == []
    assert torch.equal(Outcomes.load(tmp_path).losses, whole.losses)


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"subsets": [*SUBSETS[:2], [0, 1]]}, "subsets: '3:"),
        ({"subsets": SUBSETS[:2]}, "subsets: '3:.*there, '2:"),
        ({"seeds": (3, 9)}, "seeds: '3, 8' there, '3, 9' now"),
        ({"queries": regression()[1][:3]}, "queries: '5:.*there, '3:"),
        ({"name": "longer"}, "name: '' there, 'longer' now"),
        ({"num_examples": 31}, "examples: 30 there, 31 now"),
    ],
    ids=["other subsets", "fewer subsets", "seeds", "queries", "name", "examples"],
)
def test_a_directory_of_another_job_is_refused(
    tmp_path: Path, changes: dict[str, Any], difference: str
) -> None:
    train = Counting(regression()[0])
    run(train, tmp_path)
    with pytest.raises(RunDirectoryError, match=difference):
        run(train, tmp_path, **changes)
    assert len(train.calls) == 6
    run(train, tmp_path)  # the job that is there is still there
    assert len(train.calls) == 6


def test_outcomes_saved_and_loaded_are_the_same(tmp_path: Path) -> None:
    outcomes = run(regression()[0])
    loaded = Outcomes.load(outcomes.save(tmp_path / "deep" / "truth.safetensors"))
    assert torch.equal(loaded.losses, outcomes.losses)
    assert torch.equal(loaded.subsets, outcomes.subsets)
    assert loaded.seeds == outcomes.seeds


# --- what is refused -------------------------------------------------------------------------------------------


def diverges(subset: Sequence[int], seed: int) -> nn.Module:
    model = regression()[0](subset, seed)
    if len(subset) == 5 and seed == 8:
        model.weight.data.fill_(torch.nan)
    return model


def test_a_model_with_nan_losses_is_an_error_that_says_which() -> None:
    with pytest.raises(
        ModelError, match=r"subset 1 \(5 of 30 examples\) with seed 8 has the loss nan on query 0"
    ):
        run(diverges)


def no_model(subset: Sequence[int], seed: int) -> Any:
    return regression()[0](subset, seed).state_dict()


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"train": 3}, OptionError, "train is a int"),
        ({"train": no_model}, ModelError, "returned a OrderedDict"),
        ({"seeds": 3}, OptionError, r"range\(3\)"),
        ({"seeds": []}, OptionError, "one or more different"),
        ({"seeds": [1, 1]}, OptionError, "different numbers"),
        ({"seeds": [-1]}, OptionError, "from 0"),
        ({"subsets": []}, OptionError, "no subset"),
        ({"subsets": [[0], []]}, OptionError, "subset 1 is empty"),
        ({"subsets": [[0, 30]]}, OptionError, r"position 30; with 30 examples they are 0\.\.29"),
        ({"subsets": [[-1]]}, OptionError, "position -1"),
        ({"subsets": [[4, 5, 4]]}, OptionError, "position 4 more than once"),
        ({"subsets": [[0.5]]}, OptionError, "float32"),
        ({"num_examples": None}, OptionError, "give num_examples"),
        ({"subsets": torch.ones(2, 29, dtype=torch.bool)}, OptionError, "of 29 examples, num_examples is 30"),
        ({"batch_size": 0}, OptionError, "batch_size"),
        ({"processes": 0}, OptionError, "processes"),
        ({"queries": []}, DataError, "empty"),
        ({"queries": [(torch.full((4,), torch.nan), torch.zeros(1))]}, DataError, "NaN"),
        (
            {
                "queries": [{"input_ids": [1, 2]}, {"input_ids": [1, 2], "labels": [-100, -100]}],
                "task": LanguageModeling(),
            },
            DataError,
            "query 1 holds no term",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_bad_input_is_refused_before_training(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    train = Counting(changes.get("train", regression()[0]))
    with pytest.raises(error, match=message):
        run(3 if changes.get("train") == 3 else train, **{k: v for k, v in changes.items() if k != "train"})
    assert len(train.calls) == (1 if "train" in changes and changes["train"] != 3 else 0)


def test_half_subsets() -> None:
    n, count = 41, 400
    first, second = (half_subsets(n, count, generator=torch.Generator().manual_seed(0)) for _ in range(2))
    assert torch.equal(first, second)
    assert first.sum(1).unique().tolist() == [20]
    share = first.double().mean(0)
    assert float((share - 20 / n).abs().max()) < 4 * np.sqrt(0.25 / count)
    third = half_subsets(n, 2, fraction=0.75, generator=torch.Generator().manual_seed(0))
    assert third.sum(1).tolist() == [31, 31]
    for bad in ({"count": 0}, {"fraction": 0.0}, {"fraction": 1.0}, {"fraction": float("nan")}):
        with pytest.raises(OptionError, match="at least one"):
            half_subsets(**{"n": n, "count": 2, "generator": torch.Generator(), **bad})


# --- removal ---------------------------------------------------------------------------------------------------


def test_removal_effects_are_those_of_numpy() -> None:
    train, queries = regression()
    groups = [4, [7, 1], torch.arange(10, 20)]
    found = removal_effects(train, 30, groups, queries, task=Regression(), seeds=range(4))
    assert found.groups == ((4,), (1, 7), tuple(range(10, 20)))
    for row, group in enumerate(found.groups):
        kept = np.setdiff1d(np.arange(30), group)
        differences = np.stack(
            [
                numpy_losses(train, queries, kept, seed) - numpy_losses(train, queries, np.arange(30), seed)
                for seed in range(4)
            ]
        )
        np.testing.assert_allclose(found.effects[row].numpy(), differences.mean(0), rtol=1e-6, atol=1e-12)
        np.testing.assert_allclose(found.stderr[row].numpy(), differences.std(0, ddof=1) / 2, rtol=1e-6)
    low, high = found.interval(0.95)
    np.testing.assert_allclose(((high - low) / 2 / found.stderr).numpy(), 3.182446, rtol=1e-6)  # t, 3 degrees


def test_influence_predicts_removal_with_its_sign_and_unit() -> None:
    """``score / n`` of the damped influence, first order in 1/n, against leave-one-out and pairs."""
    train, queries = regression(n=200, noise=0.0)
    x, y = train.x.numpy(), train.y.numpy()
    hessian = x.T @ x / 200 + RIDGE * np.eye(4)
    theta = np.linalg.solve(hessian, x.T @ y / 200)
    gradients = x * (x @ theta - y)[:, None]
    asked = np.stack([q.numpy() * (float(q.numpy() @ theta) - float(t[0])) for q, t in queries])
    scores = torch.from_numpy(asked @ np.linalg.solve(hessian, gradients.T))
    groups = [*range(40), [50, 51], [60, 70]]
    found = removal_effects(train, 200, groups, queries, task=Regression(), seeds=[0])
    predicted = found.predicted(scores / 200)
    error = (predicted - found.effects).norm() / found.effects.norm()
    assert float(error) < 0.05
    assert float((-predicted - found.effects).norm() / found.effects.norm()) > 1.9
    torch.testing.assert_close(predicted[-1], (scores[:, 60] + scores[:, 70]) / 200)


def test_removing_a_class_of_digits_raises_the_losses_of_that_class() -> None:
    train, queries = digits()
    truth = torch.tensor([int(y) for _, y in queries])
    classes = (2, 7)
    groups = [(train.y == label).nonzero().flatten().tolist() for label in classes]
    task = Classification()
    found = removal_effects(train, 1400, groups, queries, task=task, seeds=range(3))
    for row, label in enumerate(classes):
        own, others = found.effects[row, truth == label], found.effects[row, truth != label]
        assert bool((own > 4 * found.stderr[row, truth == label]).float().mean() > 0.9)
        assert bool((own > 1).all())
        assert float(others.mean()) < 0.1 * float(own.mean())


@pytest.mark.parametrize(
    "group", [[], list(range(30)), [30], [[1, 1]]], ids=["none", "all", "outside", "twice"]
)
def test_groups_that_cannot_be_removed_are_refused(group: list[int]) -> None:
    train, queries = regression()
    with pytest.raises(OptionError, match="no group"):
        removal_effects(train, 30, [], queries, task=Regression(), seeds=[0])
    with pytest.raises(OptionError, match="group 1"):
        removal_effects(train, 30, [[0], group], queries, task=Regression(), seeds=[0])


def test_effects_of_the_wrong_shape_and_errors_of_one_seed_are_refused() -> None:
    train, queries = regression()
    found = removal_effects(train, 30, [0], queries, task=Regression(), seeds=[0])
    with pytest.raises(OptionError, match=r"\[queries, 30\]"):
        found.predicted(torch.zeros(5, 29))
    with pytest.raises(OptionError, match="one seed"):
        found.interval()
    with pytest.raises(OptionError, match="do not fit 2 groups"):
        RemovalEffects(found.outcomes, ((0,), (1,)))


# --- brittleness -----------------------------------------------------------------------------------------------


def test_brittleness_removes_the_most_helpful_and_as_many_random_ones() -> None:
    train, queries = regression()
    everything = list(range(30))
    alone = removal_effects(train, 30, everything, queries, task=Regression(), seeds=[0])
    scores = alone.effects.T.clone()
    unscored = int(scores[0].argmax())
    scores[0, unscored] = torch.nan
    g = torch.Generator().manual_seed(0)
    found = brittleness(
        train, scores, queries, task=Regression(), seeds=(0, 1, 2), counts=(3, 6), draws=5, generator=g
    )
    assert found.top.shape == (5, 6)
    assert unscored not in found.top[0].tolist()
    for query in range(5):
        order = np.argsort(-scores[query].nan_to_num(nan=-np.inf).numpy())
        for column, k in enumerate((3, 6)):
            assert set(found.top[query, :k].tolist()) == set(order[:k].tolist())
            kept = np.setdiff1d(everything, order[:k])
            change = [
                numpy_losses(train, queries, kept, s)[query]
                - numpy_losses(train, queries, everything, s)[query]
                for s in range(3)
            ]
            np.testing.assert_allclose(
                found.top_changes[query, column].numpy(), change, rtol=1e-6, atol=1e-12
            )
    masks = found.outcomes.subsets[11:]  # after all data, and five queries' two
    assert (~masks).sum(1).tolist() == [3, 6] * 5
    assert len({tuple(row) for row in masks.tolist()}) == 10
    kept = masks[7].nonzero().flatten().numpy()  # the fourth draw, k = 6
    change = numpy_losses(train, queries, kept, 2) - numpy_losses(train, queries, everything, 2)
    np.testing.assert_allclose(found.random_changes[3, :, 1, 2].numpy(), change, rtol=1e-6, atol=1e-12)
    assert bool((found.excess > 2 * found.excess_stderr).all())


def test_errors_of_brittleness_cover_draws_and_seeds() -> None:
    """A change of a + b for draw and seed, and noise: the errors are the spread over repetitions, or a little more."""
    draws, seeds, repetitions = 6, 5, 600
    g = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    random_means, random_errors, excesses, excess_errors = [], [], [], []
    subsets = torch.ones(2 + draws, 3, dtype=torch.bool)
    for _ in range(repetitions):
        losses = torch.zeros(2 + draws, seeds, 1, dtype=torch.float64)
        shared = normal(seeds)  # of a seed, whatever is removed
        losses[1, :, 0] = 2.0 + shared + 0.5 * normal(seeds)
        losses[2:, :, 0] = normal(draws, 1) + shared + 0.5 * normal(draws, seeds)
        found = Brittleness(Outcomes(losses, subsets, tuple(range(seeds))), (1,), torch.zeros(1, 1).long())
        random_means.append(float(found.random_effects))
        random_errors.append(float(found.random_stderr) ** 2)
        excesses.append(float(found.excess))
        excess_errors.append(float(found.excess_stderr) ** 2)
    for values, squares in ((random_means, random_errors), (excesses, excess_errors)):
        ratio = np.sqrt(np.mean(squares)) / np.std(values)
        assert 0.94 < ratio < 1.15
    assert np.mean(excesses) == pytest.approx(2.0, abs=4 * np.std(excesses) / np.sqrt(repetitions))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"counts": []}, "counts"),
        ({"counts": [0, 3]}, "from 1 to 29"),
        ({"counts": [30]}, "from 1 to 29"),
        ({"draws": 1}, "draws is 1"),
        ({"scores": torch.zeros(4, 30)}, "for 5 queries"),
        ({"scores": torch.full((5, 30), torch.nan)}, "from 1 to 0"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_bad_settings_of_brittleness_are_named(changes: dict[str, Any], message: str) -> None:
    train, queries = regression()
    settings = {"scores": torch.zeros(5, 30), "counts": [1], "generator": torch.Generator()}
    with pytest.raises(OptionError, match=message):
        brittleness(train, queries=queries, task=Regression(), seeds=[0], **{**settings, **changes})
