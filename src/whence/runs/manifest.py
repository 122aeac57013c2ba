"""`Manifest`: what a run directory holds, each file with its length and checksum.

::

    manifest.json               format, configuration, identity and environment of the run; every artifact's file,
                                length and BLAKE2b; what operators remembered; a BLAKE2b of all that
    spectrum.json               an artifact: .json, .safetensors (`whence.runs.codec`) or .parquet
    solve.000007.safetensors    one that is replaced: with another number each time

A change writes the new files, replaces the manifest, deletes the old files. A process killed at any moment leaves the
old version or the new one. Nothing is read whose length and checksum are not the manifest's, nothing through a link,
and nothing outside the directory.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from whence.errors import RunDirectoryError
from whence.runs import files
from whence.runs.codec import decode, encode

__all__ = ["FORMAT", "Content", "Manifest", "Scalar", "version_of"]

T = TypeVar("T")
#: A value of an option.
Scalar = bool | int | float | str | None

#: Raised when files change their meaning; directories of another format are refused.
FORMAT = 11
_NAME = re.compile(r"(?!(?:manifest|lock)$)[a-z0-9_-]+(/[a-z0-9_-]+)*(\.\d{6})?", re.ASCII)
_LAST = 999_999
_NUMBER = re.compile(r"\.(\d{6})\.(?:json|safetensors)\Z", re.ASCII)


@dataclass(frozen=True)
class _Artifact:
    file: str
    bytes: int
    blake2b: str


@dataclass(frozen=True)
class Content:
    """What a manifest says.

    Attributes:
        config: what was asked: option -> value.
        identity: name -> fingerprint of what it was asked about.
        environment: versions and machine.
        artifacts: name -> its file.
        operators: name -> what the operator remembered after that artifact was computed.
    """

    config: dict[str, Scalar]
    identity: dict[str, str]
    environment: dict[str, str]
    artifacts: dict[str, _Artifact] = field(default_factory=dict)
    operators: dict[str, dict[str, float | None]] = field(default_factory=dict)


class Manifest:
    """The manifest of the run directory ``path``."""

    def __init__(self, path: Path, content: Content) -> None:
        self.path, self.content = path, content
        self._compared: set[_Artifact] = set()  # whose file is known to be what it says
        numbers = (_NUMBER.search(artifact.file) for artifact in content.artifacts.values())
        self._number = max((int(number[1]) for number in numbers if number), default=0)

    @classmethod
    def open(cls, path: Path) -> Manifest:
        """Read a run directory's manifest.

        Raises:
            RunDirectoryError: there is none, it was damaged, or is of another format.
        """
        if not cls.is_in(path):
            raise RunDirectoryError(f"{path} holds no run; give the directory of one")
        file = _regular(path, "manifest.json")
        tree, _ = files.read_tree(file)
        try:
            form = tree["format"]
            if form == FORMAT:  # others may have had another checksum, or none
                if tree.pop("blake2b") != _digest(tree):
                    raise ValueError("its checksum is another")
                del tree["format"]
                return cls(path, decode(Content, tree, {}))
        except Exception as error:
            raise RunDirectoryError(f"{file} was damaged or changed ({error}). {files.REMEDY}") from error
        raise _other_format(path, form, file.name)

    @staticmethod
    def is_in(path: Path) -> bool:
        """Whether a directory has a manifest.

        Raises:
            RunDirectoryError: it has none, and holds a run of a format that had none.
        """
        if not os.path.lexists(path / "manifest.json"):
            try:
                form = json.loads(_regular(path, "config.json").read_bytes())["format"]
            except Exception:  # something else
                return False
            raise _other_format(path, form, "environment.json")
        return True

    def __contains__(self, name: str) -> bool:
        return name in self.content.artifacts

    def names(self, begin: str = "") -> list[str]:
        """The artifacts there are whose names begin so."""
        return [name for name in self.content.artifacts if name.startswith(begin)]

    # --- reading -----------------------------------------------------------------------------------------

    def file(self, name: str) -> Path:
        """An artifact's file, after comparing its length and, once, its checksum.

        Raises:
            RunDirectoryError: there is no such artifact, or it was damaged.
        """
        artifact = self.content.artifacts.get(name)
        if artifact is None:
            raise RunDirectoryError(
                f"{self.path} lacks {name!r}: the run is unfinished. Run the same command again to complete it"
            )
        path = _regular(self.path, artifact.file)
        same = path.stat().st_size == artifact.bytes and (
            artifact in self._compared or files.checksum(path) == artifact.blake2b
        )
        if not same:
            raise RunDirectoryError(f"{path} was damaged or changed: its checksum is another. {files.REMEDY}")
        self._compared.add(artifact)
        return path

    def value(
        self,
        name: str,
        cls: type[T],
        *,
        device: torch.device | str = "cpu",
        more: Iterable[str] = (),
        mapped: bool = False,
    ) -> T:
        """An artifact; ``more`` name others that hold tensors it refers to. ``mapped`` ones stay in their file."""
        others = [self.file(other) for other in more]
        return files.read_value(self.file(name), cls, device=device, more=others, mapped=mapped)

    def tree(self, name: str, more: Iterable[str] = ()) -> tuple[Any, dict[str, Tensor]]:
        """The same as it is in its file; see `whence.runs.codec`."""
        tree, tensors = files.read_tree(self.file(name))
        for other in more:
            tensors |= files.read_tree(self.file(other))[1]
        return tree, tensors

    def operator(self, name: str) -> dict[str, float | None]:
        """What the operator remembered after an artifact was computed."""
        try:
            return self.content.operators[name]
        except KeyError:
            raise RunDirectoryError(
                f"{self.path} does not say what the operator remembered after {name!r}. {files.REMEDY}"
            ) from None

    # --- writing -----------------------------------------------------------------------------------------

    def place(self, name: str) -> Path:
        """Where an artifact's file goes, its suffix aside."""
        if not _NAME.fullmatch(name):
            raise ValueError(
                f"{name!r} cannot be an artifact's name: small letters, digits, - and _ between /"
            )
        return _unlinked(self.path, name)

    def next_number(self) -> str:
        """A number that no file has had."""
        self._number += 1
        if self._number > _LAST:
            raise RunDirectoryError(
                f"{self.path} has had files up to the number {_LAST}. Run again in a new directory"
            )
        return f"{self._number:06d}"

    def change(
        self,
        add: Mapping[str, Path],
        *,
        remove: Iterable[str] = (),
        operators: Mapping[str, Mapping[str, float | None]] | None = None,
    ) -> None:
        """Name files that were written, and forget others: the manifest first, then the files it named before."""
        before, gone = self.content, set(remove)
        artifacts = {name: artifact for name, artifact in before.artifacts.items() if name not in gone}
        for name, path in add.items():
            file = path.relative_to(self.path).as_posix()
            artifacts[name] = _Artifact(file, path.stat().st_size, files.checksum(path))
            self._compared.add(artifacts[name])
        remembered = {name: state for name, state in before.operators.items() if name not in gone}
        remembered |= {name: dict(state) for name, state in (operators or {}).items()}
        content = replace(before, artifacts=artifacts, operators=remembered)
        tree = {"format": FORMAT, **encode(content)[0]}
        files.write_bytes(self.path / "manifest.json", files.json_bytes({**tree, "blake2b": _digest(tree)}))
        self.content = content
        named = {artifact.file for artifact in artifacts.values()}
        for artifact in before.artifacts.values():
            if artifact.file not in named:
                with contextlib.suppress(OSError):
                    (self.path / artifact.file).unlink()

    def sweep(self) -> None:
        """Delete what a killed process left: temporary files, and other numbers of artifacts that are replaced."""
        for directory, below, names in os.walk(self.path):
            other_runs = [name for name in below if Path(directory, name, "manifest.json").exists()]
            below[:] = [name for name in below if name not in other_runs]
            for path in (Path(directory, name) for name in names if files.is_temporary(name)):
                with contextlib.suppress(OSError):
                    path.unlink()
        for name, artifact in self.content.artifacts.items():
            if _is_numbered(artifact.file, name):
                with contextlib.suppress(ValueError, RunDirectoryError):  # said by whoever reads it
                    self.sweep_numbers(name)

    def sweep_numbers(self, name: str) -> None:
        """Delete the numbered files of an artifact, or of one about to be written, that are not named."""
        place = self.place(name)
        named = {self.path / artifact.file for artifact in self.content.artifacts.values()}
        with contextlib.suppress(OSError):
            for path in place.parent.iterdir():
                if _is_numbered(path.name, place.name) and path not in named:
                    path.unlink()


def _is_numbered(file: str, name: str) -> bool:
    """Whether a file is one of those that an artifact has while it is replaced."""
    return file.startswith(f"{name}.") and _NUMBER.fullmatch(file, len(name)) is not None


def _other_format(path: Path, form: Any, where: str) -> RunDirectoryError:
    return RunDirectoryError(
        f"{path} is of format {form!r:.20}, this whence ({version_of('whence')}) reads format {FORMAT}. "
        f"Use the version that wrote it (see {where}), or run again in a new directory"
    )


@cache
def version_of(package: str) -> str:
    """Its version; empty if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _unlinked(root: Path, file: str) -> Path:
    """A path inside a directory; no part of it may lead out, or be a link."""
    path = root
    for part in file.split("/"):
        path = path / part
        if part in ("", ".", "..") or "\\" in part or path.is_symlink():
            raise RunDirectoryError(
                f"{path} is a link or leads out of the run directory, which whence does not follow. {files.REMEDY}"
            )
    return path


def _regular(root: Path, file: str) -> Path:
    """The same for a file that is to be read."""
    path = _unlinked(root, file)
    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            raise OSError("not a file")
    except (OSError, ValueError) as error:
        raise RunDirectoryError(f"{path} cannot be read ({error}). {files.REMEDY}") from error
    return path


def _digest(tree: Any) -> str:
    """Of a JSON tree."""
    return hashlib.blake2b(json.dumps(tree, sort_keys=True).encode(), digest_size=32).hexdigest()
