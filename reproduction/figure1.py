"""Figure 1 (and 5 to 7): LiSSA beside the proximal Bregman response, one panel for each training image.

For a training image z, ``u = (H + λ)⁻¹∇ℓ(z)`` is solved by LiSSA and applied to the test images; and the model is
fine-tuned on z under the proximal Bregman objective, in float64, and the test losses are looked at. Both in our sign
and units; the first with its error bars.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from reproduction.bench import Bench, Measured
from reproduction.figure2 import correlations
from reproduction.finding import Conclusion, Profile, number
from reproduction.subjects import Subject
from whence.operators import Damped
from whence.report.drawing import COLOURS, figure
from whence.scoring import Scorer
from whence.solvers import Lissa
from whence.solvers.plan import Plan
from whence.validation.pbrf import pbrf
from whence.vectors import ParamVector

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["case_of", "conclude", "draw", "measure"]


@dataclass(frozen=True)
class _Effort:
    images: int
    tests: int
    full_batch: bool  # of the fine-tuning; else minibatches under LiSSA's plan, as in the paper
    refine: float
    chains: int  # of LiSSA


_EFFORTS: dict[Profile, _Effort] = {
    "quick": _Effort(images=3, tests=100, full_batch=True, refine=4.0, chains=4),
    "offline": _Effort(images=5, tests=200, full_batch=False, refine=1.0, chains=2),
    "paper": _Effort(images=25, tests=500, full_batch=False, refine=1.0, chains=2),
}
_AGREES = 0.9
_NEAR_ZERO = 0.01  # of the largest image's root mean square


def case_of(correlation: float, size: float, largest: float) -> int:
    """Which of the paper's three cases an image is: 1 both agree, 2 both are near zero, 3 neither.

    Args:
        correlation: of the two over the test images.
        size: root mean square of its scores, the larger of the two.
        largest: the same of the image with the largest.
    """
    if correlation >= _AGREES:
        return 1
    return 2 if size < _NEAR_ZERO * largest else 3


def measure(bench: Bench) -> dict[str, Any]:
    """Both sides for every image."""
    effort, key = _EFFORTS[bench.profile], bench.subjects("vision")[0]
    measured, subject = bench.measured(key), bench.subject(key)
    images = torch.randperm(len(subject.train), generator=bench.generator())[: effort.images].tolist()
    tests = torch.randperm(len(subject.test), generator=bench.generator(1))[: effort.tests].tolist()
    rows = [
        bench.kept(
            f"responses/{key}.{image}",
            partial(_image, subject, measured, effort, image, tests, bench.generator(k)),
        )
        for k, image in enumerate(images)
    ]
    return {
        "name": measured.name,
        "data": measured.data_name,
        "damping": measured.damping,
        "full_batch": effort.full_batch,
        "tests": tests,
        "rows": rows,
    }


def _image(
    subject: Subject,
    measured: Measured,
    effort: _Effort,
    image: int,
    tests: list[int],
    generator: torch.Generator,
) -> dict[str, Any]:
    gnh = subject.operator()
    plan = Plan.tuned(
        measured.spectrum,
        measured.damping,
        num_terms=gnh.num_terms,
        chains=effort.chains,
        refine=effort.refine,
    )
    damped, example = Damped(gnh, measured.damping), [subject.train[image]]
    solution = Lissa(plan).solve(damped, gnh.gradients(example), generator=generator)
    chosen = [subject.test[i] for i in tests]
    directions = ParamVector.stack([chain.column(0) for chain in solution.chains])
    by_chain = Scorer(gnh, directions, data=chosen).score(torch.arange(len(chosen)))
    lissa, stderr = by_chain.mean(0), by_chain.std(0) / len(by_chain) ** 0.5
    response = pbrf(
        subject.model,
        subject.train,
        example,
        chosen,
        task=subject.task,
        damping=measured.damping,
        params=subject.params.__contains__,
        plan=None if effort.full_batch else plan.replace(chains=1),
        generator=generator,
        importance=subject.importance,
    )
    tuned: Tensor = response.scores[:, 0]
    return {
        "image": image,
        "lissa": lissa.tolist(),
        "lissa_stderr": stderr.tolist(),
        "pbrf": tuned.tolist(),
        "correlation": float(correlations(lissa.unsqueeze(0), tuned)),
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
    }


def _cases(numbers: dict[str, Any]) -> list[int]:
    rows = numbers["rows"]
    largest = max(row["size"] for row in rows)
    return [case_of(row["correlation"], row["size"], largest) for row in rows]


def _range(values: list[float], digits: int) -> str:
    ends = [f"{x:.{digits}f}" for x in (min(values), max(values))] if values else ["no image"]
    return " to ".join(dict.fromkeys(ends))


def conclude(numbers: dict[str, Any]) -> Conclusion:
    """Which of the paper's cases the images are; that of an unconverged fine-tuning counts for nothing."""
    rows, cases = numbers["rows"], _cases(numbers)
    trusted = [case for row, case in zip(rows, cases, strict=True) if row["converged"]]
    agreeing = [row for row, case in zip(rows, cases, strict=True) if case == 1]
    correlation = _range([row["correlation"] for row in agreeing], 3)
    kind = "full batches" if numbers["full_batch"] else "minibatches under LiSSA's plan"
    return Conclusion(
        title="Figure 1: LiSSA against the proximal Bregman response",
        claim="With its recommended settings LiSSA approximates the PBRF: over test images the two lie along x = y, "
        "except where both are near zero, or so large that fine-tuning leaves the quadratic approximation's range.",
        holds=3 not in trusted if trusted else None,
        verdict=f"LiSSA and the PBRF agree for {len(agreeing)} of {len(rows)} random training images (correlation "
        f"{correlation}), are both near zero for {cases.count(2)}, and are large and disagree for {cases.count(3)}.",
        rows=(
            ("model", "ResNet-18 and -50 on ImageNet", f"{numbers['name']} on {numbers['data']}"),
            ("training images × test images", "25 × 500", f"{len(rows)} × {len(numbers['tests'])}"),
            ("(1) agree along x = y", "seen", f"{len(agreeing)} of {len(rows)}"),
            ("(2) both near zero", "seen", f"{cases.count(2)} of {len(rows)}"),
            ("(3) both large, do not agree", "seen", f"{cases.count(3)} of {len(rows)}"),
            ("correlation in case (1)", "not printed", correlation),
            ("slope in case (1)", "1", _range([row["slope"] for row in agreeing], 2)),
        ),
        details=(
            f"λ = {number(numbers['damping'])}; fine-tuned in float64 by {kind}.",
            *(
                f"Image {row['image']}: correlation {row['correlation']:.3f}, slope {row['slope']:.2f}, case {case}"
                + ("." if row["converged"] else "; its fine-tuning did not converge.")
                for row, case in zip(rows, cases, strict=True)
            ),
        ),
    )


def draw(numbers: dict[str, Any]) -> Figure:
    """A scatter plot for each image."""
    rows = numbers["rows"]
    columns = min(len(rows), 5)
    with figure(-(-len(rows) // columns), columns, width=3.0, height=3.1) as (drawn, panels):
        for panel, row, case in zip(panels, rows, _cases(numbers), strict=False):
            panel.errorbar(
                row["lissa"], row["pbrf"], xerr=[2 * e for e in row["lissa_stderr"]], fmt="o", markersize=2.5,
                elinewidth=0.5, alpha=0.6, color=COLOURS[0],
            )  # fmt: skip
            ends = [min(row["lissa"] + row["pbrf"]), max(row["lissa"] + row["pbrf"])]
            panel.plot(ends, ends, "--", color=COLOURS[6], linewidth=0.9)
            title = f"image {row['image']}: r = {row['correlation']:.3f}, case {case}"
            panel.set(title=title, xlabel="LiSSA (± 2 errors)")
        for panel in panels[len(rows) :]:
            panel.set_axis_off()
        panels[0].set_ylabel("PBRF")
    return drawn
