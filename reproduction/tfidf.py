"""Influence in a bag-of-words model is TF-IDF: the paper's appendix, through the library and on real text.

The closed form against the library's operator on a small vocabulary (`reproduction.bag_of_words`); then influence
against three similarities of passages of Python's language reference: TF-IDF with the weight √(1/DF) as the paper
has it, with scikit-learn's logarithm, and without a weight; by the passages' length, by damping, by words' frequency.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from reproduction.bag_of_words import (
    Documents,
    agreement,
    closed_form_influence,
    largest_eigenvalue,
    library_influence,
    passages,
    tf_idf,
    topics,
)
from reproduction.finding import Finding, Profile, check_profile
from whence.report.drawing import COLOURS, figure
from whence.scoring.similarity import cosines

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["run"]

_LENGTHS = {"quick": (20, 50), "offline": (10, 20, 50, 100, 200, 400), "paper": (10, 20, 50, 100, 200, 400)}
_MOST_PASSAGES = {"quick": 300, "offline": 1000, "paper": 1000}
#: Passages whose influence goes through the library's operator.
_SMALL = {"quick": 10, "offline": 20, "paper": 20}
_REFERENCE = 50  # tokens in a passage, where not said otherwise
_CONDITION_NUMBERS = (20.0, 200.0, 2e3, 2e4, 2e5)
_LARGEST_ERROR = 1e-8
_AGREES = 0.9  # Pearson's correlation from which on influence counts as TF-IDF
_COMMON = 0.1  # a word is common where |d|p exceeds this: DF ≈ |d|p is off by about 5% from here
_SHOWN = 3000  # pairs in the scatter plot
_NAMES = {"sqrt": "√(1/DF)", "scikit-learn": "log IDF (scikit-learn)", "tf": "TF alone"}


def run(profile: Profile, *, generator: torch.Generator) -> tuple[Finding, Figure]:
    """Compare influence with its closed form, and with TF-IDF on Python's language reference.

    Args:
        profile: ``"quick"`` for a few seconds; ``"offline"`` and ``"paper"`` for all lengths of passages.
        generator: chooses the pairs that the figure shows; the numbers have no randomness.
    """
    check_profile(profile)
    begin = time.perf_counter()
    texts, most = topics(), _MOST_PASSAGES[profile]
    small = Documents.of(passages(texts, 20, most=_SMALL[profile]))
    lengths = {length: Documents.of(passages(texts, length, most=most)) for length in _LENGTHS[profile]}
    reference = lengths[_REFERENCE]
    numbers = {
        "library": _compare_with_library(small),
        "by_length": [{"length": length, **_compare(documents)} for length, documents in lengths.items()],
        "topics": _compare(Documents.of(texts)),
        "by_damping": _by_damping(reference),
        "by_frequency": _by_frequency(reference),
    }
    drawn = _draw(reference, numbers, generator)
    finding = Finding(
        name="tfidf",
        title="Influence in a bag-of-words model is TF-IDF",
        claim=(
            "In a bag-of-words model, influence between documents of equal length |d| is, for λ → 0 and words with "
            "|d|p ≪ 1, the TF-IDF similarity with the weight √(1/DF), up to a factor."
        ),
        measured=_measured(numbers),
        holds=_verdict(numbers),
        numbers=numbers,
        profile=profile,
        seconds=time.perf_counter() - begin,
        errata=_errata(numbers),
    )
    return finding, drawn


def _compare_with_library(documents: Documents) -> dict[str, Any]:
    """Largest errors of the closed form, and of the printed one, against the library's operator."""
    lambda_max = largest_eigenvalue(documents.p)
    dampings = [lambda_max / kappa for kappa in _CONDITION_NUMBERS]
    errors, printed, largest = [], [], []
    for damping, library in zip(dampings, library_influence(documents, dampings), strict=True):
        exact = closed_form_influence(documents, damping)
        wrong = closed_form_influence(documents, damping, printed_sign=True)
        errors.append(float((library - exact).abs().max()))
        printed.append(float((library - wrong).abs().max()))
        largest.append(float(library.abs().max()))
    return {
        "documents": len(documents.counts),
        "words": documents.counts.shape[1],
        "condition_numbers": list(_CONDITION_NUMBERS),
        "largest_error": errors,
        "largest_error_of_the_printed_formula": printed,
        "largest_score": largest,
    }


def _compare(documents: Documents) -> dict[str, Any]:
    """Influence in the limit against the three similarities; also both as cosines."""
    influence = closed_form_influence(documents, 0.0)
    similarities = tf_idf(documents)
    expected = documents.p * documents.lengths.mean()
    return {
        "documents": len(documents.counts),
        "words": documents.counts.shape[1],
        "tokens_of_common_words": float(documents.p[expected > _COMMON].sum()),
        "agreement": {name: agreement(influence, other) for name, other in similarities.items()},
        "agreement_of_cosines": {
            name: agreement(cosines(influence), cosines(other)) for name, other in similarities.items()
        },
    }


def _by_damping(documents: Documents) -> list[dict[str, Any]]:
    lambda_max, similarities = largest_eigenvalue(documents.p), tf_idf(documents)
    rows = []
    for kappa in (*_CONDITION_NUMBERS, None):
        damping = 0.0 if kappa is None else lambda_max / kappa
        influence = closed_form_influence(documents, damping)
        rows.append(
            {
                "condition_number": kappa,
                "damping": damping,
                "words_below_damping": float((documents.p < damping).double().mean()),
                "agreement": {name: agreement(influence, other) for name, other in similarities.items()},
            }
        )
    return rows


def _by_frequency(documents: Documents) -> dict[str, Any]:
    """Where the agreement is lost: by rare and common words alone, and by what DF would be for independent words."""
    tf, p, df = documents.tf, documents.p, documents.df
    centred, length = tf - p, float(documents.lengths.mean())
    common = length * p > _COMMON
    parts: dict[str, Any] = {}
    for name, kept in (("rare", ~common), ("common", common)):
        influence = (centred[:, kept] / p[kept]) @ centred[:, kept].T
        parts[name] = agreement(influence, (tf[:, kept] / df[kept]) @ tf[:, kept].T)
    independent = 1 - (1 - p) ** length
    parts["with_df_of_independent_words"] = agreement(
        closed_form_influence(documents, 0.0), (tf / independent) @ tf.T
    )
    return {
        "length": length,
        "common_words": int(common.sum()),
        "rare_words": int((~common).sum()),
        "mean_df_over_expected_count": {  # over tokens
            name: float(df[kept].sum() / (length * p[kept].sum()))
            for name, kept in (("rare", ~common), ("common", common))
        },
        "agreement": parts,
    }


def _verdict(numbers: dict[str, Any]) -> bool:
    found = _at_reference(numbers)["agreement"]
    exact = max(numbers["library"]["largest_error"]) <= _LARGEST_ERROR
    best = found["sqrt"]["pearson"] > max(found["scikit-learn"]["pearson"], found["tf"]["pearson"])
    return bool(exact and best and found["sqrt"]["pearson"] >= _AGREES)


def _at_reference(numbers: dict[str, Any]) -> dict[str, Any]:
    return next(row for row in numbers["by_length"] if row["length"] == _REFERENCE)


def _measured(numbers: dict[str, Any]) -> str:
    library, reference = numbers["library"], _at_reference(numbers)
    shortest, longest = numbers["by_length"][0], numbers["by_length"][-1]
    parts = numbers["by_frequency"]["agreement"]
    ratio = numbers["by_frequency"]["mean_df_over_expected_count"]
    default = next(row for row in numbers["by_damping"] if row["condition_number"] == 200.0)

    def both(row: dict[str, Any]) -> str:
        return f"{row['pearson']:.3f} ({row['spearman']:.3f})"

    def three(row: dict[str, Any]) -> str:
        found = row["agreement"]
        return (
            f"√(1/DF) {both(found['sqrt'])}, scikit-learn's log IDF {both(found['scikit-learn'])}, TF alone "
            f"{both(found['tf'])}"
        )

    return (
        f"Through the library's operator, gradients and scores in float64, on {library['documents']} passages of "
        f"{library['words']} different words: library and closed form differ by at most "
        f"{max(library['largest_error']):.0e} in scores up to {max(library['largest_score']):.3g}, for λmax/λ from "
        f"{library['condition_numbers'][0]:.0f} to {library['condition_numbers'][-1]:.0e}. On {reference['documents']} "
        f"passages of {_REFERENCE} words from Python's language reference ({reference['words']:,} different ones), "
        f"λ → 0, Pearson's (Spearman's) correlation with influence over all pairs: {three(reference)}. (The claim "
        f"counts as holding if Pearson's is at least {_AGREES} and the largest of the three.) With √(1/DF) it is "
        f"{both(shortest['agreement']['sqrt'])} for passages of {shortest['length']} words and "
        f"{both(longest['agreement']['sqrt'])} for {longest['length']}, where common words (|d|p > {_COMMON}) are "
        f"{shortest['tokens_of_common_words']:.0%} and {longest['tokens_of_common_words']:.0%} of the tokens. At "
        f"{_REFERENCE} words, DF is on average {ratio['rare']:.2f} of |d|p for the tokens of rare words and "
        f"{ratio['common']:.2f} for those of common ones, and the correlation {both(parts['rare'])} over rare words "
        f"alone, {both(parts['common'])} over common ones alone; with 1 - (1-p)^|d| for DF, as if words did not "
        f"cluster, {both(parts['with_df_of_independent_words'])}. The natural topics, of unequal lengths: "
        f"{three(numbers['topics'])}. At λ = λmax/200, which exceeds the frequency of "
        f"{default['words_below_damping']:.0%} of the words: {three(default)}."
    )


def _errata(numbers: dict[str, Any]) -> tuple[str, ...]:
    library = numbers["library"]
    return (
        "The rank-one term of (H + λ)⁻¹ has a plus: (I - rrᵀ)⁻¹ = I + rrᵀ/(1 - ‖r‖²), as the line above it says; it is "
        "printed with a minus. The constant λ Σ p/(p+λ) is right. With the printed sign scores are off by up to "
        f"{max(library['largest_error_of_the_printed_formula']):.2g} here, where they are up to "
        f"{max(library['largest_score']):.3g}.",
        "The limit is Σ TF·TF/p - 1: the gradients are TF - p, not TF. The constant does not change a correlation, but "
        "it gives influence its sign: documents that share few words have a negative one.",
        "The gradients are |d|(TF - p) and the Hessian |d|(Diag(p) - ppᵀ), as printed; the inverse is taken without "
        "|d|, and the last formula leaves out both. With them it is |d| times as large.",
        "That the rank-one term is O(λ) needs λ ≪ min p, not λ ≪ 1.",
        "DF(d) = 1 - Pr(t ∉ d) is DF(t).",
    )


# --- the figure --------------------------------------------------------------------------------------------------


def _draw(documents: Documents, numbers: dict[str, Any], generator: torch.Generator) -> Figure:
    with figure(1, 3, width=4.9, height=4.4) as (drawn, panels):
        _draw_pairs(panels[0], documents, generator)
        lengths = [row["length"] for row in numbers["by_length"]]
        _draw_agreement(panels[1], lengths, numbers["by_length"])
        panels[1].set_xlabel("words in a passage, |d|")
        panels[1].set_title("λ → 0, by the length of passages")
        damped = [row for row in numbers["by_damping"] if row["condition_number"] is not None]
        _draw_agreement(panels[2], [row["condition_number"] for row in damped], damped)
        panels[2].set_xlabel("λmax / λ")
        panels[2].set_title(f"passages of {_REFERENCE} words, by damping")
        panels[2].legend(loc="center", bbox_to_anchor=(0.5, 0.57), ncols=2)
        drawn.suptitle("Influence in a bag-of-words model of Python's language reference, and TF-IDF")
    return drawn


def _draw_pairs(panel: Axes, documents: Documents, generator: torch.Generator) -> None:
    """Both sides with their constants, so that they agree on the diagonal if DF = |d|p."""
    rows, columns = torch.triu_indices(len(documents.counts), len(documents.counts), 1)
    shown = torch.randperm(len(rows), generator=generator)[:_SHOWN]
    length = float(documents.lengths[0])
    influence = closed_form_influence(documents, 0.0)[rows[shown], columns[shown]] + 1
    similarity = length * tf_idf(documents)["sqrt"][rows[shown], columns[shown]]
    common = (length * documents.p > _COMMON).double()
    part = length * (documents.tf * common / documents.df) @ documents.tf.T
    share = part[rows[shown], columns[shown]] / similarity
    alike = similarity > 0  # pairs without a word in common are at zero on both sides
    points = panel.scatter(
        similarity[alike],
        influence[alike],
        c=share[alike],
        s=6,
        cmap="cividis",
        vmin=0,
        vmax=1,
        rasterized=True,
    )
    low, high = float(similarity[alike].min()), float(influence.max())
    panel.plot([low, high], [low, high], color="black", linewidth=0.9, label="DF = |d| p")
    panel.set_xscale("log")
    panel.set_yscale("log")
    panel.set_xlabel("|d| · Σ TF·TF′/DF   (TF-IDF similarity)")
    panel.set_ylabel("influence + 1 = Σ TF·TF′/p   (λ → 0)")
    panel.set_title(f"{int(alike.sum()):,} pairs of passages of {length:.0f} words")
    panel.figure.colorbar(points, ax=panel, label="part from common words (|d|p > 0.1)", pad=0.01)
    panel.legend(loc="upper left")


def _draw_agreement(panel: Axes, where: Sequence[float], rows: Sequence[dict[str, Any]]) -> None:
    for colour, (name, label) in zip(COLOURS, _NAMES.items(), strict=False):
        for measure, style in (("pearson", "o-"), ("spearman", "s--")):
            values = [row["agreement"][name][measure] for row in rows]
            shown = label if measure == "pearson" else None
            panel.plot(where, values, style, color=colour, label=shown, linewidth=1.6 if shown else 1.0)
    panel.plot([], [], "o-", color="grey", label="Pearson")
    panel.plot([], [], "s--", color="grey", linewidth=1.0, label="Spearman")
    panel.set_xscale("log")
    panel.set_ylim(min(0.0, panel.get_ylim()[0]), 1.02)
    panel.set_ylabel("correlation with influence, over pairs")
