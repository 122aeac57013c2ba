"""Whose directory it is: other configurations, formats, processes and leftovers."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from run_samples import (
    CONFIG,
    IDENTITY,
    Inner,
    State,
    contents,
    fill,
    never,
    opened,
    same,
    same_all,
    vector,
)
from whence.errors import RunDirectoryError, StorageError, WhenceWarning
from whence.runs import (
    Run,
    directory,
    environment,
    read,
)
from whence.runs.files import (
    TEMPORARY,
)
from whence.vectors import ParamVector


def test_another_configuration_or_identity_is_refused_showing_the_differences(tmp_path: Path) -> None:
    opened(tmp_path)
    before = contents(tmp_path)
    opened(tmp_path)
    assert contents(tmp_path) == before
    opened(tmp_path, dict(reversed(CONFIG.items())))
    assert contents(tmp_path) == before
    for changes, names, shown in (
        ({"seed": 3}, {}, ["seed: 0 there, 3 now"]),
        ({"damping": 0.5, "seed": 1}, {}, ["seed: 0 there, 1 now", "damping: 'auto' there, 0.5 now"]),
        ({"title": "x" * 500}, {}, ["title: 'λ' there, 'xxx"]),
        ({"budget": 8.0}, {}, ["budget: inf there, 8.0 now"]),
        ({"until": "top-10 stable"}, {}, ["until: None there, 'top-10 stable' now"]),
        ({"extra": 7}, {}, ["extra: None there, 7 now"]),
        ({}, {"data": "ef"}, ["data: 'cd34' there, 'ef' now"]),
        ({}, {"more": "ef"}, ["more: None there, 'ef' now"]),
    ):
        with pytest.raises(
            RunDirectoryError, match=r"another configuration.*Give another directory"
        ) as caught:
            opened(tmp_path, changes, **names)
        message = str(caught.value)
        assert str(tmp_path) in message
        assert all(part in message for part in shown)
        assert message.count(" there") == len(shown)
        assert len(message) < 500 + len(str(tmp_path))
    with pytest.raises(RunDirectoryError, match="title: 'λ' there"):
        Run(tmp_path, {name: value for name, value in CONFIG.items() if name != "title"}, identity=IDENTITY)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("form", [0, 9, "1", 12])
def test_another_format_is_refused(tmp_path: Path, form: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"format": form, "seed": 1, "x": math.inf}))
    before = contents(tmp_path)
    for use in (lambda: opened(tmp_path), lambda: read(tmp_path, "spectrum", Inner)):
        with pytest.raises(
            RunDirectoryError, match=rf"of format {form!r}, .*reads format 11.*environment\.json"
        ):
            use()
    assert contents(tmp_path) == before
    (tmp_path / "config.json").unlink()
    opened(tmp_path)
    tree = json.loads((tmp_path / "manifest.json").read_text()) | {"format": form}
    del tree["blake2b"]
    digest = hashlib.blake2b(json.dumps(tree, sort_keys=True).encode(), digest_size=32).hexdigest()
    (tmp_path / "manifest.json").write_text(json.dumps(tree | {"blake2b": digest}))
    with pytest.raises(RunDirectoryError, match=rf"of format {form!r}, .*reads format 11.*manifest\.json"):
        opened(tmp_path)


def test_a_directory_of_something_else_is_refused_and_left_as_it_was(tmp_path: Path) -> None:
    for name in ("photo.jpg", "config.json", "environment.json"):
        place = tmp_path / name.split(".")[0]
        place.mkdir()
        (place / name).write_text("{}")
        before = contents(place)
        with pytest.raises(
            RunDirectoryError, match=rf"not empty \('{name}' is there\) and holds no run; give a new"
        ):
            opened(place)
        with pytest.raises(RunDirectoryError, match="holds no run"):
            read(place, "spectrum", Inner)
        assert contents(place) == before
        assert not (place / "lock").exists()


def test_another_environment_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened(tmp_path)
    monkeypatch.setattr(directory, "environment", lambda: {**environment(), "torch": "0.1"})
    with pytest.warns(WhenceWarning, match=r"begun in another environment \(torch .* → 0\.1\).*last digits"):
        opened(tmp_path)


def test_only_one_may_use_a_directory(tmp_path: Path) -> None:
    run = opened(tmp_path)
    with pytest.raises(
        RunDirectoryError, match="used by another call or process; wait for it, or give another"
    ):
        opened(tmp_path / ".." / tmp_path.name)
    with run:
        pass
    hold = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); print(); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", hold, str(tmp_path / "lock")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(
            RunDirectoryError, match="call or process; wait for it, or give another directory"
        ):
            opened(tmp_path)
        assert other.stdin is not None
        other.stdin.close()
    with opened(tmp_path) as again:
        assert again.keep("a", Inner, lambda: Inner(1.0)) == Inner(1.0)
    assert again.keep("a", Inner, never) == Inner(1.0)
    with pytest.raises(StorageError, match="closed"):
        again.keep("b", Inner, never)


def test_a_read_only_run_can_be_read_and_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = fill(opened(tmp_path / "run"))
    (tmp_path / "run" / "lock").unlink()
    (tmp_path / "run" / f"{TEMPORARY}01234567-abcd_789").write_text("left")
    before = contents(tmp_path)

    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EROFS, "Read-only file system")

    open_file = os.open
    monkeypatch.setattr(
        os, "open", lambda p, f, *a, **k: refuse() if f & os.O_CREAT else open_file(p, f, *a, **k)
    )
    for name in ("replace", "unlink", "mkdir"):
        monkeypatch.setattr(os, name, refuse)
    monkeypatch.setattr(Path, "mkdir", lambda path, **_: None if path.exists() else refuse())
    run = opened(tmp_path / "run")
    assert same_all(fill(run), first)
    assert same(read(tmp_path / "run", "gradients", ParamVector), vector(1, 2))
    with pytest.raises(
        StorageError, match=r"cannot be written to, so 'plan' cannot be kept: it is read-only"
    ):
        run.keep("plan", Inner, never)
    with pytest.raises(StorageError):
        opened(tmp_path / "other")
    assert contents(tmp_path) == before


def test_leftovers_are_removed_and_nothing_else(tmp_path: Path) -> None:
    fill(opened(tmp_path / "run"))
    before = contents(tmp_path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "run" / "linked").symlink_to(elsewhere)
    own = [
        "report.html",
        "x.000001.json",
        "spectrum.000001.json",
        "scores/notes.000001.safetensors",
        "resolve.000001.json",
    ]
    own += [
        "solve.000001.json.bak",
        "solve.000099.csv",
        "solve.0000099.json",
        "old-solve.000001.json",
        "page.json",
        f"{TEMPORARY}notes",
        f"scores/{TEMPORARY}01234567-abcd_789.txt",
    ]
    kept = [
        elsewhere / f"{TEMPORARY}01234567-abcd_789",
        elsewhere / "solve.000001.json",
        *(tmp_path / "run" / name for name in own),
    ]
    temporary = f"{TEMPORARY}01234567-abcd_789"
    left = [temporary, "solve.000099.safetensors", "solve.000098.json", f"scores/{temporary}"]
    for path in [*kept, *(tmp_path / "run" / name for name in left)]:
        path.write_text("x")
    opened(tmp_path / "run")
    assert contents(tmp_path) == before | {str(path.relative_to(tmp_path)): b"x" for path in kept}


def test_leftovers_of_what_the_manifest_does_not_name_go_when_it_is_written_again(tmp_path: Path) -> None:
    """A first writing may be interrupted, or the deletion of a journal that was cleared."""
    opened(tmp_path)
    left = [
        tmp_path / f"{name}.000001.{suffix}"
        for name in ("page", "solve")
        for suffix in ("json", "safetensors")
    ]
    for path in left:
        path.write_text("x")
    run = opened(tmp_path)
    assert all(path.exists() for path in left)  # it may be somebody's
    run.put("page", Inner, Inner(0.1))
    assert [path.read_text() for path in left if path.exists()][1:] == ["x", "x"]
    run.journal("solve", State)
    assert [path.name for path in left if path.exists()] == ["page.000001.json"]
    assert run.keep("page", Inner, never) == Inner(0.1)
