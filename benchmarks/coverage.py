"""Do 95% intervals hold 95% of the exact scores? Every solver on digits; certain models; `auto` on larger models.

Exact scores are those of conjugate gradients in float64, proven to a millionth of their size. `attribute` chooses for
"auto"; its interval is a statement about the typical score, and `bounds` a proven one about every score. The others are
what it could have chosen, and what a user can: each at the least effort that its plan asks for. On the larger models
scores are compared with those of conjugate gradients in float32 that should be right to 1% of their spread.

Models are made certain by multiplying their last layer; and data say little where there is one example, or all are the
same, or there are a few. Then intervals must hold, or the result must doubt them (`Attribution.doubts`).
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from scipy.stats import t as student
from torch import Tensor, nn

import whence
from benchmarks.curves import correlation
from benchmarks.problems import Problem, digits, exact_scores_of_digits, llama, resnet
from benchmarks.timing import RESULTS, report, save
from benchmarks.works import work
from whence import (
    ConjugateGradient,
    Damped,
    Estimate,
    GaussNewton,
    Lissa,
    ParamVector,
    Plan,
    Spectrum,
)
from whence.demo.digits import load_digits_with_flipped_labels
from whence.errors import OptionError, SolverError, WhenceWarning
from whence.preconditioners import LowRank, Preconditioned, nystrom
from whence.progress import track
from whence.scoring import Scorer

CONDITION_NUMBERS = (10.0, 100.0, 1000.0)
LARGER: tuple[Callable[[], Problem], ...] = (
    lambda: resnet(100.0, 2, images=400),
    lambda: llama(100.0, 4, 2),
    lambda: llama(100.0, 4),
)
QUERIES = 8
#: Of certain models: works, what their last layer is multiplied by, λmax/λ, training examples, queries, and the share
#: of scores that must lie within intervals that are not doubted.
CERTAIN, FACTORS, CERTAIN_CONDITION, CERTAIN_EXAMPLES, CERTAIN_QUERIES, ENOUGH = (
    ("digits", "mnist"), (1, 3, 10, 30), 20.0, 500, 4, 0.9,
)  # fmt: skip
#: Data that say little, of models as they were trained: what is left of the examples.
FEW: dict[str, Callable[[list[Any]], list[Any]]] = {
    "one example": lambda examples: examples[:1],
    "50 equal": lambda examples: examples[:1] * 50,
    "10 examples": lambda examples: examples[:10],
}
SETTINGS: tuple[float | str, ...] = (*FACTORS, *FEW)
#: What is asked of `attribute`; "quick" is the quick answer.
ASKED: dict[str, dict[str, Any]] = {
    "cg": {"solver": "cg"},
    "lissa": {"solver": "lissa"},
    "quick": {"accuracy": "quick"},
}


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


SOLVERS: dict[str, Callable[[Setting], Any]] = {
    "LiSSA": lambda setting: Lissa(setting.plan),
    "LiSSA through Nyström of rank 30": lambda setting: Lissa(
        setting.preconditioned_plan, preconditioner=setting.preconditioner
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


def of_larger(problem: Problem) -> dict[str, Any]:
    """One run of `attribute` on a larger model, also for the 20 largest scores of every query."""
    gnh = problem.gnh
    found = whence.attribute(
        gnh.network.model, gnh.terms.data, problem.queries, task=gnh.task, baseline=False, accuracy=0.99,
        damping=f"lambda_max/{problem.condition_number:g}",
    )  # fmt: skip
    damped = Damped(gnh, found.solve.plan.damping)
    solver = ConjugateGradient(score_error=problem.proven, max_iterations=400)
    solution = solver.solve(damped, problem.rhs, generator=torch.Generator())
    assert bool(solution.converged.all())
    exact = Scorer(gnh, solution.value).score(torch.arange(len(gnh.terms)))
    low, high = found.interval(0.95)
    inside = (low <= exact) & (exact <= high)
    largest = exact.abs().topk(20).indices
    certified = found.solve.certificate is not None
    return {
        "name": problem.name,
        "covered": float(inside.double().mean()),
        "largest_covered": float(inside.gather(1, largest).double().mean()),
        "correlation": correlation(found.scores, exact),
        "half_width": float(((high - low) / 2).mean() / exact.std(1).mean()),
        "chosen": f"{found.solve.solver}, {found.solve.num_products} products",
        "within_bounds": float(((found.scores - exact).abs() <= found.bounds).double().mean())
        if certified
        else None,
    }


def of_certain(
    name: str, trained: nn.Module, setting: float | str, solvers: Sequence[str], seeds: range
) -> list[dict[str, Any]]:
    """Solvers in both precisions, on a model whose last layer is multiplied, or on data that say little."""
    model, task = copy.deepcopy(trained), work(name).task
    if not isinstance(setting, str):
        with torch.no_grad():
            for parameter in list(model.children())[-1].parameters():
                parameter.mul_(setting)

    def examples(part: tuple[Tensor, ...], count: int, dtype: torch.dtype) -> list[Any]:
        return [(x.to(dtype), int(y)) for x, y in zip(part[0][:count], part[1][:count], strict=True)]

    def problem(dtype: torch.dtype) -> tuple[nn.Module, list[Any], list[Any]]:
        data = work(name).data()
        train = examples(data.train, CERTAIN_EXAMPLES, dtype)
        if isinstance(setting, str):
            train = FEW[setting](train[seeds.start % 100 :])
        return copy.deepcopy(model).to(dtype), train, examples(data.test, CERTAIN_QUERIES, dtype)

    wide, train, queries = problem(torch.float64)
    gnh = GaussNewton(wide, task, train)
    top = whence.estimate_spectrum(gnh, generator=torch.Generator().manual_seed(0)).lambda_max.value
    damping = top / CERTAIN_CONDITION
    solver = ConjugateGradient(tolerance=1e-6, max_iterations=1000)
    solution = solver.solve(Damped(gnh, damping), gnh.gradients(queries), generator=torch.Generator())
    assert bool(solution.converged.all())
    exact = Scorer(gnh, solution.value).score(torch.arange(len(train)))
    rows = []
    for dtype in (torch.float32, torch.float64):
        for method in solvers:
            covered, doubted, refused, passes = [], 0, 0, 0.0
            for seed in seeds:
                inputs = problem(dtype)
                try:
                    found = whence.attribute(
                        *inputs, task=task, damping=damping, baseline=False, seed=seed, **ASKED[method]
                    )
                except (SolverError, OptionError):
                    refused += 1
                    continue
                low, high = found.interval(0.95)
                covered.append(float(((low <= exact) & (exact <= high)).double().mean()))
                doubted += bool(found.doubts)
                passes = max(passes, found.solve.num_term_products / len(train))
            held = sum(covered) / len(covered) if covered else math.nan
            rows.append(
                {"work": name, "setting": setting, "dtype": str(dtype).removeprefix("torch."), "solver": method,
                 "covered": held, "doubted": doubted / len(seeds), "refused": refused / len(seeds),
                 "passes_over_data": passes, "passes": held >= ENOUGH or doubted + refused == len(seeds)}
            )  # fmt: skip
    return rows


def on_certain_models(seeds: range, solvers: Sequence[str], settings: Sequence[float | str]) -> None:
    """Shown and saved, after every setting: LiSSA takes long where few examples carry the curvature.

    Rows of other solvers and settings that were saved with the same seeds are kept.
    """
    name = "coverage_certain" + (f"_{seeds.start}" if seeds.start else "")
    path, about = RESULTS / f"{name}.json", {"first_seed": seeds.start, "seeds": len(seeds)}
    rows: list[dict[str, Any]] = []
    if path.exists():
        saved = json.loads(path.read_text())["results"]
        if {name: saved.get(name) for name in about} == about:
            rows = [
                row for row in saved["rows"] if row["solver"] not in solvers or row["setting"] not in settings
            ]
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", WhenceWarning
        )  # that estimates contradict each other, which a result doubts
        for certain in CERTAIN:
            trained = work(certain).fit(range(len(work(certain).train_set())), seeds.start).model
            for setting in settings:
                rows += of_certain(certain, trained, setting, solvers, seeds)
                save(
                    name,
                    {**about, "condition_number": CERTAIN_CONDITION, "enough": ENOUGH, "rows": rows},
                )
    report(
        f"share of exact scores within 95% intervals, {CERTAIN_QUERIES} queries × {len(seeds)} seeds, last layer "
        "multiplied or data that say little",
        (
            "work",
            "last layer ×, or data",
            "precision",
            "solver",
            "within",
            "doubted",
            "refused",
            "passes",
            "≥ 0.9, or told",
        ),
        [
            (
                row["work"],
                row["setting"],
                row["dtype"],
                row["solver"],
                f"{row['covered']:.3f}",
                f"{row['doubted']:.0%}",
                f"{row.get('refused', 0.0):.0%}",
                f"{row.get('passes_over_data', math.nan):,.0f}",
                "PASS" if row["passes"] else "MISS",
            )
            for row in rows
        ],
    )


def _row(covered: list[float], near: list[float]) -> dict[str, Any]:
    share, agreement = Estimate.from_samples(covered), Estimate.from_samples(near)
    return {"covered": share.value, "covered_stderr": share.stderr, "correlation": agreement.value}


def on_digits(seeds: int) -> None:
    """Every solver, shown and saved."""
    rows = []
    for condition_number in track(CONDITION_NUMBERS, "dampings"):
        problem = digits(condition_number, QUERIES)
        setting = Setting(
            problem, whence.estimate_spectrum(problem.gnh, generator=torch.Generator().manual_seed(0))
        )
        found = {"auto": of_auto(setting, seeds)}
        # LiSSA's cost grows with λmax/λ, and no plan would take it at 1000 here
        stochastic = SOLVERS if condition_number < 1000 else {}
        found |= {name: of_solver(setting, make, seeds) for name, make in stochastic.items()}
        rows += [{"solver": name, "condition_number": condition_number, **row} for name, row in found.items()]
    report(
        f"share of exact scores within 95% intervals, {QUERIES} queries × {seeds} seeds on digits",
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
    save("coverage", {"seeds": seeds, "rows": rows})


def on_larger_models() -> None:
    """`auto`, shown and saved."""
    rows = [of_larger(make()) for make in track(LARGER, "models")]
    report(
        "auto: share of exact scores within 95% intervals",
        ("", "within", "of the 20 largest", "within proven bounds", "half width / spread", "correlation"),
        [
            (
                f"{row['name']} ({row['chosen']})",
                *(
                    f"{row[name]:.3f}"
                    for name in ("covered", "largest_covered", "within_bounds", "half_width")
                ),
                f"{row['correlation']:.4f}",
            )
            for row in rows
        ],
    )
    save("coverage_larger", {"rows": rows})


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.coverage", description=__doc__.split("\n")[0])
    parser.add_argument("which", nargs="?", default="all", choices=["digits", "certain", "larger", "all"])
    parser.add_argument("--seeds", type=int, default=10, help="solves of each solver at each damping (10)")
    parser.add_argument(
        "--first-seed", type=int, default=0, help="of certain models' training and solves (0)"
    )
    parser.add_argument(
        "--solvers", nargs="*", choices=list(ASKED), default=list(ASKED), help="on certain models"
    )
    names = [str(setting) for setting in SETTINGS]
    parser.add_argument("--settings", nargs="*", choices=names, default=names, help="of certain models")
    options = parser.parse_args()
    torch.set_num_threads(1)  # many small products
    if options.which in ("digits", "all"):
        on_digits(options.seeds)
    if options.which in ("certain", "all"):
        first = options.first_seed
        chosen = [each for each in SETTINGS if str(each) in options.settings]
        on_certain_models(range(first, first + min(options.seeds, 3)), options.solvers, chosen)
    if options.which in ("larger", "all"):
        whence.keep_freed_memory()
        on_larger_models()


if __name__ == "__main__":
    main()
