"""The codec: a value comes back as it was, and a file that was changed is refused."""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from run_samples import (
    DTYPES,
    Everything,
    Inner,
    Other,
    everything,
    mutations,
    round_trip,
    same,
    vector,
)
from small import generator
from whence.errors import RunDirectoryError
from whence.runs import (
    as_json,
    read_value,
    write_value,
)
from whence.runs.codec import decode, encode
from whence.runs.files import (
    json_bytes,
    parse_json,
    read_tree,
    write_tree,
)
from whence.runs.fingerprint import of_value
from whence.vectors import ParamVector


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


def test_a_number_cut_out_of_a_larger_tensor_is_written_and_recognised(tmp_path: Path) -> None:
    """A single number counts as contiguous whatever its stride, which no view of bytes accepts."""
    cut = torch.zeros(34).as_strided((1,), (17,))
    assert same(round_trip(cut, Tensor, tmp_path / "cut"), torch.zeros(1))
    assert of_value(cut) == of_value(torch.zeros(1))
