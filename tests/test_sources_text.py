"""Text for language models and classifiers: passages, prompts with completions, chats, queries."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tiny_hf import CHAT, byte_level, pieces_with_fallback
from whence import LanguageModeling
from whence.errors import DataError, ModelError, OptionError
from whence.sources import ClassifiedTexts, Labels, Passages, RowList, language_queries, open_records
from whence.sources.tokenizers import decoded_pieces, encode

TEXTS = ["the cat sat on the mat", "naïve 東京 🤗 and  two spaces ", "\n  a\tb\n", "the 🤗🤗 dog"]
TOKENIZERS = {
    "byte-level": byte_level(),
    "byte-level with BOS and EOS": byte_level(bos=True, eos=True),
    "SentencePiece-like": pieces_with_fallback(),
}
TASK = LanguageModeling()


class Slow:
    """A tokenizer that does not say where its tokens come from."""

    is_fast = False

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __call__(self, text: str, **options: Any) -> Any:
        return self._tokenizer(text, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


def rows(*texts: str) -> RowList:
    return RowList([{"text": text} for text in texts], name="data")


def pairs(*rows: tuple[str, str]) -> RowList:
    return RowList([{"prompt": prompt, "completion": completion} for prompt, completion in rows], name="data")


# --- tokens --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("name", TOKENIZERS)
def test_pieces_join_to_the_text(name: str, text: str) -> None:
    (encoded,) = encode(TOKENIZERS[name], [text])
    pieces = encoded.pieces()
    assert len(pieces) == len(encoded.ids)
    assert encoded.ids.tolist() == TOKENIZERS[name](text)["input_ids"]
    own = [piece for piece, added in zip(pieces, encoded.added, strict=True) if not added]
    assert "".join(own) == text
    assert [p for p, added in zip(pieces, encoded.added, strict=True) if added] == list(encoded.names)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("name", ["byte-level", "byte-level with BOS and EOS"])
def test_slow_tokenizers_give_pieces_by_decoding(name: str, text: str) -> None:
    (slow,) = encode(Slow(TOKENIZERS[name]), [text])
    (fast,) = encode(TOKENIZERS[name], [text])
    assert slow.ids.tolist() == fast.ids.tolist()
    assert "".join(slow.pieces()) == "".join(fast.pieces())
    assert slow.added.tolist() == fast.added.tolist()


def test_a_character_of_several_tokens_is_decoded_when_complete() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    assert decoded_pieces(tokenizer, tokenizer("a🤗b")["input_ids"]) == ["a", "", "", "", "🤗", "b"]


def test_a_slow_tokenizer_that_changes_the_text_is_refused() -> None:
    with pytest.raises(ModelError, match="does not give it back; use a fast tokenizer"):
        encode(Slow(pieces_with_fallback()), ["  two spaces"])


# --- documents -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TOKENIZERS)
def test_documents_are_cut_into_passages(name: str, tmp_path: Path) -> None:
    tokenizer = TOKENIZERS[name]
    texts = ["the cat sat on the mat and the 🤗 dog sat on it", "short"]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    passages = Passages(open_records(tmp_path / "d.jsonl"), tokenizer, max_length=5)
    expected = [tokenizer(text)["input_ids"] for text in texts]
    count = sum(id.startswith("d.jsonl#1[") for id in passages.ids)
    ids = torch.cat([passages[i]["input_ids"] for i in range(count)]).tolist()
    assert ids == expected[0][: len(ids)]
    assert len(expected[0]) - len(ids) <= 1  # a single token left over
    assert max(len(passages[i]["input_ids"]) for i in range(len(passages))) == 5
    assert all(torch.equal(passages[i]["labels"], passages[i]["input_ids"]) for i in range(count))
    assert list(passages.ids)[:2] == ["d.jsonl#1[0]", "d.jsonl#1[1]"]
    shown = [passages.exhibit(i) for i in range(len(passages))]
    added = {"<s>", "</s>"}
    for index, exhibit in enumerate(shown):
        assert exhibit.tokens is not None
        assert len(exhibit.tokens) == len(passages[index]["input_ids"])
        assert "".join(t for t in exhibit.tokens if t not in added) == exhibit.text
    assert texts[0].startswith("".join(str(e.text) for e in shown[:count]))
    assert list(passages.texts()) == [e.text for e in shown]
    assert shown[0].link == f"{tmp_path / 'd.jsonl'}:1"


def test_passages_are_found_by_id() -> None:
    records = RowList([{"id": "long", "text": "abcdefgh"}, {"id": "x[1]", "text": "abc"}], name="data")
    passages = Passages(records, TOKENIZERS["byte-level"], max_length=3)
    assert list(passages.ids) == ["long[0]", "long[1]", "long[2]", "x[1]"]
    found = {id: passages.find(id) for id in ("long", "long[1]", "long[9]", "x[1]", "x[1][0]", "none")}
    assert found == {
        "long": (0, 1, 2),
        "long[1]": (1,),
        "long[9]": (),
        "x[1]": (3,),
        "x[1][0]": (),
        "none": (),
    }
    assert passages.id(-1) == "x[1]"
    with pytest.raises(IndexError, match="has 4 examples, there is no position 4"):
        passages[4]


def test_a_single_token_left_over_is_dropped_with_its_text() -> None:
    passages = Passages(rows("abcdefg"), TOKENIZERS["byte-level"], max_length=3)
    assert list(passages.texts()) == ["abc", "def"]
    assert [passages.exhibit(i).text for i in range(len(passages))] == ["abc", "def"]
    assert [passages[i]["input_ids"].numel() for i in range(2)] == [3, 3]


def test_no_limit_leaves_documents_whole() -> None:
    passages = Passages(rows("the cat " * 200), TOKENIZERS["byte-level"])
    assert len(passages) == 1
    assert passages.id(0) == "data#1"


def test_another_field_may_hold_the_text() -> None:
    records = RowList([{"body": "some words", "prompt": "x", "completion": "y"}], name="data")
    assert Passages(records, TOKENIZERS["byte-level"], text_field="body").exhibit(0).text == "some words"


def test_rows_to_leave_out() -> None:
    records = RowList(
        [{"text": ""}, {"text": "ab"}, {"text": None}, {"text": "a"}, {"text": "cd"}], name="data"
    )
    passages = Passages(records, TOKENIZERS["byte-level"], skip_empty=True)
    assert list(passages.ids) == ["data#2", "data#5"]
    assert passages.skipped == 3
    assert [passages.exhibit(i).text for i in (0, 1)] == list(passages.texts()) == ["ab", "cd"]
    assert passages.find("data#4") == ()
    with pytest.raises(DataError, match="no row of data has text; all 2 were left out"):
        Passages(rows("", "a"), TOKENIZERS["byte-level"], skip_empty=True)


@pytest.mark.parametrize(
    ("records", "options", "error", "match"),
    [
        (rows("ab", ""), {}, DataError, r"data, row 2 has an empty 'text'"),
        (rows("ab", "a"), {}, DataError, r"data, row 2 has 1 token and none to predict"),
        (rows("ab"), {"text_field": "body"}, DataError, r"has no field 'body'; it has 'text'"),
        (rows("ab"), {"max_length": 1}, OptionError, r"max_length is 1; a passage needs at least 2"),
        (pairs(("a", "b"), ("a", "")), {}, DataError, r"row 2 has an empty 'completion'"),
        (
            pairs(("abc", "def")),
            {"max_length": 4},
            DataError,
            r"row 1 is 6 tokens long, the limit is 4; .*--truncate",
        ),
        (pairs(("abcdef", "g")), {"max_length": 4, "truncate": True}, DataError, "none to predict"),
        (
            RowList([{"id": "a", "text": "ab"}] * 2, name="d"),
            {},
            DataError,
            "row 1 and d, row 2 have the same id 'a'",
        ),
    ],
)
def test_rows_that_cannot_be_learned_from(records: Any, options: Any, error: Any, match: str) -> None:
    with pytest.raises(error, match=match):
        Passages(records, TOKENIZERS["byte-level"], **options)


# --- prompts with completions, chats -------------------------------------------------------------------------


def predicted_text(example: dict[str, torch.Tensor], tokenizer: Any) -> str:
    return str(tokenizer.decode(example["labels"][example["labels"] != -100]))


@pytest.mark.parametrize("name", TOKENIZERS)
def test_prompts_are_not_predicted(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    passages = Passages(pairs(("the cat sat", " on the 🤗 mat")), tokenizer)
    example = passages[0]
    assert example["input_ids"].tolist() == tokenizer("the cat sat on the 🤗 mat")["input_ids"]
    assert predicted_text(example, tokenizer).removesuffix("</s>").strip() == "on the 🤗 mat"
    exhibit = passages.exhibit(0)
    assert exhibit.text == "the cat sat on the 🤗 mat"
    assert len(exhibit.tokens or ()) == len(example["input_ids"])


def test_long_completions_are_cut_where_allowed() -> None:
    passages = Passages(pairs(("ab", "cdef")), TOKENIZERS["byte-level"], max_length=4, truncate=True)
    assert predicted_text(passages[0], TOKENIZERS["byte-level"]) == "cd"
    assert passages.exhibit(0).text == "abcd"


def chat(*turns: tuple[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def with_template(template: str | None = CHAT) -> Any:
    tokenizer = byte_level(bos=True)
    tokenizer.chat_template = template
    return tokenizer


def test_chats_are_predicted_where_the_assistant_speaks() -> None:
    tokenizer = with_template()
    row = chat(("user", "hi"), ("assistant", "hello"), ("user", "and"), ("assistant", "bye"))
    passages = Passages(RowList([row], name="chats"), tokenizer)
    assert predicted_text(passages[0], tokenizer) == "hello</s>bye</s>"
    assert next(passages.texts()) == "<|user|>hi</s><|assistant|>hello</s><|user|>and</s><|assistant|>bye</s>"
    query = language_queries(RowList([row], name="q"), tokenizer, TASK)
    assert predicted_text(query[0], tokenizer) == "bye</s>"
    assert query.exhibit(0).text == "bye</s>"


@pytest.mark.parametrize(
    ("row", "template", "match"),
    [
        (chat(("user", "hi")), CHAT, "no message of 'messages' has the role 'assistant'"),
        (
            {"messages": []},
            CHAT,
            r"'messages' holds \[\] \(list\); give a list of objects with the texts 'role' and 'content'",
        ),
        ({"messages": "hi"}, CHAT, "'messages' holds 'hi'"),
        (
            chat(("user", 3)),
            CHAT,
            "'messages' holds .*3.*; give a list of objects with the texts 'role' and 'content'",
        ),
        (
            chat(("assistant", "a")),
            "{{ raise_exception('roles must alternate') }}",
            "refuses the messages: roles must",
        ),
        (
            chat(("user", "a"), ("assistant", "b")),
            "{{ messages | length }}",
            "the chat template rewrites earlier",
        ),
    ],
)
def test_chats_that_cannot_be_read(row: Any, template: str, match: str) -> None:
    with pytest.raises(DataError, match=f"chats, row 1.*{match}"):
        Passages(RowList([row], name="chats"), with_template(template))


def test_chats_need_a_template() -> None:
    with pytest.raises(
        OptionError, match=r"chats, row 1 holds chat messages, but the tokenizer has no chat template"
    ):
        Passages(RowList([chat(("assistant", "a"))], name="chats"), with_template(None))


# --- queries -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TOKENIZERS)
def test_queries_ask_for_the_completion(name: str, tmp_path: Path) -> None:
    tokenizer = TOKENIZERS[name]
    path = tmp_path / "queries.jsonl"
    path.write_text(json.dumps({"id": "q1", "prompt": "the cat sat", "completion": " on the 🤗"}))
    queries = language_queries(open_records(path), tokenizer, TASK)
    ids = tokenizer("the cat sat on the 🤗")["input_ids"]
    without_eos = ids[:-1] if ids[-1] == 1 else ids
    assert queries[0]["input_ids"].tolist() == without_eos
    assert predicted_text(queries[0], tokenizer).strip() == "on the 🤗"
    exhibit = queries.exhibit(0)
    assert (exhibit.id, exhibit.prompt, exhibit.text) == ("q1", "the cat sat", " on the 🤗")
    assert "".join(exhibit.tokens or ()) == " on the 🤗"
    assert len(exhibit.tokens or ()) == TASK.count_terms(queries[0])


def test_a_token_across_the_boundary_belongs_to_the_completion() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    (query,) = [language_queries(pairs(("sat on ", "the mat")), tokenizer, TASK)]
    assert predicted_text(query[0], tokenizer) == " the mat"
    assert "".join(query.exhibit(0).tokens or ()) == "the mat"


def test_a_prompt_inside_one_token_is_tokenized_apart() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    assert len(tokenizer("the")["input_ids"]) == 1
    query = language_queries(pairs(("t", "he")), tokenizer, TASK)
    assert query[0]["input_ids"].tolist() == tokenizer("t")["input_ids"] + tokenizer("he")["input_ids"]
    assert "".join(query.exhibit(0).tokens or ()) == "he"


@pytest.mark.parametrize(("name", "unpredicted"), [("byte-level", 1), ("byte-level with BOS and EOS", 1)])
def test_text_queries_ask_for_the_whole_text(name: str, unpredicted: int) -> None:
    queries = language_queries(rows("the cat"), TOKENIZERS[name], TASK)
    assert TASK.count_terms(queries[0]) == len(queries[0]["input_ids"]) - unpredicted
    exhibit = queries.exhibit(0)
    assert (exhibit.id, exhibit.prompt, exhibit.text) == ("data#1", None, "the cat")
    assert "".join(exhibit.tokens or ()) == "the cat"


def test_queries_to_leave_out() -> None:
    records = pairs(("the", " cat"), ("the", " "), ("the", " dog"))
    with pytest.raises(DataError, match=r"row 2 has an empty 'completion'; .*--skip-empty"):
        language_queries(records, TOKENIZERS["byte-level"], TASK)
    queries = language_queries(records, TOKENIZERS["byte-level"], TASK, skip_empty=True)
    assert list(queries.ids) == ["data#1", "data#3"]
    assert queries.exhibit(1).text == " dog"
    with pytest.raises(DataError, match="no row of data has text; all 1 were left out"):
        language_queries(rows(""), TOKENIZERS["byte-level"], TASK, skip_empty=True)


def test_bos_makes_a_prompt_of_its_own() -> None:
    queries = language_queries(pairs(("", "the cat")), TOKENIZERS["SentencePiece-like"], TASK)
    assert queries[0]["labels"][0] == -100
    assert predicted_text(queries[0], TOKENIZERS["SentencePiece-like"]) == "the cat"


@pytest.mark.parametrize(
    ("records", "match"),
    [
        (
            pairs(("a", "b"), ("abcdef", "gh")),
            r"data, row 2 is 8 tokens long, and the model reads 6; shorten",
        ),
        (
            pairs(("", "abc")),
            "has 3 tokens, of which the first can only be given.*at least one token of prompt",
        ),
        (rows("a"), "has 1 token, of which the first can only be given, not predicted; give a longer"),
        (RowList([{"prompt": "a"}], name="data"), "has no field 'completion'; it has 'prompt'"),
        (RowList([{"prompt": 1, "completion": "b"}], name="data"), r"'prompt' is 1 \(int\), not text"),
        (RowList([{"id": 1, "text": "ab"}] * 2, name="data"), "have the same id '1'"),
    ],
)
def test_queries_that_cannot_be_asked(records: RowList, match: str) -> None:
    with pytest.raises(DataError, match=match):
        language_queries(records, TOKENIZERS["byte-level"], TASK, max_length=6)


# --- classification ------------------------------------------------------------------------------------------


def test_texts_with_labels(tmp_path: Path) -> None:
    (tmp_path / "d.csv").write_text("text,label\nthe cat,pos\nthe long dog,neg\n")
    data = ClassifiedTexts(open_records(tmp_path / "d.csv"), TOKENIZERS["byte-level"], max_length=24)
    assert data.labels.names == ("neg", "pos")
    assert data[0]["labels"] == 1
    assert data[0]["input_ids"].tolist() == TOKENIZERS["byte-level"]("the cat")["input_ids"]
    exhibit = data.exhibit(1)
    assert (exhibit.id, exhibit.label, exhibit.text) == ("d.csv#2", "neg", "the long dog")
    assert "".join(exhibit.tokens or ()) == exhibit.text
    assert list(data.texts()) == ["the cat", "the long dog"]
    assert data.find("d.csv#1") == (0,)
    assert data.find("z") == ()


def test_texts_to_leave_out() -> None:
    fields = [("", 0), ("ab", 1), (None, None), (" ", 7), ("cd", 0)]
    records = RowList([{"text": text, "label": label} for text, label in fields], name="data")
    with pytest.raises(DataError, match=r"leaves the field 'label' empty"):
        ClassifiedTexts(records, TOKENIZERS["byte-level"])
    data = ClassifiedTexts(records, TOKENIZERS["byte-level"], labels=Labels(("no", "yes")), skip_empty=True)
    assert (len(data), data.skipped) == (2, 3)
    assert list(data.ids) == ["data#2", "data#5"]
    assert [data.find(f"data#{number}") for number in range(1, 7)] == [(), (0,), (), (), (1,), ()]
    assert [data.exhibit(i).text for i in (0, 1)] == list(data.texts()) == ["ab", "cd"]
    assert [data.exhibit(i).label for i in (0, 1)] == ["yes", "no"]
    assert data[1]["input_ids"].tolist() == TOKENIZERS["byte-level"]("cd")["input_ids"]
    with pytest.raises(DataError, match="data, row 2 has the label 1; give one of"):
        ClassifiedTexts(records, TOKENIZERS["byte-level"], labels=Labels(("no",)), skip_empty=True)
    with pytest.raises(DataError, match="no row of data has text; all 1 were left out"):
        ClassifiedTexts(records.first(1), TOKENIZERS["byte-level"], skip_empty=True)


def test_long_texts_are_cut_where_allowed_and_keep_their_end() -> None:
    tokenizer = TOKENIZERS["byte-level with BOS and EOS"]
    records = RowList([{"text": "abcdefgh", "label": 0}], name="data")
    with pytest.raises(DataError, match="data, row 1 is 10 tokens long, the limit is 6"):
        ClassifiedTexts(records, tokenizer, max_length=6)
    data = ClassifiedTexts(records, tokenizer, max_length=6, truncate=True)
    assert tokenizer.decode(data[0]["input_ids"]) == "<s>abcd</s>"
    exhibit = data.exhibit(0)
    assert (exhibit.text, exhibit.tokens) == ("abcd", ("<s>", "a", "b", "c", "d", "</s>"))
    assert list(data.texts()) == ["abcd"]
    with pytest.raises(
        OptionError, match=r"a limit of 2 tokens leaves no room for text: .* adds 2 of its own"
    ):
        ClassifiedTexts(records, tokenizer, max_length=2, truncate=True)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("name", TOKENIZERS)
def test_texts_are_cut_as_the_tokenizer_does_and_shown_as_cut(name: str, text: str, side: str) -> None:
    tokenizer = copy.deepcopy(TOKENIZERS[name])
    tokenizer.truncation_side = side
    for length in range(3, len(tokenizer(text)["input_ids"])):
        data = ClassifiedTexts(
            RowList([{"text": text, "label": 0}], name="d"), tokenizer, max_length=length, truncate=True
        )
        seen = tokenizer(text, truncation=True, max_length=length)["input_ids"]
        assert data[0]["input_ids"].tolist() == seen
        exhibit = data.exhibit(0)
        assert len(exhibit.tokens or ()) == length
        own = [piece for piece in exhibit.tokens or () if piece not in ("<s>", "</s>")]
        assert exhibit.text == "".join(own) == next(data.texts())
        assert text.startswith(exhibit.text) if side == "right" else text.endswith(exhibit.text)
        if name != "SentencePiece-like":  # which has characters that it does not know
            assert tokenizer.decode(seen, skip_special_tokens=True).strip("\ufffd") in exhibit.text


@pytest.mark.parametrize(
    ("label", "labels", "match"),
    [
        (2, ("a", "b"), "data, row 1 has the label 2; give one of 'a', 'b', or a number from 0 to 1"),
        (-1, ("a", "b"), "has the label -1; give one of"),
        ("c", ("a", "b"), "data, row 1 has the label 'c'; give one of 'a', 'b'"),
        (1.5, ("a", "b"), "has the label 1.5; give one of"),
        (None, ("a", "b"), "leaves the field 'label' empty"),
    ],
)
def test_labels_that_do_not_exist(label: Any, labels: tuple[str, ...], match: str) -> None:
    records = RowList([{"text": "abc", "label": label}], name="data")
    with pytest.raises(DataError, match=match):
        ClassifiedTexts(records, TOKENIZERS["byte-level"], labels=Labels(labels))


def test_labels_from_files(tmp_path: Path) -> None:
    path = tmp_path / "labels.json"
    for content in (["cat", "dog"], {"cat": 0, "dog": 1}, {"1": "dog", "0": "cat"}):
        path.write_text(json.dumps(content))
        assert Labels.from_file(path).names == ("cat", "dog")
    for bad in ("[]", '{"cat": 3}', "7", "{", '["a", "a"]'):
        path.write_text(bad)
        with pytest.raises(DataError, match=r"labels\.json|listed twice"):
            Labels.from_file(path)
    with pytest.raises(DataError, match=r"nowhere cannot be read: .*No such file.*; check the name"):
        Labels.from_file(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"train has 3 classes .*, the model has 2 outputs"):
        Labels(("a", "b", "c")).check_outputs(2, "train")
