"""Detection curves: by hand, by brute force over orders, beside scikit-learn's AUROC, and on digits."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import hypergeom
from torch import nn

from digits import load, train_mlp
from whence.errors import DataError, OptionError
from whence.validation.mislabels import detection_curve


def test_by_hand() -> None:
    curve = detection_curve(
        torch.tensor([5.0, 4.0, 3.0, 2.0, 1.0]), torch.tensor([True, False, True, False, False])
    )
    assert curve.inspected.tolist() == [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert curve.shares.tolist() == [0.0, 0.5, 0.5, 1.0, 1.0, 1.0]
    assert [curve.found(f) for f in (0.0, 0.1, 0.2, 0.5, 1.0)] == pytest.approx([0.0, 0.25, 0.5, 0.75, 1.0])
    assert curve.area == pytest.approx(0.2 * (0.25 + 0.5 + 0.75 + 1.0 + 1.0))
    assert (curve.num_examples, curve.num_mislabelled) == (5, 2)


def test_ties_count_by_expectation_over_all_orders() -> None:
    suspicion = np.array([1, 3, 1, 2, 1, 3, 2])
    wrong = np.array([True, False, False, True, True, False, False])
    shares = []
    for order in itertools.permutations(range(7)):
        if all(suspicion[a] >= suspicion[b] for a, b in itertools.pairwise(order)):
            shares.append(np.concatenate([[0], wrong[list(order)].cumsum() / 3]))
    expected = np.mean(shares, axis=0)
    curve = detection_curve(suspicion, wrong)
    np.testing.assert_allclose([curve.found(k / 7) for k in range(8)], expected, atol=1e-12)
    assert curve.area == pytest.approx((expected[1:] + expected[:-1]).sum() / 14)


@pytest.mark.parametrize("levels", [3, 1000], ids=["ties", "no ties"])
def test_the_area_is_another_way_to_say_auroc(levels: int) -> None:
    """``AUROC = (area - w/2n) / (1 - w/n)``, ties included."""
    from sklearn.metrics import roc_auc_score

    g = torch.Generator().manual_seed(0)
    wrong = torch.rand(300, generator=g) < 0.1
    suspicion = torch.randint(levels, (300,), generator=g) + levels // 3 * wrong
    curve = detection_curve(suspicion, wrong)
    part = curve.num_mislabelled / 300
    assert (curve.area - part / 2) / (1 - part) == pytest.approx(roc_auc_score(wrong, suspicion))


def test_the_best_the_worst_and_no_idea() -> None:
    wrong = torch.arange(50) < 5
    best, worst, none = (detection_curve(s, wrong) for s in (wrong.float(), -wrong.float(), torch.zeros(50)))
    assert best.area == pytest.approx(best.best_area) == pytest.approx(0.95)
    assert best.found(0.1) == 1.0
    assert worst.found(0.9) == pytest.approx(0.0)
    assert worst.area == pytest.approx(0.05)
    assert none.area == pytest.approx(0.5)
    assert none.found(0.3) == pytest.approx(0.3)
    everything = detection_curve(torch.arange(4.0), torch.ones(4, dtype=torch.bool))
    assert everything.area == everything.best_area == 0.5
    assert everything.chance(0.5).stderr == 0.0


@pytest.mark.parametrize("inspected", [1, 20, 100, 199])
def test_chance_is_the_hypergeometric_distribution(inspected: int) -> None:
    wrong = torch.arange(200) < 13
    chance = detection_curve(torch.arange(200.0), wrong).chance(inspected / 200)
    drawn = hypergeom(200, 13, inspected)
    assert chance.value == pytest.approx(drawn.mean() / 13)
    assert chance.stderr == pytest.approx(drawn.std() / 13)
    assert detection_curve(torch.arange(200.0), wrong).chance(1.0).stderr == 0.0


def test_losses_find_flipped_digits_far_beyond_chance() -> None:
    (clean, _), (train, _) = load(flip=0.0), load(flip=0.05)
    wrong = train.tensors[1] != clean.tensors[1]
    assert 0.03 < float(wrong.float().mean()) < 0.07
    x, y = train.tensors
    model = train_mlp(train, epochs=8)
    with torch.no_grad():
        losses = nn.functional.cross_entropy(model(x), y, reduction="none")
    curve = detection_curve(losses, wrong)
    chance = curve.chance(0.1)
    assert curve.found(0.1) > chance.value + 10 * chance.stderr
    worst = losses.argsort(descending=True)[:140]
    assert curve.found(0.1) == pytest.approx(float(wrong[worst].sum() / wrong.sum()))
    assert f"{curve.found(0.1):.1%} of {int(wrong.sum())} wrong labels" in str(curve)
    shuffled = losses[torch.randperm(1400, generator=torch.Generator().manual_seed(0))]
    assert abs(detection_curve(shuffled, wrong).found(0.1) - 0.1) < 4 * chance.stderr


@pytest.mark.parametrize(
    ("suspicion", "mislabelled", "error", "message"),
    [
        ([1.0, 2.0], [True], OptionError, r"shape \(2,\), mislabelled \(1,\)"),
        ([[1.0], [2.0]], [[True], [False]], OptionError, r"both must be \[n\]"),
        ([1.0, 2.0], [1, 0], OptionError, "mask of bool"),
        ([1.0, 2.0], [False, False], DataError, "no example is mislabelled"),
        ([1.0, float("nan")], [True, False], DataError, "example 1 is NaN"),
    ],
    ids=["lengths", "shape", "numbers", "nothing wrong", "nan"],
)
def test_bad_input_is_named(suspicion: Any, mislabelled: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        detection_curve(suspicion, mislabelled)


def test_a_share_beyond_all_is_refused() -> None:
    curve = detection_curve([1.0, 2.0], [True, False])
    for ask in (curve.found, curve.chance):
        with pytest.raises(OptionError, match=r"fraction is 1\.5"):
            ask(1.5)
