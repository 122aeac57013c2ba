"""Figure 4: condition C.1, both of its traces against the batch size.

For independent draws the slope of log trace against log |B| is -1 by arithmetic: what it tests is that batches are
drawn and products computed without bias or noise of their own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reproduction.bench import Bench
from reproduction.condition_c1 import check_condition
from reproduction.finding import Conclusion, Profile, plus_minus
from reproduction.subjects import subjects
from reproduction.table1 import joined
from whence.report.drawing import COLOURS, figure
from whence.spectrum import Estimate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["conclude", "draw", "measure"]

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


def measure(bench: Bench) -> dict[str, Any]:
    """The condition for every subject, offline also for a language model that is small enough to show the slope."""
    keys = (*bench.subjects(), *(subjects("quick", "language") if bench.profile == "offline" else ()))
    rows = [_kept(bench, key, uniform=True) for key in keys]
    # The condition is about batches drawn uniformly. Where those are too noisy to be used, also those that are.
    certain = [key for key, row in zip(keys, rows, strict=True) if row["certain"]]
    return {"rows": rows + [_kept(bench, key, uniform=False) for key in certain]}


def _kept(bench: Bench, key: str, *, uniform: bool) -> dict[str, Any]:
    name = key if uniform else f"{key}.by-curvature"
    return bench.kept(f"conditions/{name}", lambda: _measure(bench, key, uniform=uniform))


def _measure(bench: Bench, key: str, *, uniform: bool) -> dict[str, Any]:
    subject = bench.subject(key)
    effort = _EFFORTS.get((bench.profile, key)) or _EFFORTS[bench.profile, subject.kind]
    realisations, sizes, spectrum_terms = effort
    check = check_condition(
        # products by differences are a third cheaper for a large model, and as noiseless as this needs
        subject.operator(
            uniform=uniform, product="finite-difference" if subject.kind == "language" else "auto"
        ),
        sizes,
        generator=bench.generator(),
        realisations=realisations,
        spectrum_terms=spectrum_terms,
    )
    assert check.slope is not None
    return {
        "name": subject.name if uniform else f"{subject.name} by curvature",
        "data": subject.data_name,
        "kind": subject.kind,
        "certain": subject.certain,
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


def conclude(numbers: dict[str, Any]) -> Conclusion:
    """Whether the slope is -1 and C = 2 suffices on average over directions, within errors."""
    rows = numbers["rows"]

    def above_two(constant: str) -> str:
        found = [row["name"] for row in rows if row[constant] - 2 * row[f"{constant}_stderr"] > 2]
        return joined(found) or "none"

    def pair(row: dict[str, Any], name: str) -> str:
        return plus_minus(row[name], row[f"{name}_stderr"])

    quantities = "slope of log trace against log |B|; Ĉ on average; Ĉ along the top eigenvector"
    off = [row["name"] for row in rows if abs(row["slope"] + 1) > 3 * row["slope_stderr"]]
    return Conclusion(
        title="Figure 4: condition C.1",
        claim="The trace of E H̃² - H² falls as 1/|B| and stays below 2·Tr(H)²/|B|, in images and in tokens.",
        holds=not off and above_two("constant") == "none",
        verdict=f"C = 2 fails on average over directions for {above_two('constant')}, along the top "
        f"eigenvector for {above_two('top_constant')}; the trace falls as 1/|B| within errors for "
        f"{len(rows) - len(off)} of {len(rows)}.",
        rows=(
            ("models", "ResNet-18, ResNet-50, OPT-1.3B", "as below"),
            ("in each row", quantities, quantities),
            *(
                (
                    f"{row['name']} on {row['data']}",
                    "-1; at most 2; at most 2",
                    "; ".join(pair(row, name) for name in ("slope", "constant", "top_constant")),
                )
                for row in rows
            ),
        ),
        details=(
            *(f"{row['name']}, {row['realisations']} realisations: {row['verdict']}" for row in rows),
            "The condition is an inequality of matrices, of which the paper's figure looks at the traces: it may "
            "hold on average over directions and fail along the top eigenvector. For independent draws the slope is "
            "-1 by arithmetic: what it tests is that batches are drawn and products computed without bias or noise "
            "of their own.",
        ),
    )


def draw(numbers: dict[str, Any]) -> Figure:
    """A panel for each model."""
    rows = numbers["rows"]
    columns = min(len(rows), 3)
    with figure(-(-len(rows) // columns), columns, width=4.4, height=3.6) as (drawn, panels):
        for panel, row in zip(panels, rows, strict=False):
            sizes, gaps, errors, bounds = (
                [point[name] for point in row["points"]]
                for name in ("batch_size", "gap", "gap_stderr", "bound")
            )
            panel.errorbar(
                sizes, gaps, [2 * error for error in errors], fmt="o", capsize=3, color=COLOURS[0],
                label="Tr(E H̃² - H²), ± 2 errors",
            )  # fmt: skip
            panel.plot(sizes, bounds, "--", color=COLOURS[1], label="Tr(H)²/|B|")
            panel.plot(sizes, [2 * bound for bound in bounds], ":", color=COLOURS[6], label="2·Tr(H)²/|B|")
            unit = "tokens" if row["kind"] == "language" else "images"
            title = f"{row['name']}, {row['data']}"
            panel.set(xscale="log", yscale="log", xlabel=f"|B|, {unit}", ylabel="trace", title=title)
            panel.set_xticks(sizes, [f"{size:.0f}" for size in sizes])
            panel.minorticks_off()
        for panel in panels[len(rows) :]:
            panel.set_axis_off()
        drawn.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return drawn
