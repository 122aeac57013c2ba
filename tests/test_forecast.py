"""What an attribution will cost: one list of phases, counted and timed; and that telling it is cheap."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from small import generator
from whence import Classification, GaussNewton, Options, Plan, attribute, estimate_spectrum
from whence.attribution.budget import count_prices, way_for
from whence.attribution.cost import forecast, spectrum_terms, time_phases
from whence.attribution.phases import Costs, Phase, Unit, count_unit, list_phases
from whence.attribution.planning import choice_for
from whence.scoring.cost import Work


def model(sharper: float = 1.0) -> nn.Module:
    torch.manual_seed(0)
    found = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    with torch.no_grad():
        found[2].weight.mul_(sharper)
    return found.eval()


def data(n: int) -> list[tuple[Tensor, Tensor]]:
    x, y = torch.randn(n, 6, generator=generator()), torch.randint(3, (n,), generator=generator(1))
    return list(zip(x, y, strict=True))


def examples_through(network: nn.Module, work: Callable[[], Any]) -> int:
    """Examples that go through the model's first layer meanwhile, in all passes together."""
    seen = 0

    def note(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        nonlocal seen
        seen += inputs[0].shape[-2]

    with network[0].register_forward_pre_hook(note):  # type: ignore[operator,index]
        work()
    return seen


def test_counted_units() -> None:
    work = Work(flops=10.0, launches=2, parameters=5, batch=4)
    c = work.launching / 4
    assert count_unit(work, Unit("gradients"), exact=True, examples=8) == 8 * 3 * (10 + c)
    assert count_unit(work, Unit("query"), exact=True, examples=1) == 3 * (10 + work.launching)
    assert count_unit(work, Unit("product"), exact=True, examples=8) == 8 * (50 + 5 * c)
    assert count_unit(work, Unit("iteration", 3), exact=True, examples=8) == 8 * (130 + 5 * c)
    assert count_unit(work, Unit("iteration", 3), exact=False, examples=8) == 8 * (130 + 13 * c)
    # a pass over fewer examples than fit is started all the same
    assert count_unit(work, Unit("gradients"), exact=True, examples=1) == 3 * (10 + work.launching)


def test_the_ways_are_sums_of_the_same_phases() -> None:
    phases = (
        Phase("both", Unit("gradients"), 2.0),
        Phase("scores", Unit("scores", 3), 1.0, exact=False),
        Phase("proven scores", Unit("norms", 3), 1.0, quick=False),
    )
    prices = {"gradients": 10.0, "scores": 7.0, "norms": 8.0, "iteration": 100.0}
    found = Costs.of(phases, 50, lambda unit: prices[unit.kind])
    assert (found.quick, found.before, found.exact) == (27.0, 28.0, 28.0 + 4 * 100.0)
    assert found.going_on(2) == 27.0 + 200.0 + 8.0
    assert found.going_on(None) == 27.0 + 400.0 + 8.0


def test_what_is_not_done_is_not_priced() -> None:
    gnh = GaussNewton(model(), Classification(), data(40))
    given = {phase.name: phase.times for phase in list_phases(gnh, 2, Options(damping=0.1))}
    assert all(given[name] == 0 for name in ("metric", "strain", "halves"))
    assert given["queries"] == 2
    few = {phase.name: phase.times for phase in list_phases(gnh, 2, Options(), examples=10)}
    assert few["scores"] == few["proven scores"] == 0.25


@pytest.mark.parametrize("queries", [1, 12])
def test_telling_the_cost_goes_over_fewer_examples_than_the_quick_answer(queries: int) -> None:
    network, train = model(), data(3000)
    options = Options(accuracy="quick")

    def quick() -> None:
        attribute(network, train, train[:queries], task=Classification(), options=options)

    gnh = GaussNewton(network, Classification(), train)
    way = way_for(gnh, queries, options)
    told = examples_through(network, lambda: forecast(gnh, way, options, queries=queries))
    assert 0 < told < examples_through(network, quick) / 3


def test_many_queries_of_a_large_model_take_few_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    gnh, widest = GaussNewton(model(), Classification(), data(40)), 0
    zeros = GaussNewton.zeros

    def noted(self: GaussNewton, columns: int | None = None) -> Any:
        nonlocal widest
        widest = max(widest, columns or 1)
        return zeros(self, columns)

    monkeypatch.setattr(GaussNewton, "zeros", noted)
    monkeypatch.setattr("whence.attribution.cost._BYTES", 3 * 4 * gnh.num_parameters)
    few = time_phases(gnh, 1000, Options())
    assert widest == 3
    assert few.iteration > 0


def test_a_certain_model_with_few_data_is_planned_in_a_few_hundred_products() -> None:
    """λ is then a tiny part of λmax: LiSSA would take millions of steps, and nothing may go through them one by one."""
    network, train = model(sharper=5.0), data(40)
    options = Options(damping="lambda_max/1e7", accuracy=0.99)
    gnh = GaussNewton(network, Classification(), train)

    def plan() -> Plan:
        terms = spectrum_terms(gnh, 3, options)
        spectrum = estimate_spectrum(gnh, generator=generator(), terms=terms)
        choice = choice_for(gnh, spectrum, spectrum.lambda_max.value / 1e7, 3, options)
        made = Plan.tuned(spectrum, spectrum.lambda_max.value / 1e7, num_terms=gnh.num_terms)
        forecast(gnh, way_for(gnh, 3, options), options, queries=3, plan=made, solver=choice.best)
        return made

    found: list[Plan] = []
    assert examples_through(network, lambda: found.append(plan())) < 600 * len(train)
    assert found[0].num_steps > 1e6


def test_a_plan_measures_the_spectrum_on_a_part_that_costs_less_than_the_quick_answer() -> None:
    gnh = GaussNewton(model(), Classification(), data(3000))
    options = replace(Options(), spectrum_terms=10**6)
    terms, prices = spectrum_terms(gnh, 1, options), count_prices(gnh, 1, options)
    assert 64 <= terms < 3000
    assert terms / 3000 * 24 * count_prices(gnh, 1, options).iteration <= 0.51 * prices.quick
