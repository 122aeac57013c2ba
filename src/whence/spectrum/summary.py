"""`estimate_spectrum`: what a plan needs to know of an operator, measured in one call."""

from __future__ import annotations

import math
import time
import warnings
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from whence.arguments import checked
from whence.cards import table_card
from whence.errors import OptionError, SolverError, WhenceWarning
from whence.operators import Damped, LinearOperator, check_damping, failures_become_typed
from whence.spectrum.density import Density
from whence.spectrum.estimate import Estimate
from whence.spectrum.lambda_max import LanczosResult, lanczos
from whence.spectrum.moments import (
    check_probes,
    frobenius_from_products,
    sampling_constant,
    trace_and_frobenius_from_gradients,
    trace_from_quadratic_forms,
)
from whence.threads import one_at_a_time

__all__ = ["Spectrum", "estimate_spectrum"]


@dataclass(frozen=True)
class Spectrum:
    """Measured statistics of a positive semi-definite operator H.

    Attributes:
        trace: ``Tr(H)``.
        frobenius: ``‖H‖_F``.
        lambda_max: largest eigenvalue.
        sampling_constant: ``Ĉ`` of condition C.1 on average over directions, or None if not measured.
        top_sampling_constant: the same along the top eigenvector, or None.
        eigenvalues: the top of the spectrum, largest first, or None.
        num_parameters: dimension of the space, or None if unknown.
        seconds_per_term: seconds of a product over many terms, for each of them, or None if not measured.
        weights: how many eigenvalues each of `eigenvalues` stands for, or None.
    """

    trace: Estimate
    frobenius: Estimate
    lambda_max: Estimate
    sampling_constant: Estimate | None = None
    eigenvalues: Tensor | None = None
    num_parameters: int | None = None
    seconds_per_term: float | None = None
    top_sampling_constant: Estimate | None = None
    weights: Tensor | None = None

    @property
    def density(self) -> Density | None:
        """A coarse spectral density, for nothing: Lanczos' own quadrature, made to agree with the measured trace.

        Of a single random start and a few products: good for predicting costs. `whence.spectrum.spectral_density` takes
        several starts and tells its error. None where Lanczos was not run.
        """
        if self.eigenvalues is None or self.weights is None or self.num_parameters is None:
            return None
        nodes, weights = self.eigenvalues.clamp_min(0.0), self.weights.clone()
        found = weights == 1.0
        carried = float((nodes * weights)[~found].sum())
        missing = self.trace.value - float(nodes[found].sum())
        if carried > 0 and missing > 0:
            weights = torch.where(found, weights, weights * (missing / carried))
        rest = max(self.num_parameters - float(weights.sum()), 0.0)
        nodes, weights = (
            torch.cat([part, part.new_tensor([x])]) for part, x in ((nodes, 0.0), (weights, rest))
        )
        return Density(nodes.unsqueeze(0), weights.unsqueeze(0), found=int(found.sum()))

    def cg_iterations(
        self, damping: float, columns: int = 1, *, tolerance: float = 0.2, deflated: int = 0
    ) -> float:
        """Iterations that block conjugate gradients on all terms should take, from zero.

            K = min_j  j + ½·√(1 + λ_i/λ)·ln(2/ε),      i = (j + 1)q + r

        with λ_i the i-th largest eigenvalue. Too many where no eigenvalue is near zero, as of a full-rank regression.
        Derived and measured in docs/math.md, "Iterations of conjugate gradients".

        Args:
            damping: λ.
            columns: q, the right-hand sides solved together.
            tolerance: ε, ``‖u - u*‖_A / ‖u*‖_A`` to reach. An error of ε in the scores is a correlation of about
                ``1 - ε²/2`` with the exact ones, and ``‖e‖_H ≤ ‖e‖_A``: 0.2 is a correlation of 0.98 or more.
            deflated: r, the eigenvalues that a preconditioner takes out: half the rank of Nyström's.

        Example:
            >>> spectrum = Spectrum(Estimate(9.0), Estimate(9.0), Estimate(8.0))
            >>> round(spectrum.cg_iterations(1.0, tolerance=2 / math.e), 3)  # ½·√(1 + 8/1)·1
            1.5
        """
        check_damping(damping)
        if columns < 1 or deflated < 0:
            raise OptionError(
                f"columns must be at least 1 and deflated a number of eigenvalues, got {columns} and {deflated}"
            )
        if not 0 < tolerance < 1:
            raise OptionError(
                f"tolerance is {tolerance}; it is an error relative to the solution, between 0 and 1"
            )
        rate = 0.5 * math.log(2 / tolerance)
        j = _few_up_to(rate * math.sqrt(1 + self.lambda_max.value / damping))
        found = j + rate * np.sqrt(1 + self._ranked((j + 1) * columns + deflated) / damping)
        return max(1.0, float(found.min()))

    def _ranked(self, i: NDArray[np.int64]) -> NDArray[np.float64]:
        """λ_i, the i-th largest eigenvalue: of Ritz values that stand for several each, interpolated in the logarithm.

        Ritz value number k stands for eigenvalues around ``w_1 + … + w_{k-1} + w_k/2``, eigenvalue i for ``i - ½``.
        Without Ritz values, the most that λ_i can be: ``i·λ_i² ≤ ‖H‖_F²``.
        """
        top = self.lambda_max.value
        if self.eigenvalues is None or self.weights is None:
            values: NDArray[np.float64] = self.frobenius.value / np.sqrt(i)
        else:
            middles = (self.weights.cumsum(0) - self.weights / 2).numpy()
            logarithms = self.eigenvalues.clamp_min(1e-12 * top).log().numpy()
            values = np.exp(np.interp(i - 0.5, middles, logarithms))
        return np.where(i <= 1, top, np.minimum(values, top))

    def largest(self, errors: float = 2.0) -> float:
        """What λmax is at most, so many standard errors up: its own, or those of ``‖H‖_F ≥ λmax`` where that is less.

        On a subset of heavy-tailed data λmax is known badly, and ‖H‖_F, measured on all of the data, well.
        """
        own = self.lambda_max.upper(errors)
        contradicted = self.frobenius.value < self.lambda_max.value
        return own if contradicted else min(own, self.frobenius.upper(errors))

    @property
    def safe_constant(self) -> float:
        """The C to plan batches with: the paper's 2, or what was measured and its error where that is more."""
        measured = [e.upper() for e in (self.sampling_constant, self.top_sampling_constant) if e is not None]
        return max([2.0, *measured])

    def inconsistencies(self, errors: float = 3.0) -> list[str]:
        """Which of ``λmax ≤ ‖H‖_F ≤ √(λmax·Tr(H)) ≤ Tr(H)`` fail by more than so many standard errors.

        All hold for every positive semi-definite matrix, so a failure means a wrong estimate.
        """
        bound = math.sqrt(max(self.lambda_max.value * self.trace.value, 0.0))
        relative = 0.5 * math.hypot(_relative(self.lambda_max), _relative(self.trace))
        geometric = Estimate(bound, bound * relative if math.isfinite(relative) else math.inf)
        chain = [
            ("λmax", self.lambda_max),
            ("‖H‖_F", self.frobenius),
            ("√(λmax·Tr)", geometric),
            ("Tr", self.trace),
        ]
        found = []
        for (small_name, small), (large_name, large) in pairwise(chain):
            slack = errors * math.hypot(small.stderr, large.stderr) + 1e-6 * abs(small.value)
            if small.value - large.value > slack:
                found.append(f"{small_name} = {small} exceeds {large_name} = {large}")
        return found

    def _rows(self) -> list[tuple[str, str]]:
        """Name and value of everything that is shown."""
        rows = [("Tr(H)", f"{self.trace}"), ("‖H‖_F", f"{self.frobenius}"), ("λmax", f"{self.lambda_max}")]
        if self.sampling_constant is not None:
            rows.append(("Ĉ", f"{self.sampling_constant}   (condition C.1; the paper assumes 2)"))
        if self.top_sampling_constant is not None:
            rows.append(("Ĉ(v₁)", f"{self.top_sampling_constant}   (the same along the top eigenvector)"))
        return rows

    def __str__(self) -> str:
        problems = (f"inconsistent: {problem}" for problem in self.inconsistencies())
        return "\n".join([*(f"{name:<8} {value}" for name, value in self._rows()), *problems])

    def _repr_html_(self) -> str:
        """A card, for notebooks."""
        problems = [f"Inconsistent: {problem}." for problem in self.inconsistencies()]
        return table_card("Spectrum of the curvature", self._rows(), problems)


@one_at_a_time
@failures_become_typed()
@checked()
def estimate_spectrum(
    operator: LinearOperator,
    *,
    generator: torch.Generator,
    probes: int = 64,
    probe_batch: int | None = None,
    terms: int = 4096,
    max_products: int = 40,
    measure_constant: bool = True,
) -> Spectrum:
    """Measure trace, Frobenius norm, λmax and Ĉ of an operator, each with its error.

    λmax is found by Lanczos on all terms where there are at most ``terms``, else on a subset of that size. A subset's
    own top Ritz value is too large on average, and the quadratic form of its Ritz vector on *other* data too small; the
    estimate is the middle, and its error covers both. Where few examples carry the curvature the two are far apart;
    ``λmax ≤ ‖H‖_F``, measured on all of the data, then bounds it better.

    Args:
        operator: the operator, undamped.
        generator: all randomness comes from here.
        probes: gradients with sampled labels (or quadratic forms, where labels cannot be sampled).
        probe_batch: terms per probe; by default 1/probes of the data, between 16 and 256.
        terms: largest number of terms that Lanczos works on.
        max_products: Lanczos' budget.
        measure_constant: also measure Ĉ on average and along the top eigenvector, each for a quarter as many
            pairs of products as probes.
    """
    if isinstance(operator, Damped):
        raise OptionError("estimate the spectrum of the operator itself; pass `damped.operator`")
    check_probes(probes)
    n = operator.num_terms
    batch = probe_batch or min(max(16, n // probes), 256, n)
    trace, frobenius = _moments(operator, probes, batch, generator)
    if not trace.value > 0:
        raise SolverError(
            f"the trace of the operator is {trace.value:.3g}: the outputs do not depend on the selected "
            "parameters, or the model is certain of every answer. There is no curvature to work with"
        )
    lambda_max, top, seconds = _top(operator, min(terms, n), max_products, frobenius, generator)
    assert top.top_vector is not None
    constant, top_constant = None, None
    if measure_constant and n > 1:
        pairs = max(probes // 4, 2)
        constant, top_constant = (
            sampling_constant(
                operator, trace, probes=pairs, batch_size=batch, generator=generator, along=along
            )
            for along in (None, (top.top_vector, lambda_max.value))
        )
    spectrum = Spectrum(
        trace=trace,
        frobenius=frobenius,
        lambda_max=lambda_max,
        sampling_constant=constant,
        eigenvalues=top.eigenvalues,
        num_parameters=operator.zeros().numel,
        seconds_per_term=seconds,
        top_sampling_constant=top_constant,
        weights=top.weights,
    )
    for problem in spectrum.inconsistencies():
        warnings.warn(
            f"the spectrum's estimates contradict each other: {problem}. Use more probes",
            WhenceWarning,
            stacklevel=2,
        )
    return spectrum


def _moments(
    operator: LinearOperator, probes: int, batch: int, generator: torch.Generator
) -> tuple[Estimate, Estimate]:
    if operator.has_factors:
        return trace_and_frobenius_from_gradients(
            operator, probes=probes, batch_size=batch, generator=generator
        )
    trace = trace_from_quadratic_forms(operator, probes=probes, batch_size=batch, generator=generator)
    pairs = max(probes // 4, 2)
    return trace, frobenius_from_products(operator, probes=pairs, batch_size=batch, generator=generator)


def _top(
    operator: LinearOperator, terms: int, max_products: int, frobenius: Estimate, generator: torch.Generator
) -> tuple[Estimate, LanczosResult, float]:
    """λmax, what Lanczos found, and the seconds that a term took in its products."""
    whole, started = terms >= operator.num_terms, time.perf_counter()
    found = lanczos(
        operator if whole else operator.subset(terms, generator),
        generator=generator,
        max_products=max_products,
        want_vector=True,
    )
    assert found.top_vector is not None
    seconds = (time.perf_counter() - started) / (found.num_products * min(terms, operator.num_terms))
    if whole:
        return found.lambda_max, found, seconds
    rounds = 8
    held_out = Estimate.from_samples(
        [
            float(operator.subset(max(terms // rounds, 1), generator).quadratic_form(found.top_vector))
            for _ in range(rounds)
        ]
    )
    high = max(min(found.lambda_max.value, frobenius.upper()), held_out.value)
    error = max((high - held_out.value) / 2, held_out.stderr, found.lambda_max.stderr)
    return Estimate(0.5 * (high + held_out.value), error), found, seconds


def _few_up_to(limit: float) -> NDArray[np.int64]:
    """0, 1, 2, … below a limit: the first thousand all, then less than a percent apart, so that they are few."""
    limit = min(limit, 1e15)
    first = np.arange(min(math.ceil(limit), 1000))
    return first if limit <= 1000 else np.append(first, np.geomspace(1000, limit, 4000).astype(np.int64))


def _relative(estimate: Estimate) -> float:
    return estimate.stderr / abs(estimate.value) if estimate.value else math.inf
