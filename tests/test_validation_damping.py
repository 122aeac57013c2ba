"""The sweep over dampings against dense eigendecompositions."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from scipy.stats import spearmanr
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from digits import exact_hessian, flatten, load
from small import generator
from whence import (
    Classification,
    Damped,
    Dense,
    Estimate,
    FiniteSum,
    GaussNewton,
    ParamVector,
    Plan,
    Spectrum,
)
from whence.errors import OptionError, VectorError
from whence.spectrum.krylov import krylov_space
from whence.validation import damping as module
from whence.validation.damping import DampingSweep, damping_sweep

N = 40


def block(rows: Tensor) -> ParamVector:
    return ParamVector({"x": rows}, columns=len(rows))


def random_rows(count: int, n: int = N, seed: int = 5) -> Tensor:
    return torch.randn(count, n, generator=generator(seed), dtype=torch.float64)


def decaying(n: int = N, rank: int | None = None) -> Dense:
    """A random basis, eigenvalues 2^(-i/2) from 1 down; zero from ``rank`` on."""
    Q = torch.linalg.qr(random_rows(n, n, seed=1))[0]
    values = 2.0 ** (-0.5 * torch.arange(n, dtype=torch.float64))
    if rank is not None:
        values[rank:] = 0
    return Dense(Q @ torch.diag(values) @ Q.T)


def exact_spectrum(H: Tensor) -> Spectrum:
    return Spectrum(
        trace=Estimate(float(H.trace())),
        frobenius=Estimate(float(H.norm())),
        lambda_max=Estimate(float(torch.linalg.eigvalsh(H)[-1])),
    )


def solve(H: Tensor, damping: float, rows: Tensor) -> Tensor:
    return torch.linalg.solve(H + damping * torch.eye(len(H), dtype=H.dtype), rows.T).T


DAMPINGS = torch.tensor([0.5, 0.05, 0.005, 0.0002], dtype=torch.float64)

# --- Krylov spaces -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [None, 5], ids=["full", "low-rank"])
def test_one_space_solves_for_every_damping(rank: int | None) -> None:
    A, rows = decaying(rank=rank), random_rows(3)
    space = krylov_space(A, block(rows), max_products=N)
    for damping in DAMPINGS.tolist():
        exact = solve(A.matrix, damping, rows)
        error = (space.solution(damping)["x"] - exact).norm(dim=1) / exact.norm(dim=1)
        assert float(error.max()) <= 1e-8
    assert float(space.residuals(DAMPINGS).max()) <= 1e-8
    if rank is not None:  # the space is exhausted after the range and the part outside it
        assert len(space.basis) <= rank + 2


def test_columns_whose_spaces_end_early_do_not_disturb_the_others() -> None:
    A = decaying()
    top = torch.linalg.eigh(A.matrix)[1][:, -1:].T
    rows = torch.cat([top, random_rows(1)])
    space = krylov_space(A, block(rows), max_products=N)
    for damping in DAMPINGS.tolist():
        torch.testing.assert_close(
            space.solution(damping)["x"], solve(A.matrix, damping, rows), rtol=1e-8, atol=1e-8
        )


def test_residuals_are_known_from_the_coefficients() -> None:
    A, rows = decaying(), random_rows(3)
    space = krylov_space(A, block(rows), max_products=9)
    known = space.residuals(DAMPINGS)
    for damping, residual in zip(DAMPINGS.tolist(), known, strict=True):
        u = space.solution(damping)["x"]
        true = (u @ A.matrix + damping * u - rows).norm(dim=1) / rows.norm(dim=1)
        torch.testing.assert_close(residual, true, rtol=1e-6, atol=1e-12)
    assert float(known.max()) > 0.01


@pytest.mark.parametrize("rank", [None, 5], ids=["full", "low-rank"])
def test_quadrature_brackets_the_effective_dimension_of_every_probe(rank: int | None) -> None:
    A, rows = decaying(rank=rank), random_rows(4)
    exact = torch.stack([(rows @ A.matrix * solve(A.matrix, d, rows)).sum(1) for d in DAMPINGS.tolist()])
    widths = []
    for steps in (1, 3, 6, 12, N):
        lower, upper = krylov_space(A, block(rows), max_products=steps).dimension_bounds(DAMPINGS)
        slack = 1e-6 * exact
        assert bool((lower <= exact + slack).all())
        assert bool((upper >= exact - slack).all())
        widths.append(float((upper - lower).max()))
    assert widths[0] > 1
    assert all(after <= before + 1e-6 for before, after in pairwise(widths))
    assert widths[-1] <= 1e-5


# --- the sweep ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sweep() -> DampingSweep:
    A = decaying()
    return damping_sweep(
        A,
        block(random_rows(3)),
        block(random_rows(25, seed=9)),
        generator=generator(),
        spectrum=exact_spectrum(A.matrix),
        max_products=N,
        probes=40,
    )


def exact_scores(sweep: DampingSweep) -> Tensor:
    A = decaying()
    return torch.stack(
        [
            solve(A.matrix, damping, random_rows(3)) @ random_rows(25, seed=9).T
            for damping in sweep.dampings.tolist()
        ]
    )


def test_the_default_range_and_the_chosen_damping(sweep: DampingSweep) -> None:
    assert sweep.dampings.tolist() == sorted(sweep.dampings.tolist(), reverse=True)
    assert float(1 / sweep.dampings[0]) == pytest.approx(2)
    assert float(1 / sweep.dampings[-1]) == pytest.approx(5000)
    assert float(1 / sweep.dampings[sweep.chosen]) == pytest.approx(200)


def test_effective_dimension_against_the_eigenvalues(sweep: DampingSweep) -> None:
    values = torch.linalg.eigvalsh(decaying().matrix)
    exact = (values / (values + sweep.dampings.unsqueeze(1))).sum(1)
    assert bool(((sweep.dimension - exact).abs() <= 4 * sweep.dimension_stderr).all())
    assert bool((sweep.dimension_stderr < 0.15 * sweep.dimension).all())
    assert float(sweep.dimension_bracket.max()) < 1e-4


def test_scores_and_rank_agreement_against_dense_solutions(sweep: DampingSweep) -> None:
    exact = exact_scores(sweep)
    assert sweep.scores is not None
    torch.testing.assert_close(sweep.scores, exact, rtol=1e-8, atol=1e-8)
    assert bool(sweep.converged.all())
    for i in range(len(sweep.dampings)):
        for j in range(i):
            each = torch.tensor([spearmanr(exact[i, r], exact[j, r]).statistic for r in range(3)])
            assert float(sweep.agreement[i, j]) == pytest.approx(float(each.mean()), abs=1e-9)
            assert float(sweep.agreement_stderr[i, j]) == pytest.approx(
                float(each.std()) / math.sqrt(3), abs=1e-9
            )
    torch.testing.assert_close(sweep.agreement, sweep.agreement.T)
    torch.testing.assert_close(sweep.agreement.diagonal(), torch.ones(11, dtype=torch.float64))
    assert float(sweep.agreement[0, -1]) < 0.95  # or there would be nothing to see


def test_costs_are_those_of_the_plans(sweep: DampingSweep) -> None:
    spectrum = exact_spectrum(decaying().matrix)
    for i, damping in enumerate(sweep.dampings.tolist()):
        paper = Plan.from_spectrum(spectrum, damping)
        assert float(sweep.paper_cost[i]) == paper.num_steps * paper.batch_size
        assert sweep.plans[i] == Plan.tuned(spectrum, damping, num_terms=1)
        assert float(sweep.passes[i]) == sweep.plans[i].num_term_products
    assert bool((sweep.paper_cost.diff() > 0).all())


def test_without_functionals_solutions_are_compared_by_cosine() -> None:
    A, rows = decaying(), random_rows(1)
    found = damping_sweep(
        A,
        ParamVector({"x": rows[0]}),
        generator=generator(),
        dampings=DAMPINGS,
        chosen=0.05,
        spectrum=exact_spectrum(A.matrix),
    )
    solutions = torch.stack([solve(A.matrix, damping, rows)[0] for damping in DAMPINGS.tolist()])
    units = solutions / solutions.norm(dim=1, keepdim=True)
    torch.testing.assert_close(found.agreement, units @ units.T)
    assert (found.measure, found.scores, found.chosen) == ("cosine", None, 1)
    assert bool(found.agreement_stderr.isnan().all())


def test_what_is_not_converged_is_marked_and_not_compared() -> None:
    A, rows = decaying(), random_rows(3)
    options = {"generator": generator(), "spectrum": exact_spectrum(A.matrix), "tolerance": 1e-3}
    found = damping_sweep(A, block(rows), block(random_rows(25, seed=9)), max_products=10, **options)
    lost = ~found.converged
    assert 0 < int(lost.sum()) < 10
    assert bool(lost[-1])
    assert bool((found.residual[lost].amax(1) > 1e-3).all())
    assert bool((found.residual[found.converged] <= 1e-3).all())
    unknown = found.agreement.isnan()
    assert bool(unknown[lost].all())
    assert bool(unknown[:, lost].all())
    assert not bool(unknown[found.converged][:, found.converged].any())
    assert "!" in str(found)
    assert "Nothing is said of" in found.recommended()
    hopeless = damping_sweep(A, block(rows), max_products=1, **options)
    assert not bool(hopeless.converged.any())
    assert hopeless.settled() is None
    assert "Raise max_products" in hopeless.recommended()


class Inexact(Dense):
    """Products with an error of a fixed relative size, as finite differences have; the same at every call."""

    def matvec(self, vector: ParamVector) -> ParamVector:
        noise = 1e-3 * random_rows(N, N, seed=8) / math.sqrt(N)
        return super().matvec(vector).axpy_(1.0, Dense(noise).matvec(vector))


def test_errors_of_products_are_not_taken_for_convergence() -> None:
    """A full Krylov space has no residual by its coefficients, and a large one in truth where λ is small."""
    A, rows = Inexact(decaying().matrix), random_rows(3)
    known = krylov_space(A, block(rows), max_products=N).residuals(DAMPINGS)
    assert float(known.max()) < 1e-3
    found = damping_sweep(
        A,
        block(rows),
        generator=generator(),
        dampings=DAMPINGS,
        chosen=0.05,
        spectrum=exact_spectrum(A.matrix),
        tolerance=0.1,
    )
    assert found.converged.tolist() == [True, True, True, False]
    assert bool(found.agreement[-1].isnan().all())
    for damping, residual in zip(DAMPINGS.tolist(), found.residual, strict=True):
        true = krylov_space(A, block(rows), max_products=N).measured_residual(A, damping)
        assert bool((residual >= true * (1 - 1e-9)).all())


def test_the_bracket_covers_too_short_a_quadrature() -> None:
    A = decaying()
    values = torch.linalg.eigvalsh(A.matrix)
    found = damping_sweep(
        A,
        block(random_rows(1)),
        generator=generator(),
        spectrum=exact_spectrum(A.matrix),
        max_products=4,
        probes=40,
    )
    exact = (values / (values + found.dampings.unsqueeze(1))).sum(1)
    assert float(found.dimension_bracket[-1]) > found.dimension_stderr[-1]
    slack = 4 * found.dimension_stderr + found.dimension_bracket
    assert bool(((found.dimension - exact).abs() <= slack).all())


# --- what is recommended -----------------------------------------------------------------------------------------


def with_agreement(sweep: DampingSweep, changing: int) -> DampingSweep:
    """Rankings that change with every λ down to the given one, and no more after it."""
    L = len(sweep.dampings)
    place = torch.arange(L).clamp_max(changing).double()
    return replace(sweep, agreement=1 - 0.1 * (place.unsqueeze(0) - place.unsqueeze(1)).abs())


def test_the_ranking_settles_at_the_largest_damping_after_which_all_agree(sweep: DampingSweep) -> None:
    found = with_agreement(sweep, 4)
    assert found.settled() == 4
    words = found.recommended()
    assert f"From λ = {float(sweep.dampings[4]):.3g} (λmax/50)" in words
    assert f"{float(sweep.costs[4]):,.3g} terms" in words
    assert "nothing about retraining" in words
    lost = sweep.converged.clone()
    lost[-2:] = False
    assert replace(found, converged=lost).settled() == 4
    lost[5:] = False  # a single converged λ after the change agrees with nothing
    assert replace(found, converged=lost).settled() is None


def test_the_chosen_damping_outside_the_settled_range_is_compared_with_it(sweep: DampingSweep) -> None:
    assert "agrees with the first to 0.800" in replace(with_agreement(sweep, 8), chosen=6).recommended()
    assert "agrees with the first" not in with_agreement(sweep, 2).recommended()


def test_a_ranking_that_never_settles_is_said_to(sweep: DampingSweep) -> None:
    found = with_agreement(sweep, 100)
    assert found.settled() is None
    assert "still change at the smallest converged λ: Spearman 0.900" in found.recommended()


def test_the_table_shows_every_damping(sweep: DampingSweep) -> None:
    lines = str(sweep).splitlines()
    assert len(lines) == 1 + 11 + 2
    assert len({len(line) for line in lines[:12]}) == 1
    starred = [line for line in lines[1:12] if "*" in line]
    assert len(starred) == 1
    assert " 200 " in starred[0]


# --- data --------------------------------------------------------------------------------------------------------


def rank_ones(count: int, n: int = 10) -> FiniteSum:
    x = random_rows(count, n) * torch.linspace(2.0, 0.3, n, dtype=torch.float64)
    return FiniteSum(torch.einsum("ci,cj->cij", x, x))


def test_large_data_are_worked_on_by_one_fixed_subset() -> None:
    A, rows = rank_ones(500), random_rows(2, 10)
    fixed = A.subset(60, generator(4)).matrix
    found = damping_sweep(
        A,
        block(rows),
        block(random_rows(5, 10, seed=3)),
        generator=generator(4),
        dampings=["lambda_max/5", "lambda_max/50"],
        chosen=0.1,
        spectrum=exact_spectrum(A.mean.matrix),
        max_terms=60,
        probes=3,
    )
    exact = torch.stack(
        [solve(fixed, d, rows) @ random_rows(5, 10, seed=3).T for d in found.dampings.tolist()]
    )
    torch.testing.assert_close(found.scores, exact)
    assert (found.num_terms, found.worked_terms) == (500, 60)
    spent = 10 * 5 + 2  # and one product of each solution, to confirm it
    assert (found.num_products, found.num_term_products) == (spent, spent * 60)
    assert "60 of 500 terms" in found.recommended()


def test_columns_in_turn_give_what_columns_together_give(monkeypatch: pytest.MonkeyPatch) -> None:
    A, rows = rank_ones(50), random_rows(3, 10)

    def run() -> DampingSweep:
        return damping_sweep(A, block(rows), generator=generator(), max_products=5)

    together = run()
    monkeypatch.setattr(module, "BASIS_BUDGET", 1)
    alone = run()
    torch.testing.assert_close(together.agreement, alone.agreement, equal_nan=True)
    torch.testing.assert_close(together.dimension, alone.dimension)
    assert together.num_products == alone.num_products


def test_digits_against_dense_float64() -> None:
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
    queries = gnh.gradients([test[i] for i in range(6)])
    gradients = gnh.gradients([(x[i], y[i]) for i in range(100)])
    found = damping_sweep(gnh, queries, gradients, generator=generator(), max_products=48)

    values, vectors = torch.linalg.eigh(exact_hessian(model, x))
    left, right = flatten(queries) @ vectors, flatten(gradients) @ vectors
    scores = torch.stack([(left / (values + d)) @ right.T for d in found.dampings.tolist()])
    dimension = torch.stack([(values / (values + d)).sum() for d in found.dampings.tolist()])

    assert int(found.converged.sum()) >= 7  # λmax/200 at least
    assert not bool(found.converged[-1])
    kept = found.converged.nonzero().flatten().tolist()
    for i in kept:
        for j in kept:
            each = [spearmanr(scores[i, r], scores[j, r]).statistic for r in range(6)]
            assert float(found.agreement[i, j]) == pytest.approx(sum(each) / 6, abs=0.01)
    error = found.dimension - dimension
    assert bool((error.abs() <= 4 * found.dimension_stderr + found.dimension_bracket).all())
    assert float(found.agreement[0, kept[-1]]) < 0.9


def test_bad_options_are_named() -> None:
    A = decaying()
    rhs, g = block(random_rows(2)), generator()
    with pytest.raises(OptionError, match=r"damped\.operator"):
        damping_sweep(Damped(A, 1.0), rhs, generator=g)
    with pytest.raises(OptionError, match="damping is -1"):
        damping_sweep(A, rhs, generator=g, dampings=[1.0, -1.0])
    with pytest.raises(OptionError, match="damping is 'half'"):
        damping_sweep(A, rhs, generator=g, chosen="half")
    with pytest.raises(OptionError, match="at least two different"):
        damping_sweep(A, rhs, generator=g, dampings=[1.0], chosen=1.0)
    with pytest.raises(OptionError, match="max_products and max_terms must be at least 1, got 0"):
        damping_sweep(A, rhs, generator=g, max_products=0)
    with pytest.raises(OptionError, match="1 probes"):
        damping_sweep(A, rhs, generator=g, probes=1)
    with pytest.raises(OptionError, match=r"tolerance is 0\.0"):
        damping_sweep(A, rhs, generator=g, tolerance=0.0)
    with pytest.raises(OptionError, match="2 columns; a ranking"):
        damping_sweep(A, rhs, rhs, generator=g)
    with pytest.raises(VectorError, match="functionals belongs to another model"):
        damping_sweep(A, rhs, ParamVector({"y": torch.ones(4, N)}, columns=4), generator=g)
    with pytest.raises(VectorError, match="functional holds NaN"):
        damping_sweep(A, rhs, block(torch.full((4, N), math.nan)), generator=g)
    with pytest.raises(VectorError, match="right-hand side holds NaN"):
        damping_sweep(A, block(torch.full((2, N), math.nan)), generator=g)
    with pytest.raises(VectorError, match="column 1 is zero"):
        damping_sweep(A, block(torch.stack([torch.ones(N), torch.zeros(N)]).double()), generator=g)
    with pytest.raises(OptionError, match="at least one product"):
        krylov_space(A, rhs, max_products=0)


def test_results_are_validated(sweep: DampingSweep) -> None:
    with pytest.raises(OptionError, match="falling"):
        replace(sweep, dampings=sweep.dampings.flip(0))
    with pytest.raises(OptionError, match="square of agreements"):
        replace(sweep, agreement=sweep.agreement[:3])
