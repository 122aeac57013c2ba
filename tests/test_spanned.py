"""Bounds from all of the basis: they hold whatever the preconditioner, and are close where nobody knows its quality."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from test_cg import DOUBLE, SIZE, SPECTRA, DensePreconditioner, Problem, generator, rotation
from whence.runs import Run
from whence.solvers import CGState, ConjugateGradient


def diagonal_nearby(problem: Problem, *, turned: float = 0.1) -> DensePreconditioner:
    """H's diagonal in a basis that is a little off, plus λ: as EK-FAC is. It knows nothing of P⁻¹A but H ⪰ 0."""
    noise = torch.randn(SIZE, SIZE, generator=generator(9), dtype=DOUBLE)
    basis = torch.linalg.qr(rotation() + turned * noise)[0]
    hessian = problem.hessian.double()
    values = (basis * (hessian @ basis)).sum(0).clamp_min(0.0)
    matrix = (basis * values) @ basis.T + problem.damping * torch.eye(SIZE, dtype=DOUBLE)
    return DensePreconditioner(
        matrix, problem, smallest=problem.damping / (float(values.max()) + problem.damping)
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("q", [1, 3, 8])
@pytest.mark.parametrize("spectrum", list(SPECTRA))
def test_they_hold_at_every_iteration(spectrum: str, q: int, dtype: torch.dtype) -> None:
    values = SPECTRA[spectrum]
    for condition, seed in ((50.0, 0), (5000.0, 1)):
        problem = Problem(values, q, damping=float(values.max()) / condition, dtype=dtype, seed=seed)
        for turned in (0.01, 0.3):
            solver = ConjugateGradient(
                tolerance=1e-9 if dtype == torch.float32 else 1e-7,
                max_iterations=20,
                preconditioner=diagonal_nearby(problem, turned=turned),
                largest=float(torch.linalg.eigvalsh(problem.hessian.double())[-1]),
                keep_basis=True,
            )
            seen = []

            def check(state: CGState) -> None:
                error = problem.error(state.iterate)  # noqa: B023
                assert bool((error <= state.upper * (1 + 1e-6)).all())
                seen.append(state.iteration)  # noqa: B023

            solution = solver.solve(problem.system, problem.g, generator=generator(), on_step=check)
            assert bool((problem.error(solution.value) <= solution.certificate.upper * (1 + 1e-6)).all())
            assert len(seen) >= 2


def uppers(problem: Problem, **options: object) -> tuple[Tensor, Tensor]:
    """The proven bounds and the true errors of all iterations but the first two."""
    found: list[tuple[Tensor, Tensor]] = []

    def watch(state: CGState) -> None:
        found.append((state.upper, problem.error(state.iterate)))

    solver = ConjugateGradient(tolerance=1e-3, verify=False, **options)
    solver.solve(problem.system, problem.g, generator=generator(), on_step=watch)
    upper, error = (torch.stack(numbers[2:]) for numbers in zip(*found, strict=True))
    return upper, error


def test_without_a_preconditioner_to_speak_of_they_are_the_rule_of_gauss_and_radau() -> None:
    problem = Problem(SPECTRA["geometric"], q=4, damping=0.005)
    nothing = DensePreconditioner(3 * torch.eye(SIZE, dtype=DOUBLE), problem, smallest=1e-9)
    radau, _ = uppers(problem)
    spanned, _ = uppers(problem, preconditioner=nothing, keep_basis=True)
    both = (
        min(len(spanned), len(radau)) - 2
    )  # then the earlier bound less the decrease is better than the rule
    torch.testing.assert_close(spanned[:both], radau[:both], rtol=2e-3, atol=0.0)  # rounding differs by CPU
    without, _ = uppers(problem, preconditioner=nothing)
    assert float((without[: len(radau)] / radau).median()) > 1.5


@pytest.mark.parametrize("q", [1, 4])
def test_they_are_close_where_the_smallest_eigenvalue_is_not_known(q: int) -> None:
    problem = Problem(SPECTRA["geometric"], q=q, damping=0.0005, seed=1)
    P = diagonal_nearby(problem)
    upper, error = uppers(problem, preconditioner=P, keep_basis=True)
    assert float((upper / error).median()) < 2
    loose, errors = uppers(problem, preconditioner=P)
    assert float((loose / errors).median()) > 2 * float((upper / error).median())


def test_without_a_preconditioner_nothing_is_kept() -> None:
    problem = Problem(SPECTRA["geometric"], q=2, damping=0.01)
    seen: list[CGState] = []
    solver = ConjugateGradient(keep_basis=True)
    solver.solve(problem.system, problem.g, generator=generator(), on_step=seen.append)
    assert seen[-1].spanned is None


def test_an_interrupted_solve_ends_in_the_same_bits(tmp_path: Path) -> None:
    """Also from the state before the first iteration has a block before it."""
    problem = Problem(SPECTRA["geometric"], q=3, damping=0.001)
    solver = ConjugateGradient(tolerance=1e-4, preconditioner=diagonal_nearby(problem), keep_basis=True)
    whole = solver.solve(problem.system, problem.g, generator=generator())
    for stop in (1, 2, 4):
        run = Run(tmp_path / str(stop), {}, identity={})
        journal = run.journal("solve", CGState, seconds=0.0)

        def interrupt(state: CGState) -> bool:
            return state.iteration == stop  # noqa: B023

        solver.solve(problem.system, problem.g, generator=generator(), journal=journal, on_step=interrupt)
        state = run.journal("solve", CGState).restore()
        assert state is not None
        assert state.iteration == stop
        assert state.spanned is not None
        assert len(state.spanned.blocks) == stop + 1
        state.events = []
        again = solver.solve(problem.system, problem.g, generator=generator(), state=state)
        assert torch.equal(again.value["x"], whole.value["x"])
        assert torch.equal(again.certificate.upper, whole.certificate.upper)


def test_a_space_that_is_exhausted() -> None:
    """No block is left to bound by, and none is needed."""
    values = torch.cat([torch.tensor([1.0, 0.3]), torch.zeros(SIZE - 2)]).double()
    problem = Problem(values, q=2, damping=0.1)
    P = diagonal_nearby(problem, turned=1e-9)
    solution = ConjugateGradient(tolerance=1e-6, preconditioner=P, keep_basis=True).solve(
        problem.system, problem.g, generator=generator()
    )
    assert bool(solution.converged.all())
    assert bool((problem.error(solution.value) <= solution.certificate.upper).all())
