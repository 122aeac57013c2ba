"""The paper's tables and figures, regenerated: a module each, from measured numbers to a conclusion and a figure."""

from reproduction.finding import Finding, Profile
from reproduction.reproduce import NAMES, reproduce, summarise

__all__ = ["NAMES", "Finding", "Profile", "reproduce", "summarise"]
