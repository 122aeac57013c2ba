"""The paper's counter-example: LiSSA that converges on average and diverges in mean square.

Two tasks of `reproduction.signed_inputs`, three batch sizes each, followed in many independent runs and compared
with the closed forms. The first has equal eigenvalues, where the paper's proof is exact. The second has not: there
the proof's ``E‖u^t‖² = [u⁰]ᵀR^t u⁰`` predicts a divergence that does not happen.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from reproduction.finding import Finding, Profile, check_profile
from reproduction.signed_inputs import (
    Paths,
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

__all__ = ["run", "settings"]

_RUNS = {"quick": 2000, "offline": 30_000, "paper": 30_000}
#: Within how many standard errors simulation and closed form agree, over all points together. The tails are long:
#: a normal variable would be within four.
_ERRORS = 5.0
_SAME = 1e-12


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


def run(profile: Profile, *, generator: torch.Generator) -> tuple[Finding, Figure]:
    """Simulate the counter-example and compare it with its closed forms.

    Args:
        profile: ``"quick"`` for a few seconds; ``"offline"`` and ``"paper"`` for enough runs to tell clearly.
        generator: all randomness comes from here.
    """
    check_profile(profile)
    begin = time.perf_counter()
    runs = _RUNS[profile]
    equal, unequal = settings()
    followed = []
    with ticker("counter-example", len(equal) + len(unequal)) as tick:
        for setting in (*equal, *unequal):
            followed.append(simulate(setting, runs=runs, generator=generator))
            tick()
    first, second = followed[: len(equal)], followed[len(equal) :]
    difference = max(_library_difference(setting, generator) for setting in (*equal, *unequal))
    drawn = _draw(first, second)
    finding = Finding(
        name="counterexample",
        title="Counter-example: converges on average, diverges in mean square",
        claim=(
            "There is a binary classification task on which LiSSA, with a step η ≤ 1/λmax, converges on average and "
            "diverges in mean square when |B| ≤ (λmax/(λmax+λ))² Tr(H)/λmax."
        ),
        measured=_measured(first, second, difference),
        holds=_verdict(first, difference),
        numbers={
            "runs": runs,
            "largest_difference_from_library": difference,
            "equal_eigenvalues": [_numbers(paths) for paths in first],
            "unequal_eigenvalues": [_numbers(paths) for paths in second],
        },
        profile=profile,
        seconds=time.perf_counter() - begin,
        errata=_errata(equal[1], unequal[1]),
    )
    return finding, drawn


# --- what was found ----------------------------------------------------------------------------------------------


def _library_difference(setting: Setting, generator: torch.Generator) -> float:
    """Largest relative difference between a run by the library's solver and by the simulation, on the same draws."""
    state = generator.get_state()
    ours = simulate(setting, runs=1, generator=generator).total
    generator.set_state(state)
    theirs = library_path(setting, generator)
    return float(((ours - theirs).norm(dim=1) / ours.norm(dim=1)).max())


def _deviations(paths: Paths) -> tuple[Tensor, Tensor]:
    """Simulation less closed form, in standard errors: of the mean at every t, of the mean square while resolved."""
    mean = (paths.mean - mean_path(paths.setting).norm(dim=1))[1:] / paths.mean_stderr[1:]
    square = (paths.square - mean_square_path(paths.setting))[1:] / paths.square_stderr[1:]
    return mean, square[: paths.resolved]


def _grows(paths: Paths) -> bool | None:
    """Whether the mean square has grown or fallen, by the simulation alone; None where it cannot tell."""
    last = paths.resolved
    if last == 0 or abs(float(paths.square[last]) - 1) <= _ERRORS * float(paths.square_stderr[last]):
        return None
    return float(paths.square[last]) > 1


def _mean_falls(paths: Paths) -> bool | None:
    """Whether the mean has fallen below half its start, by the simulation alone."""
    size, error = paths.mean.abs()[1:], paths.mean_stderr[1:]
    told = size[: max(paths.mean_resolved, 1)] + _ERRORS * error[: max(paths.mean_resolved, 1)]
    return True if float(told.min()) < 0.5 else None


def _verdict(first: Sequence[Paths], difference: float) -> bool | None:
    """The lemma's claim on the task with equal eigenvalues: two batches within the bound, one above."""
    deviations = torch.cat([z for paths in first for z in _deviations(paths)])
    if float(deviations.abs().max()) > _ERRORS or difference > _SAME:
        return False
    grows = [_grows(paths) for paths in first]
    falls = [_mean_falls(paths) for paths in first]
    if None in grows or None in falls:
        return None
    return grows == [True, True, False]


def _numbers(paths: Paths) -> dict[str, Any]:
    setting = paths.setting
    mean_deviations, square_deviations = _deviations(paths)
    return {
        "eigenvalues": _counted(setting.eigenvalues),
        "damping": setting.damping,
        "step_size": setting.step_size,
        "batch_size": setting.batch_size,
        "lemma_bound": lemma_bound(setting),
        "critical_batch": critical_batch(setting),
        "largest_of_R": float(theorem_matrix(setting).max()),
        "growth_per_step": growth(setting),
        "mean": {
            "closed_form": mean_path(setting).norm(dim=1).tolist(),
            "simulated": paths.mean.tolist(),
            "stderr": paths.mean_stderr.tolist(),
            "resolved_until": paths.mean_resolved,
            "deviations_in_stderr": mean_deviations.tolist(),
        },
        "mean_square": {
            "closed_form": mean_square_path(setting).tolist(),
            "printed": printed_mean_square_path(setting).tolist(),
            "simulated": paths.square.tolist(),
            "stderr": paths.square_stderr.tolist(),
            "median": paths.squares.median(0).values.tolist(),
            "resolved_until": paths.resolved,
            "deviations_in_stderr": square_deviations.tolist(),
            "share_of_the_largest_hundredth": _share_of_the_largest(paths),
        },
    }


def _share_of_the_largest(paths: Paths) -> float:
    """What the largest hundredth of the runs contributes to the last mean square."""
    final = paths.squares[:, -1]
    return float(final.topk(max(1, len(final) // 100)).values.sum() / final.sum())


def _spread(deviations: Tensor) -> str:
    root = float(deviations.square().mean().sqrt())
    return f"{root:.1f} (root mean square; {float(deviations.abs().max()):.1f} at most, of {len(deviations)})"


def _counted(values: Sequence[float]) -> list[list[float]]:
    """``[value, how often]``."""
    return [[value, float(values.count(value))] for value in sorted(set(values), reverse=True)]


def _measured(first: Sequence[Paths], second: Sequence[Paths], difference: float) -> str:
    everything = (*first, *second)
    mean_z = torch.cat([_deviations(paths)[0] for paths in everything])
    square_z = torch.cat([_deviations(paths)[1] for paths in everything])
    setting, longest = first[0].setting, first[0]
    batches = ", ".join(str(paths.setting.batch_size) for paths in first)
    steps = ", ".join(str(paths.resolved) for paths in first)
    exact = ", ".join(f"{float(mean_square_path(paths.setting)[paths.resolved]):.3g}" for paths in first)
    found = ", ".join(f"{float(paths.square[paths.resolved]):.3g}" for paths in first)
    contraction = abs(1 - setting.step_size * (setting.eigenvalues[0] + setting.damping))
    final = float(mean_square_path(setting)[-1])
    short, median = float(longest.square[-1]) / final, float(longest.squares[:, -1].median()) / final
    middle, last = second[1], second[1].resolved
    return (
        f"{len(longest.along):,} runs of each setting. With {len(setting.eigenvalues)} equal eigenvalues, λ = λmax/4 "
        f"and η = 1/λmax the bound is {lemma_bound(setting):.1f}. For |B| = {batches}, E‖u^t‖² (1 at the start) after "
        f"{steps} steps is {exact} in closed form and {found} in the simulation, while ‖E u^t‖ is {contraction:.2g}^t "
        f"for all. Over both tasks the simulation is off by {_spread(mean_z)} standard errors in the mean, and by "
        f"{_spread(square_z)} in the mean square, at every t where its standard error is below 3%. Further it cannot "
        f"tell, because the tail of ‖u^t‖² grows: for |B| = {setting.batch_size} and t = {setting.steps}, one run in a "
        f"hundred carries {_share_of_the_largest(longest):.0%} of the sum, the sample mean is {short:.2f} and the "
        f"median run {median:.2f} of the expectation. The library's solver takes the same steps on the same draws "
        f"(relative difference {difference:.0e}). With unequal eigenvalues the proof's R^t is wrong: at |B| = "
        f"{middle.setting.batch_size}, within the bound of {lemma_bound(middle.setting):.1f}, R has the eigenvalue "
        f"{float(theorem_matrix(middle.setting).max()):.2f} and [u⁰]ᵀR^t u⁰ is "
        f"{float(printed_mean_square_path(middle.setting)[last]):.3g} after {last} steps, but the mean square is "
        f"{float(middle.square[last]):.3g} ± {float(middle.square_stderr[last]):.1g} (exactly "
        f"{float(mean_square_path(middle.setting)[last]):.3g}). It grows there only for batches below "
        f"{critical_batch(middle.setting):.1f}."
    )


def _errata(equal: Setting, unequal: Setting) -> tuple[str, ...]:
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


# --- the figure --------------------------------------------------------------------------------------------------


def _draw(first: Sequence[Paths], second: Sequence[Paths]) -> Figure:
    groups = ((first, "equal eigenvalues, η = 1/λmax"), (second, "one large eigenvalue, η = 1/(λmax + λ)"))
    with figure(2, 2, width=5.4, height=3.7) as (drawn, panels):
        for row, (group, title) in enumerate(groups):
            mean, square = panels[2 * row], panels[2 * row + 1]
            _draw_mean(mean, group)
            _draw_mean_square(square, group)
            mean.set_title(f"mean: {title}")
            square.set_title(f"mean square: {title}")
        drawn.suptitle("LiSSA on the paper's counter-example: the mean converges, the mean square need not")
    return drawn


def _draw_mean(panel: Axes, group: Sequence[Paths]) -> None:
    exact, bound = mean_path(group[0].setting).norm(dim=1), lemma_bound(group[0].setting)
    last = max(paths.mean_resolved for paths in group)
    panel.plot(exact, "-", color="grey", label="closed form, the same for every |B|")
    for shift, (colour, paths) in enumerate(zip(COLOURS, group, strict=False)):
        # a little to the side, where they overlap
        _points(
            panel,
            paths.mean.abs(),
            paths.mean_stderr,
            paths.mean_resolved,
            colour,
            0.012 * last * (shift - 1),
        )
        batch = paths.setting.batch_size
        panel.plot(
            [], [], "o", color=colour, label=f"|B| = {batch}, {batch / bound:.2f} of the lemma's bound"
        )
    panel.plot([], [], "o", color="grey", markerfacecolor="none", label="below 3 standard errors: noise")
    panel.set_xlim(-0.5, min(last + 2, len(exact) - 1) + 0.5)
    panel.set_ylim(bottom=float(exact[last]) / 50, top=3.0)
    _label(panel, "‖E u‖ / ‖u⁰‖")
    panel.legend(loc="lower left")


def _draw_mean_square(panel: Axes, group: Sequence[Paths]) -> None:
    differs = False
    for colour, paths in zip(COLOURS, group, strict=False):
        exact, printed = mean_square_path(paths.setting), printed_mean_square_path(paths.setting)
        panel.plot(exact, "-", color=colour)
        _points(panel, paths.square, paths.square_stderr, paths.resolved, colour, 0.0)
        if not torch.allclose(printed, exact):
            differs = True
            panel.plot(printed, "--", color=colour, linewidth=1.0)
    panel.axhline(1.0, color="black", linewidth=0.8)
    panel.plot([], [], "-", color="grey", label="closed form")
    panel.errorbar([], [], [], fmt="o", color="grey", label="simulation ± 2 standard errors")
    panel.plot([], [], "o", color="grey", markerfacecolor="none", label="standard error above 3%")
    if differs:
        panel.plot([], [], "--", color="grey", linewidth=1.0, label="the paper's proof, $R^t$")
    _label(panel, "E‖u‖² / ‖u⁰‖²")
    panel.legend(loc="upper left")


def _label(panel: Axes, quantity: str) -> None:
    panel.set_yscale("log")
    panel.set_xlabel("step t")
    panel.set_ylabel(quantity)


def _points(panel: Axes, value: Tensor, stderr: Tensor, resolved: int, colour: str, shift: float) -> None:
    """Points with bars as far as the simulation can tell, hollow ones beyond."""
    steps = torch.arange(len(value)) + shift
    told = torch.arange(len(value)) <= resolved
    panel.errorbar(
        steps[told], value[told], 2 * stderr[told], fmt="o", color=colour, capsize=2, linewidth=1.0
    )
    panel.plot(steps[~told], value[~told], "o", color=colour, markerfacecolor="none", alpha=0.6)
