"""The run directory: what is kept comes back as it was, or is refused by name."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from small import generator
from whence.errors import OptionError, RunDirectoryError, StorageError, WhenceWarning
from whence.runs import (
    Run,
    Scalar,
    as_json,
    directory,
    environment,
    holds,
    read,
    read_value,
    write_value,
)
from whence.runs.codec import decode, encode
from whence.runs.files import (
    TEMPORARY,
    json_bytes,
    parse_json,
    read_table,
    read_tree,
    write_table,
    write_tree,
)
from whence.runs.manifest import Manifest
from whence.vectors import ParamVector

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]


def same_bits(left: Tensor, right: Tensor) -> bool:
    bits = [t.contiguous().reshape(-1).view(torch.uint8) for t in (left, right)]
    return left.dtype == right.dtype and left.shape == right.shape and torch.equal(*bits)


def same(left: Any, right: Any) -> bool:
    """Equal to the last bit, also where NaN stands."""
    if isinstance(left, Tensor):
        return isinstance(right, Tensor) and same_bits(left, right)
    if isinstance(left, torch.Generator):
        return same_bits(left.get_state(), right.get_state())
    if isinstance(left, ParamVector):
        return left.columns == right.columns and same(list(left.items()), list(right.items()))
    if isinstance(left, Mapping):
        return same(list(left.items()), list(right.items()))
    if isinstance(left, (list, tuple)):
        return type(left) is type(right) and len(left) == len(right) and all(map(same, left, right))
    if hasattr(left, "__dataclass_fields__"):
        return type(left) is type(right) and same(vars(left), vars(right))
    if isinstance(left, float) and left != left:
        return isinstance(right, float) and right != right
    return type(left) is type(right) and left == right and repr(left) == repr(right)  # -0.0 is not 0.0


def round_trip(value: Any, cls: Any, place: Path) -> Any:
    return decode(cls, *read_tree(write_tree(place, *encode(value, cls))))


def vector(seed: int, columns: int | None = None) -> ParamVector:
    space = ParamVector({"z.weight": torch.zeros(3, 2), "z/bias": torch.zeros(3), "a": torch.zeros(())})
    return space.zeros(columns).randn_like(generator(seed))


@dataclass(frozen=True)
class Inner:
    value: float
    words: tuple[str, ...] = ()


@dataclass
class Other:
    count: int

    def __post_init__(self) -> None:
        if self.count < 0:
            raise OptionError("negative")


@dataclass
class Everything:
    inner: Inner
    choice: Inner | Other | None
    word: Literal["a", "b", 3]
    setting: float | str | bool | None
    number: float | int
    path: Path
    flag: bool
    pair: tuple[int, float]
    rows: list[list[float]]
    by_name: Mapping[str, float | None]
    by_place: dict[tuple[int, int], Tensor]
    by_number: dict[int, Inner]
    several: Sequence[Inner | Tensor]
    vector: ParamVector | None
    tensor: Tensor
    code: bytes
    generator: torch.Generator
    skipped: int = field(default=5, metadata={"saved": False})
    computed: int = field(default=7, init=False)


def everything(seed: int) -> Everything:
    """A random one."""
    dice = random.Random(seed)

    def number() -> float:
        return dice.choice(
            [0.1, -0.0, 5e-324, 1 / 3, math.inf, -math.inf, math.nan, 1.7e308, dice.gauss(0, 1)]
        )

    def tensor() -> Tensor:
        shape = [dice.randrange(4) for _ in range(dice.randrange(4))]
        bits = torch.randint(256, (*shape, 8), generator=generator(dice.randrange(999)), dtype=torch.uint8)
        dtype = dice.choice(DTYPES)
        found = (bits % 2 if dtype == torch.bool else bits).view(dtype)
        return found if dice.random() < 0.5 else found.transpose(0, -1)

    def text() -> str:
        return "".join(dice.choice('aλ"\\\n\u2028\x00\ud800🎲') for _ in range(dice.randrange(5)))

    def inner() -> Inner:
        return Inner(number(), tuple(text() for _ in range(dice.randrange(3))))

    return Everything(
        inner=inner(),
        choice=dice.choice([inner(), Other(dice.randrange(9)), None]),
        word=dice.choice(["a", "b", 3]),  # type: ignore[arg-type]
        setting=dice.choice([number(), "auto", "NaN", True, False, None]),
        number=dice.choice([1, 1.0, 2**70, math.nan]),
        path=Path("a") / "b\udcff",
        flag=dice.random() < 0.5,
        pair=(dice.randrange(9), number()),
        rows=[[number() for _ in range(3)] for _ in range(dice.randrange(3))],
        by_name={text() + str(k): dice.choice([None, number()]) for k in range(3)},
        by_place={(k, -1): tensor() for k in range(2)},
        by_number={k: inner() for k in (3, -1)},
        several=[inner(), tensor()],
        vector=dice.choice([None, vector(seed), vector(seed, 2)]),
        tensor=tensor(),
        code=dice.randbytes(dice.randrange(6)),
        generator=generator(seed),
    )


# --- round trips -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(40))
def test_any_value_comes_back_to_the_last_bit(tmp_path: Path, seed: int) -> None:
    value = everything(seed)
    tree, _ = encode(value)
    json.dumps(tree, allow_nan=False)
    assert same(parse_json(json_bytes(tree)), tree)
    back = round_trip(value, Everything, tmp_path / "x")
    assert same(back, value)
    assert [torch.rand(3, generator=g).tolist() for g in (back.generator,)] == [
        torch.rand(3, generator=g).tolist() for g in (value.generator,)
    ]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_come_back_bit_for_bit_few_as_json_and_many_as_safetensors(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    for count in (6, 6000):
        bits = torch.randint(120, (count, 4, 8), generator=generator(), dtype=torch.uint8)  # no NaNs
        tensor = (bits % 2 if dtype == torch.bool else bits).view(dtype)
        tensors = [
            tensor,
            tensor.transpose(0, 1)[::2],
            tensor[0, 0, 0],
            tensor[:0],
            tensor[0, 0, :1].expand(3),
        ]
        path = write_tree(tmp_path / "x", *encode(tensors, list[Tensor]))
        assert path.suffix == (".json" if count == 6 else ".safetensors")
        assert same(decode(list[Tensor], *read_tree(path)), tensors)


def test_bits_that_json_would_lose_are_not_written_as_json(tmp_path: Path) -> None:
    odd = torch.tensor([0x7FC00001, -1], dtype=torch.int32).view(torch.float32)  # NaNs with a message
    assert write_tree(tmp_path / "x", *encode(odd)).suffix == ".safetensors"
    assert same(round_trip(odd, Tensor, tmp_path / "x"), odd)


def test_what_is_shared_comes_back_shared(tmp_path: Path) -> None:
    one, two, source, tensor = vector(1), vector(2), generator(3), torch.arange(3.0)
    value = ([one, two, one, one], [tensor, tensor.view(3), tensor[:2], tensor.clone()], [source, source])
    hint = tuple[list[ParamVector], list[Tensor], list[torch.Generator]]
    _, tensors = encode(value, hint)
    assert len(tensors) == 6 + 3 + 1
    vectors, found, generators = round_trip(value, hint, tmp_path / "x")
    assert vectors[0] is vectors[2] is vectors[3] is not vectors[1]
    found[0][0] = 7.0
    assert [float(t[0]) for t in found] == [7.0, 7.0, 0.0, 0.0]
    assert generators[0] is generators[1]
    small = round_trip([tensor, tensor], list[Tensor], tmp_path / "y")
    assert small[0] is small[1]
    assert (tmp_path / "y.json").exists()


def test_inner_products_of_what_came_back_are_the_same_to_the_last_bit(tmp_path: Path) -> None:
    """Which depends on where in memory a tensor begins, so not on how long a file's header happened to be."""
    x, y = (torch.randn(100, generator=generator(seed)) for seed in (1, 2))
    for length in range(0, 64, 4):
        value = {"note" * length: torch.ones(3), "x": x, "many": torch.zeros(5000)}
        back = round_trip(value, dict[str, Tensor], tmp_path / "x")["x"]
        assert torch.equal(torch.dot(back, y), torch.dot(x, y))


def test_a_single_file_holds_a_value_of_its_class(tmp_path: Path) -> None:
    value, path = everything(5), tmp_path / "deep" / "reference.safetensors"
    write_value(path, value)
    assert same(read_value(path, Everything), value)
    write_value(path, Inner(0.1))
    assert read_value(path, Inner) == Inner(0.1)
    with pytest.raises(
        RunDirectoryError,
        match=r"reference\.safetensors cannot be used: it holds no Other.*'count' is missing|value",
    ):
        read_value(path, Other)
    for damaged in (path.read_bytes()[:20], b""):
        path.write_bytes(damaged)
        with pytest.raises(RunDirectoryError, match=r"reference\.safetensors cannot be read"):
            read_value(path, Inner)


def test_values_for_scripts_are_plain_json() -> None:
    @dataclass
    class Shown:
        scores: Tensor
        again: Tensor
        by_name: dict[str, float]
        code: bytes
        choice: Inner | Other

    scores = torch.tensor([[1.0, -math.nan], [math.inf, 0.5]])
    shown = as_json(Shown(scores, scores, {"values": 1.0, "x": math.nan}, b"\xff", Inner(-math.inf, ("a",))))
    assert json.loads(json.dumps(shown, allow_nan=False)) == {
        "scores": [[1.0, "NaN"], ["Infinity", 0.5]],
        "again": [[1.0, "NaN"], ["Infinity", 0.5]],
        "by_name": {"values": 1.0, "x": "NaN"},
        "code": "/w==",
        "choice": {"Inner": {"value": "-Infinity", "words": ["a"]}},
    }


def test_a_small_file_is_for_people(tmp_path: Path) -> None:
    value = {"λ": Inner(math.nan, ("a",))}
    path = write_tree(tmp_path / "x", *encode(value, dict[str, Inner]))
    assert path.read_text() == '{\n  "λ": {\n    "value": "NaN",\n    "words": ["a"]\n  }\n}\n'


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        (1.5, int),
        (True, int),
        (True, float),
        ("c", Literal["a", "b"]),
        ((1, 2, 3), tuple[int, int]),
        ({1.5: 2}, dict[float, int]),
        ({"a": 1}, dict[int, int]),
        (ValueError, object),
        ([1], list),
        (Inner, Other),
        (Other(1), Inner | None),
        (torch.zeros(1, dtype=torch.complex64), Tensor),
    ],
    ids=str,
)
def test_what_could_not_be_read_is_not_written(value: Any, hint: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        encode(value, hint)


# --- strange trees -----------------------------------------------------------------------------------------------


def mutations(node: Any, dice: random.Random) -> Any:
    """The tree with one place changed."""
    junk = [None, True, -1, 10**400, 2**62, 1.5, "x", "NaN", [], {}, [[]], {"tensor": 1}, "\x00"]
    if isinstance(node, dict) and node and dice.random() < 0.85:
        key = dice.choice(list(node))
        if dice.random() < 0.15:
            return {k: v for k, v in node.items() if k != key}
        if dice.random() < 0.15:
            return {**node, dice.choice(["x", "__class__", "values"]): dice.choice(junk)}
        return {**node, key: mutations(node[key], dice)}
    if isinstance(node, list) and node and dice.random() < 0.85:
        place = dice.randrange(len(node))
        return [*node[:place], mutations(node[place], dice), *node[place + 1 :]]
    return dice.choice(junk)


@pytest.mark.parametrize("seed", range(10))
def test_a_changed_tree_is_a_value_of_the_class_or_refused(tmp_path: Path, seed: int) -> None:
    dice, refused = random.Random(seed), 0
    value = everything(seed)
    for cls, whole in ((Everything, value), (list[Tensor], [value.tensor.clone(), torch.arange(4.0)])):
        tree, tensors = read_tree(write_tree(tmp_path / "x", *encode(whole, cls)))
        for _ in range(150):
            changed = mutations(tree, dice)
            try:
                back = decode(cls, changed, tensors)
                encode(back, cls)  # all of it is what the hints say
            except RunDirectoryError:
                refused += 1
    assert refused > 150


def test_the_class_decides_what_a_tag_may_mean() -> None:
    hint: Any = Inner | Other
    tree, _ = encode(Other(1), hint)
    assert tree == {"Other": {"count": 1}}
    assert decode(hint, tree, {}) == Other(1)
    for strange in (
        {"Path": "x"},
        {"os.system": "x"},
        {"Other": {"count": -1}},
        {"Other": {"count": 1}, "Inner": {}},
    ):
        with pytest.raises(RunDirectoryError):
            decode(hint, strange, {})


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[" * 10**6, b'{"a": 1, "a": 2}', b"NaN", b"\xff", b"1" * 5000, b'"\\ud8'],
    ids=["empty", "cut", "deep", "twice", "nan", "bytes", "digits", "escape"],
)
@pytest.mark.parametrize("suffix", [".json", ".safetensors"])
def test_a_file_that_is_none_is_refused_by_its_name(tmp_path: Path, content: bytes, suffix: str) -> None:
    path = tmp_path / f"spectrum{suffix}"
    path.write_bytes(content)
    with pytest.raises(
        RunDirectoryError, match=r"spectrum.* cannot be read .*delete the directory and run again"
    ):
        read_tree(path)
    path.unlink()
    with pytest.raises(RunDirectoryError, match=r"spectrum.* cannot be read"):
        read_tree(path)


def test_no_more_memory_is_taken_than_the_file_has_numbers() -> None:
    huge = {"tensor": "t", "cpu": True, "dtype": "float64", "shape": [2**40], "values": [1.0]}
    for changes in (
        {},
        {"shape": [2**63, 0], "values": []},
        {"shape": [-1]},
        {"shape": [True]},
        {"dtype": "x"},
    ):
        with pytest.raises(RunDirectoryError):
            decode(Tensor, huge | changes, {})


# --- runs --------------------------------------------------------------------------------------------------------


@dataclass
class Basis:
    blocks: list[ParamVector] = field(default_factory=list, metadata={"appended": True})


@dataclass
class State:
    step: int
    iterate: ParamVector
    basis: Basis
    current: ParamVector | None = None
    finished: list[ParamVector] = field(default_factory=list, metadata={"appended": True})


class Operator:
    """Counts."""

    def __init__(self) -> None:
        self.count: float | None = None

    def state(self) -> dict[str, float | None]:
        return {"count": self.count, "nan": math.nan}

    def restore_state(self, state: Mapping[str, float | None]) -> None:
        self.count = state["count"]


CONFIG: dict[str, Scalar] = {"seed": 0, "damping": "auto", "title": "λ", "budget": math.inf, "until": None}
IDENTITY = {"model": "ab12", "data": "cd34"}
TABLE = {"index": np.arange(5), "score": np.array([0.1, np.nan, np.inf, -0.0, 5e-324])}


def opened(path: Path | None, changes: Mapping[str, Scalar] | None = None, **identity: str) -> Run:
    return Run(path, CONFIG | dict(changes or {}), identity=IDENTITY | identity)


def contents(directory: Path) -> dict[str, bytes]:
    found = {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}
    return {name: content for name, content in found.items() if name != "lock"}


def never() -> Any:
    raise AssertionError("computed again")


def fill(run: Run) -> list[Any]:
    """A run with an artifact of every kind."""
    operator = Operator()
    operator.count = 3.0
    if not run.has("page"):
        run.put("page", Inner, Inner(0.1))
    if run.keep("page", Inner, never) == Inner(0.1):
        run.put("page", Inner, Inner(0.2))
    found: list[Any] = [
        run.keep("spectrum", Inner, lambda: Inner(0.1), operator=operator),
        run.keep("page", Inner, never),
        run.keep("gradients", ParamVector, lambda: vector(1, 2)),
        *(run.keep_table(f"scores/part-{number:05d}", lambda: TABLE) for number in range(2)),
    ]
    journal = run.journal("solve", State, seconds=0.0)
    state = journal.restore() or State(0, vector(0), Basis())
    while state.step < 3:
        state.step += 1
        state.iterate.axpy_(0.5, vector(state.step))
        state.current = vector(state.step + 10)
        state.basis.blocks.append(state.current)
        if state.step == 2:
            state.finished.append(state.iterate.clone())
        journal.record(state)
    return [*found, state, run.keep("result", Everything, lambda: everything(3))]


def same_all(left: list[Any], right: list[Any]) -> bool:
    as_lists = [
        [{k: v.tobytes() for k, v in x.items()} if type(x) is dict else x for x in s] for s in (left, right)
    ]
    return same(*as_lists)


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
    (tmp_path / "attribution" / "scores" / f"{TEMPORARY}x").write_text("being written")
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


# --- whose directory it is -----------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("form", [0, 7, "1", 9])
def test_another_format_is_refused(tmp_path: Path, form: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"format": form, "seed": 1, "x": math.inf}))
    before = contents(tmp_path)
    for use in (lambda: opened(tmp_path), lambda: read(tmp_path, "spectrum", Inner)):
        with pytest.raises(
            RunDirectoryError, match=rf"of format {form!r}, .*reads format 8.*environment\.json"
        ):
            use()
    assert contents(tmp_path) == before
    (tmp_path / "config.json").unlink()
    opened(tmp_path)
    tree = json.loads((tmp_path / "manifest.json").read_text()) | {"format": form}
    del tree["blake2b"]
    digest = hashlib.blake2b(json.dumps(tree, sort_keys=True).encode(), digest_size=32).hexdigest()
    (tmp_path / "manifest.json").write_text(json.dumps(tree | {"blake2b": digest}))
    with pytest.raises(RunDirectoryError, match=rf"of format {form!r}, .*reads format 8.*manifest\.json"):
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
    (tmp_path / "run" / f"{TEMPORARY}x").write_text("left")
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
    ]
    kept = [
        elsewhere / f"{TEMPORARY}b",
        elsewhere / "solve.000001.json",
        *(tmp_path / "run" / name for name in own),
    ]
    left = [f"{TEMPORARY}a", "solve.000099.safetensors", "solve.000098.json", f"scores/{TEMPORARY}c"]
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


# --- faults ------------------------------------------------------------------------------------------------------


class Killed(BaseException):
    """Not caught by anything."""


class Failing:
    """File operations of which the n-th, and where it is a kill all later ones, fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fatal: bool) -> None:
        self.count, self.limit, self.fatal = 0, sys.maxsize, fatal
        for module, name in (
            (os, "replace"), (os, "fsync"), (os, "unlink"), (os, "mkdir"), (os, "chmod"), (tempfile, "mkstemp"),
        ):  # fmt: skip
            monkeypatch.setattr(module, name, self._wrapped(getattr(module, name)))

    def _wrapped(self, operation: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            self.count += 1
            if self.count == self.limit or (self.fatal and self.count > self.limit):
                raise Killed if self.fatal else OSError(errno.ENOSPC, "No space left on device")
            return (
                None if operation.__name__ == "fsync" else operation(*args, **options)
            )  # which would take long

        return call


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


def forged(path: Path, change: Any) -> None:
    """A manifest whose checksum is right, by a stranger."""
    tree = json.loads((path / "manifest.json").read_text())
    del tree["blake2b"]
    change(tree)
    digest = hashlib.blake2b(json.dumps(tree, sort_keys=True).encode(), digest_size=32).hexdigest()
    (path / "manifest.json").write_text(json.dumps(tree | {"blake2b": digest}))


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
