"""Damaged and hostile files: what can be read is read, and all else is one typed error that names the file."""

from __future__ import annotations

import gzip
import io
import json
import re
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import strategies as st
from torch import nn

from fuzz.fuzzing import fuzzed
from whence.errors import DataError, WhenceError
from whence.report.untrusted import json_visible, visible
from whence.sources import open_records
from whence.sources.labels import Labels, labels_for
from whence.training import Training

LEAVES = st.one_of(st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=8))
JSON: st.SearchStrategy[Any] = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
)
ROWS = [{"id": "a", "text": "one", "label": 0}, {"id": "b", "text": "two\u202e", "label": 1}]


def parquet() -> bytes:
    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(ROWS), buffer)
    return buffer.getvalue()


LINES = "\n".join(map(json.dumps, ROWS)).encode()
FILES = {
    "x.jsonl": LINES,
    "x.json": json.dumps(ROWS).encode(),
    "x.csv": b"id,text,label\na,one,0\nb,two,1\n",
    "x.tsv": b"id\ttext\tlabel\na\tone\t0\n",
    "x.txt": b"some text",
    "x.jsonl.gz": gzip.compress(LINES, mtime=0),
    "x.parquet": parquet(),
}
STATE = {
    "global_step": 10,
    "log_history": [{"step": 5, "learning_rate": 1e-3}, {"step": 10, "learning_rate": 1e-4}],
}


@st.composite
def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """Cut off, with bytes changed, doubled or put in; or something else entirely."""
    kind = draw(st.sampled_from(["whole", "cut", "flip", "insert", "double", "other", "deep"]))
    at = draw(st.integers(0, max(0, len(content) - 1)))
    if kind == "cut":
        return content[:at]
    if kind == "flip":
        return content[:at] + bytes([content[at] ^ draw(st.integers(1, 255))]) + content[at + 1 :]
    if kind == "insert":
        return content[:at] + draw(st.binary(max_size=6)) + content[at:]
    if kind == "double":
        return content + content
    if kind == "other":
        return draw(st.one_of(st.binary(max_size=40), JSON.map(lambda value: json.dumps(value).encode())))
    return content if kind == "whole" else b"[" * draw(st.sampled_from([10, 100_000]))


def named(name: str, content: bytes) -> Any:
    directory = tempfile.TemporaryDirectory()
    (Path(directory.name) / name).write_bytes(content)
    return directory


def refused_by_name(path: Path, error: WhenceError) -> None:
    # rows of a list are called by the file's name, others by its path
    assert path.name in str(error)


def check_records(name_and_content: tuple[str, bytes]) -> None:
    name, content = name_and_content
    with named(name, content) as directory:
        path = Path(directory) / name
        try:
            records = open_records(path)
            for row in records:
                assert row.id is None or isinstance(row.id, str)
                row.text("text")
                row.value("label")
        except WhenceError as error:
            refused_by_name(path, error)


FILE = st.sampled_from(sorted(FILES)).flatmap(lambda name: st.tuples(st.just(name), damaged(FILES[name])))
test_records, test_records_long = fuzzed(check_records, quick=250, long=20_000, name_and_content=FILE)


def check_labels(content: bytes) -> None:
    with named("labels.json", content) as directory:
        path = Path(directory) / "labels.json"
        try:
            assert len(Labels.from_file(path)) > 0
        except WhenceError as error:
            refused_by_name(path, error)


test_labels, test_labels_long = fuzzed(
    check_labels,
    quick=100,
    long=10_000,
    content=st.one_of(damaged(b'{"cat": 0, "dog": 1}'), JSON.map(lambda value: json.dumps(value).encode())),
)


def check_training(state: Any) -> None:
    content = state if isinstance(state, bytes) else json.dumps(state).encode()
    with named("trainer_state.json", content) as directory:
        path = Path(directory) / "trainer_state.json"
        for source in (path, Path(directory)):
            try:
                assert Training.read(str(source), nn.Linear(2, 2)).time > 0
            except WhenceError as error:
                refused_by_name(path, error)


def mutated(state: dict[str, Any]) -> st.SearchStrategy[Any]:
    row = st.dictionaries(st.sampled_from(["step", "learning_rate", "loss"]), LEAVES, max_size=3)
    log = st.one_of(LEAVES, st.lists(st.one_of(row, LEAVES), max_size=3))
    return st.fixed_dictionaries(
        {}, optional={"global_step": st.one_of(LEAVES, st.just(10)), "log_history": log}
    )


test_training, test_training_long = fuzzed(
    check_training,
    quick=150,
    long=10_000,
    state=st.one_of(damaged(json.dumps(STATE).encode()), mutated(STATE), JSON),
)


HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff\U000e0000-\U000e007f]"
)


def check_visible(text: str) -> None:
    assert not HIDDEN.search(visible(text))
    written = json_visible({"text": text, text: 1})
    assert not HIDDEN.search(written)
    assert json.loads(written) == {"text": text, text: 1}


test_visible, test_visible_long = fuzzed(
    check_visible,
    quick=200,
    long=20_000,
    text=st.text(
        st.one_of(st.characters(), st.sampled_from("\x00\x1b\x9b\u202e\u2066\ufeff\U000e0041\r\n")),
        max_size=12,
    ),
)


@pytest.mark.parametrize("label", [10**9, 10**18])
def test_a_label_without_bounds_takes_no_memory(label: int) -> None:
    with pytest.raises(DataError, match=f"label {label} would mean as many classes"):
        labels_for([0, label], None, None)


def test_a_label_of_many_digits_is_a_name() -> None:
    assert len(labels_for([0, "9" * 5000], None, None)) == 2
