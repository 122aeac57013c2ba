"""Refinement: closed forms on matrices, coverage, and scores of real images against a dense Hessian."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from scipy.stats import t as student
from torch import Tensor, nn

from digits import correlation, exact_hessian, flatten, load, unflatten
from small import generator
from test_preconditioned_lissa import InterruptedJournal, KilledError
from whence import (
    Classification,
    ConjugateGradient,
    Damped,
    Estimate,
    FiniteSum,
    GaussNewton,
    Lissa,
    ParamVector,
    Plan,
    Solution,
    Spectrum,
    estimate_spectrum,
)
from whence.errors import DivergenceError, OptionError, WhenceWarning
from whence.preconditioners import Preconditioned, nystrom
from whence.runs import FileJournal
from whence.solvers.error_parts import left_of_start, relative_spread
from whence.solvers.refinement import Refinement, snapshot_pays

N = 12
DAMPING = 0.1


@functools.cache
def finite_sum(count: int = 300) -> FiniteSum:
    x = torch.randn(count, N, generator=generator(1), dtype=torch.float64)
    x = x * torch.linspace(1.5, 0.1, N, dtype=torch.float64)
    return FiniteSum(torch.einsum("ci,cj->cij", x, x))


def system() -> Damped:
    return Damped(finite_sum(), DAMPING)


def dense() -> Tensor:
    return finite_sum().mean.matrix + DAMPING * torch.eye(N, dtype=torch.float64)


def right_hand_side() -> ParamVector:
    return ParamVector({"x": torch.linspace(1.0, -0.5, N, dtype=torch.float64)})


def exact_plan(chains: int = 4, steps: float = 1.0) -> Plan:
    H = finite_sum().mean.matrix
    spectrum = Spectrum(
        trace=Estimate(float(H.trace())),
        frobenius=Estimate(float(H.norm())),
        lambda_max=Estimate(float(torch.linalg.eigvalsh(H)[-1])),
    )
    plan = Plan.from_spectrum(spectrum, DAMPING, chains=chains)
    return plan.replace(num_steps=max(2, round(steps * plan.num_steps)))


def norm(vector: Tensor) -> float:
    """In the norm of H."""
    return math.sqrt(float(vector @ finite_sum().mean.matrix @ vector))


# --- what a subset's solution is off by -----------------------------------------------------------------------


def test_the_error_of_a_subset_is_what_the_correction_equation_says() -> None:
    """ũ - u* = -A⁻¹(H_S - H)ũ, to the last bits."""
    g, star = right_hand_side(), torch.linalg.solve(dense(), right_hand_side()["x"])
    part = system().subset(40, generator(5))
    solver = ConjugateGradient(tolerance=1e-10)
    found = solver.solve(part, g, generator=generator()).value["x"]
    difference = part.operator.matrix - finite_sum().mean.matrix  # type: ignore[attr-defined]
    assert norm(found - star) > 0.1 * norm(star)
    torch.testing.assert_close(
        found - star, -torch.linalg.solve(dense(), difference @ found), rtol=1e-8, atol=1e-9
    )


def test_variance_and_bias_of_subset_solutions() -> None:
    """C·d₂/s and C·d/s; normal terms have C = 1 and one more direction, ``(uᵀHA⁻¹HA⁻¹Hu)/(uᵀHu)``."""
    values = torch.linspace(1.5, 0.1, N, dtype=torch.float64).square()
    shrunk = values / (values + DAMPING)
    star = right_hand_side()["x"] / (values + DAMPING)
    size, terms, random = float(values @ star.square()), 400, generator(0)
    found = []
    for _ in range(600):
        x = torch.randn(terms, N, generator=random, dtype=torch.float64) * values.sqrt()
        H = x.T @ x / terms
        found.append(
            torch.linalg.solve(H + DAMPING * torch.eye(N, dtype=torch.float64), right_hand_side()["x"])
        )
    spread = torch.stack(found) - torch.stack(found).mean(0)
    variance = Estimate.from_samples([float(values @ e.square()) / size for e in spread])
    expected = float(shrunk.square().sum()) + float((values * shrunk.square()) @ star.square()) / size
    assert variance.value * terms == pytest.approx(expected, rel=0.1)
    bias = torch.stack(found).mean(0) - star
    along = shrunk * star  # E(ũ - u*) ≈ (d/s) A⁻¹H u*, and as much again where Σ has its other direction
    share = float((values * bias) @ along) / float((values * along) @ along)
    assert share * terms == pytest.approx(float(shrunk.sum()) + 1, rel=0.2)


# --- steps from there -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("snapshot", [False, True])
@pytest.mark.parametrize("preconditioned", [False, True])
def test_the_mean_is_the_closed_form(snapshot: bool, preconditioned: bool) -> None:
    """u* + mean_t (I - ηP⁻¹A)^t (ũ_c - u*) given the starts, with and without control variates."""
    A, g, plan = system(), right_hand_side(), exact_plan(chains=40)
    P, inverse = None, torch.eye(N, dtype=torch.float64)
    if preconditioned:
        P = nystrom(A.operator, DAMPING, rank=3, generator=generator(2))
        inverse = P.solve(ParamVector({"x": inverse}, columns=N))["x"]
        spectrum = estimate_spectrum(Preconditioned(A.operator, P), generator=generator(3))
        plan = Plan.preconditioned(spectrum, chains=40)
    plan = plan.replace(num_steps=4)
    solver = Refinement(plan=plan, subset=30, snapshot=snapshot, preconditioner=P)
    solution = solver.solve(A, g, generator=generator(0))
    starts = torch.stack([u["x"] for u in solver._start(A, g, generator(0)).values])
    star = torch.linalg.solve(dense(), g["x"])
    step = torch.eye(N, dtype=torch.float64) - plan.step_size * inverse @ dense()
    left = sum(torch.linalg.matrix_power(step, t) for t in (3, 4)) / 2
    noise = torch.stack([c["x"] for c in solution.chains]) - star - (starts - star) @ left.T
    assert bool((noise.mean(0).abs() <= 4 * noise.std(0) / math.sqrt(40)).all())
    assert norm(starts.mean(0) - star) > 2 * norm(noise.mean(0))  # or there would be nothing to see


def test_a_snapshot_leads_to_the_whole_sets_solution_and_a_subset_does_not() -> None:
    A, g = system(), right_hand_side()
    star = torch.linalg.solve(dense(), g["x"])

    def errors(steps: float, snapshot: bool) -> tuple[float, Solution]:
        solver = Refinement(plan=exact_plan(steps=steps), subset=60, snapshot=snapshot, start_tolerance=1e-6)
        solution = solver.solve(A, g, generator=generator(3))
        return norm(solution.value["x"] - star) / norm(star), solution

    starts = Refinement(plan=exact_plan(), subset=60, start_tolerance=1e-6)._start(A, g, generator(3)).values
    subsets = sum(norm(u["x"] - star) for u in starts) / 4 / norm(star)
    without, _ = errors(16.0, False)
    once, solution = errors(1.0, True)
    long, _ = errors(16.0, True)
    assert subsets > 0.1
    assert once < 0.2 * subsets
    assert long < 0.4 * once
    assert long < 0.02
    assert long < 0.4 * without
    assert bool(solution.converged)
    # gᵀu along the way: from the snapshot's to the solution's
    assert solution.paths is not None
    end = float(solution.paths[:, -1].mean())
    assert end == pytest.approx(float(star @ g["x"]), rel=0.05)


def test_a_snapshot_at_the_solution_leaves_no_noise_at_all() -> None:
    """All chains begin there, r = 0, and every batch agrees."""
    g = right_hand_side()
    same = FiniteSum(torch.stack([finite_sum().mean.matrix] * 5))
    solver = Refinement(
        plan=exact_plan().replace(batch_size=2), subset=3, snapshot=True, start_tolerance=1e-12
    )
    solution = solver.solve(Damped(same, DAMPING), g, generator=generator())
    torch.testing.assert_close(
        solution.value["x"], torch.linalg.solve(dense(), g["x"]), rtol=1e-9, atol=1e-10
    )
    assert float(solution.stderr["x"].max()) < 1e-9
    assert float(solution.residual) < 1e-8


def test_the_snapshots_length_takes_out_the_subsets_bias() -> None:
    A, g = system(), ParamVector.stack([right_hand_side(), ParamVector({"x": torch.ones(N).double()})])
    solver = Refinement(plan=exact_plan(), subset=20, snapshot=True)
    starts = solver._start(A, g, generator(1)).values
    snapshot = solver._take_snapshot(A, g, starts, generator(2))
    assert snapshot is not None
    star = torch.linalg.solve(dense(), g["x"].T).T
    mean = ParamVector.mean(starts)["x"]
    for k in range(2):
        v, w = snapshot.point["x"][k], mean[k]
        torch.testing.assert_close(snapshot.residual["x"][k], g["x"][k] - dense() @ v)
        length = float(g["x"][k] @ w) / float(w @ dense() @ w)
        torch.testing.assert_close(v, length * w)
        assert length < 1  # subsets' solutions are too long
        assert norm(v - star[k]) < norm(w - star[k])


# --- when a snapshot pays ---------------------------------------------------------------------------------------


def test_the_rule() -> None:
    """n + L < L/3ω."""
    assert snapshot_pays(1000, 2000, 0.1)
    assert not snapshot_pays(1000, 2000, 0.4)
    assert not snapshot_pays(10_000, 2000, 0.1)
    assert snapshot_pays(10_000, 20_000, 0.1)
    assert not snapshot_pays(1, 2000, 0.34)  # poor starts


@pytest.mark.parametrize(("steps", "taken"), [(0.0, False), (6.0, True)], ids=["few steps", "many steps"])
def test_a_snapshot_is_taken_where_it_pays(steps: float, taken: bool) -> None:
    A, g, plan = system(), right_hand_side(), exact_plan(steps=steps)
    solver = Refinement(plan=plan, subset=60)
    solution = solver.solve(A, g, generator=generator())
    first = solver._start(A, g, generator()).products
    assert solution.num_products == first + taken + plan.num_products + solver.residual_batches


def test_what_a_snapshot_saves_is_what_the_rule_supposes() -> None:
    """Noise of the same steps: with one, less than 2ω of what it is without."""
    A, g, plan = system(), right_hand_side(), exact_plan(steps=0.5)
    spread, variances = {False: 0.0, True: 0.0}, []
    for seed in range(10):
        for snapshot in (False, True):
            solver = Refinement(plan=plan, subset=30, snapshot=snapshot)
            solution = solver.solve(A, g, generator=generator(seed))
            spread[snapshot] += sum(norm(c["x"] - solution.value["x"]) ** 2 for c in solution.chains)
        starts = [u["x"] for u in solver._start(A, g, generator(seed)).values]
        mean = torch.stack(starts).mean(0)
        variances.append(sum(norm(u - mean) ** 2 for u in starts) / 3 / norm(mean) ** 2)
        if seed == 0:  # as the solver itself finds it, on a few terms
            found = relative_spread(A, solver._start(A, g, generator(0)).values, 300, generator(9))
            assert found == pytest.approx(variances[0], rel=0.3)
    variance = sum(variances) / 10
    assert 0.1 * variance < spread[True] / spread[False] < 2 * variance


# --- honest errors ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("snapshot", [False, True])
def test_intervals_cover_the_truth(snapshot: bool) -> None:
    """Student-t 95% intervals of a random functional each, over many independent solves: within binomial error."""
    A, plan, random = system(), exact_plan(steps=0.5), generator(5)
    solver = Refinement(plan=plan, subset=30, snapshot=snapshot, residual_batches=2)
    hits, solves, columns = 0, 30, 3
    for seed in range(solves):
        g, functionals = (torch.randn(columns, N, generator=random, dtype=torch.float64) for _ in range(2))
        solution = solver.solve(A, ParamVector({"x": g}, columns=columns), generator=generator(seed))
        value, stderr = solution.project(ParamVector({"x": functionals}, columns=columns))
        assert solution.degrees_of_freedom == 3
        exact = functionals @ torch.linalg.solve(dense(), g.T)
        width = student.ppf(0.975, 3) * stderr.diagonal()
        hits += int(((value.diagonal() - exact.diagonal()).abs() <= width).sum())
    count = solves * columns
    # 90% to 99% asked for, and two standard errors of counting
    assert 0.90 - 2 * math.sqrt(0.90 * 0.10 / count) <= hits / count
    assert hits / count <= 0.99 + 2 * math.sqrt(0.99 * 0.01 / count)


@pytest.mark.parametrize("snapshot", [False, True])
def test_parts_of_the_error(snapshot: bool) -> None:
    A, g, plan = system(), right_hand_side(), exact_plan(steps=0.5)
    star, ratios = torch.linalg.solve(dense(), g["x"]), []
    solver = Refinement(plan=plan, subset=60, snapshot=snapshot)
    left = left_of_start(plan, range(plan.num_steps - plan.num_steps // 2 + 1, plan.num_steps + 1))
    for seed in range(8):
        solution = solver.solve(A, g, generator=generator(seed))
        parts, value = solution.error_parts, solution.value["x"]
        assert parts is not None
        error = norm(value - star) / norm(star)
        assert error <= float(parts.bias) + 3 * float(parts.sampling)
        assert 0 < float(parts.certificate) <= 0.05  # of the starts, which were solved to so much
        moved = ParamVector.mean(solver._start(A, g, generator(seed)).values)["x"] - value
        ratios.append(
            float(parts.bias) * norm(value) / (left * math.sqrt(float(moved @ dense() @ moved)))
        )  # of a few terms and all
    found = Estimate.from_samples(ratios)
    assert abs(found.value - 1) <= 4 * found.stderr
    assert found.stderr < 0.15


def test_divergence_is_noticed_named_and_mended() -> None:
    A, g, plan = system(), right_hand_side(), exact_plan()
    long = plan.replace(step_size=8 * plan.step_size)
    with pytest.raises(DivergenceError, match=r"too (long|small)"):
        Refinement(plan=long, subset=30, recover=False).solve(A, g, generator=generator())
    with pytest.warns(WhenceWarning, match="diverged"):
        solution = Refinement(plan=long, subset=30).solve(A, g, generator=generator())
    assert bool(solution.converged)
    assert any("Starting again" in event for event in solution.events)


def test_a_preconditioned_start_is_as_good_and_takes_fewer_iterations() -> None:
    A, g, star = system(), right_hand_side(), torch.linalg.solve(dense(), right_hand_side()["x"])
    P = nystrom(A.operator, DAMPING, rank=6, generator=generator(2))
    plain = Refinement(plan=exact_plan(), subset=60)
    first = plain._start(A, g, generator(4))
    second = Refinement(plan=exact_plan(), subset=60, preconditioner=P)._start(A, g, generator(4))
    assert second.products <= 0.7 * first.products
    errors = [sum(norm(u["x"] - star) for u in starts.values) for starts in (first, second)]
    assert errors[1] < 1.2 * errors[0]
    # to the end of the way both are the subset's own solution
    far = Refinement(plan=exact_plan(), subset=60, preconditioner=P, start_tolerance=1e-6)
    for a, b in zip(first.values, far._start(A, g, generator(4)).values, strict=True):
        assert norm(a["x"] - b["x"]) < 0.05 * norm(a["x"])


# --- refused, resumed ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"subset": 0}, "subset is 0"),
        ({"subset": 2.5}, r"subset is 2\.5"),
        ({"subset": 301}, "301 is outside"),
        ({"snapshot": "yes"}, "snapshot is 'yes'"),
        ({"plan": exact_plan(chains=1)}, "one chain"),
        ({"start_tolerance": 0.0}, "tolerance is 0"),
        ({"max_iterations": 0}, "max_iterations is 0"),
        ({"tail": 2.0}, "tail is 2"),
        ({"plan": exact_plan().replace(damping=0.2)}, r"plan was made for 0\.2"),
    ],
    ids=[
        "none", "not whole", "more than all", "snapshot", "one chain", "tolerance", "iterations", "tail", "damping",
    ],
)  # fmt: skip
def test_what_is_refused_before_any_product(options: dict[str, object], what: str) -> None:
    class Untouchable(FiniteSum):
        def matvec(self, vector: ParamVector) -> ParamVector:
            raise AssertionError("a product was made")

        sample = matvec  # type: ignore[assignment]

    A = Damped(Untouchable(finite_sum().matrices), DAMPING)
    with pytest.raises(OptionError, match=what):
        Refinement(**{"plan": exact_plan(), "subset": 30, **options}).solve(  # type: ignore[arg-type]
            A, right_hand_side(), generator=generator()
        )


@pytest.mark.parametrize("snapshot", [False, True])
def test_an_interrupted_solve_ends_in_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot: bool
) -> None:
    monkeypatch.setattr("os.fsync", lambda handle: None)
    plan = exact_plan(chains=3).replace(num_steps=3)
    block = system().zeros(2).randn_like(generator(3))

    def solve(journal: FileJournal | None) -> Solution:
        solver = Refinement(plan=plan, subset=30, snapshot=snapshot)
        return solver.solve(system(), block, generator=generator(7), journal=journal)

    whole = solve(None)
    for at in range(1, 3 * (3 + 1) + 1, 3):
        place = tmp_path / str(at)
        with pytest.raises(KilledError):
            solve(InterruptedJournal(place, plan, at=at))
        resumed = solve(FileJournal(place, plan, seconds=0.0))
        assert torch.equal(resumed.value["x"], whole.value["x"])
        assert all(torch.equal(a["x"], b["x"]) for a, b in zip(resumed.chains, whole.chains, strict=True))
        assert torch.equal(resumed.residual, whole.residual)
        assert resumed.num_term_products == whole.num_term_products
        assert resumed.paths is not None
        assert whole.paths is not None
        assert torch.equal(resumed.paths, whole.paths)


def test_nothing_asked_is_nothing_answered() -> None:
    """A column of zeros in a block, in float32, with a snapshot."""
    matrices = finite_sum().matrices.float()
    block = ParamVector({"x": torch.stack([right_hand_side()["x"].float(), torch.zeros(N)])}, columns=2)
    solver = Refinement(plan=exact_plan(), subset=60, snapshot=True)
    solution = solver.solve(Damped(FiniteSum(matrices), DAMPING), block, generator=generator())
    assert solution.value["x"].dtype == torch.float32
    assert not bool(solution.value["x"][1].any())
    assert solution.value.is_finite()
    assert bool(torch.isfinite(solution.residual).all())
    assert solution.error_parts is not None
    assert float(solution.error_parts.sampling[1]) == 0.0
    nothing = Refinement(plan=exact_plan(), subset=60).solve(
        system(), right_hand_side().zeros_like(), generator=generator()
    )
    assert not bool(nothing.value["x"].any())


# --- real images -----------------------------------------------------------------------------------------------


@dataclass
class Images:
    gnh: GaussNewton
    queries: ParamVector
    train: ParamVector
    damping: float
    exact: Tensor
    plan: Plan


@functools.cache
def images(kappa: float) -> Images:
    """Softmax regression on the digits, some labels wrong; exact scores from its dense Hessian."""
    train, test = load()
    torch.manual_seed(0)
    model = nn.Linear(64, 10)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(train.tensors[0]), train.tensors[1]).backward()
        optimizer.step()
    gnh = GaussNewton(model.eval(), Classification(), train)
    queries = gnh.gradients([test[i] for i in range(6)])
    gradients = flatten(gnh.gradients(train))
    H = exact_hessian(model, train.tensors[0])
    damping = float(torch.linalg.eigvalsh(H)[-1]) / kappa
    inverse = torch.linalg.solve(H + damping * torch.eye(len(H), dtype=torch.float64), gradients.T)
    spectrum = estimate_spectrum(gnh, generator=generator(), probes=100)
    plan = Plan.from_spectrum(spectrum, damping, C=spectrum.safe_constant)
    block = unflatten(gradients.float(), gnh)
    return Images(gnh, queries, block, damping, flatten(queries) @ inverse, plan)


@pytest.mark.parametrize("snapshot", [False, True])
@pytest.mark.parametrize("kappa", [10, 100])
def test_intervals_cover_exact_scores_of_images(kappa: float, snapshot: bool) -> None:
    problem = images(kappa)
    plan = problem.plan.replace(num_steps=problem.plan.num_steps // 2)
    covered, correlations = [], []
    for seed in range(2):
        solution = Refinement(plan=plan, subset=64 if kappa == 10 else 128, snapshot=snapshot).solve(
            Damped(problem.gnh, problem.damping), problem.queries, generator=generator(seed)
        )
        assert solution.events == ()
        value, stderr = solution.project(problem.train)
        width = student.ppf(0.975, solution.degrees_of_freedom) * stderr
        covered.append(((value - problem.exact).abs() <= width).double().mean())
        correlations.append(correlation(value, problem.exact).mean())
        parts = solution.error_parts
        assert parts is not None
        error = (value - problem.exact).norm(dim=1) / problem.exact.norm(dim=1)
        assert bool((error <= 2 * (parts.bias + parts.sampling)).all())
    assert 0.90 <= float(torch.stack(covered).mean()) <= 0.99
    assert float(torch.stack(correlations).mean()) >= (0.995 if snapshot else 0.98)


def test_a_subset_start_makes_short_chains_honest() -> None:
    """At half of the plan's steps LiSSA has not forgotten its start, and its intervals do not show it."""
    problem = images(100)
    A = Damped(problem.gnh, problem.damping)
    short = problem.plan.replace(num_steps=problem.plan.num_steps // 2)
    missing, covered = [], []
    for solver in (Lissa(short), Refinement(plan=short, subset=64, snapshot=False)):
        solution = solver.solve(A, problem.queries, generator=generator(2))
        value, stderr = solution.project(problem.train)
        missing.append(1 - float(correlation(value, problem.exact).mean()))
        width = student.ppf(0.975, 3) * stderr
        covered.append(float(((value - problem.exact).abs() <= width).double().mean()))
    assert missing[1] < 0.6 * missing[0]
    assert covered[0] < 0.90 <= covered[1] <= 0.99
