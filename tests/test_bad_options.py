"""Options and right-hand sides that cannot work get a typed error before any product is computed."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import whence
from small import DOUBLE, NOT_POSITIVE, Wrapped, classifier, generator, operator
from whence import (
    Classification,
    Damped,
    Estimate,
    FiniteSum,
    GaussNewton,
    Lissa,
    ParamVector,
    Plan,
    Spectrum,
    attribute,
)
from whence.errors import (
    DataError,
    InputError,
    ModelError,
    OptionError,
    ParameterSelectionError,
    SolverError,
    VectorError,
    WhenceError,
)
from whence.operators import failures_become_typed
from whence.solvers.plan import resolve_damping
from zoo import vectors

# --- options -------------------------------------------------------------------------------------------------

SPECTRUM = Spectrum(trace=Estimate(4.0), frobenius=Estimate(2.0), lambda_max=Estimate(1.5))
PLAN = Plan.from_spectrum(SPECTRUM, damping=0.5)


@pytest.mark.parametrize("product", ["fd", "", None, "Exact"])
def test_an_unknown_product_is_refused_naming_the_known_ones(product: Any) -> None:
    with pytest.raises(OptionError) as caught:
        operator(product=product)
    assert f"product is {product!r}" in str(caught.value)
    assert "'auto', 'exact' or 'finite-difference'" in str(caught.value)


@pytest.mark.parametrize("micro_batch", [0, -3])
def test_a_micro_batch_without_examples_is_refused(micro_batch: int) -> None:
    with pytest.raises(OptionError, match=f"micro_batch is {micro_batch}; it must be at least 1"):
        operator(micro_batch=micro_batch)


@pytest.mark.parametrize("task", [Classification, "classification", F.cross_entropy])
def test_what_is_not_a_task_is_refused(task: Any) -> None:
    with pytest.raises(OptionError, match=r"must be a Task such as Classification\(\), got "):
        GaussNewton(classifier(), task, vectors(DOUBLE))


@pytest.mark.parametrize("damping", NOT_POSITIVE)
def test_damping_must_be_positive(damping: float) -> None:
    with pytest.raises(OptionError, match=f"damping must be a positive number, got {damping}.*λmax/200"):
        Damped(FiniteSum(torch.eye(2).repeat(3, 1, 1)), damping)


@pytest.mark.parametrize("damping", NOT_POSITIVE)
def test_a_plan_needs_positive_damping(damping: float) -> None:
    with pytest.raises(OptionError, match=f"damping must be a positive number, got {damping}.*λmax/200"):
        Plan.from_spectrum(SPECTRUM, damping=damping)
    with pytest.raises(OptionError, match=f"damping must be a positive number, got {damping}"):
        PLAN.replace(damping=damping)


@pytest.mark.parametrize("name", ["step_size", "constant"])
@pytest.mark.parametrize("value", NOT_POSITIVE)
def test_a_plan_needs_positive_numbers(name: str, value: float) -> None:
    with pytest.raises(OptionError, match=f"{name} must be a positive number, got {value}"):
        PLAN.replace(**{name: value})


@pytest.mark.parametrize("name", ["batch_size", "num_steps", "chains"])
@pytest.mark.parametrize("value", [0, -1, 1.5, math.nan, math.inf])
def test_a_plan_needs_whole_counts(name: str, value: float) -> None:
    with pytest.raises(OptionError, match=f"{name} must be a whole number of at least 1, got {value}"):
        PLAN.replace(**{name: value})


@pytest.mark.parametrize("batch_size", [0, -1, 21, 1000])
@pytest.mark.parametrize("draw", ["sample", "subset", "sample_factor"])
def test_a_batch_beyond_the_data_is_refused_naming_both(batch_size: int, draw: str) -> None:
    with pytest.raises(
        OptionError, match=rf"batch size {batch_size} is outside 1\.\.20.*Use a smaller batch"
    ):
        getattr(operator(), draw)(batch_size, generator())


@pytest.mark.parametrize("draw", ["sample", "subset"])
def test_a_batch_beyond_the_data_is_refused_through_the_damping(draw: str) -> None:
    damped = Damped(FiniteSum(torch.eye(2).repeat(3, 1, 1)), 0.5)
    with pytest.raises(OptionError, match=r"batch size 4 is outside 1\.\.3"):
        getattr(damped, draw)(4, generator())


# --- the solver ----------------------------------------------------------------------------------------------


class Untouchable(FiniteSum):
    """No product may be taken: the input has to be refused before."""

    def matvec(self, vector: ParamVector) -> ParamVector:
        raise AssertionError("work was started")

    def sample(self, batch_size: int, generator: torch.Generator) -> Any:
        raise AssertionError("work was started")


def untouchable(terms: int = 50) -> Untouchable:
    return Untouchable(torch.eye(2, dtype=DOUBLE).repeat(terms, 1, 1))


def right_hand_side(*values: float) -> ParamVector:
    return ParamVector({"x": torch.tensor(values, dtype=DOUBLE)})


def test_lissa_needs_a_damped_operator() -> None:
    with pytest.raises(OptionError, match=r"damped system; wrap the operator: Damped\(operator, damping\)"):
        Lissa(PLAN).solve(untouchable(), right_hand_side(1, 2), generator=generator())  # type: ignore[arg-type]


def test_lissa_needs_the_damping_of_its_plan() -> None:
    with pytest.raises(OptionError, match=r"damping is 0\.6, the plan was made for 0\.5; make both"):
        Lissa(PLAN).solve(Damped(untouchable(), 0.6), right_hand_side(1, 2), generator=generator())


def test_lissa_refuses_a_batch_beyond_the_data() -> None:
    plan = PLAN.replace(batch_size=51)
    with pytest.raises(OptionError, match=r"batches of 51 terms, the data hold 50.*Use more data"):
        Lissa(plan).solve(Damped(untouchable(50), 0.5), right_hand_side(1, 2), generator=generator())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("columns", [None, 3])
def test_lissa_refuses_a_right_hand_side_with_nan(value: float, columns: int | None) -> None:
    rhs = right_hand_side(1, 2) if columns is None else right_hand_side(1, 2).zeros(columns)
    rhs["x"].view(-1)[-1] = value
    with pytest.raises(VectorError, match=r"right-hand side holds NaN or infinity.*[Cc]heck the query"):
        Lissa(PLAN).solve(Damped(untouchable(), 0.5), rhs, generator=generator())


def test_lissa_refuses_the_right_hand_side_of_another_space() -> None:
    rhs = ParamVector({"y": torch.ones(2, dtype=DOUBLE)})
    with pytest.raises(VectorError, match=r"another model.*missing 'x', unexpected 'y'"):
        Lissa(PLAN).solve(Damped(untouchable(), 0.5), rhs, generator=generator())


@pytest.mark.parametrize("rhs", [{"x": torch.ones(2)}, torch.ones(2), None], ids=["dict", "tensor", "None"])
def test_lissa_refuses_a_right_hand_side_that_is_no_vector(rhs: Any) -> None:
    with pytest.raises(VectorError, match=f"right-hand side.*{type(rhs).__name__}"):
        Lissa(PLAN).solve(Damped(untouchable(), 0.5), rhs, generator=generator())


def test_lissa_refuses_a_right_hand_side_of_another_shape() -> None:
    with pytest.raises(VectorError, match=r"right-hand side's 'x' has shape \(3,\), expected \(2,\)"):
        Lissa(PLAN).solve(Damped(untouchable(), 0.5), right_hand_side(1, 2, 3), generator=generator())


def small_plan() -> Plan:
    return PLAN.replace(batch_size=4, num_steps=2, chains=2)


def test_lissa_refuses_the_gradient_of_another_model() -> None:
    rhs = operator(Wrapped(torch.tanh)).gradients(vectors(DOUBLE)[:2])
    with pytest.raises(VectorError, match=r"another model.*missing '0\.weight'.*unexpected 'linear\.weight'"):
        Lissa(small_plan()).solve(Damped(operator(), 0.5), rhs, generator=generator())


@pytest.mark.parametrize("mine", [None, ["0.*"]], ids=["more parameters", "other parameters"])
def test_lissa_refuses_the_gradient_of_another_selection(mine: list[str] | None) -> None:
    model = classifier()
    rhs = operator(model, params=["4.*"]).gradients(vectors(DOUBLE)[:1])
    with pytest.raises(VectorError, match=r"missing '0\.weight'.*same `params` filter"):
        Lissa(small_plan()).solve(Damped(operator(model, params=mine), 0.5), rhs, generator=generator())


@pytest.mark.parametrize("use", ["matvec", "quadratic_form"])
def test_products_with_a_vector_of_another_selection_are_refused(use: str) -> None:
    model = classifier()
    gnh, other = operator(model, params=["4.*"]), operator(model)
    for A in (gnh, gnh.sample(4, generator())):
        with pytest.raises(VectorError, match=r"missing none, unexpected '0\.weight'"):
            getattr(A, use)(other.zeros())
    with pytest.raises(VectorError, match=r"missing '0\.weight'"):
        getattr(other, use)(gnh.zeros())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"average": "mean"}, "average is 'mean'; it must be 'tail' or 'last'"),
        ({"average": None}, "average is None; it must be 'tail' or 'last'"),
        ({"tail": 0.0}, r"tail is 0\.0; .*in \(0, 1\]"),
        ({"tail": 1.5}, r"tail is 1\.5; .*in \(0, 1\]"),
        ({"tail": math.nan}, r"tail is nan; .*in \(0, 1\]"),
        ({"residual_batches": 1}, "residual_batches is 1; .*at least 2"),
    ],
)
def test_lissa_refuses_options_that_cannot_work(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Lissa(PLAN, **options)


def test_every_refusal_is_a_value_error_of_whence() -> None:
    for kind in (OptionError, ModelError, ParameterSelectionError, DataError, VectorError):
        assert issubclass(kind, InputError)
    assert issubclass(InputError, WhenceError)
    assert issubclass(InputError, ValueError)


# --- damping beyond what a precision holds ---------------------------------------------------------------------


@pytest.mark.parametrize("solver", ["auto", "cg", "lissa"])
@pytest.mark.parametrize("damping", [1e-300, 1e-30, 1e-12, 1e30, 1e300])
def test_a_damping_that_is_lost_in_rounding_is_refused_before_the_solve(damping: float, solver: str) -> None:
    data = [(x.float(), y) for x, y in vectors(DOUBLE)]
    with pytest.raises(
        OptionError, match=r"damping is .* and λmax .*is lost beside.*such as 'lambda_max/200'"
    ):
        attribute(classifier().float(), data, data[:1], task=Classification(), damping=damping, solver=solver)


def test_a_small_damping_is_fine_in_float64() -> None:
    spectrum = Spectrum(trace=Estimate(2.0), frobenius=Estimate(1.0), lambda_max=Estimate(1.0))
    assert resolve_damping(1e-12, spectrum, rounding=torch.finfo(DOUBLE).eps) == 1e-12
    with pytest.raises(OptionError, match="lost beside"):
        resolve_damping(1e-12, spectrum, rounding=torch.finfo(torch.float32).eps)


def test_lissa_refuses_a_plan_that_would_never_end() -> None:
    plan = PLAN.replace(num_steps=10**9)
    with pytest.raises(OptionError, match=r"asks for 4e\+09 steps.*Use solver='cg', or a larger damping"):
        Lissa(plan).solve(Damped(untouchable(), 0.5), right_hand_side(1, 2), generator=generator())


@pytest.mark.parametrize("path", [5, 3.5, b"run", ["run"], True, "", "a\0b"], ids=repr)
def test_what_is_no_path_is_refused_before_the_data_are_read(path: Any) -> None:
    class Unread:
        def __len__(self) -> int:
            raise AssertionError("it was read")

    result = whence.attribute(classifier(), vectors(DOUBLE), vectors(DOUBLE)[:1], task=Classification())
    asked: dict[str, Any] = {"task": Classification(), "run_dir": path}
    for use in (
        lambda: whence.attribute(classifier(), Unread(), [], **asked),
        lambda: whence.clean(classifier(), Unread(), **asked),
        lambda: whence.load(path),
        lambda: result.save(path),
        lambda: result.to_html(path),
    ):
        with pytest.raises(OptionError, match="give a path, such as"):
            use()


@pytest.mark.parametrize("name", ["damping", "accuracy", "seed", "refine", "chains", "shown", "budget"])
@pytest.mark.parametrize("value", [10**400, -(10**5000)], ids=["10^400", "-10^5000"])
def test_numbers_that_no_float_holds_are_refused(name: str, value: int) -> None:
    with pytest.raises(OptionError, match=f"{name} is beyond all numbers"):
        whence.Options(**{name: value})


@pytest.mark.parametrize("command", [whence.attribute, whence.clean])
def test_what_cannot_be_shown_is_told_before_the_work(command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GaussNewton, "matvec", lambda *_: 1 / 0)
    data = vectors(DOUBLE)
    with pytest.raises(DataError, match="what to show of example 0 cannot be told"):
        command(classifier(), data, queries=data[:1], task=Classification(), describe=lambda *_: {}["x"])


def test_data_whose_squares_overflow_are_told_as_that() -> None:
    random = torch.Generator().manual_seed(0)
    data = [(torch.randn(4, generator=random), i % 3) for i in range(8)]
    data[7] = (torch.full((4,), 1e38), 1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).eval()
    with pytest.raises(SolverError, match="gradients or products overflowed"):
        whence.attribute(model, data, data[:1], task=Classification())


def test_linear_algebra_that_fails_is_a_solver_error() -> None:
    @failures_become_typed()
    def singular() -> None:
        torch.linalg.solve(torch.zeros(2, 2), torch.ones(2))

    with pytest.raises(SolverError, match=r"cannot be decomposed.*larger damping, or the model in float64"):
        singular()
