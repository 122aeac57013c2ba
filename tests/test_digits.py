"""The whole core on a real problem: digits, an MLP trained here, exact scores from a dense float64 Hessian."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from scipy.stats import t as student
from torch import nn
from torch.utils.data import TensorDataset

from digits import Digits, correlation, load, problem
from whence import (
    Classification,
    Damped,
    GaussNewton,
    Lissa,
    Plan,
    Solution,
    Spectrum,
    estimate_spectrum,
    lanczos,
    sketch,
)
from whence.errors import DivergenceError


@pytest.fixture(scope="module")
def digits() -> Digits:
    return problem()


@pytest.fixture(scope="module")
def spectrum(digits: Digits) -> Spectrum:
    return estimate_spectrum(digits.gnh, generator=torch.Generator().manual_seed(0), probes=400)


def test_spectrum_of_the_digits_model(digits: Digits, spectrum: Spectrum) -> None:
    assert abs(spectrum.trace.value - float(digits.hessian.trace())) <= 4 * spectrum.trace.stderr
    assert abs(spectrum.frobenius.value - float(digits.hessian.norm())) <= 4 * spectrum.frobenius.stderr
    assert spectrum.lambda_max.value == pytest.approx(digits.lambda_max, rel=0.02)
    assert spectrum.sampling_constant is not None
    assert 0.5 < spectrum.sampling_constant.value < 3
    assert spectrum.inconsistencies() == []


def test_lanczos_within_two_percent_in_forty_products(digits: Digits) -> None:
    for seed in range(20):
        found = lanczos(digits.gnh, generator=torch.Generator().manual_seed(seed))
        assert found.num_products <= 40
        assert found.lambda_max.value == pytest.approx(digits.lambda_max, rel=0.02)


@pytest.mark.parametrize(("variant", "dimension"), [("dense", 3200), ("concatenated", 700)])
@pytest.mark.slow
def test_sketches_within_five_percent(digits: Digits, variant: str, dimension: int) -> None:
    result = sketch(digits.gnh, dimension=dimension, seed=0, variant=variant, at_once=100)
    assert result.lambda_max.value == pytest.approx(digits.lambda_max, rel=0.05)
    assert abs(result.lambda_max.value - digits.lambda_max) <= 2 * result.lambda_max.stderr


@pytest.fixture(scope="module")
def solved(digits: Digits, spectrum: Spectrum) -> Callable[[float], list[Solution]]:
    """Three solves of four chains under the paper's plan, for every condition number once."""

    @functools.cache
    def solve(kappa: float) -> list[Solution]:
        damping = digits.lambda_max / kappa
        solver = Lissa(Plan.from_spectrum(spectrum, damping))
        return [
            solver.solve(
                Damped(digits.gnh, damping), digits.queries, generator=torch.Generator().manual_seed(seed)
            )
            for seed in range(3)
        ]

    return solve


@pytest.mark.parametrize("kappa", [10, 100])
def test_correlation_with_exact_scores(
    digits: Digits, spectrum: Spectrum, solved: Callable[[float], list[Solution]], kappa: float
) -> None:
    """One chain at the plan's cost reaches 0.96; four times that, 0.995; on average over seeds."""
    damping = digits.lambda_max / kappa
    exact, train = digits.exact_scores(damping), digits.train_block()
    longer = Lissa(Plan.from_spectrum(spectrum, damping, chains=2).refined(4)).solve(
        Damped(digits.gnh, damping), digits.queries, generator=torch.Generator().manual_seed(0)
    )
    means = []
    for solutions in (solved(kappa), [longer]):
        assert all(solution.stats.events == () for solution in solutions)
        chains = [chain for solution in solutions for chain in solution.chains]
        means.append(
            float(torch.stack([correlation(chain.gram(train), exact).mean() for chain in chains]).mean())
        )
    assert means[0] >= 0.96
    assert means[1] >= 0.995


def test_averaging_beats_the_last_iterate_and_the_gradient_dot_product(
    digits: Digits, spectrum: Spectrum
) -> None:
    damping = digits.lambda_max / 100
    exact, train = digits.exact_scores(damping), digits.train_block()
    plan = Plan.from_spectrum(spectrum, damping, chains=1)
    scores = {}
    for average in ("tail", "last"):
        solution = Lissa(plan, average=average).solve(
            Damped(digits.gnh, damping), digits.queries, generator=torch.Generator().manual_seed(0)
        )
        scores[average] = float(correlation(solution.value.gram(train), exact).mean())
    dot_product = float(correlation(digits.queries.gram(train), exact).mean())
    assert scores["tail"] > scores["last"] + 0.03
    assert scores["tail"] > dot_product + 0.3


@pytest.mark.parametrize("kappa", [10, 100])
def test_intervals_cover_the_exact_scores(
    digits: Digits, solved: Callable[[float], list[Solution]], kappa: float
) -> None:
    exact, train = digits.exact_scores(digits.lambda_max / kappa), digits.train_block()
    coverage = []
    for solution in solved(kappa):
        value, stderr = solution.project(train)
        width = student.ppf(0.975, solution.degrees_of_freedom) * stderr
        coverage.append(((value - exact).abs() <= width).double().mean())
        assert bool(solution.converged.all())
    assert 0.90 <= float(torch.stack(coverage).mean()) <= 0.99


@pytest.mark.parametrize("kappa", [10, 100])
def test_a_tenth_of_the_batch_diverges(digits: Digits, spectrum: Spectrum, kappa: float) -> None:
    damping = digits.lambda_max / kappa
    plan = Plan.from_spectrum(spectrum, damping, chains=4)
    small = plan.replace(batch_size=max(1, plan.batch_size // 10))
    with pytest.raises(DivergenceError, match="too small"):
        Lissa(small, recover=False).solve(
            Damped(digits.gnh, damping), digits.queries, generator=torch.Generator().manual_seed(0)
        )


def test_finite_difference_lissa_is_as_good_as_exact(digits: Digits, spectrum: Spectrum) -> None:
    """One-sided random-sign differences inside a whole solve: no visible bias against exact products."""
    damping = digits.lambda_max / 10
    exact, train = digits.exact_scores(damping), digits.train_block()
    plan = Plan.from_spectrum(spectrum, damping, chains=2).refined(4)
    queries = digits.queries.unstack()[:3]
    block = type(digits.queries).stack(queries)
    by_product = {}
    for product in ("exact", "finite-difference"):
        gnh = GaussNewton(digits.model, Classification(), digits.train, product=product)
        solution = Lissa(plan).solve(Damped(gnh, damping), block, generator=torch.Generator().manual_seed(0))
        by_product[product] = solution.value.gram(train)
    # The same seed draws the same batches, so the two differ by the differences' own noise alone.
    assert float(correlation(*by_product.values()).min()) > 0.9995
    assert float(correlation(by_product["finite-difference"], exact[:3]).mean()) > 0.99


@pytest.fixture(scope="module")
def convnet() -> GaussNewton:
    train, _ = load()
    x, y = train.tensors
    images = x.reshape(-1, 1, 8, 8)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 10)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(8):
        for index in torch.randperm(len(x)).split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[index]), y[index]).backward()
            optimizer.step()
    return GaussNewton(model.eval(), Classification(), TensorDataset(images, y))


def test_lanczos_on_a_trained_convnet(convnet: GaussNewton) -> None:
    from scipy.sparse.linalg import eigsh

    from digits import exact_hessian

    H = exact_hessian(convnet.network.model, convnet.terms.data.tensors[0])
    true = float(eigsh(H.numpy(), k=1, return_eigenvectors=False)[0])
    found = lanczos(convnet, generator=torch.Generator().manual_seed(0))
    assert found.num_products <= 40
    assert found.lambda_max.value == pytest.approx(true, rel=0.02)
