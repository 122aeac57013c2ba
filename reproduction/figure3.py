"""Figure 3: what does the inverse Hessian do? Similarity of ten facts and their rewrites, with and without it.

    gradient similarity   ⟨g, g'⟩ / ‖g‖‖g'‖          influence similarity   gᵀ(H+λ)⁻¹g' / √(gᵀ(H+λ)⁻¹g · g'ᵀ(H+λ)⁻¹g')

Solved a few sentences at a time, fact by fact, with all chains; only inner products are kept, after each group, so that
an interrupted run goes on. Products are finite differences, as in the paper: k vectors at once take 3k + 1 passes where
dual numbers take 5k.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from reproduction.bench import Bench
from reproduction.finding import Conclusion, Profile, number
from reproduction.sentences import PAIRS
from whence.operators import Damped
from whence.report.drawing import figure
from whence.scoring.similarity import cosines, similarity_of_chains
from whence.solvers import Lissa

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["ParaphraseTest", "conclude", "draw", "measure", "paraphrase_test"]

#: Pairs of sentences, sentences solved together, chains.
_EFFORTS: dict[Profile, tuple[int, int, int]] = {
    "quick": (10, 20, 2),
    "offline": (6, 2, 2),
    "paper": (10, 2, 2),
}
_SHUFFLES = 20_000


def measure(bench: Bench) -> dict[str, Any]:
    """Both similarities of all sentences, originals first.

    They are solved for fact by fact, and inner products are taken with all that there are: groups that a run with fewer
    facts left behind serve one with more. Settings are the paper's; where its batch turns out to be too small, the
    solver enlarges it, and later groups begin with that.
    """
    pairs, group, chains = _EFFORTS[bench.profile]
    key, count = bench.subjects("language")[0], 2 * pairs
    groups, batch = [], 1
    for start in range(0, count, group):
        stop = min(start + group, count)
        solve = partial(_solve, bench, key, start, stop, chains, batch)
        groups.append(bench.kept(f"similarities/{key}.{start}-{stop}", solve))
        batch = max(batch, groups[-1]["batch_size"])
    order = torch.cat([torch.arange(0, count, 2), torch.arange(1, count, 2)])
    dots = torch.cat([torch.tensor(found["dots"], dtype=torch.float64) for found in groups])
    solved = torch.cat([torch.tensor(found["chains"], dtype=torch.float64) for found in groups], dim=1)
    influence, error = similarity_of_chains(solved[:, order][:, :, order])
    gradient = cosines(dots[order][:, order])
    measured = bench.measured(key)
    return {
        "name": measured.name,
        "damping": measured.damping,
        "batch_size": batch,
        "texts": [text for column in zip(*PAIRS[:pairs], strict=True) for text in column],
        "influence": influence.tolist(),
        "influence_stderr": error.tolist(),
        "gradient": gradient.tolist(),
        "tests": {
            name: asdict(paraphrase_test(matrix, generator=bench.generator()))
            for name, matrix in (("influence", influence), ("gradient", gradient))
        },
    }


def _solve(bench: Bench, key: str, start: int, stop: int, chains: int, batch: int) -> dict[str, Any]:
    """``⟨g_i, g_j⟩`` and, by every chain, ``g_iᵀ(H+λ)⁻¹g_j``, for some sentences i and all j; and the batch it took."""
    measured, subject = bench.measured(key), bench.subject(key)
    examples = [
        {
            name: torch.tensor(ids)
            for name, ids in subject.tokenizer(text).items()
            if name in ("input_ids", "labels")
        }
        for pair in PAIRS
        for text in pair
    ]
    gnh = subject.operator(product="finite-difference")
    rhs = gnh.gradients(examples[start:stop])
    passage = round(gnh.terms.terms_per_example)  # no batch is smaller
    plan = measured.plan.replace(batch_size=max(measured.plan.batch_size, passage, batch), chains=chains)
    solution = Lissa(plan).solve(Damped(gnh, measured.damping), rhs, generator=bench.generator(start))
    columns = []
    for example in examples:  # no more than one gradient is held
        gradient = gnh.gradients([example])
        columns.append(torch.stack([block.gram(gradient) for block in (*solution.chains, rhs)]))
    found = torch.cat(columns, dim=2)
    return {
        "chains": found[:-1].tolist(),
        "dots": found[-1].tolist(),
        "batch_size": (solution.stats.plan or plan).batch_size,
    }


# --- what the similarities say ---------------------------------------------------------------------------


@dataclass(frozen=True)
class ParaphraseTest:
    """How well similarity tells rewrites from unrelated sentences.

    Attributes:
        matched, others: mean similarity of an original with its own rewrite, and with another's.
        separation: their difference in standard deviations of the latter.
        right: originals whose own rewrite is the most similar of all rewrites.
        p_value: share of random pairings of originals with rewrites whose mean is at least that of the true one.
    """

    matched: float
    others: float
    separation: float
    right: int
    p_value: float


def paraphrase_test(similarity: Tensor, *, generator: torch.Generator) -> ParaphraseTest:
    """The test on a ``[2n, 2n]`` matrix: originals, then their rewrites."""
    n = len(similarity) // 2
    across = similarity[:n, n:]
    own = across.diagonal()
    others = across[~torch.eye(n, dtype=torch.bool)]
    shuffled = torch.rand(_SHUFFLES, n, generator=generator).argsort(1)
    means = across[torch.arange(n), shuffled].mean(1)
    return ParaphraseTest(
        matched=float(own.mean()),
        others=float(others.mean()),
        separation=float((own.mean() - others.mean()) / others.std()),
        right=int((across.argmax(1) == torch.arange(n)).sum()),
        p_value=(1 + int((means >= own.mean() - 1e-12).sum())) / (1 + _SHUFFLES),
    )


def _mean(values: Tensor) -> tuple[float, float]:
    """With its standard error."""
    return float(values.mean()), float(values.std() / math.sqrt(values.numel()))


def conclude(numbers: dict[str, Any]) -> Conclusion:
    """Whether influence similarity is lower between unrelated sentences, and tells rewrites from them."""
    pairs = len(numbers["texts"]) // 2
    difference = torch.tensor(numbers["gradient"]) - torch.tensor(numbers["influence"])
    fact = torch.arange(2 * pairs) % pairs
    above = torch.ones_like(difference, dtype=torch.bool).triu(1)  # each pair once
    mean, stderr = _mean(difference[above & (fact.unsqueeze(0) != fact.unsqueeze(1))])
    ours, theirs = (ParaphraseTest(**numbers["tests"][name]) for name in ("influence", "gradient"))
    largest = max(max(row) for row in numbers["influence_stderr"])
    return Conclusion(
        title="Figure 3: what the inverse Hessian is for",
        claim="Unrelated sentences have a higher gradient similarity than influence similarity, and influence "
        "similarity between a sentence and its rewrite is consistently higher than between unrelated ones.",
        holds=bool(mean > 2 * stderr and ours.p_value < 0.01),
        verdict=f"Unrelated sentences have a gradient similarity {abs(mean):.3f} {'above' if mean > 0 else 'below'} "
        f"their influence similarity (± {stderr:.3f}), and by influence the most similar rewrite is the right one for "
        f"{ours.right} of {pairs} sentences, by gradients for {theirs.right}.",
        rows=(
            ("model, pairs of sentences", "OPT-1.3B, 10", f"{numbers['name']}, {pairs}"),
            (
                "gradient minus influence similarity, unrelated",
                "mostly positive",
                f"{mean:+.3f} ± {stderr:.3f}",
            ),
            (
                "influence similarity: rewrites; unrelated",
                "consistently higher; lower",
                f"{ours.matched:.3f}; {ours.others:.3f}",
            ),
            (
                "gradient similarity: rewrites; unrelated",
                "not printed",
                f"{theirs.matched:.3f}; {theirs.others:.3f}",
            ),
            (
                "standard deviations apart: by influence; by gradients",
                "not printed",
                f"{ours.separation:.1f}; {theirs.separation:.1f}",
            ),
            (
                "the right rewrite is the most similar: by influence; by gradients",
                "not printed",
                f"{ours.right} of {pairs}; {theirs.right} of {pairs}",
            ),
        ),
        details=(
            f"λ = {number(numbers['damping'])}, batches of {numbers['batch_size']:,} terms. Largest standard error "
            f"of an influence similarity: {largest:.3f}.",
            f"Over random pairings of originals with rewrites, p = {ours.p_value:.2g} for influence and "
            f"{theirs.p_value:.2g} for gradient similarity.",
        ),
    )


def draw(numbers: dict[str, Any]) -> Figure:
    """The paper's three heat maps; on the last, the mean of each square with its standard error."""
    influence, gradient = torch.tensor(numbers["influence"]), torch.tensor(numbers["gradient"])
    difference, pairs = gradient - influence, len(influence) // 2
    titles = ("Influence similarity", "Gradient similarity", "Gradient minus influence")
    ticks = [pairs / 2 - 0.5, 1.5 * pairs - 0.5]
    with figure(1, 3, width=4.0, height=3.6) as (drawn, panels):
        for panel, matrix, title in zip(panels, (influence, gradient, difference), titles, strict=True):
            shown = panel.imshow(matrix.numpy(), vmin=-1, vmax=1, cmap="RdBu_r")
            panel.grid(False)
            panel.set_title(title)
            panel.axhline(pairs - 0.5, color="black", linewidth=0.6)
            panel.axvline(pairs - 0.5, color="black", linewidth=0.6)
            panel.set_xticks(ticks, ["originals", "rewrites"])
            panel.set_yticks(ticks, ["originals", "rewrites"], rotation=90, va="center")
        for i, row in enumerate(difference.split(pairs)):
            for j, block in enumerate(row.split(pairs, dim=1)):
                mean, stderr = _mean(block)
                said = f"{mean:.2f}\n({stderr:.3f})"
                panels[2].text(ticks[j], ticks[i], said, ha="center", va="center", fontsize=11)
        drawn.colorbar(shown, ax=panels[2], shrink=0.85)
    return drawn
