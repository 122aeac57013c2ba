"""A run directory on a real disk: files written whole or not at all, locks, full and read-only disks, fingerprints."""

from __future__ import annotations

import fcntl
import gc
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.dataset as ds
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import whence
from run_samples import contents, never, same
from small import DOUBLE, classifier, generator
from whence import Attribution, Classification
from whence.attribution.scores import Scores
from whence.errors import RunDirectoryError, StorageError
from whence.exhibit import Exhibit
from whence.runs import Run, as_json, environment
from whence.runs import files as run_files
from whence.runs.files import TEMPORARY, checksum, is_temporary, replace_file, write_bytes
from whence.runs.fingerprint import of_data, of_model, of_value
from zoo import CASES, vectors

CONFIG = {"damping": "auto", "seed": 0}


def opened(path: Path) -> Run:
    return Run(path, CONFIG, identity={})


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
        write_bytes(path, b"old")
    before = contents(tmp_path)

    def write(temporary: Path) -> None:
        temporary.write_bytes(b"half of the n")
        raise error

    with pytest.raises(raised):
        replace_file(path, write)
    assert contents(tmp_path) == before


def test_the_old_file_is_there_until_the_new_one_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "value.json"
    write_bytes(path, b"old")

    def write(temporary: Path) -> None:
        assert temporary.parent == path.parent  # a rename across file systems is not atomic
        assert is_temporary(temporary.name)
        temporary.write_bytes(b"ne")
        assert path.read_bytes() == b"old"
        temporary.write_bytes(b"new")

    replace_file(path, write)
    assert contents(tmp_path) == {"value.json": b"new"}


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


def test_files_get_the_permissions_that_the_user_asked_for(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_bytes(tmp_path / "value.json", b"1")
    finally:
        os.umask(before)
    assert (tmp_path / "value.json").stat().st_mode & 0o777 == 0o640


# --- beginnings ------------------------------------------------------------------------------------------------


def test_the_manifest_is_for_people(tmp_path: Path) -> None:
    Run(str(tmp_path), {"title": "λ", "until": None}, identity={"model": "MLP 12ab"})
    content = (tmp_path / "manifest.json").read_text()
    tree = json.loads(content)
    assert tree["config"] == {"title": "λ", "until": None}
    assert tree["identity"] == {"model": "MLP 12ab"}
    assert tree["environment"] == environment()
    assert '  "title": "λ",\n' in content


def test_an_environment_names_what_results_depend_on() -> None:
    found = environment()
    assert found["torch"] == torch.__version__
    assert {"whence", "numpy", "safetensors", "pyarrow", "python", "machine", "threads"} <= found.keys()
    assert all(found.values())


def test_a_file_in_the_directorys_place_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.write_text("mine")
    with pytest.raises(StorageError, match="choose another one") as caught:
        opened(path)
    assert str(path) in str(caught.value)
    assert path.read_text() == "mine"


def test_a_strangers_leftover_lookalikes_are_not_deleted(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / f"{TEMPORARY}mine").write_bytes(b"not whence's")
    before = contents(tmp_path)
    with pytest.raises(RunDirectoryError, match=r"not empty \('photos' is there\) and holds no run"):
        opened(tmp_path)
    assert contents(tmp_path) == before


# --- other processes -------------------------------------------------------------------------------------------


def python(script: str, *arguments: object) -> dict[str, Any]:
    """Run a script in a process of its own; what it prints last is JSON."""
    one_thread = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
    }  # as the tests themselves: it is part of the environment
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        capture_output=True, text=True, timeout=300, env=one_thread,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


LOCK = """
import fcntl, json, sys
try:
    fcntl.flock(open(sys.argv[1]), fcntl.LOCK_EX | fcntl.LOCK_NB)
    print(json.dumps({"locked": False}))
except OSError:
    print(json.dumps({"locked": True}))
"""


def test_a_second_process_is_locked_out_until_the_first_is_done(tmp_path: Path) -> None:
    run = opened(tmp_path)
    assert python(LOCK, tmp_path / "lock")["locked"]
    with pytest.raises(RunDirectoryError, match=r"is being used.*wait for it, or give another directory"):
        opened(tmp_path)
    run.keep("plan", int, lambda: 1)  # the one that was refused broke nothing
    del run
    gc.collect()
    assert not python(LOCK, tmp_path / "lock")["locked"]
    with (tmp_path / "lock").open() as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        with pytest.raises(RunDirectoryError, match=str(tmp_path)):
            opened(tmp_path)
    assert opened(tmp_path).keep("plan", int, never) == 1


def test_a_run_that_is_forgotten_gives_its_lock_back_quietly(tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        opened(tmp_path)
        gc.collect()
    assert [str(warning.message) for warning in caught] == []
    opened(tmp_path)


PRELUDE = """
import json, os, resource, signal, sys
from pathlib import Path
import pyarrow.parquet, torch
from whence.runs import Run, Scalar

def outcome(action):
    try:
        action()
        return "done"
    except Exception as error:
        return f"{type(error).__name__}: {error}"

def files(path):
    return {str(p.relative_to(path)): p.read_bytes().hex() for p in path.rglob("*") if p.is_file()}

path, found = Path(sys.argv[1]), {}
large = torch.arange(200_000.0, dtype=torch.float64)
writers = {
    "json": lambda run: run.keep("numbers", list[float], lambda: large[:20_000].tolist()),
    "tensors": lambda run: run.keep("tensor", torch.Tensor, lambda: large),
    "table": lambda run: run.keep_table("scores/part-00000", lambda: {"score": large.numpy()}),
    "page": lambda run: run.put("page", torch.Tensor, large),
}
"""

FULL_DISK = (
    PRELUDE
    + """
def limit(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
limit(50_000)
run = Run(path / "run", {"seed": 0}, identity={})
run.keep("plan", int, lambda: 7)
run.put("page", torch.Tensor, large[:100])
journal = run.journal("solve", list[torch.Tensor], seconds=0.0)
before = files(path)
for name, write in writers.items():
    found[name] = outcome(lambda: write(run))
found["intact"] = files(path) == before
config = {"title": "x" * 60_000}
found["begin"] = outcome(lambda: Run(path / "other", config, identity={}))
limit(resource.getrlimit(resource.RLIMIT_FSIZE)[1])
for name, write in writers.items():
    found[name + " again"] = outcome(lambda: write(run))
found["plan"] = run.keep("plan", int, lambda: 0)
found["whole"] = [bool(torch.equal(run.keep(name, torch.Tensor, lambda: 0), large)) for name in ("tensor", "page")]
found["leftovers"] = [name for name in files(path) if ".unfinished" in name]
found["begin again"] = outcome(lambda: Run(path / "other", config, identity={}))
print(json.dumps(found))
"""
)


def test_a_full_disk_loses_nothing_and_the_run_goes_on_once_there_is_space(tmp_path: Path) -> None:
    found = python(FULL_DISK, tmp_path)
    files = {
        "json": "numbers.json",
        "tensors": "tensor.safetensors",
        "table": "part-00000",
        "page": "page.0000",
    }
    for name, file in files.items():
        assert found[name].startswith("StorageError: "), found[name]
        assert file in found[name]
        assert "the disk is full. Free some space and run the same command again" in found[name]
        assert found[f"{name} again"] == "done"
    assert found["intact"]
    assert found["plan"] == 7
    assert found["whole"] == [True, True]
    assert found["leftovers"] == []
    assert found["begin"].startswith("StorageError: ")
    assert found["begin again"] == "done"


# --- finished and unfinished runs of `attribute` ---------------------------------------------------------------


def attribute(directory: Path, **options: Any) -> Attribution:
    data = vectors(DOUBLE)
    options = {"damping": "lambda_max/10", "solver": "cg", "part_size": 8, **options}
    return whence.attribute(classifier(), data, data[:2], task=Classification(), run_dir=directory, **options)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Attribution]:
    """A finished run, whose files the tests give back as they were."""
    path = tmp_path_factory.mktemp("finished") / "run"
    return path, attribute(path)


@pytest.mark.parametrize(
    "changes",
    [{"part_size": 9}, {"part_size": None}, {"seed": 1}, {"accuracy": 0.9}, {"until": "top-3 stable"}],
    ids=str,
)
def test_other_options_are_another_run(finished: tuple[Path, Attribution], changes: dict[str, Any]) -> None:
    name, value = next(iter(changes.items()))
    before = contents(finished[0])
    with pytest.raises(
        RunDirectoryError, match=rf"another configuration \({name}: .* there, {value!r} now\)"
    ):
        attribute(finished[0], **changes)
    assert contents(finished[0]) == before
    again = attribute(finished[0], checkpoint_seconds=0.0)  # which no number depends on
    assert torch.equal(again.scores, finished[1].scores)


def test_other_examples_are_another_run(finished: tuple[Path, Attribution]) -> None:
    data = vectors(DOUBLE)
    for train, queries, told in ((data[1:], data[:2], "train"), (data, data[:1], "queries")):
        with pytest.raises(RunDirectoryError, match=rf"another configuration.*{told}: "):
            whence.attribute(
                classifier(), train, queries, task=Classification(), run_dir=finished[0],
                damping="lambda_max/10", solver="cg", part_size=8,
            )  # fmt: skip


def test_loading_goes_through_nothing_but_what_it_reads(
    finished: tuple[Path, Attribution], monkeypatch: pytest.MonkeyPatch
) -> None:
    gone_through: list[str] = []

    def noted(path: Path) -> str:
        gone_through.append(path.name)
        return checksum(path)

    monkeypatch.setattr(run_files, "checksum", noted)
    whence.load(finished[0])
    assert gone_through == ["result.json"]


def test_one_flipped_bit_of_a_finished_run_is_refused_by_the_files_name(
    finished: tuple[Path, Attribution],
) -> None:
    path, result = finished
    artifacts = json.loads((path / "manifest.json").read_text())["artifacts"]
    assert {"queries", "spectrum", "plan", "solution-1", "scores-1/part-00002", "result"} <= artifacts.keys()
    read = {"manifest.json", "result.json"}  # an unfinished run is gone on with from the others: below
    uses: dict[Any, set[str]] = {whence.load: read, attribute: read | {"model.json"}}
    random = generator(1)
    for artifact in ({"file": "manifest.json"}, *artifacts.values()):
        file = path / artifact["file"]
        whole = file.read_bytes()
        for place in torch.randint(len(whole), (5,), generator=random).tolist():
            bit = 1 << int(torch.randint(8, (), generator=random))
            file.write_bytes(whole[:place] + bytes([whole[place] ^ bit]) + whole[place + 1 :])
            for use, files in uses.items():
                if artifact["file"] not in files:
                    assert as_json(use(path)) == as_json(result)
                    continue
                with pytest.raises(RunDirectoryError) as caught:
                    use(path)
                assert str(file) in str(caught.value)
                assert "Put back a copy of it, or delete the directory and run again" in str(caught.value)
        file.write_bytes(whole)
    assert as_json(whence.load(path)) == as_json(result)


def test_a_bit_flipped_in_an_unfinished_run_is_refused_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing that was damaged before the run was killed gets into its result."""
    with monkeypatch.context() as patch:
        patch.setattr("whence.attribution.pipeline.conclude", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            attribute(tmp_path)
    artifacts = json.loads((tmp_path / "manifest.json").read_text())["artifacts"]
    assert "result" not in artifacts
    for artifact in artifacts.values():
        file = tmp_path / artifact["file"]
        whole = file.read_bytes()
        file.write_bytes(whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:])
        with pytest.raises(RunDirectoryError) as caught:
            attribute(tmp_path)
        assert str(file) in str(caught.value)
        file.write_bytes(whole)
    assert torch.isfinite(attribute(tmp_path).scores).all()


READ_ONLY = (
    PRELUDE
    + """
import warnings
import whence
torch.manual_seed(0)
model = torch.nn.Linear(2, 3).eval()
data = [(torch.randn(2), i % 3) for i in range(12)]

def attribute(name):
    return whence.attribute(model, data, data[:1], task=whence.Classification(), solver="cg", run_dir=path / name)

first = attribute("finished")
run = Run(path / "run", {"seed": 0}, identity={})
run.keep("plan", int, lambda: 7)
del run
before = files(path)
for directory, _, names in os.walk(path):
    for name in names:
        Path(directory, name).chmod(0o444)
    Path(directory).chmod(0o555)
if os.getuid() == 0:
    os.setuid(65534)
run = Run(path / "run", {"seed": 0}, identity={})
found["plan"] = run.keep("plan", int, lambda: 0)
for name, write in writers.items():
    found[name] = outcome(lambda: write(run))
found["begin"] = outcome(lambda: Run(path / "other", {"seed": 0}, identity={}))
found["same"] = bool(torch.equal(attribute("finished").scores, first.scores))
found["intact"] = files(path) == before
print(json.dumps(found))
"""
)


@pytest.fixture
def open_to_all() -> Iterator[Path]:
    """A directory that any user can look into, unlike pytest's own."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name)
        path.chmod(0o755)
        yield path
        for directory, _, _ in os.walk(path):
            Path(directory).chmod(0o755)


def test_a_read_only_run_is_read_and_what_must_be_written_says_so(open_to_all: Path) -> None:
    found = python(READ_ONLY, open_to_all)
    assert found["same"]
    assert found["plan"] == 7
    for name in ("json", "tensors", "table", "page", "begin"):
        assert found[name].startswith("StorageError: "), found[name]
        assert "choose another" in found[name]
    assert found["intact"]


# --- scores as tables --------------------------------------------------------------------------------------------


def part_of_scores(
    first: int = 0, examples: int = 5, chains: int = 3, queries: int = 2, *, more: bool = True
) -> Scores:
    values = torch.randn(chains + 1, queries, examples, generator=generator(first), dtype=DOUBLE)
    values[0, 0, 0], values[-1, 0, 0] = math.inf, math.nan
    indices = torch.arange(first, first + examples).flip(0) * 7
    norms = torch.rand(examples, generator=generator(first), dtype=DOUBLE)
    dots, norms_if = (values[-1], norms) if more else (None, None)
    return Scores(indices, torch.arange(examples) + 1, values[:-1], dots, norms_if)


@pytest.mark.parametrize("more", [True, False], ids=["baseline and norms", "scores alone"])
@pytest.mark.parametrize(("chains", "queries", "examples"), [(3, 2, 5), (1, 1, 1), (12, 3, 2)])
def test_parts_of_scores_come_back_bit_for_bit(
    tmp_path: Path, more: bool, chains: int, queries: int, examples: int
) -> None:
    run = opened(tmp_path)
    for number in (0, 10):
        part = part_of_scores(number, examples, chains, queries, more=more)
        assert same(Scores.from_columns(run.keep_table(f"scores/part-{number:05d}", part.columns)), part)


@pytest.mark.parametrize("more", [True, False], ids=["baseline and norms", "scores alone"])
def test_the_parts_are_one_parquet_data_set_with_the_documented_columns(tmp_path: Path, more: bool) -> None:
    written, run = [part_of_scores(0, 5, more=more), part_of_scores(5, 3, more=more)], opened(tmp_path)
    for number, part in enumerate(written):
        run.keep_table(f"scores/part-{number:05d}", part.columns)
    table = ds.dataset(tmp_path / "scores", format="parquet").to_table()
    chain_names = ["chain_0", "chain_1", "chain_2"]
    known = ["query", "index", "terms", "score", "stderr", *chain_names]
    assert table.column_names == known + (["dot_product", "norm"] if more else [])
    assert {str(table.schema.field(n).type) for n in table.column_names[3:]} == {"double"}
    assert table.num_rows == 2 * 5 + 2 * 3
    whole = Scores.join(written)
    for row in table.to_pylist():
        position = whole.indices.tolist().index(row["index"])
        draws = whole.chains[:, row["query"], position]
        assert row["terms"] == whole.terms[position]
        assert [row[name] for name in chain_names] == draws.tolist()
        if torch.isfinite(draws).all():
            assert row["score"] == pytest.approx(float(draws.mean()))
            assert row["stderr"] == pytest.approx(np.std(draws.numpy(), ddof=1) / math.sqrt(3))
        if whole.dots is not None and whole.norms is not None:
            assert row["dot_product"] == pytest.approx(float(whole.dots[row["query"], position]), nan_ok=True)
            assert row["norm"] == float(whole.norms[position])


def test_one_chain_has_no_standard_error() -> None:
    assert np.isnan(part_of_scores(chains=1).columns()["stderr"]).all()


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
    model.register_buffer("mask", torch.ones(2), persistent=False)  # not in the state_dict
    assert changed()
    model.mask[0] = 0.0
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


def test_every_single_example_is_in_a_data_sets_fingerprint() -> None:
    rows = list(range(700))
    found = {of_data(rows), of_data(rows[:-1])}
    for index in range(len(rows)):
        found.add(of_data([*rows[:index], -1, *rows[index + 1 :]]))
    assert len(found) == 702
    x, y = torch.randn(300, 2, generator=generator()), torch.arange(300)
    found = {of_data(TensorDataset(x, y)), of_data(TensorDataset(x, y.roll(1)))}
    x[131, 1] += 1e-6
    assert len(found | {of_data(TensorDataset(x, y))}) == 3


def test_values_that_differ_have_different_fingerprints() -> None:
    values: list[Any] = [
        1, 1.0, "1", b"1", [1], [[1]], [1, 1], {"a": 1}, {"a": [1]}, {"b": 1}, {"a1": {}}, {}, [], None,
        torch.tensor(1), torch.tensor([1]), torch.tensor([[1]]), torch.tensor(1.0), torch.zeros(0, 3),
        np.array([1, 2]), np.array([[1, 2]]), np.array([1, 2], dtype=np.int32), ["ab", "c"], ["a", "bc"],
    ]  # fmt: skip
    values += [Exhibit(text="1"), Exhibit(text="2"), [lambda x: x]]
    assert len({of_value(value) for value in values}) == len(values)
    assert of_value([lambda x: x]) == of_value([lambda x: x])  # wherever it is in memory
    assert of_value({"a": 1, "b": 2}) == of_value({"b": 2, "a": 1})
    assert of_value(vectors(torch.float32)) == of_value(vectors(torch.float32))
