"""What it costs to reach exact scores: every solver on several problems, in sample-products and in seconds.

For each problem the queries are solved for by every method at several efforts, one after the other in one run, and
what comes out is compared with a reference that conjugate gradients have proven to 0.1% of the scores' size. A method's
cost is that of the least effort at which its scores correlate to 0.99 with the reference, on average over queries.
Measuring the spectrum, which all but plain conjugate gradients need, is not counted; nor is scoring.

Seconds are those of one core that the process spent, so that other work on the machine does not count. Efforts that
would take many times as much as the cheapest conjugate gradients are not run, and the table says "more than".
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict
from time import process_time
from typing import Any

import torch
from torch import Tensor

from benchmarks.curves import AUTO, TARGET, Curve, Point, correlation, draw, show
from benchmarks.problems import Problem, digits, llama, resnet
from benchmarks.timing import RESULTS, report, save
from whence import (
    ConjugateGradient,
    Damped,
    Lissa,
    ParamVector,
    Plan,
    Refinement,
    Spectrum,
    estimate_spectrum,
    keep_freed_memory,
)
from whence.attribution.forecast import count_passes
from whence.preconditioners import nystrom
from whence.solvers.choice import choose, make_solver

PARTS = ("digits", "llama", "resnet")
RANKS = ((10, 0.25), (30, 1.0))
PAPER, AVERAGED, REFINED, BLOCK = (
    "LiSSA, paper's plan, last iterate",
    "LiSSA, averaged, 4 chains",
    "subset solves, refined",
    "block CG",
)


# --- methods -------------------------------------------------------------------------------------------------


def to_the_end(problem: Problem, damped: Damped) -> tuple[Curve, Tensor, float]:
    """Plain conjugate gradients until they are proven: a curve, the reference, and its largest relative error."""
    begun, paused = process_time(), 0.0
    passed: list[tuple[float, float, Tensor]] = []

    def watch(state: Any) -> bool:
        nonlocal paused
        halted = process_time()
        passed.append(
            (state.products * damped.num_terms, halted - begun - paused, problem.scores(state.iterate))
        )
        paused += process_time() - halted
        return False

    solver = ConjugateGradient(tolerance=1e-3, max_iterations=400, verify=True)
    exact = solver.solve(damped, problem.rhs, generator=torch.Generator(), on_iteration=watch)
    assert exact.certificate is not None
    assert exact.score_rms is not None
    reference = problem.scores(exact.value)
    points = [Point(terms, seconds, correlation(found, reference)) for terms, seconds, found in passed]
    return Curve(BLOCK, points), reference, float((exact.certificate.upper / exact.score_rms).max())


def preconditioned(
    problem: Problem, damped: Damped, compare: Callable[[ParamVector], float], rank: int, share: float
) -> Curve:
    """Every iteration is an effort; Nyström's preconditioner of a rank is from a share of the terms."""
    begun, paused = process_time(), 0.0
    preconditioner = nystrom(
        problem.gnh,
        damped.damping,
        rank=rank,
        terms=None if share == 1 else math.ceil(share * damped.num_terms),
        generator=torch.Generator().manual_seed(0),
    ).shrunk()
    # its columns are products of one vector each; a block product is one of all queries
    spent = preconditioner.num_term_products / (problem.rhs.columns or 1)
    curve = Curve(f"block CG, Nyström of rank {rank} from {share:.0%}")

    def watch(state: Any) -> bool:
        nonlocal paused
        halted = process_time()
        terms = spent + state.products * damped.num_terms
        curve.points.append(Point(terms, halted - begun - paused, compare(state.iterate)))
        paused += process_time() - halted
        return curve.points[-1].correlation > 0.9999

    solver = ConjugateGradient(tolerance=1e-3, preconditioner=preconditioner, verify=False)
    solver.solve(damped, problem.rhs, generator=torch.Generator(), on_iteration=watch)
    return curve


def paper(
    problem: Problem,
    damped: Damped,
    compare: Callable[[ParamVector], float],
    spectrum: Spectrum,
    limit: float,
) -> Curve:
    """The paper's plan with C = 2 and central estimates, and the same for longer."""
    plan = Plan.from_spectrum(spectrum, damped.damping, chains=1, errors=0.0)
    curve = Curve(PAPER)
    for longer in (1, 4, 16):
        lengthened = plan.replace(num_steps=longer * plan.num_steps)
        if not curve.affords(lengthened, limit):
            break
        _add(curve, Lissa(lengthened, average="last", recover=False), problem, damped, compare)
    return curve


def averaged(
    problem: Problem,
    damped: Damped,
    compare: Callable[[ParamVector], float],
    spectrum: Spectrum,
    limit: float,
) -> Curve:
    """Tuned plans of growing cost."""
    curve = Curve(AVERAGED)
    for refine in (1.0, 2.0, 4.0, 8.0):
        plan = Plan.tuned(spectrum, damped.damping, num_terms=damped.num_terms, refine=refine)
        if not curve.affords(plan, limit):
            break
        _add(curve, Lissa(plan), problem, damped, compare)
        if curve.points[-1].correlation >= TARGET:
            break
    return curve


def refined(
    problem: Problem,
    damped: Damped,
    compare: Callable[[ParamVector], float],
    spectrum: Spectrum,
    limit: float,
) -> Curve:
    """Subsets of about d(λ)/2 terms, and paths from an eighth of LiSSA's."""
    curve = Curve(REFINED)
    assert spectrum.density is not None
    subset = min(math.ceil(spectrum.density.dimension(damped.damping).value / 2), damped.num_terms // 2)
    shortest = Plan.tuned(spectrum, damped.damping, num_terms=damped.num_terms, refine=1.0)
    for length in (0.125, 0.25, 0.5, 1.0, 2.0):
        plan = shortest.replace(num_steps=max(2, math.ceil(length * shortest.num_steps)))
        if not curve.affords(plan, limit):
            break
        _add(curve, Refinement(plan=plan, subset=subset), problem, damped, compare)
        if not curve.points or curve.points[-1].correlation >= TARGET:
            break
    return curve


def auto(
    problem: Problem, damped: Damped, compare: Callable[[ParamVector], float], spectrum: Spectrum
) -> Curve:
    """What `choose` takes when it is asked for the target."""
    queries = problem.rhs.columns or 1
    options: dict[str, Any] = {"num_terms": damped.num_terms, "accuracy": TARGET, "chains": 4}
    choice = choose(
        spectrum, damped.damping, queries=queries, passes=count_passes(problem.gnh, queries),
        generator=torch.Generator().manual_seed(0), **options,
    )  # fmt: skip
    best, begun, preconditioner = choice.best, process_time(), None
    if best.rank:
        generator = torch.Generator().manual_seed(0)
        preconditioner = nystrom(
            problem.gnh, damped.damping, rank=best.rank, terms=best.rank_terms, generator=generator
        ).shrunk()
    curve = Curve(AUTO, note=choice.words())
    spent = 0.0 if preconditioner is None else preconditioner.num_term_products / queries
    solver = make_solver(
        best, spectrum, damped.damping, preconditioner=preconditioner, verify=False, **options
    )
    _add(curve, solver, problem, damped, compare, spent=spent, seconds=process_time() - begun)
    return curve


def _add(
    curve: Curve, solver: Any, problem: Problem, damped: Damped, compare: Callable[[ParamVector], float],
    *, spent: float = 0.0, seconds: float = 0.0,
) -> None:  # fmt: skip
    """One effort; ``spent`` and ``seconds`` went into a preconditioner before."""
    begun = process_time() - seconds
    try:
        solution = solver.solve(damped, problem.rhs, generator=torch.Generator().manual_seed(1))
    except Exception as error:  # divergence is an outcome here
        curve.note = f"{type(error).__name__}: {str(error).partition('.')[0]}"
        return
    seconds = process_time() - begun
    curve.points.append(Point(spent + solution.num_term_products, seconds, compare(solution.value)))


# --- one problem ---------------------------------------------------------------------------------------------


def compare_solvers(problem: Problem) -> dict[str, Any]:
    """All methods on one problem."""
    gnh = problem.gnh
    spectrum = estimate_spectrum(gnh, generator=torch.Generator().manual_seed(0))
    damped = Damped(gnh, spectrum.lambda_max.value / problem.condition_number)
    block, reference, proven = to_the_end(problem, damped)

    def compare(solution: ParamVector) -> float:
        return correlation(problem.scores(solution), reference)

    curves = [block, *(preconditioned(problem, damped, compare, rank, share) for rank, share in RANKS)]
    limit = problem.limit * min(point.terms for curve in curves if (point := curve.at_target()))
    curves += [
        averaged(problem, damped, compare, spectrum, limit),
        refined(problem, damped, compare, spectrum, limit),
        paper(problem, damped, compare, spectrum, limit),
        auto(problem, damped, compare, spectrum),
    ]
    found = {curve.method: curve for curve in curves}
    single = [point for name, curve in found.items() if name != AUTO and (point := curve.at_target())]
    fewest, fastest = min(point.terms for point in single), min(point.seconds for point in single)
    own, last = found[AUTO].at_target(), found[PAPER].at_target()
    return {
        "name": problem.name,
        "terms": damped.num_terms,
        "proven": proven,
        "curves": [asdict(curve) for curve in curves],
        "auto_over_best": None if own is None else own.terms / fewest,
        "auto_over_best_seconds": None if own is None else own.seconds / fastest,
        "last_over_auto": None if own is None or last is None else last.terms / own.terms,
    }


def marginal(make: Callable[[int], Problem]) -> dict[str, Any]:
    """Seconds of one query and of 32, by what is chosen for each."""
    seconds, chosen = {}, {}
    for queries in (1, 32, 1, 32):
        problem = make(queries)
        spectrum = estimate_spectrum(problem.gnh, generator=torch.Generator().manual_seed(0))
        damped = Damped(problem.gnh, spectrum.lambda_max.value / problem.condition_number)
        curve = auto(problem, damped, lambda _: 1.0, spectrum)
        seconds[queries] = min(curve.points[0].seconds, seconds.get(queries, float("inf")))
        chosen[queries] = curve.note
    return {"name": problem.name, "seconds": seconds, "ratio": seconds[32] / seconds[1], "chosen": chosen}


def _problems(part: str) -> Iterator[Problem]:
    if part == "digits":
        for queries in (1, 20):
            for condition_number in (10.0, 100.0, 1000.0):
                yield digits(condition_number, queries)
    elif part == "llama":
        yield llama(100.0, 8)
    else:
        yield resnet(100.0, 2, images=400)


#: What the marginal query is measured on.
_MARGINAL: dict[str, Callable[[int], Problem]] = {
    "digits": lambda queries: digits(100.0, queries),
    "llama": lambda queries: llama(100.0, queries),
}


def measure(part: str) -> None:
    """All problems of a part, shown and saved."""
    rows = []
    for problem in _problems(part):
        rows.append(compare_solvers(problem))
        show(rows[-1])
    margins = [marginal(_MARGINAL[part])] if part in _MARGINAL else []
    report(
        "auto against the best single method, and 32 queries against one",
        ("", "auto / best, products", "auto / best, seconds", "last iterate / auto"),
        [
            (row["name"], *(f"{row[k]:.2f}" if row[k] is not None else "never" for k in
             ("auto_over_best", "auto_over_best_seconds", "last_over_auto")))
            for row in rows
        ]
        + [(f"{margin['name']}: seconds of 32 / of 1", f"{margin['ratio']:.1f}", "", "") for margin in margins],
    )  # fmt: skip
    save(f"solvers_{part}", {"rows": rows, "marginal": margins})


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.solvers", description=__doc__.split("\n")[0])
    parser.add_argument("which", nargs="?", default="all", choices=[*PARTS, "all"])
    options = parser.parse_args()
    keep_freed_memory()
    torch.set_num_threads(1)
    for part in PARTS if options.which == "all" else (options.which,):
        measure(part)
    found = [RESULTS / f"solvers_{part}.json" for part in PARTS]
    draw([row for path in found if path.exists() for row in json.loads(path.read_text())["results"]["rows"]])


if __name__ == "__main__":
    main()
