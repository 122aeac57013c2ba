"""Where numbers come from: commit, versions, machine, date."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from whence.runs import environment

__all__ = ["commit", "cpu_name", "provenance"]

_RESULTS = (":(top,exclude)results", ":(top,exclude)benchmarks/results")


def provenance() -> dict[str, Any]:
    """Where numbers come from: date, commit, versions, machine."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(),
        **environment(),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "platform": platform.platform(),
    }


def commit() -> str | None:
    """The commit this file belongs to, marked where tracked files differ from it; None outside a checkout.

    Results that are kept beside the code do not count: writing one would mark the next.
    """
    here = Path(__file__).resolve()
    try:
        # Installed into an environment inside somebody else's checkout, the commit would be theirs.
        _git(here.parent, "ls-files", "--error-unmatch", here.name)
        name = _git(here.parent, "describe", "--always", "--abbrev=12", "--exclude=*")
        changed = _git(here.parent, "status", "--porcelain", "--untracked-files=no", "--", ":/", *_RESULTS)
    except (OSError, subprocess.CalledProcessError):
        return None
    return f"{name}-dirty" if changed else name


def _git(directory: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=directory, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def cpu_name() -> str:
    """The processor, as the system calls it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor()
