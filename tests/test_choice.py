"""The choice of a solver: costs that follow from the spectrum, and what is chosen reaches what was asked."""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import pytest
import torch

from digits import correlation
from small import generator
from test_refinement import images
from whence import ConjugateGradient, Damped, Estimate, Lissa, Plan, Refinement, Spectrum, estimate_spectrum
from whence.attribution.forecast import count_passes
from whence.errors import OptionError
from whence.preconditioners import nystrom
from whence.solvers.choice import (
    Alternative,
    Choice,
    Passes,
    choose,
    make_solver,
    relative_error,
    resolve_accuracy,
    tolerance_for,
)
from whence.solvers.refinement_forecast import cheapest_refinement, refinement_error
from whence.spectrum import Density

KAPPA = 100.0


@functools.cache
def measured() -> Spectrum:
    return estimate_spectrum(images(KAPPA).gnh, generator=generator(), probes=100)


def chosen(accuracy: float = 0.99, num_terms: int = 1400, queries: int = 6, **options: object) -> Choice:
    return choose(
        measured(),
        images(KAPPA).damping,
        num_terms=num_terms,
        queries=queries,
        accuracy=accuracy,
        generator=generator(),
        **options,  # type: ignore[arg-type]
    )


# --- what is predicted comes true -------------------------------------------------------------------------------


def of_kind(choice: Choice, kind: str) -> Alternative:
    solver, _, preconditioned = kind.partition(", ")
    return next(a for a in choice.alternatives if a.solver == solver and bool(a.rank) == bool(preconditioned))


@pytest.mark.parametrize("kind", ["cg", "cg, preconditioned", "lissa", "refinement"])
def test_every_alternative_reaches_what_was_asked_at_about_its_cost(kind: str) -> None:
    problem, choice = images(KAPPA), chosen()
    alternative = of_kind(choice, kind)
    preconditioner, spent = None, 0.0
    if alternative.rank:
        preconditioner = nystrom(
            problem.gnh,
            problem.damping,
            rank=alternative.rank,
            terms=alternative.rank_terms,
            generator=generator(1),
        ).shrunk()
        spent = preconditioner.num_term_products / 6
    solver = make_solver(
        alternative,
        measured(),
        problem.damping,
        num_terms=1400,
        accuracy=0.99,
        chains=4,
        preconditioner=preconditioner,
        verify=False,
    )
    solution = solver.solve(Damped(problem.gnh, problem.damping), problem.queries, generator=generator(1))
    scores = solution.value.gram(problem.train)
    assert float(correlation(scores, problem.exact).mean()) >= 0.988  # it is an expectation
    residual = 0 if isinstance(solver, ConjugateGradient) else 8 * 4 * solver.plan.batch_size
    assert 0.6 <= (spent + solution.num_term_products - residual) / alternative.terms <= 1.6


def test_more_accuracy_costs_more_and_all_of_it_decides() -> None:
    little, much = chosen(0.95), chosen(0.999)
    for solver in ("cg", "lissa"):
        assert much.of(solver).terms > little.of(solver).terms  # type: ignore[arg-type]
    assert [a.work for a in much.alternatives] == sorted(a.work for a in much.alternatives)
    assert much.best is much.alternatives[0]


def test_with_much_data_batches_win_and_with_little_all_of_it() -> None:
    assert chosen(num_terms=10**7).best.solver in ("lissa", "refinement")
    assert chosen(num_terms=500).best.solver == "cg"
    assert chosen(num_terms=10**7).of("cg").terms == pytest.approx(
        10**7 / 1400 * chosen().of("cg").terms, rel=0.3
    )


def test_starting_passes_counts() -> None:
    """Many small batches lose where every pass is dear."""
    free, dear = chosen(), chosen(passes=Passes(start=1e4, terms=1e6))
    assert free.of("lissa").work == free.of("lissa").terms
    plan = Plan.tuned(
        measured(), images(KAPPA).damping, num_terms=1400, refine=free.of("lissa").refine, chains=4
    )
    assert dear.of("lissa").work == pytest.approx(free.of("lissa").terms + 1e4 * plan.num_products)
    assert dear.best.solver == "cg"
    assert Passes(10.0, 100.0).work(1000.0, 2) == 1000 + 10 * 2 * 5  # 500 terms in passes of 100
    assert Passes(10.0, 1000.0).work(30.0, 3) == 60.0


def test_passes_are_counted_from_launches_and_flops() -> None:
    gnh = images(KAPPA).gnh
    one, many = count_passes(gnh, 1), count_passes(gnh, 20)
    assert one.terms == gnh.micro_batch
    assert one.start > 0
    assert many.start == pytest.approx(one.start * 5 / 81)  # 1 + 4·20 forwards' work for the same launches


def test_a_preconditioner_is_for_few_queries() -> None:
    alone, together = chosen(queries=1), chosen(queries=64)
    saved = [of_kind(c, "cg").terms / of_kind(c, "cg, preconditioned").terms for c in (alone, together)]
    assert saved[0] > saved[1]


def test_memory_rules_out() -> None:
    parameters = measured().num_parameters
    assert parameters is not None
    little = chosen(memory_bytes=4.0 * parameters * 6 * 8)
    assert of_kind(little, "cg, preconditioned").impossible.endswith("are there")
    assert little.of("refinement").impossible.startswith("its vectors need")
    assert not little.best.impossible
    assert not little.best.rank
    assert "impossible" in str(little)
    with pytest.raises(OptionError, match="its vectors need"):
        chosen(memory_bytes=4.0 * parameters)


def test_words_name_every_alternative_and_the_accuracy() -> None:
    choice = chosen()
    for text in (choice.words(), str(choice)):
        assert all(a.name in text for a in choice.alternatives)
    assert "0.99" in choice.words()
    assert choice.to_json()["solver"] == choice.best.solver


def test_without_a_density_there_are_bounds_to_choose_by() -> None:
    bare = Spectrum(Estimate(100.0), Estimate(30.0), Estimate(20.0))
    choice = choose(bare, 1.0, num_terms=1000, generator=generator())
    assert {a.solver for a in choice.alternatives} == {"cg", "lissa"}
    assert all(a.seconds is None for a in choice.alternatives)
    with pytest.raises(OptionError, match="refinement"):
        choice.of("refinement")


@pytest.mark.parametrize(
    ("said", "correlation"), [(0.99, 0.99), ("0.99", 0.99), ("10%", 0.995), (" 20 %", 0.98), ("100%", 0.5)]
)
def test_accuracy_as_a_correlation_or_a_relative_error(said: float | str, correlation: float) -> None:
    assert math.isclose(resolve_accuracy(said), correlation)
    assert math.isclose(1 - relative_error(correlation) ** 2 / 2, correlation)


@pytest.mark.parametrize("said", ["good", "", "0%", "-3%", "120%", "10%%", "10% off", "nan%", "1.5", 0.1])
def test_what_is_neither(said: float | str) -> None:
    with pytest.raises(OptionError, match="accuracy is"):
        resolve_accuracy(said)


@pytest.mark.parametrize("accuracy", [0.2, 1.0, math.nan])
def test_what_is_no_accuracy(accuracy: float) -> None:
    with pytest.raises(OptionError, match="correlation with the exact scores"):
        chosen(accuracy)


def test_the_certificate_counts_twice() -> None:
    assert tolerance_for(0.995) == pytest.approx(0.2)
    assert tolerance_for(0.6) == 0.9


def test_the_solver_that_is_made() -> None:
    options = {"num_terms": 1400, "accuracy": 0.99, "chains": 3}
    made = {
        a.solver: make_solver(a, measured(), images(KAPPA).damping, **options)  # type: ignore[arg-type]
        for a in chosen(chains=3).alternatives
    }
    assert isinstance(made["cg"], ConjugateGradient)
    assert isinstance(made["lissa"], Lissa)
    assert isinstance(made["refinement"], Refinement)
    assert made["refinement"].plan.chains == 3
    assert made["refinement"].plan.num_steps == chosen(chains=3).of("refinement").num_steps


# --- refinement's error ---------------------------------------------------------------------------------------


def density() -> Density:
    found = measured().density
    assert found is not None
    return found


def plan() -> Plan:
    return Plan.tuned(measured(), images(KAPPA).damping, num_terms=1400, refine=1.0)


def test_errors_of_subset_solutions_are_those_of_random_matrices() -> None:
    """Without steps that matter: E(H_S + λ)⁻¹g and its spread, for normal terms, below and above d(λ) of them."""
    values = torch.logspace(0.5, -1.5, 40, dtype=torch.float64)
    damping, random = 0.1, generator(0)
    exact = Density(values.unsqueeze(0), torch.ones(1, 40, dtype=torch.float64))
    spectrum = Spectrum(
        Estimate(float(values.sum())), Estimate(float(values.norm())), Estimate(float(values[0]))
    )
    still = Plan.from_spectrum(spectrum, damping, chains=1).replace(step_size=1e-9, num_steps=2)
    star = values.sqrt() / (values + damping)  # of g with the covariance H, on average
    for terms in (15, 60):
        found = []
        for _ in range(400):
            x = torch.randn(terms, 40, generator=random, dtype=torch.float64) * values.sqrt()
            system = x.T @ x / terms + damping * torch.eye(40, dtype=torch.float64)
            g = torch.randn(40, generator=random, dtype=torch.float64).sign() * values.sqrt()
            found.append(torch.linalg.solve(system, g) * g.sign())
        solutions = torch.stack(found)
        size = float(values @ star.square())
        length = float((values * star) @ solutions.mean(0)) / size
        spread = float((values * (solutions - solutions.mean(0)).square()).sum(1).mean()) / size
        predicted = refinement_error(exact, still, terms, C=1.0)
        assert predicted.length == pytest.approx(length, rel=0.1)
        assert predicted.noise == pytest.approx(spread, rel=0.35)
        assert predicted.bias >= predicted.shape


def test_longer_paths_and_larger_subsets_leave_less() -> None:
    def error(steps: float, subset: int) -> float:
        path = plan().replace(num_steps=max(2, round(steps * plan().num_steps)))
        return 1 - refinement_error(density(), path, subset, C=1.5).correlation

    assert error(0.1, 50) > error(0.1, 400)
    assert error(0.1, 50) > error(0.5, 50) > error(2.0, 50)
    # after a long path the start is forgotten, and the error is that of averaged steps
    path = plan().replace(num_steps=20 * plan().num_steps)
    second = density().second_dimension(path.damping).value
    averaged = 1.5 * second / (0.5 * path.num_term_products)
    assert refinement_error(density(), path, 50, C=1.5).noise == pytest.approx(averaged, rel=0.1)


def test_the_cheapest_refinement_is_accurate_enough_or_there_is_none() -> None:
    def cheapest(accuracy: float) -> object:
        return cheapest_refinement(
            measured(), images(KAPPA).damping, num_terms=10**6, queries=1, accuracy=accuracy, chains=4, C=1.5,
            generator=generator(),
        )  # fmt: skip

    found = cheapest(0.98)
    assert found is not None
    error = refinement_error(density(), found.plan, found.subset, C=1.5)  # type: ignore[attr-defined]
    assert error.correlation >= 0.98
    assert error.bias <= error.noise
    assert cheapest(1 - 1e-9) is None
    bare = replace(measured(), weights=None)
    assert bare.density is None
    assert (
        cheapest_refinement(
            bare, 1.0, num_terms=100, queries=1, accuracy=0.9, chains=4, C=1.0, generator=generator()
        )
        is None
    )
