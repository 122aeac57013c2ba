"""Scoring a data set along solved directions, without storing a gradient."""

from whence.scoring.scorer import Method, Scorer

__all__ = ["Method", "Scorer"]
