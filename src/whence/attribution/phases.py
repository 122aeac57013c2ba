"""The phases of an attribution. Each takes from the run directory what is there, and computes what is not.

A phase must not depend on what earlier phases left in memory, only on what they left on disk: random numbers start
from the seed in every phase, and finite differences from the memory that the phase before wrote down.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from whence.attribution.result import Solve
from whence.attribution.saving import plan_from_json, plan_to_json, spectrum_from_json, spectrum_to_json
from whence.attribution.settings import Settings
from whence.data import TermSet
from whence.gauss_newton import GaussNewton
from whence.operators import Damped
from whence.plan import Plan
from whence.progress import ticker
from whence.scoring import Scorer
from whence.solvers import Lissa, Solution
from whence.spectrum import estimate_spectrum
from whence.store import FileJournal, Run, ScoreParts
from whence.store.journal import pack, unpack
from whence.store.scores import PartOfScores
from whence.vectors import ParamVector

__all__ = ["directions", "make_plan", "parts_of", "query_gradients", "score", "solve"]

#: A part of the scores should take about this many flops: a minute or so on a few cores.
_FLOPS_PER_PART = 2e12
_LARGEST_PART = 50_000


def generator(settings: Settings, phase: int) -> torch.Generator:
    """Random numbers of one phase."""
    return torch.Generator().manual_seed(settings.seed * 1_000_003 + phase)


def query_gradients(run: Run, gnh: GaussNewton, queries: TermSet) -> ParamVector:
    """The right-hand sides: gradients of the query losses, a column each."""

    def compute() -> tuple[dict[str, Tensor], dict[str, Any]]:
        return pack(gnh.gradients(queries.data), "gradients"), {}

    return unpack(run.tensors("gradients", compute, gnh.network.device)[0], "gradients")


def make_plan(run: Run, gnh: GaussNewton, settings: Settings) -> Plan:
    """Spectrum and plan."""
    if isinstance(settings.solver, Lissa):
        return settings.solver.plan

    def measure() -> dict[str, Any]:
        spectrum = estimate_spectrum(
            gnh, generator=generator(settings, 1), lanczos_terms=settings.lanczos_terms
        )
        return {**spectrum_to_json(spectrum), "operator": gnh.state()}

    measured = run.json("spectrum", measure)
    gnh.restore_state(measured["operator"])
    spectrum = spectrum_from_json(measured)
    planned = Plan.tuned(
        spectrum, settings.damping, num_terms=gnh.num_terms, chains=settings.chains, refine=settings.refine
    )
    return plan_from_json(run.json("plan", lambda: plan_to_json(planned)), spectrum)


def solve(
    run: Run, gnh: GaussNewton, plan: Plan, rhs: ParamVector, settings: Settings, seconds: float
) -> tuple[Solve, list[ParamVector]]:
    """``u = (H + λ)⁻¹g`` for all queries together, by independent chains."""
    solver = settings.solver if isinstance(settings.solver, Lissa) else Lissa(plan)

    def compute() -> tuple[dict[str, Tensor], dict[str, Any]]:
        journal = None
        if run.path is not None:
            journal = FileJournal(run.path / "solve", plan, seconds=seconds, device=gnh.network.device)
        damped = Damped(gnh, plan.damping)
        solution = solver.solve(damped, rhs, generator=generator(settings, 2), journal=journal)
        return _solution_tensors(solution), {**_solution_notes(solution), "operator": gnh.state()}

    tensors, notes = run.tensors("solution", compute, gnh.network.device)
    if run.path is not None:  # the solution is safe: its way there is not needed any more
        shutil.rmtree(run.path / "solve", ignore_errors=True)
    gnh.restore_state(notes["operator"])
    chains = [unpack(tensors, f"chain {k}") for k in range(notes["chains"])]
    return (
        Solve(
            plan=plan_from_json(notes["plan"], plan.spectrum),
            residual=tensors["residual"].cpu(),
            residual_stderr=tensors["residual_stderr"].cpu(),
            converged=tensors["converged"].cpu(),
            num_products=notes["num_products"],
            num_term_products=notes["num_term_products"],
            events=tuple(notes["events"]),
            paths=tensors["paths"].cpu(),
        ),
        chains,
    )


def directions(chains: list[ParamVector], gradients: ParamVector | None) -> ParamVector:
    """One block: all queries of the first chain, of the second, …, and the gradients for the baseline."""
    blocks = chains if gradients is None else [*chains, gradients]
    tensors = {name: torch.cat([block[name] for block in blocks]) for name in blocks[0]}
    return ParamVector(tensors, columns=sum(block.columns or 1 for block in blocks))


def parts_of(scorer: Scorer, positions: Tensor, part_size: int | None) -> list[Tensor]:
    """The examples to score, cut into parts whose bounds depend on nothing but the job."""
    if part_size is None:
        per_example = max(scorer.cost, 1.0)
        micro = scorer.gnh.micro_batch
        part_size = min(max(int(_FLOPS_PER_PART / per_example), 1), _LARGEST_PART)
        part_size = max(part_size // micro, 1) * micro
    return list(positions.split(part_size))


def score(run: Run, scorer: Scorer, parts: list[Tensor], chains: int, queries: int) -> PartOfScores:
    """Scores of all parts; those on disk are read."""
    done: list[PartOfScores] = []
    files = None if run.path is None else ScoreParts(run.path / "scores")
    total = sum(len(part) for part in parts)
    with ticker("scoring training examples", total) as tick:
        for number, positions in enumerate(parts):
            part = None if files is None else files.read(number)
            if part is None:
                part = _part(scorer, positions, chains, queries, tick)
                if files is not None:
                    files.write(number, part)
            else:
                for _ in range(len(positions)):
                    tick()
            done.append(part)
    return PartOfScores.join(done)


def _part(scorer: Scorer, positions: Tensor, chains: int, queries: int, tick: Any) -> PartOfScores:
    rows = torch.cat([_ticked(scorer, chunk, tick) for chunk in _pieces(scorer, positions)], dim=1)
    by_chain = rows[: chains * queries].reshape(chains, queries, -1)
    dots = rows[chains * queries :] if len(rows) > chains * queries else None
    indices = scorer.terms.indices[positions]
    return PartOfScores(indices, scorer.terms.counts()[positions], by_chain, dots)


def _pieces(scorer: Scorer, positions: Tensor) -> Iterator[Tensor]:
    yield from positions.split(8 * scorer.gnh.micro_batch)


def _ticked(scorer: Scorer, positions: Tensor, tick: Any) -> Tensor:
    rows = scorer.score(positions)
    for _ in range(len(positions)):
        tick()
    return rows


def _solution_tensors(solution: Solution) -> dict[str, Tensor]:
    assert solution.paths is not None
    tensors: dict[str, Tensor] = {}
    for k, chain in enumerate(solution.chains):
        tensors |= pack(chain, f"chain {k}")
    return tensors | {
        "residual": solution.residual,
        "residual_stderr": solution.residual_stderr,
        "converged": solution.converged,
        "paths": solution.paths,
    }


def _solution_notes(solution: Solution) -> dict[str, Any]:
    assert solution.plan is not None
    return {
        "chains": len(solution.chains),
        "plan": plan_to_json(solution.plan),
        "num_products": solution.num_products,
        "num_term_products": solution.num_term_products,
        "events": list(solution.events),
    }
