"""Model directories: are all files there, and whole? Asked before anything is loaded."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from whence.errors import ModelError

__all__ = ["check_files", "read_config"]

LFS_POINTER = b"version https://git-lfs"
AGAIN = "download the model again (interrupted downloads can be resumed)"


def read_config(directory: Path) -> dict[str, Any]:
    """The model's ``config.json``."""
    path = directory / "config.json"
    if not path.is_file():
        raise ModelError(
            f"{directory} has no config.json{_interrupted(directory)}, so it is not a Hugging Face model; give a "
            "directory written by save_pretrained, or a function as package.module:function"
        )
    _check_pointer(path)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path} is not JSON ({error}); {AGAIN}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{path} holds no object; {AGAIN}")
    return config


def check_files(directory: Path) -> None:
    """Raise `ModelError` unless the directory holds whole weights."""
    for path in sorted(directory.glob("*.json")):
        _check_pointer(path)
    whole, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if whole.is_file():
        _check_safetensors(whole)
    elif index.is_file():
        for shard in _shards(index):
            if not shard.is_file():
                raise ModelError(
                    f"{shard.name}, which {index} lists, is missing{_interrupted(directory)}; {AGAIN}"
                )
            _check_safetensors(shard)
    elif (directory / "pytorch_model.bin.index.json").is_file():
        for shard in _shards(directory / "pytorch_model.bin.index.json"):
            if not shard.is_file():
                raise ModelError(f"{shard} is missing{_interrupted(directory)}; {AGAIN}")
            _check_pointer(shard)
    elif (directory / "pytorch_model.bin").is_file():
        _check_pointer(directory / "pytorch_model.bin")
    else:
        raise ModelError(
            f"{directory} holds no weights: neither model.safetensors nor model.safetensors.index.json is there"
            f"{_interrupted(directory)}; {AGAIN}"
        )


def _shards(index: Path) -> list[Path]:
    _check_pointer(index)
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        return [index.parent / name for name in sorted(names)]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index} does not list the weights' files ({error}); {AGAIN}") from error


def _check_safetensors(path: Path) -> None:
    """A safetensors file says in its header how long it is: 8 bytes, the header's length; the header; data."""
    _check_pointer(path)
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else None
        if length is None or 8 + length > size:
            raise ModelError(f"{path} is cut off after {size:,} bytes, inside its header; {AGAIN}")
        try:
            header = json.loads(file.read(length))
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise ModelError(f"{path} is not a safetensors file: its header is no JSON; {AGAIN}") from error
    expected = 8 + length + max(ends, default=0)
    if size < expected:
        raise ModelError(f"{path} is cut off: it has {size:,} bytes of {expected:,}; {AGAIN}")


def _check_pointer(path: Path) -> None:
    with path.open("rb") as file:
        start = file.read(len(LFS_POINTER))
    if start == LFS_POINTER:
        raise ModelError(
            f"{path} is a Git LFS pointer, not the file itself; run `git lfs pull` in {path.parent}, or download "
            "the model again"
        )
    if not start:
        raise ModelError(f"{path} is empty; {AGAIN}")


def _interrupted(directory: Path) -> str:
    """What to add to a message where a download was broken off."""
    parts = sorted(directory.rglob("*.incomplete"))
    return f", but {parts[0].name} is: a download was interrupted" if parts else ""
