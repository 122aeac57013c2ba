"""Times and sizes in the unit that a person would choose."""

from __future__ import annotations

import re

__all__ = ["duration_seconds", "format_bytes", "format_duration"]


def format_duration(seconds: float) -> str:
    """A length of time in milliseconds, seconds, minutes or hours.

    Example:
        >>> format_duration(0.0042), format_duration(75.0), format_duration(7300.0)
        ('4.2 ms', '75.0 s', '2.0 h')
    """
    for unit, size in (("h", 3600.0), ("min", 60.0)):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{1000 * seconds:.1f} ms" if 0 < seconds < 0.1 else f"{seconds:.1f} s"


def format_bytes(count: float) -> str:
    """A number of bytes, in powers of 1000.

    Example:
        >>> format_bytes(512), format_bytes(2.5e9)
        ('512 B', '2.5 GB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def duration_seconds(text: str) -> float | None:
    """Seconds from a time such as 90s, 10min or 2h; None where it is no such time.

    Example:
        >>> duration_seconds("1.5min")
        90.0
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|sec|min|m|h)", text.strip())
    if found is None:
        return None
    return float(found[1]) * {"s": 1, "sec": 1, "min": 60, "m": 60, "h": 3600}[found[2]]
