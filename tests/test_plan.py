"""The plan against the paper's own tables."""

from __future__ import annotations

import math

import pytest

from whence import Estimate, Plan, Spectrum
from whence.errors import OptionError

# Table 1: trace / N with its error, N, λmax, and the recommended η, |B|, T. λ = 5, C = 2.
TABLE_1 = {
    "ResNet-18": (1.32e-3, 0.0, 11.7e6, 270, 0.003, 100, 150),
    "ResNet-50": (8.17e-4, 0.11e-4, 25.6e6, 470, 0.002, 5, 200),
    "OPT-1.3B": (9.28e-6, 0.35e-6, 1.3e9, 780, 0.001, 30, 500),
    "Llama-7B": (5.69e-6, 0.67e-6, 6.7e9, 1600, 0.0005, 50, 1000),
    "Mistral-7B": (8.18e-5, 0.13e-5, 7.2e9, 5600, 0.0002, 200, 2000),
}


def table_plan(model: str) -> Plan:
    per_parameter, error, n, top, *_ = TABLE_1[model]
    spectrum = Spectrum(
        trace=Estimate(per_parameter * n, error * n), frobenius=Estimate(1.0), lambda_max=Estimate(float(top))
    )
    return Plan.from_spectrum(spectrum, 5.0)


def rounded(x: float, digits: tuple[float, ...], *, up: bool = False) -> float:
    """Round as the table does: to one of a few leading digits."""
    power = 10.0 ** math.floor(math.log10(x))
    grid = [digit * power for digit in (*digits, 10.0)]
    if up:
        return min(value for value in grid if value >= x * (1 - 1e-9))
    return min(grid, key=lambda value: abs(value - x))


@pytest.mark.parametrize("model", TABLE_1)
def test_step_size_of_table_1(model: str) -> None:
    assert rounded(table_plan(model).step_size, (1, 2, 3, 5)) == pytest.approx(TABLE_1[model][4])


@pytest.mark.parametrize("model", [m for m in TABLE_1 if m != "ResNet-50"])
def test_batch_size_of_table_1(model: str) -> None:
    assert rounded(table_plan(model).batch_size, (1, 2, 3, 5)) == pytest.approx(TABLE_1[model][5])


def test_batch_size_of_resnet_50_is_not_the_printed_5() -> None:
    assert 87 <= table_plan("ResNet-50").batch_size <= 93


@pytest.mark.parametrize("model", TABLE_1)
def test_number_of_steps_of_table_1(model: str) -> None:
    """The table computes T = 2/(λη) from its rounded η and rounds up."""
    printed_step, printed_steps = TABLE_1[model][4], TABLE_1[model][6]
    assert rounded(2 / (5.0 * printed_step), (1, 1.5, 2, 3, 5), up=True) == pytest.approx(printed_steps)
    assert table_plan(model).num_steps == math.ceil(2 * (TABLE_1[model][3] + 5.0) / 5.0)
    assert 0.6 <= table_plan(model).num_steps / printed_steps <= 1.15


def spectrum(top: Estimate, trace: Estimate) -> Spectrum:
    return Spectrum(trace=trace, frobenius=Estimate(1.0), lambda_max=top)


def test_a_badly_known_top_is_bounded_by_the_frobenius_norm() -> None:
    known_badly, norm = Estimate(10.0, 20.0), Estimate(12.0, 1.0)
    plan = Plan.from_spectrum(Spectrum(trace=Estimate(100.0), frobenius=norm, lambda_max=known_badly), 1.0)
    assert plan.step_size == pytest.approx(1 / (14 + 1))
    contradictory = Spectrum(trace=Estimate(100.0), frobenius=Estimate(9.0), lambda_max=known_badly)
    assert Plan.from_spectrum(contradictory, 1.0).step_size == pytest.approx(1 / (50 + 1))


def test_uncertainty_moves_the_plan_to_the_stable_side() -> None:
    sure = Plan.from_spectrum(spectrum(Estimate(10.0), Estimate(100.0)), 1.0)
    unsure_top = Plan.from_spectrum(spectrum(Estimate(10.0, 2.0), Estimate(100.0)), 1.0)
    unsure_trace = Plan.from_spectrum(spectrum(Estimate(10.0), Estimate(100.0, 20.0)), 1.0)
    assert unsure_top.step_size == pytest.approx(1 / 15)
    assert unsure_top.step_size < sure.step_size
    assert unsure_top.num_steps > sure.num_steps
    assert unsure_trace.batch_size == 28
    assert unsure_trace.step_size == sure.step_size
    for plan in (sure, unsure_top, unsure_trace):
        assert plan.stable


def test_predictions_follow_theorem_1() -> None:
    plan = Plan.from_spectrum(spectrum(Estimate(10.0), Estimate(100.0)), 1.0)
    eta = 1 / 11
    assert plan.bias == pytest.approx((1 - eta) ** 22)
    delta = 2 * eta - eta**2
    noise = 2.0 * 100 / plan.batch_size / 4
    assert plan.sampling_error == pytest.approx(math.sqrt(eta**2 * noise / delta))
    assert plan.num_term_products == 22 * 20 * plan.chains
    assert plan.replace(batch_size=80).sampling_error == pytest.approx(plan.sampling_error / 2)


def test_str_says_what_matters() -> None:
    text = str(Plan.from_spectrum(spectrum(Estimate(10.0, 0.1), Estimate(100.0, 3.0)), 1.0))
    for word in ("damping", "step", "batch", "steps", "bias", "sampling", "products", "memory"):
        assert word in text
    unstable = Plan.from_spectrum(spectrum(Estimate(10.0), Estimate(100.0)), 1.0).replace(batch_size=2)
    assert "divergence" in str(unstable)


def test_seconds_need_a_measurement() -> None:
    base = spectrum(Estimate(10.0), Estimate(100.0))
    assert Plan.from_spectrum(base, 1.0).seconds is None
    timed = Spectrum(base.trace, base.frobenius, base.lambda_max, seconds_per_term=0.01, num_parameters=10**6)
    plan = Plan.from_spectrum(timed, 1.0)
    assert plan.seconds == pytest.approx(plan.num_term_products * 0.01)
    assert "MB" in str(plan)


def test_refined_plans_cost_what_they_say() -> None:
    plan = Plan.from_spectrum(spectrum(Estimate(10.0), Estimate(100.0)), 1.0)
    finer = plan.refined(4)
    assert finer.num_term_products == 4 * plan.num_term_products


@pytest.mark.parametrize("damping", [0.0, -1.0, math.nan, math.inf])
def test_damping_must_be_positive(damping: float) -> None:
    with pytest.raises(OptionError, match="damping"):
        Plan.from_spectrum(spectrum(Estimate(10.0), Estimate(100.0)), damping)
