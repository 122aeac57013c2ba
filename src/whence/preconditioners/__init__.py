"""Approximations of ``H + λ`` with cheap inverses, shared by all queries."""

from whence.preconditioners.base import Preconditioned, Preconditioner
from whence.preconditioners.low_rank import LowRank
from whence.preconditioners.nystrom import nystrom
from whence.preconditioners.quality import Quality, measure_quality

__all__ = [
    "LowRank",
    "Preconditioned",
    "Preconditioner",
    "Quality",
    "measure_quality",
    "nystrom",
]
