"""`CGJournal`: conjugate gradients in flight, on disk, so that an interrupted solve ends in the same bits.

solve/cg.safetensors            the iterate, the last two blocks of the basis (or all), the search direction, small
                                matrices
"""

from __future__ import annotations

import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from whence.runs.files import read_tensors, write_tensors
from whence.runs.journal import pack, unpack
from whence.solvers.block_lanczos import BlockLanczos
from whence.solvers.certificate import BlockTridiagonal
from whence.solvers.cg_state import CGState
from whence.solvers.settling import Settling
from whence.solvers.spanned import Spanned
from whence.vectors import ParamVector

__all__ = ["CGJournal"]

_SMALL = "small/"
_INNER_PRODUCTS = ("plain", "once", "twice")
_NUMBERS = ("iteration", "trusted", "capped", "failed", "products", "path", "events", "operator")


class CGJournal:
    """Writes a `CGState` down every so many seconds.

    Args:
        directory: where.
        seconds: between two writings.
        device: where restored vectors go.
    """

    def __init__(self, directory: Path, *, seconds: float, device: torch.device | str = "cpu") -> None:
        self._path, self._seconds, self._device = directory / "cg.safetensors", seconds, device
        self._written = time.monotonic()

    def record(self, state: CGState, *, now: bool = False) -> None:
        """Write the state down if it is time to, or at once."""
        if not now and time.monotonic() - self._written < self._seconds:
            return
        lanczos = state.lanczos
        vectors: dict[str, ParamVector | None] = {
            "iterate": state.iterate,
            # the first direction is the first block of the basis; a file holds no tensor under two names
            "direction": state.direction.clone() if state.direction is not None else None,
            "current": lanczos.current,
            "previous": lanczos.previous,
            "weighted": None if lanczos.weighted is lanczos.current else lanczos.weighted,
        }
        tensors: dict[str, Tensor] = {}
        for name, vector in vectors.items():
            tensors |= {} if vector is None else pack(vector, name)
        tensors |= {_SMALL + name: getattr(state, name) for name in _small_tensors(state)}
        for kind, blocks in (("diagonal", lanczos.T.diagonal), ("below", lanczos.T.below)):
            tensors |= {f"{kind}/{number}": block for number, block in enumerate(blocks)}
        notes: dict[str, Any] = {name: getattr(state, name) for name in _NUMBERS}
        spanned, settling = state.spanned, state.settling
        if spanned is not None:
            # the last blocks are the recurrence's own, written above
            kept = [V for V in spanned.blocks if V is not lanczos.current and V is not lanczos.previous]
            for number, V in enumerate(kept):
                tensors |= pack(V, f"basis {number}")
            tensors |= {f"spanned/{name}": getattr(spanned, name) for name in _INNER_PRODUCTS}
            notes["kept"] = len(kept)
        if settling is not None:
            tensors |= {"settling/scores": settling.scores}
            tensors |= {} if settling.along is None else {"settling/along": settling.along}
            notes["settling"] = {name: getattr(settling, name) for name in ("moved", "removed", "bounds")}
        notes |= {"operator": dict(state.operator), "norm": lanczos.norm, "reach": lanczos.reach}
        notes |= {"blocks": [len(lanczos.T.diagonal), len(lanczos.T.below)]}
        notes |= {"weighted": lanczos.weighted is not None}
        write_tensors(self._path, {name: t.contiguous() for name, t in tensors.items()}, notes)
        self._written = time.monotonic()

    def restore(self) -> CGState | None:
        """The state last written, or None."""
        if not self._path.exists():
            return None
        tensors, notes = read_tensors(self._path, self._device)

        def vector(name: str) -> ParamVector | None:
            try:
                return unpack(tensors, name)
            except KeyError:
                return None

        def blocks(kind: str, count: int) -> list[Tensor]:
            return [tensors[f"{kind}/{number}"].cpu() for number in range(count)]

        current, iterate = vector("current"), vector("iterate")
        assert iterate is not None
        weighted = vector("weighted") or (current if notes["weighted"] else None)
        diagonal, below = notes["blocks"]
        lanczos = BlockLanczos(
            current=current,
            weighted=weighted,
            previous=vector("previous"),
            T=BlockTridiagonal(blocks("diagonal", diagonal), blocks("below", below)),
            norm=notes["norm"],
            reach=notes["reach"],
        )
        rest: dict[str, Any] = {name: notes[name] for name in _NUMBERS}
        rest |= {n.removeprefix(_SMALL): t.cpu() for n, t in tensors.items() if n.startswith(_SMALL)}
        if "settling" in notes:
            along = tensors.get("settling/along")
            rest["settling"] = Settling(
                tensors["settling/scores"].cpu(), None if along is None else along.cpu(), **notes["settling"]
            )
        if "kept" in notes:
            blocks_of_basis = [unpack(tensors, f"basis {number}") for number in range(notes["kept"])]
            blocks_of_basis += [V for V in (lanczos.previous, lanczos.current) if V is not None]
            inner = {name: tensors[f"spanned/{name}"].cpu() for name in _INNER_PRODUCTS}
            rest["spanned"] = Spanned(blocks_of_basis, **inner)
        return CGState(iterate=iterate, lanczos=lanczos, direction=vector("direction"), **rest)


def _small_tensors(state: CGState) -> list[str]:
    return [field.name for field in fields(state) if isinstance(getattr(state, field.name), Tensor)]
