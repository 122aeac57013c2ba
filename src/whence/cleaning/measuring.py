"""The phases of `clean`: self-influence of all training examples, and the spectrum it rests on.

Each phase takes from the run directory what is there and computes what is not, as those of `attribute` do.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from whence.attribution.saving import spectrum_from_json, spectrum_to_json
from whence.errors import OptionError
from whence.model.gauss_newton import GaussNewton, Product
from whence.operators import LinearOperator
from whence.preconditioners import LowRank, nystrom
from whence.runs import Run
from whence.runs.files import read_object
from whence.runs.readings import ReadingParts
from whence.runs.run import read_config
from whence.scoring.cost import count_work
from whence.scoring.self_influence import (
    Bounds,
    Calibration,
    Readings,
    SelfInfluence,
    affordable_rank,
    calibrate,
    measure_bounds,
    read_examples,
)
from whence.solvers.plan import check_damping, resolve_damping
from whence.spectrum import Spectrum, estimate_spectrum

__all__ = ["Settings", "measure", "read_measured", "timed"]

#: A part of the pass should take about this many flops: a minute or so on a few cores.
_FLOPS_PER_PART = 2e12
_LARGEST_PART = 50_000


@dataclass(frozen=True)
class Settings:
    """What the numbers depend on; `clean` explains each."""

    damping: float | str
    rank: int | None
    product: Product
    probes: int
    seed: int
    micro_batch: int | None
    lanczos_terms: int
    part_size: int | None

    def __post_init__(self) -> None:
        check_damping(self.damping)
        if self.probes == 1 or self.probes < 0:
            raise OptionError(f"probes is {self.probes}; solve for at least 2 examples, or for none (0)")
        for name in ("lanczos_terms", "part_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise OptionError(f"{name} is {value}; it must be at least 1")

    def generator(self, phase: int) -> torch.Generator:
        """Random numbers of one phase; `attribute` measures the same spectrum."""
        return torch.Generator().manual_seed(self.seed * 1_000_003 + phase)


def measure(
    run: Run, gnh: GaussNewton, settings: Settings, seconds: dict[str, float]
) -> tuple[SelfInfluence, Spectrum]:
    """Self-influence of all examples; what is on disk is read."""
    with timed(seconds, "spectrum"):
        spectrum = _spectrum(run, gnh, settings)
    damping = resolve_damping(settings.damping, spectrum)
    plan = run.json("rank", lambda: _rank_and_parts(gnh, settings))  # depends on the machine's memory
    parts = list(torch.arange(len(gnh.terms)).split(plan["part_size"]))
    files = None if run.path is None else ReadingParts(run.path / "self-influence")
    large = None if run.path is None else run.path / "curvature.safetensors"
    if run.path is not None and (run.path / "cleaning.json").exists():
        notes = run.json("cleaning", dict)
        assert files is not None
        found = files.read_all(len(parts))
    else:
        with timed(seconds, "curvature"):
            operator = _operator(gnh, settings)
            P, state = _curvature(run, gnh, operator, damping, plan, settings)

            def bound() -> dict[str, Any]:
                gnh.restore_state(state)
                return asdict(measure_bounds(P, operator, generator=settings.generator(12)))

            measured = run.json("bounds", bound)
        with timed(seconds, "examples"):
            found = read_examples(gnh, P, parts, store=files)
        with timed(seconds, "scale"):

            def scale() -> dict[str, Any] | None:
                gnh.restore_state(state)
                return _scale(gnh, P, operator, found, settings)

            scaled = run.json("calibration", scale)
        last = {"rank": P.rank, "bounds": measured, "calibration": scaled, "seconds": dict(seconds)}
        notes = run.json("cleaning", lambda: last)
    seconds.update(notes["seconds"])
    if large is not None:  # as large as the model times the rank, and not needed any more
        large.unlink(missing_ok=True)
    return _together(found, notes, damping), spectrum


def read_measured(path: Path, num_examples: int) -> tuple[SelfInfluence, Spectrum]:
    """What `measure` found, from a finished run directory alone."""
    spectrum = spectrum_from_json(read_object(path / "spectrum.json"))
    damping = resolve_damping(read_config(path)["damping"], spectrum)
    parts = math.ceil(num_examples / read_object(path / "rank.json")["part_size"])
    found = ReadingParts(path / "self-influence").read_all(parts)
    return _together(found, read_object(path / "cleaning.json"), damping), spectrum


def _together(found: Readings, notes: Mapping[str, Any], damping: float) -> SelfInfluence:
    kept = notes["calibration"]
    return SelfInfluence.from_readings(
        found,
        Bounds(**notes["bounds"]),
        None if kept is None else Calibration(**kept),
        num_terms=int(found.terms.sum()),
        damping=damping,
        rank=notes["rank"],
    )


def _spectrum(run: Run, gnh: GaussNewton, settings: Settings) -> Spectrum:
    def measure() -> dict[str, Any]:
        found = estimate_spectrum(
            gnh,
            generator=settings.generator(1),
            terms=settings.lanczos_terms,
            measure_constant=False,
        )
        return {**spectrum_to_json(found), "operator": gnh.state()}

    measured = run.json("spectrum", measure)
    gnh.restore_state(measured["operator"])
    return spectrum_from_json(measured)


def _rank_and_parts(gnh: GaussNewton, settings: Settings) -> dict[str, int]:
    rank, at_once = affordable_rank(gnh) if settings.rank is None else (settings.rank, 8)
    size = settings.part_size
    if size is None:
        work = count_work(gnh.network, gnh.terms.fetch(gnh.terms.longest(2)), gnh.micro_batch)
        size = min(max(int(_FLOPS_PER_PART / max(work.gradients(rank), 1.0)), 1), _LARGEST_PART)
    return {"rank": rank, "at_once": at_once, "part_size": size}


def _operator(gnh: GaussNewton, settings: Settings) -> LinearOperator:
    """H over all terms, or over the same subset in every phase."""
    if settings.lanczos_terms >= gnh.num_terms:
        return gnh
    return gnh.subset(settings.lanczos_terms, settings.generator(10))


def _curvature(
    run: Run,
    gnh: GaussNewton,
    operator: LinearOperator,
    damping: float,
    plan: Mapping[str, int],
    settings: Settings,
) -> tuple[LowRank, dict[str, float | None]]:
    """P, and what its products left the operator with: every later phase starts from that."""

    def compute() -> tuple[dict[str, Tensor], dict[str, Any]]:
        made = nystrom(
            operator,
            damping,
            rank=plan["rank"],
            generator=settings.generator(11),
            at_once=plan["at_once"],
        )
        return made.tensors(), {**made.notes(), "operator": gnh.state()}

    tensors, notes = run.tensors("curvature", compute, gnh.network.device)
    return LowRank.from_tensors(tensors, notes), notes["operator"]


def _scale(
    gnh: GaussNewton, P: LowRank, operator: LinearOperator, found: Readings, settings: Settings
) -> dict[str, Any] | None:
    if settings.probes == 0:
        return None
    made = calibrate(gnh, P, operator, found, generator=settings.generator(13), probes=settings.probes)
    return None if made is None else asdict(made)


@contextmanager
def timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    """Add up what a phase takes."""
    begun = time.perf_counter()
    yield
    seconds[phase] = time.perf_counter() - begun
