"""The counter-example: closed forms against enumeration, simulation against closed forms and the library's solver."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import conformance
from reproduction import counterexample
from reproduction.bench import Bench
from reproduction.counterexample import statistics
from reproduction.signed_inputs import (
    Setting,
    SignedInputs,
    critical_batch,
    growth,
    lemma_bound,
    library_path,
    mean_path,
    mean_square_path,
    printed_mean_square_path,
    second_moment_matrix,
    simulate,
    theorem_matrix,
)
from whence import Classification, Estimate, GaussNewton, ParamVector, estimate_spectrum
from whence.errors import OptionError

TINY = Setting((1.0, 0.5, 0.2), damping=0.3, step_size=0.7, batch_size=2, steps=4)
EVEN = Setting((0.8,) * 3, damping=0.3, step_size=0.7, batch_size=2, steps=4)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def all_inputs(setting: Setting) -> Tensor:
    """Every x with its signs, ``[2^N, N]``."""
    signs = itertools.product([-1.0, 1.0], repeat=len(setting.eigenvalues))
    return torch.tensor(list(signs), dtype=torch.float64) * setting.values.sqrt()


def all_batches(setting: Setting) -> Tensor:
    """``I - η(H̃ + λ)`` of every batch that can be drawn, all equally likely."""
    inputs = all_inputs(setting)
    single = torch.einsum("ci,cj->cij", inputs, inputs)
    picks = torch.tensor(list(itertools.product(range(len(single)), repeat=setting.batch_size)))
    sampled = single[picks].mean(1)
    identity = torch.eye(len(setting.eigenvalues), dtype=torch.float64)
    return identity - setting.step_size * (sampled + setting.damping * identity)


# --- the task ----------------------------------------------------------------------------------------------------


def test_the_binary_logistic_task_has_this_hessian() -> None:
    """At θ = 0, by the library's own operator over all inputs, and each input's term is xxᵀ."""

    class Logistic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.theta = nn.Parameter(torch.zeros(3, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([-x @ self.theta, x @ self.theta], dim=1)

    inputs = all_inputs(TINY)
    v = torch.tensor([0.3, -1.0, 2.0], dtype=torch.float64)
    vector = ParamVector({"theta": v})
    whole = GaussNewton(Logistic().eval(), Classification(), [(x, k % 2) for k, x in enumerate(inputs)])
    torch.testing.assert_close(whole.matvec(vector)["theta"], TINY.values * v)
    one = GaussNewton(Logistic().eval(), Classification(), [(inputs[5], 1)])
    torch.testing.assert_close(one.matvec(vector)["theta"], inputs[5] * (inputs[5] @ v))
    torch.testing.assert_close(inputs.square().sum(1), TINY.values.sum().expand(8))


@pytest.mark.parametrize("check", conformance.CHECKS, ids=lambda check: check.__name__)
def test_the_operator_and_its_samples_conform(check: conformance.Check) -> None:
    operator = SignedInputs(TINY.values)
    check(operator, 1e-14)
    check(operator.sample(5, generator()), 1e-14)


def test_the_operator_is_unbiased_and_its_spectrum_is_as_given() -> None:
    operator = SignedInputs(torch.linspace(1.0, 0.1, 12, dtype=torch.float64))
    spectrum = estimate_spectrum(operator, generator=generator())
    assert abs(spectrum.trace.value - 6.6) <= max(4 * spectrum.trace.stderr, 1e-6)
    assert spectrum.lambda_max.value == pytest.approx(1.0, rel=0.01)


@pytest.mark.parametrize("bad", [torch.tensor([1.0, 0.0]), torch.tensor([[1.0]]), torch.tensor([])], ids=str)
def test_eigenvalues_must_be_positive(bad: Tensor) -> None:
    with pytest.raises(OptionError, match="positive"):
        SignedInputs(bad)


@pytest.mark.parametrize(
    "change",
    [
        {"eigenvalues": ()},
        {"eigenvalues": (1.0, -1.0)},
        {"damping": 0.0},
        {"step_size": math.nan},
        {"steps": 0},
    ],
    ids=str,
)
def test_settings_are_checked(change: dict[str, object]) -> None:
    with pytest.raises(OptionError):
        replace(TINY, **change)


# --- closed forms against every batch there is -------------------------------------------------------------------


@pytest.mark.parametrize(
    "setting", [TINY, EVEN, replace(TINY, batch_size=1), replace(TINY, batch_size=3)], ids=str
)
def test_moments_are_those_of_all_batches(setting: Setting) -> None:
    """E u^t and E‖u^t‖² by the recursion over every batch, without a formula."""
    steps = all_batches(setting)
    mean, second = setting.start, torch.outer(setting.start, setting.start)
    for t in range(1, setting.steps + 1):
        mean = (steps @ mean).mean(0)
        second = (steps @ second @ steps).mean(0)
        torch.testing.assert_close(mean_path(setting)[t], mean)
        torch.testing.assert_close(mean_square_path(setting)[t], second.trace())


def test_the_theorem_s_matrix_is_that_of_all_batches() -> None:
    steps = all_batches(TINY)
    squared = (steps @ steps).mean(0)
    torch.testing.assert_close(torch.diag(theorem_matrix(TINY)), squared)
    torch.testing.assert_close(second_moment_matrix(TINY).sum(1), theorem_matrix(TINY))


def test_the_printed_proof_is_right_for_equal_eigenvalues_only() -> None:
    torch.testing.assert_close(printed_mean_square_path(EVEN), mean_square_path(EVEN))
    printed, exact = printed_mean_square_path(TINY), mean_square_path(TINY)
    torch.testing.assert_close(printed[:3], exact[:3])  # from this start also 1ᵀM²1 = ‖M1‖²
    assert float((printed[3:] / exact[3:]).min()) > 1.05


@pytest.mark.parametrize(
    "setting",
    [
        Setting((1.0,) + (0.2,) * 60, damping=0.1, step_size=1 / 1.1, batch_size=1, steps=1),
        Setting((1.0,) * 24, damping=0.25, step_size=1.0, batch_size=1, steps=1),
        Setting(tuple(k**-0.5 for k in range(1, 101)), damping=0.02, step_size=0.9, batch_size=1, steps=1),
    ],
    ids=["one-large", "equal", "decaying"],
)
def test_the_critical_batch_is_where_the_growth_is_one(setting: Setting) -> None:
    critical = critical_batch(setting)
    assert growth(replace(setting, batch_size=critical)) == pytest.approx(1.0, abs=1e-9)
    larger, smaller = (replace(setting, batch_size=critical * f) for f in (1.1, 0.9))
    assert growth(larger) < 1 < growth(smaller)


def test_the_critical_batch_of_equal_eigenvalues_by_hand() -> None:
    """r = (ηλ)² … at η = 1/λmax: λ²/λmax² + (N-1)/|B| = 1."""
    setting = Setting((2.0,) * 24, damping=0.5, step_size=0.5, batch_size=1, steps=1)
    assert critical_batch(setting) == pytest.approx(23 / (1 - 0.25**2))
    with pytest.raises(OptionError, match="shorter step"):
        critical_batch(replace(setting, step_size=0.9))
    assert critical_batch(Setting((1.0,), damping=0.1, step_size=0.5, batch_size=1, steps=1)) == 0.0


def test_a_matrix_of_the_theorem_above_one_need_not_mean_divergence() -> None:
    """One large eigenvalue among many small: R far above 1 within the lemma's bound, and the mean square falls."""
    setting = Setting((1.0,) + (0.02,) * 1000, damping=0.1, step_size=1 / 1.1, batch_size=8, steps=60)
    assert setting.batch_size <= lemma_bound(setting) / 2
    assert float(theorem_matrix(setting).max()) > 2
    assert growth(setting) < 0.9
    assert float(mean_square_path(setting)[-1]) < 1e-3
    assert float(printed_mean_square_path(setting)[-1]) > 1e3


def test_the_claims_about_the_bound_in_the_errata() -> None:
    """At the printed bound the Corollary's step gives 1 - 1/N, and η = 1/λmax at least 1 iff N ≥ (λmax+λ)/2λ."""
    for dimension, damping in ((4, 0.25), (24, 0.25), (8, 0.05), (11, 0.05)):
        values = (1.0,) * dimension
        setting = Setting(values, damping=damping, step_size=1 / (1 + damping), batch_size=1, steps=1)
        at_bound = replace(setting, batch_size=lemma_bound(setting))
        assert float(theorem_matrix(at_bound).max()) == pytest.approx(1 - 1 / dimension)
        longest = replace(at_bound, step_size=1.0)
        assert (float(theorem_matrix(longest).max()) >= 1) == (dimension >= (1 + damping) / (2 * damping))


# --- simulation --------------------------------------------------------------------------------------------------


def test_one_simulated_run_is_the_library_s_own_recurrence() -> None:
    for setting in (TINY, *counterexample.settings()[1]):
        ours = simulate(setting, runs=1, generator=generator(3))[2]
        theirs = library_path(setting, generator(3))
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-13)
        assert not torch.allclose(ours[-1], simulate(setting, runs=1, generator=generator(4))[2][-1])


@pytest.mark.parametrize("setting", [TINY, replace(EVEN, batch_size=1)], ids=["tiny", "even"])
def test_simulated_means_are_the_closed_forms(setting: Setting) -> None:
    runs = 20_000
    along, squares, total = simulate(setting, runs=runs, generator=generator())
    found = statistics(setting, along, squares)
    assert found["mean_square"]["resolved_until"] == setting.steps
    for t in range(1, setting.steps + 1):
        conformance.assert_mean(squares[:, t], float(mean_square_path(setting)[t]), resolution=0.05)
        expected = float(mean_path(setting)[t].norm())
        assert abs(found["mean"]["simulated"][t] - expected) <= 4 * found["mean"]["stderr"][t]
        # Every coordinate, not only along the expected mean; ‖u‖² bounds each one's variance.
        spread = (squares[:, t].mean() / runs).sqrt()
        assert float((total[t] / runs - mean_path(setting)[t]).abs().max()) <= 4 * float(spread)


def test_runs_in_several_chunks_are_all_there(monkeypatch: pytest.MonkeyPatch) -> None:
    from reproduction import signed_inputs

    monkeypatch.setattr(signed_inputs, "_CHUNK", 6 * 7)
    along, squares, total = simulate(TINY, runs=50, generator=generator())
    assert along.shape == squares.shape == (50, 5)
    assert len(squares[:, 1].unique()) > 1
    torch.testing.assert_close(torch.einsum("tn,tn->t", total, _directions(TINY)), along.sum(0))
    with pytest.raises(OptionError, match="at least 1"):
        simulate(TINY, runs=0, generator=generator())


def _directions(setting: Setting) -> Tensor:
    means = mean_path(setting)
    return means / means.norm(dim=1, keepdim=True)


def test_what_the_simulation_can_still_tell() -> None:
    """A mean square carried by one run in a thousand is not believed, though its error looks finite."""
    squares = torch.ones(1000, 3, dtype=torch.float64)
    squares[:, 1] += 0.1 * torch.randn(1000, generator=generator(), dtype=torch.float64)
    squares[:, 2] = 1e-3
    squares[0, 2] = 1e3
    along = torch.ones(1000, 3, dtype=torch.float64)
    along[:, 1:] = torch.randn(1000, 2, generator=generator(), dtype=torch.float64) + torch.tensor([1.0, 0.0])
    found = statistics(replace(TINY, steps=2), along, squares)
    assert found["mean_square"]["resolved_until"] == 1
    assert found["mean"]["resolved_until"] == 1
    assert found["mean_square"]["share_of_the_largest_hundredth"] > 0.99


# --- the finding -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return counterexample.measure(Bench("quick", tmp_path_factory.mktemp("counterexample")))


def test_the_conclusion(numbers: dict[str, Any]) -> None:
    conclusion = counterexample.conclude(numbers)
    assert conclusion.holds is True
    assert "grows at |B| = 7, grows at |B| = 15, falls at |B| = 31" in conclusion.verdict
    assert len(conclusion.errata) == 5
    assert numbers["largest_difference_from_library"] < 1e-12
    first = numbers["equal_eigenvalues"]
    assert [row["batch_size"] <= row["lemma_bound"] for row in first] == [True, True, False]
    assert [row["growth_per_step"] > 1 for row in first] == [True, True, False]
    middle = numbers["unequal_eigenvalues"][1]
    assert middle["batch_size"] < middle["lemma_bound"]
    assert middle["largest_of_R"] > 1 > middle["growth_per_step"]
    assert middle["mean_square"]["simulated"][-1] < 1 < middle["mean_square"]["printed"][-1]
    drawn = counterexample.draw(numbers)
    assert len(drawn.axes) == 4
    assert all(panel.get_xlabel() and panel.get_ylabel() for panel in drawn.axes)


def test_the_verdict_follows_the_simulation() -> None:
    """Runs that do not do what the lemma says, or cannot tell, change the verdict."""
    equal, _ = counterexample.settings()
    runs = [(setting, *simulate(setting, runs=2000, generator=generator(1))[:2]) for setting in equal]

    def verdict(rows: list[dict[str, Any]], difference: float = 0.0) -> bool | None:
        return counterexample._verdict(
            {"equal_eigenvalues": rows, "largest_difference_from_library": difference}
        )

    rows = [statistics(*run) for run in runs]
    assert verdict(rows) is True
    assert verdict(rows, 1e-3) is False
    assert (
        verdict([statistics(setting, along[:20], squares[:20]) for setting, along, squares in runs]) is None
    )
    shrinking = 0.8 ** torch.arange(17)
    assert (
        verdict([statistics(setting, along, squares * shrinking) for setting, along, squares in runs])
        is False
    )


def test_an_unknown_profile_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="quick, offline, paper"):
        Bench("fast", tmp_path)  # type: ignore[arg-type]


def test_the_measured_sampling_constant_is_below_one() -> None:
    """E H̃² - H² = (Tr(H)H - H²)/|B|: the C of C.1 in the trace is 1 - Tr(H²)/Tr(H)², not 1."""
    from whence.spectrum import sampling_constant

    operator = SignedInputs(torch.ones(6, dtype=torch.float64))
    measured = sampling_constant(operator, Estimate(6.0), probes=6000, batch_size=3, generator=generator())
    assert abs(measured.value - (1 - 1 / 6)) <= 4 * measured.stderr
    assert measured.value + 4 * measured.stderr < 1
