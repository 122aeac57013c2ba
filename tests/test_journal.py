"""A solve that is interrupted anywhere and goes on ends in the same bits."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from whence.solvers.journal import SolveState

from small import generator, operator
from whence import Damped, Estimate, FiniteSum, GaussNewton, Lissa, ParamVector, Plan, Solution, Spectrum
from whence.errors import RunDirectoryError, WhenceWarning
from whence.runs import FileJournal
from zoo import PLAIN, vectors

DAMPING = 0.2
SPECTRUM = Spectrum(trace=Estimate(6.0), frobenius=Estimate(3.0), lambda_max=Estimate(2.5))
PLAN = Plan.from_spectrum(SPECTRUM, DAMPING).replace(batch_size=4, num_steps=5, chains=3)


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of small files are written here; none has to survive a power cut."""
    monkeypatch.setattr("os.fsync", lambda handle: None)


class KilledError(Exception):
    """What a killed process looks like from inside."""


class InterruptedJournal(FileJournal):
    """Is cut off in the n-th call of `record`, before or after it writes."""

    def __init__(self, directory: Path, plan: Plan, *, seconds: float, at: int, after: bool) -> None:
        super().__init__(directory, plan, seconds=seconds)
        self.calls, self.at, self.after = 0, at, after
        self.turns: list[int] = []  # calls at the end of a chain, or of a divergence

    def record(self, state: SolveState, *, now: bool = False) -> None:
        self.calls += 1
        self.turns += [self.calls] if now else []
        if self.calls == self.at and not self.after:
            raise KilledError
        super().record(state, now=now)
        if self.calls == self.at:
            raise KilledError


def bits(vector: ParamVector) -> dict[str, tuple[torch.dtype, list[int], list[int]]]:
    return {
        name: (t.dtype, list(t.shape), t.detach().contiguous().reshape(-1).view(torch.uint8).tolist())
        for name, t in vector.items()
    }


def assert_same(resumed: Solution, whole: Solution) -> None:
    """Everything of the two solutions, bit for bit."""
    assert bits(resumed.value) == bits(whole.value)
    assert [bits(chain) for chain in resumed.chains] == [bits(chain) for chain in whole.chains]
    assert resumed.paths is not None
    assert whole.paths is not None
    for name in ("residual", "residual_stderr", "converged", "paths"):
        assert torch.equal(getattr(resumed, name), getattr(whole, name)), name
    assert (resumed.num_products, resumed.num_term_products) == (whole.num_products, whole.num_term_products)
    assert resumed.events == whole.events
    assert resumed.plan == whole.plan


#: Solves from the beginning, or goes on with what is in the directory; in a new process, as it were.
Solve = Callable[[FileJournal | None], tuple[Solution, dict[str, float | None]]]


def interrupted_anywhere(
    solve: Solve, directory: Path, plan: Plan, *, seconds: float, after: bool, every: int | None = 1
) -> tuple[int, Solution]:
    """Interrupt at every (n-th) call, go on, compare; returns the number of calls and the solution.

    With ``every=None``, only where a chain ended or diverged.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", WhenceWarning)
        counter = InterruptedJournal(directory / "whole", plan, seconds=seconds, at=-1, after=after)
        whole, state = solve(None)
        assert_same(solve(counter)[0], whole)  # writing it down changes nothing
        for at in counter.turns if every is None else range(1, counter.calls + 1, every):
            place = directory / str(at)
            with pytest.raises(KilledError):
                solve(InterruptedJournal(place, plan, seconds=seconds, at=at, after=after))
            resumed, resumed_state = solve(FileJournal(place, plan, seconds=seconds))
            assert_same(resumed, whole)
            assert resumed_state == state
    return counter.calls, whole


# --- matrices --------------------------------------------------------------------------------------------------


def finite_sum(count: int = 40, *, template: ParamVector | None = None) -> FiniteSum:
    x = torch.randn(count, 6, generator=generator(1), dtype=torch.float64)
    x = x * torch.linspace(1.5, 0.2, 6, dtype=torch.float64)
    return FiniteSum(torch.einsum("ci,cj->cij", x, x), template)


def named() -> ParamVector:
    """A space of several tensors, in a model's order rather than the alphabet's."""
    names = {"z.weight": (2, 2), "z.bias": (1,), "a": (1,)}
    return ParamVector({name: torch.zeros(shape, dtype=torch.float64) for name, shape in names.items()})


def on_matrices(solver: Lissa, *, columns: int | None = None, template: ParamVector | None = None) -> Solve:
    def solve(journal: FileJournal | None) -> tuple[Solution, dict[str, float | None]]:
        A = finite_sum(template=template)
        g, random = A.zeros(columns).randn_like(generator(3)), generator(7)
        solution = solver.solve(Damped(A, solver.plan.damping), g, generator=random, journal=journal)
        return solution, {"random": float(torch.rand((), generator=random))}

    return solve


@pytest.mark.parametrize("average", ["tail", "last"])
@pytest.mark.parametrize("after", [True, False], ids=["after writing", "before writing"])
@pytest.mark.parametrize("seconds", [0.0, math.inf], ids=["every step", "every chain"])
def test_a_solve_interrupted_at_any_step_ends_in_the_same_bits(
    tmp_path: Path, average: str, after: bool, seconds: float
) -> None:
    solve = on_matrices(Lissa(PLAN, average=average))  # type: ignore[arg-type]
    calls, whole = interrupted_anywhere(solve, tmp_path, PLAN, seconds=seconds, after=after)
    assert calls == PLAN.chains * (PLAN.num_steps + 1)
    assert whole.paths is not None
    assert whole.paths.shape == (3, 5, 1)


@pytest.mark.parametrize("columns", [None, 2])
@pytest.mark.parametrize("average", ["tail", "last"])
def test_vectors_of_several_tensors_and_blocks_go_on_in_the_same_bits(
    tmp_path: Path, columns: int | None, average: str
) -> None:
    solve = on_matrices(Lissa(PLAN, average=average), columns=columns, template=named())  # type: ignore[arg-type]
    interrupted_anywhere(solve, tmp_path, PLAN, seconds=0.0, after=True, every=2)


def test_a_solve_interrupted_after_every_single_step_gets_to_its_end(tmp_path: Path) -> None:
    solve = on_matrices(Lissa(PLAN))
    for _attempt in range(100):
        try:
            resumed, _ = solve(InterruptedJournal(tmp_path, PLAN, seconds=0.0, at=1, after=True))
            break
        except KilledError:
            continue
    assert_same(resumed, solve(None)[0])


def test_a_finished_solve_is_not_computed_again(tmp_path: Path) -> None:
    A, g = finite_sum(), finite_sum().zeros().randn_like(generator(3))
    first = Lissa(PLAN).solve(
        Damped(A, DAMPING), g, generator=generator(7), journal=FileJournal(tmp_path, PLAN, seconds=math.inf)
    )
    again = InterruptedJournal(tmp_path, PLAN, seconds=0.0, at=-1, after=True)
    assert_same(Lissa(PLAN).solve(Damped(A, DAMPING), g, generator=generator(7), journal=again), first)
    assert again.calls == 0


def diverging(solver: Lissa) -> Solve:
    """The paper's counterexample: every term has rank one, and all of the trace."""
    signs = torch.tensor(list(itertools.product([-1.0, 1.0], repeat=8)), dtype=torch.float64)
    A = FiniteSum(torch.einsum("ci,cj->cij", signs, signs))
    g = ParamVector({"x": torch.linspace(1.0, -0.5, 8, dtype=torch.float64)})

    def solve(journal: FileJournal | None) -> tuple[Solution, dict[str, float | None]]:
        return solver.solve(Damped(A, DAMPING), g, generator=generator(), journal=journal), {}

    return solve


@pytest.mark.parametrize("average", ["tail", "last"])
def test_a_solve_that_recovers_from_divergence_can_be_interrupted_anywhere(
    tmp_path: Path, average: str
) -> None:
    spectrum = Spectrum(trace=Estimate(8.0), frobenius=Estimate(math.sqrt(8)), lambda_max=Estimate(1.0))
    plan = Plan.from_spectrum(spectrum, DAMPING, C=0.1).replace(batch_size=1, num_steps=12, chains=3)
    solve = diverging(Lissa(plan, average=average))  # type: ignore[arg-type]
    calls, whole = interrupted_anywhere(solve, tmp_path, plan, seconds=0.0, after=True, every=4)
    assert len(whole.events) >= 2
    assert calls > whole.plan.chains * (whole.plan.num_steps + 1)  # type: ignore[union-attr]
    assert "Starting again with" in whole.events[-1]


# --- networks --------------------------------------------------------------------------------------------------


def on_a_network(
    solver: Lissa, *, product: str, params: list[str] | None = None, dtype: torch.dtype = torch.float32
) -> Solve:
    def solve(journal: FileJournal | None) -> tuple[Solution, dict[str, float | None]]:
        gnh: GaussNewton = operator(PLAIN[0].model(dtype), vectors(dtype), product=product, params=params)
        g, damped = gnh.gradients(vectors(dtype)[:2]), Damped(gnh, solver.plan.damping)
        return solver.solve(damped, g, generator=generator(7), journal=journal), gnh.state()

    return solve


NETWORK_PLAN = PLAN.replace(damping=1.0, step_size=0.02, batch_size=6, num_steps=4, chains=2)


@pytest.mark.parametrize("product", ["finite-difference", "exact"])
@pytest.mark.parametrize("params", [None, ["*.weight"]], ids=["all", "in the alphabet's order"])
def test_products_by_finite_differences_remember_their_step(
    tmp_path: Path, product: str, params: list[str] | None
) -> None:
    dtype = torch.float64 if params is None else torch.float32
    solve = on_a_network(Lissa(NETWORK_PLAN), product=product, params=params, dtype=dtype)
    interrupted_anywhere(solve, tmp_path, NETWORK_PLAN, seconds=0.0, after=True, every=3)
    assert (solve(None)[1] != {}) == (product == "finite-difference")


@pytest.mark.parametrize("product", ["finite-difference", "exact"])
def test_a_network_that_recovers_from_divergence_can_be_interrupted(tmp_path: Path, product: str) -> None:
    """What told the cause of the divergence was a product too."""
    plan = NETWORK_PLAN.replace(step_size=4.0, num_steps=4)
    solve = on_a_network(Lissa(plan), product=product, params=["*.weight"])
    _, whole = interrupted_anywhere(solve, tmp_path, plan, seconds=0.0, after=True, every=None)
    assert len(whole.events) >= 2


# --- files -----------------------------------------------------------------------------------------------------


def test_nothing_written_is_nothing_to_go_on_with(tmp_path: Path) -> None:
    assert FileJournal(tmp_path / "solve", PLAN, seconds=0.0).restore() is None
    assert not (tmp_path / "solve").exists()


def test_the_state_is_written_no_more_often_than_asked_for(tmp_path: Path) -> None:
    """Between chains it is; a state never counts a chain that is not there."""
    journal = FileJournal(tmp_path, PLAN, seconds=math.inf)
    written: list[set[str]] = []

    class Watching(FileJournal):
        def record(self, state: SolveState, *, now: bool = False) -> None:
            super().record(state, now=now)
            written.append({path.name for path in tmp_path.iterdir()})

    on_matrices(Lissa(PLAN))(Watching(tmp_path, PLAN, seconds=math.inf))
    chains = [{f"chain-0-{k}.safetensors" for k in range(n)} for n in range(4)]
    steps = PLAN.num_steps
    assert written[steps - 1] == set()
    for number in (1, 2, 3):
        assert written[number * (steps + 1) - 1] == chains[number] | {"state.safetensors"}
    state = journal.restore()
    assert state is not None
    assert (len(state.finished), state.chain, len(state.paths)) == (3, None, 3)
    assert [len(path) for path in state.paths] == [steps] * 3


@pytest.mark.parametrize("name", ["state.safetensors", "chain-0-0.safetensors"])
@pytest.mark.parametrize("damage", ["truncated", "missing", "garbage"])
def test_a_damaged_file_is_named(tmp_path: Path, name: str, damage: str) -> None:
    on_matrices(Lissa(PLAN))(FileJournal(tmp_path, PLAN, seconds=math.inf))
    path = tmp_path / name
    whole = path.read_bytes()
    if damage == "missing":
        path.unlink()
        if name == "state.safetensors":
            assert FileJournal(tmp_path, PLAN, seconds=0.0).restore() is None
            return
    else:
        path.write_bytes(whole[: len(whole) // 2] if damage == "truncated" else b"\0" * len(whole))
    with pytest.raises(RunDirectoryError) as caught:
        FileJournal(tmp_path, PLAN, seconds=0.0).restore()
    assert str(path) in str(caught.value)


def test_a_chain_that_was_half_written_before_its_state_is_written_again(tmp_path: Path) -> None:
    """A process killed between the two files: the chain of its last attempt is not trusted."""
    solve = on_matrices(Lissa(PLAN))
    whole, _ = solve(None)
    with pytest.raises(KilledError):  # the first chain is done but its state is not written
        solve(InterruptedJournal(tmp_path, PLAN, seconds=math.inf, at=PLAN.num_steps + 1, after=False))
    (tmp_path / "chain-0-0.safetensors").write_bytes(b"half")
    assert_same(solve(FileJournal(tmp_path, PLAN, seconds=math.inf))[0], whole)
    state = FileJournal(tmp_path, PLAN, seconds=0.0).restore()
    assert state is not None
    assert bits(state.finished[0]) == bits(whole.chains[0])
