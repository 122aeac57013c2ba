"""Shortlists: which examples of a large corpus are worth scoring.

Influence costs a gradient per example; a text search only reads them. But it finds examples by the words they
share with the queries, which is not influence: what it leaves out may matter, has no score, and a `Shortlist`
says so.
"""

from __future__ import annotations

import re
import unicodedata
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from whence.errors import DataError, OptionError
from whence.libraries import load_library
from whence.sources.examples import Examples
from whence.sources.files import read_text

__all__ = ["Shortlist", "bm25", "from_ids", "read_ids", "tfidf", "words"]

Positions = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Shortlist:
    """Examples chosen for scoring.

    Attributes:
        positions: of the chosen examples, ascending.
        per_query: for each query, its own choice, best first; empty where the choice was the user's.
        method: how they were chosen, in words.
        total: examples there were to choose from.
    """

    positions: Positions
    per_query: tuple[Positions, ...]
    method: str
    total: int

    def __len__(self) -> int:
        return len(self.positions)

    def describe(self) -> str:
        """What was chosen and what that means, in a sentence.

        Example:
            >>> bm25(["a cat", "a dog", "a fish"], ["which cat?"], k=2).describe()
            '1 of 3 examples, chosen by BM25 similarity to the queries; the others have no score'
        """
        ending = "; the others have no score" if len(self) < self.total else ""
        noun = "example" if self.total == 1 else "examples"
        return f"{len(self):,} of {self.total:,} {noun}, chosen by {self.method}{ending}"


def bm25(texts: Iterable[str | None], queries: Sequence[str], k: int) -> Shortlist:
    """The ``k`` most similar texts to each query by BM25 (Lucene's variant, k₁ = 1.5, b = 0.75).

    The score of a text t is the sum over the query's words w of idf(w) · tf / (tf + k₁ (1 − b + b |t| / mean |t|)),
    where tf is how often t holds w, idf(w) = log(1 + (n − df + ½) / (df + ½)), and df of the n texts hold w.
    Texts are read once, one at a time; only the counts of the queries' words are kept. A text that shares no
    word with a query is never chosen for it; among equal scores, earlier texts come first.

    Args:
        texts: the examples' texts, in order.
        queries: the queries' texts, prompt and completion.
        k: texts for each query; the shortlist is the union.
    """
    asked = [words(query) for query in _checked(queries, k)]
    corpus = _Counts({word for query in asked for word in query})
    for text in texts:
        corpus.add(words(text or ""))
    rankings = [_best(corpus.bm25(query), k) for query in asked]
    return _union(rankings, "BM25 similarity to the queries", len(corpus))


def tfidf(texts: Iterable[str | None], queries: Sequence[str], k: int) -> Shortlist:
    """The ``k`` most similar texts to each query by the cosine of their TF-IDF vectors.

    As `bm25`, with a different weighting, and with memory for the number of different words in every text.

    Example:
        >>> tfidf(["a cat", "a dog", "a fish"], ["which dog?"], k=2).positions
        array([1])
    """
    library = load_library("sklearn.feature_extraction.text", "candidates", "for a text search")
    asked = _checked(queries, k)
    vectorizer = library.TfidfVectorizer(analyzer=words, sublinear_tf=True)
    try:
        corpus = vectorizer.fit_transform(text or "" for text in texts)
    except ValueError as error:  # no text has a word
        raise DataError(
            "no text of the training data holds a word; a text search cannot choose any"
        ) from error
    similarities = (vectorizer.transform(asked) @ corpus.T).toarray()
    rankings = [_best(row, k) for row in similarities]
    return _union(rankings, "TF-IDF similarity to the queries", corpus.shape[0])


def from_ids(ids: Iterable[str | int] | Path, source: Examples) -> Shortlist:
    """The examples with these ids, or at these positions.

    Args:
        ids: ids (texts), positions (whole numbers, from 0), or a file with one per line. In a file, lines
            are ids; they are positions if none is an id and all are whole numbers. The id of a document that
            was cut up stands for all its passages.
        source: the examples.

    Example:
        >>> from whence.sources import ListedExamples
        >>> from_ids(["toy#2"], ListedExamples([0, 1, 2], name="toy")).positions
        array([1])
    """
    given = read_ids(ids) if isinstance(ids, Path) else list(ids)
    if not given:
        raise OptionError("no ids were given; name at least one example")
    found = [[id] if isinstance(id, int) else list(source.find(id)) for id in given]
    if isinstance(ids, Path) and not any(found) and all(re.fullmatch("[0-9]+", str(id)) for id in given):
        found = [[int(id)] for id in given]
    outside = [p for hits in found for p in hits if not 0 <= p < len(source)]
    if outside:
        raise DataError(
            f"there is no example at position {outside[0]}; {source.name} has {len(source):,}, 0 to {len(source) - 1:,}"
        )
    unknown = [repr(id) for id, hits in zip(given, found, strict=True) if not hits]
    if unknown:
        more = f" and {len(unknown) - 5} more" if len(unknown) > 5 else ""
        raise DataError(
            f"{source.name} has no example with the id {', '.join(unknown[:5])}{more}; ids are as in the data's "
            "'id' field, a file's path, or name#row"
        )
    positions = np.unique(np.array([p for hits in found for p in hits], dtype=np.int64))
    return Shortlist(positions, (), "the ids given", len(source))


def read_ids(path: Path) -> list[str | int]:
    """The lines of a file, without empty ones."""
    ids: list[str | int] = [line.strip() for line in read_text(path).splitlines() if line.strip()]
    if not ids:
        raise DataError(f"{path} holds no ids; write one per line")
    return ids


# --- words -----------------------------------------------------------------------------------------------


def words(text: str) -> list[str]:
    """A text's words for searching: case and width folded; pairs of characters where a script has no spaces.

    Example:
        >>> words("Le Café, 東京都")
        ['le', 'café', '東京', '京都']
    """
    if text.isascii():  # most of most corpora, and several times faster
        return re.findall("[a-z0-9]+", text.lower())
    found: list[str] = []
    word, unspaced = _patterns()
    for run in word.findall(unicodedata.normalize("NFKC", text).casefold().replace("_", " ")):
        if run.isascii():
            found.append(run)
            continue
        for part in unspaced.split(run):  # the split keeps the runs without spaces, at odd places
            if not part:
                continue
            if unspaced.fullmatch(part) and len(part) > 1:
                found += [part[i : i + 2] for i in range(len(part) - 1)]
            else:
                found.append(part)
    return found


@cache
def _patterns() -> tuple[re.Pattern[str], re.Pattern[str]]:
    # Python's \w leaves out combining marks, and with them the vowels of Hindi, Tamil or Thai.
    marks = "".join(c for c in map(chr, range(0x300, 0x10000)) if unicodedata.category(c)[0] == "M")
    unspaced = (
        "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff"  # Thai, Lao, Burmese, Khmer
        "\u3005-\u3007\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"  # kana, Han
    )
    return re.compile(f"\\w+(?:[{re.escape(marks)}]+\\w*)*"), re.compile(f"([{unspaced}]+)")


# --- parts -----------------------------------------------------------------------------------------------


class _Counts:
    """How often each text of a corpus holds some words, and how long it is: all that BM25 needs to know."""

    def __init__(self, vocabulary: set[str]) -> None:
        self._lengths = array("i")
        self._holders = {word: array("q") for word in vocabulary}  # the texts with the word
        self._counts = {word: array("i") for word in vocabulary}  # how often each of them holds it

    def __len__(self) -> int:
        return len(self._lengths)

    def add(self, text: list[str]) -> None:
        for word, count in Counter(word for word in text if word in self._holders).items():
            self._holders[word].append(len(self))
            self._counts[word].append(count)
        self._lengths.append(len(text))

    def bm25(self, query: list[str], k1: float = 1.5, b: float = 0.75) -> npt.NDArray[np.float64]:
        scores, lengths = np.zeros(len(self)), np.asarray(self._lengths)
        for word in query:
            holders, counts = np.asarray(self._holders[word]), np.asarray(self._counts[word])
            if len(holders):
                idf = np.log1p((len(self) - len(holders) + 0.5) / (len(holders) + 0.5))
                relative = lengths[holders] / lengths.mean()
                scores[holders] += idf * counts / (counts + k1 * (1 - b + b * relative))
        return scores


def _best(scores: npt.NDArray[Any], k: int) -> Positions:
    """The positions of the ``k`` highest scores above 0; among equals, the earlier first."""
    order = np.argsort(-scores, kind="stable")[:k]
    chosen: Positions = order[scores[order] > 0].astype(np.int64)
    return chosen


def _union(rankings: list[Positions], method: str, total: int) -> Shortlist:
    positions = np.unique(np.concatenate(rankings))
    if len(positions) == 0:
        raise _no_common_word(total)
    return Shortlist(positions, tuple(rankings), method, total)


def _no_common_word(total: int) -> DataError:
    if total == 0:
        return DataError("there are no texts to choose from; give at least one")
    return DataError(
        f"none of the {total:,} texts shares a word with a query; a text search cannot choose any: name the "
        "examples by id, or score all"
    )


def _checked(queries: Sequence[str], k: int) -> Sequence[str]:
    if isinstance(queries, str):
        raise OptionError("queries is one text; give a list of texts")
    if len(queries) == 0:
        raise OptionError("there are no queries to compare texts with; give at least one")
    if k < 1:
        raise OptionError(f"k is {k}; choose at least 1 example for each query")
    return queries
