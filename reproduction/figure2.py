"""Figure 2: how LiSSA converges with 2×, 1× and 0.1× the recommended batch, at equal data.

A solve for one training image is watched through its influence on test images, ``s_t = ⟨u^t, ∇ℓ(test)⟩``. The small
batch is run ten times and averaged, so that it sees as much data as the recommended one. What they should converge to
is the averaged tail of two longer runs: last iterates, which the paper looks at, keep the noise of their last steps.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from reproduction.finding import Finding, Profile
from reproduction.spectra import Measured
from reproduction.subjects import Subject
from whence.errors import OptionError
from whence.operators import Damped
from whence.progress import ticker
from whence.report.drawing import COLOURS, figure
from whence.runs.files import read_json, write_json
from whence.solvers import Lissa
from whence.solvers.plan import Plan
from whence.vectors import ParamVector

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["run"]

#: Multiple of the recommended batch, and how many runs are averaged.
_SETTINGS = ((2.0, 1), (1.0, 1), (0.1, 10))
#: Steps, recorded points, test examples, training images.
_EFFORTS: dict[Profile, tuple[int, int, int, int]] = {
    "quick": (200, 20, 100, 1),
    "offline": (300, 30, 200, 1),
    "paper": (1000, 50, 500, 1),
}


@dataclass(frozen=True)
class _Path:
    """Influences along a run: ``[recorded steps, tests]``; rows after a divergence are missing."""

    rows: Tensor
    diverged_at: int | None


def run(
    key: str, subject: Subject, measured: Measured, profile: Profile, directory: Path, *, seed: int = 0
) -> tuple[Finding, Figure]:
    """Run the three batch sizes for one subject; what an earlier run left in ``directory`` is read."""
    if len(subject.test) == 0:
        raise OptionError(f"{subject.name} has no test examples to watch; figure 2 needs a vision subject")
    path = directory / "convergence" / f"{key}.json"
    if not path.exists():
        write_json(path, _measure(subject, measured, profile, seed))
    numbers = read_json(path)
    large, recommended, small = numbers["settings"]
    words = "; ".join(_outcome(row) for row in numbers["settings"])
    slower = small["diverged"] > 0 or small["final"] < min(large["final"], recommended["final"])
    finding = Finding(
        name="figure2",
        title="Figure 2: batches below the bound",
        claim="With a batch of a tenth of the recommended one LiSSA converges more slowly or not at all, although ten "
        "runs are averaged and the data used are the same.",
        measured=f"{subject.name} on {subject.data_name}, λ = {numbers['damping']:.3g}, η = "
        f"{numbers['step_size']:.3g}, recommended |B| = {numbers['recommended']}, {numbers['images']} training image"
        f"{'' if numbers['images'] == 1 else 's'}, "
        f"{numbers['tests']} test examples. {words}. Last iterates, as in the paper.",
        holds=bool(slower),
        numbers=numbers,
        profile=profile,
        seconds=numbers["seconds"],
    )
    return finding, _draw(numbers)


def _outcome(row: dict[str, Any]) -> str:
    """What came of one batch size, in words."""
    averaged = f", mean of {row['runs']} runs" if row["runs"] > 1 else ""
    parts = []
    if row["last_step"]:
        parts.append(f"correlation with the solution {row['final']:.3f} after {row['last_step']} steps")
    if row["diverged"]:
        first = min(row["diverged_at"])
        parts.append(f"{row['diverged']} of {row['total_runs']} runs diverged, the first at step {first}")
    return f"{row['multiple']:g}× ({row['batch_size']} per step{averaged}): {', '.join(parts)}"


def _measure(subject: Subject, measured: Measured, profile: Profile, seed: int) -> dict[str, Any]:
    started = time.perf_counter()
    steps, points, tests, images = _EFFORTS[profile]
    gnh = subject.operator()
    recommended = Plan.from_spectrum(
        measured.spectrum, measured.damping, C=measured.spectrum.safe_constant, chains=1
    )
    watched = gnh.gradients([subject.test[i] for i in range(min(tests, len(subject.test)))])
    chosen = torch.randperm(len(subject.train), generator=torch.Generator().manual_seed(seed))[:images]
    damped = Damped(gnh, measured.damping)
    record = sorted({max(1, round(steps * (k + 1) / points)) for k in range(points)})
    rows: list[dict[str, Any]] = []
    total = sum(runs for _, runs in _SETTINGS) * images * len(record)
    paths: dict[float, list[list[_Path]]] = {}
    with ticker("LiSSA with three batch sizes", total) as tick:
        for multiple, runs in _SETTINGS:
            size = min(max(1, round(multiple * recommended.batch_size)), gnh.num_terms)
            plan = recommended.replace(batch_size=size, num_steps=steps)
            paths[multiple] = [
                [_walk(damped, gnh.gradients([subject.train[int(i)]]), plan, watched, record, seed + r, tick)
                 for r in range(runs)]
                for i in chosen
            ]  # fmt: skip
    longer = recommended.refined(4).replace(chains=2)
    ends = [
        Lissa(longer)
        .solve(damped, gnh.gradients([subject.train[int(i)]]), generator=torch.Generator().manual_seed(seed))
        .value.gram(watched)
        .squeeze(0)
        for i in chosen
    ]
    for multiple, runs in _SETTINGS:
        per_image = [_average(found, len(record)) for found in paths[multiple]]
        curves = [_correlation(average, end) for average, end in zip(per_image, ends, strict=True)]
        curve = torch.stack(curves).mean(0)
        diverged = sum(path.diverged_at is not None for found in paths[multiple] for path in found)
        known = curve[~curve.isnan()]
        rows.append(
            {
                "multiple": multiple,
                "batch_size": min(max(1, round(multiple * recommended.batch_size)), gnh.num_terms),
                "runs": runs,
                "total_runs": runs * images,
                "diverged": diverged,
                "diverged_at": [p.diverged_at for found in paths[multiple] for p in found if p.diverged_at],
                "curve": [None if bool(c.isnan()) else float(c) for c in curve],
                "final": float(known[-1]) if len(known) else 0.0,
                "last_step": record[len(known) - 1] if len(known) else 0,
                "between_steps": _between(per_image[0]),
            }
        )
    return {
        "settings": rows,
        "steps": record,
        "damping": measured.damping,
        "step_size": recommended.step_size,
        "recommended": recommended.batch_size,
        "constant": recommended.constant,
        "tests": watched.columns,
        "images": images,
        "seconds": time.perf_counter() - started,
    }


def _walk(
    A: Damped, rhs: ParamVector, plan: Plan, watched: ParamVector, record: list[int], seed: int, tick: Any
) -> _Path:
    """One run, watched at the recorded steps."""
    solver = Lissa(plan, average="last")
    chain = solver.start(A, rhs, seed)
    rows: list[Tensor] = []
    for step in record:
        if solver.advance(chain, A, rhs, plan, until=step) is not None:
            return _Path(torch.stack(rows) if rows else torch.empty(0, watched.columns or 1), chain.step)
        rows.append(chain.iterate.gram(watched).squeeze(0))
        tick()
    return _Path(torch.stack(rows), None)


def _average(paths: list[_Path], length: int) -> Tensor:
    """Mean over runs, NaN from where the first of them diverged."""
    together = min(len(path.rows) for path in paths)
    mean = torch.stack([path.rows[:together] for path in paths]).mean(0)
    missing = torch.full((length - together, paths[0].rows.shape[1]), float("nan"), dtype=torch.float64)
    return torch.cat([mean, missing])


def _correlation(rows: Tensor, end: Tensor) -> Tensor:
    rows, end = rows - rows.mean(1, keepdim=True), end - end.mean()
    correlation: Tensor = (rows @ end) / (rows.norm(dim=1) * end.norm())
    return correlation


def _between(rows: Tensor) -> list[list[float | None]]:
    """Correlation of the influences at step s with those at step t, as the paper's heat maps have it."""
    centred = rows - rows.mean(1, keepdim=True)
    unit = centred / centred.norm(dim=1, keepdim=True)
    return [[None if x != x else x for x in row] for row in (unit @ unit.T).tolist()]


def _draw(numbers: dict[str, Any]) -> Figure:
    settings, steps = numbers["settings"], numbers["steps"]
    with figure(1, 4, width=3.4, height=3.4) as (drawn, panels):
        for panel, row in zip(panels, settings, strict=False):
            grid = torch.tensor([[float("nan") if x is None else x for x in r] for r in row["between_steps"]])
            shown = panel.imshow(
                grid.numpy(),
                vmin=0,
                vmax=1,
                origin="lower",
                extent=(0, steps[-1], 0, steps[-1]),
                cmap="viridis",
            )
            panel.grid(False)
            if row["diverged"]:
                first = min(row["diverged_at"])
                said = f"{row['diverged']} of {row['total_runs']} runs diverged,\nthe first at step {first}"
                panel.text(steps[-1] / 2, steps[-1] / 2, said, ha="center", va="center", fontsize=9)
            runs = f", mean of {row['runs']} runs" if row["runs"] > 1 else ""
            panel.set(
                title=f"|B| = {row['batch_size']} ({row['multiple']:g}×){runs}", xlabel="step", ylabel="step"
            )
        drawn.colorbar(shown, ax=panels[2], label="correlation of test influences", shrink=0.8)
        for k, row in enumerate(settings):
            known = [(s, c) for s, c in zip(steps, row["curve"], strict=True) if c is not None]
            panels[3].plot(
                [s for s, _ in known],
                [c for _, c in known],
                "o-",
                color=COLOURS[k],
                label=f"{row['multiple']:g}×" + ("" if known else ", diverged"),
            )
        panels[3].set(xlabel="step", title="Correlation with the solution", ylim=(None, 1.02))
        panels[3].legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=3)
    return drawn
