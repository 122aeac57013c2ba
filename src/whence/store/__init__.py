"""The run directory: what makes a run resumable and its result readable by others."""

from whence.store.journal import FileJournal
from whence.store.run import Run
from whence.store.scores import ScoreParts

__all__ = ["FileJournal", "Run", "ScoreParts"]
