"""Keeping freed memory on Linux CPUs.

glibc gives large freed blocks back to the kernel, and every product then pays to have the same pages zeroed
and mapped again (compare ``python -m benchmarks.products`` with and without ``--default-malloc``).
`keep_freed_memory` asks glibc to keep them. It changes a setting of the whole process, so it is for programs,
not for the library, to call.
"""

from __future__ import annotations

import ctypes
import platform

__all__ = ["keep_freed_memory"]

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # from malloc.h


def keep_freed_memory() -> bool:
    """Tell glibc not to return freed memory to the kernel; False where there is no glibc to tell."""
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    return bool(libc.mallopt(_M_MMAP_MAX, 0) and libc.mallopt(_M_TRIM_THRESHOLD, -1))
