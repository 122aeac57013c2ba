"""Spectrum estimators against matrices with prescribed spectra."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from dense import relative_error
from whence import (
    ConvexLoss,
    Dense,
    Estimate,
    FiniteSum,
    GaussNewton,
    ParamVector,
    Spectrum,
    estimate_spectrum,
    lanczos,
    sketch,
)
from whence.errors import OptionError, SolverError, WhenceWarning
from whence.spectrum import (
    frobenius_from_products,
    sampling_constant,
    spectral_density,
    trace_and_frobenius_from_gradients,
    trace_from_quadratic_forms,
)
from whence.spectrum.lanczos import BlockLanczos, tridiagonal


def rotation(n: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64))[0]


def prescribed(values: Tensor, shapes: dict[str, tuple[int, ...]] | None = None) -> Dense:
    Q = rotation(len(values))
    template = None
    if shapes is not None:
        template = ParamVector({n: torch.zeros(s, dtype=torch.float64) for n, s in shapes.items()})
    return Dense(Q @ torch.diag(values) @ Q.T, template)


def decaying(n: int) -> Tensor:
    return 1.0 / torch.arange(1, n + 1, dtype=torch.float64)


def rank_ones(count: int = 60, n: int = 8, seed: int = 1) -> FiniteSum:
    x = torch.randn(count, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    x = x * torch.linspace(2.0, 0.3, n, dtype=torch.float64)
    return FiniteSum(torch.einsum("ci,cj->cij", x, x))


def within(estimate: Estimate, true: float, errors: float = 4.0) -> bool:
    return abs(estimate.value - true) <= errors * estimate.stderr


# --- moments ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [None, 1, 7])
def test_trace_from_quadratic_forms(batch_size: int | None) -> None:
    A = rank_ones()
    g = torch.Generator().manual_seed(0)
    trace = trace_from_quadratic_forms(A, probes=2000, batch_size=batch_size, generator=g)
    assert within(trace, float(A.mean.matrix.trace()))
    assert trace.stderr < 0.05 * trace.value


def test_frobenius_from_two_batches_is_unbiased_where_one_batch_is_not() -> None:
    A = rank_ones()
    g = torch.Generator().manual_seed(0)
    true = float(A.mean.matrix.norm())
    assert within(frobenius_from_products(A, probes=4000, batch_size=2, generator=g), true)
    one_batch = Estimate.from_samples(
        [float((m := A.sample(2, g).matvec(A.zeros().randn_like(g))).dot(m)) for _ in range(4000)]
    ).sqrt()
    assert one_batch.value > true + 10 * one_batch.stderr


def test_sampled_gradients_give_trace_and_frobenius() -> None:
    A = rank_ones()
    g = torch.Generator().manual_seed(0)
    trace, frobenius = trace_and_frobenius_from_gradients(A, probes=8000, batch_size=3, generator=g)
    assert within(trace, float(A.mean.matrix.trace()))
    assert within(frobenius, float(A.mean.matrix.norm()))
    assert frobenius.stderr < 0.1 * frobenius.value


@pytest.mark.parametrize("batch_size", [1, 6])
def test_sampling_constant_equals_its_closed_form(batch_size: int) -> None:
    """For independent draws, E Tr H̃² - Tr H² = (E Tr H_i² - Tr H²)/|B|, whatever |B|."""
    A = rank_ones()
    trace = float(A.mean.matrix.trace())
    single = float(torch.einsum("cij,cji->c", A.matrices, A.matrices).mean())
    true = (single - float(A.mean.matrix.norm()) ** 2) / trace**2
    g = torch.Generator().manual_seed(0)
    measured = sampling_constant(A, Estimate(trace), probes=4000, batch_size=batch_size, generator=g)
    assert within(measured, true)
    assert measured.stderr < 0.05 * true


def test_estimators_hold_on_a_network() -> None:
    from zoo import PLAIN

    case = PLAIN[0]
    gnh = GaussNewton(case.model(torch.float64), case.task, case.data(torch.float64))
    from dense import dense_gauss_newton

    H = dense_gauss_newton(gnh).matrix
    g = torch.Generator().manual_seed(0)
    trace, frobenius = trace_and_frobenius_from_gradients(gnh, probes=600, batch_size=10, generator=g)
    assert within(trace, float(H.trace()))
    assert within(frobenius, float(H.norm()))
    assert within(trace_from_quadratic_forms(gnh, probes=200, batch_size=10, generator=g), float(H.trace()))


# --- Lanczos ---------------------------------------------------------------------------------------------------


class Diagonal:
    """P, a diagonal matrix."""

    def __init__(self, values: Tensor) -> None:
        self.values = values

    def solve(self, vector: ParamVector) -> ParamVector:
        return ParamVector({"x": vector["x"] / self.values}, columns=vector.columns)


def rows(count: int, n: int, seed: int = 7) -> Tensor:
    return torch.randn(count, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("keep_basis", [True, False])
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_block_lanczos_is_a_decomposition(weighted: bool, keep_basis: bool) -> None:
    """``A Z = V T + V_{j+1} β Eᵀ`` and ``VᵀP⁻¹V = I``; with a basis to the last digit after many steps, too."""
    n, q, steps = 60, 3, 15 if keep_basis else 4
    A, P = prescribed(decaying(n)), Diagonal(torch.linspace(0.5, 2.0, n).double()) if weighted else None
    state, beta, _ = BlockLanczos.begin(ParamVector({"x": rows(q, n)}, columns=q), P, keep_basis=keep_basis)
    V = [state.current]
    torch.testing.assert_close(V[0]["x"].T @ beta, rows(q, n).T)
    for _ in range(steps):
        state.step(A, P)
        V.append(state.current)
    Q = torch.cat([block["x"] for block in V]).T
    Z = Q if P is None else Q / P.values.unsqueeze(1)
    error = (Z.T @ Q - torch.eye(Q.shape[1])).abs().max()
    assert float(error) <= (1e-13 if keep_basis else 1e-9)
    torch.testing.assert_close(A.matrix @ Z[:, : q * steps], Q @ state.T.extended(), rtol=0, atol=1e-9)
    if keep_basis:
        assert [v for v, _ in state.basis] == V[:-1]


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_columns_apart_are_single_vectors_side_by_side(weighted: bool) -> None:
    n = 40
    A, P = prescribed(decaying(n)), Diagonal(torch.linspace(0.5, 2.0, n).double()) if weighted else None
    given = rows(3, n)
    starts = [ParamVector({"x": given}, columns=3), *(ParamVector({"x": row}) for row in given)]
    found = []
    for start in starts:
        state, beta, _ = BlockLanczos.begin(start, P, apart=True, keep_basis=True)
        for _ in range(10):
            state.step(A, P)
        found.append((beta, *state.T.columns()))
    torch.testing.assert_close(given, rows(3, n), rtol=0, atol=0)  # the starts stay as they are
    for together, *alone in zip(*found, strict=True):
        torch.testing.assert_close(together, torch.stack(alone))
    one, _, _ = BlockLanczos.begin(ParamVector({"x": given[:1]}, columns=1), P)
    for _ in range(10):
        one.step(A, P)
    torch.testing.assert_close(
        one.T.extended()[:10], tridiagonal(found[1][1], found[1][2]), atol=1e-9, rtol=0
    )


def test_what_rounding_cannot_tell_from_zero_is_left_out() -> None:
    A = prescribed(torch.tensor([4.0, 2.0, 1.0, 0.0, 0.0, 0.0]).double())
    twice = ParamVector({"x": rows(1, 6).expand(2, 6)}, columns=2)
    state, beta, _ = BlockLanczos.begin(twice)
    assert (state.current.columns, beta.shape) == (1, (1, 2))  # equal columns are one
    top = torch.linalg.eigh(A.matrix)[1][:, -1]
    apart, _, _ = BlockLanczos.begin(
        ParamVector({"x": torch.stack([top, rows(1, 6)[0]])}, columns=2), apart=True
    )
    state.step(A)
    apart.step(A)
    assert float(apart.T.below[0][0]) == 0.0  # an eigenvector's space is exhausted at once
    assert float(apart.current["x"][0].abs().max()) == 0.0  # and goes on with zeros
    for _ in range(3):  # three eigenvalues and the part without any
        state.step(A)
    assert float(state.T.below[-1].norm()) <= 1e-13
    torch.testing.assert_close(
        torch.linalg.eigvalsh(state.T.extended()[:4]), torch.tensor([0.0, 1.0, 2.0, 4.0]).double()
    )


def test_products_without_numbers_are_refused() -> None:
    for call in (
        lambda A: lanczos(A, generator=torch.Generator().manual_seed(0)),
        lambda A: spectral_density(A, generator=torch.Generator().manual_seed(0)),
    ):
        with pytest.raises(SolverError, match="NaN or infinity"):
            call(Dense(torch.full((4, 4), math.nan)))


@pytest.mark.parametrize("keep_basis", [True, False])
def test_lanczos_finds_the_top_of_a_known_spectrum(keep_basis: bool) -> None:
    A = prescribed(decaying(200))
    found = lanczos(A, generator=torch.Generator().manual_seed(0), keep_basis=keep_basis, relative_error=1e-8)
    torch.testing.assert_close(found.eigenvalues[:2], decaying(2), rtol=1e-4, atol=0)
    assert found.lambda_max.value <= 1 + 1e-12
    assert abs(found.lambda_max.value - 1) <= found.lambda_max.stderr + 1e-12
    assert found.num_products <= 40


def test_lanczos_without_a_basis_reports_each_eigenvalue_once() -> None:
    """Forty products on five separated values breed copies of them; they must not be reported."""
    values = torch.cat([torch.tensor([50.0, 20.0, 10.0, 5.0]), torch.linspace(0, 1, 196)]).double()
    A = prescribed(values)
    found = lanczos(
        A, generator=torch.Generator().manual_seed(0), keep_basis=False, relative_error=1e-15, max_products=60
    )
    torch.testing.assert_close(found.eigenvalues[:4], values[:4], rtol=1e-6, atol=0)
    assert float(found.eigenvalues[4]) <= 1 + 1e-6


@pytest.mark.parametrize("keep_basis", [True, False])
def test_lanczos_top_vector_is_an_eigenvector(keep_basis: bool) -> None:
    A = prescribed(decaying(100))
    g = torch.Generator().manual_seed(3)
    A.matvec, spent = _counted(A.matvec)
    found = lanczos(A, generator=g, keep_basis=keep_basis, want_vector=True, relative_error=1e-10)
    assert found.num_products == len(spent)
    v = found.top_vector
    assert v is not None
    expected = v.clone().scale_(found.lambda_max.value)
    assert relative_error(A.matvec(v), expected) <= 1e-4


def _counted(
    matvec: Callable[[ParamVector], ParamVector],
) -> tuple[Callable[[ParamVector], ParamVector], list[None]]:
    spent: list[None] = []

    def counting(vector: ParamVector) -> ParamVector:
        spent.append(None)
        return matvec(vector)

    return counting, spent


def test_lanczos_stops_early_when_it_knows_enough() -> None:
    A = prescribed(torch.cat([torch.tensor([100.0]), torch.linspace(0, 1, 99)]).double())
    assert lanczos(A, generator=torch.Generator().manual_seed(0)).num_products <= 8


# --- sketch ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["dense", "concatenated"])
def test_sketch_is_unbiased_after_correction_and_biased_before(variant: str) -> None:
    """Mean of the corrected λmax over seeds against a dense matrix with a heavy bulk (Tr/d = λmax/4)."""
    n, d = 60, 40
    values = torch.cat([torch.tensor([10.0]), torch.full((n - 1,), 100.0 / (n - 1))]).double()
    A = prescribed(values, {"a": (4, 5), "b": (20,), "c": (10, 2)})
    corrected, raw = [], []
    for seed in range(120):
        result = sketch(A, dimension=d, seed=seed, variant=variant)
        corrected.append(result.lambda_max.value)
        raw.append(result.lambda_max.value + result.trace / result.num_products)
    estimate = Estimate.from_samples(corrected)
    assert abs(estimate.value - 10.0) <= 0.05 * 10.0 + 4 * estimate.stderr
    assert Estimate.from_samples(raw).value > 10.0 + 4 * estimate.stderr


def test_concatenated_correction_is_not_the_papers_one() -> None:
    """Dividing the whole trace by d, as for the dense sketch, would over-correct the concatenated one."""
    n, d = 60, 40
    values = torch.cat([torch.tensor([10.0]), torch.full((n - 1,), 100.0 / (n - 1))]).double()
    A = prescribed(values, {"a": (4, 5), "b": (20,), "c": (10, 2)})
    naive = []
    for seed in range(40):
        result = sketch(A, dimension=d, seed=seed, variant="concatenated")
        top = result.lambda_max.value + _block_correction(A, d)
        naive.append(top - result.trace / d)
    estimate = Estimate.from_samples(naive)
    assert estimate.value < 10.0 - 4 * estimate.stderr


def _block_correction(A: Dense, d: int) -> float:
    H = A.matrix
    v = torch.linalg.eigh(H)[1][:, -1]
    blocks = [slice(0, 20), slice(20, 40), slice(40, 60)]
    return sum(float(v[b].square().sum() * H[b, b].trace()) for b in blocks) / d


@pytest.mark.parametrize(("variant", "dimension"), [("dense", 300), ("concatenated", 100)])
def test_the_error_of_a_sketch_is_the_stated_one(variant: str, dimension: int) -> None:
    """Over seeds, the error in units of the standard error has mean square 1; so 5% at two errors takes d = 3,200."""
    A = prescribed(decaying(120), {"a": (40,), "b": (40,), "c": (40,)})
    found = [sketch(A, dimension=dimension, seed=seed, variant=variant, at_once=300) for seed in range(24)]
    errors = [(result.lambda_max.value - 1.0) / result.lambda_max.stderr for result in found]
    assert 0.4 <= sum(error**2 for error in errors) / len(errors) <= 2.0  # χ² of 24, three standard errors
    stated = math.sqrt(2 / dimension)  # three tensors that share the top eigenvector evenly: less by √3
    stated *= 1.0 if variant == "dense" else math.sqrt(1 / 3)
    for result in found:
        assert result.lambda_max.stderr == pytest.approx(stated, rel=0.3)


def test_sketch_depends_on_its_seed_alone() -> None:
    A = prescribed(decaying(30))
    same = [sketch(A, dimension=20, seed=5, at_once=k).lambda_max.value for k in (3, 20)]
    assert same[0] == pytest.approx(same[1], rel=1e-9)
    assert sketch(A, dimension=20, seed=6).lambda_max.value != pytest.approx(same[0], rel=1e-6)


# --- summary ---------------------------------------------------------------------------------------------------


def test_inequalities_that_fail_are_named() -> None:
    """The paper's Table 2, ResNet-18: ‖H‖_F = 2.55e4 where √(λmax·Tr) is at most 2.0e3."""
    spectrum = Spectrum(
        trace=Estimate(1.32e-3 * 11.7e6), frobenius=Estimate(2.55e4), lambda_max=Estimate(270)
    )
    (problem,) = spectrum.inconsistencies()
    assert "‖H‖_F" in problem
    assert "√(λmax·Tr)" in problem
    assert problem in str(spectrum)
    opt = Spectrum(trace=Estimate(9.28e-6 * 1.3e9), frobenius=Estimate(2.94e3), lambda_max=Estimate(780))
    assert opt.inconsistencies() == []


def test_inconsistency_within_the_errors_is_no_news() -> None:
    noisy = Spectrum(trace=Estimate(10.0, 1.0), frobenius=Estimate(11.0, 1.0), lambda_max=Estimate(9.0))
    assert noisy.inconsistencies() == []


def test_iterations_of_conjugate_gradients_by_hand() -> None:
    bare = Spectrum(trace=Estimate(30.0), frobenius=Estimate(16.0), lambda_max=Estimate(15.0))
    e = 2 / math.e**2  # ½·ln(2/ε) = 1
    assert bare.cg_iterations(1.0, tolerance=e) == pytest.approx(4)  # √(1 + 15)
    assert bare.cg_iterations(1.0, 4, tolerance=e) == pytest.approx(3)  # λ_4 ≤ 16/√4 = 8
    assert bare.cg_iterations(1.0, 2, tolerance=e, deflated=2) == pytest.approx(3)
    assert bare.cg_iterations(1e9, tolerance=0.9) == 1
    values = torch.tensor([15.0, 8.0, 3.0, 1e-9, 1e-9], dtype=torch.float64)
    spectrum = replace(bare, eigenvalues=values, weights=torch.ones_like(values))
    close = {"tolerance": e, "damping": 1.0}
    assert spectrum.cg_iterations(**close) == pytest.approx(4)  # each of 4, 1 + 3, 2 + 2, 3 + 1
    assert spectrum.cg_iterations(**close, columns=2) == pytest.approx(2)  # 3, or 1 + 1
    assert spectrum.cg_iterations(**close, columns=2, deflated=2) == pytest.approx(1)
    assert spectrum.cg_iterations(0.01, tolerance=e) == pytest.approx(4)  # three, one by one
    assert spectrum.cg_iterations(**close, columns=60) == pytest.approx(1)
    few = replace(bare, eigenvalues=values[:3], weights=torch.tensor([1.0, 3.0, 5.0], dtype=torch.float64))
    assert few.cg_iterations(**close, columns=3) == pytest.approx(3)  # λ_3 is the middle of the three 8s
    means = [spectrum.cg_iterations(0.5, tolerance=t) for t in (0.3, 0.1, 0.01)]
    assert means == sorted(means)
    for given, message in (
        ({"damping": 0.0}, "damping must be a positive number"),
        ({"damping": 1.0, "columns": 0}, "columns must be at least 1"),
        ({"damping": 1.0, "deflated": -1}, "a number of eigenvalues"),
        ({"damping": 1.0, "tolerance": 1.0}, "tolerance is 1"),
    ):
        with pytest.raises(OptionError, match=message):
            spectrum.cg_iterations(**given)


def test_estimate_spectrum_on_a_finite_sum() -> None:
    A = rank_ones()
    spectrum = estimate_spectrum(A, generator=torch.Generator().manual_seed(0), probes=400)
    H = A.mean.matrix
    assert within(spectrum.trace, float(H.trace()))
    assert within(spectrum.frobenius, float(H.norm()))
    assert spectrum.lambda_max.value == pytest.approx(float(torch.linalg.eigvalsh(H)[-1]), rel=0.005)
    assert spectrum.sampling_constant is not None
    assert spectrum.seconds_per_term is not None
    assert spectrum.seconds_per_term > 0


def test_lambda_max_of_a_subset_covers_the_truth() -> None:
    """A subset's own Ritz value is too large, held-out data too small: the error must span both."""
    A = rank_ones(count=3000, n=20)
    true = float(torch.linalg.eigvalsh(A.mean.matrix)[-1])
    hits = 0
    for seed in range(20):
        g = torch.Generator().manual_seed(seed)
        found = estimate_spectrum(A, generator=g, terms=100, probes=8, measure_constant=False)
        hits += abs(found.lambda_max.value - true) <= 2 * found.lambda_max.stderr
        assert found.lambda_max.upper() >= 0.95 * true
    assert hits >= 17


def test_where_few_terms_carry_the_curvature_the_frobenius_norm_bounds_lambda_max() -> None:
    """One term in fifty is large, in a direction of its own: a subset's λmax is that of whichever it holds."""
    torch.manual_seed(0)
    x = 0.1 * torch.randn(2000, 60, dtype=torch.float64)
    x[::50] = 6 * torch.eye(60, dtype=torch.float64)[torch.arange(40)]
    A = FiniteSum(torch.einsum("ti,tj->tij", x, x))
    true = float(torch.linalg.eigvalsh(A.mean.matrix)[-1])
    bounded = 0
    for seed in range(10):
        g = torch.Generator().manual_seed(seed)
        spectrum = estimate_spectrum(A, generator=g, terms=100, probes=64, measure_constant=False)
        assert spectrum.eigenvalues is not None
        bounded += float(spectrum.eigenvalues[0]) > 1.5 * spectrum.frobenius.upper()
        # the interval's upper end, and half of it again for the error on both sides
        assert true <= spectrum.lambda_max.upper() <= 1.5 * spectrum.frobenius.upper()
    assert bounded >= 5  # the subset alone would have been far off


def test_losses_without_sampled_labels_use_quadratic_forms() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double().eval()
    data = [(torch.randn(3).double(), torch.randn(2).double()) for _ in range(30)]
    gnh = GaussNewton(model, ConvexLoss(lambda h, y: (h - y).square().sum(-1) / 2), data)
    assert not gnh.has_factors
    x = torch.stack([x for x, _ in data])
    x = torch.cat([x, torch.ones(30, 1).double()], 1)
    true = 2 * float((x.T @ x).trace()) / 30
    spectrum = estimate_spectrum(gnh, generator=torch.Generator().manual_seed(0), probes=200)
    assert within(spectrum.trace, true)


def test_no_curvature_is_an_error() -> None:
    with pytest.raises(SolverError, match="trace"):
        estimate_spectrum(FiniteSum(torch.zeros(4, 3, 3)), generator=torch.Generator().manual_seed(0))


def test_bad_options_are_named() -> None:
    A, g = rank_ones(), torch.Generator().manual_seed(0)
    with pytest.raises(OptionError, match="probes is 1"):
        trace_from_quadratic_forms(A, probes=1, batch_size=None, generator=g)
    with pytest.raises(OptionError, match="variant is 'sparse'"):
        sketch(A, dimension=4, seed=0, variant="sparse")
    with pytest.raises(OptionError, match="max_products"):
        lanczos(A, generator=g, max_products=0)


def test_contradictory_estimates_are_said_aloud(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "whence.spectrum.summary._moments", lambda *_: (Estimate(1.0, 0.01), Estimate(5.0, 0.01))
    )
    with pytest.warns(WhenceWarning, match="contradict"):
        estimate_spectrum(rank_ones(), generator=torch.Generator().manual_seed(0), measure_constant=False)


def test_estimate_from_samples() -> None:
    estimate = Estimate.from_samples([1.0, 3.0])
    assert (estimate.value, estimate.stderr) == (2.0, 1.0)
    assert math.isinf(Estimate.from_samples([1.0]).stderr)
    assert Estimate(4.0, 1.0).sqrt() == Estimate(2.0, 0.25)
