"""The spectral density against dense eigenvalues, and its forecasts against what they foretell."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from digits import correlation, exact_hessian, flatten, load
from whence import (
    Classification,
    ConjugateGradient,
    Damped,
    Dense,
    Estimate,
    FiniteSum,
    GaussNewton,
    ParamVector,
    Spectrum,
    estimate_spectrum,
)
from whence.errors import OptionError, SolverError
from whence.preconditioners import nystrom
from whence.solvers import CGState
from whence.spectrum import Density, spectral_density
from whence.spectrum import density as module


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64)


def prescribed(values: Tensor) -> Dense:
    Q = torch.linalg.qr(normal(len(values), len(values), seed=1))[0]
    return Dense(Q @ torch.diag(values) @ Q.T)


def power_law(n: int, exponent: float = 1.2) -> Tensor:
    return torch.arange(1, n + 1, dtype=torch.float64) ** -exponent


def dimension(values: Tensor, damping: float) -> float:
    return float((values / (values + damping)).sum())


def second_dimension(values: Tensor, damping: float) -> float:
    return float((values / (values + damping)).square().sum())


def expected_agreement(values: Tensor, a: float, b: float) -> float:
    def common(x: float, y: float) -> float:
        return float((values.square() / ((values + x) * (values + y))).sum())

    return common(a, b) / math.sqrt(common(a, a) * common(b, b))


# --- quadratures -------------------------------------------------------------------------------------------------


def test_a_whole_space_gives_every_trace_exactly() -> None:
    values = power_law(20)
    density = spectral_density(prescribed(values), generator=generator(), products=20)
    assert (density.found, density.num_parameters, density.num_products) == (20, 20, 80)
    for nodes, weights in density.rules:
        torch.testing.assert_close(weights.sum(1), torch.full((4,), 20.0, dtype=torch.float64))
        torch.testing.assert_close(nodes[:, 0], values[:1].expand(4))  # four probes
    for damping in (0.3, 0.01):
        close = pytest.approx(dimension(values, damping), rel=1e-8)
        assert density.dimension(damping).value == close
        assert density.dimension_bounds(damping) == (close, close)
        assert density.second_dimension(damping).value == pytest.approx(second_dimension(values, damping))
        assert density.agreement(damping, 0.1).value == pytest.approx(
            expected_agreement(values, damping, 0.1)
        )
    entropy = density.trace_of(lambda x: (1 + x).log())
    assert entropy.value == pytest.approx(float((1 + values).log().sum()))
    assert entropy.stderr <= 1e-7


def test_estimates_are_unbiased_and_their_errors_cover() -> None:
    values = power_law(300)
    A = prescribed(values)
    dampings = (0.1, 0.01)
    runs = [spectral_density(A, generator=generator(seed), products=20) for seed in range(30)]
    for name, truth in (("dimension", dimension), ("second_dimension", second_dimension)):
        for damping in dampings:
            found = [getattr(run, name)(damping) for run in runs]
            true = truth(values, damping)
            mean = Estimate.from_samples([estimate.value for estimate in found])
            assert abs(mean.value - true) <= 4 * mean.stderr
            # Three degrees of freedom: 4 standard errors leave out 3%.
            assert sum(abs(e.value - true) <= 4 * e.stderr for e in found) >= 27


def test_counting_found_eigenvalues_once_takes_their_variance_away() -> None:
    values = torch.cat([torch.tensor([10.0, 7.0, 5.0, 3.0]).double(), 0.05 * power_law(96)])
    A, plain, counted = prescribed(values), [], []
    for seed in range(30):
        density = spectral_density(A, generator=generator(seed), products=12)
        assert density.found >= 4
        counted.append(density.second_dimension(1.0).value)
        g = generator(seed)
        signs = ParamVector.stack([A.zeros().rademacher_like(g) for _ in range(4)])
        nodes, weights = module.Krylov.span(A, signs, products=12, keep_basis=True).gauss()
        plain.append(float((weights * (nodes / (nodes + 1)).square()).sum()) / 4)
    assert np.std(plain) > 0.3
    assert np.std(counted) < 0.02 * np.std(plain)


@pytest.mark.parametrize("multiplicity", [2, 3])
def test_an_eigenvalue_counts_as_often_as_it_is_there(multiplicity: int) -> None:
    top = torch.tensor([9.0] + [4.0] * multiplicity + [2.0]).double()
    values = torch.cat([top, 0.01 * power_law(60)])
    A = prescribed(values)
    density = spectral_density(A, generator=generator(3), products=8)
    assert density.found >= len(top)
    for nodes, weights in density.rules:
        torch.testing.assert_close(nodes[:, : len(top)], top.expand(4, -1), rtol=1e-6, atol=0)
        assert bool((weights[:, : len(top)] == 1).all())
    # Many more products breed copies out of rounding: then nothing is taken for granted, and nothing is wrong.
    runs = [spectral_density(A, generator=generator(seed), products=30) for seed in range(10)]
    mean = Estimate.from_samples([run.second_dimension(1.0).value for run in runs])
    assert abs(mean.value - second_dimension(values, 1.0)) <= 4 * mean.stderr + 1e-6


def test_a_multiplicity_that_the_starts_cannot_show_is_left_to_the_weights() -> None:
    values = torch.cat([torch.full((7,), 4.0), torch.zeros(53)]).double()
    runs = [spectral_density(prescribed(values), generator=generator(seed)) for seed in range(20)]
    assert all(run.found == 0 for run in runs)
    mean = Estimate.from_samples([run.dimension(4.0).value for run in runs])
    assert abs(mean.value - 3.5) <= 4 * mean.stderr
    assert mean.stderr < 0.2


@pytest.mark.parametrize("rank", [40, 5], ids=["full", "low-rank"])
def test_the_two_rules_bracket_the_effective_dimension_of_every_start(rank: int) -> None:
    values = 2.0 ** (-0.5 * torch.arange(40, dtype=torch.float64))
    values[rank:] = 0
    A, rows = prescribed(values), normal(4, 40, seed=5)
    for damping in (0.5, 0.05, 0.005, 0.0002):
        solved = torch.linalg.solve(A.matrix + damping * torch.eye(40, dtype=torch.float64), rows.T).T
        exact = (rows @ A.matrix * solved).sum(1)
        widths = []
        for products in (1, 3, 6, 12, 40):
            block = ParamVector({"x": rows}, columns=4)
            space = module.Krylov.span(A, block, products=products, keep_basis=True)
            upper, lower = (
                (weights * nodes / (nodes + damping)).sum(1)
                for nodes, weights in (space.gauss(), space.radau())
            )
            assert bool((lower <= exact * (1 + 1e-6)).all())
            assert bool((upper >= exact * (1 - 1e-6)).all())
            widths.append(float((upper - lower).max()))
        assert all(after <= before + 1e-6 for before, after in pairwise(widths))
        assert widths[-1] <= 1e-5


def test_too_short_a_quadrature_is_bracketed_and_part_of_the_error() -> None:
    values = power_law(200, 2.0)
    density = spectral_density(prescribed(values), generator=generator(), products=4, probes=40)
    for damping in (1e-2, 1e-4):
        true = dimension(values, damping)
        lower, upper = density.dimension_bounds(damping)
        over_probes = 4 * float(density._by_rule(lambda x, d=damping: x / (x + d)).mean(0).std()) / 40**0.5
        assert lower - over_probes <= true <= upper + over_probes
        estimate = density.dimension(damping)
        assert estimate.value == pytest.approx(0.5 * (lower + upper))
        assert abs(estimate.value - true) <= 4 * estimate.stderr
    assert upper - lower > 10  # or the bracket would have nothing to cover
    assert estimate.stderr >= 0.5 * (upper - lower)


def test_one_probe_has_no_error_bar_and_counts_nothing_once() -> None:
    density = spectral_density(prescribed(power_law(30)), generator=generator(), probes=1)
    assert density.found == 0
    for estimate in (
        density.dimension(0.1),
        density.agreement(0.1, 0.2),
        density.sampling_error(0.1, 100),
    ):
        assert math.isinf(estimate.stderr)


def test_without_room_for_a_basis_three_vectors_do(monkeypatch: pytest.MonkeyPatch) -> None:
    values = power_law(100)
    A, g = prescribed(values), generator()
    signs = ParamVector.stack([A.zeros().rademacher_like(g) for _ in range(4)])
    nodes, weights = module.Krylov.span(A, signs, products=30, keep_basis=True).gauss()
    monkeypatch.setattr(module, "BASIS_BUDGET", 1)
    density = spectral_density(A, generator=generator(), products=30)
    assert (density.found, density.num_products) == (0, 120)
    for damping in (0.1, 0.001):
        same = (weights * nodes / (nodes + damping)).sum(1).mean()
        assert density.dimension_bounds(damping)[1] == pytest.approx(float(same), rel=1e-4)
    small = spectral_density(prescribed(power_law(6)), generator=generator(), products=30)
    assert abs(small.dimension(0.1).value - dimension(power_law(6), 0.1)) <= 4 * small.dimension(0.1).stderr


# --- what follows for scores -------------------------------------------------------------------------------------


def test_agreement_is_the_correlation_of_simulated_scores() -> None:
    values = power_law(150)
    density = spectral_density(prescribed(values), generator=generator(), probes=8)
    g, w = (normal(3000, 150, seed=seed) * values.sqrt() for seed in (5, 6))
    scores = {damping: ((g / (values + damping)) * w).sum(1) for damping in (0.5, 0.05, 0.005)}
    for a, b in ((0.5, 0.05), (0.05, 0.005), (0.5, 0.005)):
        simulated = float(correlation(scores[a], scores[b]))
        estimate = density.agreement(a, b)
        assert abs(estimate.value - simulated) <= 0.03 + 3 * estimate.stderr
        assert estimate.value == density.agreement(b, a).value
    assert density.agreement(0.5, 0.005).value < 0.8
    assert density.agreement(0.05, 0.05).value == pytest.approx(1)


def rank_ones(count: int, values: Tensor, seed: int = 2) -> tuple[FiniteSum, Tensor]:
    x = normal(count, len(values), seed=seed) * values.sqrt()
    return FiniteSum(torch.einsum("ci,cj->cij", x, x)), x


def test_sampling_error_of_solutions_on_subsets() -> None:
    """Normal rank-one terms: C is 1, but for one direction in d₂ and for second order in d/m."""
    damping, m = 0.05, 600
    A, x = rank_ones(4000, power_law(30))
    H = A.mean.matrix
    eye = torch.eye(30, dtype=torch.float64)
    density = spectral_density(A, generator=generator(), products=30, terms=None)
    g = normal(40, 4000, seed=7) @ x / math.sqrt(4000)  # of covariance H
    u = torch.linalg.solve(H + damping * eye, g.T)
    errors = []
    draw = generator(8)
    for _ in range(40):
        sampled = A.subset(m, draw).matrix
        e = torch.linalg.solve(sampled + damping * eye, g.T) - u
        errors.append(((e * (H @ e)).sum(0) / (u * (H @ u)).sum(0)).mean())
    measured = float(torch.stack(errors).mean().sqrt())
    predicted = density.sampling_error(damping, m, C=1.0).value
    assert predicted < 0.2
    assert 0.95 * predicted <= measured <= 1.2 * predicted
    assert density.sampling_error(damping, m).value == pytest.approx(math.sqrt(2) * predicted)


def test_sampling_error_of_averaged_iterates() -> None:
    """Steps with one normal rank-one term each: the average of N of them is as good as a solution on N terms."""
    values, damping, step = power_law(8), 0.2, 0.05
    density = spectral_density(prescribed(values), generator=generator(), products=8)
    draw, chains, N = generator(9), 200, 3000
    g = normal(chains, 8, seed=10) * values.sqrt()
    exact = g / (values + damping)
    u, average = exact.clone(), torch.zeros_like(g)
    for _ in range(N):
        x = torch.randn(chains, 8, generator=draw, dtype=torch.float64) * values.sqrt()
        u -= step * (x * (x * u).sum(1, keepdim=True) + damping * u - g)
        average += u / N
    ratio = ((average - exact).square() * values).sum(1) / (exact.square() * values).sum(1)
    predicted = density.sampling_error(damping, N, C=1.0).value
    assert 0.9 * predicted <= float(ratio.mean().sqrt()) <= 1.4 * predicted


def test_a_subset_is_declared_and_its_dimension_is_too_small() -> None:
    """For terms of rank one, d of m terms at λ is about d of all at λ/(1 - d/m)."""
    damping, m = 0.02, 60
    A, _ = rank_ones(1500, power_law(30))
    values = torch.linalg.eigvalsh(A.mean.matrix)
    runs = [spectral_density(A, generator=generator(seed), products=30, terms=m) for seed in range(20)]
    assert all((run.num_terms, run.data_terms) == (m, 1500) for run in runs)
    found = Estimate.from_samples([run.dimension(damping).value for run in runs])
    assert found.value + 10 * found.stderr < dimension(values, damping)
    shifted = damping / (1 - found.value / m)
    assert found.value == pytest.approx(dimension(values, shifted), rel=0.05)
    top = Estimate.from_samples([float(run.gauss_nodes.max()) for run in runs])
    assert top.value > float(values[-1])
    whole = spectral_density(A, generator=generator(), terms=1500)
    assert (whole.num_terms, whole.data_terms) == (1500, 1500)


SPECTRA = {
    "power law": power_law(400),
    "steep": power_law(400, 2.0),
    "outliers": torch.cat([torch.tensor([20.0, 9.0, 8.0, 3.0, 2.0]).double(), 0.3 * power_law(395, 0.7)]),
    "flat": torch.linspace(2.0, 0.5, 400, dtype=torch.float64),
    "low rank": torch.cat([power_law(12, 1.0), torch.zeros(388, dtype=torch.float64)]),
}


# --- digits ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class SmallDigits:
    gnh: GaussNewton
    values: Tensor
    gradients: ParamVector  # of 64 test images
    queries: Tensor  # the same in the eigenbasis
    train: Tensor


@pytest.fixture(scope="module")
def digits() -> SmallDigits:
    train, test = load()
    x, y = (tensor[:300] for tensor in train.tensors)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 12), nn.Tanh(), nn.Linear(12, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(150):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    gnh = GaussNewton(model.eval(), Classification(), TensorDataset(x, y))
    values, vectors = torch.linalg.eigh(exact_hessian(model, x))
    gradients = gnh.gradients([test[i] for i in range(64)])
    return SmallDigits(
        gnh,
        values.clamp_min(0.0),
        gradients,
        flatten(gradients) @ vectors,
        flatten(gnh.gradients([(x[i], y[i]) for i in range(300)])) @ vectors,
    )


@pytest.fixture(scope="module")
def measured(digits: SmallDigits) -> Density:
    return spectral_density(digits.gnh, generator=generator())


def test_dimensions_of_digits(digits: SmallDigits, measured: Density) -> None:
    top = float(digits.values.max())
    assert float(measured.gauss_nodes.max()) == pytest.approx(top, rel=1e-4)
    assert measured.found >= 5
    for kappa in (10, 100, 1000):
        for estimate, true in (
            (measured.dimension(top / kappa), dimension(digits.values, top / kappa)),
            (measured.second_dimension(top / kappa), second_dimension(digits.values, top / kappa)),
        ):
            assert abs(estimate.value - true) <= 4 * estimate.stderr
            assert estimate.stderr <= 0.15 * true


def test_agreement_of_the_scores_of_digits(digits: SmallDigits, measured: Density) -> None:
    """Real gradients of test and training images, which are neither normal nor exactly of covariance H."""
    dampings = {kappa: float(digits.values.max()) / kappa for kappa in (5, 20, 100, 500)}
    scores = {kappa: (digits.queries / (digits.values + d)) @ digits.train.T for kappa, d in dampings.items()}
    for a, b in ((5, 20), (20, 100), (100, 500), (5, 100), (20, 500)):
        true = float(correlation(scores[a], scores[b]).mean())
        assert measured.agreement(dampings[a], dampings[b]).value == pytest.approx(true, abs=0.08)
    assert true < 0.92


# --- conjugate gradients -----------------------------------------------------------------------------------------


def galerkin_iterations(
    values: Tensor, rhs: Tensor, damping: float, tolerance: float, P: Tensor | None = None
) -> int:
    """Iterations of block CG, found as projections on an orthonormal basis of the block Krylov space.

    With a diagonal P, in the coordinates ``P^(1/2)u``; the error in the norm of A and the scores' size are u's own.
    """
    scale = ((rhs / (values + damping)).square() * values).sum(1)
    P = torch.ones_like(values) if P is None else P
    A, rhs = (values + damping) / P, rhs / P.sqrt()
    exact = rhs / A
    V = torch.linalg.qr(rhs.T)[0]
    block = V
    for iteration in range(1, 200):
        u = (V @ torch.linalg.solve((V.T * A) @ V, V.T @ rhs.T)).T
        if float((((u - exact).square() * A).sum(1) / scale).mean()) <= tolerance**2:
            return iteration
        block = A.unsqueeze(1) * block
        for _ in range(2):
            block = torch.linalg.qr(block - V @ (V.T @ block))[0]
        V = torch.cat([V, block], dim=1)
    raise AssertionError("no convergence")


@pytest.mark.parametrize("columns", [1, 4, 16])
@pytest.mark.parametrize("name", ["power law", "steep", "outliers"])
def test_iterations_of_block_cg(name: str, columns: int) -> None:
    """Without and with a P that has H's own largest eigenvalues."""
    values = SPECTRA[name]
    spectrum = estimate_spectrum(prescribed(values), generator=generator(), measure_constant=False)
    for kappa in (10, 300):
        damping = float(values.max()) / kappa
        rows = [normal(columns, 400, seed=40 + i) * values.sqrt() for i in range(4)]
        for deflated in (0, 3, 20):
            P = torch.full_like(values, damping)
            P[:deflated] += values[:deflated]
            true = np.mean([galerkin_iterations(values, rhs, damping, 0.2, P) for rhs in rows])
            found = spectrum.cg_iterations(damping, columns, deflated=deflated)
            assert abs(found - true) <= max(1.2, 0.25 * true)


@cache
def measured_often(digits: SmallDigits) -> list[Spectrum]:
    """Single predictions are off by a fifth, as the spectrum is measured on few products: their mean is judged."""
    return [
        estimate_spectrum(digits.gnh, generator=generator(seed), measure_constant=False) for seed in range(48)
    ]


@pytest.mark.parametrize("columns", [1, 8, 32])
def test_iterations_on_the_gradients_of_digits(digits: SmallDigits, columns: int) -> None:
    spectra = measured_often(digits)
    for kappa in (10, 100, 1000):
        damping = float(digits.values.max()) / kappa
        groups = digits.queries[: max(columns, 8)].split(columns)
        true = np.mean([galerkin_iterations(digits.values, rhs, damping, 0.2) for rhs in groups])
        found = np.mean([spectrum.cg_iterations(damping, columns) for spectrum in spectra])
        assert abs(found - true) <= max(1.2, 0.3 * true)


@pytest.mark.parametrize("terms", [300, 75])
def test_nystrom_does_as_much_as_half_of_its_rank(digits: SmallDigits, terms: int) -> None:
    """For single queries, with P from all terms or from a quarter of them."""
    spectra = measured_often(digits)
    for kappa, rank in ((100, 10), (1000, 10), (1000, 24)):
        damping = float(digits.values.max()) / kappa
        system, taken = Damped(digits.gnh, damping), []
        for seed in range(4):
            P = nystrom(digits.gnh, damping, rank=rank, terms=terms, generator=generator(seed))
            flat = digits.queries[seed]
            whole = float((flat.square() / (digits.values + damping)).sum())  # gᵀu*
            size = float((flat.square() * digits.values / (digits.values + damping).square()).sum())

            def near(state: CGState, whole: float = whole, size: float = size) -> bool:
                return whole - state.path[-1][0] <= 0.2**2 * size  # ‖e‖²_A = gᵀu* - gᵀx

            solver = ConjugateGradient(tolerance=1e-3, preconditioner=P, verify=False)
            rhs = digits.gradients.column(seed)
            solution = solver.solve(system, rhs, generator=generator(), on_step=near)
            taken.append(solution.num_products)
        half = np.mean([spectrum.cg_iterations(damping, deflated=P.settled) for spectrum in spectra])
        assert abs(half - np.mean(taken)) <= max(1.2, 0.35 * np.mean(taken))
        assert np.mean([spectrum.cg_iterations(damping) for spectrum in spectra]) > 1.3 * half


# --- errors --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gauss_nodes": [[1.0, -1.0]]}, "zero or positive"),
        ({"gauss_weights": [[1.0, math.nan]]}, "zero or positive"),
        ({"gauss_nodes": [[0.0, 0.0]]}, "not all zero"),
        ({"gauss_weights": [[1.0, 2.0, 3.0]]}, "one shape"),
        ({"gauss_nodes": [[1.0, 2.0]] * 2, "gauss_weights": [[1.0, 2.0], [1.0, 5.0]]}, "add up"),
        ({"radau_nodes": [[1.0]]}, "both nodes and weights"),
    ],
)
def test_what_is_no_density_is_refused(changes: dict[str, list[list[float]]], message: str) -> None:
    values = {"gauss_nodes": [[1.0, 0.5]], "gauss_weights": [[1.0, 2.0]], **changes}
    with pytest.raises(OptionError, match=message):
        Density(**{name: torch.tensor(rows, dtype=torch.float64) for name, rows in values.items()})


def test_bad_options_are_named() -> None:
    A, g = prescribed(power_law(5)), generator()
    with pytest.raises(OptionError, match="operator itself"):
        spectral_density(Damped(A, 1.0), generator=g)
    for name in ("probes", "products", "terms"):
        with pytest.raises(OptionError, match=name):
            spectral_density(A, generator=g, **{name: 0})
    with pytest.raises(SolverError, match="every product is zero"):
        spectral_density(Dense(torch.zeros(3, 3)), generator=g)
    density = spectral_density(A, generator=g)
    for call in (
        lambda: density.dimension(0.0),
        lambda: density.agreement(1.0, -1.0),
        lambda: density.second_dimension(math.nan),
    ):
        with pytest.raises(OptionError, match="damping must be a positive number"):
            call()
    with pytest.raises(OptionError, match="terms must be at least 1"):
        density.sampling_error(0.1, 0)
