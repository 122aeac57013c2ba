"""`FileJournal`: a solve in flight, on disk.

    solve/state.safetensors            the chain under way, generators, paths, what the operator remembers
    solve/chain-<attempt>-<k>.safetensors   averages of finished chains, written once

A finished chain is written before the state that counts it, so a state never names a chain that is not there.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from whence.runs.files import read_tensors, write_tensors
from whence.solvers.journal import Chain, SolveState
from whence.solvers.plan import Plan
from whence.vectors import ParamVector

__all__ = ["FileJournal", "pack", "unpack"]


class FileJournal:
    """Writes a `SolveState` down every so many seconds.

    Args:
        directory: where.
        plan: what the solve was planned with: brings the spectrum, which the state does not repeat.
        seconds: between two writings; finished chains are written at once.
        device: where restored vectors go.
    """

    def __init__(
        self, directory: Path, plan: Plan, *, seconds: float, device: torch.device | str = "cpu"
    ) -> None:
        self._directory, self._plan, self._seconds, self._device = directory, plan, seconds, device
        self._written = time.monotonic()
        self._safe_chains: set[Path] = set()

    @property
    def _state_file(self) -> Path:
        return self._directory / "state.safetensors"

    def _chain_file(self, attempt: int, number: int) -> Path:
        return self._directory / f"chain-{attempt}-{number}.safetensors"

    def restore(self) -> SolveState | None:
        """The state last written, or None."""
        if not self._state_file.exists():
            return None
        tensors, notes = read_tensors(self._state_file, self._device)
        attempt = len(notes["events"])
        finished = []
        for number in range(notes["finished"]):
            path = self._chain_file(attempt, number)
            finished.append(unpack(read_tensors(path, self._device)[0], "average"))
            self._safe_chains.add(path)
        state = SolveState(
            plan=self._plan.replace(**notes["plan"]),
            seeds=notes["seeds"],
            generator=tensors["generator"].cpu(),
            finished=finished,
            paths=[tensors[f"path/{k}"].tolist() for k in range(notes["paths"])],
            events=notes["events"],
            products=notes["products"],
            terms=notes["terms"],
            operator=notes["operator"],
        )
        if notes["step"] is not None:
            iterate = unpack(tensors, "iterate")
            average = unpack(tensors, "average") if notes["averages"] else iterate
            generator = torch.Generator()
            generator.set_state(tensors["chain generator"].cpu())
            state.chain = Chain(iterate, average, notes["step"], generator)
        return state

    def record(self, state: SolveState, *, now: bool = False) -> None:
        """Write the state down if it is time to."""
        if not now and time.monotonic() - self._written < self._seconds:
            return
        for number, finished in enumerate(state.finished):
            path = self._chain_file(len(state.events), number)
            if path not in self._safe_chains:
                write_tensors(path, pack(finished, "average"), {})
                self._safe_chains.add(path)
        tensors: dict[str, Tensor] = {"generator": state.generator}
        tensors |= {
            f"path/{k}": torch.tensor(path, dtype=torch.float64) for k, path in enumerate(state.paths)
        }
        chain = state.chain
        if chain is not None:
            tensors |= pack(chain.iterate, "iterate")
            tensors["chain generator"] = chain.generator.get_state()
            if chain.average is not chain.iterate:
                tensors |= pack(chain.average, "average")
        write_tensors(self._state_file, tensors, self._notes(state))
        self._written = time.monotonic()

    @staticmethod
    def _notes(state: SolveState) -> dict[str, Any]:
        plan, chain = state.plan, state.chain
        return {
            "plan": {name: getattr(plan, name) for name in ("step_size", "batch_size", "num_steps")},
            "seeds": state.seeds,
            "finished": len(state.finished),
            "paths": len(state.paths),
            "events": state.events,
            "products": state.products,
            "terms": state.terms,
            "operator": dict(state.operator),
            "step": None if chain is None else chain.step,
            "averages": chain is not None and chain.average is not chain.iterate,
        }


def pack(vector: ParamVector, prefix: str) -> dict[str, Tensor]:
    """A vector's tensors under names that tell which vector they belong to."""
    kind = "vector" if vector.columns is None else "block"
    return {f"{prefix}/{kind}/{name}": tensor for name, tensor in vector.items()}


def unpack(tensors: dict[str, Tensor], prefix: str) -> ParamVector:
    """Inverse of `pack`."""
    for kind in ("vector", "block"):
        start = f"{prefix}/{kind}/"
        own = {name[len(start) :]: tensor for name, tensor in tensors.items() if name.startswith(start)}
        if own:
            columns = next(iter(own.values())).shape[0] if kind == "block" else None
            return ParamVector(own, columns=columns)
    raise KeyError(prefix)
