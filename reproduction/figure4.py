"""Figure 4: condition C.1, both of its traces against the batch size."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from reproduction.finding import Finding, Profile
from reproduction.subjects import Subject
from whence.report.drawing import COLOURS, figure
from whence.runs.files import read_json, write_json
from whence.spectrum import Estimate
from whence.validation.condition import ConditionCheck, check_condition

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["run"]

#: Realisations at each batch size, the batch sizes in images or tokens, and how many the top eigenvector is found on;
#: for subjects of a kind, or for one: those that are small enough to show the slope to a few percent.
_EFFORTS: dict[tuple[Profile, str], tuple[int, tuple[int, ...], int]] = {
    ("quick", "vision"): (60, (8, 16, 32, 64), 512),
    ("quick", "language"): (24, (96, 192, 384, 768), 768),
    ("offline", "vision"): (24, (25, 50, 100, 200), 500),
    ("offline", "language"): (8, (256, 512, 768, 1024), 512),
    ("offline", "digits-mlp"): (1000, (8, 16, 32, 64), 512),
    ("offline", "pydoc-llama"): (200, (96, 192, 384, 768), 768),
    ("paper", "vision"): (1000, (50, 100, 200, 400), 5000),
    ("paper", "language"): (1000, (512, 1024, 2048, 4096), 12_800),
}


def run(
    keys: Sequence[str], load: Callable[[str], Subject], profile: Profile, directory: Path, *, seed: int = 0
) -> tuple[Finding, Figure]:
    """Measure the condition for every subject; what an earlier run left in ``directory`` is read."""
    rows = []
    for key in keys:
        path = directory / "conditions" / f"{key}.json"
        if not path.exists():
            write_json(path, _measure(key, load(key), profile, seed, uniform=True))
        rows.append(read_json(path))
    # The condition is about batches drawn uniformly. Where those are too noisy to be used, also those that are.
    for key in [key for key, row in zip(keys, rows, strict=True) if row["certain"]]:
        path = directory / "conditions" / f"{key}.by-curvature.json"
        if not path.exists():
            write_json(path, _measure(key, load(key), profile, seed, uniform=False))
        rows.append(read_json(path))
    words = "; ".join(
        f"{row['name']} on {row['data']}: slope {row['slope']:.3f} ± {row['slope_stderr']:.1g}, Ĉ = "
        f"{row['constant']:.2f} ± {row['constant_stderr']:.1g} on average over directions, "
        f"{row['top_constant']:.2f} ± {row['top_constant_stderr']:.1g} along the top eigenvector"
        for row in rows
    )
    slopes = all(abs(row["slope"] + 1) <= 3 * row["slope_stderr"] for row in rows)
    failing = [row["name"] for row in rows if row["constant"] - 2 * row["constant_stderr"] > 2]
    on_average = f" On average over directions C = 2 fails for {' and '.join(failing)}." if failing else ""
    above = [row["name"] for row in rows if row["top_constant"] - 2 * row["top_constant_stderr"] > 2]
    beyond = (
        f" The condition is an inequality of matrices, though, and along the top eigenvector C = 2 fails for "
        f"{' and '.join(above)}."
        if above
        else ""
    )
    finding = Finding(
        name="figure4",
        title="Figure 4: condition C.1",
        claim="The trace of E H̃² - H² falls as 1/|B| and stays below 2·Tr(H)²/|B|, in images and in tokens.",
        measured=f"{words}. The slope of log trace against log |B| must be -1.{on_average}{beyond} "
        "For independent draws the slope is -1 by arithmetic: what it tests is that batches are drawn and products "
        "computed without bias or noise of their own.",
        holds=slopes and not failing,
        numbers={"rows": rows},
        profile=profile,
        seconds=sum(row["seconds"] for row in rows),
    )
    return finding, _draw(rows)


def _measure(key: str, subject: Subject, profile: Profile, seed: int, *, uniform: bool) -> dict[str, Any]:
    started = time.perf_counter()
    effort = _EFFORTS.get((profile, key)) or _EFFORTS[profile, subject.kind]
    realisations, sizes, lanczos_terms = effort
    check = check_condition(
        # products by differences are a third cheaper for a large model, and as noiseless as this needs
        subject.operator(
            uniform=uniform, product="finite-difference" if subject.kind == "language" else "auto"
        ),
        sizes,
        generator=torch.Generator().manual_seed(seed),
        realisations=realisations,
        lanczos_terms=lanczos_terms,
    )
    name = subject.name if uniform else f"{subject.name} by curvature"
    return {**_as_json(check), "name": name, "data": subject.data_name, "kind": subject.kind,
            "certain": subject.certain, "seconds": time.perf_counter() - started}  # fmt: skip


def _as_json(check: ConditionCheck) -> dict[str, Any]:
    assert check.slope is not None
    return {
        "points": [
            {"batch_size": p.batch_size, **_pair("gap", p.gap), **_pair("bound", p.bound)}
            for p in check.points
        ],
        **_pair("slope", check.slope),
        **_pair("constant", check.constant),
        **_pair("top_constant", check.top_constant),
        **_pair("trace", check.trace),
        "verdict": check.verdict,
        "heavy_tailed": check.heavy_tailed,
        "realisations": check.realisations,
        "num_products": check.num_products,
        "num_term_products": check.num_term_products,
    }


def _pair(name: str, estimate: Estimate) -> dict[str, float]:
    return {name: estimate.value, f"{name}_stderr": estimate.stderr}


def _draw(rows: list[dict[str, Any]]) -> Figure:
    with figure(1, len(rows), width=4.6, height=3.9) as (drawn, panels):
        for panel, row in zip(panels, rows, strict=True):
            sizes = [point["batch_size"] for point in row["points"]]
            gaps = [point["gap"] for point in row["points"]]
            errors = [2 * point["gap_stderr"] for point in row["points"]]
            bounds = [point["bound"] for point in row["points"]]
            panel.errorbar(
                sizes, gaps, errors, fmt="o", capsize=3, color=COLOURS[0], label="Tr(E H̃² - H²), ± 2 errors"
            )
            panel.plot(sizes, bounds, "--", color=COLOURS[1], label="Tr(H)²/|B|")
            panel.plot(sizes, [2 * bound for bound in bounds], ":", color=COLOURS[6], label="2·Tr(H)²/|B|")
            unit = "tokens" if row["kind"] == "language" else "images"
            panel.set(
                xscale="log", yscale="log", xlabel=f"|B|, {unit}", title=f"{row['name']}, {row['data']}"
            )
            panel.set_xticks(sizes, [f"{size:.0f}" for size in sizes])
            panel.minorticks_off()
            panel.legend()
        panels[0].set_ylabel("trace")
    return drawn
