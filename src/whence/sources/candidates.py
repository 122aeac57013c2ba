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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from whence.errors import DataError, OptionError
from whence.sources.examples import Examples
from whence.sources.files import read_text

__all__ = ["Shortlist", "bm25", "from_ids", "tfidf", "words"]

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
    asked = _asked(queries, k)
    corpus = _Corpus(texts, only=set().union(*asked))
    idf = np.log1p((len(corpus) - corpus.frequency + 0.5) / (corpus.frequency + 0.5))
    length = corpus.lengths[corpus.text] / corpus.lengths.mean()
    weights = idf[corpus.word] * corpus.count / (corpus.count + 1.5 * (1 - 0.75 + 0.75 * length))
    rankings = [_best(corpus.similarity(weights, Counter(query)), k) for query in asked]
    return _union(rankings, "BM25 similarity to the queries", len(corpus))


def tfidf(texts: Iterable[str | None], queries: Sequence[str], k: int) -> Shortlist:
    """The ``k`` most similar texts to each query by the cosine of their TF-IDF vectors.

    As `bm25`, with the weights (1 + log tf) · (1 + log((1 + n) / (1 + df))), and with memory for the number of
    different words in every text.

    Example:
        >>> tfidf(["a cat", "a dog", "a fish"], ["which dog?"], k=2).positions
        array([1])
    """
    asked = _asked(queries, k)
    corpus = _Corpus(texts)
    idf = 1 + np.log((1 + len(corpus)) / (1 + corpus.frequency))
    weights = (1 + np.log(corpus.count)) * idf[corpus.word]
    weights /= np.sqrt(np.bincount(corpus.text, weights**2))[corpus.text]
    rankings = []
    for query in asked:  # a query's own norm does not change the order
        factors = {
            w: (1 + np.log(n)) * idf[corpus.words[w]] for w, n in Counter(query).items() if w in corpus.words
        }
        rankings.append(_best(corpus.similarity(weights, factors), k))
    return _union(rankings, "TF-IDF similarity to the queries", len(corpus))


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
    given: list[str | int] = (
        [line.strip() for line in read_text(ids).splitlines() if line.strip()]
        if isinstance(ids, Path)
        else list(ids)
    )
    if not given:
        where = f" in {ids}" if isinstance(ids, Path) else ""
        raise OptionError(f"there are no ids{where}; name at least one example")
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


class _Corpus:
    """How often each text holds each word (those in ``only``), as a sparse matrix; refused where it would be empty.

    Attributes:
        words: the number of each word.
        lengths: the number of words in each text.
        text, word, count: of each entry: the text's position, the word's number, and how often the text holds it.
        frequency: how many texts hold each word.
    """

    def __init__(self, texts: Iterable[str | None], only: Iterable[str] | None = None) -> None:
        self.words = {word: number for number, word in enumerate(sorted(only or ()))}
        lengths, sizes, numbers, counts = array("q"), array("q"), array("i"), array("i")
        for text in texts:
            found = words(text or "")
            counted = Counter(found if only is None else (word for word in found if word in self.words))
            # In the words' order, so that equal texts have equal sums.
            for number, count in sorted(
                (self.words.setdefault(word, len(self.words)), count) for word, count in counted.items()
            ):
                numbers.append(number)
                counts.append(count)
            sizes.append(len(counted))
            lengths.append(len(found))
        if not counts:
            raise _no_common_word(len(lengths))
        self.lengths, self.word, self.count = np.asarray(lengths), np.asarray(numbers), np.asarray(counts)
        self.text = np.repeat(np.arange(len(lengths)), np.asarray(sizes))
        self.frequency = np.bincount(self.word, minlength=len(self.words))

    def __len__(self) -> int:
        return len(self.lengths)

    def similarity(
        self, weights: npt.NDArray[np.float64], factors: Mapping[str, float]
    ) -> npt.NDArray[np.float64]:
        """For each text, the sum of its entries' weights times their words' factors."""
        by_word = np.zeros(len(self.words))
        by_word[[self.words[word] for word in factors]] = list(factors.values())
        return np.bincount(self.text, weights * by_word[self.word], len(self)).astype(np.float64)


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


def _asked(queries: Sequence[str], k: int) -> list[list[str]]:
    """The queries' words."""
    if isinstance(queries, str):
        raise OptionError("queries is one text; give a list of texts")
    if len(queries) == 0:
        raise OptionError("there are no queries to compare texts with; give at least one")
    if k < 1:
        raise OptionError(f"k is {k}; choose at least 1 example for each query")
    return [words(query) for query in queries]
