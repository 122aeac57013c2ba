"""A run directory that was interrupted, damaged or forged."""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from run_samples import (
    TABLE,
    Basis,
    Failing,
    Inner,
    Killed,
    State,
    contents,
    fill,
    forged,
    mutations,
    opened,
    same,
    same_all,
    vector,
)
from whence.errors import RunDirectoryError, StorageError
from whence.runs import (
    read,
)
from whence.runs.files import (
    read_table,
    write_table,
)
from whence.runs.manifest import Manifest


def damages(content: bytes, other: bytes, dice: random.Random) -> dict[str, bytes | None]:
    place, bit = dice.randrange(len(content)), 1 << dice.randrange(8)
    return {
        "bit flip": content[:place] + bytes([content[place] ^ bit]) + content[place + 1 :],
        "truncation": content[:place],
        "zeros": bytes(len(content)),
        "longer": content + b"\n",
        "swap": other,
        "deletion": None,
    }


@pytest.mark.parametrize("fatal", [True, False], ids=["killed", "disk full"])
def test_a_run_stopped_at_any_file_operation_ends_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fatal: bool
) -> None:
    failing = Failing(monkeypatch, fatal)
    truth = fill(opened(tmp_path / "whole"))
    total, stopped = failing.count, 0
    assert total > 60
    files_of_whole = contents(tmp_path / "whole").keys()
    for limit in range(1, total + 1, 5 if fatal else 12):
        path = tmp_path / str(limit)
        failing.count, failing.limit = 0, limit
        try:
            fill(opened(path))
        except (Killed, StorageError):
            stopped += 1
        failing.limit = sys.maxsize
        if (path / "manifest.json").exists():
            listed = Manifest.open(path)
            for name in listed.names():
                listed.file(name)  # all there, and whole
        assert same_all(fill(opened(path)), truth)
        assert {re.sub(r"\d{6}", "", name) for name in contents(path)} == {
            re.sub(r"\d{6}", "", name) for name in files_of_whole
        }
        shutil.rmtree(path)
    assert stopped > total / (8 if fatal else 24)


def test_a_journal_goes_on_after_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within one process, the disk's state is never ahead of or behind what the next record supposes."""
    failing = Failing(monkeypatch, fatal=False)
    for limit in range(1, 40, 2):
        path = tmp_path / str(limit)
        run = opened(path)
        journal = run.journal("solve", State, seconds=0.0)
        state = State(0, vector(0), Basis())
        failing.count, failing.limit = 0, limit
        for step in range(4):
            state.step = step
            state.current = vector(step)
            state.basis.blocks.append(state.current)
            with contextlib.suppress(StorageError):
                journal.record(state)
        failing.limit = sys.maxsize
        journal.record(state)
        del run, journal
        assert same(opened(path).journal("solve", State, seconds=0.0).restore(), state)


def test_a_damaged_file_is_refused_by_its_name(tmp_path: Path) -> None:
    fill(opened(tmp_path / "run"))
    fill(opened(tmp_path / "other", {"seed": 1}))
    files, dice, tried = contents(tmp_path / "run"), random.Random(0), 0
    others = list(contents(tmp_path / "other").values())
    for name, content in files.items():
        path = tmp_path / "run" / name
        for _ in range(4):
            for kind, damaged in damages(content, dice.choice(others), dice).items():
                if damaged == content or (kind == "longer" and name == "manifest.json"):
                    continue  # the manifest's checksum is of what it says
                tried += 1
                path.unlink()
                if damaged is not None:
                    path.write_bytes(damaged)
                known = (
                    "manifest.json|holds no run|another configuration"
                    if name == "manifest.json"
                    else re.escape(name)
                )
                with pytest.raises(RunDirectoryError, match=known) as caught, opened(tmp_path / "run") as run:
                    fill(run)
                assert re.search(r"[Dd]elete|[Gg]ive", str(caught.value)), caught.value
                path.write_bytes(content)
    assert tried > 200
    fill(opened(tmp_path / "run"))


@pytest.mark.parametrize("file", ["../outside.json", "{tmp}/outside.json", "link.json", "scores/../../outside.json", "",
                                  ".", "a\x00b", "fifo", "to/outside.json", "scores"])  # fmt: skip
def test_links_and_paths_that_lead_out_are_refused(tmp_path: Path, file: str) -> None:
    run = tmp_path / "run"
    fill(opened(run))
    (tmp_path / "outside.json").write_bytes((run / "spectrum.json").read_bytes())
    (run / "link.json").symlink_to(tmp_path / "outside.json")
    (run / "to").symlink_to(tmp_path)
    os.mkfifo(run / "fifo")
    forged(run, lambda tree: tree["artifacts"]["spectrum"].update(file=file.replace("{tmp}", str(tmp_path))))
    with pytest.raises(RunDirectoryError, match="Put back a copy"):
        fill(opened(run))
    second = opened(tmp_path / "second")
    (tmp_path / "second" / "scores").symlink_to(tmp_path)
    with pytest.raises(RunDirectoryError, match="is a link"):
        second.keep_table("scores/part-00000", lambda: TABLE)
    (run / "manifest.json").rename(tmp_path / "manifest.json")
    (run / "manifest.json").symlink_to(tmp_path / "manifest.json")
    with pytest.raises(RunDirectoryError, match="is a link"):
        opened(run)


@pytest.mark.parametrize("seed", range(6))
def test_a_forged_manifest_is_refused_or_holds_what_it_says(tmp_path: Path, seed: int) -> None:
    fill(opened(tmp_path))
    original, dice, refused = (tmp_path / "manifest.json").read_bytes(), random.Random(seed), 0
    for _ in range(60):

        def change(tree: Any) -> None:
            new = mutations(dict(tree), dice)
            tree.clear()
            tree.update(new if isinstance(new, dict) else {"x": new})

        forged(tmp_path, change)
        try:
            Manifest.open(tmp_path).names()
            with contextlib.suppress(StorageError):
                read(tmp_path, "spectrum", Inner)
                Manifest.open(tmp_path).operator("spectrum")
        except RunDirectoryError:
            refused += 1
    (tmp_path / "manifest.json").write_bytes(original)
    assert refused > 20


def test_a_table_that_claims_more_than_it_has_is_refused(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = tmp_path / "scores.parquet"
    many = pa.table({"index": np.zeros(10**6, dtype=np.int64)})
    for table in (many, pa.table({"index": ["a"]}), pa.table({"index": [1, None]}), pa.table({"x": [[1]]})):
        pq.write_table(table, path)  # compressed
        with pytest.raises(RunDirectoryError, match=r"scores\.parquet cannot be read"):
            read_table(path)
    assert write_table(path.with_suffix(""), {}) == path
    assert read_table(path) == {}


def test_texts_that_unfold_beyond_their_file_are_refused_unread(tmp_path: Path) -> None:
    """A text of 20 kB that 50,000 rows share takes a gigabyte once it is read."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path, rows = tmp_path / "scores.parquet", 50_000
    shared = pa.DictionaryArray.from_arrays(
        pa.array(np.zeros(rows, dtype=np.int32)), pa.array(["x" * 20_000])
    )
    pq.write_table(pa.table({"index": shared}), path, store_schema=False)
    content = path.read_bytes()
    footer = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    # as many bytes as rows of numbers would need
    path.write_bytes(content[:footer] + bytes(9 * rows) + content[footer:])
    before = pa.default_memory_pool().max_memory()
    with pytest.raises(
        RunDirectoryError, match=r"scores\.parquet cannot be read \(a column is not of numbers"
    ):
        read_table(path)
    assert pa.default_memory_pool().max_memory() < before + 2**24
