"""Self-influence without a solve per example, against dense float64 algebra; then on digits with wrong labels."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import digits
from dense import dense_gauss_newton, jacobian
from whence import Classification, Dense, GaussNewton, LanguageModeling, Regression
from whence.errors import DataError, OptionError
from whence.preconditioners import nystrom
from whence.scoring import bounds as bounds_module
from whence.scoring.bounds import affordable_rank, measure_bounds
from whence.scoring.self_influence import Readings, calibrate, read_examples, self_influence
from whence.validation.mislabels import detection_curve
from zoo import CASES, mlp, sequences, vectors

DOUBLE = torch.float64


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def small(dtype: torch.dtype = DOUBLE, **options: Any) -> GaussNewton:
    torch.manual_seed(0)
    return GaussNewton(mlp().to(dtype).eval(), Classification(), vectors(dtype), **options)


def gradients(gnh: GaussNewton) -> Tensor:
    """∇ℓ(z) of every example in float64, from Jacobians: mean over the terms of ``Jᵀ(p - e_y)``."""
    rows = []
    for example in gnh.terms.data:
        J, outputs, batch = jacobian(gnh, example)
        logits, targets = outputs.reshape(-1, outputs.shape[-1]), batch.targets.reshape(-1)  # type: ignore[attr-defined]
        kept = targets != -100
        slope = logits.softmax(-1) - nn.functional.one_hot(targets.clamp_min(0), logits.shape[-1])
        slope = slope * kept.unsqueeze(1) / kept.sum()
        rows.append(slope.reshape(-1) @ J)
    return torch.stack(rows)


def exact_values(matrix: Tensor, w: Tensor, damping: float) -> Tensor:
    system = matrix + damping * torch.eye(len(matrix), dtype=matrix.dtype)
    return (w.T * torch.linalg.solve(system, w.T)).sum(0)


@pytest.mark.parametrize("condition", [20.0, 200.0, 1e4])
@pytest.mark.parametrize("rank", [3, 12])
def test_the_exact_value_lies_between_the_bounds(rank: int, condition: float) -> None:
    gnh = small()
    matrix, w = dense_gauss_newton(gnh).matrix, gradients(gnh)
    damping = float(torch.linalg.eigvalsh(matrix)[-1]) / condition
    exact = exact_values(matrix, w, damping)
    found = self_influence(gnh, damping, rank=rank, generator=generator())
    assert bool((found.low <= exact).all())
    assert bool((exact <= found.high).all())
    assert bool((found.low < found.values).all())
    assert bool((found.values < found.high).all())
    assert found.bounds.ratio > 1.05  # the bounds are not empty of meaning
    assert torch.allclose(found.norms, w.norm(dim=1))
    assert found.indices.tolist() == list(range(20))


def test_the_form_is_that_of_the_approximation() -> None:
    """q = wᵀP⁻¹w, against a dense inverse of P; and the upper bound that it is."""
    gnh = small()
    w = gradients(gnh)
    P = nystrom(gnh, 0.01, rank=7, generator=generator())
    U = torch.cat([t.flatten(1) for t in P.vectors.values()], dim=1).T @ P.correction
    dense = 0.01 * torch.eye(len(U), dtype=DOUBLE) + (U * P.eigenvalues) @ U.T
    found = read_examples(gnh, P, torch.arange(20))
    assert torch.allclose(found.forms, (w.T * torch.linalg.solve(dense, w.T)).sum(0), rtol=1e-9)
    assert float((found.errors / found.forms).max()) < 1e-10
    exact = exact_values(dense_gauss_newton(gnh).matrix, w, 0.01)
    assert bool((exact < found.forms).all())


def test_full_rank_is_exact() -> None:
    gnh = small()
    w = gradients(gnh)
    found = self_influence(gnh, 0.01, rank=gnh.num_parameters, generator=generator())
    exact = exact_values(dense_gauss_newton(gnh).matrix, w, 0.01)
    for values in (found.low, found.values, found.high):
        assert torch.allclose(values, exact, rtol=1e-6)


@pytest.mark.parametrize("product", ["exact", "finite-difference"])
def test_bounds_hold_in_single_precision_with_a_tiny_damping(product: Any) -> None:
    """q is then a small difference of large numbers."""
    wide = small()
    matrix, w = dense_gauss_newton(wide).matrix, gradients(wide)
    damping = float(torch.linalg.eigvalsh(matrix)[-1]) / 1e5
    exact = exact_values(matrix, w, damping)
    found = self_influence(small(torch.float32, product=product), damping, rank=60, generator=generator())
    assert bool((found.low <= exact).all())
    assert bool((exact <= found.high).all())
    assert float((found.high / exact).median()) < 30


def test_losses_predictions_and_effects() -> None:
    gnh = small()
    found = self_influence(gnh, 0.05, rank=8, generator=generator(), positions=torch.tensor([3, 17, 4]))
    x = torch.stack([vectors(DOUBLE)[i][0] for i in (3, 17, 4)])
    y = torch.tensor([vectors(DOUBLE)[i][1] for i in (3, 17, 4)])
    logits = gnh.network.model(x).detach()
    assert found.indices.tolist() == [3, 17, 4]
    assert torch.allclose(found.losses, nn.functional.cross_entropy(logits, y, reduction="none"))
    assert torch.equal(found.labels, y)
    assert torch.equal(found.predictions, logits.argmax(1))
    assert torch.allclose(found.probabilities, logits.softmax(1).amax(1))
    assert torch.allclose(found.effects, found.values / 20)
    assert len(found) == 3


def test_sequences_of_different_lengths() -> None:
    """Self-influence is of the mean loss over a sequence's terms; what its removal does goes with their number."""
    case = next(case for case in CASES if case.name == "attention")
    gnh = GaussNewton(case.model(DOUBLE), LanguageModeling(), sequences(DOUBLE), micro_batch=2)
    matrix, w = dense_gauss_newton(gnh).matrix, gradients(gnh)
    damping = float(torch.linalg.eigvalsh(matrix)[-1]) / 200
    exact = exact_values(matrix, w, damping)
    found = self_influence(gnh, damping, rank=9, generator=generator())
    assert bool((found.low <= exact).all())
    assert bool((exact <= found.high).all())
    assert found.terms.tolist() == [5, 2, 4, 4]
    assert torch.allclose(found.effects, found.values * torch.tensor([5, 2, 4, 4]) / 15)
    assert torch.allclose(found.norms, w.norm(dim=1))
    assert found.labels.tolist() == [-1] * 4
    assert bool(found.probabilities.isnan().all())
    full = self_influence(
        gnh, damping, rank=280, generator=generator()
    )  # 15 terms of 17 classes have no more
    assert torch.allclose(full.values, exact, rtol=1e-4)


def test_regression_has_no_labels_to_doubt() -> None:
    data = [(x, x[:1]) for x, _ in vectors(DOUBLE)]
    torch.manual_seed(0)
    gnh = GaussNewton(nn.Linear(6, 1).double().eval(), Regression(), data)
    found = self_influence(gnh, 0.1, rank=7, generator=generator())
    assert found.labels.tolist() == [-1] * 20
    assert bool((found.values > 0).all())


def test_a_subset_of_the_terms_bounds_the_subset_s_own_values() -> None:
    gnh = small()
    found = self_influence(gnh, 0.02, rank=6, terms=9, generator=generator(5))
    subset = gnh.subset(9, generator(5))  # drawn first, with the same numbers
    eye = torch.eye(gnh.num_parameters, dtype=DOUBLE)
    matrix = Dense(eye, gnh.zeros())
    columns = matrix.flatten(subset.matvec(matrix.unflatten(eye)))
    exact = exact_values(columns, gradients(gnh), 0.02)
    assert found.bounds.operator_terms == 9
    assert bool((found.low <= exact).all())
    assert bool((exact <= found.high).all())


# --- how sure ----------------------------------------------------------------------------------------------


def test_the_measured_end_of_the_spectrum_is_above_the_true_one() -> None:
    """The Ritz value alone is below it; with its probable error it is not, whatever the start."""
    N = 300
    Q = torch.linalg.qr(torch.randn(N, N, generator=generator(), dtype=DOUBLE))[0]
    values = torch.linspace(0.0, 1.0, N, dtype=DOUBLE) ** 6 * 5  # no gap at the top
    H = Dense((Q * values) @ Q.T)
    P = nystrom(H, 0.01, rank=10, generator=generator(1))
    U = P.vectors["x"].T @ P.correction
    dense = 0.01 * torch.eye(N, dtype=DOUBLE) + (U * P.eigenvalues) @ U.T
    largest = float(
        torch.linalg.eigvals(torch.linalg.solve(dense, H.matrix + 0.01 * torch.eye(N))).real.max()
    )
    measured = [
        measure_bounds(P, H, generator=generator(seed), products=12, confidence=0.99) for seed in range(30)
    ]
    assert all(bound.largest >= largest for bound in measured)
    assert max(bound.largest for bound in measured) < 3 * largest
    assert all(0.999 < bound.smallest <= 1 for bound in measured)
    surer = measure_bounds(P, H, generator=generator(0), products=12, confidence=0.9999)
    assert surer.largest > measured[0].largest


def test_exact_solves_of_a_few_estimate_the_scale_without_bias() -> None:
    gnh = small()
    P = nystrom(gnh, 0.01, rank=4, generator=generator())
    found = read_examples(gnh, P, torch.arange(20))
    exact = exact_values(dense_gauss_newton(gnh).matrix, gradients(gnh), 0.01)
    ratios = exact / found.forms
    truth = float(exact.sum() / found.forms.sum())
    scale = calibrate(gnh, P, gnh, found, generator=generator(3), solves=400)
    assert scale is not None
    assert abs(scale.value - truth) < 4 * scale.stderr
    assert scale.stderr < 0.05 * truth
    weights = found.forms / found.forms.sum()
    spread = float(((ratios - truth).square() * weights).sum().sqrt())
    assert abs(scale.spread - spread) < 0.2 * spread
    assert scale.num_products < 20  # all of them share the products


def test_exact_solves_are_in_groups_that_fit_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    gnh = small()
    P = nystrom(gnh, 0.01, rank=4, generator=generator())
    found = read_examples(gnh, P, torch.arange(20))
    together = calibrate(gnh, P, gnh, found, generator=generator(3))
    monkeypatch.setattr(bounds_module, "half_of_memory", lambda device: 8.0 * gnh.num_parameters * 25)
    apart = calibrate(gnh, P, gnh, found, generator=generator(3))
    assert together is not None
    assert apart is not None
    assert apart.value == pytest.approx(together.value, rel=0.01)
    assert apart.num_products > together.num_products


def test_without_exact_solves_the_value_is_the_form() -> None:
    found = self_influence(small(), 0.01, rank=5, exact_solves=0, generator=generator())
    assert found.calibration is None
    assert torch.allclose(found.values, found.high, rtol=1e-6)


def test_the_rank_is_what_memory_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    gnh = small()

    def room(copies: float) -> Callable[[Any], float]:
        return lambda device: copies * 8.0 * gnh.num_parameters

    monkeypatch.setattr(bounds_module, "half_of_memory", room(1000))
    assert affordable_rank(gnh) == (32, 8)
    monkeypatch.setattr(bounds_module, "half_of_memory", room(30))
    assert affordable_rank(gnh) == (20, 3)
    monkeypatch.setattr(bounds_module, "half_of_memory", room(17.9))
    with pytest.raises(OptionError, match="select fewer parameters"):
        affordable_rank(gnh)
    monkeypatch.setattr(bounds_module, "half_of_memory", lambda device: None)
    assert affordable_rank(gnh) == (32, 8)


# --- bad input -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"rank": 0}, "rank is 0"),
        ({"damping": -1.0}, "damping must be a positive number"),
        ({"terms": 0}, "terms is 0"),
        ({"exact_solves": 1}, "solves is 1"),
    ],
    ids=["rank", "damping", "terms", "solves"],
)
def test_impossible_settings_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(OptionError, match=says):
        self_influence(small(), options.pop("damping", 0.1), generator=generator(), **options)


def test_bounds_that_would_mean_nothing_are_refused() -> None:
    gnh = small()
    P = nystrom(gnh, 0.1, rank=8, generator=generator())
    with pytest.raises(OptionError, match="so few bound nothing"):
        measure_bounds(P, gnh, generator=generator(), products=3)
    with pytest.raises(OptionError, match="confidence is 1"):
        measure_bounds(P, gnh, generator=generator(), confidence=1.0)


def test_an_example_with_an_infinite_loss_is_named() -> None:
    class Overflowing(nn.Module):
        """Logits that single precision holds, and whose difference it does not."""

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(1, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) + torch.where(x > 6, torch.tensor([-3e38, 3e38]), torch.zeros(2))

    torch.manual_seed(0)
    data = [(torch.tensor([float(i)]), 0) for i in range(8)]
    model = Overflowing().eval()
    P = nystrom(GaussNewton(model, Classification(), data[:6]), 0.1, rank=2, generator=generator())
    with pytest.raises(DataError, match="the loss of example 7 is inf"):
        read_examples(GaussNewton(model, Classification(), data), P, torch.arange(8))


def test_examples_without_gradient_have_no_scale() -> None:
    nothing = torch.zeros(3, dtype=DOUBLE)
    found = Readings(
        torch.arange(3), torch.ones(3), *[nothing] * 4, torch.arange(3), torch.arange(3), nothing
    )
    gnh = small()
    P = nystrom(gnh, 0.1, rank=2, generator=generator())
    assert calibrate(gnh, P, gnh, found, generator=generator()) is None


# --- digits ----------------------------------------------------------------------------------------------------


@functools.cache
def few_digits() -> tuple[GaussNewton, Tensor, Tensor]:
    """600 digits, one label in twenty flipped, a small network that has learnt them; ∇ℓ(z); which labels are wrong."""
    given, true = (digits.load(flip)[0].tensors for flip in (0.05, 0.0))
    x, y = given[0][:600], given[1][:600]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 24), nn.Tanh(), nn.Linear(24, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, weight_decay=1e-4)
    for _ in range(30):
        for index in torch.randperm(len(x)).split(32):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[index]), y[index]).backward()
            optimizer.step()
    gnh = GaussNewton(model.eval(), Classification(), TensorDataset(x, y))
    return gnh, digits.flatten(gnh.gradients(gnh.terms.data)), y != true[1][:600]


def test_digits() -> None:
    """Rank 30 of 1,810: nearly the exact ranking, and the wrong labels at its top."""
    gnh, w, wrong = few_digits()
    matrix = digits.exact_hessian(gnh.network.model, gnh.terms.data.tensors[0])
    damping = float(torch.linalg.eigvalsh(matrix)[-1]) / 200
    exact = exact_values(matrix, w, damping)
    found = self_influence(gnh, damping, rank=30, generator=generator())
    assert bool((found.low <= exact).all())
    assert bool((exact <= found.high).all())
    correlations = {
        name: float(digits.correlation(values, exact))
        for name, values in (("rank 30", found.values), ("loss", found.losses), ("norm", found.norms))
    }
    assert correlations["rank 30"] > 0.97
    assert correlations["rank 30"] > max(correlations["loss"], correlations["norm"])
    assert abs(float((found.values / exact).median()) - 1) < 0.2  # of P alone it would be more than 2
    assert float((found.high / exact).median()) > 1.5
    for suspicion in (found.values, exact, found.losses, found.norms):
        curve = detection_curve(suspicion, wrong)
        assert curve.found(0.1) > 0.8
        assert curve.found(0.2) > 0.9
        assert curve.found(0.1) > curve.chance(0.1).value + 6 * curve.chance(0.1).stderr


def test_two_approximations_rank_digits_alike() -> None:
    gnh, _, _ = few_digits()
    found = [self_influence(gnh, 0.02, rank=24, generator=generator(seed), exact_solves=0) for seed in (1, 2)]
    assert not torch.equal(found[0].values, found[1].values)
    assert float(digits.correlation(found[0].values, found[1].values)) > 0.97


def test_the_model_is_as_it_was() -> None:
    gnh = small(torch.float32, product="finite-difference")
    before = copy.deepcopy(gnh.network.model.state_dict())
    self_influence(gnh, 0.1, rank=8, generator=generator())
    after = gnh.network.model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(p.grad is None for p in gnh.network.model.parameters())
