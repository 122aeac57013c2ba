"""LiSSA against its closed forms, and its answers to divergence."""

from __future__ import annotations

import copy
import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from whence import (
    Damped,
    Estimate,
    FiniteSum,
    GaussNewton,
    LanguageModeling,
    Lissa,
    ParamVector,
    Plan,
    Regression,
    Spectrum,
    estimate_spectrum,
)
from whence.errors import DivergenceError, WhenceWarning
from whence.solvers.divergence import Divergence, answer
from whence.solvers.held_out import residual_square
from whence.solvers.lissa import LissaState

DAMPING = 0.2


def finite_sum(count: int = 40, n: int = 6) -> FiniteSum:
    x = torch.randn(count, n, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    x = x * torch.linspace(1.5, 0.2, n, dtype=torch.float64)
    return FiniteSum(torch.einsum("ci,cj->cij", x, x))


def exact_spectrum(H: Tensor) -> Spectrum:
    return Spectrum(
        trace=Estimate(float(H.trace())),
        frobenius=Estimate(float(H.norm())),
        lambda_max=Estimate(float(torch.linalg.eigvalsh(H)[-1])),
    )


def exact_plan(A: FiniteSum, damping: float = DAMPING, C: float = 2.0) -> Plan:
    return Plan.from_spectrum(exact_spectrum(A.mean.matrix), damping, C=C)


class Bigram(nn.Module):
    """Each token's logits for the next one."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.linspace(-1, 1, vocabulary**2).reshape(vocabulary, vocabulary).sin())
        self.eval()

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self.table[input_ids]


def right_hand_side(n: int = 6) -> ParamVector:
    return ParamVector({"x": torch.linspace(1.0, -0.5, n, dtype=torch.float64)})


@pytest.mark.parametrize("steps", [1, 3, 10, 30])
@pytest.mark.parametrize("average", ["last", "tail"])
def test_mean_after_n_steps_is_the_closed_form(steps: int, average: str) -> None:
    """E u^t = u* + (I - ηA)^t (u⁰ - u*), and the tail's mean is the mean of these, within 4 standard errors."""
    A, g = finite_sum(), right_hand_side()
    plan = exact_plan(A).replace(num_steps=steps, chains=300)
    solver = Lissa(plan, average=average)
    solution = solver.solve(Damped(A, DAMPING), g, generator=torch.Generator().manual_seed(0))
    system = A.mean.matrix + DAMPING * torch.eye(6, dtype=torch.float64)
    start, star = g["x"] / DAMPING, torch.linalg.solve(system, g["x"])
    step = torch.eye(6, dtype=torch.float64) - plan.step_size * system
    path = [star + torch.linalg.matrix_power(step, t) @ (start - star) for t in range(1, steps + 1)]
    kept = 1 if average == "last" else max(1, round(steps / 2))
    expected = torch.stack(path[-kept:]).mean(0)
    error = (solution.value["x"] - expected).abs()
    assert bool((error <= 4 * solution.stderr["x"]).all())
    assert float(solution.stderr["x"].max()) < 0.1 * float(star.norm())


def test_the_plan_converges_and_averaging_beats_the_floor_of_the_last_iterate() -> None:
    A, g = finite_sum(), right_hand_side()
    star = torch.linalg.solve(A.mean.matrix + DAMPING * torch.eye(6, dtype=torch.float64), g["x"])

    def errors(steps: int) -> tuple[float, float]:
        """Root mean squares over chains: of the last iterate, and of the tail's average along the same path."""
        plan, system = exact_plan(A).replace(num_steps=steps), Damped(A, DAMPING)
        plan, squares = plan.replace(chains=16), torch.zeros(2, dtype=torch.float64)
        for which, average in enumerate(("last", "tail")):
            solver = Lissa(plan, average=average, tail=0.75, recover=False)  # type: ignore[arg-type]
            chains = solver.solve(system, g, generator=torch.Generator().manual_seed(0)).chains
            squares[which] = sum((chain["x"] - star).square().sum() / 16 for chain in chains)
        last, tail = squares.sqrt().tolist()
        return last, tail

    last_short, tail_short = errors(60)
    last_long, tail_long = errors(960)
    assert last_long > 0.6 * last_short  # a floor: sixteen times the steps do not help
    assert tail_long < 0.4 * tail_short  # no floor: about 1/4 expected
    assert tail_long < 0.25 * last_long


def counterexample(n: int = 8) -> FiniteSum:
    """The paper's binary regression: x = (±√λ_1 … ±√λ_N), so E H̃² - H² = (1/|B|) Tr(H) H less H²/|B|."""
    signs = torch.tensor(list(itertools.product([-1.0, 1.0], repeat=n)), dtype=torch.float64)
    return FiniteSum(torch.einsum("ci,cj->cij", signs, signs))


def test_counterexample_diverges_below_the_bound_and_converges_under_the_plan() -> None:
    A, g = counterexample(), right_hand_side(8)
    system = Damped(A, DAMPING)
    assert exact_plan(A, C=1.0).batch_size == 8
    solution = Lissa(exact_plan(A)).solve(system, g, generator=torch.Generator().manual_seed(0))
    assert bool(solution.converged)
    assert solution.stats.events == ()
    with pytest.raises(DivergenceError, match=r"batch \|B\| = 1 is too small") as caught:
        Lissa(exact_plan(A).replace(batch_size=1), recover=False).solve(
            system, g, generator=torch.Generator().manual_seed(0)
        )
    assert "batch_size ≥ 2" in str(caught.value)


def test_divergence_is_noticed_within_a_few_steps() -> None:
    A, g = counterexample(), right_hand_side(8)
    plan = exact_plan(A).replace(batch_size=1, num_steps=10_000)
    solver = Lissa(plan, recover=False)
    state = solver.begin(Damped(A, DAMPING), g, generator=torch.Generator().manual_seed(0))
    with pytest.raises(DivergenceError, match="diverged at step"):
        _to_the_end(solver, Damped(A, DAMPING), g, state)
    assert state.products <= 40


def _to_the_end(solver: Lissa, system: Damped, g: ParamVector, state: LissaState) -> None:
    while not solver.done(state):
        solver.step(system, g, state)


def test_too_small_a_batch_is_answered_by_a_larger_one_aloud() -> None:
    A, g = counterexample(), right_hand_side(8)
    with pytest.warns(WhenceWarning, match="batch"):
        solution = Lissa(exact_plan(A).replace(batch_size=1)).solve(
            Damped(A, DAMPING), g, generator=torch.Generator().manual_seed(0)
        )
    assert bool(solution.converged)
    assert solution.stats.events
    assert "|B| = " in solution.stats.events[-1]


@pytest.mark.parametrize("escape", ["batch", "step"])
def test_chains_that_are_done_go_on_from_their_averages_unless_the_step_was_too_long(escape: str) -> None:
    A, g = counterexample(), right_hand_side(8)
    plan = exact_plan(A)
    system = Damped(A, DAMPING)
    solver = Lissa(plan)
    state = solver.begin(system, g, generator=torch.Generator().manual_seed(0))
    while len(state.finished) < 2 or state.chain is None:
        solver.step(system, g, state)
    done, products = list(state.finished), state.products
    if escape == "step":  # H is the identity: the plan's step is not too long, and 2.5 times that is
        state.plan = plan.replace(step_size=2.5 * plan.step_size)
    state.chain.iterate.copy_(g.clone().scale_(1e6 * float(state.radius.max())))
    back = 1 - 1 % solver._part(plan)
    with pytest.warns(
        WhenceWarning, match=rf"Going on from step {back} .*{'anew' if escape == 'step' else ''}"
    ):
        solver.step(system, g, state)
    assert state.finished == []
    assert state.halfway == (done if escape == "batch" else [])
    assert len(state.paths) == 1
    assert state.chain is not None
    assert state.chain.step == (back if escape == "batch" else 0)
    _to_the_end(solver, system, g, state)
    solution = solver.finish(system, g, state)
    assert len(solution.chains) == plan.chains
    assert {len(path) for path in state.paths} == {state.plan.num_steps}
    assert bool(solution.converged)
    if escape == "batch":
        tails = len(done) * len(solver.averaged(plan))
        rest = (plan.chains - len(done)) * plan.num_steps - back
        assert state.products - products == 1 + tails + rest


@pytest.mark.parametrize("where", ["before the tail", "in the tail"])
def test_a_path_goes_back_to_the_last_place_that_was_kept(where: str) -> None:
    A, g = finite_sum(), right_hand_side()
    plan = exact_plan(A).replace(batch_size=20, num_steps=80)
    solver, system = Lissa(plan), Damped(A, DAMPING)
    state = solver.begin(system, g, generator=torch.Generator().manual_seed(0))
    stop, back = (
        (33, 30) if where == "before the tail" else (60, 40)
    )  # the tail begins at step 41, parts are of 5
    iterates = []
    for _ in range(stop):
        solver.step(system, g, state)
        assert state.chain is not None
        iterates.append(state.chain.iterate.clone())
    state.chain.iterate.scale_(1e6)
    with pytest.warns(WhenceWarning, match=f"Going on from step {back} "):
        solver.step(system, g, state)
    place = iterates[back - 1] if where == "before the tail" else ParamVector.mean(iterates[40:])
    torch.testing.assert_close(state.chain.iterate["x"], place["x"])
    assert (state.chain.step, len(state.paths[0]), state.plan.batch_size) == (back, back, 40)
    _to_the_end(solver, system, g, state)
    assert {len(path) for path in state.paths} == {80}
    found = solver.finish(system, g, state)
    assert bool(found.converged)
    assert found.num_products == state.products + solver.residual_batches


def test_the_heaviest_example_tells_how_large_a_batch_must_be() -> None:
    """A hundred examples of curvature 1, one of 400 beside them: η is about 1/5, and one of 80 must be met."""
    x = torch.ones(100, 1, dtype=torch.float64)
    x[3] = 20
    data = [(row, torch.zeros(1, dtype=torch.float64)) for row in x]
    model = nn.Linear(1, 1, bias=False, dtype=torch.float64).eval()
    gnh = GaussNewton(model, Regression(), data)
    system = Damped(gnh, DAMPING)
    curvature = float(x.square().mean())
    spectrum = Spectrum(*(Estimate(curvature),) * 3)
    plan = Plan.from_spectrum(spectrum, DAMPING).replace(batch_size=2)
    v = ParamVector({"weight": torch.ones(1, 1, dtype=torch.float64)})
    batch = Damped(gnh.over(torch.tensor([3, 5])), DAMPING)
    diverged = Divergence(v, 3, v.norm() / DAMPING, system, plan, None, batch)
    needed = math.ceil(400 * plan.step_size)
    assert answer(diverged, system, plan, attempt=0, recover=True).batch_size == needed > 4


def test_a_larger_batch_is_larger_where_examples_are_drawn_whole() -> None:
    """Half a passage is drawn as one passage, and so was its double."""
    train = [{"input_ids": (torch.arange(20) * k) % 17} for k in range(1, 7)]
    H = GaussNewton(Bigram(17), LanguageModeling(), train)
    g, spectrum = (
        H.zeros().randn_like(torch.Generator()),
        Spectrum(Estimate(1.0), Estimate(1.0), Estimate(1.0)),
    )
    plan = Plan.from_spectrum(spectrum, DAMPING).replace(batch_size=10, step_size=1e-6)
    diverged = Divergence(g, 3, g.norm() / DAMPING, Damped(H, DAMPING), plan)
    cautious = answer(diverged, Damped(H, DAMPING), plan, attempt=0, recover=True)
    before, after = (H.sample(p.batch_size, torch.Generator()).num_terms for p in (plan, cautious))
    assert (before, after) == (19, 38)


@pytest.mark.filterwarnings("ignore:the spectrum's estimates contradict")  # heavy tails, and few probes
@pytest.mark.parametrize("product", ["exact", "finite-difference"])
def test_the_example_that_a_batch_was_too_small_for_is_named(product: Any) -> None:
    """One input is thirty times as long as the others: its batch has a curvature of 900 where the data have 40."""
    x = torch.randn(24, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    x = x / x.norm(dim=1, keepdim=True)
    x[7] *= 30
    model = nn.Linear(3, 1, bias=False, dtype=torch.float64).eval()
    H = GaussNewton(
        model, Regression(), [(row, torch.zeros(1, dtype=torch.float64)) for row in x], product=product
    )
    v = ParamVector({"weight": (x[7] / x[7].norm()).reshape(1, 3)})
    name, curvature = H.subset(24, torch.Generator().manual_seed(0), distinct=True).heaviest_term(v)
    alone = GaussNewton(model, Regression(), [(x[7], torch.zeros(1, dtype=torch.float64))]).quadratic_form(v)
    assert name == "training example 7"
    assert curvature == pytest.approx(float(alone), rel=1e-6)
    spectrum = estimate_spectrum(H, generator=torch.Generator().manual_seed(0))
    plan = Plan.from_spectrum(spectrum, DAMPING).replace(batch_size=1)
    with pytest.raises(
        DivergenceError, match=r"too small .* training example 7 alone has a curvature of .*, the data"
    ):
        Lissa(plan, recover=False).solve(Damped(H, DAMPING), v, generator=torch.Generator().manual_seed(0))


def test_too_long_a_step_is_answered_by_a_shorter_one_and_the_cause_is_named() -> None:
    A, g = finite_sum(), right_hand_side()
    plan = exact_plan(A).replace(step_size=8 * exact_plan(A).step_size, batch_size=40)
    with pytest.raises(DivergenceError, match=r"step η = .* is too long"):
        Lissa(plan, recover=False).solve(Damped(A, DAMPING), g, generator=torch.Generator().manual_seed(0))
    with pytest.warns(WhenceWarning, match="too long"):
        solution = Lissa(plan).solve(Damped(A, DAMPING), g, generator=torch.Generator().manual_seed(0))
    assert bool(solution.converged)


def test_recovery_gives_up_with_the_cause() -> None:
    A, g = finite_sum(), right_hand_side()
    plan = exact_plan(A).replace(step_size=1e6, num_steps=50, batch_size=40)
    with (
        pytest.warns(WhenceWarning),
        pytest.raises(DivergenceError, match="too long"),
    ):
        Lissa(plan).solve(Damped(A, DAMPING), g, generator=torch.Generator().manual_seed(0))


def test_several_right_hand_sides_share_every_batch() -> None:
    A, g = finite_sum(), right_hand_side()
    other = ParamVector({"x": torch.ones(6, dtype=torch.float64)})
    block = ParamVector.stack([g, other])
    solver, system = Lissa(exact_plan(A)), Damped(A, DAMPING)
    together = solver.solve(system, block, generator=torch.Generator().manual_seed(4))
    for k, single in enumerate((g, other)):
        alone = solver.solve(system, single, generator=torch.Generator().manual_seed(4))
        torch.testing.assert_close(together.value["x"][k], alone.value["x"], rtol=1e-10, atol=1e-12)
    assert together.num_products == alone.num_products


def test_the_same_seed_gives_the_same_solution_and_chains_can_be_resumed() -> None:
    A, g = finite_sum(), right_hand_side()
    plan, system = exact_plan(A), Damped(A, DAMPING)
    solver = Lissa(plan)
    runs = [solver.solve(system, g, generator=torch.Generator().manual_seed(9)).value["x"] for _ in range(2)]
    assert torch.equal(*runs)
    saved = []

    def save(state: LissaState) -> None:
        if state.products in (5, plan.num_steps, plan.num_steps + 1):
            saved.append(copy.deepcopy(state))

    whole = solver.solve(system, g, generator=torch.Generator().manual_seed(9), on_step=save)
    assert len(saved) == 3
    for state in saved:
        again = solver.solve(system, g, generator=torch.Generator(), state=state)
        assert torch.equal(again.value["x"], whole.value["x"])
        assert torch.equal(again.residual, whole.residual)
        assert again.num_products == whole.num_products


def test_intervals_cover_the_truth() -> None:
    """Student-t 95% intervals of random functionals, over many independent solves."""
    A, g = finite_sum(), right_hand_side()
    star = torch.linalg.solve(A.mean.matrix + DAMPING * torch.eye(6, dtype=torch.float64), g["x"])
    functionals = torch.randn(30, 6, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    block = ParamVector({"x": functionals}, columns=30)
    plan = exact_plan(A).refined(9)
    hits = []
    for seed in range(60):
        solution = Lissa(plan).solve(Damped(A, DAMPING), g, generator=torch.Generator().manual_seed(seed))
        value, stderr = solution.project(block)
        assert solution.degrees_of_freedom == 3
        hits.append(((value - functionals @ star).abs() <= 3.182 * stderr).double().mean())
    assert 0.90 <= float(torch.stack(hits).mean()) <= 0.99


def test_squared_residual_is_unbiased_where_one_batch_is_not() -> None:
    A, g = finite_sum(), right_hand_side()
    system = Damped(A, DAMPING)
    u = ParamVector({"x": torch.linspace(0.2, 0.6, 6, dtype=torch.float64)})
    true = system.matvec(u).axpy_(-1.0, g)
    scale = float(g.dot(g))
    exact = float(true.dot(true)) / scale
    generator = torch.Generator().manual_seed(0)
    drawn = [residual_square(system, u, g, 4, 2, generator) for _ in range(1500)]
    estimate = Estimate.from_samples([float(square) for square, _ in drawn])
    assert abs(estimate.value - exact) <= 4 * estimate.stderr
    one_batch = Estimate.from_samples(
        [
            float((r := system.sample(8, generator).matvec(u).axpy_(-1.0, g)).dot(r)) / scale
            for _ in range(1500)
        ]
    )
    assert one_batch.value > exact + 10 * one_batch.stderr
    # The stated error bounds the spread of single estimates from above, and not absurdly so.
    spread = estimate.stderr * 1500**0.5
    stated = sum(float(error) ** 2 for _, error in drawn) / 1500
    assert 0.5 * spread <= stated**0.5 <= 5 * spread


def test_a_poor_solution_is_not_called_converged() -> None:
    A, g = finite_sum(), right_hand_side()
    plan = exact_plan(A, 0.01).replace(damping=0.01, num_steps=1, batch_size=40)
    solution = Lissa(plan).solve(Damped(A, 0.01), g, generator=torch.Generator().manual_seed(0))
    assert not bool(solution.converged)
    assert float(solution.residual) > 0.5
