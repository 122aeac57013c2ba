"""Questions and groups from the command line, and from files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import whence
from test_cli import FAST, NAMES, invoke, training, write_lines
from test_cli import place as place
from tiny_hf import byte_level, classifier_directory
from whence import LanguageModeling
from whence.errors import DataError
from whence.sources import ClassifiedTexts, Passages, RowList, language_queries

PROMPT, SAID, OTHER = "The with statement", " is used to wrap", " is not there"


def test_a_typed_question_with_its_contrast(place: Path, tmp_path: Path) -> None:
    job = [*training(place), "--prompt", PROMPT, "--completion", SAID, "--contrast", OTHER, *FAST]
    printed = invoke(
        "attribute", *job, "--run-dir", tmp_path / "run", "--groups", "id", "--by", "unit"
    ).stdout
    assert "asked: why “is used to wrap” rather than “is not there”" in printed
    assert "most helpful per unit of gradient" in printed
    assert "groups" in printed
    assert NAMES[0] in printed
    result = whence.load(tmp_path / "run")
    assert result.queries[0].contrast == OTHER
    assert result.groups().names[0] == NAMES[0]  # a document, of several passages
    assert int(result.groups().sizes[0]) > 1
    page = (tmp_path / "run" / "report.html").read_text()
    for said in (
        "is not there",
        "Groups of training examples",
        "The same per unit of gradient",
        "Difference of log p",
    ):
        assert said in page
    again = json.loads(invoke("resume", tmp_path / "run", "--trust-run", "--json").stdout)
    assert again["queries"][0]["asked"].startswith("why")
    assert again["queries"][0]["helpful_groups"][0]["group"] in NAMES


def test_contrasts_groups_and_sums_from_a_file(place: Path, tmp_path: Path) -> None:
    rows = [
        {"prompt": PROMPT, "completion": SAID, "contrast": OTHER, "kind": "a"},
        {"prompt": "The try", "completion": " statement", "contrast": " word", "kind": "a"},
        {"prompt": "The for", "completion": " statement", "kind": "b"},
    ]
    queries = write_lines(tmp_path / "q.jsonl", rows)
    job = [*training(place), "--queries", queries, "--query-groups", "kind", "--reduce", "sum", *FAST]
    invoke("attribute", *job, "--run-dir", tmp_path / "run")
    result = whence.load(tmp_path / "run")
    assert [exhibit.id for exhibit in result.queries] == ["a", "b"]
    assert result.settings["asked"] == "contrast, sum over terms, groups"
    found = json.loads(
        invoke(
            "validate", tmp_path / "run", "--trust-run", "--budget", "5s", "--points", "1", "--json", code=0
        ).stdout
    )
    assert found["verdict"] in ("trust", "cannot tell")


def test_margins_from_the_command_line(place: Path) -> None:
    job = [*training(place), "--queries", place / "queries.jsonl", "--measure", "margin", *FAST]
    found = json.loads(invoke("attribute", *job, "--json").stdout)["queries"][0]
    assert found["asked"] == "why this and nothing else"
    assert "per token" in found["facts"]["Log-odds"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--contrast", "x"], "goes with --prompt"),
        (["--measure", "odds"], "'loss' or 'margin'"),
        (["--groups", "author"], "no field 'author'"),
        (["--query-groups", "author"], "no field 'author'"),
        (["--by", "size"], "score or by unit"),
    ],
)
def test_what_cannot_be_asked_is_said(place: Path, options: list[str], says: str) -> None:
    found = invoke("attribute", *training(place), "--queries", place / "queries.jsonl", *options, code=2)
    assert says in " ".join(found.stderr.split())


def test_labels_are_compared_by_name(tmp_path: Path) -> None:
    model = classifier_directory(tmp_path / "model")
    rows = [{"text": f"row {k} of text", "label": k % 2} for k in range(8)]
    train = write_lines(tmp_path / "train.jsonl", rows)
    queries = write_lines(tmp_path / "q.jsonl", [{"text": "a row", "label": 0, "contrast": 1}])
    job = [model, "--train", train, "--queries", queries, "--damping", "1", "--groups", "label"]
    found = json.loads(invoke("attribute", *job, "--json").stdout)["queries"][0]
    assert "rather than" in found["asked"]
    assert len(found["helpful_groups"]) == 2


# --- sources ---------------------------------------------------------------------------------------------------------


def test_the_other_completion_has_the_prompt_of_the_first() -> None:
    rows = RowList([{"prompt": PROMPT, "completion": SAID, "contrast": OTHER}, {"prompt": "a b", "completion": " c"}],
                   name="queries")  # fmt: skip
    found = language_queries(rows, byte_level(), LanguageModeling())
    assert found.contrasts is not None
    assert found.contrasts[1] is None
    first, other = found[0], found.contrasts[0]
    start = int((first["labels"] != -100).long().argmax())
    assert torch.equal(first["input_ids"][:start], other["input_ids"][:start])
    tokens = byte_level()
    assert tokens.decode(other["labels"][other["labels"] != -100].tolist()) == OTHER
    assert found.exhibit(0).contrast == OTHER


def test_texts_and_chats_have_contrasts() -> None:
    from tiny_hf import CHAT

    texts = language_queries(
        RowList([{"text": "a b c", "contrast": "a b d"}], name="q"), byte_level(), LanguageModeling()
    )
    assert texts.contrasts is not None
    chatty: Any = byte_level()
    chatty.chat_template = CHAT
    chat = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "good day"}]
    rows = RowList([{"messages": chat, "contrast": "go away"}], name="q")
    found = language_queries(rows, chatty, LanguageModeling())
    assert found.contrasts is not None
    shown = found.contrasts[0]["labels"]
    assert "go away" in chatty.decode(shown[shown != -100].tolist())


def test_columns_follow_the_passages() -> None:
    rows = [{"text": "a b c d e f g h", "by": "me"}, {"text": "a b", "by": "you"}, {"text": "x y"}]
    passages = Passages(RowList(rows, name="data"), byte_level(), max_length=5)
    found = passages.column("by")
    assert len(found) == len(passages)
    assert found[0] == "me"
    assert found[-2:] == ["you", None]
    assert passages.column("id")[-1] == "data#3"
    with pytest.raises(DataError, match="no field 'source'"):
        passages.column("source")


def test_an_unknown_label_to_compare_with_is_refused() -> None:
    rows = RowList(
        [{"text": "a", "label": "no"}, {"text": "b", "label": "yes", "contrast": "maybe"}], name="data"
    )
    with pytest.raises(DataError, match="maybe"):
        _ = ClassifiedTexts(rows, byte_level()).contrasts
