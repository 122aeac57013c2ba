"""The quick answer: EK-FAC in place of H + λ, what it says of itself, and how it is gone on from."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from digits import load
from small import DOUBLE, generator
from whence import (
    Attribution,
    Classification,
    Damped,
    Dense,
    LanguageModeling,
    ParamVector,
    attribute,
    validate,
)
from whence import load as load_result
from whence.attribution import budget
from whence.attribution.budget import count_prices
from whence.attribution.scored import Scored
from whence.errors import OptionError
from whence.model.gauss_newton import GaussNewton
from whence.options import Budget, Options
from whence.preconditioners import Preconditioner
from whence.preconditioners.ekfac import ekfac
from whence.runs import holds
from whence.solvers import ConjugateGradient
from whence.solvers.factored import Factored
from zoo import CASES, Case, vectors


class Diagonal(Preconditioner):
    """A diagonal P, for closed forms."""

    def __init__(self, entries: Tensor, damping: float) -> None:
        self.entries, self.damping = entries, damping

    def solve(self, vector: ParamVector) -> ParamVector:
        return ParamVector({"x": vector["x"] / self.entries}, columns=vector.columns)

    def root_solve(self, vector: ParamVector) -> ParamVector:
        return ParamVector({"x": vector["x"] / self.entries.sqrt()}, columns=vector.columns)

    def with_damping(self, damping: float) -> Diagonal:
        return Diagonal(self.entries + (damping - self.damping), damping)

    @property
    def smallest(self) -> float:
        return 1e-3


# --- the solver ------------------------------------------------------------------------------------------------------


def test_the_system_itself_is_solved_exactly() -> None:
    H = torch.tensor([9.0, 3.0, 0.0], dtype=DOUBLE)
    P = Diagonal(H + 1.0, 1.0)
    rhs = ParamVector({"x": torch.randn(5, 3, dtype=DOUBLE, generator=generator())}, columns=5)
    found = Factored(preconditioner=P).solve(Damped(Dense(torch.diag(H)), 1.0), rhs, generator=generator())
    torch.testing.assert_close(found.value["x"], rhs["x"] / (H + 1.0))
    assert float(found.stats.error_parts.expected.max()) < 1e-7
    assert float(found.residual.max()) < 1e-12
    assert found.num_products == 1


def test_scores_have_the_right_size_where_the_curvature_is_a_multiple() -> None:
    """With H = rK, a is the slope of the exact solution on u over the curvature: what scores see."""
    H = torch.tensor([9.0, 3.0, 0.1, 0.0], dtype=DOUBLE)
    g = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=DOUBLE)
    for r in (0.1, 4.0, 200.0):
        found = Factored(preconditioner=Diagonal(H / r + 1.0, 1.0)).solve(
            Damped(Dense(torch.diag(H)), 1.0), ParamVector({"x": g}), generator=generator()
        )
        exact, u = g / (H + 1.0), found.value["x"]
        torch.testing.assert_close((H * u * exact).sum(), (H * u * u).sum())


def test_the_error_is_the_spread_of_the_spectrum() -> None:
    A, P = (torch.tensor(entries, dtype=DOUBLE) for entries in ([2.0, 4.0, 9.0], [1.0, 1.0, 3.0]))
    g = torch.tensor([1.0, 2.0, 3.0], dtype=DOUBLE)
    found = Factored(preconditioner=Diagonal(P, 1.0)).solve(
        Damped(Dense(torch.diag(A - 1)), 1.0), ParamVector({"x": g}), generator=generator()
    )
    weights, values = g.square() / P, A / P  # P⁻¹A as g sees it
    mean = float((weights * values).sum() / weights.sum())
    square = float((weights * values.square()).sum() / weights.sum())
    assert math.isclose(
        float(found.stats.error_parts.expected), math.sqrt(1 - mean**2 / square), rel_tol=1e-12
    )


def test_the_error_of_a_log_normal_spectrum_is_what_is_expected() -> None:
    size = 20_000
    A = torch.randn(size, dtype=DOUBLE, generator=generator()).mul(0.5).exp()
    g = torch.randn(size, dtype=DOUBLE, generator=generator(1))
    system = Damped(_DiagonalOperator(A - 1e-12), 1e-12)
    P = Diagonal(torch.ones(size, dtype=DOUBLE), 1e-12)
    found = Factored(preconditioner=P).solve(system, ParamVector({"x": g}), generator=generator())
    error = found.value["x"] - g / A
    true = math.sqrt(float((A * error.square()).sum() / (g.square() / A).sum()))
    assert math.isclose(float(found.stats.error_parts.expected), true, rel_tol=0.03)


class _DiagonalOperator(Dense):
    def __init__(self, entries: Tensor) -> None:
        super().__init__(torch.ones(1, 1, dtype=DOUBLE))
        self.entries = entries

    def zeros(self, columns: int | None = None) -> ParamVector:
        lead = () if columns is None else (columns,)
        return ParamVector({"x": self.entries.new_zeros(*lead, len(self.entries))}, columns=columns)

    def matvec(self, vector: ParamVector) -> ParamVector:
        return ParamVector({"x": vector["x"] * self.entries}, columns=vector.columns)


def test_gradients_that_are_zero_have_the_solution_zero() -> None:
    P = Diagonal(torch.ones(3, dtype=DOUBLE), 1.0)
    rhs = ParamVector({"x": torch.zeros(2, 3, dtype=DOUBLE)}, columns=2)
    found = Factored(preconditioner=P).solve(
        Damped(Dense(torch.eye(3, dtype=DOUBLE)), 1.0), rhs, generator=generator()
    )
    assert not found.value["x"].any()
    assert float(found.residual.max()) == 0


def test_a_gradient_with_no_digits_left_spoils_no_other() -> None:
    """In float32, 1e-40 cannot be made as long as the others."""
    P = Diagonal(torch.ones(3), 1.0)
    rhs = ParamVector({"x": torch.tensor([[1.0, 2.0, 3.0], [1e-40, 0.0, 0.0]])}, columns=2)
    found = Factored(preconditioner=P).solve(Damped(Dense(torch.eye(3)), 1.0), rhs, generator=generator())
    torch.testing.assert_close(found.value["x"][0], rhs["x"][0] / 2)


def test_a_preconditioner_of_another_damping_is_refused() -> None:
    P = Diagonal(torch.ones(3, dtype=DOUBLE), 2.0)
    rhs = ParamVector({"x": torch.ones(3, dtype=DOUBLE)})
    with pytest.raises(OptionError, match="made for 2"):
        Factored(preconditioner=P).solve(
            Damped(Dense(torch.eye(3, dtype=DOUBLE)), 1.0), rhs, generator=generator()
        )


# --- attribute -------------------------------------------------------------------------------------------------------


@functools.cache
def digits() -> tuple[nn.Module, Any, list[Any]]:
    train, test = load()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    x, y = train.tensors
    for _ in range(20):
        for index in torch.randperm(len(x)).split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[index]), y[index]).backward()
            optimizer.step()
    return model.eval(), train, [test[i] for i in range(8)]


@functools.cache
def quick() -> Attribution:
    model, train, queries = digits()
    return attribute(model, train, queries, task=Classification(), accuracy="quick")


@functools.cache
def certified() -> Attribution:
    """At the quick answer's λ: halves of these data agree, so that it is not raised."""
    model, train, queries = digits()
    return attribute(model, train, queries, task=Classification(), accuracy="certified", damping="auto")


def correlation(one: Tensor, other: Tensor) -> float:
    rows = [torch.corrcoef(torch.stack([a, b]))[0, 1] for a, b in zip(one, other, strict=True)]
    return float(torch.stack(rows).mean())


def test_the_quick_answer_is_complete_and_says_how_far_it_is_from_the_exact_one(tmp_path: Path) -> None:
    found, exact = quick(), certified()
    assert found.solve.solver == "ekfac"
    assert found.solve.num_products == 1
    assert exact.solve.plan.damping == found.solve.plan.damping
    assert exact.solve.certificate is not None
    assert bool(exact.solve.converged.all())
    value, low, high = found.accuracy or (0.0, 0.0, 0.0)
    true = correlation(found.scores, exact.scores)
    assert 0.85 < true < 0.99
    assert low < true < high
    assert low < value < high
    bottom, top = found.interval(0.9)
    inside = ((exact.scores >= bottom) & (exact.scores <= top)).double()
    assert 0.8 < float(inside.mean()) < 0.99
    size = float((found.scores * exact.scores).sum() / exact.scores.square().sum())
    assert 0.5 < size < 1.5  # in nats
    page = found.to_html(tmp_path / "page.html").read_text()
    assert "quick answer" in page
    assert f"should correlate {value:.2f} with the exact ones" in page
    again = load_result(found.save(tmp_path / "saved"))
    assert torch.equal(again.scores, found.scores)
    assert torch.equal(again.stderr, found.stderr)


def test_a_kept_run_gives_the_same_bits(tmp_path: Path) -> None:
    model, train, queries = digits()

    def run() -> Attribution:
        return attribute(
            model, train, queries, task=Classification(), accuracy="quick", run_dir=tmp_path / "run"
        )

    assert torch.equal(run().scores, quick().scores)
    assert torch.equal(run().scores, quick().scores)  # from the directory


def test_small_works_are_solved_exactly_by_default() -> None:
    model, train, queries = digits()
    found = attribute(model, train, queries, task=Classification(), baseline=False)
    assert found.solve.solver == "cg"
    assert not found.solve.limited
    assert correlation(found.scores, certified().scores) > 0.99


@pytest.fixture
def language() -> dict[str, Any]:
    case = next(case for case in CASES if case.name == "llama")
    data = case.data(torch.float32)
    return {
        "model": case.model(torch.float32),
        "train": data,
        "queries": data[:2],
        "task": LanguageModeling(),
    }


def test_a_budget_ends_a_solve_that_begins_with_the_quick_answer(
    language: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(budget, "HALF_A_MINUTE", 0.0)
    prices = count_prices(GaussNewton(language["model"], language["task"], language["train"]), 2, Options())
    limit = (prices.quick + 2.5 * prices.iteration) / prices.quick
    found = attribute(**language, budget=limit, run_dir=tmp_path / "run")
    assert found.solve.solver == "cg"
    assert found.solve.limited
    assert found.solve.paths.shape[1] == 2
    assert bool(found.solve.ended_well.all())
    assert holds(tmp_path / "run", "quick")
    assert "times the cost of the quick answer" in found.solve.choice
    assert bool(found.stderr.isfinite().all())
    once_more = attribute(**language, budget=limit, run_dir=tmp_path / "run")
    assert torch.equal(once_more.scores, found.scores)


def test_without_a_limit_it_goes_on_to_what_was_asked(
    language: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    training = {"optimizer": "adam", "rate": 0.01, "steps": 100}
    exact = attribute(**language, accuracy=0.9999, solver="cg", training=training)
    monkeypatch.setattr(budget, "HALF_A_MINUTE", 0.0)
    found = attribute(**language, accuracy=0.9999, training=training)
    assert found.solve.solver == "cg"
    assert not found.solve.limited
    assert bool(found.solve.converged.all())
    # the strain is told by EK-FAC in one and by a solve in the other, so λ is not quite the same
    same = exact.over_damping([found.solve.plan.damping])
    assert bool(same.settled.all())
    assert correlation(found.scores, same.scores[0]) > 0.999


def test_what_is_dear_ends_with_the_quick_answer_and_says_so(
    language: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget, "HALF_A_MINUTE", 0.0)
    found = attribute(**language, budget=1.0)
    assert found.solve.solver == "ekfac"
    assert "ask for accuracy=0.99" in found.solve.choice


def test_an_interrupted_run_has_its_quick_answer(
    language: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(budget, "HALF_A_MINUTE", 0.0)
    whole = attribute(**language, accuracy=0.99, run_dir=tmp_path / "whole")

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(ConjugateGradient, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            attribute(**language, accuracy=0.99, run_dir=tmp_path / "run")
    assert load_result(tmp_path / "run").solve.solver == "ekfac"
    assert "quick answer" in load_result(tmp_path / "run").to_html(tmp_path / "page.html").read_text()
    resumed = attribute(**language, accuracy=0.99, run_dir=tmp_path / "run")
    assert resumed.solve.solver == "cg"
    assert torch.equal(resumed.scores, whole.scores)


# --- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [0.5, -1.0, math.nan, math.inf, True, "soon", "0s", "5 parsecs"])
def test_budgets_that_are_none(given: Any) -> None:
    with pytest.raises(OptionError, match="budget is"):
        Options(budget=given)


def test_budgets() -> None:
    assert Budget.parse("auto") == Budget()
    assert Budget.parse(2.5) == Budget(multiple=2.5)
    assert Budget.parse("5min") == Budget(seconds=300.0)


@pytest.mark.parametrize("accuracy", ["quick", "certified"])
def test_accuracies_that_a_solver_does_not_have(accuracy: str) -> None:
    with pytest.raises(OptionError, match="solver is 'lissa'"):
        Options(accuracy=accuracy, solver="lissa")


def test_a_time_buys_by_count() -> None:
    model, train, queries = digits()
    gnh = GaussNewton(model, Classification(), train)
    prices = count_prices(gnh, len(queries), Options())
    assert prices.quick < prices.exact
    assert prices.iteration < prices.exact


def test_large_scores_have_large_errors_and_small_ones_those_of_the_mean() -> None:
    chains = torch.tensor([[[0.0, 3.0, -3.0]]], dtype=DOUBLE)
    solve = replace(
        quick().solve, error_parts=replace(quick().solve.error_parts, expected=torch.tensor([0.3]))
    )
    spread = Scored.of(chains, solve, None, solve.plan.spectrum).stderr
    expected = 1.35 * 0.3 * torch.tensor([2.0, math.hypot(2, 3), math.hypot(2, 3)], dtype=DOUBLE)
    torch.testing.assert_close(spread[0], expected, rtol=1e-6, atol=0)


# --- any model -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("product", ["exact", "finite-difference"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_kind_of_model_has_a_quick_answer(case: Case, product: str) -> None:
    data = case.data(torch.float32)
    found = attribute(
        case.model(torch.float32), data, data[:2], task=case.task, accuracy="quick", product=product
    )
    assert found.solve.solver == "ekfac"
    assert bool(found.scores.isfinite().all())
    assert bool((found.stderr > 0).all())
    own = found.scores[torch.arange(2), torch.arange(2)]
    assert bool((own > 0).all())  # P is positive definite: a query helps itself


class Recurrent(nn.Module):
    """No layer of which examples' gradients can be read."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(1, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.cell(x.unsqueeze(-1))[0][:, -1]


def test_a_model_without_readable_layers_has_one_too() -> None:
    torch.manual_seed(0)
    data = vectors(torch.float32)
    found = attribute(Recurrent().eval(), data, data[:2], task=Classification(), accuracy="quick")
    assert bool(found.scores.isfinite().all())
    assert float(found.scores[0, 0]) > 0


class Raw(nn.Module):
    """A matrix, a vector and a number that belong to no layer, attention, and a layer that does have factors."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(6, 8) / 2)
        self.vector = nn.Parameter(torch.randn(8) / 2)
        self.number = nn.Parameter(torch.tensor(1.5))
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(x @ self.matrix + self.vector).unsqueeze(1)
        places = torch.cat([h, self.number * self.vector.expand_as(h)], 1)
        return self.head(self.attention(places, places, places, need_weights=False)[0].mean(1))


def raw() -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    torch.manual_seed(0)
    x = torch.randn(60, 6)
    return Raw().eval(), list(zip(x, (x[:, :3].argmax(1)), strict=True))


def test_what_has_no_layer_is_mixed_with_what_has() -> None:
    model, data = raw()
    gnh = GaussNewton(model, Classification(), data)
    factors = ekfac(gnh, 0.1, generator=generator())
    by_batch = {"matrix", "vector", "number"}
    assert by_batch <= set(factors.by_batch)
    assert not any(name.startswith("head") for name in factors.by_batch)
    assert {name for block in factors.blocks for name in block.matrix.names} == set(gnh.zeros())
    # of a single number, E is H's own entry
    entry = gnh.zeros()
    entry["number"].fill_(1.0)
    own = next(block for block in factors.blocks if block.matrix.names == ("number",))
    torch.testing.assert_close(
        own.eigenvalues.reshape(()), gnh.quadratic_form(entry).float(), rtol=0.3, atol=0
    )


def test_a_model_with_parameters_of_no_layer_has_its_quick_answer_and_goes_on_from_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, data = raw()
    settings: dict[str, Any] = {"task": Classification(), "damping": 0.1}
    exact = attribute(model, data, data[:4], accuracy=0.9999, solver="cg", **settings)
    quick = attribute(model, data, data[:4], accuracy="quick", **settings)
    assert quick.solve.solver == "ekfac"
    assert correlation(quick.scores, exact.scores) > 0.8
    monkeypatch.setattr(budget, "HALF_A_MINUTE", 0.0)
    further = attribute(model, data, data[:4], accuracy=0.9999, **settings)
    assert further.solve.solver == "cg"
    assert correlation(further.scores, exact.scores) > 0.999


def test_a_low_precision_has_one_too() -> None:
    case = next(case for case in CASES if case.name == "mlp")
    data = case.data(torch.bfloat16)
    found = attribute(case.model(torch.bfloat16), data, data[:2], task=case.task, accuracy="quick")
    same = attribute(
        case.model(torch.float32),
        case.data(torch.float32),
        case.data(torch.float32)[:2],
        task=case.task,
        accuracy="quick",
    )
    assert correlation(found.scores, same.scores) > 0.9


def test_validate_speaks_of_what_was_done() -> None:
    model, train, queries = digits()
    found = validate(model, train, queries, quick(), task=Classification(), budget_seconds=2.0)
    checks = {check.name: check for check in found.checks}
    assert checks["solver"].verdict == "cannot tell"
    assert "EK-FAC answered" in checks["solver"].sentence
    assert "should correlate" in checks["solver"].sentence
    assert not checks["batch"].ran
    assert "drew no batches" in checks["batch"].sentence


def test_a_run_stopped_after_its_quick_answer_goes_on_in_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing depends on what scoring left in memory, or on how much of that the machine has."""
    data = vectors(DOUBLE)

    def ask(directory: Path) -> Attribution:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).to(DOUBLE).eval()
        return attribute(
            model, data, data[:2], task=Classification(), run_dir=directory, accuracy=0.95, budget=1.5,
            product="finite-difference", method="directional",
        )  # fmt: skip

    whole = ask(tmp_path / "whole")
    path = tmp_path / "stopped"
    with monkeypatch.context() as patch:
        patch.setattr("whence.solvers.cg.ConjugateGradient.begin", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            ask(path)
    assert holds(path, "quick")
    assert not holds(path, "solution-1")
    monkeypatch.setattr("whence.attribution.planning._basis_fits", lambda job: False)
    again = ask(path)
    assert torch.equal(again.chain_scores, whole.chain_scores)
    assert whole.solve.certificate is not None
    assert again.solve.certificate is not None
    assert torch.equal(again.solve.certificate.upper, whole.solve.certificate.upper)
