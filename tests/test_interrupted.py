"""A solve that is killed at any moment goes on where it was, and ends in the same bits; runs: tests/faults."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from run_samples import same
from small import generator, operator
from whence import (
    ConjugateGradient,
    Damped,
    Estimate,
    FiniteSum,
    Lissa,
    ParamVector,
    Plan,
    Solution,
    Spectrum,
)
from whence.errors import WhenceWarning
from whence.runs import Run
from whence.solvers import Solver
from zoo import PLAIN, vectors

DAMPING = 0.2
SPECTRUM = Spectrum(trace=Estimate(6.0), frobenius=Estimate(3.0), lambda_max=Estimate(2.5))
PLAN = Plan.from_spectrum(SPECTRUM, DAMPING).replace(batch_size=4, num_steps=5, chains=3)


class KilledError(Exception):
    """What a killed process looks like from inside."""


class Interrupted:
    """A journal that is cut off in the n-th call of `record`, before or after it writes."""

    def __init__(self, journal: Any, *, at: int = -1, after: bool = True) -> None:
        self.journal, self.calls, self.at, self.after = journal, 0, at, after

    def restore(self) -> Any:
        return self.journal.restore()

    def record(self, state: Any, *, now: bool = False) -> None:
        self.calls += 1
        if self.calls == self.at and not self.after:
            raise KilledError
        self.journal.record(state, now=now)
        if self.calls == self.at:
            raise KilledError


#: Solves from the beginning, or goes on with what the journal has; in a new process, as it were.
Solve = Callable[[Any], tuple[Solution, Any]]


def interrupted_anywhere(
    solve: Solve, solver: Solver[Any], directory: Path, *, seconds: float, after: bool, every: int = 1
) -> tuple[int, Solution]:
    """Interrupt at every (n-th) call, go on, compare; returns the number of calls and the solution."""

    def journaled(name: str, at: int = -1) -> tuple[tuple[Solution, Any], int]:
        with Run(directory / name, {}, identity={}) as run:
            journal = Interrupted(
                run.journal("solve", solver.state_type, seconds=seconds), at=at, after=after
            )
            return solve(journal), journal.calls

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", WhenceWarning)
        whole = solve(None)
        written, calls = journaled("whole")
        assert same(written, whole)  # writing it down changes nothing
        for at in range(1, calls + 1, every):
            with pytest.raises(KilledError):
                journaled(str(at), at)
            assert same(journaled(str(at))[0], whole)
    return calls, whole[0]


@pytest.fixture
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many small files are written here; none has to survive a power cut."""
    monkeypatch.setattr("os.fsync", lambda handle: None)


# --- solves of matrices ------------------------------------------------------------------------------------------


def finite_sum(count: int = 40, *, template: ParamVector | None = None) -> FiniteSum:
    x = torch.randn(count, 6, generator=generator(1), dtype=torch.float64)
    x = x * torch.linspace(1.5, 0.2, 6, dtype=torch.float64)
    return FiniteSum(torch.einsum("ci,cj->cij", x, x), template)


def named() -> ParamVector:
    """A space of several tensors, in a model's order rather than the alphabet's."""
    names = {"z.weight": (2, 2), "z.bias": (1,), "a": (1,)}
    return ParamVector({name: torch.zeros(shape, dtype=torch.float64) for name, shape in names.items()})


def on_matrices(
    solver: Solver[Any], *, columns: int | None = None, template: ParamVector | None = None
) -> Solve:
    def solve(journal: Any) -> tuple[Solution, Any]:
        A = finite_sum(template=template)
        g = A.zeros(columns).randn_like(generator(3))
        return solver.solve(Damped(A, DAMPING), g, generator=generator(7), journal=journal), None

    return solve


@pytest.mark.usefixtures("quick_disk")
@pytest.mark.parametrize("average", ["tail", "last"])
@pytest.mark.parametrize("after", [True, False], ids=["after writing", "before writing"])
@pytest.mark.parametrize("seconds", [0.0, math.inf], ids=["every step", "at the end"])
def test_lissa_interrupted_at_any_step_ends_in_the_same_bits(
    tmp_path: Path, average: Any, after: bool, seconds: float
) -> None:
    solver = Lissa(PLAN, average=average)
    calls, whole = interrupted_anywhere(
        on_matrices(solver), solver, tmp_path, seconds=seconds, after=after, every=2
    )
    assert calls == PLAN.chains * PLAN.num_steps + 1
    assert whole.stats.paths.shape == (3, 5, 1)


@pytest.mark.usefixtures("quick_disk")
@pytest.mark.parametrize("columns", [None, 2])
@pytest.mark.parametrize("kind", ["tail", "last", "cg"])
def test_vectors_of_several_tensors_and_blocks_go_on_in_the_same_bits(
    tmp_path: Path, columns: int | None, kind: Any
) -> None:
    solver: Any = ConjugateGradient(tolerance=1e-9) if kind == "cg" else Lissa(PLAN, average=kind)
    solve = on_matrices(solver, columns=columns, template=named())
    calls, _ = interrupted_anywhere(
        solve, solver, tmp_path, seconds=0.0, after=True, every=1 if kind == "cg" else 4
    )
    assert calls > 2


@pytest.mark.usefixtures("quick_disk")
def test_a_solve_interrupted_after_every_single_step_gets_to_its_end(tmp_path: Path) -> None:
    solver = Lissa(PLAN)
    solve, attempts = on_matrices(solver), 0
    while True:
        attempts += 1
        assert attempts < 100
        with Run(tmp_path, {}, identity={}) as run:
            try:
                resumed = solve(Interrupted(run.journal("solve", solver.state_type, seconds=0.0), at=1))
                break
            except KilledError:
                # the last record of all is of a state that is written already
                if attempts > PLAN.chains * PLAN.num_steps:
                    resumed = solve(run.journal("solve", solver.state_type))
                    break
    assert attempts > PLAN.chains * PLAN.num_steps
    assert same(resumed, solve(None))


@pytest.mark.usefixtures("quick_disk")
def test_a_finished_solve_takes_no_step_again(tmp_path: Path) -> None:
    for solver in (Lissa(PLAN), ConjugateGradient(tolerance=1e-6)):
        run = Run(tmp_path / solver.name, {}, identity={})
        journal = run.journal("solve", solver.state_type, seconds=math.inf)
        first = on_matrices(solver)(journal)
        again = Interrupted(run.journal("solve", solver.state_type, seconds=math.inf))
        assert same(on_matrices(solver)(again), first)
        assert again.calls == 1  # the state as it was


@pytest.mark.usefixtures("quick_disk")
@pytest.mark.parametrize("average", ["tail", "last"])
def test_a_solve_that_recovers_from_divergence_can_be_interrupted_anywhere(
    tmp_path: Path, average: Any
) -> None:
    """The paper's counterexample: every term has rank one, and all of the trace."""
    spectrum = Spectrum(trace=Estimate(8.0), frobenius=Estimate(math.sqrt(8)), lambda_max=Estimate(1.0))
    plan = Plan.from_spectrum(spectrum, DAMPING, C=0.1).replace(batch_size=1, num_steps=12, chains=3)
    signs = torch.tensor(list(itertools.product([-1.0, 1.0], repeat=8)), dtype=torch.float64)
    A = FiniteSum(torch.einsum("ci,cj->cij", signs, signs))
    g = ParamVector({"x": torch.linspace(1.0, -0.5, 8, dtype=torch.float64)})
    solver = Lissa(plan, average=average)

    def solve(journal: Any) -> tuple[Solution, Any]:
        return solver.solve(Damped(A, DAMPING), g, generator=generator(), journal=journal), None

    calls, whole = interrupted_anywhere(solve, solver, tmp_path, seconds=0.0, after=True, every=9)
    assert len(whole.stats.events) >= 2
    assert whole.stats.plan is not None
    assert calls > whole.stats.plan.chains * whole.stats.plan.num_steps + 1
    assert "Going on from step" in whole.stats.events[-1]


# --- solves of networks ------------------------------------------------------------------------------------------

NETWORK_PLAN = PLAN.replace(damping=1.0, step_size=0.02, batch_size=6, num_steps=4, chains=2)


@pytest.mark.usefixtures("quick_disk")
@pytest.mark.parametrize("product", ["finite-difference", "exact"])
@pytest.mark.parametrize("name", ["lissa", "cg", "diverging"])
def test_products_by_finite_differences_remember_their_step(tmp_path: Path, product: str, name: str) -> None:
    """Also after a divergence: what told its cause was a product too."""
    plan = NETWORK_PLAN.replace(step_size=4.0) if name == "diverging" else NETWORK_PLAN
    solver: Any = ConjugateGradient(tolerance=1e-6, max_iterations=6) if name == "cg" else Lissa(plan)

    def solve(journal: Any) -> tuple[Solution, Any]:
        gnh = operator(
            PLAIN[0].model(torch.float32), vectors(torch.float32), product=product, params=["*.weight"]
        )
        g = gnh.gradients(vectors(torch.float32)[:2])
        return solver.solve(Damped(gnh, 1.0), g, generator=generator(7), journal=journal), gnh.state()

    calls, whole = interrupted_anywhere(
        solve, solver, tmp_path, seconds=0.0, after=True, every=10 if name == "diverging" else 3
    )
    assert calls > 4
    assert (len(whole.stats.events) >= 2) == (name == "diverging")
