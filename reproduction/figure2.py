"""Figure 2: how LiSSA converges with 2×, 1× and 0.1× the recommended batch, at equal data.

A solve for one training image is watched through its influence on test images, ``s_t = ⟨u^t, ∇ℓ(test)⟩``. The small
batch is run ten times and averaged, so that it sees as much data as the recommended one. What they should converge to
is the averaged tail of two longer runs: last iterates, which the paper looks at, keep the noise of their last steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from reproduction.bench import Bench
from reproduction.finding import Conclusion, Profile, number
from whence.errors import DivergenceError
from whence.operators import Damped
from whence.progress import ticker
from whence.report.drawing import COLOURS, figure
from whence.solvers import Lissa
from whence.solvers.lissa import LissaState
from whence.solvers.plan import Plan
from whence.vectors import ParamVector

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["conclude", "correlations", "draw", "measure"]

#: Multiple of the recommended batch, and how many runs are averaged.
_SETTINGS = ((2.0, 1), (1.0, 1), (0.1, 10))
_PAPER_BATCH = 100  # recommended, of ResNet-18
#: Steps, recorded points, test examples.
_EFFORTS: dict[Profile, tuple[int, int, int]] = {
    "quick": (200, 20, 100),
    "offline": (300, 30, 200),
    "paper": (1000, 50, 500),
}


def measure(bench: Bench) -> dict[str, Any]:
    """Run the three batch sizes for the first vision model."""
    key = bench.subjects("vision")[0]
    measured = bench.measured(key)
    found = bench.kept(f"convergence/{key}", lambda: _measure(bench, key))
    return {"name": measured.name, "data": measured.data_name, **found}


def _measure(bench: Bench, key: str) -> dict[str, Any]:
    steps, points, tests = _EFFORTS[bench.profile]
    measured, subject = bench.measured(key), bench.subject(key)
    gnh = subject.operator()
    constant = measured.spectrum.safe_constant
    recommended = Plan.from_spectrum(measured.spectrum, measured.damping, C=constant, chains=1)
    watched = gnh.gradients([subject.test[i] for i in range(min(tests, len(subject.test)))])
    image = int(torch.randperm(len(subject.train), generator=bench.generator())[0])
    damped, rhs = Damped(gnh, measured.damping), gnh.gradients([subject.train[image]])
    longer = Lissa(recommended.refined(4).replace(chains=2))
    end = longer.solve(damped, rhs, generator=bench.generator()).value.gram(watched).squeeze(0)
    record = sorted({max(1, round(steps * (k + 1) / points)) for k in range(points)})
    settings = []
    with ticker("LiSSA with three batch sizes", sum(runs for _, runs in _SETTINGS) * len(record)) as tick:
        for multiple, runs in _SETTINGS:
            size = min(max(1, round(multiple * recommended.batch_size)), gnh.num_terms)
            plan = recommended.replace(batch_size=size, num_steps=steps)
            paths = [_walk(damped, rhs, plan, watched, record, bench.seed + r, tick) for r in range(runs)]
            mean = _average(paths, len(record))
            curve = [None if c != c else c for c in correlations(mean, end).tolist()]
            known = [c for c in curve if c is not None]
            settings.append(
                {
                    "multiple": multiple,
                    "batch_size": size,
                    "runs": runs,
                    "diverged_at": [path.diverged_at for path in paths if path.diverged_at is not None],
                    "curve": curve,
                    "final": known[-1] if known else 0.0,
                    "last_step": record[len(known) - 1] if known else 0,
                    "between_steps": _between(mean),
                }
            )
    return {
        "settings": settings,
        "steps": record,
        "damping": measured.damping,
        "step_size": recommended.step_size,
        "recommended": recommended.batch_size,
        "constant": recommended.constant,
        "tests": watched.columns,
    }


@dataclass(frozen=True)
class _Path:
    """Influences along a run: ``[recorded steps, tests]``; rows after a divergence are missing."""

    rows: Tensor
    diverged_at: int | None


def _walk(
    A: Damped,
    rhs: ParamVector,
    plan: Plan,
    watched: ParamVector,
    record: list[int],
    seed: int,
    tick: Callable[[], object],
) -> _Path:
    """One run, watched at the recorded steps."""
    solver = Lissa(plan.replace(chains=1), average="last", recover=False)
    rows: list[Tensor] = []
    steps = 0

    def watch(state: LissaState) -> None:
        nonlocal steps
        steps = state.products
        if steps in record:
            iterate = state.finished[0] if state.chain is None else state.chain.iterate
            rows.append(iterate.gram(watched).squeeze(0))
            tick()

    try:
        solver.solve(A, rhs, generator=torch.Generator().manual_seed(seed), on_step=watch)
    except DivergenceError:
        return _Path(torch.stack(rows) if rows else torch.empty(0, watched.columns or 1), steps + 1)
    return _Path(torch.stack(rows), None)


def _average(paths: list[_Path], length: int) -> Tensor:
    """Mean over runs, NaN from where the first of them diverged."""
    together = min(len(path.rows) for path in paths)
    mean = torch.stack([path.rows[:together] for path in paths]).mean(0)
    missing = torch.full((length - together, paths[0].rows.shape[1]), float("nan"), dtype=torch.float64)
    return torch.cat([mean, missing])


def correlations(rows: Tensor, end: Tensor) -> Tensor:
    """Of every row with ``end``; zero where one of them is constant."""
    rows, end = rows - rows.mean(1, keepdim=True), end - end.mean()
    found: Tensor = (rows @ end) / (rows.norm(dim=1) * end.norm()).clamp_min(1e-300)
    return found


def _between(rows: Tensor) -> list[list[float | None]]:
    """Correlation of the influences at step s with those at step t, as the paper's heat maps have it."""
    return [[None if x != x else x for x in correlations(rows, row).tolist()] for row in rows]


def _divergence(setting: dict[str, Any]) -> str:
    """How many runs diverged and when, or nothing."""
    found = setting["diverged_at"]
    return f"{len(found)} of {setting['runs']} runs diverged, the first at step {min(found)}" if found else ""


def _outcome(setting: dict[str, Any]) -> str:
    reached = f"correlation {setting['final']:.3f} with the solution after {setting['last_step']} steps"
    return "; ".join(filter(None, [_divergence(setting), reached if setting["last_step"] else ""]))


def conclude(numbers: dict[str, Any]) -> Conclusion:
    """Whether the small batch is behind the others."""
    large, recommended, small = numbers["settings"]
    slower = small["diverged_at"] or small["final"] < min(large["final"], recommended["final"])
    labels = ("twice the recommended batch", "the recommended batch", "a tenth of it, mean of 10 runs")
    theirs = ("converges", "converges", "converges more slowly")
    return Conclusion(
        title="Figure 2: batches below the bound",
        claim="With a batch of a tenth of the recommended one LiSSA converges more slowly or not at all, although ten "
        "runs are averaged and the data used are the same.",
        holds=bool(slower),
        verdict=f"With a tenth of the recommended batch: {_outcome(small)}; with all of it: {_outcome(recommended)}.",
        rows=(
            ("model", "ResNet-18 on ImageNet", f"{numbers['name']} on {numbers['data']}"),
            *(
                (
                    label,
                    f"|B| = {round(setting['multiple'] * _PAPER_BATCH)}: {said}",
                    f"|B| = {setting['batch_size']}: {_outcome(setting)}",
                )
                for label, said, setting in zip(labels, theirs, numbers["settings"], strict=True)
            ),
        ),
        details=(
            f"λ = {number(numbers['damping'])}, η = {number(numbers['step_size'])}, recommended |B| = "
            f"{numbers['recommended']} (C = {numbers['constant']:.2f}), one random training image, {numbers['tests']} "
            "test examples. Last iterates, as in the paper.",
        ),
    )


def draw(numbers: dict[str, Any]) -> Figure:
    """The paper's three heat maps, and the correlation with the solution."""
    settings, steps = numbers["settings"], numbers["steps"]
    last = steps[-1]
    with figure(1, 4, width=3.4, height=3.4) as (drawn, panels):
        for panel, row in zip(panels, settings, strict=False):
            grid = [[float("nan") if x is None else x for x in line] for line in row["between_steps"]]
            shown = panel.imshow(
                grid, vmin=0, vmax=1, origin="lower", extent=(0, last, 0, last), cmap="viridis"
            )
            panel.grid(False)
            panel.text(
                last / 2,
                last / 2,
                _divergence(row).replace(", ", ",\n"),
                ha="center",
                va="center",
                fontsize=9,
            )
            runs = f", mean of {row['runs']} runs" if row["runs"] > 1 else ""
            title = f"|B| = {row['batch_size']} ({row['multiple']:g}×){runs}"
            panel.set(title=title, xlabel="step", ylabel="step")
        drawn.colorbar(shown, ax=panels[2], label="correlation of test influences", shrink=0.8)
        for k, row in enumerate(settings):
            known = [(s, c) for s, c in zip(steps, row["curve"], strict=True) if c is not None]
            label = f"{row['multiple']:g}×" + ("" if known else ", diverged")
            panels[3].plot([s for s, _ in known], [c for _, c in known], "o-", color=COLOURS[k], label=label)
        panels[3].set(xlabel="step", title="Correlation with the solution", ylim=(None, 1.02))
        panels[3].legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=3)
    return drawn
