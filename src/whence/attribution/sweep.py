"""What λ costs and what it changes, told for a range of λ from one spectral density, before anything is solved.

`Attribution.over_damping` compares the scores of a solve; here nothing is solved. Costs follow from the plans and from
`Spectrum.cg_iterations`, changes from what scores of gradients with covariance H would do: see
`whence.spectrum.Density`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from whence.errors import OptionError
from whence.libraries import data_frame
from whence.solvers.plan import Plan, check_damping, resolve_damping
from whence.spectrum import Density, Estimate, Spectrum
from whence.units import format_duration

__all__ = ["CONDITION_NUMBERS", "DampingForecast", "DampingOutlook", "forecast_dampings"]

#: λmax/λ of the default range.
CONDITION_NUMBERS = (2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0)
#: Scores that correlate by this much count as the same.
ALIKE = 0.95


@dataclass(frozen=True)
class DampingOutlook:
    """What is expected of one λ.

    Attributes:
        plan: LiSSA's tuned plan.
        dimension: ``d(λ) = Tr H(H + λ)⁻¹``.
        second_dimension: ``d₂(λ) = Tr H²(H + λ)⁻²``.
        iterations: of block conjugate gradients over all terms, for all queries together.
    """

    plan: Plan
    dimension: Estimate
    second_dimension: Estimate
    iterations: int

    @property
    def name(self) -> str:
        """λ in words."""
        return f"λ = {self.plan.damping:.3g} (λmax/{self.plan.condition_number:.4g})"


@dataclass(frozen=True)
class DampingForecast:
    """What is expected of a range of λ, largest first.

    Attributes:
        outlooks: one for each λ.
        chosen: where in them the λ stands that others are compared with.
        agreement: expected correlation between the scores of each two λ, ``[L, L]``.
        agreement_stderr: its error.
        queries: right-hand sides solved together.
        num_terms: terms in the data.
        tolerance: the error that conjugate gradients are to reach.
        density: what all this was made from.
        seconds_per_term: a product of one term with all queries, or None if that was not measured.
    """

    outlooks: tuple[DampingOutlook, ...]
    chosen: int
    agreement: Tensor
    agreement_stderr: Tensor
    queries: int
    num_terms: int
    tolerance: float
    density: Density
    seconds_per_term: float | None = None

    def __post_init__(self) -> None:
        L = len(self.outlooks)
        if L < 2 or not 0 <= self.chosen < L or self.agreement.shape != (L, L):
            raise OptionError(f"a forecast of {L} dampings needs two or more, and a square of agreements")

    @property
    def passes(self) -> list[float]:
        """Passes over the data by LiSSA, all chains together."""
        return [outlook.plan.num_term_products / self.num_terms for outlook in self.outlooks]

    def seconds(self, terms: float) -> float | None:
        """For so many terms, where a product was timed."""
        return None if self.seconds_per_term is None else terms * self.seconds_per_term

    def alike(self, agreement: float = ALIKE) -> tuple[int, int]:
        """Where the λ stand, on both sides of the chosen one, up to which scores agree with its by this much."""
        first = last = self.chosen
        while first > 0 and float(self.agreement[first - 1, self.chosen]) >= agreement:
            first -= 1
        while last + 1 < len(self.outlooks) and float(self.agreement[last + 1, self.chosen]) >= agreement:
            last += 1
        return first, last

    def words(self) -> str:
        """How to read the numbers."""
        first, last, own = self.outlooks[0], self.outlooks[-1], self.outlooks[self.chosen]
        ends = [float(self.agreement[self.chosen, i]) for i in (0, -1)]
        top, bottom = (self.outlooks[i] for i in self.alike())
        same = (
            f"no other λ of the range gives scores that correlate to {ALIKE} with its own"
            if top is bottom
            else f"from {top.name} to {bottom.name} they correlate to at least {ALIKE} with its own"
        )
        sentences = [
            f"What a smaller λ costs: from {first.name} to {last.name} LiSSA goes through {_figure(self.passes[0])} to "
            f"{_figure(self.passes[-1])} passes over the data, about as λmax/λ; conjugate gradients, for "
            f"{_queries(self.queries)}, take {first.iterations} to {last.iterations} iterations of a pass each.",
            f"What it changes: the effective dimension d(λ), the directions in which the data decide and not λ, goes "
            f"from {_figure(first.dimension.value)} to {_figure(last.dimension.value)} of "
            f"{self.density.num_parameters:,}. At the chosen {own.name} scores should correlate to {ends[0]:.2f} with "
            f"those at the first and to {ends[1]:.2f} with those at the last; {same}.",
            "Correlations are what gradients with the curvature's own covariance would give; rankings of the many "
            "small scores change more.",
        ]
        if self.density.num_terms != self.density.data_terms:
            error = self.density.sampling_error(own.plan.damping, self.density.num_terms).value
            sentences.append(
                f"The density is that of {self.density.num_terms:,} of {self.density.data_terms:,} terms, whose d(λ) "
                f"is too small and whose largest eigenvalues are too large: at the chosen λ, scores from these terms "
                f"alone would be off by {100 * error:.2g}%."
            )
        sentences.append("It says nothing about retraining: which λ predicts that best has to be measured.")
        return " ".join(sentences)

    def to_pandas(self) -> Any:
        """A `pandas.DataFrame` with a row for each λ, largest first; seconds are None where no product was timed."""
        return data_frame(
            [
                {
                    "damping": outlook.plan.damping,
                    "dimension": outlook.dimension.value,
                    "lissa_passes": passes,
                    "lissa_seconds": self.seconds(outlook.plan.num_term_products),
                    "cg_passes": outlook.iterations,
                    "cg_seconds": self.seconds(outlook.iterations * self.num_terms),
                    "agreement_with_chosen": float(self.agreement[i, self.chosen]),
                }
                for i, (outlook, passes) in enumerate(zip(self.outlooks, self.passes, strict=True))
            ]
        )

    def to_json(self) -> dict[str, Any]:
        """All numbers, for scripts."""
        rows = []
        for i, (outlook, passes) in enumerate(zip(self.outlooks, self.passes, strict=True)):
            plan, following = outlook.plan, i + 1 < len(self.outlooks)
            rows.append(
                {
                    "damping": plan.damping,
                    "condition_number": plan.condition_number,
                    "dimension": asdict(outlook.dimension),
                    "dimension_bounds": list(self.density.dimension_bounds(plan.damping)),
                    "second_dimension": asdict(outlook.second_dimension),
                    "lissa": {
                        "step_size": plan.step_size,
                        "batch_size": plan.batch_size,
                        "num_steps": plan.num_steps,
                        "chains": plan.chains,
                        "terms": plan.num_term_products,
                        "passes": passes,
                        "seconds": self.seconds(plan.num_term_products),
                    },
                    "cg": {
                        "iterations": outlook.iterations,
                        "seconds": self.seconds(outlook.iterations * self.num_terms),
                    },
                    "agreement_with_next": float(self.agreement[i, i + 1]) if following else None,
                    "agreement_with_chosen": float(self.agreement[i, self.chosen]),
                }
            )
        return {
            "dampings": rows,
            "chosen": self.chosen,
            "queries": self.queries,
            "num_terms": self.num_terms,
            "tolerance": self.tolerance,
            "agreement": self.agreement.tolist(),
            "agreement_stderr": self.agreement_stderr.tolist(),
            "density": {
                name: value.tolist() if isinstance(value, Tensor) else value
                for name, value in vars(self.density).items()
            },
            "words": self.words(),
        }

    def __str__(self) -> str:
        timed = self.seconds_per_term is not None
        head = ["λ", "λmax/λ", "d(λ)", "LiSSA's terms", "passes", "time"]
        rows = [[*head, "CG passes", "time", "with next", "with chosen"]]
        for i, (outlook, passes) in enumerate(zip(self.outlooks, self.passes, strict=True)):
            terms = outlook.plan.num_term_products
            times = [self.seconds(terms), self.seconds(outlook.iterations * self.num_terms)]
            lissa_time, cg_time = ("" if t is None else format_duration(t) for t in times)
            following = float(self.agreement[i, i + 1]) if i + 1 < len(self.outlooks) else math.nan
            rows.append(
                [
                    f"{outlook.plan.damping:.3g}{'*' if i == self.chosen else ' '}",
                    f"{outlook.plan.condition_number:.4g}",
                    f"{_figure(outlook.dimension.value)} ± {outlook.dimension.stderr:.2g}",
                    f"{terms:,}",
                    _figure(passes),
                    lissa_time,
                    f"{outlook.iterations:,}",
                    cg_time,
                    f"{following:.3f}".replace("nan", "–"),
                    f"{float(self.agreement[i, self.chosen]):.3f}",
                ]
            )
        if not timed:
            rows = [[cell for column, cell in enumerate(row) if column not in (5, 7)] for row in rows]
        density = self.density
        note = (
            f"* chosen   CG: block conjugate gradients for {_queries(self.queries)}   "
            f"{density.num_products:,} products of {density.num_terms:,} terms"
        )
        return "\n".join([*_aligned(rows), note])


def forecast_dampings(
    spectrum: Spectrum,
    density: Density,
    *,
    num_terms: int,
    queries: int = 1,
    dampings: Sequence[float | str] | Tensor | None = None,
    chosen: float | str = "auto",
    chains: int = 4,
    refine: float = 2.0,
    tolerance: float = 0.2,
    seconds_per_term: float | None = None,
) -> DampingForecast:
    """Effective dimension, costs and agreement of scores over a range of dampings, without a product.

    Args:
        spectrum: measured; plans and the range are made from it.
        density: measured on the same operator.
        num_terms: of the data.
        queries: right-hand sides solved together.
        dampings: numbers, or parts of λmax such as ``"lambda_max/50"``; λmax/2 … λmax/5000 by default.
        chosen: the λ that others are compared with; added to the range where it is missing.
        chains: of LiSSA's plans.
        refine: of LiSSA's plans; see `Plan.tuned`.
        tolerance: error in the scores' norm that conjugate gradients are to reach; see `Spectrum.cg_iterations`.
        seconds_per_term: a product of one term with all queries, where it was timed.

    Example:
        >>> from whence import Dense, estimate_spectrum
        >>> from whence.spectrum import spectral_density
        >>> g = torch.Generator().manual_seed(0)
        >>> A = Dense(torch.diag(torch.tensor([8.0, 4.0, 2.0, 1.0], dtype=torch.float64)))
        >>> density, spectrum = spectral_density(A, generator=g), estimate_spectrum(A, generator=g)
        >>> forecast = forecast_dampings(spectrum, density, num_terms=1, dampings=[4.0, 1.0], chosen=1.0)
        >>> [round(outlook.dimension.value, 3) for outlook in forecast.outlooks]
        [1.7, 2.856]
    """
    check_damping(chosen)
    if queries < 1 or num_terms < 1:
        raise OptionError(f"queries and num_terms must be at least 1, got {queries} and {num_terms}")
    grid, position = _damping_grid(dampings, chosen, spectrum)
    values = grid.tolist()
    outlooks = tuple(
        DampingOutlook(
            plan=Plan.tuned(spectrum, value, num_terms=num_terms, chains=chains, refine=refine),
            dimension=density.dimension(value),
            second_dimension=density.second_dimension(value),
            iterations=math.ceil(spectrum.cg_iterations(value, queries, tolerance=tolerance)),
        )
        for value in values
    )
    pairs = [[density.agreement(a, b) for b in values] for a in values]
    return DampingForecast(
        outlooks=outlooks,
        chosen=position,
        agreement=torch.tensor([[pair.value for pair in row] for row in pairs], dtype=torch.float64),
        agreement_stderr=torch.tensor([[pair.stderr for pair in row] for row in pairs], dtype=torch.float64),
        queries=queries,
        num_terms=num_terms,
        tolerance=tolerance,
        density=density,
        seconds_per_term=seconds_per_term,
    )


def _damping_grid(
    dampings: Sequence[float | str] | Tensor | None, chosen: float | str, spectrum: Spectrum
) -> tuple[Tensor, int]:
    """All λ, falling, each once; and where the chosen one stands."""
    top = spectrum.lambda_max.value
    if dampings is None:
        values = [top / kappa for kappa in CONDITION_NUMBERS]
    else:
        values = [
            resolve_damping(value if isinstance(value, str) else float(value), spectrum) for value in dampings
        ]
    kept = [resolve_damping(chosen, spectrum)]
    for value in values:
        if all(abs(value - other) > 1e-9 * other for other in kept):
            kept.append(value)
    if len(kept) < 2:
        raise OptionError(f"dampings hold {kept[0]:.3g} alone; give at least two different values to compare")
    grid = sorted(kept, reverse=True)
    return torch.tensor(grid, dtype=torch.float64), grid.index(kept[0])


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table, columns flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in rows]


def _figure(x: float) -> str:
    return f"{x:,.0f}" if x >= 100 else f"{x:.3g}"


def _queries(count: int) -> str:
    return "one query" if count == 1 else f"{count:,} queries"
