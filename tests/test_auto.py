"""The rule that chooses a solver: costs by hand from a given spectrum, and that what is chosen does what was asked."""

from __future__ import annotations

import math
import time
from dataclasses import replace

import pytest
import torch

import digits
from digits import correlation
from small import generator
from whence import ConjugateGradient, Damped, Estimate, Lissa, Plan, Spectrum, estimate_spectrum
from whence.attribution.cost import count_passes
from whence.errors import OptionError
from whence.solvers.auto import (
    Choice,
    Passes,
    choose,
    make_solver,
    relative_error,
    resolve_accuracy,
    tolerance_for,
)

#: Eigenvalues 100, 50, 33, … of which every one is known.
VALUES = 100.0 / torch.arange(1, 201, dtype=torch.float64)
KNOWN = Spectrum(
    trace=Estimate(float(VALUES.sum())),
    frobenius=Estimate(float(VALUES.norm())),
    lambda_max=Estimate(100.0),
    sampling_constant=Estimate(1.5),
    eigenvalues=VALUES,
    num_parameters=1000,
    weights=torch.ones_like(VALUES),
)


def chosen(
    damping: float = 0.5, *, num_terms: int = 10_000, spectrum: Spectrum = KNOWN, **options: object
) -> Choice:
    return choose(spectrum, damping, num_terms=num_terms, **options)  # type: ignore[arg-type]


# --- costs, by hand ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("queries", [1, 5])
def test_the_costs_are_those_of_the_rule(queries: int) -> None:
    choice, n, damping = chosen(queries=queries), 10_000, 0.5
    tolerance = 2 * math.sqrt(2 * (1 - 0.995))
    cg, K = choice.of("cg"), math.ceil(KNOWN.cg_iterations(damping, queries, tolerance=tolerance))
    assert cg.terms == cg.work == n * K
    lissa = choice.of("lissa")
    assert KNOWN.density is not None
    needed = 2 * 1.5 * KNOWN.density.second_dimension(damping).value / (2 * (1 - 0.995))
    plan = Plan.tuned(KNOWN, damping, num_terms=n, refine=1.0, chains=4)
    assert lissa.refine == pytest.approx(max(1.0, needed / plan.num_term_products))
    plan = Plan.tuned(KNOWN, damping, num_terms=n, refine=lissa.refine, chains=4)
    assert lissa.terms == plan.num_term_products >= needed * 0.99


def test_conjugate_gradients_by_default() -> None:
    for damping, queries in ((20.0, 1), (0.005, 1), (0.005, 100)):
        assert chosen(damping, num_terms=500, queries=queries).best.solver == "cg"


def test_lissa_where_twice_its_cost_is_less() -> None:
    """Its cost does not depend on n, so it is taken from a size on: where conjugate gradients cost twice as much."""
    large = chosen(num_terms=10**8)
    passes = min(a.work for a in large.alternatives if a.solver == "cg") / 10**8
    turning = 2 * large.of("lissa").work / passes
    assert large.best.solver == "lissa"
    assert chosen(num_terms=round(turning * 1.1)).best.solver == "lissa"
    below = chosen(num_terms=round(turning / 1.1))
    assert below.best.solver == "cg"
    assert below.of("lissa").work < below.best.work  # cheaper, but not by enough


def test_more_accuracy_costs_more() -> None:
    little, much = chosen(accuracy=0.95), chosen(accuracy=0.999)
    for solver in ("cg", "lissa"):
        assert much.of(solver).terms > little.of(solver).terms
    assert much.best is much.alternatives[0]


def test_starting_passes_counts() -> None:
    """Many small batches lose where every pass is dear."""
    free = chosen(num_terms=10**8)
    dear = chosen(num_terms=10**8, passes=Passes(start=1e7, terms=1e8))
    plan = Plan.tuned(KNOWN, 0.5, num_terms=10**8, refine=free.of("lissa").refine, chains=4)
    assert free.of("lissa").work == free.of("lissa").terms
    assert dear.of("lissa").work == pytest.approx(free.of("lissa").terms + 1e7 * plan.num_products)
    assert (free.best.solver, dear.best.solver) == ("lissa", "cg")
    assert Passes(10.0, 100.0).work(1000.0, 2) == 1000 + 10 * 2 * 5  # 500 terms in passes of 100
    assert Passes(10.0, 1000.0).work(30.0, 3) == 60.0


def test_memory_rules_out() -> None:
    vector = 4.0 * 1000
    copies = {a.solver: a.memory_copies for a in chosen(0.005, num_terms=500, chains=2).alternatives}
    less = min(copies, key=lambda solver: copies[solver])
    more = max(copies, key=lambda solver: copies[solver])
    assert copies[less] < copies[more]
    tight = chosen(0.005, num_terms=500, chains=2, memory_bytes=copies[less] * vector)
    assert tight.best.solver == less
    assert tight.of(more).impossible.startswith("its vectors need")
    assert "impossible" in tight.words()
    assert "impossible" in str(tight)
    with pytest.raises(OptionError, match=r"conjugate gradients: its vectors need .*LiSSA: its vectors need"):
        chosen(memory_bytes=vector)
    assert not any(a.impossible for a in chosen(spectrum=replace(KNOWN, num_parameters=None)).alternatives)


def test_words_name_every_alternative_and_the_accuracy() -> None:
    choice = chosen(accuracy=0.99)
    for text in (choice.words(), str(choice)):
        assert all(a.name in text for a in choice.alternatives)
    assert "0.99" in choice.words()
    assert "seconds" not in choice.words()
    assert [line[0] for line in str(choice).splitlines()] == ["→", " "]


def test_seconds_follow_from_the_timed_product() -> None:
    timed = chosen(spectrum=replace(KNOWN, seconds_per_term=1e-3))
    assert [a.seconds for a in timed.alternatives] == [
        pytest.approx(1e-3 * a.work) for a in timed.alternatives
    ]
    assert all(a.seconds is None for a in chosen().alternatives)
    assert [a.work for a in timed.alternatives] == [
        a.work for a in chosen().alternatives
    ]  # never the stop-watch


def test_without_a_density_there_are_bounds_to_choose_by() -> None:
    bare = Spectrum(Estimate(100.0), Estimate(30.0), Estimate(20.0))
    choice = chosen(1.0, num_terms=1000, spectrum=bare)
    assert {a.solver for a in choice.alternatives} == {"cg", "lissa"}
    # C = 2, d₂ ≤ Tr(H)/λ
    assert choice.of("lissa").terms >= 0.99 * 2 * 2 * 100 / (2 * (1 - 0.995))


@pytest.mark.parametrize("condition", [1.0 + 1e-9, 1e6, 1e12, 1e18])
@pytest.mark.parametrize("kind", ["all", "bare", "one", "flat", "tiny"])
def test_planning_takes_no_time_whatever_the_spectrum(condition: float, kind: str) -> None:
    values = {"one": [7.0], "flat": [1.0] * 40, "tiny": [1.0, 1e-30, 0.0]}.get(kind, VALUES.tolist())
    eigenvalues = torch.tensor(values, dtype=torch.float64)
    spectrum = Spectrum(
        Estimate(float(eigenvalues.sum())),
        Estimate(float(eigenvalues.norm())),
        Estimate(float(eigenvalues[0])),
        eigenvalues=None if kind == "bare" else eigenvalues,
        weights=None if kind == "bare" else torch.ones_like(eigenvalues),
        num_parameters=10**9,
    )
    began = time.process_time()
    choice = chosen(values[0] / condition, num_terms=10**9, spectrum=spectrum, queries=3)
    assert time.process_time() - began < 1.0
    assert all(math.isfinite(a.work) and a.work > 0 for a in choice.alternatives)


# --- what is predicted comes true ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["cg", "lissa"])
def test_every_alternative_reaches_what_was_asked_at_about_its_cost(kind: str) -> None:
    problem = digits.problem()
    gnh, queries = problem.gnh, 6
    spectrum = estimate_spectrum(gnh, generator=generator(), probes=100)
    damping = spectrum.lambda_max.value / 100
    choice = choose(spectrum, damping, num_terms=gnh.num_terms, queries=queries, accuracy=0.99)
    alternative = choice.of(kind)
    plan = Plan.tuned(spectrum, damping, num_terms=gnh.num_terms, refine=alternative.refine, chains=4)
    solver = make_solver(alternative, plan, accuracy=0.99, verify=False)
    train, test = digits.load()
    rhs = gnh.gradients([test[i] for i in range(queries)])
    solution = solver.solve(Damped(gnh, damping), rhs, generator=generator(1))
    scores = solution.value.gram(gnh.gradients(train))
    exact = problem.exact_scores(damping)[:queries]
    assert float(correlation(scores.cpu(), exact).mean()) >= 0.988  # it is an expectation
    residual = 8 * 4 * plan.batch_size if isinstance(solver, Lissa) else 0
    assert 0.5 <= (solution.num_term_products - residual) / alternative.terms <= 1.6


def test_the_solver_that_is_made() -> None:
    plan = Plan.tuned(KNOWN, 0.5, num_terms=10_000, chains=3)
    choice = chosen(chains=3)
    cg = make_solver(choice.of("cg"), plan, accuracy=0.99, verify=False)
    assert isinstance(cg, ConjugateGradient)
    assert (cg.tolerance, cg.score_error, cg.verify) == (tolerance_for(0.99), relative_error(0.99), False)
    assert cg.largest == KNOWN.largest(3.0)
    lissa = make_solver(choice.of("lissa"), plan, accuracy=0.99)
    assert isinstance(lissa, Lissa)
    assert lissa.plan == plan


def test_passes_are_counted_from_launches_and_flops() -> None:
    gnh = digits.problem().gnh
    one, many = count_passes(gnh, 1), count_passes(gnh, 20)
    assert one.terms == gnh.micro_batch
    assert one.start > 0
    assert many.start == pytest.approx(one.start * 5 / 81)  # 1 + 4·20 forwards' work for the same launches


# --- accuracy ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "expected"), [(0.99, 0.99), ("0.99", 0.99), ("10%", 0.995), (" 20 %", 0.98), ("100%", 0.5)]
)
def test_accuracy_as_a_correlation_or_a_relative_error(said: float | str, expected: float) -> None:
    assert math.isclose(resolve_accuracy(said), expected)
    assert math.isclose(1 - relative_error(expected) ** 2 / 2, expected)


@pytest.mark.parametrize("said", ["good", "", "0%", "-3%", "120%", "10%%", "10% off", "nan%", "1.5", 0.1])
def test_what_is_neither(said: float | str) -> None:
    with pytest.raises(OptionError, match="accuracy is"):
        resolve_accuracy(said)


@pytest.mark.parametrize("accuracy", [0.2, 1.0, math.nan])
def test_what_is_no_accuracy(accuracy: float) -> None:
    with pytest.raises(OptionError, match="correlation with the exact scores"):
        chosen(accuracy=accuracy)


def test_the_certificate_counts_twice() -> None:
    assert tolerance_for(0.995) == pytest.approx(0.2)
    assert tolerance_for(0.6) == 0.9
