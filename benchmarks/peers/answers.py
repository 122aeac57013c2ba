"""A peer's scores of one work, kept in a file between the peer's environment and ours."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

__all__ = ["Answer", "Answers", "kept", "versions"]

DIRECTORY = Path("runs") / "peers"


@dataclass(frozen=True)
class Answer:
    """Scores at one damping.

    Attributes:
        setting: "grid", or what the peer calls a setting of its own.
        damping: as the peer was given it; None lets it choose.
        multiple: of the scale of the grid; None outside the grid.
        seconds: of the processor, without what all dampings share.
        scores: ``[queries, train]``, positive where the example helps.
    """

    setting: str
    damping: float | None
    multiple: float | None
    seconds: float
    scores: Tensor


@dataclass(frozen=True)
class Answers:
    """All of a peer's scores of one work.

    Attributes:
        peer, work: their names.
        unit: what the dampings of the grid are multiples of, in words.
        scale: how large that is.
        seconds: of the processor, for what all dampings share.
        answers: one for each damping.
        versions: of the peer and what it runs on.
        complete: whether every damping has been asked.
    """

    peer: str
    work: str
    unit: str
    scale: float
    seconds: float
    answers: Sequence[Answer]
    versions: dict[str, str]
    complete: bool = True

    def save(self) -> Path:
        """Write them below `DIRECTORY`."""
        path = kept(self.peer, self.work)
        path.parent.mkdir(parents=True, exist_ok=True)
        about: dict[str, Any] = {**vars(self), "answers": []}
        for each in self.answers:
            about["answers"].append({key: value for key, value in vars(each).items() if key != "scores"})
        tensors = {str(i): each.scores.contiguous() for i, each in enumerate(self.answers)}
        save_file(tensors, path, metadata={"about": json.dumps(about)})
        return path

    @classmethod
    def load(cls, path: Path) -> Answers:
        """Read what `save` wrote."""
        with safe_open(path, framework="pt") as file:
            about = json.loads(file.metadata()["about"])
            answers = [
                Answer(**each, scores=file.get_tensor(str(i))) for i, each in enumerate(about["answers"])
            ]
        return cls(**{**about, "answers": answers})


def kept(peer: str, work: str) -> Path:
    """Where a peer's scores of a work are, once it has been asked."""
    return DIRECTORY / peer / f"{work}.safetensors"


def versions(*packages: str) -> dict[str, str]:
    """Of installed packages, by name."""
    return {package: version(package) for package in packages}
