"""`Part`: what the index keeps of some training examples, made and read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from whence.errors import RunDirectoryError
from whence.index.signs import Signs
from whence.index.whitened import Whitened
from whence.model.data import TermSet
from whence.progress import ticker
from whence.runs import Run
from whence.runs.files import REMEDY
from whence.runs.fingerprint import of_value
from whence.runs.manifest import Manifest

__all__ = ["Part", "check_same", "make_parts", "read_parts"]

#: How many examples are rotated together.
_CHUNK = 256


@dataclass(frozen=True)
class Part:
    """Of consecutive examples.

    Attributes:
        first: position of the first.
        signs: of their rotated whitened gradients.
        fingerprints: by which each is recognised.
    """

    first: int
    signs: Signs
    fingerprints: Tensor

    @property
    def end(self) -> int:
        """Position after the last."""
        return self.first + len(self.fingerprints)

    def __post_init__(self) -> None:
        n = len(self.fingerprints)
        if n == 0 or self.signs.bits.ndim != 2 or not len(self.signs.bits) == len(self.signs.sizes) == n:
            raise ValueError(f"a part of {n} examples with signs {tuple(self.signs.bits.shape)}")


def fingerprint(example: Any) -> int:
    """Of one example: 60 bits."""
    return int(of_value(example)[:15], 16)


def read_parts(kept: Manifest) -> list[Part]:
    """All parts that are there, their signs left in their files.

    Raises:
        RunDirectoryError: one was damaged, or they are not of consecutive examples.
    """
    parts = [kept.value(name, Part, mapped=True) for name in sorted(kept.names("part-"))]
    if [part.first for part in parts] != [0, *(part.end for part in parts)][:-1]:
        raise RunDirectoryError(
            f"the parts of the index in {kept.path} are not of consecutive examples. {REMEDY}"
        )
    return parts


def make_parts(run: Run, whitened: Whitened, size: int) -> None:
    """The parts that are missing, of so many examples each; those that are there are compared with the data."""
    terms, number, begin = whitened.gnh.terms, 0, 0
    with ticker("indexing training examples", len(terms)) as tick:
        while begin < len(terms):
            end = min(begin + size, len(terms))
            name = f"part-{number:05d}"
            there = run.has(name)
            part = run.keep(name, Part, _making(whitened, begin, end, tick))
            if part.first != begin or part.end > len(terms):
                raise RunDirectoryError(
                    f"{name} of the index in {run.path} is of the examples from {part.first} to {part.end}, and the "
                    f"data have {len(terms)}. Give the data that it was made of, with others behind them"
                )
            if there:
                check_same(part, terms, range(part.first, part.end), str(run.path))
                for _ in range(part.end - part.first):
                    tick()
            number, begin = number + 1, part.end


def check_same(part: Part, terms: TermSet, positions: Sequence[int], where: str) -> None:
    """Refuse data of which one of these examples is another than when the part was made."""
    for position in positions:
        if fingerprint(terms.data[position]) != int(part.fingerprints[position - part.first]):
            raise RunDirectoryError(
                f"example {position} of the training data is another than the one in the index in {where}. Give the "
                "data that it was made of, or make another index"
            )


def _making(whitened: Whitened, begin: int, end: int, tick: Callable[[], None]) -> Callable[[], Part]:
    def compute() -> Part:
        found = []
        for positions in torch.arange(begin, end).split(_CHUNK):
            found.append(Signs.of(whitened.of_examples(positions)))
            for _ in positions:
                tick()
        data = whitened.gnh.terms.data
        prints = torch.tensor([fingerprint(data[position]) for position in range(begin, end)])
        bits = torch.cat([signs.bits for signs in found])
        return Part(begin, Signs(bits, torch.cat([signs.sizes for signs in found])), prints)

    return compute
