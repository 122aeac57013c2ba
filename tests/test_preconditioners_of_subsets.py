"""Preconditioners from a part of the terms: how much of it the whole holds, and what that proves of the error."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from conformance import assert_mean
from dense import dense_gauss_newton, per_example_matrices
from digits import exact_hessian, flatten, load
from small import generator
from test_operators import language_model
from test_preconditioners import N, dense, extremes, flat_vectors, rank_ones
from whence import (
    Classification,
    ConjugateGradient,
    Damped,
    Dense,
    FiniteSum,
    GaussNewton,
    LinearOperator,
    ParamVector,
    Regression,
)
from whence.errors import OptionError, VectorError
from whence.model.importance import measure_importance
from whence.preconditioners import (
    LowRank,
    Preconditioned,
    measure_quality,
    nystrom,
)
from whence.runs.codec import decode, encode
from whence.solvers import CGState


def least(matrix: Tensor) -> float:
    """Smallest eigenvalue, relative to the largest."""
    values = torch.linalg.eigvalsh(matrix)
    return float(values[0] / values.abs().max())


def fallback(P: LowRank) -> float:
    """What holds for any operator."""
    return P.damping / (float(P.eigenvalues[0]) + P.damping)


# --- how much of a drawn operator the whole holds ------------------------------------------------------------------


@pytest.mark.parametrize("draw", ["sample", "subset"])
def test_the_share_of_matrices_is_the_largest_possible(draw: str) -> None:
    """Terms along axes of their own: beyond c, ``A - c·A_B`` would be negative along the one drawn most often."""
    A = FiniteSum(torch.diag_embed(torch.diag(torch.arange(1.0, 13.0, dtype=torch.float64))))
    shares = set()
    for seed in range(40):
        part = getattr(A, draw)(6, generator(seed))
        shares.add(part.share_of_whole)
        gap = (A.mean.matrix - part.share_of_whole * part.matrix).diagonal()
        assert float(gap.min()) >= -1e-15
        assert float((A.mean.matrix - 1.001 * part.share_of_whole * part.matrix).diagonal().min()) < 0
    assert shares > {6 / 12 / 2, 6 / 12 / 3}  # most draws have repeats


def test_distinct_terms_have_the_largest_share_and_the_same_mean() -> None:
    A = rank_ones(20, 0.9, n=6)
    v = A.zeros().randn_like(generator(1))
    stream = generator(2)
    drawn = [A.subset(5, stream, distinct=True) for _ in range(400)]
    assert {part.share_of_whole for part in drawn} == {0.25}
    forms = torch.stack([part.quadratic_form(v) for part in drawn])
    assert_mean(forms, float(A.quadratic_form(v)), resolution=0.1)
    independent = torch.stack([A.subset(5, stream).quadratic_form(v) for _ in range(400)])
    assert float(forms.std()) < 0.95 * float(independent.std())  # √(15/19) of it
    every = A.subset(20, stream, distinct=True)
    torch.testing.assert_close(every.matrix, A.mean.matrix)
    assert every.share_of_whole == 1.0
    with pytest.raises(OptionError, match=r"batch size 21 is outside 1\.\.20"):
        A.subset(21, stream, distinct=True)


def test_wrapped_operators_hand_it_on_and_others_know_nothing() -> None:
    A = rank_ones(20, 0.9, n=6)
    P = nystrom(A, 0.1, rank=2, generator=generator())
    for whole in (Damped(A, 0.1), Preconditioned(A, P), Preconditioned(A, P).damped):
        part = whole.subset(5, generator(3), distinct=True)
        assert (part.share_of_whole, part.num_terms, whole.share_of_whole) == (0.25, 5, 0.0)
    assert A.share_of_whole == Dense(torch.eye(2)).share_of_whole == 0.0


@functools.cache
def ragged_parts() -> tuple[Tensor, Tensor]:
    gnh = language_model()
    return per_example_matrices(gnh), dense_gauss_newton(gnh).matrix


def weighted_sum(matrices: Tensor, gnh: GaussNewton, positions: Tensor, weights: Tensor | None) -> Tensor:
    """H̃ from its definition."""
    weights = torch.ones(len(positions), dtype=torch.float64) if weights is None else weights
    total = torch.einsum("s,sij->ij", weights, matrices[positions])
    return total * len(gnh.terms) / (gnh.num_terms * len(positions))


@pytest.mark.parametrize("way", ["distinct", "independent", "by curvature"])
def test_the_share_of_sequences_of_different_lengths(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gnh, (matrices, H) = language_model(), ragged_parts()
    chances = torch.linspace(1.0, 9.0, len(gnh.terms), dtype=torch.float64) / 60
    monkeypatch.setattr(gnh.terms, "importance", chances if way == "by curvature" else None)
    met = []
    for seed in range(8):
        part = gnh.subset(30, generator(seed), distinct=way == "distinct")
        positions, weights = part._positions, part._weights
        assert len(positions) == 6
        drawn = weighted_sum(matrices, gnh, positions, weights)
        v = gnh.zeros().randn_like(generator(100 + seed))
        flat = torch.cat([tensor.flatten() for tensor in v.values()])
        assert float(part.quadratic_form(v)) == pytest.approx(float(flat @ drawn @ flat))
        c = part.share_of_whole
        assert least(H - c * drawn) >= -1e-12
        # the coefficient of each example's terms, counted one by one: 1/N in H, n/(N m) for each time, weighted, in H̃
        inside = [0.0] * len(gnh.terms)
        for place, position in enumerate(positions.tolist()):
            inside[position] += (1.0 if weights is None else float(weights[place])) * 12 / 6
        assert c == pytest.approx(1 / max(inside))
        met.append(c)
    if way == "distinct":
        assert set(met) == {0.5}
        for seed in range(8):
            drawn, _ = gnh.terms.draw_weighted(30, generator(seed), distinct=True)
            assert len(set(drawn.tolist())) == 6
    else:
        assert max(met) < 0.51
        assert len({round(c, 9) for c in met}) > 1


# --- the smallest eigenvalue -----------------------------------------------------------------------------------


def by_nystrom(H: LinearOperator, damping: float, terms: int, seed: int) -> LowRank:
    return nystrom(H, damping, rank=16, generator=generator(seed), terms=terms)


def inexact(H: FiniteSum, damping: float, terms: int, seed: int) -> LowRank:
    """As Nyström's, but off by a known D."""
    P = by_nystrom(H, damping, terms, seed)
    B = flat_vectors(P) * P.eigenvalues.sqrt()
    D = torch.randn(B.shape, generator=generator(seed), dtype=torch.float64)
    D *= 0.5 * math.sqrt(damping) / torch.linalg.matrix_norm(D, 2)
    U, roots, _ = torch.linalg.svd(B + D, full_matrices=False)
    eye = torch.eye(P.rank, dtype=torch.float64)
    slack = (0.5 * math.sqrt(damping) + math.sqrt(P.slack)) ** 2
    block = H.mean.unflatten(U.T.contiguous())
    return replace(P, vectors=block, eigenvalues=roots.square(), correction=eye, slack=slack)


MAKERS = {"nystrom": by_nystrom, "inexact": inexact}


@pytest.mark.parametrize("terms", [8, 40, 150])
@pytest.mark.parametrize("maker", MAKERS)
def test_the_bound_holds_for_all_terms(maker: str, terms: int) -> None:
    H = rank_ones(300, 0.9)
    top = float(torch.linalg.eigvalsh(H.mean.matrix)[-1])
    for kappa in (30.0, 3000.0):
        for seed in range(4):
            P = MAKERS[maker](H, top / kappa, terms, seed)
            assert (P.terms, P.exact_for_terms, P.share) == (terms, 300, terms / 300)
            assert P.for_operator(H).smallest == P.smallest
            true = extremes(P, H.mean.matrix)[0]
            assert 0.999 * fallback(P) <= P.smallest <= true
            assert terms > 8 or true < 0.5  # the bound for P from all terms, 1, would be wrong
            shrunk = P.shrunk()
            assert P.smallest <= shrunk.smallest <= extremes(shrunk, H.mean.matrix)[0] + 1e-12
            if maker == "nystrom":
                assert P.smallest == pytest.approx(max(P.share, fallback(P)), rel=1e-6)
                assert shrunk.smallest == pytest.approx(1.0, rel=1e-6)


def test_the_bound_is_the_best_of_its_kind() -> None:
    """Over all t, of ``1/max((1+t)/c, 1 + (1+1/t)s/λ)``."""
    P = by_nystrom(rank_ones(30, 0.9), 0.01, 10, 0)
    t = torch.logspace(-6, 4, 200_001, dtype=torch.float64)
    for share in (1.0, 0.6, 0.05):
        for ratio in (1e-4, 0.3, 20.0):
            best = float((1 / torch.maximum((1 + t) / share, 1 + (1 + 1 / t) * ratio)).max())
            proven = replace(P, share=share, slack=ratio * P.damping).smallest
            assert proven == pytest.approx(max(best, fallback(P)), rel=1e-3)
    assert replace(P, slack=math.inf).smallest == pytest.approx(fallback(P))


def test_where_nothing_is_known_the_general_bound_is_left() -> None:
    class Silent(FiniteSum):
        def subset(self, batch_size: int, generator: torch.Generator, *, distinct: bool = False) -> Dense:
            return Dense(self.matrices[:batch_size].mean(0), num_terms=batch_size)

    H = rank_ones(60, 0.9)
    P = by_nystrom(Silent(H.matrices), 0.01, 20, 0)
    assert (P.exact_for_terms, P.share) == (None, 0.0)
    for same in (P, P.for_operator(H), replace(P, exact_for_terms=60)):
        assert same.smallest == pytest.approx(fallback(P), rel=1e-9)
    with pytest.raises(OptionError, match="nothing is known of the share"):
        P.shrunk()
    known = by_nystrom(H, 0.01, 20, 0)
    assert known.smallest > 5 * fallback(known)
    for other in (H.subset(20, generator(1)), rank_ones(59, 0.9)):  # told apart by the number of terms
        assert known.for_operator(other).smallest == pytest.approx(fallback(known), rel=1e-9)
    with pytest.raises(VectorError, match="operator's space"):
        known.for_operator(Dense(torch.eye(3)))


def test_shrinking_multiplies_the_eigenvalues_and_copies_nothing() -> None:
    H = rank_ones(300, 0.9)
    P = by_nystrom(H, 0.01, 30, 0)
    half = P.shrunk(0.5)
    U = flat_vectors(P)
    expected = 0.01 * torch.eye(N, dtype=torch.float64) + 0.5 * (U * P.eigenvalues) @ U.T
    torch.testing.assert_close(dense(half), expected)
    assert half.vectors is P.vectors
    assert (half.scale, half.share, half.shrunk(0.5).scale) == (0.5, 0.2, 0.25)
    assert half.smallest == pytest.approx(0.2, rel=1e-6)
    assert P.shrunk().shrunk().scale == P.shrunk().scale == 0.1
    whole = by_nystrom(H, 0.01, 300, 0)
    assert torch.equal(whole.shrunk().eigenvalues, whole.eigenvalues)
    again = decode(LowRank, *encode(half))
    assert (again.smallest, again.scale, again.share) == (half.smallest, 0.5, 0.2)
    for factor in (0.0, -0.1, 1.5, math.nan):
        with pytest.raises(OptionError, match="the factor is"):
            P.shrunk(factor)
    for changes, message in (({"share": 1.2}, "share is 1.2"), ({"scale": 0.0}, "scale is 0")):
        with pytest.raises(OptionError, match=message):
            replace(P, **changes)


def test_quality_expects_of_a_shrunk_one_what_it_can_do() -> None:
    H = rank_ones(400, 0.9)
    for seed in range(3):
        P = by_nystrom(H, 0.005, 100, seed)
        quality = measure_quality(P.shrunk(), H, generator=generator(seed + 10))
        assert quality.problems == (), str(quality)
        assert quality.promised is not None
        assert quality.promised >= 0.9 * float((P.eigenvalues[0] + 0.005) / (0.25 * P.eigenvalues[0] + 0.005))
        assert quality.proven > 0.999


def test_half_of_the_rank_is_settled_and_no_fewer_than_eight_products_are_behind_it() -> None:
    H = rank_ones(100, 0.9)
    for rank, settled in ((1, 1), (3, 3), (4, 4), (6, 4), (8, 4), (9, 5), (30, 15)):
        assert nystrom(H, 0.01, rank=rank, generator=generator()).settled == settled


# --- networks --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SmallDigits:
    gnh: GaussNewton
    hessian: Tensor
    rhs: ParamVector  # gradients of six test images
    damping: float


@functools.cache
def digits() -> SmallDigits:
    """In float64: 240 images, 460 parameters."""
    train, test = load()
    x, y = train.tensors[0][:240].double(), train.tensors[1][:240]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 6), nn.Tanh(), nn.Linear(6, 10)).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(120):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    gnh = GaussNewton(model.eval(), Classification(), TensorDataset(x, y))
    H = exact_hessian(model, x)
    rhs = gnh.gradients([(test[i][0].double(), test[i][1]) for i in range(6)])
    return SmallDigits(gnh, H, rhs, float(torch.linalg.eigvalsh(H)[-1]) / 300)


@pytest.mark.parametrize("way", ["uniform", "by curvature"])
def test_the_bound_holds_for_the_gradients_of_digits(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = digits()
    chances = measure_importance(problem.gnh).probabilities() if way == "by curvature" else None
    monkeypatch.setattr(problem.gnh.terms, "importance", chances)
    for seed, terms in enumerate((24, 60, 60, 120)):
        P = by_nystrom(problem.gnh, problem.damping, terms, seed)
        true, _ = extremes(P, problem.hessian)
        if way == "uniform":
            assert P.smallest == pytest.approx(terms / 240, rel=1e-5)
            assert P.smallest > 10 * fallback(P)
        else:  # repeats, and examples that count for more
            assert 0.2 * terms / 240 / 8 < P.share < terms / 240
        assert P.smallest <= true < 0.9
        shrunk = P.shrunk()
        assert 0.99999 < shrunk.smallest <= extremes(shrunk, problem.hessian)[0] + 1e-9


def test_the_bound_holds_for_sequences_of_different_lengths() -> None:
    gnh, (_, H) = language_model(), ragged_parts()
    for seed in range(5):
        P = by_nystrom(gnh, 0.002, 20, seed)
        assert (P.exact_for_terms, P.share) == (60, 4 / 12)
        assert P.smallest == pytest.approx(4 / 12, rel=1e-5)
        assert P.smallest <= extremes(P, H)[0]
        assert extremes(P.shrunk(), H)[0] >= P.shrunk().smallest > 0.99999


def test_the_bound_holds_for_a_regression_by_finite_differences() -> None:
    """The slack is that of inexact products here."""
    x = torch.randn(40, 5, generator=generator(1), dtype=torch.float64)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2)).double().eval()
    data = [(row, torch.zeros(2, dtype=torch.float64)) for row in x]
    exact = GaussNewton(model, Regression(), data)
    size = exact.num_parameters
    eye = Dense(torch.eye(size, dtype=torch.float64), exact.zeros())
    H = eye.flatten(exact.matvec(eye.unflatten(torch.eye(size, dtype=torch.float64))))
    gnh = GaussNewton(model, Regression(), data, product="finite-difference")
    for seed in range(4):
        P = nystrom(gnh, 0.02, rank=10, generator=generator(seed), terms=10)
        assert 0.24 < P.smallest <= min(0.25, extremes(P, H)[0])


@pytest.mark.parametrize("shrunk", [False, True], ids=["as made", "shrunk"])
@pytest.mark.parametrize("queries", [1, 6])
def test_bounds_of_the_error_contain_it_at_every_iteration(queries: int, shrunk: bool) -> None:
    """P from a quarter of the terms, against a dense solution."""
    problem = digits()
    rhs = ParamVector.stack(problem.rhs.unstack()[:queries])
    A = problem.hessian + problem.damping * torch.eye(len(problem.hessian), dtype=torch.float64)
    star = torch.linalg.solve(A, flatten(rhs).T).T
    made = by_nystrom(problem.gnh, problem.damping, 60, 3)
    P = made.shrunk() if shrunk else made

    def path(preconditioner: LowRank) -> tuple[list[Tensor], list[Tensor], tuple[str, ...]]:
        bounds: list[Tensor] = []
        errors: list[Tensor] = []

        def watch(state: CGState) -> None:
            e = flatten(state.iterate) - star
            errors.append(((e @ A) * e).sum(1).sqrt())
            bounds.append(torch.stack([state.lower, state.upper]))

        solver = ConjugateGradient(
            tolerance=1e-3, preconditioner=preconditioner, largest=300.1 * problem.damping, verify=False
        )
        solution = solver.solve(
            Damped(problem.gnh, problem.damping), rhs, generator=generator(), on_step=watch
        )
        assert bool(solution.converged.all())
        return bounds, errors, solution.stats.events

    bounds, errors, events = path(P)
    assert events == ()  # no iteration contradicts what is proven
    for bound, error in zip(bounds, errors, strict=True):
        assert bool((bound[0] <= error * (1 + 1e-6)).all())
        assert bool((error <= bound[1] * (1 + 1e-6)).all())
    loose, _, _ = path(replace(P, exact_for_terms=None))  # the same iterates
    pairs = list(zip(bounds, loose, strict=False))
    assert len(pairs) == len(bounds)
    assert all(bool((bound[1] <= general[1] * (1 + 1e-9)).all()) for bound, general in pairs)

    def typical(ratios: list[Tensor]) -> float:
        return float(torch.stack(ratios).log().mean().exp())

    assert typical([bound[1] / general[1] for bound, general in pairs]) < 0.7
    over_error = typical([bound[1] / error for bound, error in zip(bounds, errors, strict=True)])
    assert over_error < (2.0 if shrunk else 5.0)
