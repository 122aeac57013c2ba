"""The paper's counter-example: LiSSA that converges on average and diverges in mean square.

Two tasks of `reproduction.signed_inputs`, three batch sizes each, followed in many independent runs and compared
with the closed forms. The first has equal eigenvalues, where the paper's proof is exact. The second has not: there
the proof's ``E‖u^t‖² = [u⁰]ᵀR^t u⁰`` predicts a divergence that does not happen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from reproduction.bench import Bench
from reproduction.finding import Conclusion, number, plus_minus
from reproduction.signed_inputs import (
    Setting,
    critical_batch,
    growth,
    lemma_bound,
    library_path,
    mean_path,
    mean_square_path,
    printed_mean_square_path,
    simulate,
    theorem_matrix,
)
from whence.progress import ticker
from whence.report.drawing import COLOURS, figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["conclude", "draw", "measure", "settings", "statistics"]

_RUNS = {"quick": 2000, "offline": 30_000, "paper": 30_000}
#: Within how many standard errors simulation and closed form agree, over all points together. The tails are long:
#: a normal variable would be within four.
_ERRORS = 5.0
_SAME = 1e-12
_RESOLVED = 0.03  # a simulated mean square is believed while its standard error is below this part of it


def settings() -> tuple[tuple[Setting, ...], tuple[Setting, ...]]:
    """The two tasks, each with three batch sizes, in the order of the sizes.

    Equal eigenvalues with the longest step that the lemma allows, ``η = 1/λmax``: half the lemma's bound, the
    bound, twice the bound. Unequal ones, one of them five times the others, with Corollary 1's step: a batch that
    diverges; one below the bound at which ``R`` exceeds 1 and yet the mean square falls; twice the bound.
    """
    equal = Setting((1.0,) * 24, damping=0.25, step_size=1.0, batch_size=1, steps=16)
    unequal = Setting((1.0,) + (0.2,) * 60, damping=0.1, step_size=1 / 1.1, batch_size=1, steps=16)
    bound = lemma_bound(equal)
    batches = (math.floor(bound / 2), math.floor(bound), math.ceil(2 * bound))
    return (
        tuple(replace(equal, batch_size=batch) for batch in batches),
        tuple(replace(unequal, batch_size=batch) for batch in (3, 6, math.ceil(2 * lemma_bound(unequal)))),
    )


def measure(bench: Bench) -> dict[str, Any]:
    """Simulate the counter-example beside its closed forms, and one run of it by the library's solver."""
    runs, generator = _RUNS[bench.profile], bench.generator()
    equal, unequal = settings()
    rows = []
    with ticker("counter-example", len(equal) + len(unequal)) as tick:
        for setting in (*equal, *unequal):
            along, squares, _ = simulate(setting, runs=runs, generator=generator)
            rows.append(statistics(setting, along, squares))
            tick()
    return {
        "runs": runs,
        "largest_difference_from_library": max(_library_difference(s, generator) for s in (*equal, *unequal)),
        "equal_eigenvalues": rows[: len(equal)],
        "unequal_eigenvalues": rows[len(equal) :],
    }


def _library_difference(setting: Setting, generator: torch.Generator) -> float:
    """Largest relative difference between a run by the library's solver and by the simulation, on the same draws."""
    state = generator.get_state()
    _, _, ours = simulate(setting, runs=1, generator=generator)
    generator.set_state(state)
    theirs = library_path(setting, generator)
    return float(((ours - theirs).norm(dim=1) / ours.norm(dim=1)).max())


def statistics(setting: Setting, along: Tensor, squares: Tensor) -> dict[str, Any]:
    """Closed forms and simulated runs of a setting, and how far the simulation can be believed.

    ``u^t`` is a product of random matrices, so ``‖u^t‖²`` has a long tail that grows with t: more and more of the mean
    is carried by runs too rare to be among those simulated. The sample mean then comes out too small, and so does its
    standard error. It is believed up to the last t at which that error is below 3% of it; the mean, as long as it can
    be told from zero by 3 standard errors.
    """
    mean, square = along.mean(0), squares.mean(0)
    mean_stderr, stderr = (values.std(0) / math.sqrt(len(values)) for values in (along, squares))
    exact_mean, exact = mean_path(setting).norm(dim=1), mean_square_path(setting)
    told, mean_told = _until(stderr > _RESOLVED * square), _until(mean.abs() < 3 * mean_stderr)
    largest = squares[:, -1].topk(max(1, len(squares) // 100)).values
    values = setting.eigenvalues
    return {
        "eigenvalues": [[value, float(values.count(value))] for value in sorted(set(values), reverse=True)],
        "damping": setting.damping,
        "step_size": setting.step_size,
        "batch_size": setting.batch_size,
        "lemma_bound": lemma_bound(setting),
        "critical_batch": critical_batch(setting),
        "largest_of_R": float(theorem_matrix(setting).max()),
        "growth_per_step": growth(setting),
        "mean": {
            "closed_form": exact_mean.tolist(),
            "simulated": mean.tolist(),
            "stderr": mean_stderr.tolist(),
            "resolved_until": mean_told,
            "deviations_in_stderr": ((mean - exact_mean) / mean_stderr)[1:].tolist(),
        },
        "mean_square": {
            "closed_form": exact.tolist(),
            "printed": printed_mean_square_path(setting).tolist(),
            "simulated": square.tolist(),
            "stderr": stderr.tolist(),
            "median": squares.median(0).values.tolist(),
            "resolved_until": told,
            "deviations_in_stderr": ((square - exact) / stderr)[1 : told + 1].tolist(),
            "share_of_the_largest_hundredth": float(largest.sum() / squares[:, -1].sum()),
        },
    }


def _until(bad: Tensor) -> int:
    """The last step before the first bad one."""
    found = bad.nonzero().flatten()
    return int(found[0]) - 1 if len(found) else len(bad) - 1


# --- what was found --------------------------------------------------------------------------------------


def _grows(row: dict[str, Any]) -> bool | None:
    """Whether the mean square has grown or fallen, by the simulation alone; None where it cannot tell."""
    found = row["mean_square"]
    last = found["resolved_until"]
    change = found["simulated"][last] - 1
    return None if last == 0 or abs(change) <= _ERRORS * found["stderr"][last] else change > 0


def _mean_falls(row: dict[str, Any]) -> bool | None:
    """Whether the mean has fallen below half its start, by the simulation alone."""
    found = row["mean"]
    told = slice(1, 1 + max(found["resolved_until"], 1))
    ends = zip(found["simulated"][told], found["stderr"][told], strict=True)
    return True if min(abs(value) + _ERRORS * error for value, error in ends) < 0.5 else None


def _verdict(numbers: dict[str, Any]) -> bool | None:
    """The lemma's claim on the task with equal eigenvalues: two batches within the bound, one above."""
    rows = numbers["equal_eigenvalues"]
    if np.abs(_deviations(rows, "mean") + _deviations(rows, "mean_square")).max() > _ERRORS:
        return False
    if numbers["largest_difference_from_library"] > _SAME:
        return False
    grows = [_grows(row) for row in rows]
    if None in grows or None in map(_mean_falls, rows):
        return None
    return grows == [True, True, False]


def _deviations(rows: Sequence[dict[str, Any]], name: str) -> list[float]:
    return [deviation for row in rows for deviation in row[name]["deviations_in_stderr"]]


def _spread(deviations: list[float]) -> str:
    """Root mean square and largest."""
    root, largest = np.sqrt(np.square(deviations).mean()), np.abs(deviations).max()
    return f"{root:.1f} (root mean square; {largest:.1f} at most, of {len(deviations)})"


def _at(row: dict[str, Any], step: int) -> str:
    """The mean square at a step, simulated and exact."""
    found = row["mean_square"]
    simulated = plus_minus(found["simulated"][step], found["stderr"][step])
    return f"{simulated} (exactly {number(found['closed_form'][step])})"


def conclude(numbers: dict[str, Any]) -> Conclusion:
    """Whether the mean square grows below the bound and falls above, while the mean converges."""
    equal, unequal = numbers["equal_eigenvalues"], numbers["unequal_eigenvalues"]
    first, middle = equal[0], unequal[1]
    contraction, everything = first["mean"]["closed_form"][1], [*equal, *unequal]
    words = {True: "grows", False: "falls", None: "cannot be told"}
    found = [f"{words[_grows(row)]} at |B| = {row['batch_size']}" for row in equal]
    steps = [row["mean_square"]["resolved_until"] for row in equal]
    square = first["mean_square"]
    last = middle["mean_square"]["resolved_until"]
    sample, median = (square[name][-1] / square["closed_form"][-1] for name in ("simulated", "median"))
    return Conclusion(
        title="Counter-example: converges on average, diverges in mean square",
        claim="There is a binary classification task on which LiSSA, with a step η ≤ 1/λmax, converges on average and "
        "diverges in mean square when |B| ≤ (λmax/(λmax+λ))² Tr(H)/λmax.",
        holds=_verdict(numbers),
        verdict=f"While the mean falls as {contraction:.2g}^t for every batch, the mean square {', '.join(found)}, "
        f"where the bound is {first['lemma_bound']:.1f}; for unequal eigenvalues the bound is not sharp.",
        rows=(
            ("‖E u^t‖, every |B|", "converges", f"{contraction:.2g}^t"),
            *(
                (
                    f"E‖u^t‖² at |B| = {row['batch_size']}, {row['batch_size'] / row['lemma_bound']:.2f} of the bound",
                    "grows" if row["batch_size"] <= row["lemma_bound"] else "not said",
                    f"1 → {_at(row, step)} after {step} steps",
                )
                for row, step in zip(equal, steps, strict=True)
            ),
            (
                f"unequal eigenvalues, |B| = {middle['batch_size']}: E‖u^t‖² after {last} steps",
                f"{number(middle['mean_square']['printed'][last])}, by the proof's R^t",
                _at(middle, last),
            ),
            (
                "unequal eigenvalues: batches that diverge",
                f"up to {middle['lemma_bound']:.1f}",
                f"below {middle['critical_batch']:.1f}",
            ),
        ),
        details=(
            f"{numbers['runs']:,} runs of each setting. Equal eigenvalues: {first['eigenvalues'][0][1]:.0f} of them, "
            "λ = λmax/4, η = 1/λmax. Unequal: one five times as large as 60 others, λ = λmax/10, η = 1/(λmax+λ).",
            f"Over both tasks the simulation is off by {_spread(_deviations(everything, 'mean'))} standard errors in "
            f"the mean, and by {_spread(_deviations(everything, 'mean_square'))} in the mean square, at every t "
            f"where its standard error is below {_RESOLVED:.0%}.",
            f"Further it cannot tell, because the tail of ‖u^t‖² grows: for |B| = {first['batch_size']} and t = "
            f"{len(square['simulated']) - 1}, one run in a hundred carries "
            f"{square['share_of_the_largest_hundredth']:.0%} of the sum, the sample mean is {sample:.2f} and the "
            f"median run {median:.2f} of the expectation.",
            "The library's solver takes the same steps on the same draws (relative difference "
            f"{number(numbers['largest_difference_from_library'])}).",
            f"With unequal eigenvalues, at |B| = {middle['batch_size']}, R has the eigenvalue "
            f"{middle['largest_of_R']:.2f}, and yet the mean square falls.",
        ),
        errata=_errata(),
    )


def _errata() -> tuple[str, ...]:
    (_, equal, _), (_, unequal, _) = settings()
    bound = lemma_bound(equal)
    corrected = bound * (1 - 1 / len(equal.eigenvalues))
    shorter = replace(equal, step_size=1 / (equal.eigenvalues[0] + equal.damping))
    return (
        "E H̃² - H² is (Tr(H)H - H²)/|B|, not Tr(H)H/|B| as the lemma states; the proof's own E H̃² says so. With the "
        "Corollary's step η = 1/(λmax+λ), R's eigenvalue at λmax is then ≥ 1 only for |B| ≤ (λmax/(λmax+λ))² "
        f"(Tr(H)/λmax - 1): here {corrected:.1f} in place of {bound:.1f}, and at |B| = {equal.batch_size} it is "
        f"{float(theorem_matrix(shorter).max()):.3f}. A longer step, up to the 1/λmax that the lemma allows, restores "
        "the printed bound where Tr(H)/λmax ≥ (λmax+λ)/2λ.",
        "In the line for E H̃R_{k-1}H̃, the term Tr(HR_{k-1})H lacks its factor 1/|B|.",
        "The next line takes Tr(HR_{k-1})H for Tr(H)HR_{k-1}, which is true only where R_{k-1} is a multiple of I: for "
        "equal eigenvalues. In general R_k = Diag(M^k 1) with M_ii = Q_ii² and M_ij = η²λ_iλ_j/|B|, of which R is "
        "Diag(M 1). An eigenvalue of R above 1 does not make the mean square grow, one of M does: at |B| = "
        f"{unequal.batch_size} the largest are {float(theorem_matrix(unequal).max()):.3f} and {growth(unequal):.3f}.",
        "An eigenvalue equal to 1 gives a mean square that stays, not one that goes to infinity: the lemma needs > 1.",
        "The mean converges for η < 2/(λmax+λ); η ≤ 1/λmax implies it only if λ < λmax.",
    )


# --- the figure ------------------------------------------------------------------------------------------


def draw(numbers: dict[str, Any]) -> Figure:
    """Mean and mean square along the steps, for both tasks."""
    groups = (
        (numbers["equal_eigenvalues"], "equal eigenvalues, η = 1/λmax"),
        (numbers["unequal_eigenvalues"], "one large eigenvalue, η = 1/(λmax + λ)"),
    )
    with figure(2, 2, width=5.4, height=3.7) as (drawn, panels):
        for place, (rows, title) in enumerate(groups):
            mean, square = panels[2 * place : 2 * place + 2]
            _draw_mean(mean, rows)
            _draw_mean_square(square, rows)
            mean.set(yscale="log", xlabel="step t", ylabel="‖E u‖ / ‖u⁰‖", title=f"mean: {title}")
            square.set(yscale="log", xlabel="step t", ylabel="E‖u‖² / ‖u⁰‖²", title=f"mean square: {title}")
        drawn.suptitle("LiSSA on the paper's counter-example: the mean converges, the mean square need not")
    return drawn


def _draw_mean(panel: Axes, rows: Sequence[dict[str, Any]]) -> None:
    exact = rows[0]["mean"]["closed_form"]
    last = max(row["mean"]["resolved_until"] for row in rows)
    panel.plot(exact, "-", color="grey", label="closed form, the same for every |B|")
    for k, row in enumerate(rows):
        # a little to the side, where they overlap
        _points(panel, row["mean"], COLOURS[k], 0.012 * last * (k - 1))
        said = f"|B| = {row['batch_size']}, {row['batch_size'] / row['lemma_bound']:.2f} of the lemma's bound"
        panel.plot([], [], "o", color=COLOURS[k], label=said)
    panel.plot([], [], "o", color="grey", markerfacecolor="none", label="below 3 standard errors: noise")
    panel.set(xlim=(-0.5, min(last + 2, len(exact) - 1) + 0.5), ylim=(exact[last] / 50, 3.0))
    panel.legend(loc="lower left")


def _draw_mean_square(panel: Axes, rows: Sequence[dict[str, Any]]) -> None:
    differs = False
    for k, row in enumerate(rows):
        found = row["mean_square"]
        panel.plot(found["closed_form"], "-", color=COLOURS[k])
        _points(panel, found, COLOURS[k], 0.0)
        if not np.allclose(found["printed"], found["closed_form"]):
            differs = True
            panel.plot(found["printed"], "--", color=COLOURS[k], linewidth=1.0)
    panel.axhline(1.0, color="black", linewidth=0.8)
    panel.plot([], [], "-", color="grey", label="closed form")
    panel.errorbar([], [], [], fmt="o", color="grey", label="simulation ± 2 standard errors")
    panel.plot([], [], "o", color="grey", markerfacecolor="none", label="standard error above 3%")
    if differs:
        panel.plot([], [], "--", color="grey", linewidth=1.0, label="the paper's proof, $R^t$")
    panel.legend(loc="upper left")


def _points(panel: Axes, found: dict[str, Any], colour: str, shift: float) -> None:
    """Points with bars as far as the simulation can tell, hollow ones beyond."""
    told = found["resolved_until"] + 1
    value, bars = np.abs(found["simulated"]), 2 * np.array(found["stderr"])
    steps = np.arange(len(value)) + shift
    panel.errorbar(steps[:told], value[:told], bars[:told], fmt="o", color=colour, capsize=2, linewidth=1.0)
    panel.plot(steps[told:], value[told:], "o", color=colour, markerfacecolor="none", alpha=0.6)
