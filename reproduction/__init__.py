"""The paper's tables and figures, regenerated: one module each, from `subjects` to a `Finding` and a figure."""

from reproduction.finding import Finding, Profile
from reproduction.run import NAMES, reproduce

__all__ = ["NAMES", "Finding", "Profile", "reproduce"]
