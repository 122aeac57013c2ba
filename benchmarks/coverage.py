"""Do 95% intervals hold 95% of the exact scores? Every solver on digits, over seeds.

Exact scores are those of conjugate gradients in float64, proven to a millionth of their size. `attribute` chooses for
"auto"; its interval is a statement about the typical score, and `bounds` a proven one about every score. The others are
what it could have chosen, and what a user can: each at the least effort that its plan asks for.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from scipy.stats import t as student
from torch import Tensor

import whence
from benchmarks.curves import correlation
from benchmarks.problems import Problem, digits, exact_scores_of_digits
from benchmarks.timing import report, save
from whence import Damped, Estimate, Lissa, ParamVector, Plan, Refinement, Spectrum
from whence.demo.digits import load_digits_with_flipped_labels
from whence.preconditioners import LowRank, Preconditioned, nystrom
from whence.progress import track

CONDITION_NUMBERS = (10.0, 100.0, 1000.0)
QUERIES = 8


@dataclass(frozen=True)
class Setting:
    """A problem at one damping, with what solvers are planned from."""

    problem: Problem
    spectrum: Spectrum

    @cached_property
    def damped(self) -> Damped:
        lambda_max = self.spectrum.lambda_max.value
        return Damped(self.problem.gnh, lambda_max / self.problem.condition_number)

    @cached_property
    def exact(self) -> Tensor:
        model = self.problem.gnh.network.model
        return exact_scores_of_digits(model, range(QUERIES), self.damped.damping)

    @cached_property
    def plan(self) -> Plan:
        return Plan.tuned(self.spectrum, self.damped.damping, num_terms=self.damped.num_terms, refine=1.0)

    @cached_property
    def preconditioner(self) -> LowRank:
        generator = torch.Generator().manual_seed(0)
        return nystrom(self.problem.gnh, self.damped.damping, rank=30, generator=generator)

    @cached_property
    def preconditioned_plan(self) -> Plan:
        changed = Preconditioned(self.problem.gnh, self.preconditioner)
        spectrum = whence.estimate_spectrum(changed, generator=torch.Generator().manual_seed(0))
        return Plan.preconditioned(spectrum, num_terms=self.damped.num_terms)

    @property
    def subset(self) -> int:
        assert self.spectrum.density is not None
        half = math.ceil(self.spectrum.density.dimension(self.damped.damping).value / 2)
        return min(half, self.damped.num_terms // 2)


SOLVERS: dict[str, Callable[[Setting], Any]] = {
    "LiSSA": lambda setting: Lissa(setting.plan),
    "LiSSA through Nyström of rank 30": lambda setting: Lissa(
        setting.preconditioned_plan, preconditioner=setting.preconditioner
    ),
    "refinement": lambda setting: Refinement(
        plan=setting.plan.replace(num_steps=-(-setting.plan.num_steps // 2)),
        subset=setting.subset,
        snapshot=False,
    ),
    "refinement with a snapshot": lambda setting: Refinement(
        plan=setting.plan.replace(num_steps=-(-setting.plan.num_steps // 2)),
        subset=setting.subset,
        snapshot=True,
    ),
}


def of_solver(setting: Setting, make: Callable[[Setting], Any], seeds: int) -> dict[str, Any]:
    """Share of scores within the intervals of a stochastic solver's chains."""
    covered, near = [], []
    for seed in range(seeds):
        solution = make(setting).solve(
            setting.damped, setting.problem.rhs, generator=torch.Generator().manual_seed(seed)
        )
        by_chain = _by_chain(setting.problem, solution.chains)
        mean, stderr = by_chain.mean(0), by_chain.std(0) / math.sqrt(len(by_chain))
        width = student.ppf(0.975, len(by_chain) - 1) * stderr
        covered.append(float(((mean - setting.exact).abs() <= width).double().mean()))
        near.append(correlation(mean, setting.exact))
    return _row(covered, near)


def _by_chain(problem: Problem, chains: tuple[ParamVector, ...]) -> Tensor:
    """``[chains, queries, examples]``."""
    return torch.stack([problem.scores(chain) for chain in chains])


def of_auto(setting: Setting, seeds: int) -> dict[str, Any]:
    """The same of `attribute` at its defaults, and the share of scores within its proven bounds."""
    data = load_digits_with_flipped_labels()
    queries = [data.test[i] for i in range(QUERIES)]
    covered, near, proven, solvers = [], [], [], set()
    for seed in range(seeds):
        found = whence.attribute(
            setting.problem.gnh.network.model, data.train, queries, task=whence.Classification(),
            damping=setting.damped.damping, accuracy=0.99, baseline=False, seed=seed,
        )  # fmt: skip
        low, high = found.interval(0.95)
        covered.append(float(((low <= setting.exact) & (setting.exact <= high)).double().mean()))
        near.append(correlation(found.scores, setting.exact))
        solvers.add(found.solve.solver)
        if found.solve.certificate is not None:
            proven.append(float(((found.scores - setting.exact).abs() <= found.bounds).double().mean()))
    return {**_row(covered, near), "chosen": sorted(solvers), "within_bounds": min(proven, default=None)}


def _row(covered: list[float], near: list[float]) -> dict[str, Any]:
    share, agreement = Estimate.from_samples(covered), Estimate.from_samples(near)
    return {"covered": share.value, "covered_stderr": share.stderr, "correlation": agreement.value}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.coverage", description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=10, help="solves of each solver at each damping (10)")
    options = parser.parse_args()
    torch.set_num_threads(1)  # many small products
    rows = []
    for condition_number in track(CONDITION_NUMBERS, "dampings"):
        problem = digits(condition_number, QUERIES)
        setting = Setting(
            problem, whence.estimate_spectrum(problem.gnh, generator=torch.Generator().manual_seed(0))
        )
        found = {"auto": of_auto(setting, options.seeds)}
        # LiSSA's cost grows with λmax/λ, and no plan would take it at 1000 here
        stochastic = SOLVERS if condition_number < 1000 else {}
        found |= {name: of_solver(setting, make, options.seeds) for name, make in stochastic.items()}
        rows += [{"solver": name, "condition_number": condition_number, **row} for name, row in found.items()]
    report(
        f"share of exact scores within 95% intervals, {QUERIES} queries × {options.seeds} seeds on digits",
        ("solver", "λmax/λ", "within", "correlation with exact scores"),
        [
            (
                row["solver"] + (f" ({', '.join(row['chosen'])})" if "chosen" in row else ""),
                f"{row['condition_number']:g}",
                f"{row['covered']:.3f} ± {row['covered_stderr']:.3f}",
                f"{row['correlation']:.4f}",
            )
            for row in rows
        ],
    )
    save("coverage", {"seeds": options.seeds, "rows": rows})


if __name__ == "__main__":
    main()
