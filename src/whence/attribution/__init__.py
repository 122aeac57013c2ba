"""From a question to the training examples behind the answer."""

from whence.attribution.pipeline import attribute
from whence.attribution.ranking import Ranking, Row
from whence.attribution.result import Attribution, Solve, load

__all__ = ["Attribution", "Ranking", "Row", "Solve", "attribute", "load"]
