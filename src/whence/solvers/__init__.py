"""Solvers of ``(H + λ)u = g``, each in its own file, all returning a `Solution`."""

from whence.solvers.base import Solution, Solver
from whence.solvers.certificate import Certificate
from whence.solvers.cg import ConjugateGradient
from whence.solvers.cg_state import CGState
from whence.solvers.error_parts import ErrorParts
from whence.solvers.lissa import Lissa
from whence.solvers.refinement import Refinement

__all__ = [
    "CGState",
    "Certificate",
    "ConjugateGradient",
    "ErrorParts",
    "Lissa",
    "Refinement",
    "Solution",
    "Solver",
]
