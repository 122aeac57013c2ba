"""Likely mislabelled or harmful training examples, by self-influence."""

from whence.cleaning.pipeline import clean
from whence.cleaning.result import Cleaning, load_cleaning

__all__ = ["Cleaning", "clean", "load_cleaning"]
