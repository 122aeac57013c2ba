"""The linear datamodeling score: exact where outcomes are additive, with intervals that cover."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from torch import Tensor

from small import generator
from whence.errors import DataError, OptionError
from whence.validation import (
    Outcomes,
    compare_datamodeling_scores,
    half_subsets,
    linear_datamodeling_score,
)
from whence.validation.datamodeling import _halvings
from whence.validation.statistics import Ranks, draw_weights, rank_correlations

N = 40


def normal(*shape: int, g: torch.Generator) -> Tensor:
    return torch.randn(*shape, generator=g, dtype=torch.float64)


def additive(
    subsets: int = 60, queries: int = 8, *, seeds: int = 1, noise: float = 0.0, seed: int = 0
) -> tuple[Outcomes, Tensor]:
    """Losses that every example lowers by an amount of its own, and those amounts."""
    g = generator(seed)
    helps = normal(queries, N, g=g)
    masks = half_subsets(N, subsets, generator=g)
    losses = 5 - (masks.double() @ helps.T).unsqueeze(1) + noise * normal(subsets, seeds, queries, g=g)
    return Outcomes(losses, masks, tuple(range(seeds))), helps


# --- the value -------------------------------------------------------------------------------------------------


def test_the_true_effects_score_one_and_their_opposites_minus_one() -> None:
    outcomes, helps = additive()
    for sign in (1.0, -1.0):
        found = linear_datamodeling_score(sign * helps, outcomes, generator=generator())
        assert (found.value, found.low, found.high, found.stderr) == (sign, sign, sign, 0.0)
        assert found.per_query.tolist() == [sign] * 8
        assert found.undefined == {}


def test_only_the_order_of_predictions_counts() -> None:
    outcomes, helps = additive(noise=2.0)
    values = [
        linear_datamodeling_score(scores, outcomes, generator=generator()).value
        for scores in (helps, helps * 1e6, helps / N + 3.0)  # subsets are equally large
    ]
    assert values[0] == values[1] == pytest.approx(values[2], abs=1e-12)


def test_correlations_are_those_of_scipy_with_ties() -> None:
    g = generator()
    masks = half_subsets(N, 50, generator=g)
    scores = torch.randint(-1, 2, (6, N), generator=g).double()  # sums of few values tie often
    losses = torch.randint(0, 8, (50, 3, 6), generator=g).double()
    found = linear_datamodeling_score(scores, Outcomes(losses, masks, (0, 1, 2)), generator=g)
    predictions = masks.double() @ scores.T
    expected = [spearmanr(predictions[:, q], -losses.mean(1)[:, q]).statistic for q in range(6)]
    np.testing.assert_allclose(found.per_query.numpy(), expected, atol=1e-12)
    assert found.value == pytest.approx(np.mean(expected))


def test_a_resample_is_what_scipy_says_of_repeated_rows() -> None:
    g = generator()
    x = torch.randint(0, 9, (30, 4), generator=g).double()
    y = x + torch.randint(0, 9, (30, 4), generator=g)
    weights = draw_weights(5, 30, g)
    assert weights.sum(1).tolist() == [30] * 5
    found = rank_correlations(Ranks(x), Ranks(y), weights)
    for row, times in enumerate(weights.long()):
        again = torch.arange(30).repeat_interleave(times)
        for q in range(4):
            assert found[row, q] == pytest.approx(spearmanr(x[again, q], y[again, q]).statistic)


def test_shuffled_scores_are_worth_nothing() -> None:
    outcomes, helps = additive(subsets=100, queries=30, noise=1.0)
    shuffled = torch.stack([row[torch.randperm(N, generator=generator(q))] for q, row in enumerate(helps)])
    found = linear_datamodeling_score(shuffled, outcomes, generator=generator())
    assert found.low < 0 < found.high
    assert abs(found.value) < 0.15
    assert found.high - found.low < 0.3
    right = linear_datamodeling_score(helps, outcomes, generator=generator())
    assert right.low > 0.8


def test_the_same_generator_gives_the_same_interval() -> None:
    outcomes, helps = additive(noise=2.0, seeds=3)
    first, second, third = (
        linear_datamodeling_score(helps, outcomes, generator=generator(seed)) for seed in (1, 1, 2)
    )
    assert (first.low, first.high) == (second.low, second.high) != (third.low, third.high)
    assert first.value == third.value


# --- what has no correlation -----------------------------------------------------------------------------------


def test_constant_columns_have_a_reason_instead_of_a_value() -> None:
    outcomes, helps = additive(noise=1.0)
    losses = outcomes.losses.clone()
    losses[:, :, 2] = 0.7
    helps = helps.clone()
    helps[5] = 0.1  # sums of twenty tenths, in which only rounding differs
    found = linear_datamodeling_score(helps, Outcomes(losses, outcomes.subsets, (0,)), generator=generator())
    assert set(found.undefined) == {2, 5}
    assert "loss is the same" in found.undefined[2]
    assert "predict the same" in found.undefined[5]
    assert found.per_query.isnan().nonzero().flatten().tolist() == [2, 5]
    others = [q for q in range(8) if q not in (2, 5)]
    assert found.value == pytest.approx(float(found.per_query[others].mean()))
    assert found.low < found.value < found.high
    assert "2 queries without" in str(found)


def test_scores_of_zero_are_no_crash() -> None:
    outcomes, helps = additive(noise=1.0, seeds=2)
    found = linear_datamodeling_score(torch.zeros_like(helps), outcomes, generator=generator())
    assert all(math.isnan(value) for value in (found.value, found.low, found.high, found.stderr))
    assert set(found.undefined) == set(range(8))
    difference = compare_datamodeling_scores(helps, torch.zeros_like(helps), outcomes, generator=generator())
    assert math.isnan(difference.value)
    assert not difference.separated


# --- intervals -------------------------------------------------------------------------------------------------


SPREAD = 1.5  # of the losses beside what examples do


def effects_and_methods(queries: int, shared: float, g: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Effects, and two methods, one with twice the error of the other; a part of all is common to the queries."""
    common = normal(3, 1, N, g=generator(99))
    helps, error, other = ((1 - shared) * normal(queries, N, g=g) + shared * part for part in common)
    return helps, helps + 0.6 * error, helps + 1.2 * other


def noise_of(subsets: int, queries: int, shared: float, g: torch.Generator) -> Tensor:
    return (1 - shared) * normal(subsets, queries, g=g) + shared * normal(subsets, 1, g=g)


def expected_lds(shared: float) -> np.ndarray:
    """Over all half-subsets and many queries: ``(6/π) asin(ρ/2)`` for sums that are nearly normal.

    The sum over a random half of N numbers varies by ``N/4(N-1)`` times their squared deviations.
    """
    helps, *methods = effects_and_methods(20_000, shared, generator(1000))
    helps = helps - helps.mean(1, keepdim=True)
    factor = N / (4 * (N - 1))
    truth = factor * helps.square().sum(1) + SPREAD**2 * ((1 - shared) ** 2 + shared**2)
    values = []
    for scores in methods:
        scores = scores - scores.mean(1, keepdim=True)
        rho = factor * (scores * helps).sum(1) / (truth * factor * scores.square().sum(1)).sqrt()
        values.append(float((6 / math.pi * (rho / 2).asin()).mean()))
    return np.array([*values, values[0] - values[1]])


@pytest.mark.parametrize("shared", [0.0, 0.5])
def test_intervals_cover_and_are_no_wider_than_needed(shared: float) -> None:
    true, repetitions = expected_lds(shared), 100
    covered, values, errors = np.zeros(3), [], []
    for seed in range(repetitions):
        g = generator(seed)
        helps, first, second = effects_and_methods(20, shared, g)
        masks = half_subsets(N, 50, generator=g)
        losses = SPREAD * noise_of(50, 20, shared, g) - masks.double() @ helps.T
        outcomes = Outcomes(losses.unsqueeze(1), masks, (0,))
        found = compare_datamodeling_scores(first, second, outcomes, generator=g, bootstrap=200)
        three = (found.first, found.second, found)
        covered += [score.low <= value <= score.high for score, value in zip(three, true, strict=True)]
        values.append([score.value for score in three])
        errors.append([score.stderr for score in three])
    assert (covered / repetitions > 0.95 - 4 * math.sqrt(0.95 * 0.05 / repetitions)).all()
    assert (np.abs(np.mean(values, 0) - true) < 0.03).all()
    ratio = np.sqrt(np.mean(np.square(errors), 0)) / np.std(values, 0)
    assert (ratio > 0.85).all()
    assert (ratio < 1.25).all()


def test_a_difference_is_known_better_than_either_score() -> None:
    g = generator()
    outcomes, helps = additive(subsets=50, queries=20, noise=3.0)
    better = helps + 0.3 * normal(20, N, g=g)
    worse = better + 0.5 * normal(20, N, g=g)
    found = compare_datamodeling_scores(better, worse, outcomes, generator=g)
    assert found.separated
    assert found.low > 0
    assert found.value == pytest.approx(found.first.value - found.second.value)
    assert found.second.high > found.first.low  # the intervals of the two overlap
    assert linear_datamodeling_score(better, outcomes, generator=g).value == found.first.value
    same = compare_datamodeling_scores(better, better, outcomes, generator=g)
    assert (same.value, same.low, same.high, same.separated) == (0.0, 0.0, 0.0, False)


# --- the noise ceiling -----------------------------------------------------------------------------------------


def test_split_half_of_two_and_three_seeds_by_hand() -> None:
    outcomes, helps = additive(seeds=3, noise=2.0)

    def reliability(first: int, second: int) -> float:
        return float(np.mean([spearmanr(*outcomes.losses[:, [first, second], q].T)[0] for q in range(8)]))

    pair = Outcomes(outcomes.losses[:, :2], outcomes.subsets, (0, 1))
    found = linear_datamodeling_score(helps, pair, generator=generator())
    assert found.split_half == pytest.approx(reliability(0, 1))
    found = linear_datamodeling_score(helps, outcomes, generator=generator())
    expected = np.mean([reliability(0, 1), reliability(0, 2), reliability(1, 2)])
    assert found.split_half == pytest.approx(expected)
    assert additive()[0].seeds == (0,)
    alone = linear_datamodeling_score(helps, additive()[0], generator=generator())
    assert alone.split_half is None
    assert alone.ceiling is None


@pytest.mark.parametrize("seeds", [2, 3, 4, 5, 12])
def test_halves_are_equal_disjoint_and_different(seeds: int) -> None:
    splits = _halvings(seeds, generator())
    for first, second in splits:
        assert len(first) == len(second) == seeds // 2
        assert not set(first) & set(second)
        assert set(first) | set(second) <= set(range(seeds))
    counts = {2: 1, 3: 3, 4: 3, 5: 15, 12: 128}
    assert len(splits) == counts[seeds]
    if seeds < 12:
        assert len({frozenset([frozenset(first), frozenset(second)]) for first, second in splits}) == len(
            splits
        )


@pytest.mark.parametrize(("seeds", "noise"), [(2, 2.0), (3, 5.0), (12, 8.0)])
def test_the_expected_loss_itself_scores_the_ceiling(seeds: int, noise: float) -> None:
    outcomes, helps = additive(subsets=200, queries=60, seeds=seeds, noise=noise)
    found = linear_datamodeling_score(helps, outcomes, generator=generator())
    assert found.ceiling is not None
    assert found.split_half is not None
    assert found.ceiling == pytest.approx(found.value, abs=0.03)
    assert found.split_half < found.value - 0.03
    assert f"noise ceiling {found.ceiling:.3f}" in str(found)


# --- what is refused -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scores": torch.zeros(8, N - 1)}, r"must be \[8, 40\]"),
        ({"scores": torch.zeros(N)}, r"must be \[8, 40\]"),
        ({"confidence": 1.0}, "confidence is 1.0"),
        ({"bootstrap": 10}, "bootstrap is 10; an interval of 95% needs at least 40"),
        ({"outcomes": additive(subsets=2)[0]}, "2 subsets"),
    ],
    ids=["examples", "queries", "confidence", "bootstrap", "subsets"],
)
def test_bad_input_is_named(changes: dict[str, Any], message: str) -> None:
    outcomes, helps = additive()
    with pytest.raises(OptionError, match=message):
        linear_datamodeling_score(
            **{"scores": helps, "outcomes": outcomes, "generator": generator(), **changes}
        )


def test_examples_without_a_score_are_named() -> None:
    outcomes, helps = additive()
    helps[:, 7] = torch.nan
    with pytest.raises(
        DataError, match=r"1 examples have scores that are NaN or infinite \(the first is 7\)"
    ):
        linear_datamodeling_score(helps, outcomes, generator=generator())


@pytest.mark.parametrize(
    ("losses", "subsets", "message"),
    [
        (torch.zeros(3, 2, 4), torch.ones(3, 5), "give a mask"),
        (torch.zeros(3, 1, 4), torch.ones(3, 5).bool(), r"\[subsets, seeds, queries\]"),
        (
            torch.zeros(3, 2, 4).index_fill(0, torch.tensor(1), torch.nan),
            torch.ones(3, 5).bool(),
            "subset 1 and seed 4",
        ),
    ],
    ids=["mask", "shape", "nan"],
)
def test_outcomes_that_make_no_sense_are_refused(losses: Tensor, subsets: Tensor, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Outcomes(losses, subsets, (4, 5))
