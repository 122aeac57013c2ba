"""`lock`: one run at a time in a directory, among processes and within one."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path

from whence.errors import RunDirectoryError, StorageError

__all__ = ["lock"]

_READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)
_in_use: set[tuple[int, int]] = set()
_guard = threading.Lock()


def lock(path: Path, *, may_be_read_only: bool) -> Callable[[], None] | None:
    """Keep others out until the result is called, or the process dies; None where a directory is read-only."""
    info = path.stat()
    this = info.st_dev, info.st_ino
    with _guard:
        if this in _in_use:
            raise RunDirectoryError(
                f"{path} is being used by another call in this process; wait for it, or give another directory"
            )
        try:
            handle = _locked(path)
        except StorageError as error:
            if may_be_read_only and getattr(error.__cause__, "errno", None) in _READ_ONLY:
                return None
            raise
        _in_use.add(this)

    def release() -> None:
        _in_use.discard(this)
        if handle is not None:
            os.close(handle)

    return release


def _locked(path: Path) -> int | None:
    try:
        import fcntl
    except ImportError:  # no such locks on this system
        return None
    try:
        handle = os.open(path / "lock", os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        raise StorageError(
            f"{path} cannot be written to ({error}). Change its permissions, or choose another directory"
        ) from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(handle)
        raise RunDirectoryError(
            f"{path} is being used by another process; wait for it, or give another directory"
        ) from error
    return handle
