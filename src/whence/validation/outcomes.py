"""`Outcomes`: what came of training on subsets of the data; and the subsets themselves, as masks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from whence.errors import OptionError, RunDirectoryError
from whence.runs.files import read_tensors, write_tensors

__all__ = ["FILE", "Outcomes", "as_masks", "half_subsets", "positions_of", "standard_error"]

#: What the outcomes are called in the directory of a finished job.
FILE = "outcomes.safetensors"
_KIND = "outcomes of retraining"


@dataclass(frozen=True)
class Outcomes:
    """Losses of queries under models trained on subsets of the data.

    Attributes:
        losses: in nats, ``[subsets, seeds, queries]`` in float64.
        subsets: which examples each subset holds, ``[subsets, n]`` of bool.
        seeds: of the training runs; every subset was trained on with each of them.
    """

    losses: Tensor
    subsets: Tensor
    seeds: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.subsets.ndim != 2 or self.subsets.dtype != torch.bool:
            raise OptionError(
                f"subsets are {self.subsets.dtype} of shape {tuple(self.subsets.shape)}; give a mask, bool of shape "
                "[subsets, n]"
            )
        if self.losses.ndim != 3 or self.losses.shape[:2] != (len(self.subsets), len(self.seeds)):
            raise OptionError(
                f"losses have shape {tuple(self.losses.shape)} for {len(self.subsets)} subsets and "
                f"{len(self.seeds)} seeds; it must be [subsets, seeds, queries]"
            )
        if not bool(torch.isfinite(self.losses).all()):
            subset, seed, query = (~torch.isfinite(self.losses)).nonzero()[0].tolist()
            raise OptionError(
                f"the loss of query {query} is {float(self.losses[subset, seed, query])} for subset {subset} and seed "
                f"{self.seeds[seed]}; leave that query out, or repair the training"
            )

    @property
    def mean(self) -> Tensor:
        """Over seeds, ``[subsets, queries]``."""
        return self.losses.mean(1)

    @property
    def stderr(self) -> Tensor:
        """Standard errors of `mean`, ``[subsets, queries]``; NaN where there is only one seed."""
        return standard_error(self.losses, 1)

    def save(self, path: str | Path) -> Path:
        """Write one file (safetensors); `load` reads it back."""
        tensors = {"losses": self.losses, "subsets": self.subsets, "seeds": torch.tensor(self.seeds)}
        write_tensors(Path(path), tensors, {"kind": _KIND})
        return Path(path)

    @classmethod
    def load(cls, path: str | Path) -> Outcomes:
        """Read what `save` wrote, or the directory of a finished `retrain`."""
        path = Path(path)
        if path.is_dir():
            if not (path / FILE).exists():
                raise RunDirectoryError(
                    f"{path} holds no finished retraining: there is no {FILE} in it. Run the same job again to "
                    "go on with it"
                )
            path = path / FILE
        tensors, notes = read_tensors(path)
        if notes.get("kind") != _KIND:
            raise RunDirectoryError(f"{path} holds no {_KIND}; give a file that Outcomes.save wrote")
        return cls(tensors["losses"], tensors["subsets"], tuple(tensors["seeds"].tolist()))


def half_subsets(n: int, count: int, *, fraction: float = 0.5, generator: torch.Generator) -> Tensor:
    """Random subsets of ``round(fraction · n)`` out of ``n`` examples, ``[count, n]`` of bool.

    Example:
        >>> half_subsets(10, 3, generator=torch.Generator().manual_seed(0)).sum(1)
        tensor([5, 5, 5])
    """
    if count < 1:
        raise OptionError(f"count is {count}; ask for at least one subset")
    size = round(fraction * n) if math.isfinite(fraction) else 0
    if not 1 <= size < n:
        raise OptionError(
            f"a fraction {fraction} of {n} examples is {size} of them; a subset needs at least one and not all"
        )
    masks = torch.zeros(count, n, dtype=torch.bool)
    for row in masks:
        row[torch.randperm(n, generator=generator, device=generator.device)[:size].cpu()] = True
    return masks


def as_masks(subsets: Tensor | Sequence[Sequence[int]], num_examples: int | None) -> Tensor:
    """Subsets, given as a mask or as lists of positions, as a mask ``[subsets, n]`` of bool.

    Example:
        >>> as_masks([[0, 2], [1]], 3)
        tensor([[ True, False,  True],
                [False,  True, False]])
    """
    if isinstance(subsets, Tensor) and subsets.dtype == torch.bool and subsets.ndim == 2:
        if num_examples not in (None, subsets.shape[1]):
            raise OptionError(
                f"the subsets are of {subsets.shape[1]} examples, num_examples is {num_examples}; give one of them"
            )
        masks = subsets.cpu().clone()
    elif num_examples is None:
        raise OptionError(
            "subsets are lists of positions, which do not tell how many examples there are; give num_examples, or a "
            "mask of bool, [subsets, n]"
        )
    else:
        masks = torch.zeros(len(subsets), num_examples, dtype=torch.bool)
        for number, subset in enumerate(subsets):
            masks[number, positions_of(subset, num_examples, f"subset {number}")] = True
    if len(masks) == 0:
        raise OptionError("there is no subset to train on; give at least one")
    empty = (~masks.any(1)).nonzero().flatten()
    if len(empty):
        raise OptionError(f"subset {int(empty[0])} is empty; there is nothing to train on")
    return masks


def positions_of(group: Any, num_examples: int, what: str) -> Tensor:
    """Positions of examples as a tensor, each of them within the data and given once."""
    positions = torch.as_tensor(group).reshape(-1)
    if positions.numel() == 0:
        return positions.long()
    if positions.is_floating_point() or positions.dtype == torch.bool:
        raise OptionError(f"{what} holds {positions.dtype}; give positions in the training data")
    low, high = int(positions.min()), int(positions.max())
    if low < 0 or high >= num_examples:
        raise OptionError(
            f"{what} holds the position {low if low < 0 else high}; with {num_examples} examples they are "
            f"0..{num_examples - 1}"
        )
    values, times = positions.unique(return_counts=True)
    if len(values) < len(positions):
        twice = int(values[times.argmax()])
        raise OptionError(f"{what} holds position {twice} more than once; give each example once")
    return positions.long()


def standard_error(samples: Tensor, dim: int) -> Tensor:
    """Of the mean over one dimension; NaN where there is only one sample."""
    count = samples.shape[dim]
    if count < 2:
        return torch.full_like(samples.mean(dim), math.nan)
    return samples.std(dim) / math.sqrt(count)
