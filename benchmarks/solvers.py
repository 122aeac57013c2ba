"""What it costs to reach exact scores: every solver on several problems, in sample-products and in seconds.

For each problem the queries are solved for by every method at several efforts, one after the other in one run, and
what comes out is compared with a reference that conjugate gradients have proven to 0.1% of the scores' size (1% for
the larger models, a fourteenth of the error that 0.99 stands for; 3% for the million terms, a fifth of it). A method's
cost is that of the least effort at which its scores correlate to 0.99 with the reference, on average over queries, and
at all dearer efforts, too. Along the reference's solve, the correlation that the solver itself expects stands beside
the true one.
Measuring the spectrum, which all but plain conjugate gradients need, is not counted; nor is scoring.

Seconds are those of one core that the process spent, so that other work on the machine does not count. Efforts that
would take many times as much as the cheapest conjugate gradients are not run, and the table says "more than".
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from time import process_time
from typing import Any

import torch
from torch import Tensor

from benchmarks.curves import AUTO, TARGET, Curve, Point, correlation, draw, show
from benchmarks.problems import Problem, digits, llama, million, resnet
from benchmarks.timing import RESULTS, report, save
from reproduction.provenance import commit
from whence import (
    ConjugateGradient,
    Damped,
    Lissa,
    ParamVector,
    Plan,
    Spectrum,
    attribute,
    estimate_spectrum,
    keep_freed_memory,
)
from whence.attribution.cost import count_passes
from whence.demo.text import EPOCHS
from whence.preconditioners import nystrom
from whence.preconditioners.ekfac import Ekfac, ekfac
from whence.solvers.auto import choose, make_solver

PARTS = ("digits", "llama", "resnet", "million")
PAPER, AVERAGED, BLOCK = "LiSSA, paper's plan, last iterate", "LiSSA, averaged, 4 chains", "block CG"


@dataclass(frozen=True)
class Race:
    """A problem at its damping, with what solvers are planned from and compared with.

    Attributes:
        problem, damped, spectrum: to be solved, and its spectrum.
        reference: exact scores.
        limit: of sample-products.
    """

    problem: Problem
    damped: Damped
    spectrum: Spectrum
    reference: Tensor
    limit: float = math.inf

    def compare(self, solution: ParamVector) -> float:
        """Correlation of a solution's scores with the reference."""
        return correlation(self.problem.scores(solution), self.reference)


# --- methods -------------------------------------------------------------------------------------------------


def to_the_end(problem: Problem, damped: Damped) -> tuple[Curve, Tensor, float]:
    """Plain conjugate gradients until they are proven: a curve, the reference, and its largest relative error."""
    begun = process_time()
    passed: list[tuple[float, float, Tensor, float]] = []

    def watch(state: Any) -> bool:
        error = state.settling.error(state.upper)
        expected = 1 - float(error.square().mean()) / 2
        seconds = process_time() - begun
        scores = state.settling.scores[:, problem.compared]
        passed.append((state.products * damped.num_terms, seconds, scores, expected))
        # both about scores of terms as the model would label them, and about those of the examples
        proven = bool((state.upper <= problem.proven * state.score_rms).all())
        return proven and float(error.max()) <= 3 * problem.proven

    # scores are watched, and do not decide: an error of 1e-9 is never reached
    solver = ConjugateGradient(tolerance=problem.proven, score_error=1e-9, max_iterations=400, verify=True)
    exact = solver.solve(damped, problem.rhs, generator=torch.Generator(), on_step=watch)
    assert exact.certificate is not None
    assert exact.stats.score_rms is not None
    reference = problem.scores(exact.value)
    points = [
        Point(terms, seconds, correlation(found, reference), expected)
        for terms, seconds, found, expected in passed
    ]
    return Curve(BLOCK, points), reference, float((exact.certificate.upper / exact.stats.score_rms).max())


def preconditioned(race: Race, rank: int, share: float) -> Curve:
    """Every iteration is an effort; Nyström's preconditioner of a rank is from a share of the terms."""
    begun = process_time()
    preconditioner = nystrom(
        race.problem.gnh,
        race.damped.damping,
        rank=rank,
        terms=None if share == 1 else math.ceil(share * race.damped.num_terms),
        generator=torch.Generator().manual_seed(0),
    ).shrunk()
    # its columns are products of one vector each; a block product is one of all queries
    spent = preconditioner.num_term_products / (race.problem.rhs.columns or 1)
    return _iterate(race, f"block CG, Nyström of rank {rank} from {share:.0%}", preconditioner, spent, begun)


def by_layers(race: Race) -> Curve:
    """Every iteration is an effort; EK-FAC from one drawn label for every term and pass."""
    begun = process_time()
    made = ekfac(
        race.problem.gnh, race.damped.damping, generator=torch.Generator().manual_seed(0), curvature="sampled"
    )
    return _iterate(race, "block CG, EK-FAC", made, _of_ekfac(race, made), begun)


def _of_ekfac(race: Race, made: Ekfac) -> float:
    """Sample-products' worth of its backward passes, three forwards each; a product of q columns has 1 + 4q."""
    return 3 * made.num_passes * made.terms / (1 + 4 * (race.problem.rhs.columns or 1))


def _iterate(race: Race, name: str, preconditioner: Any, spent: float, begun: float) -> Curve:
    curve = Curve(name)

    def watch(state: Any) -> bool:
        terms = spent + state.products * race.damped.num_terms
        reached = correlation(state.settling.scores[:, race.problem.compared], race.reference)
        curve.points.append(Point(terms, process_time() - begun, reached))
        return reached > race.problem.enough

    solver = ConjugateGradient(score_error=1e-9, preconditioner=preconditioner, verify=False)
    solver.solve(race.damped, race.problem.rhs, generator=torch.Generator(), on_step=watch)
    return curve


def paper(race: Race) -> Curve:
    """The paper's plan with C = 2 and central estimates, and the same for longer."""
    plan = Plan.from_spectrum(race.spectrum, race.damped.damping, chains=1, errors=0.0)
    curve = Curve(PAPER)
    for longer in (1, 4, 16):
        lengthened = plan.replace(num_steps=longer * plan.num_steps)
        if not curve.affords(lengthened, race.limit):
            break
        _add(curve, Lissa(lengthened, average="last", recover=False), race)
        if not curve.points or curve.points[-1].correlation >= TARGET:
            break
    return curve


def averaged(race: Race) -> Curve:
    """Tuned plans of growing cost."""
    curve = Curve(AVERAGED)
    for refine in (1.0, 2.0, 4.0, 8.0):
        plan = Plan.tuned(race.spectrum, race.damped.damping, num_terms=race.damped.num_terms, refine=refine)
        if not curve.affords(plan, race.limit):
            break
        _add(curve, Lissa(plan), race)
        if not curve.points or curve.points[-1].correlation >= TARGET:
            break
    return curve


def auto(race: Race) -> Curve:
    """What `choose` takes when it is asked for the target."""
    queries = race.problem.rhs.columns or 1
    options: dict[str, Any] = {"num_terms": race.damped.num_terms, "accuracy": TARGET, "chains": 4}
    choice = choose(
        race.spectrum,
        race.damped.damping,
        queries=queries,
        passes=count_passes(race.problem.gnh, queries),
        **options,
    )
    best, begun, spent = choice.best, process_time(), 0.0
    preconditioner = None
    if best.rank:
        generator = torch.Generator().manual_seed(0)
        preconditioner = nystrom(
            race.problem.gnh, race.damped.damping, rank=best.rank, terms=best.rank_terms, generator=generator
        ).shrunk()
        spent = preconditioner.num_term_products / queries
    plan = Plan.tuned(
        race.spectrum, race.damped.damping, num_terms=race.damped.num_terms, refine=choice.of("lissa").refine
    )
    solver = make_solver(best, plan, accuracy=TARGET, preconditioner=preconditioner, verify=False)
    curve = Curve(AUTO, note=choice.words())
    _add(curve, solver, race, spent=spent, seconds=process_time() - begun)
    return curve


def _add(curve: Curve, solver: Any, race: Race, *, spent: float = 0.0, seconds: float = 0.0) -> None:
    """One effort; ``spent`` and ``seconds`` went into a preconditioner before."""
    begun = process_time() - seconds
    try:
        solution = solver.solve(race.damped, race.problem.rhs, generator=torch.Generator().manual_seed(1))
    except Exception as error:  # divergence is an outcome here
        curve.note = f"{type(error).__name__}: {str(error).partition('.')[0]}"
        return
    seconds = process_time() - begun
    curve.points.append(Point(spent + solution.num_term_products, seconds, race.compare(solution.value)))


# --- one problem ---------------------------------------------------------------------------------------------


def compare_solvers(problem: Problem) -> dict[str, Any]:
    """All methods on one problem."""
    spectrum = estimate_spectrum(problem.gnh, generator=torch.Generator().manual_seed(0))
    damped = Damped(problem.gnh, spectrum.lambda_max.value / problem.condition_number)
    block, reference, proven = to_the_end(problem, damped)
    race = Race(problem, damped, spectrum, reference)
    curves = [block, *(preconditioned(race, rank, share) for rank, share in problem.ranks)]
    curves += [by_layers(race)] if problem.layers else []
    cheapest = min(point.terms for curve in curves if (point := curve.at_target()))
    race = replace(race, limit=problem.limit * cheapest)
    curves += [averaged(race), paper(race), auto(race)]
    found = {curve.method: curve for curve in curves}
    single = [point for name, curve in found.items() if name != AUTO and (point := curve.at_target())]
    fewest, fastest = min(point.terms for point in single), min(point.seconds for point in single)
    own, last = found[AUTO].at_target(), found[PAPER].at_target()
    return {
        "name": problem.name,
        "terms": damped.num_terms,
        "proven": proven,
        "compared": len(problem.compared),
        "damping": damped.damping,
        "spectrum": _listed(spectrum),
        "curves": [asdict(curve) for curve in curves],
        "auto_over_best": None if own is None else own.terms / fewest,
        "auto_over_best_seconds": None if own is None else own.seconds / fastest,
        "last_over_auto": None if own is None or last is None else last.terms / own.terms,
    }


def _listed(spectrum: Spectrum) -> dict[str, Any]:
    return {
        name: value.tolist() if isinstance(value, Tensor) else value
        for name, value in asdict(spectrum).items()
    }


def marginal(make: Callable[[int], Problem]) -> dict[str, Any]:
    """Seconds of asking one question and 32, from the spectrum to the scores, by what is chosen for each."""
    problems = {queries: make(queries) for queries in (1, 32)}
    whole: dict[int, float] = {}
    solve: dict[int, float] = {}
    chosen: dict[int, str] = {}
    for queries in (1, 32, 1):  # one query twice: its first run warms up
        problem, begun = problems[queries], process_time()
        found = attribute(
            problem.gnh.network.model, problem.gnh.terms.data, problem.queries, task=problem.gnh.task,
            damping=f"lambda_max/{problem.condition_number:g}", accuracy=TARGET,
        )  # fmt: skip
        seconds = process_time() - begun
        whole[queries] = min(whole.get(queries, math.inf), seconds)
        # phases are timed by the clock on the wall: their shares of it, of the process's own seconds
        share = found.seconds["solve"] / sum(found.seconds.values())
        solve[queries] = min(solve.get(queries, math.inf), share * seconds)
        chosen[queries] = f"{found.solve.num_products} products: {found.solve.choice}"
    return {
        "name": problems[32].name,
        "seconds": whole,
        "ratio": whole[32] / whole[1],
        "solve_seconds": solve,
        "solve_ratio": solve[32] / solve[1],
        "chosen": chosen,
    }


def _problems(part: str) -> Iterator[Problem]:
    if part == "digits":
        for queries in (1, 20):
            for condition_number in (10.0, 100.0, 1000.0):
                yield digits(condition_number, queries)
    elif part == "llama":
        # after two epochs scores of passages settle long before those of their tokens: a harder case for `auto`
        for epochs in (EPOCHS, 2):
            yield llama(100.0, 4, epochs)
    elif part == "million":
        yield million(100.0, 4)
    else:
        yield resnet(100.0, 2, images=400)


#: What the marginal query is measured on.
_MARGINAL: dict[str, Callable[[int], Problem]] = {
    "digits": lambda queries: digits(100.0, queries),
    "llama": lambda queries: llama(100.0, queries),
}


def measure(part: str, *, only_marginal: bool) -> None:
    """32 queries against one, then all problems of a part, shown; saved as they come, in place of what was there."""
    path = RESULTS / f"solvers_{part}.json"
    saved = json.loads(path.read_text())["results"] if path.exists() else {}
    rows = {row["name"]: row for row in saved.get("rows", [])}
    margins = [marginal(_MARGINAL[part])] if part in _MARGINAL else []
    save(path.stem, {"rows": list(rows.values()), "marginal": margins})
    for problem in () if only_marginal else _problems(part):
        row = {**compare_solvers(problem), "commit": commit()}
        rows[row["name"]] = row
        show(row)
        save(path.stem, {"rows": list(rows.values()), "marginal": margins})
    report(
        "auto against the best single method, and 32 queries against one",
        ("", "auto / best, products", "auto / best, seconds", "last iterate / auto"),
        [
            (row["name"], *(f"{row[k]:.2f}" if row[k] is not None else "never" for k in
             ("auto_over_best", "auto_over_best_seconds", "last_over_auto")))
            for row in rows.values()
        ]
        + [
            (f"{margin['name']}: seconds of 32 / of 1 (solve alone)",
             f"{margin['ratio']:.1f} ({margin['solve_ratio']:.1f})", "", "")
            for margin in margins
        ],
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.solvers", description=__doc__.split("\n")[0])
    parser.add_argument("which", nargs="?", default="all", choices=[*PARTS, "all"])
    parser.add_argument(
        "--marginal",
        action="store_true",
        help="32 queries against one alone; saved results of the rest are kept",
    )
    options = parser.parse_args()
    keep_freed_memory()
    torch.set_num_threads(1)
    for part in PARTS if options.which == "all" else (options.which,):
        measure(part, only_marginal=options.marginal)
    found = [RESULTS / f"solvers_{part}.json" for part in PARTS]
    draw([row for path in found if path.exists() for row in json.loads(path.read_text())["results"]["rows"]])


if __name__ == "__main__":
    main()
