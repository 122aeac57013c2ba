"""Solving for the queries, in one round, or in as many as a ranking needs to be stable.

A round of LiSSA or refinement adds independent chains to those before; a round of conjugate gradients goes on from the
last iteration to a quarter of the error. What a round found is on disk before the next one begins, as everything is: an
interrupted run goes on, and ends in the same bits.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from whence.attribution.planning import Planned
from whence.attribution.result import Solve
from whence.attribution.saving import (
    certificate_from_json,
    certificate_to_json,
    plan_from_json,
    plan_to_json,
)
from whence.attribution.settings import Settings
from whence.model.gauss_newton import GaussNewton
from whence.operators import Damped
from whence.runs import FileJournal, Run
from whence.runs.cg_journal import CGJournal
from whence.runs.journal import pack, unpack
from whence.solvers import CGState, ConjugateGradient, ErrorParts, Refinement, Solution
from whence.solvers.plan import Plan
from whence.vectors import ParamVector

__all__ = ["Rounds"]

#: By how much the error falls from one round of conjugate gradients to the next.
_TIGHTER = 0.25


class Rounds:
    """``u = (H + λ)⁻¹g`` for all queries together, better with every round.

    Args:
        run: where everything is kept.
        gnh: H.
        planned: the solver.
        rhs: g, a column for each query.
        settings: what was asked for.
        seconds: between two writings of a solve in flight.
    """

    def __init__(
        self,
        run: Run,
        gnh: GaussNewton,
        planned: Planned,
        rhs: ParamVector,
        settings: Settings,
        seconds: float,
    ) -> None:
        self._run, self._gnh, self._planned, self._rhs = run, gnh, planned, rhs
        self._settings, self._seconds = settings, seconds
        self._state: CGState | None = None
        #: Rounds so far.
        self.count = 0
        #: Solutions of the last round: what has to be scored next.
        self.latest: list[ParamVector] = []
        #: How the solver fared, all rounds together.
        self.solve: Solve | None = None

    @property
    def adds_chains(self) -> bool:
        """Whether a round adds to what was found before, or replaces it."""
        return not isinstance(self._planned.solver, ConjugateGradient)

    def next(self) -> Solve:
        """One more round."""
        name = "solution" if self.count == 0 else f"solution-{self.count + 1}"
        tensors, notes = self._run.tensors(name, self._compute, self._gnh.network.device)
        self._gnh.restore_state(notes["operator"])
        self.latest = [unpack(tensors, f"chain {k}") for k in range(notes["chains"])]
        self.solve = _together(self.solve, _solve(self._planned, tensors, notes), self.count)
        self.count += 1
        return self.solve

    @property
    def exhausted(self) -> bool:
        """Whether another round would find the same: all that is left of the error is rounding."""
        journal = self._cg_journal()
        state = self._state or (None if journal is None else journal.restore())
        if self.adds_chains or state is None:
            return False
        return (
            state.failed or state.lanczos.current is None or bool((state.energy.sqrt() <= state.slack).all())
        )

    def clear(self) -> None:
        """All rounds are done: the ways there are not needed any more."""
        if self._run.path is not None:
            shutil.rmtree(self._run.path / "solve", ignore_errors=True)

    def _compute(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        planned, gnh = self._planned, self._gnh
        damped = Damped(gnh, planned.plan.damping)
        random = self._settings.generator(2 if self.count == 0 else 100 + self.count)
        if isinstance(planned.solver, ConjugateGradient):
            solution = self._conjugate_gradients(planned.solver, damped, random)
        else:
            solution = planned.solver.solve(damped, self._rhs, generator=random, journal=self._journal())
        return _tensors(solution), {**_notes(solution, planned.plan), "operator": gnh.state()}

    def _journal(self) -> FileJournal | None:
        if self._run.path is None:
            return None
        directory = self._run.path / "solve"
        if self.count > 0:
            directory /= f"round-{self.count + 1}"
        device = self._gnh.network.device
        return FileJournal(directory, self._planned.plan, seconds=self._seconds, device=device)

    def _cg_journal(self) -> CGJournal | None:
        if self._run.path is None:
            return None
        device = self._gnh.network.device
        return CGJournal(self._run.path / "solve", seconds=self._seconds, device=device)

    def _conjugate_gradients(
        self, solver: ConjugateGradient, damped: Damped, random: torch.Generator
    ) -> Solution:
        journal = self._cg_journal()
        if journal is not None:
            self._state = journal.restore() or self._state

        def keep(state: CGState) -> None:
            self._state = state
            if journal is not None:
                journal.record(state)

        tightened = _TIGHTER**self.count
        tighter = replace(
            solver,
            tolerance=solver.tolerance * tightened,
            score_error=None if solver.score_error is None else solver.score_error * tightened,
        )
        solution = tighter.solve(damped, self._rhs, generator=random, state=self._state, on_iteration=keep)
        if journal is not None and self._state is not None:
            journal.record(self._state, now=True)
        return solution


def _together(before: Solve | None, new: Solve, rounds: int) -> Solve:
    """How the solver fared in all rounds: chains add up, an iteration contains the ones before."""
    if before is None or new.certificate is not None:
        return new
    parts = new.error_parts
    if before.error_parts is not None and parts is not None:
        parts = before.error_parts.with_more(rounds, parts)
    return replace(
        new,
        num_products=before.num_products + new.num_products,
        num_term_products=before.num_term_products + new.num_term_products,
        events=before.events + tuple(event for event in new.events if event not in before.events),
        paths=torch.cat([before.paths, new.paths])
        if before.paths.shape[1:] == new.paths.shape[1:]
        else new.paths,
        converged=before.converged & new.converged,
        error_parts=parts,
    )


def _solve(planned: Planned, tensors: dict[str, Tensor], notes: dict[str, Any]) -> Solve:
    certificate = certificate_from_json(notes["certificate"])
    return Solve(
        plan=plan_from_json(notes["plan"], planned.plan.spectrum),
        residual=tensors["residual"].cpu(),
        residual_stderr=tensors["residual_stderr"].cpu(),
        converged=tensors["converged"].cpu(),
        num_products=notes["num_products"],
        num_term_products=notes["num_term_products"],
        events=(*planned.drawn, *notes["events"]),
        paths=tensors["paths"].cpu(),
        solver=_name(planned),
        choice=planned.choice,
        certificate=certificate,
        score_rms=tensors["score_rms"].cpu() if "score_rms" in tensors else None,
        by_curvature=bool(planned.drawn),
        error_parts=None if notes.get("error_parts") is None else ErrorParts.from_json(notes["error_parts"]),
    )


def _name(planned: Planned) -> str:
    if isinstance(planned.solver, ConjugateGradient):
        return "cg"
    return "refinement" if isinstance(planned.solver, Refinement) else "lissa"


def _tensors(solution: Solution) -> dict[str, Tensor]:
    assert solution.paths is not None
    tensors: dict[str, Tensor] = {}
    for k, chain in enumerate(solution.chains):
        tensors |= pack(chain, f"chain {k}")
    if solution.score_rms is not None:
        tensors["score_rms"] = solution.score_rms
    return tensors | {
        "residual": solution.residual,
        "residual_stderr": solution.residual_stderr,
        "converged": solution.converged,
        "paths": solution.paths,
    }


def _notes(solution: Solution, planned: Plan) -> dict[str, Any]:
    return {
        "chains": len(solution.chains),
        "plan": plan_to_json(solution.plan or planned),
        "certificate": certificate_to_json(solution.certificate),
        "num_products": solution.num_products,
        "num_term_products": solution.num_term_products,
        "events": list(solution.events),
        "error_parts": None if solution.error_parts is None else solution.error_parts.to_json(),
    }
