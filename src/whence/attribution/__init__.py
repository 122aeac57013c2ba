"""From a question to the training examples behind the answer."""

from whence.attribution.attribute import attribute
from whence.attribution.ranking import Ranking, Row
from whence.attribution.result import Attribution, Solve
from whence.attribution.saving import load

__all__ = ["Attribution", "Ranking", "Row", "Solve", "attribute", "load"]
