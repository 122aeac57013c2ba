"""What can be asked of `attribute`, checked before any work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from whence.attribution.stopping import Until
from whence.errors import OptionError
from whence.model.gauss_newton import Product
from whence.scoring import Method
from whence.solvers import ConjugateGradient, Lissa, Refinement
from whence.solvers.choice import check_accuracy
from whence.solvers.plan import check_damping

__all__ = ["Sampling", "Settings", "SolverChoice"]

SolverChoice = Literal["auto", "lissa", "cg", "refinement"] | Lissa | ConjugateGradient | Refinement
#: How batches are drawn: with equal chances, by curvature (`importance`), or as the measured noise suggests.
Sampling = Literal["auto", "uniform", "curvature"]


@dataclass(frozen=True)
class Settings:
    """The numbers and names behind an attribution; `whence.attribute` explains each."""

    damping: float | str = "auto"
    solver: SolverChoice = "auto"
    product: Product = "auto"
    accuracy: float = 0.995
    chains: int = 4
    refine: float | None = None
    method: Method = "auto"
    baseline: bool = True
    shown: int = 20
    seed: int = 0
    micro_batch: int | None = None
    lanczos_terms: int = 4096
    sampling: Sampling = "auto"
    until: str | None = None
    budget: float = 8.0

    def __post_init__(self) -> None:
        check_damping(self.damping)
        check_accuracy(self.accuracy)
        names = ("auto", "lissa", "cg", "refinement")
        if not isinstance(self.solver, (Lissa, ConjugateGradient, Refinement)) and self.solver not in names:
            raise OptionError(
                f"solver is {self.solver!r}; it must be 'auto', 'lissa', 'cg', 'refinement', or a Lissa, "
                "ConjugateGradient or Refinement"
            )
        if self.method not in ("auto", "directional", "gradients"):
            raise OptionError(f"method is {self.method!r}; it must be 'auto', 'directional' or 'gradients'")
        if self.until is not None:
            Until.parse(self.until)
        if not self.budget >= 1:
            raise OptionError(
                f"budget is {self.budget}; it is a multiple of the first round's cost, at least 1"
            )
        if self.sampling not in ("auto", "uniform", "curvature"):
            raise OptionError(f"sampling is {self.sampling!r}; it must be 'auto', 'uniform' or 'curvature'")
        if isinstance(self.solver, (Lissa, Refinement)):
            plan = self.solver.plan
            if self.damping != "auto" and self.damping != plan.damping:
                raise OptionError(
                    f"damping is {self.damping}, the solver's plan was made for {plan.damping}; give one of them"
                )
        if self._chains < 2:
            raise OptionError(
                f"chains is {self._chains}; error bars need at least 2 independent chains (4 by default)"
            )
        if self.refine is not None and not self.refine >= 1:
            raise OptionError(f"refine is {self.refine}; it multiplies the plan's cost and is at least 1")
        if self.lanczos_terms < 1:
            raise OptionError(
                f"lanczos_terms is {self.lanczos_terms}; λmax needs at least one term to be measured on"
            )
        if self.shown < 1:
            raise OptionError(f"shown is {self.shown}; show at least one example at each end of a ranking")

    @property
    def _chains(self) -> int:
        return self.solver.plan.chains if isinstance(self.solver, (Lissa, Refinement)) else self.chains

    def generator(self, phase: int) -> torch.Generator:
        """Random numbers of one phase."""
        return torch.Generator().manual_seed(self.seed * 1_000_003 + phase)

    def config(self) -> dict[str, Any]:
        """JSON values that identify the settings in a run directory."""
        solver = self.solver
        return {
            "damping": self.damping,
            "solver": solver if isinstance(solver, str) else f"{solver!r}",
            "product": self.product,
            "accuracy": self.accuracy,
            "chains": self._chains,
            "refine": self.refine,
            "method": self.method,
            "baseline": self.baseline,
            "shown": self.shown,
            "seed": self.seed,
            "micro_batch": self.micro_batch,
            "lanczos_terms": self.lanczos_terms,
            "sampling": self.sampling,
            "until": self.until,
            "budget": self.budget,
        }
