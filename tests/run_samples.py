"""Values, runs and faults that the tests of run directories share."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import random
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
from whence.errors import OptionError
from whence.runs import (
    Run,
    Scalar,
)
from whence.runs.codec import decode, encode
from whence.runs.files import (
    read_tree,
    write_tree,
)
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


def forged(path: Path, change: Any) -> None:
    """A manifest whose checksum is right, by a stranger."""
    tree = json.loads((path / "manifest.json").read_text())
    del tree["blake2b"]
    change(tree)
    digest = hashlib.blake2b(json.dumps(tree, sort_keys=True).encode(), digest_size=32).hexdigest()
    (path / "manifest.json").write_text(json.dumps(tree | {"blake2b": digest}))


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
