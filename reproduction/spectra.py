"""Statistics of a subject's Gauss-Newton Hessian, as the paper's two tables need them, measured once and kept.

Tr(H)/N   quadratic forms ``gᵀH̃g``, forwards only             ‖H‖_F   two independent in-batch products of one probe
λmax      Lanczos, where the paper sketches with 5,000 rows    C       measured, where the paper assumes 2
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from whence.attribution.saving import spectrum_from_json, spectrum_to_json

from reproduction.finding import Profile
from reproduction.subjects import Subject
from whence.runs.files import read_json, write_json
from whence.solvers.plan import Plan, resolve_damping
from whence.spectrum import (
    Spectrum,
    estimate_spectrum,
    frobenius_from_products,
    trace_from_quadratic_forms,
)

__all__ = ["Measured", "measure"]


@dataclass(frozen=True)
class _Effort:
    forms: int  # quadratic forms for the trace; the paper takes 1,600
    pairs: int  # pairs of products for the Frobenius norm
    batch: int  # terms per probe
    probes: int  # for Ĉ
    lanczos_terms: int


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
        spectrum: measured; its trace and Frobenius norm by the paper's estimators.
        num_terms: of the data.
        damping: λ.
        seconds: that measuring took.
    """

    name: str
    data_name: str
    kind: str
    note: str
    spectrum: Spectrum
    num_terms: int
    damping: float
    seconds: float

    @property
    def num_parameters(self) -> int:
        """N."""
        assert self.spectrum.num_parameters is not None
        return self.spectrum.num_parameters

    @property
    def plan(self) -> Plan:
        """The paper's plan, at C = 2 and the central estimates, as in its Table 1."""
        return Plan.from_spectrum(self.spectrum, self.damping, errors=0.0, chains=1)


def measure(
    key: str, load: Callable[[], Subject], profile: Profile, directory: Path, *, seed: int = 0
) -> Measured:
    """Statistics of a subject; read from ``directory`` where an earlier run left them."""
    path = directory / "spectra" / f"{key}.json"
    if not path.exists():
        write_json(path, _measure(load(), profile, seed))
    row = read_json(path)
    return Measured(**{**row, "spectrum": spectrum_from_json(row["spectrum"])})


def _measure(subject: Subject, profile: Profile, seed: int) -> dict[str, Any]:
    started = time.perf_counter()
    effort = _EFFORTS[profile, subject.kind]
    generator = torch.Generator().manual_seed(seed)
    gnh = subject.operator()
    batch = min(effort.batch, gnh.num_terms)
    trace = trace_from_quadratic_forms(gnh, probes=effort.forms, batch_size=batch, generator=generator)
    frobenius = frobenius_from_products(gnh, probes=effort.pairs, batch_size=batch, generator=generator)
    rest = estimate_spectrum(
        gnh, generator=generator, probes=effort.probes, probe_batch=batch, terms=effort.lanczos_terms
    )
    spectrum = Spectrum(
        trace,
        frobenius,
        rest.lambda_max,
        rest.sampling_constant,
        rest.eigenvalues,
        rest.num_parameters,
        rest.seconds_per_term,
        rest.top_sampling_constant,
        rest.weights,
    )
    return {
        "name": subject.name,
        "data_name": subject.data_name,
        "kind": subject.kind,
        "note": subject.note,
        "spectrum": spectrum_to_json(spectrum),
        "num_terms": gnh.num_terms,
        "damping": resolve_damping(subject.damping, spectrum),
        "seconds": time.perf_counter() - started,
    }
