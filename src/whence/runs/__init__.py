"""The run directory: what makes a run resumable and its result readable by others."""

from whence.runs.journal import FileJournal
from whence.runs.run import Run
from whence.runs.scores import ScoreParts

__all__ = ["FileJournal", "Run", "ScoreParts"]
