"""Files of a run: written whole or not at all, read back bit for bit; fingerprints."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.dataset as ds
import pytest
import torch
from torch import Tensor, nn
from whence.runs.journal import pack, unpack
from whence.runs.scores import PartOfScores

from small import classifier, generator
from whence import ParamVector
from whence.errors import RunDirectoryError, StorageError
from whence.runs import Run, ScoreParts
from whence.runs.files import TEMPORARY, read_json, read_tensors, replace_file, write_json, write_tensors
from whence.runs.fingerprint import of_data, of_model, of_value
from zoo import CASES, vectors

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Also where NaN stands, which is equal to nothing."""
    bits = [t.contiguous().reshape(-1).view(torch.uint8) for t in (left, right)]
    return left.dtype == right.dtype and left.shape == right.shape and torch.equal(*bits)


def contents(directory: Path) -> dict[str, bytes]:
    files = (path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


# --- atomic writing --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("there_before", [True, False])
@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (OSError("broken cable"), StorageError),
        (ValueError("cannot be serialised"), ValueError),
        (KeyboardInterrupt(), KeyboardInterrupt),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_writer_that_fails_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, there_before: bool, error: BaseException, raised: type[BaseException]
) -> None:
    path = tmp_path / "deep" / "value.json"
    if there_before:
        write_json(path, {"old": 1})
    before = contents(tmp_path)

    def write(temporary: Path) -> None:
        temporary.write_bytes(b"half of the n")
        raise error

    with pytest.raises(raised):
        replace_file(path, write)
    assert contents(tmp_path) == before


def test_the_old_file_is_there_until_the_new_one_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "value.json"
    write_json(path, "old")

    def write(temporary: Path) -> None:
        assert temporary.parent == path.parent  # a rename across file systems is not atomic
        assert temporary.name.startswith(TEMPORARY)
        temporary.write_text('"ne')
        assert read_json(path) == "old"
        temporary.write_text('"new"')

    replace_file(path, write)
    assert contents(tmp_path) == {"value.json": b'"new"'}


def test_a_storage_error_names_the_file_and_what_to_do(tmp_path: Path) -> None:
    def raising(error: Exception) -> Callable[[Path], None]:
        def write(temporary: Path) -> None:
            raise error

        return write

    for error, remedy in (
        (OSError(28, "No space left on device"), "disk is full. Free some space and run the same command"),
        (OSError(30, "Read-only file system"), "Change its permissions, or choose another"),
        (OSError(5, "Input/output error"), "mend that and run the same command again"),
    ):
        with pytest.raises(StorageError) as caught:
            replace_file(tmp_path / "plan.json", raising(error))
        for part in (str(tmp_path / "plan.json"), str(error), remedy, "nothing written before is lost"):
            assert part in str(caught.value)


def test_leftovers_of_a_killed_process_are_cleaned_up_and_nothing_else(tmp_path: Path) -> None:
    Run(tmp_path / "run", {"seed": 1})
    before = contents(tmp_path)
    for place in ("run", "run/solve", "run/scores"):
        (tmp_path / place).mkdir(exist_ok=True)
        (tmp_path / place / f"{TEMPORARY}a1b2").write_bytes(b"half")
    (tmp_path / f"{TEMPORARY}elsewhere").write_bytes(b"of another run")
    Run(tmp_path / "run", {"seed": 1})
    assert contents(tmp_path) == before | {f"{TEMPORARY}elsewhere": b"of another run"}


def test_files_get_the_permissions_that_the_user_asked_for(tmp_path: Path) -> None:
    import os

    before = os.umask(0o027)
    try:
        write_json(tmp_path / "value.json", 1)
    finally:
        os.umask(before)
    assert (tmp_path / "value.json").stat().st_mode & 0o777 == 0o640


# --- round trips -----------------------------------------------------------------------------------------------


def test_json_comes_back_as_it_was(tmp_path: Path) -> None:
    numbers = [0.1, -0.0, 5e-324, 1.7976931348623157e308, 1 / 3, math.inf, -math.inf, 2**62, -1]
    value = {"numbers": numbers, "none": None, "flag": True, "text": 'λ ≥ 0 "quoted"\n\u2028', "deep": [[{}]]}
    write_json(tmp_path / "value.json", value)
    back = read_json(tmp_path / "value.json")
    assert back == value
    assert [math.copysign(1, x) for x in back["numbers"]] == [math.copysign(1, x) for x in numbers]
    write_json(tmp_path / "value.json", [math.nan])
    assert math.isnan(read_json(tmp_path / "value.json")[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_come_back_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    random = torch.randint(256, (6, 4, 8), generator=generator(), dtype=torch.uint8)
    bits = random % 2 if dtype == torch.bool else random  # any bits: NaNs, infinities, denormals
    tensor = bits.view(dtype)
    tensors = {
        "z": tensor,
        "a/strided": tensor.transpose(0, 1)[::2],
        "scalar": tensor[0, 0, 0].clone(),
        "empty": tensor[:0].clone(),
        "expanded": tensor[0, 0, :1].expand(3),
    }
    notes = {"nan": math.nan, "number": 0.1, "list": [1, None, "x"], "seeds": [2**62 - 1]}
    write_tensors(tmp_path / "x.safetensors", tensors, notes)
    back, found = read_tensors(tmp_path / "x.safetensors")
    assert back.keys() == tensors.keys()
    assert all(same_bits(back[name], tensor) for name, tensor in tensors.items())
    assert math.isnan(found.pop("nan"))
    assert found == {name: value for name, value in notes.items() if name != "nan"}


def test_sums_over_tensors_that_came_back_are_the_same_to_the_last_bit(tmp_path: Path) -> None:
    """Which depends on where in memory they begin, so not on how long a file's header happened to be."""
    x, y = (torch.randn(100, generator=generator(seed)) for seed in (1, 2))
    for length in range(0, 64, 4):
        write_tensors(tmp_path / "x.safetensors", {"odd": torch.ones(3), "x": x}, {"note": "n" * length})
        back = read_tensors(tmp_path / "x.safetensors")[0]["x"]
        assert torch.equal(torch.dot(back, y), torch.dot(x, y))


@pytest.mark.parametrize("columns", [None, 1, 3])
def test_vectors_come_back_bit_for_bit(tmp_path: Path, columns: int | None) -> None:
    space = ParamVector({"z.weight": torch.zeros(3, 2), "z.bias": torch.zeros(3), "a": torch.zeros(())})
    one, two = (space.zeros(columns).randn_like(generator(seed)) for seed in (1, 2))
    one["z.bias"].view(-1)[0] = math.nan
    write_tensors(tmp_path / "x.safetensors", pack(one, "one") | pack(two, "one/two"), {})
    tensors, _ = read_tensors(tmp_path / "x.safetensors")
    for vector, prefix in ((one, "one"), (two, "one/two")):
        back = unpack(tensors, prefix)
        assert back.columns == columns
        assert back.keys() == vector.keys()
        assert all(same_bits(back[name], tensor) for name, tensor in vector.items())
    with pytest.raises(KeyError):
        unpack(tensors, "three")


@pytest.mark.parametrize("kept", [0, 1, 100])
def test_a_changed_file_is_refused_by_its_name(tmp_path: Path, kept: int) -> None:
    write_json(tmp_path / "a.json", {"value": list(range(100))})
    write_tensors(tmp_path / "a.safetensors", {"x": torch.arange(100.0)}, {"k": 1})
    ScoreParts(tmp_path).write(3, part_of_scores())
    for path, read in (
        (tmp_path / "a.json", read_json),
        (tmp_path / "a.safetensors", read_tensors),
        (ScoreParts(tmp_path).path(3), lambda path: ScoreParts(tmp_path).read(3)),
    ):
        path.write_bytes(path.read_bytes()[:kept])
        with pytest.raises(RunDirectoryError, match=r"[Dd]elete") as caught:
            read(path)
        assert str(path) in str(caught.value)
    with pytest.raises(RunDirectoryError, match=r"nowhere\.json cannot be read"):
        read_json(tmp_path / "nowhere.json")


# --- scores ----------------------------------------------------------------------------------------------------


def part_of_scores(
    first: int = 0, examples: int = 5, chains: int = 3, queries: int = 2, *, dots: bool = True
) -> PartOfScores:
    values = torch.randn(chains + 1, queries, examples, generator=generator(first), dtype=torch.float64)
    values[0, 0, 0], values[-1, 0, 0] = math.inf, math.nan
    indices = torch.arange(first, first + examples).flip(0) * 7
    return PartOfScores(indices, torch.arange(examples) + 1, values[:-1], values[-1] if dots else None)


def assert_same_scores(left: PartOfScores, right: PartOfScores) -> None:
    for name in ("indices", "terms", "chains"):
        assert same_bits(getattr(left, name), getattr(right, name))
    assert (left.dots is None) == (right.dots is None)
    assert left.dots is None or same_bits(left.dots, right.dots)


@pytest.mark.parametrize("dots", [True, False], ids=["baseline", "no baseline"])
@pytest.mark.parametrize(("chains", "queries", "examples"), [(3, 2, 5), (1, 1, 1), (12, 3, 2)])
def test_parts_of_scores_come_back_bit_for_bit(
    tmp_path: Path, dots: bool, chains: int, queries: int, examples: int
) -> None:
    parts = ScoreParts(tmp_path / "scores")
    assert parts.read(0) is None
    written = [part_of_scores(k, examples, chains, queries, dots=dots) for k in (0, 10)]
    for number, part in enumerate(written):
        parts.write(number, part)
        found = parts.read(number)
        assert found is not None
        assert_same_scores(found, part)
    assert_same_scores(parts.read_all(2), PartOfScores.join(written))
    with pytest.raises(RunDirectoryError, match="lacks part 2 of 3; run the same command again"):
        parts.read_all(3)


@pytest.mark.parametrize("dots", [True, False], ids=["baseline", "no baseline"])
def test_the_parts_are_one_parquet_data_set_with_the_documented_columns(tmp_path: Path, dots: bool) -> None:
    written = [part_of_scores(0, 5, dots=dots), part_of_scores(5, 3, dots=dots)]
    for number, part in enumerate(written):
        ScoreParts(tmp_path).write(number, part)
    table = ds.dataset(tmp_path, format="parquet").to_table()
    chain_names = ["chain_0", "chain_1", "chain_2"]
    assert table.column_names == [
        "query", "index", "terms", "score", "stderr", *chain_names, "dot_product", "norm",
    ]  # fmt: skip
    assert {str(table.schema.field(n).type) for n in ("score", "stderr", "dot_product")} == {"double"}
    assert table.num_rows == 2 * 5 + 2 * 3
    whole = PartOfScores.join(written)
    for row in table.to_pylist():
        position = whole.indices.tolist().index(row["index"])
        draws = whole.chains[:, row["query"], position]
        assert row["terms"] == whole.terms[position]
        assert [row[name] for name in chain_names] == draws.tolist()
        if torch.isfinite(draws).all():
            assert row["score"] == pytest.approx(float(draws.mean()))
            assert row["stderr"] == pytest.approx(np.std(draws.numpy(), ddof=1) / math.sqrt(3))
        if whole.dots is None:
            assert row["dot_product"] is None
        else:
            assert row["dot_product"] == pytest.approx(float(whole.dots[row["query"], position]), nan_ok=True)


def test_one_chain_has_no_standard_error(tmp_path: Path) -> None:
    ScoreParts(tmp_path).write(0, part_of_scores(chains=1))
    table = ds.dataset(tmp_path, format="parquet").to_table()
    assert all(math.isnan(value) for value in table["stderr"].to_pylist())


# --- fingerprints ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64], ids=str)
def test_a_models_fingerprint_changes_with_every_single_bit(dtype: torch.dtype) -> None:
    model = nn.Linear(5, 800, dtype=dtype)
    before = of_model(model)
    for place in [(0, 0), (0, 1), (799, 4), (150, 2)]:
        bits = model.weight.data[place].reshape(1).view(torch.uint8)  # a view of the weight itself
        for byte, bit in itertools.product(range(len(bits)), (0, 7)):
            bits[byte] ^= 1 << bit
            assert of_model(model) != before
            bits[byte] ^= 1 << bit
    assert of_model(model) == before


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("change", ["swap two", "negate two", "permute", "negate all"])
def test_a_models_fingerprint_changes_where_sums_do_not(dtype: torch.dtype, change: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(50, 80, dtype=dtype)
    before = of_model(model)
    weight = model.weight.data.reshape(-1)
    match change:
        case "swap two":
            weight[[1, 6]] = weight[[6, 1]]
        case "negate two":
            weight[[1, 3]] *= -1
        case "permute":
            model.weight.data = model.weight.data.flip(0)
        case "negate all":
            weight.neg_()
    assert of_model(model) != before


def test_a_models_fingerprint_changes_with_order_names_shapes_and_buffers() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    seen = {of_model(model)}

    def changed() -> bool:
        count = len(seen)
        seen.add(of_model(model))
        return len(seen) > count

    model[0].weight.data = model[0].weight.data.T.contiguous()  # the same numbers elsewhere
    assert changed()
    model[0].weight.data = model[0].weight.data.flip(0)
    assert changed()
    model[0].weight.data = model[0].weight.data.reshape(2, 8)
    assert changed()
    model[1].running_mean[2] += 1e-7
    assert changed()
    model[1].num_batches_tracked += 1
    assert changed()
    model = nn.Sequential(*model, nn.Identity())
    assert not changed()
    model = nn.Sequential(model)
    assert changed()


def test_a_models_fingerprint_does_not_depend_on_threads_or_instance() -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(700, 700), nn.Linear(700, 3))

    threads = torch.get_num_threads()
    found = set()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found |= {of_model(build()), of_model(build().requires_grad_(False))}
    finally:
        torch.set_num_threads(threads)
    assert len(found) == 1
    assert len({of_model(case.model(torch.float32)) for case in CASES if case.name != "mistral"}) == 10
    assert of_model(classifier()) == of_model(classifier())


@pytest.mark.parametrize(
    "case", [c for c in CASES if c.name in ("mlp", "gpt2", "resnet")], ids=lambda c: c.name
)
def test_a_data_sets_fingerprint_changes_with_one_example_and_with_order(case: Any) -> None:
    rows = case.data(torch.float32)
    same = of_data(case.data(torch.float32))
    assert of_data(rows) == same == of_data(tuple(rows))
    others = [rows[:-1], [*rows, rows[0]], [rows[1], rows[0], *rows[2:]]]
    changed = case.data(torch.float32)
    first = changed[0][0] if isinstance(changed[0], tuple) else next(iter(changed[0].values()))
    first.view(-1)[-1] += 1
    others.append(changed)
    assert len({same, *map(of_data, others)}) == 5


class Numbered:
    """A data set too long to look at: its examples are their own positions."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < self.length:
            raise IndexError(index)
        return index


@pytest.mark.parametrize("length", [1, 255, 256, 257, 10**6, 2**24 + 4, 10**9 + 1])
def test_data_sets_of_any_length_have_fingerprints(length: int) -> None:
    assert of_data(Numbered(length)) == of_data(Numbered(length))
    assert of_data(Numbered(length)) != of_data(Numbered(length + 1))


def test_values_that_differ_have_different_fingerprints() -> None:
    values: list[Any] = [
        1, 1.0, "1", b"1", [1], [[1]], [1, 1], {"a": 1}, {"a": [1]}, {"b": 1}, {"a1": {}}, {}, [], None,
        torch.tensor(1), torch.tensor([1]), torch.tensor([[1]]), torch.tensor(1.0), torch.zeros(0, 3),
        np.array([1, 2]), np.array([[1, 2]]), np.array([1, 2], dtype=np.int32), ["ab", "c"], ["a", "bc"],
    ]  # fmt: skip
    assert len({of_value(value) for value in values}) == len(values)
    assert of_value({"a": 1, "b": 2}) == of_value({"b": 2, "a": 1})
    assert of_value(vectors(torch.float32)) == of_value(vectors(torch.float32))
