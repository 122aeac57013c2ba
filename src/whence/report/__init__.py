"""Pages from saved results. Nothing here needs torch, the model or the data."""

from whence.report.content import Entry, Question, Report, Trust

__all__ = ["Entry", "Question", "Report", "Trust"]
