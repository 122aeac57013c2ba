"""The run directory: what is kept comes back as it was, or is refused by name."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from small import generator
from whence.errors import OptionError, RunDirectoryError
from whence.runs.codec import decode, encode
from whence.runs.files import json_bytes, parse_json, read_tree, write_tree
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
        (object(), object),
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
