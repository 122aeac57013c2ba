"""Shortlists: what a text search chooses, against BM25 written out, and what ids name."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tiny_hf import byte_level
from whence.errors import DataError, OptionError
from whence.exhibit import Exhibit
from whence.sources import ListedExamples, Passages, RowList
from whence.sources.candidates import Shortlist, bm25, from_ids, tfidf, words

METHODS: list[Callable[..., Shortlist]] = [bm25, tfidf]
VOCABULARY = ["cat", "dog", "fish", "bird", "tree", "river", "stone", "cloud", "light", "sound"]


def corpus(size: int = 200) -> list[str]:
    generator = np.random.default_rng(0)
    return [" ".join(generator.choice(VOCABULARY, generator.integers(1, 12))) for _ in range(size)]


def bm25_by_definition(
    texts: list[str], query: str, k1: float = 1.5, b: float = 0.75
) -> np.ndarray[Any, Any]:
    documents = [text.split() for text in texts]
    mean = sum(map(len, documents)) / len(documents)
    scores = np.zeros(len(documents))
    for word in query.split():
        df = sum(word in document for document in documents)
        idf = math.log(1 + (len(documents) - df + 0.5) / (df + 0.5))
        for position, document in enumerate(documents):
            tf = document.count(word)
            scores[position] += idf * tf / (tf + k1 * (1 - b + b * len(document) / mean))
    return scores


def test_bm25_is_as_defined() -> None:
    texts, queries = corpus(), ["cat river", "stone stone light absent"]
    shortlist = bm25(iter(texts), queries, k=7)
    for query, chosen in zip(queries, shortlist.per_query, strict=True):
        scores = bm25_by_definition(texts, query)
        np.testing.assert_allclose(scores[chosen], np.sort(scores)[::-1][:7], rtol=1e-12)
    assert shortlist.positions.tolist() == sorted(set(np.concatenate(shortlist.per_query).tolist()))


def test_tfidf_is_as_defined() -> None:
    texts, query = corpus(), "cat river"
    documents = [text.split() for text in texts]
    idf = {w: math.log((1 + len(texts)) / (1 + sum(w in d for d in documents))) + 1 for w in VOCABULARY}

    def vector(text: list[str]) -> np.ndarray[Any, Any]:
        counts = np.array([text.count(w) for w in VOCABULARY])
        weights = np.where(counts > 0, 1 + np.log(np.maximum(counts, 1)), 0) * [idf[w] for w in VOCABULARY]
        return np.asarray(weights / np.linalg.norm(weights))

    scores = np.array([vector(d) @ vector(query.split()) for d in documents])
    (chosen,) = tfidf(iter(texts), [query], k=9).per_query
    np.testing.assert_allclose(scores[chosen], np.sort(scores)[::-1][:9])


@pytest.mark.parametrize("method", METHODS)
def test_texts_are_read_once_and_one_at_a_time(method: Callable[..., Shortlist]) -> None:
    read = []

    def texts() -> Iterator[str]:
        for number in range(50):
            read.append(number)
            yield f"text {number}"

    shortlist = method(texts(), ["number 17"], 5)
    assert read == list(range(50))
    assert shortlist.per_query[0].tolist() == [17]
    assert shortlist.total == 50


@pytest.mark.parametrize("method", METHODS)
def test_equal_scores_are_chosen_in_order(method: Callable[..., Shortlist]) -> None:
    mixed = ["sound cat river dog", "dog river cat sound", "river sound dog cat"]
    assert method([*mixed, "cat"], ["dog river sound"], 3).per_query[0].tolist() == [0, 1, 2]
    shortlist = method(["dog", "cat", "dog", "cat", "cat"], ["cat"], 2)
    assert shortlist.per_query[0].tolist() == [1, 3]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("text", "query"),
    [
        ("東京都に行きました", "東京"),
        ("Ein GROSSER Straßenzug", "strassenzug"),
        ("мама мыла раму", "РАМУ"),
        ("मैं हिन्दी बोलता हूँ", "हिन्दी"),
        ("ฉันรักแมว", "แมว"),
        ("ﬁve ｗｉｄｅ words", "wide five"),
        ("cafe\u0301", "caf\u00e9"),
    ],
)
def test_other_languages(text: str, query: str, method: Callable[..., Shortlist]) -> None:
    texts = ["hello there", "日本語", text, "हाथी", "привет"]
    assert method(texts, [query], 3).per_query[0].tolist()[0] == 2


def test_words_keep_their_marks() -> None:
    assert words("हिन्दी snake_case x2") == ["हिन्दी", "snake", "case", "x2"]
    assert words("a東b") == ["a", "東", "b"]
    assert words("...") == []


@pytest.mark.parametrize("method", METHODS)
def test_nothing_is_printed(method: Callable[..., Shortlist], capfd: pytest.CaptureFixture[str]) -> None:
    method(corpus(), ["cat"], 3)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("method", METHODS)
def test_texts_without_words_are_never_chosen(method: Callable[..., Shortlist]) -> None:
    assert method(["", "cat", None, "!"], ["cat", "...", "unheard"], 9).positions.tolist() == [1]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("texts", "queries", "k", "error", "match"),
    [
        (["cat"], ["dog"], 3, DataError, "none of the 1 texts shares a word with a query"),
        (["cat"], [], 3, OptionError, "there are no queries"),
        (["cat"], "cat", 3, OptionError, "queries is one text; give a list"),
        (["cat"], ["cat"], 0, OptionError, "k is 0; choose at least 1"),
        ([], ["cat"], 1, DataError, "no text"),
        (["", "!"], ["cat"], 1, DataError, "none of the 2 texts"),
    ],
)
def test_searches_that_cannot_be_made(
    texts: Any, queries: Any, k: int, error: Any, match: str, method: Callable[..., Shortlist]
) -> None:
    with pytest.raises(error, match=match):
        method(texts, queries, k)


def test_what_a_shortlist_says_of_itself() -> None:
    shortlist = Shortlist(np.arange(2000), (), "BM25 similarity to the queries", 1_000_000)
    assert shortlist.describe() == (
        "2,000 of 1,000,000 examples, chosen by BM25 similarity to the queries; the others have no score"
    )
    assert (
        Shortlist(np.arange(2), (), "the ids given", 2).describe()
        == "2 of 2 examples, chosen by the ids given"
    )


# --- ids -----------------------------------------------------------------------------------------------------


@pytest.fixture
def passages() -> Passages:
    rows = [{"id": "a", "text": "abcdef"}, {"id": "b", "text": "xyz"}, {"id": "7", "text": "uvw"}]
    return Passages(RowList(rows, name="data"), byte_level(), max_length=3)


def test_ids_and_positions(passages: Passages, tmp_path: Path) -> None:
    assert from_ids(["b", "a[1]", "b"], passages).positions.tolist() == [1, 2]
    assert from_ids(["a"], passages).positions.tolist() == [0, 1]
    assert from_ids([3, "b"], passages).positions.tolist() == [2, 3]
    path = tmp_path / "ids.txt"
    path.write_text("b\n\n 7 \n")
    shortlist = from_ids(path, passages)
    assert (shortlist.positions.tolist(), shortlist.total) == ([2, 3], 4)
    path.write_text("0\n2\n")
    assert from_ids(path, passages).positions.tolist() == [0, 2]


def test_ids_that_do_not_exist_are_named(passages: Passages, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data has no example with the id 'c', 'a\[9\]'; ids are as in"):
        from_ids(["a", "c", "a[9]"], passages)
    with pytest.raises(DataError, match="'q4' and 2 more"):
        from_ids([f"q{n}" for n in range(7)], passages)
    with pytest.raises(DataError, match="there is no example at position 4; data has 4, 0 to 3"):
        from_ids([4], passages)
    with pytest.raises(OptionError, match="there are no ids; name at least one"):
        from_ids([], passages)
    path = tmp_path / "ids.txt"
    path.write_text("7\n8\n")  # one is an id, so all are
    with pytest.raises(DataError, match="no example with the id '8'"):
        from_ids(path, passages)
    path.write_text("\n")
    with pytest.raises(OptionError, match=r"there are no ids in .*ids\.txt; name at least one"):
        from_ids(path, passages)
    path.write_bytes(b"\xff")
    with pytest.raises(DataError, match="byte 0xff at offset 0"):
        from_ids(path, passages)
    with pytest.raises(DataError, match=r"nowhere cannot be read: .*No such file.*; check the name"):
        from_ids(tmp_path / "nowhere", passages)


def test_data_without_ids_of_their_own() -> None:
    examples = ListedExamples([1, 2, 3], name="train")
    assert from_ids(["train#3"], examples).positions.tolist() == [2]
    twice = ListedExamples([1, 2], name="train", exhibits=lambda index: Exhibit(id="same"))
    with pytest.raises(DataError, match="two examples of train have the id 'same': 0 and 1"):
        from_ids(["same"], twice)
    with pytest.raises(DataError, match="train has 2 examples but 1 exhibits; give one for each"):
        ListedExamples([1, 2], name="train", exhibits=[Exhibit()])
    with pytest.raises(DataError, match="train is empty"):
        ListedExamples([], name="train")
    with pytest.raises(DataError, match="train is a generator; give a map-style data set"):
        ListedExamples((n for n in range(3)), name="train")
