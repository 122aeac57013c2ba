"""Figure 1 (and 5 to 7): LiSSA beside the proximal Bregman response, one panel for each training image.

For a training image z, ``u = (H + λ)⁻¹∇ℓ(z)`` is solved by LiSSA and applied to the test images; and the model is
fine-tuned on z under the proximal Bregman objective, in float64, and the test losses are looked at. Both in our sign
and units; the first with its error bars.
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
from whence.model.gauss_newton import GaussNewton
from whence.operators import Damped
from whence.report.drawing import COLOURS, figure
from whence.runs.files import read_json, write_json
from whence.scoring import Scorer
from whence.solvers import Lissa
from whence.solvers.plan import Plan
from whence.validation.pbrf import pbrf
from whence.vectors import ParamVector

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["case_of", "run"]


@dataclass(frozen=True)
class _Effort:
    images: int
    tests: int
    full_batch: bool  # of the fine-tuning; else minibatches under LiSSA's plan, as in the paper
    refine: float
    chains: int  # of LiSSA
    tuning_chains: int  # of the fine-tuning


_EFFORTS: dict[Profile, _Effort] = {
    "quick": _Effort(images=3, tests=100, full_batch=True, refine=4.0, chains=4, tuning_chains=1),
    "offline": _Effort(images=5, tests=200, full_batch=False, refine=1.0, chains=2, tuning_chains=1),
    "paper": _Effort(images=25, tests=500, full_batch=False, refine=1.0, chains=2, tuning_chains=1),
}
_AGREES = 0.9
_NEAR_ZERO = 0.01  # of the largest image's root mean square

CASES = {
    1: "agree",
    2: "are both near zero",
    3: "are large and do not agree",
}


def case_of(correlation: float, size: float, largest: float) -> int:
    """Which of the paper's three cases an image is.

    Args:
        correlation: of the two over the test images.
        size: root mean square of its scores, the larger of the two.
        largest: the same of the image with the largest.
    """
    if correlation >= _AGREES:
        return 1
    return 2 if size < _NEAR_ZERO * largest else 3


def run(
    key: str, subject: Subject, measured: Measured, profile: Profile, directory: Path, *, seed: int = 0
) -> tuple[Finding, Figure]:
    """Both sides for every image; images that an earlier run left in ``directory`` are read."""
    if len(subject.test) == 0:
        raise OptionError(f"{subject.name} has no test examples; figure 1 needs a vision subject")
    effort = _EFFORTS[profile]
    order = torch.randperm(len(subject.train), generator=torch.Generator().manual_seed(seed))
    tests = torch.randperm(len(subject.test), generator=torch.Generator().manual_seed(seed + 1))[
        : effort.tests
    ]
    gnh: GaussNewton | None = None
    rows = []
    for number, image in enumerate(order[: effort.images].tolist()):
        path = directory / "responses" / f"{key}.{image}.json"
        if not path.exists():
            gnh = gnh or subject.operator()
            write_json(path, _image(subject, gnh, measured, effort, image, tests, seed + number))
        rows.append(read_json(path))
    largest = max(row["size"] for row in rows)
    for row in rows:
        row["case"] = case_of(row["correlation"], row["size"], largest)
    trusted = [row for row in rows if row["converged"]]
    words = "; ".join(
        f"image {row['image']}: correlation {row['correlation']:.3f}, slope {row['slope']:.2f}, case {row['case']}"
        f"{'' if row['converged'] else ' (its fine-tuning did not converge)'}"
        for row in rows
    )
    counts = ", ".join(
        f"({case}) {name} for {sum(row['case'] == case for row in rows)}" for case, name in CASES.items()
    )
    kind = "full batches" if effort.full_batch else "minibatches under LiSSA's plan"
    finding = Finding(
        name="figure1",
        title="Figure 1: LiSSA against the proximal Bregman response",
        claim="With its recommended settings LiSSA approximates the PBRF: over test images the two lie along x = y, "
        "except where both are near zero, or so large that fine-tuning leaves the quadratic approximation's range.",
        measured=f"{subject.name} on {subject.data_name}, λ = {measured.damping:.3g}, {len(rows)} random training "
        f"images × {len(tests)} test images, fine-tuned in float64 by {kind}. {words}. In the paper's three cases, "
        f"LiSSA and PBRF {counts}.",
        holds=all(row["case"] != 3 for row in trusted) if trusted else None,
        numbers={"rows": rows, "tests": tests.tolist(), "damping": measured.damping},
        profile=profile,
        seconds=sum(row["seconds"] for row in rows),
    )
    return finding, _draw(rows)


def _image(
    subject: Subject,
    gnh: GaussNewton,
    measured: Measured,
    effort: _Effort,
    image: int,
    tests: Tensor,
    seed: int,
) -> dict[str, Any]:
    started = time.perf_counter()
    plan = Plan.tuned(
        measured.spectrum,
        measured.damping,
        num_terms=gnh.num_terms,
        chains=effort.chains,
        refine=effort.refine,
    )
    generator = torch.Generator().manual_seed(seed)
    solution = Lissa(plan).solve(
        Damped(gnh, measured.damping), gnh.gradients([subject.train[image]]), generator=generator
    )
    chosen = [subject.test[int(i)] for i in tests]
    directions = ParamVector.stack([chain.column(0) for chain in solution.chains])
    by_chain = Scorer(gnh, directions, data=chosen).score(torch.arange(len(chosen)))
    lissa, stderr = by_chain.mean(0), by_chain.std(0) / len(by_chain) ** 0.5
    response = pbrf(
        subject.model,
        subject.train,
        [subject.train[image]],
        chosen,
        task=subject.task,
        damping=measured.damping,
        params=subject.params.__contains__,
        plan=None if effort.full_batch else plan.replace(chains=effort.tuning_chains),
        generator=generator,
        importance=subject.importance,
    )
    tuned = response.scores[:, 0]
    return {
        "image": image,
        "lissa": lissa.tolist(),
        "lissa_stderr": stderr.tolist(),
        "pbrf": tuned.tolist(),
        "correlation": _correlation(lissa, tuned),
        "slope": float((lissa * tuned).sum() / lissa.square().sum()),
        "size": max(float(x.square().mean().sqrt()) for x in (lissa, tuned)),
        "residual": float(solution.residual[0]),
        "solver_converged": bool(solution.converged[0]),
        "tuning_residual": float(response.residual[0]),
        "converged": bool(response.converged[0]),
        "nonlinearity": float(response.nonlinearity[0]),
        "epsilon": float(response.epsilon[0]),
        "batch_size": plan.batch_size,
        "num_steps": plan.num_steps,
        "seconds": time.perf_counter() - started,
    }


def _correlation(a: Tensor, b: Tensor) -> float:
    a, b = a - a.mean(), b - b.mean()
    return float((a * b).sum() / (a.norm() * b.norm()).clamp_min(1e-300))


def _draw(rows: list[dict[str, Any]]) -> Figure:
    columns = min(len(rows), 5)
    with figure(-(-len(rows) // columns), columns, width=3.0, height=3.1) as (drawn, panels):
        for panel, row in zip(panels, rows, strict=False):
            panel.errorbar(
                row["lissa"], row["pbrf"], xerr=[2 * e for e in row["lissa_stderr"]], fmt="o", markersize=2.5,
                elinewidth=0.5, alpha=0.6, color=COLOURS[0],
            )  # fmt: skip
            ends = [min(row["lissa"] + row["pbrf"]), max(row["lissa"] + row["pbrf"])]
            panel.plot(ends, ends, "--", color=COLOURS[6], linewidth=0.9)
            panel.set(
                title=f"image {row['image']}: r = {row['correlation']:.3f}, case {row['case']}",
                xlabel="LiSSA (± 2 errors)",
            )
        for panel in panels[len(rows) :]:
            panel.set_axis_off()
        panels[0].set_ylabel("PBRF")
    return drawn
