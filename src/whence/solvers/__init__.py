"""Solvers of ``(H + λ)u = g``, each in its own file, all returning a `Solution`."""

from whence.solvers.base import Certificate, ErrorParts, Solution, Solver, Statistics
from whence.solvers.cg import ConjugateGradient
from whence.solvers.cg_state import CGState
from whence.solvers.lissa import Lissa

__all__ = [
    "CGState",
    "Certificate",
    "ConjugateGradient",
    "ErrorParts",
    "Lissa",
    "Solution",
    "Solver",
    "Statistics",
]
