"""Slopes that come with the products, and conjugate gradients that stop when examples' scores have settled."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import text
import whence
from digits import Images, correlation, images, load
from small import DOUBLE, PRODUCTS, Product, evaluated, generator, operator
from whence import ConjugateGradient, Damped, Dense, GaussNewton, LanguageModeling, ParamVector, Regression
from whence.errors import OptionError
from whence.preconditioners import nystrom
from whence.report.formatting import percentage
from whence.runs import Run
from whence.scoring import Scorer
from whence.solvers import CGState
from whence.solvers.auto import relative_error, tolerance_for
from whence.solvers.settling import Settling
from zoo import CASES, Case

# --- slopes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [None, 3])
@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_slopes_are_scores_and_the_product_is_the_same(
    case: Case, product: Product, columns: int | None
) -> None:
    torch.manual_seed(0)
    gnh = GaussNewton(evaluated(case.build()), case.task, case.data(DOUBLE), product=product, micro_batch=3)
    vector = gnh.zeros(columns).randn_like(generator(1))
    gnh.matvec(vector)  # finite differences learn their step
    state = gnh.state()
    plain = gnh.matvec(vector)
    gnh.restore_state(state)
    found, slopes = gnh.matvec_with_slopes(vector)
    assert all(torch.equal(found[name], plain[name]) for name in plain)
    expected = Scorer(gnh, vector, method="gradients").score(torch.arange(len(gnh.terms)))
    tolerance = 1e-6 if product == "exact" else 1e-3  # Llamas normalise in float32
    assert slopes.shape == expected.shape
    assert float((slopes - expected).norm() / expected.norm()) < tolerance


def test_slopes_of_real_numbers() -> None:
    torch.manual_seed(0)
    data = [(torch.randn(3, dtype=DOUBLE), torch.randn(2, dtype=DOUBLE)) for _ in range(7)]
    gnh = GaussNewton(torch.nn.Linear(3, 2).double().eval(), Regression(), data)
    vector = gnh.zeros(2).randn_like(generator(1))
    _, slopes = gnh.matvec_with_slopes(vector)
    assert slopes is not None
    torch.testing.assert_close(slopes, Scorer(gnh, vector, method="gradients").score(torch.arange(7)))


def test_a_matrix_has_no_slopes() -> None:
    product, slopes = Damped(Dense(torch.eye(2)), 0.5).matvec_with_slopes(ParamVector({"x": torch.ones(2)}))
    assert slopes is None
    assert product["x"].tolist() == [1.5, 1.5]


# --- along a solve --------------------------------------------------------------------------------------------


def watched(problem: Images, *, columns: list[int] | None = None, **options: object) -> list[CGState]:
    """A solve to the end, and a copy of what was known after every iteration."""
    rhs = problem.queries
    if columns is not None:
        rhs = ParamVector.stack([problem.queries.column(k) for k in columns])
    seen: list[CGState] = []

    def keep(state: CGState) -> None:
        assert state.settling is not None
        rows = {name: list(getattr(state.settling, name)) for name in ("moved", "removed", "bounds")}
        kept = replace(state.settling, **rows)
        seen.append(replace(state, iterate=state.iterate.clone(), settling=kept))

    start = options.pop("start", None)
    solver = ConjugateGradient(tolerance=1e-4, score_error=1e-9, verify=False, **options)  # type: ignore[arg-type]
    solver.solve(Damped(problem.gnh, problem.damping), rhs, generator=generator(), on_step=keep, start=start)  # type: ignore[call-arg]
    return seen


@pytest.mark.parametrize("kind", ["plain", "preconditioned", "started", "equal columns"])
def test_the_scores_along_the_way_are_those_of_the_iterate(kind: str) -> None:
    problem = images(100.0)
    options: dict[str, object] = {}
    if kind == "preconditioned":
        made = nystrom(problem.gnh, problem.damping, rank=10, terms=400, generator=generator())
        options["preconditioner"] = made.shrunk()
    if kind == "started":
        options["start"] = problem.queries.clone().scale_(0.3 / problem.damping)
    if kind == "equal columns":
        options["columns"] = [0, 0, 3]
    seen = watched(problem, **options)  # type: ignore[arg-type]
    assert len(seen) > 5
    for state in seen:
        assert state.settling is not None
        exact = Scorer(problem.gnh, state.iterate).score(torch.arange(len(problem.gnh.terms)))
        assert float((state.settling.scores - exact).norm() / exact.norm()) < 2e-5


def test_what_a_step_removed_and_moved() -> None:
    """``‖x_k - x_{k-1}‖²_A`` and the variance of the scores' change, from the vectors themselves."""
    problem = images(100.0)
    damped = Damped(problem.gnh, problem.damping)
    seen = watched(problem)
    for before, after in itertools.pairwise(seen[:6]):
        step = after.iterate.clone().axpy_(-1.0, before.iterate)
        settling, previous = after.settling, before.settling
        assert settling is not None
        assert previous is not None
        torch.testing.assert_close(
            torch.tensor(settling.removed[-1], dtype=DOUBLE), damped.quadratic_form(step), rtol=1e-3, atol=0.0
        )
        change = settling.scores - previous.scores
        torch.testing.assert_close(
            torch.tensor(settling.moved[-1], dtype=DOUBLE), change.var(1, correction=0)
        )


def errors(problem: Images, seen: list[CGState], column: int) -> list[tuple[float, float]]:
    """What was expected and what it was, after every iteration."""
    exact = problem.exact[column]
    found = []
    for state in seen:
        assert state.settling is not None
        difference = state.settling.scores[column] - exact
        true = float(difference.std() / exact.std())
        found.append((float(state.settling.error(state.upper)[column]), true))
    return found


@pytest.mark.parametrize("kappa", [10.0, 100.0, 1000.0])
def test_the_expected_error_is_about_the_true_one(kappa: float) -> None:
    problem = images(kappa)
    ratios = [
        expected / true
        for column in range(6)
        for expected, true in errors(problem, watched(problem), column)
        if 0.01 < true < 0.4
    ]
    assert len(ratios) > 10
    middle = torch.tensor(ratios).log().mean().exp()
    assert 0.8 < float(middle) < 1.6
    assert min(ratios) > 0.5


def test_how_loose_the_bound_is_shows_in_its_fall() -> None:
    """A bound that is always 1.5 times the error is taken for what it is; one that fell by chance is not believed."""
    energies = torch.tensor([[4.0, 9.0], [2.0, 5.0], [1.0, 2.0], [0.25, 1.0]], dtype=DOUBLE)

    def found(loose: float) -> Tensor:
        settling = Settling.begin(torch.ones(2, 9), columns=2)
        assert settling is not None
        along = torch.arange(18, dtype=DOUBLE).reshape(2, 9)
        for before, after in itertools.pairwise(energies):
            settling.step(along, None, torch.eye(2, dtype=DOUBLE), before - after)
            settling.bounded(loose * after.sqrt())
        return settling.error(loose * energies[-1].sqrt())

    torch.testing.assert_close(found(1.5), found(1.0))
    torch.testing.assert_close(found(5.0), 5.0 / 1.7 * found(1.0))


@pytest.mark.parametrize("preconditioned", [False, True])
@pytest.mark.parametrize("accuracy", [0.95, 0.99, 0.999])
@pytest.mark.parametrize("kappa", [10.0, 100.0, 1000.0])
def test_a_solve_that_stops_by_its_scores_is_as_good_as_was_asked(
    kappa: float, accuracy: float, preconditioned: bool
) -> None:
    problem = images(kappa)
    preconditioner = None
    if preconditioned:
        made = nystrom(problem.gnh, problem.damping, rank=10, terms=400, generator=generator())
        preconditioner = made.shrunk()
    solver = ConjugateGradient(
        tolerance=1e-9, score_error=relative_error(accuracy), preconditioner=preconditioner, verify=False
    )
    solution = solver.solve(Damped(problem.gnh, problem.damping), problem.queries, generator=generator())
    assert bool(solution.converged.all())
    assert float(correlation(solution.value.gram(problem.train), problem.exact).mean()) >= accuracy


@functools.cache
def passages() -> tuple[GaussNewton, ParamVector, float, Tensor]:
    problem = text.problem()
    gnh = GaussNewton(problem.model, LanguageModeling(), problem.train)
    damping = float(torch.linalg.eigvalsh(problem.hessian)[-1]) / 100
    return gnh, gnh.gradients(problem.queries), damping, problem.exact_scores(damping)


def test_passages_settle_before_their_tokens() -> None:
    """A passage's score averages over its tokens, which the certificate does not know."""
    gnh, rhs, damping, exact = passages()
    by_proof = ConjugateGradient(tolerance=tolerance_for(0.99), verify=False)
    by_scores = replace(by_proof, score_error=relative_error(0.99))
    proven, settled = (
        s.solve(Damped(gnh, damping), rhs, generator=generator()) for s in (by_proof, by_scores)
    )
    assert settled.num_products < proven.num_products
    found = Scorer(gnh, settled.value).score(torch.arange(len(gnh.terms)))
    assert float(correlation(found, exact).mean()) >= 0.99
    # the certificate still holds, and says how far it is from what was not asked for
    assert settled.certificate is not None
    assert settled.stats.score_rms is not None
    assert bool((settled.certificate.upper > tolerance_for(0.99) * settled.stats.score_rms).any())
    assert settled.stats.error_parts is not None
    assert settled.stats.error_parts.expected is not None
    assert float(settled.stats.error_parts.expected.square().mean().sqrt()) <= relative_error(0.99)
    assert proven.stats.error_parts is not None
    assert proven.stats.error_parts.expected is None
    hessian = text.problem().hessian + damping * torch.eye(len(text.problem().hessian), dtype=DOUBLE)
    e = _flat(settled.value) - torch.linalg.solve(hessian, text.problem().query_gradients.T).T
    assert bool((torch.einsum("qi,ij,qj->q", e, hessian, e).sqrt() <= settled.certificate.upper).all())


def _flat(block: ParamVector) -> Tensor:
    return torch.cat([t.flatten(1) for t in block.values()], 1).double()


# --- where there is nothing to watch, and going on ------------------------------------------------------------


def test_without_examples_only_the_proof_counts() -> None:
    A = Damped(Dense(torch.diag(torch.tensor([1.0, 0.1, 0.0]))), 0.1)
    solver = ConjugateGradient(tolerance=1e-3, score_error=10.0)
    solution = solver.solve(A, ParamVector({"x": torch.ones(3)}), generator=generator())
    assert solution.num_products == 4


def test_of_a_few_examples_only_the_proof_counts() -> None:
    gnh = operator(data=operator().terms.data[:3])
    solver = ConjugateGradient(tolerance=1e-6, score_error=10.0, verify=False)
    rhs = gnh.gradients([gnh.terms.data[0]])
    for start in (None, rhs):
        solution = solver.solve(Damped(gnh, 0.1), rhs, generator=generator(), start=start)
        assert solution.stats.score_rms is not None
        assert solution.certificate is not None
        assert bool((solution.certificate.upper <= 1e-6 * solution.stats.score_rms).all())


def test_a_question_without_a_gradient_is_settled() -> None:
    problem = images(100.0)
    rhs = problem.queries.clone()
    rhs.column(2).scale_(0.0)
    solver = ConjugateGradient(tolerance=1e-9, score_error=0.1, verify=False)
    solution = solver.solve(Damped(problem.gnh, problem.damping), rhs, generator=generator())
    assert bool(solution.converged.all())
    assert solution.num_products < 20


def test_nothing_is_settled_before_the_first_step() -> None:
    begun = Settling.begin(torch.ones(2, 9), columns=2)
    assert begun is not None
    assert begun.error(torch.ones(2, dtype=DOUBLE)).tolist() == [math.inf, math.inf]


def test_of_very_many_examples_some_are_looked_at() -> None:
    slopes = torch.arange(2**18, dtype=DOUBLE).reshape(1, -1)
    begun = Settling.begin(slopes, columns=1)
    assert begun is not None
    begun.step(slopes, None, torch.ones(1, 1, dtype=DOUBLE), torch.ones(1))
    assert begun.scores[0].tolist() == list(range(0, 2**18, 4))


def test_an_interrupted_solve_knows_its_scores(tmp_path: Path) -> None:
    problem = images(100.0)
    damped = Damped(problem.gnh, problem.damping)
    solver = ConjugateGradient(tolerance=1e-9, score_error=0.1, verify=False)
    whole = solver.solve(damped, problem.queries, generator=generator())
    for stop in (1, 3):
        state = solver.begin(damped, problem.queries, generator=generator())
        for _ in range(stop):
            solver.step(damped, problem.queries, state)
        with Run(tmp_path / str(stop), {}, identity={}) as run:
            run.journal("solve", CGState, seconds=0.0).record(state, now=True)
            kept = run.journal("solve", CGState, seconds=0.0).restore()
        again = solver.solve(damped, problem.queries, generator=generator(), state=kept)
        assert again.num_products == whole.num_products
        assert all(torch.equal(again.value[name], whole.value[name]) for name in whole.value)


def test_a_solve_that_was_not_watched_goes_on_by_its_proof() -> None:
    problem = images(10.0)
    damped = Damped(problem.gnh, problem.damping)
    solver = ConjugateGradient(tolerance=1e-3, verify=False)
    state = solver.begin(damped, problem.queries, generator=generator())
    for _ in range(2):
        solver.step(damped, problem.queries, state)
    solver = replace(solver, score_error=1.0)
    while not solver.done(state):
        solver.step(damped, problem.queries, state)
    assert state.settling is None
    assert bool((state.upper <= 1e-3 * state.score_rms).all())


@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
def test_an_error_that_cannot_be_is_refused(value: float) -> None:
    with pytest.raises(OptionError, match="score_error"):
        ConjugateGradient(score_error=value)


# --- what a user sees -----------------------------------------------------------------------------------------


def test_the_page_says_what_to_expect_and_what_is_proven(tmp_path: Path) -> None:
    gnh = images(100.0).gnh
    train, test = load()
    queries = [test[0], test[1]]
    model = gnh.network.model
    result = whence.attribute(model, train, queries, task=whence.Classification(), solver="cg", accuracy=0.99)
    parts = result.solve.error_parts
    assert parts is not None
    assert parts.expected is not None
    assert float(parts.expected.square().mean()) <= 2 * (1 - 0.99)
    result.save(tmp_path / "saved")
    kept = whence.load(tmp_path / "saved").solve.error_parts
    assert kept is not None
    assert kept.expected is not None
    torch.testing.assert_close(kept.expected, parts.expected)
    result.to_html(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    for expected in parts.expected.tolist():
        assert f"off by {percentage(expected, 2)} of their spread" in page
