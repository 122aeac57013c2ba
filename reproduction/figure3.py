"""Figure 3: what does the inverse Hessian do? Similarity of ten facts and their rewrites, with and without it.

    gradient similarity   ⟨g, g'⟩ / ‖g‖‖g'‖          influence similarity   gᵀ(H+λ)⁻¹g' / √(gᵀ(H+λ)⁻¹g · g'ᵀ(H+λ)⁻¹g')

Solved a few sentences at a time, fact by fact, with all chains; only inner products are kept, after each group, so that
an interrupted run goes on. Products are finite differences, as in the paper: k vectors at once take 3k + 1 passes where
dual numbers take 5k.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from reproduction.finding import Finding, Profile
from reproduction.sentences import PAIRS
from reproduction.spectra import Measured
from reproduction.subjects import Subject
from whence.model.gauss_newton import GaussNewton
from whence.operators import Damped
from whence.report.drawing import figure
from whence.runs.files import read_tensors, write_tensors
from whence.scoring.similarity import cosines, similarity_of_chains
from whence.solvers import Lissa
from whence.vectors import ParamVector

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["paraphrase_test", "run"]

#: Pairs of sentences, sentences solved together, chains.
_EFFORTS: dict[Profile, tuple[int, int, int]] = {
    "quick": (10, 20, 2),
    "offline": (6, 2, 2),
    "paper": (10, 2, 2),
}
_SHUFFLES = 20_000


def run(
    key: str, subject: Subject, measured: Measured, profile: Profile, directory: Path, *, seed: int = 0
) -> tuple[Finding, Figure]:
    """The three heat maps and what separates rewrites from unrelated sentences."""
    pairs, group, chains = _EFFORTS[profile]
    texts = [text for column in zip(*PAIRS[:pairs], strict=True) for text in column]
    path = directory / "similarities" / key
    dots, by_chain, spent, batch = _inner_products(subject, measured, 2 * pairs, group, chains, path, seed)
    influence, error = similarity_of_chains(by_chain)
    gradient = cosines(dots)
    tests = {
        name: paraphrase_test(matrix, seed=seed)
        for name, matrix in (("influence", influence), ("gradient", gradient))
    }
    difference = gradient - influence
    blocks = _blocks(difference, pairs)
    unrelated = _unrelated(difference, pairs)
    mean, stderr = float(unrelated.mean()), float(unrelated.std() / math.sqrt(len(unrelated)))
    ours, theirs = tests["influence"], tests["gradient"]
    finding = Finding(
        name="figure3",
        title="Figure 3: what the inverse Hessian is for",
        claim="Unrelated sentences have a higher gradient similarity than influence similarity, and influence "
        "similarity between a sentence and its rewrite is consistently higher than between unrelated ones.",
        measured=f"{subject.name}, λ = {measured.damping:.3g}, batches of {batch:,} terms, {pairs} pairs. "
        f"Between unrelated sentences gradient minus influence similarity is {mean:+.3f} ± {stderr:.3f}. "
        f"Influence similarity: rewrites {ours.matched:.3f}, unrelated {ours.others:.3f}, {ours.separation:.1f} "
        f"standard deviations of the unrelated apart; the rewrite is the most similar of all rewrites for "
        f"{ours.right} of {pairs} originals; p = {ours.p_value:.2g} over "
        f"random pairings. Gradient similarity: {theirs.matched:.3f}, {theirs.others:.3f}, {theirs.separation:.1f}, "
        f"{theirs.right} of {pairs}, p = {theirs.p_value:.2g}. Largest standard error of an influence similarity: "
        f"{float(error.max()):.3f}.",
        holds=bool(mean > 2 * stderr and ours.p_value < 0.01),
        numbers={
            "texts": texts,
            "influence": influence.tolist(),
            "influence_stderr": error.tolist(),
            "gradient": gradient.tolist(),
            "blocks_of_gradient_minus_influence": blocks,
            "tests": {name: test.__dict__ for name, test in tests.items()},
            "damping": measured.damping,
            "batch_size": batch,
        },
        profile=profile,
        seconds=spent,
    )
    return finding, _draw(influence, gradient, blocks, pairs)


# --- solving ---------------------------------------------------------------------------------------------


def _inner_products(
    subject: Subject, measured: Measured, count: int, group: int, chains: int, path: Path, seed: int
) -> tuple[Tensor, Tensor, float, int]:
    """``⟨g_i, g_j⟩`` and, by every chain, ``g_iᵀ(H+λ)⁻¹g_j``; seconds spent on them, now and before; the largest batch.

    Of so many sentences, originals first. They are solved for fact by fact, and inner products are taken with all that
    there are: groups that a run with fewer facts left behind serve one with more. Settings are the paper's; where its
    batch turns out to be too small, the solver enlarges it, and later groups begin with that.
    """
    texts = [text for pair in PAIRS for text in pair]
    examples = [
        {
            name: torch.tensor(ids)
            for name, ids in subject.tokenizer(text).items()
            if name in ("input_ids", "labels")
        }
        for text in texts
    ]
    gnh: GaussNewton | None = None
    rows, dots, seconds, batch = [], [], 0.0, 1
    for start in range(0, count, group):
        stop = min(start + group, count)
        file = path.with_name(f"{path.name}.{start}-{stop}.safetensors")
        if not file.exists():
            begun = time.perf_counter()
            gnh = gnh or subject.operator(product="finite-difference")
            rhs = gnh.gradients(examples[start:stop])
            passage = round(gnh.terms.terms_per_example)  # no batch is smaller
            plan = measured.plan.replace(
                batch_size=max(measured.plan.batch_size, passage, batch), chains=chains
            )
            generator = torch.Generator().manual_seed(seed + start)
            state = Lissa(plan).run(Damped(gnh, measured.damping), rhs, generator=generator)
            solved = [*state.finished, rhs]
            found = torch.cat([_with_gradient(solved, gnh, example) for example in examples], dim=2)
            took = time.perf_counter() - begun
            write_tensors(
                file,
                {"chains": found[:-1], "dots": found[-1]},
                {"seconds": took, "batch_size": state.plan.batch_size},
            )
            del state, solved, rhs
        tensors, notes = read_tensors(file)
        rows.append(tensors["chains"])
        dots.append(tensors["dots"])
        seconds += notes["seconds"]
        batch = max(batch, notes["batch_size"])
    originals_first = torch.cat([torch.arange(0, count, 2), torch.arange(1, count, 2)])
    gram, by_chain = torch.cat(dots), torch.cat(rows, dim=1)
    return (
        gram[originals_first][:, originals_first],
        by_chain[:, originals_first][:, :, originals_first],
        seconds,
        batch,
    )


def _with_gradient(blocks: list[ParamVector], gnh: GaussNewton, example: dict[str, Tensor]) -> Tensor:
    """Inner products of the blocks' columns with the gradient of one sentence: no more than one is held."""
    gradient = gnh.gradients([example])
    return torch.stack([block.gram(gradient) for block in blocks])


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


def paraphrase_test(similarity: Tensor, *, seed: int = 0) -> ParaphraseTest:
    """The test on a ``[2n, 2n]`` matrix: originals, then their rewrites."""
    n = len(similarity) // 2
    across = similarity[:n, n:]
    own = across.diagonal()
    others = across[~torch.eye(n, dtype=torch.bool)]
    generator = torch.Generator().manual_seed(seed)
    shuffled = torch.rand(_SHUFFLES, n, generator=generator).argsort(1)
    means = across[torch.arange(n), shuffled].mean(1)
    return ParaphraseTest(
        matched=float(own.mean()),
        others=float(others.mean()),
        separation=float((own.mean() - others.mean()) / others.std()),
        right=int((across.argmax(1) == torch.arange(n)).sum()),
        p_value=(1 + int((means >= own.mean() - 1e-12).sum())) / (1 + _SHUFFLES),
    )


def _unrelated(matrix: Tensor, pairs: int) -> Tensor:
    """Entries between different facts, each pair once."""
    fact = torch.arange(2 * pairs) % pairs
    above = torch.ones_like(matrix, dtype=torch.bool).triu(1)
    return matrix[above & (fact.unsqueeze(0) != fact.unsqueeze(1))]


def _blocks(matrix: Tensor, pairs: int) -> list[dict[str, float]]:
    """Mean and standard error over each square of the matrix, as the paper prints them."""
    found = []
    for i in (0, 1):
        for j in (0, 1):
            values = matrix[i * pairs : (i + 1) * pairs, j * pairs : (j + 1) * pairs].flatten()
            found.append(
                {"mean": float(values.mean()), "stderr": float(values.std() / math.sqrt(len(values)))}
            )
    return found


def _draw(influence: Tensor, gradient: Tensor, blocks: list[dict[str, float]], pairs: int) -> Figure:
    with figure(1, 3, width=4.0, height=3.6) as (drawn, panels):
        for panel, matrix, title in (
            (panels[0], influence, "Influence similarity"),
            (panels[1], gradient, "Gradient similarity"),
            (panels[2], gradient - influence, "Gradient minus influence"),
        ):
            shown = panel.imshow(matrix.numpy(), vmin=-1, vmax=1, cmap="RdBu_r")
            panel.grid(False)
            panel.set_title(title)
            panel.axhline(pairs - 0.5, color="black", linewidth=0.6)
            panel.axvline(pairs - 0.5, color="black", linewidth=0.6)
            ticks = [pairs / 2 - 0.5, 1.5 * pairs - 0.5]
            panel.set_xticks(ticks, ["originals", "rewrites"])
            panel.set_yticks(ticks, ["originals", "rewrites"], rotation=90, va="center")
        for place, block in enumerate(blocks):
            row, column = divmod(place, 2)
            panels[2].text(
                (column + 0.5) * pairs - 0.5, (row + 0.5) * pairs - 0.5,
                f"{block['mean']:.2f}\n({block['stderr']:.3f})", ha="center", va="center", fontsize=11,
            )  # fmt: skip
        drawn.colorbar(shown, ax=panels[2], shrink=0.85)
    return drawn
