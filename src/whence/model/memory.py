"""Memory: keeping what was freed on Linux CPUs, or giving it back, and how much there is.

glibc gives large freed blocks back to the kernel, and every product then pays to have the same pages zeroed
and mapped again (compare ``python -m benchmarks.products`` with and without ``--default-malloc``).
`keep_freed_memory` asks glibc to keep them. It changes a setting of the whole process, so it is for programs,
not for the library, to call. Between the phases of a job, which need memory of different sizes, what was freed is given
back once: else each phase would take its own beside what those before it have left.
"""

from __future__ import annotations

import ctypes
import os
import platform

import torch

__all__ = ["give_back_freed_memory", "half_of_memory", "keep_freed_memory"]

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # from malloc.h


def keep_freed_memory() -> bool:
    """Tell glibc not to return freed memory to the kernel; False where there is no glibc to tell."""
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    return bool(libc.mallopt(_M_MMAP_MAX, 0) and libc.mallopt(_M_TRIM_THRESHOLD, -1))


def give_back_freed_memory() -> None:
    """Let glibc return to the kernel what it holds and nobody uses; nothing where there is no glibc."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def half_of_memory(device: torch.device) -> float | None:
    """Half of the device's memory, in bytes; None where the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1] / 2
    if device.type == "cpu" and hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2
    return None
