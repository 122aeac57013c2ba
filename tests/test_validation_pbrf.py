"""The proximal Bregman response against dense damped influence and closed forms, and when it must not be believed."""

from __future__ import annotations

import math

import mpmath
import pytest
import torch
from torch import Tensor, nn

import digits
from dense import dense_gauss_newton
from small import generator
from whence import Classification, Estimate, GaussNewton, Plan, Regression, Spectrum
from whence.errors import DataError, OptionError, SolverError, WhenceWarning
from whence.tasks import Batch
from whence.validation import pbrf
from zoo import CASES, Case

MODELS = {case.name: case for case in CASES}


def exact_scores(case: Case, damping: float) -> tuple[nn.Module, list[object], Tensor]:
    """Model, data, and dense float64 scores between all examples."""
    model, data = case.model(torch.float64), case.data(torch.float64)
    gnh = GaussNewton(model, case.task, data)
    gradients = digits.flatten(gnh.gradients(data))
    system = dense_gauss_newton(gnh).matrix + damping * torch.eye(gradients.shape[1], dtype=torch.float64)
    return model, data, gradients @ torch.linalg.solve(system, gradients.T)


# --- the divergence --------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1e-9, 1e-5, 1e-2, 1.0, 30.0])
def test_slope_of_the_divergence_keeps_its_digits(size: float) -> None:
    """Against 50 digits: differences of probabilities that agree in all but the last places."""
    torch.manual_seed(0)
    anchor = 3 * torch.randn(4, 6, dtype=torch.float64)
    outputs = anchor + size * torch.randn(4, 6, dtype=torch.float64)
    batch = Batch((), {}, torch.tensor([0, 1, -100, 3]))
    slope = Classification().divergence_slope(outputs, anchor, batch)
    with mpmath.workdps(50):

        def softmax(row: Tensor) -> list[object]:
            powers = [mpmath.e ** mpmath.mpf(x) for x in row.tolist()]
            return [power / sum(powers) for power in powers]

        rows = [
            [float(p - q) for p, q in zip(softmax(h), softmax(a), strict=True)]
            for h, a in zip(outputs, anchor, strict=True)
        ]
    expected = torch.tensor(rows, dtype=torch.float64)
    expected[2] = 0  # no term there
    assert float((slope - expected).abs().max()) <= 1e-13 * float(expected.abs().max()) + 2e-16 * size


def test_slope_of_the_divergence_does_not_overflow() -> None:
    batch = Batch((), {}, torch.tensor([0]))
    anchor, outputs = torch.tensor([[0.0, 900.0]]).double(), torch.tensor([[2000.0, 100.0]]).double()
    slope = Classification().divergence_slope(outputs, anchor, batch)
    assert torch.allclose(slope, torch.tensor([[1.0, -1.0]]).double())


# --- against exact damped influence ----------------------------------------------------------------------


def test_digits_agree_with_exact_influence() -> None:
    problem = digits.problem()
    _, test = digits.load()
    damping = problem.lambda_max / 100
    queries = [test[i] for i in range(100)]
    response = pbrf(
        problem.model,
        problem.train,
        [problem.train[i] for i in range(20)],
        queries,
        task=Classification(),
        damping=damping,
        tolerance=1e-3,
    )
    assert response.scores.shape == (100, 20)
    assert bool(response.converged.all())
    solved = problem.solve(damping, problem.flat_train[:20])
    exact = digits.flatten(problem.gnh.gradients(queries)) @ solved.T
    assert float(digits.correlation(response.scores.T, exact.T).min()) > 0.9999
    slope = float((response.scores * exact).sum() / exact.square().sum())
    assert abs(slope - 1) < 1e-3
    assert float(response.nonlinearity.max()) < 1e-4


#: A Llama casts to float32 within itself, and its response is computed in float64 all the same.
@pytest.mark.parametrize("name", ["mlp", "convnet", "llama", "attention", "bert"])
def test_any_task_agrees_with_exact_influence(name: str) -> None:
    model, data, exact = exact_scores(MODELS[name], damping := 0.05)
    response = pbrf(model, data, data[:1], data, task=MODELS[name].task, damping=damping)
    assert bool(response.converged.all())
    assert torch.allclose(response.scores, exact[:, :1], rtol=2e-3, atol=2e-3 * float(exact.abs().max()))


def test_a_quadratic_objective_has_a_closed_form_for_any_epsilon() -> None:
    """Linear regression: ``θ(ε) - θ* = -ε (H + λ + εJJᵀ)⁻¹ J r``, to all orders of ε."""
    torch.manual_seed(0)
    x, y = torch.randn(30, 4, dtype=torch.float64), torch.randn(30, 1, dtype=torch.float64)
    model = nn.Linear(4, 1, bias=False).double().eval()
    data = list(zip(x, y, strict=True))
    damping, epsilon = 0.3, 0.7
    response = pbrf(
        model, data, data[:1], data[3:6], task=Regression(), damping=damping, epsilon=epsilon, tolerance=1e-9
    )
    theta = model.weight.detach().T
    residual = x @ theta - y
    system = x.T @ x / 30 + damping * torch.eye(4) + epsilon * x[:1].T @ x[:1]
    moved = theta - epsilon * torch.linalg.solve(system, x[:1].T * residual[0])
    before, after = 0.5 * residual[3:6] ** 2, 0.5 * (x[3:6] @ moved - y[3:6]) ** 2
    assert torch.allclose(response.scores, (before - after) / epsilon, rtol=1e-7)
    assert float(response.nonlinearity) > 0.01  # so large an ε is not influence, and it says so


def test_only_selected_parameters_move() -> None:
    case = MODELS["mlp"]
    model, data = case.model(torch.float64), case.data(torch.float64)
    gnh = GaussNewton(model, case.task, data, params=["4.*"])
    gradients = digits.flatten(gnh.gradients(data))
    system = dense_gauss_newton(gnh).matrix + 0.05 * torch.eye(gradients.shape[1], dtype=torch.float64)
    exact = gradients @ torch.linalg.solve(system, gradients.T)
    before = {name: p.clone() for name, p in model.named_parameters()}
    response = pbrf(model, data, data[:1], data, task=case.task, damping=0.05, params=["4.*"])
    assert torch.allclose(response.scores, exact[:, :1], rtol=1e-3, atol=1e-3 * float(exact.abs().max()))
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


# --- minibatches -----------------------------------------------------------------------------------------


def minibatch_plan(damping: float, exact_hessian: Tensor, *, batch_size: int, chains: int) -> Plan:
    eigenvalues = torch.linalg.eigvalsh(exact_hessian)
    spectrum = Spectrum(
        trace=Estimate(float(eigenvalues.sum())),
        frobenius=Estimate(float(eigenvalues.norm())),
        lambda_max=Estimate(float(eigenvalues[-1])),
    )
    return Plan.from_spectrum(spectrum, damping, chains=chains).replace(batch_size=batch_size)


def test_minibatches_agree_within_their_errors() -> None:
    case = MODELS["mlp"]
    model, data, exact = exact_scores(case, damping := 0.05)
    hessian = dense_gauss_newton(GaussNewton(model, case.task, data)).matrix
    plan = minibatch_plan(damping, hessian, batch_size=40, chains=6).refined(9)
    response = pbrf(
        model, data, data[:2], data, task=case.task, damping=damping, plan=plan, generator=generator()
    )
    assert bool(response.converged.all())
    wrong = (response.scores - exact[:, :2]) / response.stderr  # Student's t with 5 degrees of freedom
    assert float((wrong.abs() < 2.57).double().mean()) > 0.8
    assert float(wrong.abs().max()) < 10
    assert response.num_gradients == 2 * (6 * plan.num_steps + 8)


def test_a_step_that_is_too_long_is_noticed() -> None:
    case = MODELS["mlp"]
    model, data, _ = exact_scores(case, damping := 0.05)
    hessian = dense_gauss_newton(GaussNewton(model, case.task, data)).matrix
    plan = minibatch_plan(damping, hessian, batch_size=20, chains=1)
    with pytest.raises(SolverError, match="diverged at step"):
        pbrf(
            model,
            data,
            data[:1],
            data,
            task=case.task,
            damping=damping,
            plan=plan.replace(step_size=20 * plan.step_size),
            generator=generator(),
        )


# --- when not to believe it ------------------------------------------------------------------------------


def test_an_unconverged_response_is_marked_and_not_trusted() -> None:
    case = MODELS["mlp"]
    model, data, _ = exact_scores(case, damping := 1e-3)
    with pytest.warns(WhenceWarning, match="2 of 2 responses did not converge"):
        response = pbrf(model, data, data[:2], data, task=case.task, damping=damping, max_gradients=3)
    assert not bool(response.converged.any())
    assert bool(response.trusted.isnan().all())
    assert not bool(response.scores.isnan().any())


def test_a_point_s_response_does_not_depend_on_the_others() -> None:
    case = MODELS["mlp"]
    model, data, _ = exact_scores(case, damping := 0.05)
    both = pbrf(model, data, data[:2], data, task=case.task, damping=damping)
    each = [pbrf(model, data, [point], data, task=case.task, damping=damping) for point in data[:2]]
    assert torch.equal(both.scores, torch.cat([one.scores for one in each], 1))
    assert both.num_gradients == sum(one.num_gradients for one in each)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"damping": 0.0}, "damping is 0.0"),
        ({"damping": "auto"}, "damping is 'auto'"),
        ({"epsilon": 0.0}, "epsilon is 0.0"),
        ({"epsilon": math.nan}, "epsilon is nan"),
        ({"tolerance": -1.0}, "tolerance is -1.0"),
        ({"max_gradients": 0}, "max_gradients is 0"),
    ],
    ids=lambda value: str(value) if isinstance(value, str) else None,
)
def test_bad_options(options: dict[str, object], message: str) -> None:
    case = MODELS["mlp"]
    data = case.data(torch.float64)
    settings = {"damping": 0.1, **options}
    with pytest.raises(OptionError, match=message):
        pbrf(case.model(torch.float64), data, data[:1], data[:1], task=case.task, **settings)  # type: ignore[arg-type]


def test_nothing_to_ask() -> None:
    case = MODELS["mlp"]
    model, data = case.model(torch.float64), case.data(torch.float64)
    with pytest.raises(DataError, match="no points"):
        pbrf(model, data, [], data, task=case.task, damping=0.1)
    with pytest.raises(DataError, match="no queries"):
        pbrf(model, data, data, [], task=case.task, damping=0.1)
    plan = Plan(0.1, 0.1, 5, 10, 1, Spectrum(Estimate(1.0), Estimate(1.0), Estimate(1.0)), 2.0)
    with pytest.raises(OptionError, match="give generator"):
        pbrf(model, data, data, data, task=case.task, damping=0.1, plan=plan)
    with pytest.raises(OptionError, match=r"plan was made for 0\.1"):
        pbrf(model, data, data, data, task=case.task, damping=0.2, plan=plan, generator=generator())
