"""The paper's tables and figures, regenerated: one module each, from `subjects` to a `Finding` and a figure."""

from whence.reproduce.finding import Finding, Profile
from whence.reproduce.run import NAMES, reproduce

__all__ = ["NAMES", "Finding", "Profile", "reproduce"]
