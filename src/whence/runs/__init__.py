"""The run directory: what makes a run resumable and its result readable by others."""

from whence.runs.codec import as_json
from whence.runs.directory import (
    Journal,
    Run,
    Scalar,
    check_run,
    environment,
    holds,
    read,
    read_table,
    read_value,
    write_value,
)

__all__ = [
    "Journal",
    "Run",
    "Scalar",
    "as_json",
    "check_run",
    "environment",
    "holds",
    "read",
    "read_table",
    "read_value",
    "write_value",
]
