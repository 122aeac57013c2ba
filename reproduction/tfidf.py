"""Influence in a bag-of-words model is TF-IDF: the paper's appendix, through the library and on real text.

The closed form against the library's operator on a small vocabulary (`reproduction.bag_of_words`); then influence
against three similarities of passages of Python's language reference: TF-IDF with the weight √(1/DF) as the paper
has it, with scikit-learn's logarithm, and without a weight; by the passages' length, by damping, by words' frequency.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from reproduction.bag_of_words import (
    COMMON,
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
from reproduction.finding import Conclusion, number
from whence.report.drawing import COLOURS, figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["conclude", "draw", "measure"]

_LENGTHS = {"quick": (20, 50), "offline": (10, 20, 50, 100, 200, 400), "paper": (10, 20, 50, 100, 200, 400)}
_MOST_PASSAGES = {"quick": 300, "offline": 1000, "paper": 1000}
#: Passages whose influence goes through the library's operator.
_SMALL = {"quick": 10, "offline": 20, "paper": 20}
_REFERENCE = 50  # tokens in a passage, where not said otherwise
_CONDITION_NUMBERS = (20.0, 200.0, 2e3, 2e4, 2e5)
_LARGEST_ERROR = 1e-8
_AGREES = 0.9  # Pearson's correlation from which on influence counts as TF-IDF
_SHOWN = 1500  # pairs in the scatter plot
_NAMES = {"sqrt": "√(1/DF)", "scikit-learn": "log IDF (scikit-learn)", "tf": "TF alone"}


# --- measuring -------------------------------------------------------------------------------------------


def measure(bench: Bench) -> dict[str, Any]:
    """Influence against its closed form, and against TF-IDF; only the pairs to be shown are random."""
    texts, most = topics(), _MOST_PASSAGES[bench.profile]
    lengths = {n: Documents.of(passages(texts, n, most=most)) for n in _LENGTHS[bench.profile]}
    reference = lengths[_REFERENCE]
    return {
        "library": _compare_with_library(Documents.of(passages(texts, 20, most=_SMALL[bench.profile]))),
        "by_length": [{"length": length, **_compare(documents)} for length, documents in lengths.items()],
        "topics": _compare(Documents.of(texts)),
        "by_damping": [
            {"condition_number": kappa, **_compare(reference, largest_eigenvalue(reference.p) / kappa)}
            for kappa in _CONDITION_NUMBERS
        ],
        "by_frequency": _by_frequency(reference),
        "pairs": _pairs(reference, bench.generator()),
    }


def _compare_with_library(documents: Documents) -> dict[str, Any]:
    """Largest errors of the closed form, and of the printed one, against the library's operator."""
    lambda_max = largest_eigenvalue(documents.p)
    dampings = [lambda_max / kappa for kappa in _CONDITION_NUMBERS]
    found: dict[str, list[float]] = {
        "largest_error": [],
        "largest_error_of_the_printed_formula": [],
        "largest_score": [],
    }
    for damping, library in zip(dampings, library_influence(documents, dampings), strict=True):
        exact = closed_form_influence(documents, damping)
        printed = closed_form_influence(documents, damping, printed_sign=True)
        for values, matrix in zip(found.values(), (library - exact, library - printed, library), strict=True):
            values.append(float(matrix.abs().max()))
    size = {"documents": len(documents.counts), "words": documents.counts.shape[1]}
    return {**size, "condition_numbers": list(_CONDITION_NUMBERS), **found}


def _compare(documents: Documents, damping: float = 0.0) -> dict[str, Any]:
    """Influence, by default in the limit, against the three similarities."""
    influence = closed_form_influence(documents, damping)
    return {
        "documents": len(documents.counts),
        "words": documents.counts.shape[1],
        "words_below_damping": float((documents.p < damping).double().mean()),
        "tokens_of_common_words": float(documents.p[documents.common].sum()),
        "agreement": {name: agreement(influence, other) for name, other in tf_idf(documents).items()},
    }


def _by_frequency(documents: Documents) -> dict[str, Any]:
    """Where the agreement is lost: by rare and common words alone, and by what DF would be for independent words."""
    tf, p, df, common = documents.tf, documents.p, documents.df, documents.common
    centred, length = tf - p, float(documents.lengths.mean())
    parts, ratios = {}, {}
    for name, kept in (("rare", ~common), ("common", common)):
        influence = (centred[:, kept] / p[kept]) @ centred[:, kept].T
        parts[name] = agreement(influence, (tf[:, kept] / df[kept]) @ tf[:, kept].T)
        ratios[name] = float(df[kept].sum() / (length * p[kept].sum()))  # over tokens
    independent = (tf / (1 - (1 - p) ** length)) @ tf.T
    parts["with_df_of_independent_words"] = agreement(closed_form_influence(documents, 0.0), independent)
    return {
        "length": length,
        "common_words": int(common.sum()),
        "rare_words": int((~common).sum()),
        "mean_df_over_expected_count": ratios,
        "agreement": parts,
    }


def _pairs(documents: Documents, generator: torch.Generator) -> dict[str, list[float]]:
    """Some pairs to be shown, both sides with their constants, so that they agree on the diagonal if DF = |d|p."""
    length, common = float(documents.lengths[0]), documents.common.double()
    similarity = length * tf_idf(documents)["sqrt"]
    rows, columns = torch.triu_indices(len(similarity), len(similarity), 1)
    shown = torch.randperm(len(rows), generator=generator)[:_SHOWN]
    rows, columns = rows[shown], columns[shown]
    alike = similarity[rows, columns] > 0  # pairs without a word in common are at zero on both sides
    part = length * (documents.tf * common / documents.df) @ documents.tf.T / similarity
    matrices = {
        "similarity": similarity,
        "influence_plus_one": closed_form_influence(documents, 0.0) + 1,
        "part_of_common_words": part,
    }
    return {
        name: [float(f"{x:.4g}") for x in matrix[rows, columns][alike].tolist()]
        for name, matrix in matrices.items()
    }


# --- what was found --------------------------------------------------------------------------------------


def _both(row: dict[str, float]) -> str:
    return f"{row['pearson']:.3f} ({row['spearman']:.3f})"


def _three(row: dict[str, Any]) -> str:
    return "; ".join(f"{label} {_both(row['agreement'][name])}" for name, label in _NAMES.items())


def conclude(numbers: dict[str, Any]) -> Conclusion:
    """Whether the closed form is the library's, and TF-IDF with √(1/DF) nearest to influence, at 0.9 or more."""
    library, lengths, frequency = numbers["library"], numbers["by_length"], numbers["by_frequency"]
    error, score = max(library["largest_error"]), max(library["largest_score"])
    reference = next(row for row in lengths if row["length"] == _REFERENCE)
    default = next(row for row in numbers["by_damping"] if row["condition_number"] == 200.0)
    found = reference["agreement"]
    pearson = {name: found[name]["pearson"] for name in _NAMES}
    best = pearson["sqrt"] >= _AGREES and pearson["sqrt"] > max(pearson["scikit-learn"], pearson["tf"])
    parts, ratio = frequency["agreement"], frequency["mean_df_over_expected_count"]
    return Conclusion(
        title="Influence in a bag-of-words model is TF-IDF",
        claim="In a bag-of-words model, influence between documents of equal length |d| is, for λ → 0 and words with "
        "|d|p ≪ 1, the TF-IDF similarity with the weight √(1/DF), up to a factor.",
        holds=bool(error <= _LARGEST_ERROR and best),
        verdict=f"Over pairs of passages of {_REFERENCE} words influence correlates to {pearson['sqrt']:.3f} with "
        f"TF-IDF of weight √(1/DF), to {pearson['scikit-learn']:.3f} with scikit-learn's logarithm, and to "
        f"{pearson['tf']:.3f} without a weight.",
        rows=(
            *(
                (
                    f"{label}: correlation with influence, {_REFERENCE} words",
                    "1, if |d|p ≪ 1" if name == "sqrt" else "not printed",
                    f"{_both(found[name])}",
                )
                for name, label in _NAMES.items()
            ),
            *(
                (
                    f"√(1/DF), passages of {row['length']} words",
                    "1, if |d|p ≪ 1",
                    f"{_both(row['agreement']['sqrt'])}; common words are {row['tokens_of_common_words']:.0%} of the "
                    "tokens",
                )
                for row in (lengths[0], lengths[-1])
            ),
            ("closed form less library, at most", "0", f"{number(error)}, scores are up to {number(score)}"),
        ),
        details=(
            "Correlations are Pearson's (Spearman's) over all pairs, for λ → 0. The claim counts as holding if "
            f"Pearson's is at least {_AGREES} with √(1/DF) and the largest of the three.",
            f"Closed form against the library's operator, gradients and scores in float64: {library['documents']} "
            f"passages of {library['words']} different words, λmax/λ from {number(library['condition_numbers'][0])} to "
            f"{number(library['condition_numbers'][-1])}. On real text: {reference['documents']} passages of Python's "
            f"language reference, {reference['words']:,} different words.",
            f"Common words have |d|p > {COMMON}. At {_REFERENCE} words, DF is on average {ratio['rare']:.2f} of |d|p "
            f"for the tokens of rare words and {ratio['common']:.2f} for those of common ones; the correlation is "
            f"{_both(parts['rare'])} over rare words alone, {_both(parts['common'])} over common ones alone, and with "
            "1 - (1-p)^|d| for DF, as if words did not cluster, "
            f"{_both(parts['with_df_of_independent_words'])}.",
            f"The natural topics, of unequal lengths: {_three(numbers['topics'])}.",
            f"At λ = λmax/200, which exceeds the frequency of {default['words_below_damping']:.0%} of the words: "
            f"{_three(default)}.",
        ),
        errata=(
            "The rank-one term of (H + λ)⁻¹ has a plus: (I - rrᵀ)⁻¹ = I + rrᵀ/(1 - ‖r‖²), as the line above it says; "
            "it is printed with a minus. The constant λ Σ p/(p+λ) is right. With the printed sign scores are off by "
            f"up to {number(max(library['largest_error_of_the_printed_formula']))} here, where they are up to "
            f"{number(score)}.",
            "The limit is Σ TF·TF/p - 1: the gradients are TF - p, not TF. The constant does not change a correlation, "
            "but it gives influence its sign: documents that share few words have a negative one.",
            "The gradients are |d|(TF - p) and the Hessian |d|(Diag(p) - ppᵀ), as printed; the inverse is taken "
            "without |d|, and the last formula leaves out both. With them it is |d| times as large.",
            "That the rank-one term is O(λ) needs λ ≪ min p, not λ ≪ 1.",
            "DF(d) = 1 - Pr(t ∉ d) is DF(t).",
        ),
    )


def draw(numbers: dict[str, Any]) -> Figure:
    """Pairs of passages, and the correlations by length and by damping."""
    pairs, lengths, damped = numbers["pairs"], numbers["by_length"], numbers["by_damping"]
    with figure(1, 3, width=4.9, height=4.4) as (drawn, panels):
        x, y = pairs["similarity"], pairs["influence_plus_one"]
        points = panels[0].scatter(
            x, y, c=pairs["part_of_common_words"], s=6, cmap="cividis", vmin=0, vmax=1, rasterized=True
        )
        ends = [min(x), max(y)]
        panels[0].plot(ends, ends, color="black", linewidth=0.9, label="DF = |d| p")
        panels[0].set(xscale="log", yscale="log", title=f"{len(x):,} pairs of passages of {_REFERENCE} words")
        panels[0].set_xlabel("|d| · Σ TF·TF′/DF   (TF-IDF similarity)")
        panels[0].set_ylabel("influence + 1 = Σ TF·TF′/p   (λ → 0)")
        panels[0].legend(loc="upper left")
        drawn.colorbar(points, ax=panels[0], label=f"part from common words (|d|p > {COMMON})", pad=0.01)
        _draw_agreement(panels[1], [row["length"] for row in lengths], lengths)
        panels[1].set(xlabel="words in a passage, |d|", title="λ → 0, by the length of passages")
        _draw_agreement(panels[2], [row["condition_number"] for row in damped], damped)
        panels[2].set(xlabel="λmax / λ", title=f"passages of {_REFERENCE} words, by damping")
        panels[2].legend(loc="center", bbox_to_anchor=(0.5, 0.57), ncols=2)
        drawn.suptitle("Influence in a bag-of-words model of Python's language reference, and TF-IDF")
    return drawn


def _draw_agreement(panel: Axes, where: Sequence[float], rows: Sequence[dict[str, Any]]) -> None:
    for colour, (name, label) in zip(COLOURS, _NAMES.items(), strict=False):
        for measured, style in (("pearson", "o-"), ("spearman", "s--")):
            values = [row["agreement"][name][measured] for row in rows]
            shown = label if measured == "pearson" else None
            panel.plot(where, values, style, color=colour, label=shown, linewidth=1.6 if shown else 1.0)
    panel.plot([], [], "o-", color="grey", label="Pearson")
    panel.plot([], [], "s--", color="grey", linewidth=1.0, label="Spearman")
    panel.set_xscale("log")
    panel.set_ylim(min(0.0, panel.get_ylim()[0]), 1.02)
    panel.set_ylabel("correlation with influence, over pairs")
