"""Runs and journals: what is kept is computed once, and comes back as it was."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from run_samples import (
    TABLE,
    Basis,
    Inner,
    Operator,
    Other,
    State,
    contents,
    fill,
    never,
    opened,
    same,
    same_all,
    vector,
)
from whence.errors import RunDirectoryError, StorageError
from whence.runs import (
    Run,
    holds,
    read,
)
from whence.runs.files import (
    TEMPORARY,
)
from whence.vectors import ParamVector


def test_an_artifact_is_computed_once_and_read_afterwards(tmp_path: Path) -> None:
    run = opened(tmp_path / "new" / "run")
    first = fill(run)
    for part in ("spectrum", "gradients", "scores/part-00001", "solve", "result"):
        assert run.has(part)
    assert not run.has("plan")
    del run
    before = contents(tmp_path)
    again = opened(tmp_path / "new" / "run")
    assert contents(tmp_path) == before
    operator = Operator()
    assert again.keep("spectrum", Inner, never, operator=operator) == Inner(0.1)
    assert operator.count == 3.0
    assert same_all(fill(again), first)
    assert contents(tmp_path) == before
    assert same(read(tmp_path / "new" / "run", "gradients", ParamVector), vector(1, 2))
    assert again.keep_table("scores/part-00000", never)["index"].tolist() == [0, 1, 2, 3, 4]
    again.drop("spectrum")
    assert not (tmp_path / "new" / "run" / "spectrum.json").exists()
    assert again.keep("spectrum", Inner, lambda: Inner(7.0)) == Inner(7.0)
    with pytest.raises(RunDirectoryError, match="does not say what the operator remembered after 'spectrum'"):
        again.keep("spectrum", Inner, never, operator=operator)


def test_scores_are_an_ordinary_data_set(tmp_path: Path) -> None:
    import pyarrow.dataset as ds

    fill(opened(tmp_path))
    assert ds.dataset(tmp_path / "scores").to_table().num_rows == 10


def test_a_phase_that_fails_leaves_nothing_and_is_computed_the_next_time(tmp_path: Path) -> None:
    run = opened(tmp_path)
    before = contents(tmp_path)
    with pytest.raises(ZeroDivisionError):
        run.keep("plan", Inner, lambda: 1 / 0)  # type: ignore[arg-type,return-value]
    with pytest.raises(TypeError):
        run.keep("plan", Inner, lambda: Other(1))  # type: ignore[arg-type,return-value]
    with pytest.raises(TypeError):
        run.keep_table("plan", lambda: {"x": np.array(["a"])})
    for name in ("../plan", "/plan", "manifest", "Plan", "plan.json", "", "a//b", "."):
        with pytest.raises((ValueError, RunDirectoryError)):
            run.keep(name, Inner, lambda: Inner(1.0))
    assert contents(tmp_path) == before
    assert run.keep("plan", Inner, lambda: Inner(3.0)) == Inner(3.0)


def test_without_a_directory_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run, value = opened(None), Inner(1.0)
    assert run.keep("plan", Inner, lambda: value) is value
    assert run.keep_table("table", lambda: TABLE)["index"] is TABLE["index"]
    journal = run.journal("solve", State, seconds=0.0)
    assert run.put("page", Inner, value) is value
    run.drop("plan")
    assert not run.has("plan")
    assert not run.has("page")
    journal, state = run.journal("solve", State, seconds=math.inf), State(1, vector(1), Basis())
    assert journal.restore() is None
    journal.record(state)
    assert run.journal("solve", State).restore() is state  # in memory, for as long as the run lasts
    assert run.journal("solve-2", State).restore() is opened(None).journal("solve", State).restore() is None
    journal.clear()
    assert run.journal("solve", State).restore() is None
    assert contents(tmp_path) == {}


def test_what_is_put_takes_the_place_of_what_was_there(tmp_path: Path) -> None:
    run = opened(tmp_path)
    run.keep("page", Inner, lambda: Inner(1.0))
    many = {"x": torch.arange(5000.0)}
    assert run.put("page", Inner, Inner(2.0)) == run.keep("page", Inner, never) == Inner(2.0)
    assert same(run.put("page", dict[str, Tensor], many), many)
    assert run.put("page", Inner, Inner(3.0)) == read(tmp_path, "page", Inner) == Inner(3.0)
    assert len(contents(tmp_path)) == 2  # it, and the manifest
    with pytest.raises(TypeError):
        run.put("page", Inner, Other(1))  # type: ignore[arg-type]
    del run
    with opened(tmp_path) as again:
        assert again.put("page", Inner, again.keep("page", Inner, never)) == Inner(3.0)
    assert len(contents(tmp_path)) == 2
    with pytest.raises(StorageError, match="closed"):
        again.put("page", Inner, Inner(4.0))


def test_a_run_can_be_opened_again_whatever_it_is_about(tmp_path: Path) -> None:
    with opened(tmp_path / "run") as run:
        run.keep("spectrum", Inner, lambda: Inner(1.0))
    with Run.again(tmp_path / "run") as again:
        assert again.keep("spectrum", Inner, never) == Inner(1.0)
        again.put("validation", Inner, Inner(2.0))
    assert opened(tmp_path / "run").keep("validation", Inner, never) == Inner(2.0)
    with Run.again(tmp_path / "new") as new:
        new.put("validation", Inner, Inner(3.0))
    assert Run.again(tmp_path / "new").keep("validation", Inner, never) == Inner(3.0)
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "one.jpg").write_text("x")
    with pytest.raises(RunDirectoryError, match="holds no run"):
        Run.again(tmp_path / "photos")


def test_what_a_directory_holds_can_be_asked(tmp_path: Path) -> None:
    fill(opened(tmp_path / "run"))
    assert holds(tmp_path / "run", "spectrum")
    assert holds(str(tmp_path / "run"), "scores/part-00001")
    assert not holds(tmp_path / "run", "plan")
    assert not holds(tmp_path, "spectrum")
    assert not holds(tmp_path / "nowhere", "spectrum")
    (tmp_path / "run" / "manifest.json").write_text("{")
    with pytest.raises(RunDirectoryError, match=r"manifest\.json"):
        holds(tmp_path / "run", "spectrum")


def test_a_run_inside_a_run_is_left_alone_by_the_outer_one(tmp_path: Path) -> None:
    opened(tmp_path)
    inner = opened(tmp_path / "attribution", {"seed": 1})
    fill(inner)
    (tmp_path / "attribution" / "scores" / f"{TEMPORARY}01234567-abcd_789").write_text("being written")
    (tmp_path / "attribution" / "solve.000099.json").write_text("being written")
    before = contents(tmp_path / "attribution")
    fill(opened(tmp_path))
    del inner
    assert contents(tmp_path / "attribution") == before
    opened(tmp_path / "attribution", {"seed": 1})
    assert len(contents(tmp_path / "attribution")) == len(before) - 2


# --- journals ----------------------------------------------------------------------------------------------------


def test_a_state_comes_back_shared_and_items_are_written_once(tmp_path: Path) -> None:
    run = opened(tmp_path)
    fill(run)
    items = {name for name in contents(tmp_path) if name.startswith("solve.")}
    assert len(items) == 3 + 1 + 1
    del run
    run = opened(tmp_path)
    journal = run.journal("solve", State, seconds=0.0)
    state = journal.restore()
    assert state is not None
    assert state.current is state.basis.blocks[-1]
    assert state.iterate is not state.finished[0]
    before = contents(tmp_path)
    state.step = 4
    journal.record(state)
    after = contents(tmp_path)
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    assert len(changed) == 3  # the manifest, the old state and the new one
    state.finished.clear()
    journal.record(state)
    assert len([name for name in contents(tmp_path) if name.startswith("solve.")]) == 3 + 1
    journal.clear()
    assert not [name for name in contents(tmp_path) if name.startswith("solve")]
    assert journal.restore() is None
    journal.record(state)
    again = journal.restore()
    assert again is not None
    assert same(vars(again)["basis"], state.basis)


def test_a_journal_writes_when_it_is_time(tmp_path: Path) -> None:
    journal = opened(tmp_path).journal("solve", State, seconds=1e6)
    state = State(1, vector(1), Basis())
    journal.record(state)
    assert journal.restore() is None
    journal.record(state, now=True)
    assert same(journal.restore(), state)


@pytest.mark.parametrize("now", [True, False])
def test_a_journal_of_a_closed_run_is_not_written(tmp_path: Path, now: bool) -> None:
    """Another process may be writing to the directory by then."""
    state = State(1, vector(1), Basis())
    with opened(tmp_path) as run:
        journal = run.journal("solve", State, seconds=1e6)
        journal.record(state, now=True)
    before = contents(tmp_path)
    for write in (lambda: journal.record(state, now=now), journal.clear):
        with pytest.raises(
            StorageError, match=r"so 'solve' cannot be kept: the run was closed\. .*open it again"
        ):
            write()
    assert contents(tmp_path) == before
    assert same(journal.restore(), state)
