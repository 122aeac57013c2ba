"""The bag-of-words model of the paper's appendix: documents, influence by the library and in closed form, TF-IDF.

The model draws every token independently from ``p = softmax(x)``, its parameters the logits x. Each token of a document
is a term, so the Gauss-Newton Hessian is ``H = Diag(p) - ppᵀ`` exactly, and a document's gradient (of its mean loss per
token) is ``p - TF``. With ``s = Σ_t (TF - p)_t/(p_t + λ)`` and ``S = Σ_t p_t/(p_t + λ)``,

    score(d, d') = Σ_t (TF - p)_t (TF' - p)_t / (p_t + λ)  +  λ s s' / S    →    Σ_t TF_t TF'_t / p_t - 1

as λ → 0. Derived in docs/math.md, 'Influence in a bag-of-words model'.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator as SparseOperator
from scipy.sparse.linalg import eigsh
from scipy.stats import spearmanr
from torch import Tensor, nn

from whence.demo.corpus import corpus
from whence.errors import DataError, OptionError
from whence.libraries import load_library
from whence.model.gauss_newton import GaussNewton
from whence.scoring import Scorer
from whence.tasks import LanguageModeling
from whence.vectors import ParamVector

__all__ = [
    "COMMON",
    "BagOfWords",
    "Documents",
    "agreement",
    "closed_form_influence",
    "largest_eigenvalue",
    "library_influence",
    "passages",
    "tf_idf",
    "topics",
]

COMMON = 0.1  #: a word is common where |d|p exceeds this: DF ≈ |d|p is off by about 5% from here


# --- documents and model ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Documents:
    """Counts of words in documents, ``[documents, words]`` in float64; every word occurs, no document is empty."""

    counts: Tensor

    def __post_init__(self) -> None:
        if self.counts.ndim != 2 or not bool((self.counts.sum(1) > 0).all()):
            raise DataError(
                f"a document is empty, or counts {tuple(self.counts.shape)} are no matrix; leave it out"
            )
        if not bool((self.counts.sum(0) > 0).all()):
            raise DataError("a word occurs in no document; leave its column out")

    @classmethod
    def of(cls, tokens: Sequence[Sequence[str]]) -> Documents:
        """Count the words of documents given as lists of them, with scikit-learn's `CountVectorizer`."""
        counts = _text().CountVectorizer(analyzer=list).fit_transform(tokens)
        return cls(torch.from_numpy(counts.toarray().astype(np.float64)))

    @property
    def lengths(self) -> Tensor:
        """|d|."""
        return self.counts.sum(1)

    @property
    def tf(self) -> Tensor:
        """``count(t, d) / |d|``."""
        return self.counts / self.lengths.unsqueeze(1)

    @property
    def p(self) -> Tensor:
        """The trained model's distribution: the share of each word in all tokens."""
        return self.counts.sum(0) / self.counts.sum()

    @property
    def df(self) -> Tensor:
        """The share of documents with the word in them."""
        return (self.counts > 0).double().mean(0)

    @property
    def common(self) -> Tensor:
        """Which words are too frequent for ``DF ≈ |d|p``."""
        return self.lengths.mean() * self.p > COMMON

    def examples(self) -> list[dict[str, Tensor]]:
        """For `LanguageModeling`: all tokens are predicted. The first is there to predict the second, and is not."""
        words = torch.arange(self.counts.shape[1])
        rows = [torch.repeat_interleave(words, row.long()) for row in self.counts]
        return [{"input_ids": torch.cat([row[:1], row])} for row in rows]


class BagOfWords(nn.Module):
    """Every token is drawn from the same distribution ``softmax(x)``, whatever came before.

    Args:
        p: the distribution; training on documents ends at the words' frequencies.
    """

    def __init__(self, p: Tensor) -> None:
        super().__init__()
        self.x = nn.Parameter(p.log())

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits ``[n, L, words]``."""
        return self.x.repeat(*input_ids.shape, 1)


def topics() -> list[list[str]]:
    """The words of every topic of Python's language reference, cut as scikit-learn cuts them."""
    analyse = _text().CountVectorizer().build_analyzer()
    found = [analyse("\n".join(paragraphs)) for paragraphs in corpus().values()]
    return [words for words in found if words]


def passages(texts: Sequence[Sequence[str]], length: int, *, most: int) -> list[list[str]]:
    """Pieces of exactly ``length`` words, each within one text; at most ``most`` of them, evenly spread.

    Args:
        texts: lists of words.
        length: words in a piece; what remains at the end of a text is left out.
        most: how many to keep.
    """
    if length < 1 or most < 2:
        raise OptionError(f"length is {length} and most is {most}; give at least 1 word and 2 passages")
    pieces = [
        list(text[start : start + length])
        for text in texts
        for start in range(0, len(text) - length + 1, length)
    ]
    if len(pieces) < 2:
        raise DataError(f"{len(texts)} texts hold {len(pieces)} passages of {length} words; use shorter ones")
    return [pieces[k] for k in np.linspace(0, len(pieces) - 1, min(most, len(pieces))).astype(int)]


def _text() -> Any:
    return load_library("sklearn.feature_extraction.text", "reproduce", "to count words")


# --- influence and similarity ----------------------------------------------------------------------------


def library_influence(documents: Documents, dampings: Sequence[float]) -> list[Tensor]:
    """``score(d, d')`` of all documents by the library: its operator made dense, solved exactly, and scored.

    For a small vocabulary: the operator is applied to every unit vector.

    Args:
        documents: also those that the model was trained on.
        dampings: λ, each of them giving scores ``[documents, documents]``.
    """
    gnh = GaussNewton(BagOfWords(documents.p).eval(), LanguageModeling(), documents.examples())
    identity = torch.eye(gnh.num_parameters, dtype=torch.float64)
    hessian = gnh.matvec(ParamVector({"x": identity}, columns=len(identity)))["x"]
    gradients = gnh.gradients(documents.examples())["x"]
    scores = []
    for damping in dampings:
        solved = torch.linalg.solve(hessian + damping * identity, gradients.T).T.contiguous()
        scorer = Scorer(gnh, ParamVector({"x": solved}, columns=len(solved)))
        scores.append(scorer.score(torch.arange(len(solved))))
    return scores


def closed_form_influence(documents: Documents, damping: float, *, printed_sign: bool = False) -> Tensor:
    """The same in closed form; ``damping=0`` is the limit.

    Args:
        documents: also those that the model was trained on.
        damping: λ.
        printed_sign: with a minus before the rank-one term, as the paper prints it.
    """
    centred, shifted = documents.tf - documents.p, documents.p + damping
    weighted = centred / shifted
    score = weighted @ centred.T
    if damping > 0:
        # (p/(p+λ))ᵀg = -λs, since gᵀ1 = 0: without the cancellation
        sums = weighted.sum(1)
        rank_one = damping * torch.outer(sums, sums) / (documents.p / shifted).sum()
        score = score - rank_one if printed_sign else score + rank_one
    return score


def largest_eigenvalue(p: Tensor) -> float:
    """λmax of ``Diag(p) - ppᵀ``."""
    weights = p.numpy()
    product = SparseOperator(
        (len(weights),) * 2, matvec=lambda v: weights * (v - weights @ v), dtype=np.float64
    )
    start = (weights == weights.max()).astype(np.float64)  # ARPACK's own start is random
    start[weights.argmin()] = 0.0  # never (1, …, 1), which H takes to zero
    return float(eigsh(product, k=1, v0=start, return_eigenvectors=False)[0])


def tf_idf(documents: Documents) -> dict[str, Tensor]:
    """Similarities of the documents, ``Σ_t w_t² TF_t TF'_t``, under three weights."""
    tf, tokens = documents.tf, documents.counts.numpy()
    logarithmic = _text().TfidfTransformer(norm=None).fit_transform(tokens).toarray()
    scaled = torch.from_numpy(logarithmic) / documents.lengths.unsqueeze(1)
    return {"sqrt": (tf / documents.df) @ tf.T, "scikit-learn": scaled @ scaled.T, "tf": tf @ tf.T}


def agreement(first: Tensor, second: Tensor) -> dict[str, float]:
    """Pearson's and Spearman's correlation over all pairs of different documents."""
    rows, columns = torch.triu_indices(len(first), len(first), 1)
    x, y = first[rows, columns].numpy(), second[rows, columns].numpy()
    return {"pearson": float(np.corrcoef(x, y)[0, 1]), "spearman": float(spearmanr(x, y).statistic)}
