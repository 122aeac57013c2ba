"""EK-FAC inside `attribute`: tried where it may pay, taken where it does, and proven all the same."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import text
import whence
from test_certain_models import Sure, problem
from whence import Classification, Damped, GaussNewton, LanguageModeling
from whence.attribution import kronecker
from whence.scoring import Scorer
from whence.solvers.alternatives import Alternative


@pytest.fixture
def cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Making it costs nothing, so that it is tried on a model that is small enough for dense truth."""
    monkeypatch.setattr(kronecker, "_MAKING", 0.0)
    monkeypatch.setattr(kronecker, "_FIXED", 0.0)
    monkeypatch.setattr(kronecker, "_HOPED", 100.0)


def layer() -> tuple[nn.Module, list[tuple[Tensor, int]], list[tuple[Tensor, int]]]:
    """One linear layer over inputs of very different sizes, whose curvature is nearly a Kronecker product."""
    torch.manual_seed(0)
    x = torch.randn(240, 16) * torch.logspace(0.5, -1.5, 16)
    y = (x @ torch.randn(16, 4) + torch.randn(240, 4)).argmax(1)
    model = nn.Linear(16, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for _ in range(100):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    data = [(point, int(label)) for point, label in zip(x, y, strict=True)]
    return model.eval(), data[:200], data[200:206]


def ask(**options: Any) -> whence.Attribution:
    model, train, queries = layer()
    return whence.attribute(
        model, train, queries, task=Classification(), damping="lambda_max/2000", baseline=False,
        method="gradients", **options,
    )  # fmt: skip


def exact_scores(damping: float) -> Tensor:
    model, train, queries = layer()
    wide, asked = ([(x.double(), y) for x, y in part] for part in (train, queries))
    gnh = GaussNewton(model.double(), Classification(), wide)
    solver = whence.ConjugateGradient(tolerance=1e-8, max_iterations=200)
    solved = solver.solve(Damped(gnh, damping), gnh.gradients(asked), generator=torch.Generator())
    assert bool(solved.converged.all())
    return Scorer(gnh, solved.value).score(torch.arange(len(wide)))


@pytest.mark.usefixtures("cheap")
def test_it_is_taken_where_it_saves_iterations_and_the_error_is_proven() -> None:
    found, without = ask(), ask(solver="cg")
    assert found.solve.solver == "cg"
    assert "With EK-FAC as a preconditioner" in found.solve.choice
    assert "it is used, and about" in found.solve.choice
    assert "EK-FAC" not in without.solve.choice
    assert found.solve.num_products < without.solve.num_products
    exact = exact_scores(found.solve.plan.damping)
    for result in (found, without):
        agreement = [
            float(torch.corrcoef(torch.stack(pair))[0, 1]) for pair in zip(result.scores, exact, strict=True)
        ]
        assert sum(agreement) / len(agreement) > 0.995
        low, high = result.interval(0.95)
        assert float(((low <= exact) & (exact <= high)).double().mean()) > 0.9
        assert bool(((result.scores - exact).abs() <= result.bounds).all())
    # and not by a bound that says nothing: about as closely as without a preconditioner
    certified = [float(result.solve.error_parts.certificate.mean()) for result in (found, without)]
    assert certified[0] < 3 * certified[1]


@pytest.mark.usefixtures("cheap")
def test_a_language_model_that_it_does_not_fit() -> None:
    """Twelve numbers wide and with tied embeddings: the trial says that it is of no use, and nothing is lost."""
    asked = text.problem()
    found = whence.attribute(asked.model, asked.train, asked.queries, task=LanguageModeling(), baseline=False)
    assert "it is not used." in found.solve.choice
    exact = asked.exact_scores(found.solve.plan.damping)
    assert float(torch.corrcoef(torch.stack([found.scores[0], exact[0]]))[0, 1]) > 0.99


@pytest.mark.usefixtures("cheap")
def test_where_it_does_not_pay_it_is_left_and_removed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(kronecker, "_WORTHWHILE", 0.99)
    found = ask(run_dir=tmp_path / "run")
    assert "it is not used." in found.solve.choice
    assert not (tmp_path / "run" / "ekfac.safetensors").exists()
    assert (tmp_path / "run" / "ekfac-trial.json").exists()
    again = ask(run_dir=tmp_path / "run")
    assert torch.equal(again.scores, found.scores)


@pytest.mark.usefixtures("cheap")
def test_it_is_kept_with_the_run_and_not_made_twice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A run that was killed while it solved goes on with the same preconditioner, to the same bits."""
    whole = ask()
    real = whence.ConjugateGradient._step
    steps = 0

    def killed(self: Any, A: Any, g: Any, state: Any) -> None:
        nonlocal steps
        steps += self.score_error is not None  # the trial's own solves do not watch scores
        if steps == 4:
            raise KeyboardInterrupt
        real(self, A, g, state)

    with monkeypatch.context() as patched:
        patched.setattr(whence.ConjugateGradient, "_step", killed)
        with pytest.raises(KeyboardInterrupt):
            ask(run_dir=tmp_path / "run", checkpoint_seconds=0.0)
    assert (tmp_path / "run" / "ekfac.safetensors").exists()
    assert (tmp_path / "run" / "solve" / "cg.safetensors").exists()

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("made again")

    monkeypatch.setattr(kronecker, "ekfac", never)
    again = ask(run_dir=tmp_path / "run")
    assert torch.equal(again.scores, whole.scores)
    assert torch.equal(again.stderr, whole.stderr)


@pytest.mark.usefixtures("cheap")
def test_without_curvlinops_the_user_is_told_what_would_help(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "curvlinops" else real(name)
    )
    assert 'it needs curvlinops: pip install "whence[curvlinops]"' in ask().solve.choice


@pytest.mark.usefixtures("cheap")
def test_a_model_without_layers_for_it_is_solved_all_the_same() -> None:
    class Scale(Sure):
        def __init__(self) -> None:
            super().__init__()
            del self.hidden, self.out
            self.by = nn.Parameter(torch.tensor([[1.0, 2.0, 0.5], [0.3, -1.0, 0.2]]))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.by

    _, data = problem()
    found = whence.attribute(Scale().eval(), data, data[:2], task=Classification())
    assert "EK-FAC cannot be made for this model: EK-FAC covers none of the parameters" in found.solve.choice
    assert bool(found.solve.converged.all())


def test_it_is_not_tried_where_the_solve_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor for a solver that it is not for, nor where all of the basis would not fit into memory."""
    model = nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 10)).eval()
    gnh = GaussNewton(model, Classification(), [(torch.zeros(256), k % 10) for k in range(64)])
    short, long = (
        Alternative("cg", count * gnh.num_terms, work=1.0, seconds=None, memory_copies=8, how="")
        for count in (10.0, 1e4)
    )
    monkeypatch.setattr(kronecker, "_FEWEST", 10)
    monkeypatch.setattr(kronecker, "half_of_memory", lambda device: 1e15)
    assert not kronecker.would_try(gnh, short, queries=32)
    assert kronecker.would_try(gnh, long, queries=32)
    assert not kronecker.would_try(gnh, replace(long, solver="lissa"), queries=32)
    monkeypatch.setattr(kronecker, "half_of_memory", lambda device: 1e9)
    assert not kronecker.would_try(gnh, long, queries=32)
