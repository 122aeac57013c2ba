"""Solvers of ``(H + λ)u = g``, each in its own file, all returning a `Solution`."""

from whence.solvers.base import Solution, Solver
from whence.solvers.lissa import Lissa

__all__ = ["Lissa", "Solution", "Solver"]
