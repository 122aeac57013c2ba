"""Rows from files: every format gives the same rows, and what is wrong is named with its place and remedy."""

from __future__ import annotations

import csv
import gzip
import json
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from whence.errors import DataError, OptionError
from whence.sources import Records, RowList, files, open_records
from whence.sources.records import RecordIds

ROWS = [
    {"id": "a", "text": "the cat"},
    {"id": "b", "text": 'naïve 東京, "quoted"\nand more'},
    {"id": "c", "text": "x"},
]


def jsonl(rows: list[Any]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def write_parquet(path: Path, rows: list[dict[str, Any]], **options: Any) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(rows), path, **options)


def write_csv(path: Path, delimiter: str = ",", encoding: str = "utf-8") -> None:
    with path.open("w", newline="", encoding=encoding) as file:
        writer = csv.DictWriter(file, ["id", "text"], delimiter=delimiter)
        writer.writeheader()
        writer.writerows(ROWS)


def save_dataset(path: Path, rows: list[dict[str, Any]]) -> None:
    from datasets import Dataset

    Dataset.from_list(rows).save_to_disk(path)


WRITERS: dict[str, Callable[[Path], Any]] = {
    "d.jsonl": lambda path: path.write_text(jsonl(ROWS), encoding="utf-8"),
    "d.jsonl.gz": lambda path: path.write_bytes(gzip.compress(jsonl(ROWS).encode())),
    "lines.json": lambda path: path.write_text(jsonl(ROWS), encoding="utf-8"),
    "list.json": lambda path: path.write_text(json.dumps(ROWS, indent=1)),
    "list.json.gz": lambda path: path.write_bytes(gzip.compress(json.dumps(ROWS).encode())),
    "d.csv": write_csv,
    "d.tsv": lambda path: write_csv(path, "\t"),
    "d.parquet": lambda path: write_parquet(path, ROWS, row_group_size=2),
    "saved": lambda path: save_dataset(path, ROWS),
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_format_gives_the_same_rows(name: str, tmp_path: Path) -> None:
    WRITERS[name](tmp_path / name)
    records = open_records(tmp_path / name)
    assert len(records) == 3
    assert [row.fields for row in records] == ROWS
    assert records[2].fields == ROWS[2]
    assert records[0].fields == ROWS[0]
    assert [row.where for row in records] == [records[number].where for number in range(3)]
    assert name in str(records[1].link)


@pytest.mark.parametrize("name", WRITERS)
def test_records_can_be_sent_to_other_processes(name: str, tmp_path: Path) -> None:
    WRITERS[name](tmp_path / name)
    records = open_records(tmp_path / name)
    assert [row.fields for row in pickle.loads(pickle.dumps(records))] == ROWS


def test_json_lines_are_read_on_demand_not_held(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text(jsonl(ROWS), encoding="utf-8")
    records = open_records(path)
    path.write_text(jsonl(ROWS).replace("the cat", "the dog"), encoding="utf-8")
    assert records[0].fields["text"] == "the dog"


def test_only_the_row_groups_asked_for_are_held(tmp_path: Path) -> None:
    path = tmp_path / "d.parquet"
    write_parquet(path, [{"text": str(number)} for number in range(50)], row_group_size=5)
    records: Any = open_records(path)
    assert [records[row].text("text") for row in (49, 0, 23, 24)] == ["49", "0", "23", "24"]
    assert records._rows._group.cache_info().currsize == 2


@pytest.mark.parametrize(
    ("encoding", "name"), [("latin-1", "d.jsonl"), ("utf-16", "d.jsonl"), ("latin-1", "d.csv")]
)
def test_other_encodings(encoding: str, name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    rows = "text\ncafé\n" if name.endswith("csv") else jsonl([{"text": "café"}])
    path.write_bytes(rows.encode(encoding))
    assert open_records(path, encoding=encoding)[0].text("text") == "café"


def test_a_byte_order_mark_and_blank_lines_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\r\n  \n{"text": "b"}')
    records = open_records(path)
    assert [row.text("text") for row in records] == ["a", "b"]
    assert records[1].where.endswith("line 4")


def test_temporary_copies_are_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tempfile

    (tmp_path / "copies").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "copies"))
    WRITERS["d.jsonl.gz"](tmp_path / "d.jsonl.gz")
    records = open_records(tmp_path / "d.jsonl.gz")
    assert len(list((tmp_path / "copies").iterdir())) == 1
    del records
    assert list((tmp_path / "copies").iterdir()) == []


def test_text_files_and_directories_of_them(tmp_path: Path) -> None:
    (tmp_path / "docs" / "deep").mkdir(parents=True)
    (tmp_path / "docs" / "b.txt").write_text("bee")
    (tmp_path / "docs" / "deep" / "a.md").write_text("ay")
    (tmp_path / "docs" / "code.py").write_text("pass")
    assert [row.fields for row in open_records(tmp_path / "docs")] == [
        {"id": "b.txt", "text": "bee"},
        {"id": "deep/a.md", "text": "ay"},
    ]
    assert [row.fields for row in open_records(tmp_path / "docs" / "b.txt")] == [
        {"id": "b.txt", "text": "bee"}
    ]


def test_a_directory_of_shards_is_one_data_set(tmp_path: Path) -> None:
    (tmp_path / "part-1.jsonl").write_text(jsonl(ROWS[2:]))
    (tmp_path / "part-0.jsonl").write_text(jsonl(ROWS[:2]))
    records = open_records(tmp_path)
    assert [row.fields["id"] for row in records] == ["a", "b", "c"]
    assert records[2].fields["id"] == "c"
    assert records[2].where.endswith("part-1.jsonl, line 1")


def test_a_split_is_named_after_a_colon_or_by_option(tmp_path: Path) -> None:
    from datasets import Dataset, DatasetDict

    saved = tmp_path / "saved"
    DatasetDict({"train": Dataset.from_list(ROWS), "test": Dataset.from_list(ROWS[:1])}).save_to_disk(saved)
    assert len(open_records(f"{saved}:test")) == 1
    assert len(open_records(saved, split="train")) == 3
    for path, split, match in [
        (saved, None, "has the splits train, test; say which"),
        (f"{saved}:dev", None, "no split 'dev'; it has train, test"),
        (f"{saved}:test", "train", "names the split 'test', but 'train' was asked for"),
    ]:
        with pytest.raises(OptionError, match=match):
            open_records(path, split=split)


# --- ids -----------------------------------------------------------------------------------------------------


def ids_of(records: Records) -> RecordIds:
    ids = RecordIds(records)
    assert [number for number, _ in ids.read()] == list(range(len(records)))
    return ids


def test_ids_are_the_rows_own_or_their_numbers(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text(jsonl([{"id": 7}, {"x": 1}, {"id": "z"}]))
    ids = ids_of(open_records(tmp_path / "d.jsonl"))
    assert [ids[row] for row in range(3)] == ["7", "d.jsonl#2", "z"]
    assert [ids.find(id) for id in ("7", "d.jsonl#2", "z", "d.jsonl#1", "d.jsonl#9", "y")] == [
        0,
        1,
        2,
        None,
        None,
        None,
    ]


def test_duplicate_ids_are_refused_naming_both_rows(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text(jsonl([{"id": "a"}, {"id": "b"}, {"id": "a"}]))
    with pytest.raises(DataError, match=r"line 1 and .*line 3 have the same id 'a'; ids must differ"):
        ids_of(open_records(tmp_path / "d.jsonl"))


@pytest.mark.parametrize("id", ["", [1], 1.5, True])
def test_ids_that_name_nothing_are_refused(id: Any) -> None:
    with pytest.raises(
        DataError, match=r"data, row 1: the field 'id' is .*an id must be a text or a whole number"
    ):
        ids_of(RowList([{"id": id}], name="data"))


# --- bad input -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("d.jsonl", b"", r"d\.jsonl is empty"),
        ("d.jsonl", b"\n \n", r"d\.jsonl is empty; give a file with one JSON object per line"),
        ("d.jsonl", b'{"a": 1}\n{"a": \n', r"line 2 is not JSON: Expecting value at column 7; every line"),
        ("d.jsonl", b'{"a": 1}\n\n[1]\n', r"line 3 holds \[1\] \(list\), not an object"),
        (
            "d.jsonl",
            b'{"a": 1}\n{"a": "caf\xe9"}\n',
            r"not utf-8 text: byte 0xe9 at offset 19 .*--encoding latin-1",
        ),
        ("d.json", b"[]", "has no rows; give at least one"),
        ("d.json", b"  ", "is not JSON: Expecting value at column 3; give a list of objects"),
        ("d.json", b'[{"a": 1},\n3]', r"row 2 holds 3 \(int\), not an object"),
        ("d.json", b'[{"a": 1},\n', "is not JSON: Expecting value at line 2, column 1"),
        ("d.json", b'{"a":\n 1}', r"holds \{.*\} \(dict\); give a list of objects"),
        ("d.csv", b"\n\n", "has no rows below a header line"),
        ("d.csv", b"text,label\n", "has no rows below a header line; give at least one"),
        (
            "d.csv",
            b"text,label\na,b\na,b,c\n",
            "line 3 has 3 values but the header has 2 columns; put quotes",
        ),
        (
            "d.csv",
            b"some text,3\nmore,4\n",
            r"no usable header: .*'some text', '3', where '3' is a number; add a first",
        ),
        ("d.csv", b"text,text\na,b\n", "two columns have the same name"),
        ("d.csv", b"text,\na,b\n", "a column has no name"),
        ("d.csv", b'text\n"open\n', "is not CSV: unexpected end of data; repair the quotes"),
        ("d.csv", b"text\nna\xefve\n", "byte 0xef at offset 7"),
        ("d.parquet", b"PAR1 nothing", "not a readable Parquet file"),
        ("d.jsonl.gz", b"plain", r"cannot be read: Not a gzipped file .*; check the name, or fetch"),
        (
            "d.jsonl.gz",
            gzip.compress(b'{"a": 1}' * 99, mtime=0)[:-9],
            "cannot be read: Compressed file ended",
        ),
        ("d.jsonl.gz", gzip.compress(b'{"a": "\xe9"}', mtime=0), "byte 0xe9 at offset 7"),
        ("d.xlsx", b"x", r"the extension '\.xlsx', which is not a known format; known are \.jsonl, \.json"),
        ("data", b"x", "no extension, which is not a known format"),
        ("d.txt", b"", "is empty; give a file with data"),
    ],
)
def test_files_that_cannot_be_read(name: str, content: bytes, match: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError, match=match) as caught:
        list(open_records(path))
    assert name in str(caught.value)


def test_a_bad_byte_is_found_across_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "CHUNK", 3)
    path = tmp_path / "d.jsonl.gz"
    path.write_bytes(gzip.compress('{"a": "東京"}'.encode() + b"\xe6\x9d("))
    with pytest.raises(DataError, match="byte 0xe6 at offset 15"):
        open_records(path)


def test_long_csv_fields_are_read_and_the_modules_limit_is_put_back(tmp_path: Path) -> None:
    (tmp_path / "d.csv").write_text("text\n" + "x" * 200_000 + "\n")
    before = csv.field_size_limit()
    assert len(open_records(tmp_path / "d.csv")[0].text("text")) == 200_000
    assert csv.field_size_limit() == before


def test_paths_that_lead_nowhere(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"there is no file or directory '.*nowhere\.jsonl'; check the name"):
        open_records(tmp_path / "nowhere.jsonl")
    (tmp_path / "d.jsonl").write_text("{}")
    for encoding in ("utf-9", "hex"):
        with pytest.raises(OptionError, match=f"unknown encoding '{encoding}'"):
            open_records(tmp_path / "d.jsonl", encoding=encoding)
    with pytest.raises(OptionError, match="is a file, which has no splits; name it without 'train'"):
        open_records(f"{tmp_path / 'd.jsonl'}:train")


def test_directories_that_hold_no_data(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="it is empty; give a directory of text files"):
        open_records(tmp_path)
    (tmp_path / "a.bin").write_bytes(b"x")
    with pytest.raises(DataError, match=r"its files have \.bin; give a directory of text files"):
        open_records(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(DataError, match="it looks like a model"):
        open_records(tmp_path)
    (tmp_path / "a.png").write_bytes(b"x")
    with pytest.raises(DataError, match="if it is a folder of images, it needs an image model"):
        open_records(tmp_path)
    with pytest.raises(OptionError, match="not a saved data set, so it has no split 'train'"):
        open_records(f"{tmp_path}:train")
    (tmp_path / "a.jsonl").write_text("{}")
    write_parquet(tmp_path / "a.parquet", ROWS)
    with pytest.raises(DataError, match=r"holds both \.jsonl and \.parquet files"):
        open_records(tmp_path)


def test_tables_without_rows_and_damaged_data_sets(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "d.parquet")
    with pytest.raises(DataError, match=r"d\.parquet has no rows"):
        open_records(tmp_path / "d.parquet")
    save_dataset(tmp_path / "saved", ROWS)
    with pytest.raises(OptionError, match="a single data set without splits; name it without 'train'"):
        open_records(f"{tmp_path / 'saved'}:train")
    (tmp_path / "saved" / "state.json").write_text("{}")
    with pytest.raises(DataError, match="looks like a saved data set but cannot be loaded"):
        open_records(tmp_path / "saved")
    with pytest.raises(DataError, match="queries has no rows"):
        RowList([], name="queries")


def test_a_missing_library_is_named_with_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    WRITERS["saved"](tmp_path / "saved")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(OptionError, match=r'the library datasets is needed .*pip install "whence\[hf\]"'):
        open_records(tmp_path / "saved")


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"body": "x"}, "data, row 1 has no field 'text'; it has 'body'"),
        ({}, "it has no fields at all"),
        ({"text": None}, "leaves the field 'text' empty"),
        ({"text": ["a"]}, r"the field 'text' is \['a'\] \(list\), not text; name a field that holds text"),
        ({"text": " \n"}, r"has an empty 'text'; remove it, or leave such rows out \(--skip-empty\)"),
        ({"text": "a\ud800"}, "half of a surrogate pair at character 1"),
    ],
)
def test_fields_that_hold_no_text(fields: dict[str, Any], match: str) -> None:
    with pytest.raises(DataError, match=match):
        RowList([fields], name="data")[0].text("text")
