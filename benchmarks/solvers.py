"""What it costs to reach exact scores: every solver on several problems, in sample-products and in seconds.

For each problem the queries are solved for by every method at several efforts, one after the other in one run, and
what comes out is compared with a reference that conjugate gradients have proven to 0.1% of the scores' size. A method's
cost is that of the least effort at which its scores correlate to 0.99 with the reference, on average over queries.
Measuring the spectrum, which all but plain conjugate gradients need, is not counted; nor is scoring.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from benchmarks.timing import RESULTS, report, save
from whence import (
    Classification,
    ConjugateGradient,
    Damped,
    GaussNewton,
    LanguageModeling,
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
from whence.reproduce.drawing import COLOURS, figure
from whence.scoring import Scorer
from whence.solvers.choice import choose, make_solver

TARGET = 0.99
RANKS = ((10, 0.25), (30, 1.0))
PAPER, AVERAGED, REFINED, BLOCK, AUTO = (
    "LiSSA, paper's plan, last iterate",
    "LiSSA, averaged, 4 chains",
    "subset solves, refined",
    "block CG",
    "auto",
)


@dataclass(frozen=True)
class Problem:
    """A model, queries and a damping."""

    name: str
    gnh: GaussNewton
    rhs: ParamVector
    condition_number: float
    positions: Tensor

    def scores(self, solution: ParamVector) -> Tensor:
        """``[queries, examples]``."""
        return Scorer(self.gnh, solution).score(self.positions)


@dataclass(frozen=True)
class Point:
    """One effort of one method."""

    terms: float
    seconds: float
    correlation: float


@dataclass
class Curve:
    """All efforts of one method on one problem."""

    method: str
    points: list[Point] = field(default_factory=list)
    note: str = ""

    def at_target(self) -> Point | None:
        """The cheapest effort that is accurate enough."""
        enough = [point for point in self.points if point.correlation >= TARGET]
        return min(enough, key=lambda point: point.terms) if enough else None


# --- problems ------------------------------------------------------------------------------------------------


def digits(condition_number: float, queries: int) -> Problem:
    from whence.demo.digits import load_digits_with_flipped_labels, train_digits

    data = load_digits_with_flipped_labels()
    gnh = GaussNewton(train_digits(data.train), Classification(), data.train)
    rhs = gnh.gradients([data.test[i] for i in range(queries)])
    name = f"digits MLP, κ = {condition_number:g}, {_queries(queries)}"
    return Problem(name, gnh, rhs, condition_number, torch.arange(len(data.train)))


def llama(condition_number: float, queries: int) -> Problem:
    from whence.demo.corpus import corpus, passages, train_tokenizer
    from whence.demo.text import train_model

    documents = corpus()
    tokenizer = train_tokenizer(documents)
    data = passages(documents, tokenizer)
    model = train_model(data, epochs=2)
    train = [{"input_ids": passage.input_ids} for passage in data[::4]]
    gnh = GaussNewton(model, LanguageModeling(), train)
    rhs = gnh.gradients([{"input_ids": data[4 * i + 1].input_ids} for i in range(queries)])
    name = f"two-layer Llama, κ = {condition_number:g}, {_queries(queries)}"
    return Problem(name, gnh, rhs, condition_number, torch.arange(len(train)))


def resnet(condition_number: float, queries: int, images: int) -> Problem:
    from whence.assets import cifar10, resnet56

    train, test = cifar10("train").select(torch.arange(images)), cifar10("test")
    gnh = GaussNewton(resnet56(), Classification(), train)
    rhs = gnh.gradients([test[i] for i in range(queries)])
    name = f"ResNet-56, {images:,} of its images, κ = {condition_number:g}, {_queries(queries)}"
    return Problem(name, gnh, rhs, condition_number, torch.arange(images))


def _queries(count: int) -> str:
    return "1 query" if count == 1 else f"{count} queries"


# --- methods -------------------------------------------------------------------------------------------------


def conjugate_gradients(
    problem: Problem,
    damped: Damped,
    compare: Callable[[ParamVector], float],
    rank: int = 0,
    share: float = 1.0,
) -> Curve:
    """Every iteration is an effort; with Nyström's preconditioner of a rank, from a share of the terms."""
    begun, paused, spent = time.perf_counter(), 0.0, 0.0
    preconditioner = None
    if rank:
        generator = torch.Generator().manual_seed(0)
        terms = None if share == 1 else math.ceil(share * damped.num_terms)
        preconditioner = nystrom(problem.gnh, damped.damping, rank=rank, terms=terms, generator=generator)
        preconditioner = preconditioner.shrunk()
        # its columns are products of one vector each; a block product is one of all queries
        spent = preconditioner.num_term_products / (problem.rhs.columns or 1)
    curve = Curve(f"block CG, Nyström of rank {rank} from {share:.0%}" if rank else BLOCK)

    def watch(state: Any) -> bool:
        nonlocal paused
        halted = time.perf_counter()
        terms = spent + state.products * damped.num_terms
        curve.points.append(Point(terms, halted - begun - paused, compare(state.iterate)))
        paused += time.perf_counter() - halted
        return curve.points[-1].correlation > 0.9999

    solver = ConjugateGradient(tolerance=1e-3, preconditioner=preconditioner, verify=False)
    solver.solve(damped, problem.rhs, generator=torch.Generator(), on_iteration=watch)
    return curve


def paper(
    problem: Problem, damped: Damped, compare: Callable[[ParamVector], float], spectrum: Spectrum
) -> Curve:
    """The paper's plan with C = 2 and central estimates, and the same for longer."""
    plan = Plan.from_spectrum(spectrum, damped.damping, chains=1, errors=0.0)
    curve = Curve(PAPER)
    for longer in (1, 4, 16):
        solver = Lissa(plan.replace(num_steps=longer * plan.num_steps), average="last", recover=False)
        _add(curve, solver, problem, damped, compare)
    return curve


def averaged(
    problem: Problem, damped: Damped, compare: Callable[[ParamVector], float], spectrum: Spectrum
) -> Curve:
    """Tuned plans of growing cost."""
    curve = Curve(AVERAGED)
    for refine in (1.0, 2.0, 4.0, 8.0):
        plan = Plan.tuned(spectrum, damped.damping, num_terms=damped.num_terms, refine=refine)
        _add(curve, Lissa(plan), problem, damped, compare)
        if curve.points[-1].correlation >= TARGET:
            break
    return curve


def refined(
    problem: Problem, damped: Damped, compare: Callable[[ParamVector], float], spectrum: Spectrum
) -> Curve:
    """Subsets of about d(λ)/2 terms, and paths from an eighth of LiSSA's."""
    curve = Curve(REFINED)
    assert spectrum.density is not None
    subset = min(math.ceil(spectrum.density.dimension(damped.damping).value / 2), damped.num_terms // 2)
    shortest = Plan.tuned(spectrum, damped.damping, num_terms=damped.num_terms, refine=1.0)
    for length in (0.125, 0.25, 0.5, 1.0, 2.0):
        plan = shortest.replace(num_steps=max(2, math.ceil(length * shortest.num_steps)))
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
    best, begun, preconditioner = choice.best, time.perf_counter(), None
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
    _add(curve, solver, problem, damped, compare, spent=spent, seconds=time.perf_counter() - begun)
    return curve


def _add(
    curve: Curve, solver: Any, problem: Problem, damped: Damped, compare: Callable[[ParamVector], float],
    *, spent: float = 0.0, seconds: float = 0.0,
) -> None:  # fmt: skip
    """One effort; ``spent`` and ``seconds`` went into a preconditioner before."""
    begun = time.perf_counter() - seconds
    try:
        solution = solver.solve(damped, problem.rhs, generator=torch.Generator().manual_seed(1))
    except Exception as error:  # divergence is an outcome here
        curve.note = f"{type(error).__name__}: {str(error).partition('.')[0]}"
        return
    seconds = time.perf_counter() - begun
    curve.points.append(Point(spent + solution.num_term_products, seconds, compare(solution.value)))


# --- one problem ---------------------------------------------------------------------------------------------


def compare_solvers(problem: Problem) -> dict[str, Any]:
    """All methods on one problem."""
    gnh = problem.gnh
    spectrum = estimate_spectrum(gnh, generator=torch.Generator().manual_seed(0))
    damped = Damped(gnh, spectrum.lambda_max.value / problem.condition_number)
    exact = ConjugateGradient(tolerance=1e-3, max_iterations=400, verify=True).solve(
        damped, problem.rhs, generator=torch.Generator()
    )
    reference = problem.scores(exact.value)

    def compare(solution: ParamVector) -> float:
        return float(_correlation(problem.scores(solution), reference).mean())

    curves = [
        conjugate_gradients(problem, damped, compare),
        *(conjugate_gradients(problem, damped, compare, rank, share) for rank, share in RANKS),
        averaged(problem, damped, compare, spectrum),
        refined(problem, damped, compare, spectrum),
        paper(problem, damped, compare, spectrum),
        auto(problem, damped, compare, spectrum),
    ]
    found = {curve.method: curve for curve in curves}
    single = [point for name, curve in found.items() if name != AUTO and (point := curve.at_target())]
    fewest, fastest = min(point.terms for point in single), min(point.seconds for point in single)
    own, last = found[AUTO].at_target(), found[PAPER].at_target()
    return {
        "name": problem.name,
        "terms": damped.num_terms,
        "proven": float((exact.certificate.upper / exact.score_rms).max()),  # type: ignore[union-attr,operator]
        "curves": [asdict(curve) for curve in curves],
        "auto_over_best": None if own is None else own.terms / fewest,
        "auto_over_best_seconds": None if own is None else own.seconds / fastest,
        "last_over_auto": None if own is None or last is None else last.terms / own.terms,
    }


def _correlation(a: Tensor, b: Tensor) -> Tensor:
    a, b = (x - x.mean(-1, keepdim=True) for x in (a, b))
    return (a * b).sum(-1) / (a.norm(dim=-1) * b.norm(dim=-1)).clamp_min(1e-300)


def show(row: dict[str, Any]) -> None:
    """A table of one problem."""
    lines = []
    for made in row["curves"]:
        curve = Curve(made["method"], [Point(**point) for point in made["points"]], made["note"])
        point = curve.at_target()
        reached = max((p.correlation for p in curve.points), default=float("nan"))
        cells = ("never", "", f"{reached:.4f}") if point is None else (
            f"{point.terms:,.0f}", f"{point.seconds:.2f}", f"{point.correlation:.4f}"
        )  # fmt: skip
        lines.append((curve.method, *cells))
    report(
        f"{row['name']}: to reach a correlation of {TARGET}",
        ("", "sample-products", "seconds", "correlation"),
        lines,
    )


def draw(rows: list[dict[str, Any]]) -> None:
    """Correlation against sample-products and against seconds, a row of panels for each problem."""
    with figure(len(rows), 2, width=4.4, height=2.6) as (drawn, panels):
        for number, row in enumerate(rows):
            for panel, what in zip(panels[2 * number : 2 * number + 2], ("terms", "seconds"), strict=True):
                for colour, curve in zip(COLOURS, row["curves"], strict=False):
                    points = sorted(curve["points"], key=lambda point: point[what])
                    if points:
                        panel.plot(
                            [p[what] for p in points], [max(1 - p["correlation"], 1e-6) for p in points],
                            "*" if curve["method"] == AUTO else "o-", color=colour, markersize=4,
                            label=curve["method"],
                        )  # fmt: skip
                panel.axhline(1 - TARGET, color="black", linewidth=0.6, linestyle="--")
                panel.set(xscale="log", yscale="log", xlabel="sample-products" if what == "terms" else what)
                panel.xaxis.set_minor_formatter("")
            panels[2 * number].set(title=row["name"], ylabel="1 - correlation")
        panels[0].legend(fontsize=6)
    for suffix in ("svg", "png"):
        drawn.savefig(RESULTS / f"solvers.{suffix}", bbox_inches="tight", dpi=150)


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


def _problems(which: str) -> Iterator[Problem]:
    if which in ("digits", "all"):
        for queries in (1, 20):
            for condition_number in (10.0, 100.0, 1000.0):
                yield digits(condition_number, queries)
    if which in ("llama", "all"):
        yield llama(100.0, 8)
    if which in ("resnet", "all"):
        yield resnet(100.0, 4, images=1000)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.solvers", description=__doc__.split("\n")[0])
    parser.add_argument("which", nargs="?", default="all", choices=["digits", "llama", "resnet", "all"])
    options = parser.parse_args()
    keep_freed_memory()
    rows = []
    for problem in _problems(options.which):
        rows.append(compare_solvers(problem))
        show(rows[-1])
    makers: dict[str, Callable[[int], Problem]] = {
        "digits": lambda queries: digits(100.0, queries),
        "llama": lambda queries: llama(100.0, queries),
    }
    margins = [marginal(make) for name, make in makers.items() if options.which in (name, "all")]
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
    draw(rows)
    save(
        f"solvers{'' if options.which == 'all' else '_' + options.which}", {"rows": rows, "marginal": margins}
    )


if __name__ == "__main__":
    main()
