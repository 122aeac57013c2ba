"""`Bench`: where findings are made: the profile's subjects and their spectra, and partial results that are kept.

A spectrum holds what the paper's tables need: Tr(H) by quadratic forms ``gᵀH̃g`` (forwards only); ‖H‖_F by two
independent in-batch products of one probe; λmax by Lanczos, where the paper sketches with 5,000 rows; and C measured,
where the paper assumes 2.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from reproduction.finding import PROFILES, Profile
from reproduction.kept import read_object, spectrum_from_json, spectrum_to_json, write_json
from reproduction.provenance import commit, provenance
from reproduction.subjects import Kind, Subject, load_subject, subjects
from whence.errors import OptionError
from whence.model.importance import Importance, measure_importance
from whence.runs import read_value, write_value
from whence.solvers.plan import Plan, resolve_damping
from whence.spectrum import Spectrum, estimate_spectrum, frobenius_from_products, trace_from_quadratic_forms

__all__ = ["Bench", "Measured"]


@dataclass(frozen=True)
class _Effort:
    forms: int  # quadratic forms for the trace; the paper takes 1,600
    pairs: int  # pairs of products for the Frobenius norm
    batch: int  # terms per probe
    probes: int  # for Ĉ
    spectrum_terms: int


_EFFORTS: dict[tuple[Profile, str], _Effort] = {
    ("quick", "vision"): _Effort(100, 40, 64, 32, 512),
    ("quick", "language"): _Effort(24, 12, 256, 16, 1024),
    ("offline", "vision"): _Effort(400, 60, 100, 32, 1000),
    ("offline", "language"): _Effort(60, 20, 256, 32, 1536),
    ("paper", "vision"): _Effort(1600, 200, 100, 64, 5000),
    ("paper", "language"): _Effort(1600, 200, 2048, 64, 12_800),
}


@dataclass(frozen=True)
class Measured:
    """A subject's spectrum and what follows from it.

    Attributes:
        name, data_name, kind, note: the subject's.
        spectrum: its trace and Frobenius norm by the paper's estimators.
        num_terms: of the data.
        damping: λ.
        seconds: that measuring took.
    """

    name: str
    data_name: str
    kind: Kind
    note: str
    spectrum: Spectrum
    num_terms: int
    damping: float
    seconds: float

    @property
    def plan(self) -> Plan:
        """The paper's plan, at C = 2 and the central estimates, as in its Table 1."""
        return Plan.from_spectrum(self.spectrum, self.damping, errors=0.0, chains=1)


class Bench:
    """Subjects and spectra of a profile, loaded and measured when something needs them; and what is kept of them.

    Args:
        profile: how much is run, and on which models.
        output: where findings go; partial results are kept in ``output/work/PROFILE-SEED``.
        inputs: directory with the paper's models and data.
        allow_download: whether they may be fetched from the hub instead.
        seed: of all random numbers.
    """

    def __init__(
        self,
        profile: Profile,
        output: Path,
        *,
        inputs: Path | None = None,
        allow_download: bool = False,
        seed: int = 0,
    ) -> None:
        if profile not in PROFILES:
            raise OptionError(f"profile is {profile!r}; it must be one of {', '.join(PROFILES)}")
        self.profile, self.output, self.seed = profile, output, seed
        self._work = output / "work" / f"{profile}-{seed}"
        self._begun_at = self._work / "begun.json"
        self._inputs, self._download = inputs, allow_download
        self._loaded: tuple[str, Subject] | None = None
        self.start_watch()

    def start_watch(self) -> None:
        """From here on `seconds` counts."""
        self._begun, self._spent_before = time.perf_counter(), dict[str, float]()

    @property
    def seconds(self) -> float:
        """Since `start_watch`, and those that partial results used since then took to measure before it."""
        return time.perf_counter() - self._begun + sum(self._spent_before.values())

    def kept(self, name: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What ``measure`` returns, kept under a name: an interrupted reproduction goes on with it.

        JSON holds it, and the ``seconds`` that it took.
        """
        path = self._work / f"{name}.json"
        if not path.exists():
            begun = time.perf_counter()
            if not self._begun_at.exists():
                write_json(self._begun_at, {"commit": commit()})
            write_json(path, {**measure(), "seconds": time.perf_counter() - begun})
            self._spent_before[name] = 0.0
        found = read_object(path)
        self._spent_before.setdefault(name, found["seconds"])
        return found

    def provenance(self) -> dict[str, Any]:
        """Where what was measured since `start_watch` comes from, and the commit that the earliest kept part is of."""
        now = provenance()
        if (
            any(self._spent_before.values())
            and (begun := read_object(self._begun_at)["commit"]) != now["commit"]
        ):
            now["begun_at"] = begun
        return now

    def generator(self, offset: int = 0) -> torch.Generator:
        """Random numbers of the seed; with an offset, others."""
        return torch.Generator().manual_seed(self.seed + offset)

    def subjects(self, kind: Kind | None = None) -> tuple[str, ...]:
        """The profile's subjects, those of one kind where given."""
        return subjects(self.profile, kind)

    def subject(self, key: str) -> Subject:
        """The subject of this key. One at a time is held: the paper's are large."""
        if self._loaded is None or self._loaded[0] != key:
            self._loaded = None
            subject = load_subject(key, inputs=self._inputs, allow_download=self._download)
            self._loaded = key, self._with_importance(key, subject) if subject.certain else subject
        return self._loaded[1]

    def _with_importance(self, key: str, subject: Subject) -> Subject:
        path = self._work / "importance" / f"{key}.safetensors"  # a number for each example: no JSON
        if not path.exists():
            write_value(path, measure_importance(subject.operator()))
        return replace(subject, importance=read_value(path, Importance).probabilities())

    def measured(self, key: str) -> Measured:
        """A subject's spectrum."""
        row = self.kept(f"spectra/{key}", lambda: self._measure(self.subject(key)))
        return Measured(**{**row, "spectrum": spectrum_from_json(row["spectrum"])})

    def _measure(self, subject: Subject) -> dict[str, Any]:
        effort, generator = _EFFORTS[self.profile, subject.kind], self.generator()
        gnh = subject.operator()
        batch = min(effort.batch, gnh.num_terms)
        trace = trace_from_quadratic_forms(gnh, probes=effort.forms, batch_size=batch, generator=generator)
        frobenius = frobenius_from_products(gnh, probes=effort.pairs, batch_size=batch, generator=generator)
        spectrum = estimate_spectrum(
            gnh,
            generator=generator,
            probes=effort.probes,
            probe_batch=batch,
            terms=effort.spectrum_terms,
        )
        spectrum = replace(spectrum, trace=trace, frobenius=frobenius)
        return {
            "name": subject.name,
            "data_name": subject.data_name,
            "kind": subject.kind,
            "note": subject.note,
            "spectrum": spectrum_to_json(spectrum),
            "num_terms": gnh.num_terms,
            "damping": resolve_damping(subject.damping, spectrum),
        }
