"""Solving on until a ranking is stable."""

from __future__ import annotations

import re
import shutil
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import digits
import whence
from run_samples import Failing, Killed, same
from small import DOUBLE, classifier
from whence import Attribution, Classification, ConjugateGradient
from whence.attribution.ranking import top_is_separated
from whence.attribution.scored import Scored
from whence.errors import OptionError
from whence.options import Until
from whence.runs import holds
from whence.runs.manifest import Manifest
from zoo import vectors


def attribute_small(**options: Any) -> Attribution:
    data = vectors(DOUBLE)
    options = {"damping": "lambda_max/10", "until": "top-3 stable", "budget": 50.0, **options}
    return whence.attribute(classifier(), data, data[:2], task=Classification(), **options)


@pytest.mark.parametrize("text", ["top-0 stable", "top-10", "stable", "top-10 stable at 2", "10 stable", ""])
def test_what_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(OptionError, match="top-10 stable"):
        Until.parse(text)


def test_until_is_read() -> None:
    assert Until.parse("top-10 stable") == Until(10, 0.95)
    assert Until.parse(" top-3 stable at 0.99 ") == Until(3, 0.99)
    assert Until.parse(str(Until(7, 0.9))) == Until(7, 0.9)


def test_budget_must_be_a_multiple() -> None:
    with pytest.raises(OptionError, match=r"budget is 0\.5"):
        attribute_small(budget=0.5)


# --- separated? ----------------------------------------------------------------------------------------------


def test_separation_needs_every_one_of_the_top_above_every_one_of_the_rest() -> None:
    scores = torch.tensor([[5.0, 4.0, 3.9, 0.0]], dtype=DOUBLE)
    certified = torch.full_like(scores, 0.1)
    apart = [bool(top_is_separated(Scored(scores[None], certified), k, 0.95)) for k in (1, 2, 3, 4)]
    assert apart == [True, False, True, True]


def test_errors_common_to_all_chains_scores_do_not_blur_the_order() -> None:
    generator = torch.Generator().manual_seed(0)
    common = torch.randn(6, 1, 1, generator=generator, dtype=DOUBLE)
    own = 0.01 * torch.randn(6, 1, 4, generator=generator, dtype=DOUBLE)
    chains = torch.tensor([4.0, 3.0, 2.0, 1.0], dtype=DOUBLE) + common + own
    assert bool(top_is_separated(Scored(chains), 2, 0.95))
    assert not bool(top_is_separated(Scored(chains + 3 * torch.randn(6, 1, 4, generator=generator)), 2, 0.95))


def test_a_wrong_set_is_claimed_no_more_often_than_the_confidence_allows() -> None:
    """Two examples of equal scores at the border: any claim is wrong half of the time, so claims must be rare."""
    generator = torch.Generator().manual_seed(1)
    claimed = 0
    for _ in range(2000):
        chains = torch.randn(5, 1, 30, generator=generator, dtype=DOUBLE)
        chains[:, :, :2] += 100.0
        chains[:, :, 2:4] += 50.0  # the third and fourth are equal
        claimed += bool(top_is_separated(Scored(chains), 3, 0.95))
    assert claimed <= 2000 * 0.1 + 4 * (2000 * 0.1 * 0.9) ** 0.5  # either one can come out on top


# --- runs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("solver", ["cg", "lissa"])
def test_it_stops_with_the_exact_set_and_says_so(solver: Any) -> None:
    exact = attribute_small(solver=ConjugateGradient(tolerance=1e-9), until=None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = attribute_small(solver=solver, accuracy=0.9)
    assert "separated from the rest" in result.solve.events[-1]
    for q in range(2):
        top = {row.index for row in result.top(3, query=q)}
        assert top == {row.index for row in exact.top(3, query=q)}


def test_a_budget_that_ends_is_told() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = attribute_small(solver="lissa", chains=2, budget=1.0, until="top-9 stable at 0.999")
    assert "The budget ended after 1 round" in result.solve.events[-1]


#: Several rounds, in a fraction of a second: λ is small, so that the first solution separates nothing.
ROUNDS: dict[str, Any] = {
    "solver": "cg",
    "damping": "lambda_max/3000",
    "until": "top-10 stable",
    "accuracy": 0.8,
}


@pytest.mark.parametrize("product", ["exact", "finite-difference"])
@pytest.mark.parametrize("solver", ["cg", "lissa"])
def test_rounds_in_memory_are_those_of_a_run_directory(solver: str, product: Any, tmp_path: Path) -> None:
    options = (
        ROUNDS
        if solver == "cg"
        else {"solver": "lissa", "accuracy": 0.8, "until": "top-5 stable", "chains": 3}
    )
    free, kept = (
        attribute_small(**options, part_size=8, product=product, run_dir=run_dir)
        for run_dir in (None, tmp_path)
    )
    assert same(replace(free, seconds={}), timed_like(replace(kept, seconds={}), free))
    assert holds(tmp_path, "solution-2")
    assert not holds(tmp_path, "solve-1")  # the ways there are gone
    assert not list(tmp_path.glob("solve-*"))


def timed_like(result: Attribution, other: Attribution) -> Attribution:
    """The same, with the other's stopwatch."""
    plan, seconds = result.solve.plan, other.solve.plan.spectrum.seconds_per_term
    spectrum = replace(plan.spectrum, seconds_per_term=seconds)
    return replace(result, solve=replace(result.solve, plan=replace(plan, spectrum=spectrum)))


def test_a_run_stopped_at_any_file_operation_is_replayed_with_the_same_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever file of whichever round was being written: the same scores, events and number of rounds."""
    # by finite differences, whose every product depends on the ones before: nothing is right by chance
    options = {**ROUNDS, "part_size": 8, "checkpoint_seconds": 0.0, "product": "finite-difference"}
    failing, place = Failing(monkeypatch, fatal=True), Manifest.place
    begun: dict[str, int] = {}  # what is about to be written -> the file operation that begins it

    def placed(manifest: Manifest, name: str) -> Path:
        begun.setdefault(re.sub(r"\.\d+$", "", name), failing.count + 1)
        return place(manifest, name)

    with monkeypatch.context() as patch:
        patch.setattr(Manifest, "place", placed)
        truth = attribute_small(**options, run_dir=tmp_path / "whole")
    rounds, total = [name for name in begun if name.startswith("solution-")], failing.count
    assert len(rounds) >= 3
    named = [
        begun[name] for name in ("solve-2", "solution-2", "scores-2/part-00001", "solve-3", "solution-3")
    ]
    for limit in sorted({*named, *range(total // 3, total, total // 6), begun["result"]}):
        path = tmp_path / str(limit)
        failing.count, failing.limit = 0, limit
        with pytest.raises(Killed):
            attribute_small(**options, run_dir=path)
        failing.limit = sys.maxsize
        again = attribute_small(**options, run_dir=path)
        assert torch.equal(again.chain_scores, truth.chain_scores)
        assert again.solve.events == truth.solve.events
        assert same(again, timed_like(replace(truth, seconds=again.seconds), again))
        assert [name for name in begun if name.startswith("solution-") and holds(path, name)] == rounds
        assert not holds(path, f"solution-{len(rounds) + 1}")
        shutil.rmtree(path)


def test_on_digits_the_claimed_set_is_the_exact_one() -> None:
    problem = digits.problem()
    _, test = digits.load()
    queries = [test[i] for i in range(8)]
    result = whence.attribute(
        problem.model,
        problem.train,
        queries,
        task=Classification(),
        damping="lambda_max/200",
        until="top-10 stable",
        baseline=False,
    )
    exact = problem.exact_scores(result.solve.plan.damping)[:8].topk(10).indices
    stable = top_is_separated(result.scored, 10, 0.95)
    assert int(stable.sum()) >= 7
    for q in stable.nonzero().flatten().tolist():
        assert {row.index for row in result.top(10, query=q)} == set(exact[q].tolist())
