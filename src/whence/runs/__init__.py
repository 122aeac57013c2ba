"""The run directory: what makes a run resumable and its result readable by others."""

from whence.runs.codec import as_json
from whence.runs.directory import Run, differences, environment, holds, opened, read
from whence.runs.files import read_value, write_value
from whence.runs.journal import Journal
from whence.runs.manifest import Scalar

__all__ = [
    "Journal",
    "Run",
    "Scalar",
    "as_json",
    "differences",
    "environment",
    "holds",
    "opened",
    "read",
    "read_value",
    "write_value",
]
