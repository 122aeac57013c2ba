"""LiSSA's steps through a preconditioner, against closed forms; starts of all kinds; the parts of the error."""

from __future__ import annotations

import copy
import itertools
import math

import pytest
import torch
from torch import Tensor

from small import generator
from whence import (
    ConjugateGradient,
    Damped,
    Estimate,
    FiniteSum,
    Lissa,
    ParamVector,
    Plan,
    Spectrum,
)
from whence.errors import DivergenceError, OptionError, VectorError, WhenceWarning
from whence.preconditioners import LowRank, Preconditioned, nystrom
from whence.solvers.held_out import left_of_default_start, left_of_start
from whence.solvers.lissa import LissaState

N = 10
DAMPING = 0.05


def finite_sum(count: int = 60) -> FiniteSum:
    x = torch.randn(count, N, generator=generator(1), dtype=torch.float64)
    x = x * torch.linspace(1.5, 0.1, N, dtype=torch.float64)
    return FiniteSum(torch.einsum("ci,cj->cij", x, x))


def dense_inverse(P: LowRank) -> Tensor:
    return P.solve(ParamVector({"x": torch.eye(N, dtype=torch.float64)}, columns=N))["x"]


def exact_spectrum(A: FiniteSum, P: LowRank) -> Spectrum:
    """Of ``P^(-1/2)HP^(-1/2)``."""
    eye = ParamVector({"x": torch.eye(A.zeros().numel, dtype=torch.float64)}, columns=A.zeros().numel)
    values = torch.linalg.eigvalsh(Preconditioned(A, P).matvec(eye)["x"])
    return Spectrum(
        trace=Estimate(float(values.sum())),
        frobenius=Estimate(float(values.norm())),
        lambda_max=Estimate(float(values[-1])),
    )


def right_hand_side() -> ParamVector:
    return ParamVector({"x": torch.linspace(1.0, -0.5, N, dtype=torch.float64)})


def problem(terms: int | None = 20) -> tuple[FiniteSum, LowRank, Plan]:
    A = finite_sum()
    P = nystrom(A, DAMPING, rank=3, terms=terms, generator=generator(2))
    return A, P, Plan.preconditioned(exact_spectrum(A, P))


def system_of(A: FiniteSum) -> Tensor:
    return A.mean.matrix + DAMPING * torch.eye(A.zeros().numel, dtype=torch.float64)


# --- the mean of the path -------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [False, True], ids=["from P⁻¹g", "from a start"])
@pytest.mark.parametrize("average", ["last", "tail"])
@pytest.mark.parametrize("steps", [1, 3, 12])
def test_mean_after_n_steps_is_the_closed_form(steps: int, average: str, given: bool) -> None:
    """E u^t = u* + (I - ηP⁻¹A)^t (u⁰ - u*), and the tail's mean is the mean of these, within 4 standard errors."""
    A, P, plan = problem()
    g, plan = right_hand_side(), plan.replace(num_steps=steps, chains=150)
    start = ParamVector({"x": torch.linspace(-1.0, 3.0, N, dtype=torch.float64)}) if given else None
    solution = Lissa(plan, average=average, preconditioner=P).solve(  # type: ignore[arg-type]
        Damped(A, DAMPING), g, generator=generator(), start=start
    )
    inverse = dense_inverse(P)
    star = torch.linalg.solve(system_of(A), g["x"])
    first = inverse @ g["x"] if start is None else start["x"]
    step = torch.eye(N, dtype=torch.float64) - plan.step_size * inverse @ system_of(A)
    path = [star + torch.linalg.matrix_power(step, t) @ (first - star) for t in range(1, steps + 1)]
    expected = torch.stack(path[-(1 if average == "last" else max(1, round(steps / 2))) :]).mean(0)
    error = (solution.value["x"] - expected).abs()
    assert bool((error <= 4 * solution.stderr["x"]).all())
    assert float(solution.stderr["x"].norm()) < 0.25 * float((first - star).norm())
    plain = star + torch.linalg.matrix_power(
        torch.eye(N, dtype=torch.float64) - plan.step_size * system_of(A), steps
    ) @ (first - star)
    assert float((solution.value["x"] - plain).norm()) > 5 * float((solution.value["x"] - expected).norm())


def test_several_right_hand_sides_share_every_batch() -> None:
    A, P, plan = problem()
    g, other = right_hand_side(), ParamVector({"x": torch.ones(N, dtype=torch.float64)})
    solver, system = Lissa(plan, preconditioner=P), Damped(A, DAMPING)
    together = solver.solve(system, ParamVector.stack([g, other]), generator=generator(4))
    for k, single in enumerate((g, other)):
        alone = solver.solve(system, single, generator=generator(4))
        torch.testing.assert_close(together.value["x"][k], alone.value["x"], rtol=1e-9, atol=1e-11)
    assert together.num_products == alone.num_products


def test_it_is_plain_lissa_in_the_coordinates_of_the_root() -> None:
    """P = λ is LiSSA itself, with ηλ for η."""
    A, g = finite_sum(), right_hand_side()
    top = torch.zeros(1, N, dtype=torch.float64)
    top[0, 0] = 1.0
    P = LowRank(
        vectors=ParamVector({"x": top}, columns=1),
        eigenvalues=torch.tensor([1e-14], dtype=torch.float64),
        damping=DAMPING,
        correction=torch.eye(1, dtype=torch.float64),
        slack=0.0,
        settled=1,
        terms=60,
        exact_for_terms=60,
        num_products=0,
    )
    spectrum = exact_spectrum(A, P)
    preconditioned = Plan.preconditioned(spectrum)
    plain = preconditioned.replace(damping=DAMPING, step_size=preconditioned.step_size / DAMPING)
    system = Damped(A, DAMPING)
    first = Lissa(preconditioned, preconditioner=P).solve(system, g, generator=generator(3))
    second = Lissa(plain).solve(system, g, generator=generator(3))
    torch.testing.assert_close(first.value["x"], second.value["x"], rtol=1e-9, atol=1e-11)
    lambda_max = float(torch.linalg.eigvalsh(A.mean.matrix)[-1])
    assert plain.step_size == pytest.approx(1 / (lambda_max + DAMPING), rel=1e-9)


# --- the plan --------------------------------------------------------------------------------------------------


def test_what_the_plan_promises() -> None:
    spectrum = Spectrum(trace=Estimate(200.0), frobenius=Estimate(40.0), lambda_max=Estimate(19.0))
    plan = Plan.preconditioned(spectrum)
    assert (plan.step_size, plan.batch_size, plan.num_steps) == (1 / 20, 22, 40)
    # T·|B| = 2C·Tr(P⁻¹H), up to (λmax + 1)/λmax and rounding
    assert plan.num_steps * plan.batch_size == pytest.approx(2 * 2.0 * 200.0 * 20 / 19, rel=0.05)
    assert plan.stable
    slower = Plan.preconditioned(spectrum, smallest=0.5)
    assert (slower.step_size, slower.batch_size, slower.num_steps) == (1 / 20, 22, 80)
    within = Plan.preconditioned(spectrum, num_terms=10)
    assert within.batch_size == 10
    assert within.stable
    assert within.num_steps * within.step_size == pytest.approx(40 / 20, rel=0.05)
    for smallest in (0.0, -1.0, 1.5, math.nan):
        with pytest.raises(OptionError, match="smallest"):
            Plan.preconditioned(spectrum, smallest=smallest)


def test_a_preconditioner_makes_a_solve_cheaper() -> None:
    """By the factor that Tr(P⁻¹H) is less than Tr(H)/λ."""
    A, _, plan = problem(terms=None)
    trace = float(A.mean.matrix.trace()) / DAMPING
    spectrum = Spectrum(
        trace=Estimate(trace * DAMPING),
        frobenius=Estimate(1.0),
        lambda_max=Estimate(float(torch.linalg.eigvalsh(A.mean.matrix)[-1])),
    )
    plain = Plan.from_spectrum(spectrum, DAMPING)
    assert plan.spectrum.trace.value < 0.5 * trace
    assert plan.num_term_products < 0.65 * plain.num_term_products


# --- divergence ------------------------------------------------------------------------------------------------


def counterexample() -> tuple[FiniteSum, LowRank, Plan]:
    """The paper's signs, x = (±√λ_i): in P's coordinates too, every term has all of the trace."""
    values = torch.tensor([20.0, 10.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0], dtype=torch.float64)
    signs = torch.tensor(list(itertools.product([-1.0, 1.0], repeat=8)), dtype=torch.float64) * values.sqrt()
    A = FiniteSum(torch.einsum("ci,cj->cij", signs, signs))
    P = LowRank(
        vectors=ParamVector({"x": torch.eye(8, dtype=torch.float64)[:2]}, columns=2),
        eigenvalues=values[:2].clone(),
        damping=DAMPING,
        correction=torch.eye(2, dtype=torch.float64),
        slack=0.0,
        settled=2,
        terms=256,
        exact_for_terms=256,
        num_products=2,
    )
    return A, P, Plan.preconditioned(exact_spectrum(A, P))


def test_the_plan_converges_and_a_tenth_of_its_batch_diverges() -> None:
    A, P, plan = counterexample()
    g, system = ParamVector({"x": torch.ones(8, dtype=torch.float64)}), Damped(A, DAMPING)
    solution = Lissa(plan, preconditioner=P).solve(system, g, generator=generator())
    assert bool(solution.converged)
    assert solution.stats.events == ()
    star = torch.linalg.solve(system_of(A), g["x"])
    assert float((solution.value["x"] - star).norm()) < 0.3 * float(star.norm())
    small = plan.replace(batch_size=plan.batch_size // 10, num_steps=400)
    with pytest.raises(DivergenceError, match=r"batch \|B\| = 1 is too small"):
        Lissa(small, preconditioner=P, recover=False).solve(system, g, generator=generator())
    with pytest.warns(WhenceWarning, match="too small"):
        mended = Lissa(small, preconditioner=P).solve(system, g, generator=generator())
    assert bool(mended.converged)
    assert mended.stats.plan is not None
    assert mended.stats.plan.batch_size >= plan.smallest_stable_batch
    assert float((mended.value["x"] - star).norm()) < 0.3 * float(star.norm())


def test_too_long_a_step_is_told_from_too_small_a_batch() -> None:
    A, P, plan = counterexample()
    g, system = ParamVector({"x": torch.ones(8, dtype=torch.float64)}), Damped(A, DAMPING)
    long = plan.replace(step_size=8 * plan.step_size, batch_size=256)
    with pytest.raises(DivergenceError, match=r"step η = .* is too long"):
        Lissa(long, preconditioner=P, recover=False).solve(system, g, generator=generator())
    with pytest.warns(WhenceWarning, match="too long"):
        assert bool(Lissa(long, preconditioner=P).solve(system, g, generator=generator()).converged)


def test_a_start_longer_than_any_solution_is_no_divergence() -> None:
    A, P, plan = problem()
    g = right_hand_side()
    far = g.clone().scale_(10 / DAMPING)
    solver, system = Lissa(plan.replace(num_steps=200), preconditioner=P, recover=False), Damped(A, DAMPING)
    solution = solver.solve(system, g, generator=generator(), start=far)
    star = torch.linalg.solve(system_of(A), g["x"])
    assert float((solution.value["x"] - star).norm()) < 0.1 * float((far["x"] - star).norm())
    # measured with the right-hand side alone, it would have been one at once
    state = solver.begin(system, g, generator=generator(), start=far)
    state.radius = g.norm() / DAMPING
    with pytest.raises(DivergenceError):
        solver.step(system, g, state)


# --- refused ---------------------------------------------------------------------------------------------------


def test_a_preconditioner_of_another_damping_is_refused() -> None:
    A, P, plan = problem()
    with pytest.raises(OptionError, match=r"preconditioner was made for 0\.05"):
        Lissa(plan, preconditioner=P).solve(Damped(A, 2 * DAMPING), right_hand_side(), generator=generator())
    assert plan.damping != DAMPING  # which is the smallest eigenvalue's, and no matter


@pytest.mark.parametrize(
    ("start", "what"),
    [
        (ParamVector({"x": torch.zeros(2, N, dtype=torch.float64)}, columns=2), "columns"),
        (ParamVector({"x": torch.zeros(N + 1, dtype=torch.float64)}), "shape"),
        (ParamVector({"y": torch.zeros(N, dtype=torch.float64)}), "another model"),
        (ParamVector({"x": torch.full((N,), torch.nan, dtype=torch.float64)}), "NaN"),
    ],
    ids=["a block", "another shape", "other names", "not finite"],
)
def test_a_start_of_another_form_is_refused(start: ParamVector, what: str) -> None:
    A, P, plan = problem()
    with pytest.raises(VectorError, match=what):
        Lissa(plan, preconditioner=P).solve(
            Damped(A, DAMPING), right_hand_side(), generator=generator(), start=start
        )


# --- resumed ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [False, True], ids=["from P⁻¹g", "from a start"])
def test_a_solve_that_goes_on_ends_in_the_same_bits(given: bool) -> None:
    A, P, plan = problem()
    plan = plan.replace(num_steps=4, chains=3)
    block = A.zeros(2).randn_like(generator(3))
    start = A.zeros(2).randn_like(generator(1)) if given else None
    solver, system = Lissa(plan, preconditioner=P), Damped(A, DAMPING)
    saved: list[LissaState] = []
    whole = solver.solve(
        system, block, generator=generator(7), start=start, on_step=lambda s: saved.append(copy.deepcopy(s))
    )
    assert len(saved) == 12
    for state in saved[::3]:
        again = solver.solve(system, block, generator=generator(), state=state)
        assert torch.equal(again.value["x"], whole.value["x"])
        assert all(torch.equal(a["x"], b["x"]) for a, b in zip(again.chains, whole.chains, strict=True))
        assert torch.equal(again.residual, whole.residual)
        assert torch.equal(again.stats.error_parts.sampling, whole.stats.error_parts.sampling)
        assert torch.equal(again.stats.error_parts.bias, whole.stats.error_parts.bias)


# --- parts of the error ----------------------------------------------------------------------------------------


def energy(matrix: Tensor, vector: Tensor) -> float:
    return math.sqrt(float(vector @ matrix @ vector))


def mean_of_path(A: FiniteSum, inverse: Tensor, plan: Plan, first: Tensor, g: Tensor, steps: range) -> Tensor:
    star = torch.linalg.solve(system_of(A), g)
    step = torch.eye(N, dtype=torch.float64) - plan.step_size * inverse @ system_of(A)
    left = torch.stack([torch.linalg.matrix_power(step, t) @ (first - star) for t in steps])
    return left.mean(0)


@pytest.mark.parametrize("steps", [2, 7, 40])
def test_what_a_start_leaves_is_bounded(steps: int) -> None:
    """For P with a true smallest eigenvalue, and for P = λ; from P⁻¹g and from anywhere."""
    A, P, plan = problem()
    inverse = dense_inverse(P)
    smallest = float(torch.linalg.eigvals(inverse @ system_of(A)).real.min())
    assert smallest < 0.95  # P is made from a subset
    plan = Plan.preconditioned(plan.spectrum, smallest=min(smallest, 1.0)).replace(num_steps=steps)
    averaged = Lissa(plan, preconditioner=P).averaged(plan)
    assert len(averaged) == max(1, round(steps / 2))
    assert averaged[-1] == steps
    for seed in range(20):
        g, first = torch.randn(2, N, generator=generator(seed), dtype=torch.float64)
        star = torch.linalg.solve(system_of(A), g)
        left = mean_of_path(A, inverse, plan, inverse @ g, g, averaged)
        bound = left_of_default_start(plan, averaged, preconditioned=True)
        assert energy(system_of(A), left) <= bound * energy(system_of(A), star)
        left = mean_of_path(A, inverse, plan, first, g, averaged)
        bound = left_of_start(plan, averaged) * energy(system_of(A), first - star)
        assert energy(system_of(A), left) <= bound


@pytest.mark.parametrize("steps", [4, 30, 200])
def test_what_the_papers_start_leaves_is_bounded_and_the_bound_is_not_far_off(steps: int) -> None:
    """The most unlucky right-hand side of all: the eigenvector of which most is left."""
    A = finite_sum()
    spectrum = Spectrum(
        trace=Estimate(float(A.mean.matrix.trace())),
        frobenius=Estimate(1.0),
        lambda_max=Estimate(float(torch.linalg.eigvalsh(A.mean.matrix)[-1])),
    )
    plan = Plan.from_spectrum(spectrum, DAMPING).replace(num_steps=steps)
    averaged = Lissa(plan).averaged(plan)
    bound = left_of_default_start(plan, averaged, preconditioned=False)
    inverse = torch.eye(N, dtype=torch.float64)
    worst = 0.0
    for g in torch.linalg.eigh(A.mean.matrix)[1].T:
        star = torch.linalg.solve(system_of(A), g)
        left = mean_of_path(A, inverse, plan, g / DAMPING, g, averaged)
        share = energy(A.mean.matrix, left) / energy(A.mean.matrix, star)
        assert share <= bound
        worst = max(worst, share)
    assert worst >= 0.4 * bound


def test_lissa_tells_bias_from_sampling() -> None:
    A, P, plan = problem()
    H, g, system = A.mean.matrix, right_hand_side(), Damped(A, DAMPING)
    star, ratios = torch.linalg.solve(system_of(A), g["x"]), []
    for seed in range(8):
        solution = Lissa(plan.replace(chains=8), preconditioner=P).solve(system, g, generator=generator(seed))
        parts, value = solution.stats.error_parts, solution.value["x"]
        assert parts is not None
        spread = sum(energy(H, c["x"] - value) ** 2 for c in solution.chains) / (8 * 7)
        ratios.append(float(parts.sampling) * energy(H, value) / math.sqrt(spread))  # of 4|B| terms and all
        assert math.isnan(float(parts.certificate))
        error = energy(H, value - star) / energy(H, star)
        assert error <= float(parts.bias) + 3 * float(parts.sampling)
    found = Estimate.from_samples(ratios)
    assert abs(found.value - 1) <= 4 * found.stderr
    assert found.stderr < 0.1
    # four times the steps: less of both
    longer = Lissa(plan.replace(chains=8, num_steps=4 * plan.num_steps), preconditioner=P)
    less = longer.solve(system, g, generator=generator(7)).stats.error_parts
    assert parts is not None
    assert less is not None
    assert float(less.bias) < 0.2 * float(parts.bias)
    assert float(less.sampling) < 0.7 * float(parts.sampling)
    alone = Lissa(plan.replace(chains=1), preconditioner=P).solve(system, g, generator=generator(1))
    assert alone.stats.error_parts is not None
    assert math.isnan(float(alone.stats.error_parts.sampling))


def test_conjugate_gradients_prove_theirs() -> None:
    A, block = finite_sum(), finite_sum().zeros(2).randn_like(generator(3))
    solution = ConjugateGradient(tolerance=0.3).solve(Damped(A, DAMPING), block, generator=generator())
    parts = solution.stats.error_parts
    assert parts is not None
    assert solution.certificate is not None
    assert solution.stats.score_rms is not None
    assert torch.equal(parts.certificate, solution.certificate.upper / solution.stats.score_rms)
    star = torch.linalg.solve(system_of(A), block["x"].T).T
    for k in range(2):
        error = energy(A.mean.matrix, solution.value["x"][k] - star[k])
        assert error <= float(parts.certificate[k]) * float(solution.stats.score_rms[k])
    assert parts.bias.tolist() == parts.sampling.tolist() == [0.0, 0.0]
