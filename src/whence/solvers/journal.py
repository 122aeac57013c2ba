"""What a solve in flight is made of, and whoever keeps it safe: `SolveState` and `Journal`.

A solver hands its whole state to the journal after every step; the journal decides when to write it down. A
solve that is begun again with the same journal goes on from there and ends in the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from whence.solvers.plan import Plan
from whence.vectors import ParamVector

__all__ = ["Chain", "Journal", "SolveState"]


@dataclass
class Chain:
    """One chain of LiSSA in flight: everything that is needed to go on from here."""

    iterate: ParamVector
    average: ParamVector
    step: int
    generator: torch.Generator


@dataclass
class SolveState:
    """A solve in flight.

    Attributes:
        plan: the settings in force, which an answer to divergence may have changed.
        seeds: one per chain.
        generator: state of the solver's own generator, after the seeds were drawn.
        finished: averages of the chains that are done.
        chain: the one under way, or None between two.
        paths: gᵀu along every chain so far, ``[steps][columns]`` each.
        events: what had to be changed, in words.
        products, terms: spent so far.
        operator: what earlier products left behind that later ones depend on.
    """

    plan: Plan
    seeds: list[int]
    generator: Tensor
    finished: list[ParamVector] = field(default_factory=list)
    chain: Chain | None = None
    paths: list[list[list[float]]] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    products: int = 0
    terms: int = 0
    operator: Mapping[str, float | None] = field(default_factory=dict)

    @classmethod
    def begin(cls, plan: Plan, generator: torch.Generator) -> SolveState:
        """Nothing done yet; draws the chains' seeds."""
        seeds = torch.randint(2**62, (plan.chains,), generator=generator, device=generator.device).tolist()
        return cls(plan, seeds, generator.get_state())

    def begin_again(self, plan: Plan) -> None:
        """All chains must estimate the same thing with the same settings: start over with new ones."""
        self.plan = plan
        self.finished.clear()
        self.paths.clear()
        self.chain = None


class Journal(Protocol):
    """Keeps a solve safe."""

    def restore(self) -> SolveState | None:
        """The last state that was written down, or None."""

    def record(self, state: SolveState, *, now: bool = False) -> None:
        """Called after every step: write the state down when it is time to, or at once."""
