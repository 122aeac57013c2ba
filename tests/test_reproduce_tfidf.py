"""Bag-of-words influence: the library against the closed form, the closed form against its limit, TF-IDF."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dense import dense_gauss_newton
from reproduction import tfidf
from reproduction.bag_of_words import (
    BagOfWords,
    Documents,
    agreement,
    closed_form_influence,
    largest_eigenvalue,
    library_influence,
    passages,
    tf_idf,
    topics,
)
from reproduction.bench import Bench
from whence import GaussNewton, LanguageModeling, ParamVector
from whence.errors import DataError, OptionError
from whence.scoring.similarity import cosines

TEXTS = [
    text.split()
    for text in (
        "the with statement wraps a block with methods of a context manager",
        "the pass statement does nothing and is a placeholder for a block",
        "a lambda expression makes an anonymous function of one expression",
        "the global statement",
    )
]


@pytest.fixture(scope="module")
def documents() -> Documents:
    return Documents.of(TEXTS)


def hessian(documents: Documents) -> Tensor:
    return torch.diag(documents.p) - torch.outer(documents.p, documents.p)


# --- documents ---------------------------------------------------------------------------------------------------


def test_counts_frequencies_and_document_frequencies(documents: Documents) -> None:
    words = sorted({word for text in TEXTS for word in text})
    assert documents.counts.shape == (4, len(words))
    a, statement = words.index("a"), words.index("statement")
    assert documents.lengths.tolist() == [12, 12, 10, 3]
    assert float(documents.tf[0, a]) == 2 / 12
    assert float(documents.p[a]) == pytest.approx(5 / 37)
    assert float(documents.df[a]) == 0.75
    assert float(documents.df[statement]) == 0.75
    assert float(documents.p.sum()) == pytest.approx(1.0)


def test_examples_predict_every_token_once(documents: Documents) -> None:
    task = LanguageModeling()
    for row, example in zip(documents.counts, documents.examples(), strict=True):
        assert task.count_terms(example) == int(row.sum())
        batch = task.collate([example])
        targets = batch.targets[batch.targets != -100]
        assert torch.bincount(targets, minlength=len(row)).tolist() == row.long().tolist()


@pytest.mark.parametrize(
    "counts", [[[1.0, 0.0], [1.0, 0.0]], [[1.0, 1.0], [0.0, 0.0]]], ids=["word", "document"]
)
def test_empty_documents_and_words_are_refused(counts: list[list[float]]) -> None:
    with pytest.raises(DataError, match="leave"):
        Documents(torch.tensor(counts, dtype=torch.float64))


def test_passages_have_one_length_and_stay_within_a_text() -> None:
    texts = [[f"{name}{k}" for k in range(size)] for name, size in (("a", 7), ("b", 2), ("c", 6))]
    assert passages(texts, 3, most=10) == [
        ["a0", "a1", "a2"],
        ["a3", "a4", "a5"],
        ["c0", "c1", "c2"],
        ["c3", "c4", "c5"],
    ]
    assert passages(texts, 3, most=2) == [["a0", "a1", "a2"], ["c3", "c4", "c5"]]
    with pytest.raises(DataError, match="shorter"):
        passages(texts, 7, most=10)
    with pytest.raises(OptionError, match="at least 1 word"):
        passages(texts, 0, most=10)


def test_the_corpus_is_python_s_language_reference() -> None:
    found = topics()
    assert len(found) > 60
    assert all(found)
    assert sum(map(len, found)) > 30_000
    assert {"lambda", "yield", "statement"} <= {word for text in found for word in text}


def test_without_scikit_learn_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.feature_extraction.text", None)
    with pytest.raises(OptionError, match=r'sklearn is needed.*"whence\[reproduce\]"'):
        Documents.of(TEXTS)


# --- influence ---------------------------------------------------------------------------------------------------


def test_the_model_s_gauss_newton_hessian_and_gradients_are_those_of_the_paper(documents: Documents) -> None:
    gnh = GaussNewton(BagOfWords(documents.p).eval(), LanguageModeling(), documents.examples())
    torch.testing.assert_close(dense_gauss_newton(gnh).matrix, hessian(documents))
    v = torch.linspace(-1, 2, gnh.num_parameters, dtype=torch.float64)
    torch.testing.assert_close(gnh.matvec(ParamVector({"x": v}))["x"], hessian(documents) @ v)
    gradients = gnh.gradients(documents.examples())["x"]
    torch.testing.assert_close(gradients, documents.p - documents.tf)


@pytest.mark.parametrize("damping", [0.5, 1e-2, 1e-4, 1e-6])
def test_library_and_closed_form_agree_to_rounding(documents: Documents, damping: float) -> None:
    (library,) = library_influence(documents, [damping])
    exact = closed_form_influence(documents, damping)
    assert float((library - exact).abs().max()) <= 1e-8
    gradients = documents.p - documents.tf
    system = hessian(documents) + damping * torch.eye(len(documents.p), dtype=torch.float64)
    dense = gradients @ torch.linalg.solve(system, gradients.T)
    assert float((dense - exact).abs().max()) <= 1e-8 * float(dense.abs().max())


def test_the_printed_sign_of_the_rank_one_term_is_wrong(documents: Documents) -> None:
    (library,) = library_influence(documents, [0.02])
    wrong = closed_form_influence(documents, 0.02, printed_sign=True)
    assert float((library - wrong).abs().max()) > 1e-2


def test_the_limit_is_the_paper_s_less_one(documents: Documents) -> None:
    limit = closed_form_influence(documents, 0.0)
    torch.testing.assert_close(limit, documents.tf / documents.p @ documents.tf.T - 1)
    # …and the damped one tends to it linearly.
    errors = [float((closed_form_influence(documents, d) - limit).abs().max()) for d in (1e-6, 1e-7)]
    assert errors[1] == pytest.approx(errors[0] / 10, rel=1e-2)


def test_influences_of_the_training_documents_cancel(documents: Documents) -> None:
    """Weighted by length, the gradients sum to zero at the trained parameters: so do the influences."""
    total = closed_form_influence(documents, 0.01) @ documents.lengths
    torch.testing.assert_close(total, torch.zeros_like(total), atol=1e-12, rtol=0)


def test_largest_eigenvalue(documents: Documents) -> None:
    exact = float(torch.linalg.eigvalsh(hessian(documents))[-1])
    assert largest_eigenvalue(documents.p) == pytest.approx(exact)
    assert largest_eigenvalue(documents.p) == largest_eigenvalue(documents.p)
    uniform = torch.full((7,), 1 / 7, dtype=torch.float64)
    assert largest_eigenvalue(uniform) == pytest.approx(1 / 7)


# --- TF-IDF ------------------------------------------------------------------------------------------------------


def test_similarities_are_those_of_scikit_learn_and_of_the_paper(documents: Documents) -> None:
    from sklearn.feature_extraction.text import TfidfVectorizer

    found = tf_idf(documents)
    tf, idf = documents.tf, documents.df.rsqrt()
    torch.testing.assert_close(found["sqrt"], (tf * idf) @ (tf * idf).T)
    torch.testing.assert_close(found["tf"], tf @ tf.T)
    shipped = TfidfVectorizer(analyzer=list).fit_transform(TEXTS)  # with its own normalisation: cosines
    torch.testing.assert_close(
        cosines(found["scikit-learn"]), torch.from_numpy((shipped @ shipped.T).toarray())
    )


def test_influence_is_tf_idf_where_the_paper_says_so() -> None:
    """Words drawn independently, all rare, equal lengths: DF → |d|p, and the factor is |d|."""
    generator = torch.Generator().manual_seed(0)
    length, words = 4, 400
    drawn = torch.randint(words, (1500, length), generator=generator)
    counts = torch.zeros(1500, words, dtype=torch.float64).scatter_add_(
        1, drawn, torch.ones_like(drawn, dtype=torch.float64)
    )
    documents = Documents(counts)
    influence = closed_form_influence(documents, 0.0)[:200, :200]
    similarity = length * tf_idf(documents)["sqrt"][:200, :200]
    found = agreement(influence, similarity)
    assert found["pearson"] > 0.999
    alike = similarity > 0
    ratio = (influence + 1)[alike] / similarity[alike]
    assert 0.9 < float(ratio.min()) <= float(ratio.max()) <= 1.0 + 1e-12  # DF ≤ |d|p always


def test_agreement_is_over_pairs_of_different_documents() -> None:
    first = torch.tensor([[99.0, 1.0, 2.0], [1.0, -50.0, 4.0], [2.0, 4.0, 7.0]])
    second = first.exp()
    second.fill_diagonal_(0.0)
    found = agreement(first, second)
    assert found["spearman"] == pytest.approx(1.0)
    assert found["pearson"] == pytest.approx(np.corrcoef([1, 2, 4], np.exp([1, 2, 4]))[0, 1])


# --- the finding -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return tfidf.measure(Bench("quick", tmp_path_factory.mktemp("tfidf")))


def test_the_conclusion(numbers: dict[str, Any]) -> None:
    assert tfidf.conclude(numbers).holds is True
    assert max(numbers["library"]["largest_error"]) <= 1e-8
    assert max(numbers["library"]["largest_error_of_the_printed_formula"]) > 1e-3
    short, long = numbers["by_length"]
    assert short["length"] < long["length"]
    assert short["tokens_of_common_words"] < long["tokens_of_common_words"]
    assert short["agreement"]["sqrt"]["pearson"] > long["agreement"]["sqrt"]["pearson"]
    damped, limit = numbers["by_damping"][0], numbers["by_damping"][-1]
    assert damped["words_below_damping"] > limit["words_below_damping"] == long["words_below_damping"] == 0
    assert limit["agreement"]["sqrt"]["pearson"] == pytest.approx(
        long["agreement"]["sqrt"]["pearson"], abs=1e-3
    )
    assert damped["agreement"]["sqrt"]["pearson"] < limit["agreement"]["sqrt"]["pearson"]
    drawn = tfidf.draw(numbers)
    assert len(drawn.axes) == 4  # three panels and a colour bar
    assert all(panel.get_xlabel() and panel.get_ylabel() for panel in drawn.axes[:3])


def test_the_verdict_follows_the_numbers(numbers: dict[str, Any]) -> None:
    reference = numbers["by_length"][-1]
    inexact = {**numbers, "library": {**numbers["library"], "largest_error": [1e-7]}}
    assert tfidf.conclude(inexact).holds is False
    for name, value in (("sqrt", 0.85), ("tf", 0.999)):
        changed = {**reference["agreement"], name: {"pearson": value, "spearman": 0.5}}
        assert tfidf.conclude({**numbers, "by_length": [{**reference, "agreement": changed}]}).holds is False
