"""JSON that is kept: partial results and findings, written atomically."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from whence.errors import RunDirectoryError
from whence.runs.files import replace_file
from whence.spectrum import Estimate, Spectrum

__all__ = ["read_object", "spectrum_from_json", "spectrum_to_json", "write_json"]

_ESTIMATES = ("trace", "frobenius", "lambda_max", "sampling_constant", "top_sampling_constant")
_TENSORS = ("eigenvalues", "weights")


def write_json(path: Path, value: Any) -> None:
    """Write JSON, readable by people."""
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"

    def write(temporary: Path) -> None:
        temporary.write_text(text, encoding="utf-8")

    replace_file(path, write)


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object that `write_json` wrote."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunDirectoryError(
            f"{path} cannot be read ({error}); delete it, and it is measured anew"
        ) from error
    if not isinstance(value, dict):
        raise RunDirectoryError(f"{path} holds a {type(value).__name__}; delete it, and it is measured anew")
    return value


def spectrum_to_json(spectrum: Spectrum) -> dict[str, Any]:
    """Numbers, and pairs of a number and its error."""
    pairs = {
        name: None if estimate is None else [estimate.value, estimate.stderr]
        for name in _ESTIMATES
        for estimate in [getattr(spectrum, name)]
    }
    lists = {
        name: None if tensor is None else tensor.tolist()
        for name in _TENSORS
        for tensor in [getattr(spectrum, name)]
    }
    return {
        **pairs,
        **lists,
        "num_parameters": spectrum.num_parameters,
        "seconds_per_term": spectrum.seconds_per_term,
    }


def spectrum_from_json(value: Mapping[str, Any]) -> Spectrum:
    """Inverse of `spectrum_to_json`."""
    made: dict[str, Any] = dict(value)
    for name in _ESTIMATES:
        made[name] = None if value[name] is None else Estimate(*value[name])
    for name in _TENSORS:
        made[name] = None if value[name] is None else torch.tensor(value[name], dtype=torch.float64)
    return Spectrum(**made)
