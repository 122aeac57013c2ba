"""Table 1: statistics of the Gauss-Newton Hessian, and the step, batch and length that follow from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from reproduction.bench import Bench, Measured
from reproduction.finding import Conclusion, number, plus_minus
from reproduction.subjects import Kind
from whence.report.drawing import COLOURS, figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["PRINTED", "Printed", "by_kind", "conclude", "draw", "joined", "measure", "rounded"]

_CONTEXT = 256  # tokens of a passage here
_UNITS = {"vision": "images", "language": "tokens"}


@dataclass(frozen=True)
class Printed:
    """A row of the paper's Tables 1 and 2: N, Tr(H)/N, λmax, ‖H‖_F, and the printed η, |B|, T at λ = 5, C = 2."""

    name: str
    kind: Kind
    num_parameters: float
    mean_eigenvalue: float
    lambda_max: float
    frobenius: float
    step_size: float
    batch_size: int
    num_steps: int

    @property
    def batch_by_formula(self) -> int:
        """``C·Tr(H)/λmax``, rounded as the table rounds."""
        return round(rounded(2 * self.mean_eigenvalue * self.num_parameters / self.lambda_max))

    @property
    def step_by_formula(self) -> float:
        """``1/(λmax + λ)``, rounded as the table rounds."""
        return rounded(1 / (self.lambda_max + 5.0))

    @property
    def steps_by_formula(self) -> int:
        """``2/(λη)`` of the rounded η, rounded up to the next of 1, 1.5, 2, 5."""
        steps = 2 / (5.0 * self.step_by_formula)
        power = 10.0 ** math.floor(math.log10(steps))
        return round(next(d * power for d in (1, 1.5, 2, 5, 10) if d * power >= steps * (1 - 1e-9)))

    @property
    def largest_frobenius(self) -> float:
        """``√(λmax·Tr(H))``, which the norm of a positive semi-definite matrix cannot exceed."""
        return math.sqrt(self.lambda_max * self.mean_eigenvalue * self.num_parameters)

    @property
    def possible(self) -> bool:
        """Whether a positive semi-definite matrix can have this norm."""
        return self.lambda_max <= self.frobenius <= self.largest_frobenius


PRINTED = (
    Printed("ResNet-18", "vision", 11.7e6, 1.32e-3, 270, 2.55e4, 0.003, 100, 150),
    Printed("ResNet-50", "vision", 25.6e6, 8.17e-4, 470, 2.67e4, 0.002, 5, 200),
    Printed("OPT-1.3B", "language", 1.3e9, 9.28e-6, 780, 2.94e3, 0.001, 30, 500),
    Printed("Llama-7B", "language", 6.7e9, 5.69e-6, 1600, 3.73e3, 0.0005, 50, 1000),
    Printed("Mistral-7B", "language", 7.2e9, 8.18e-5, 5600, 2.49e4, 0.0002, 200, 2000),
)


def rounded(x: float) -> float:
    """To the nearest of 1, 2, 3, 5 times a power of ten, in ratio."""
    power = 10.0 ** math.floor(math.log10(x))
    return min((d * power for d in (1, 2, 3, 5, 10)), key=lambda candidate: abs(math.log(candidate / x)))


def joined(texts: Sequence[str]) -> str:
    """Words in a row, the last with "and".

    Example:
        >>> joined(["12", "26", "61"])
        '12, 26 and 61'
    """
    return " and ".join(filter(None, [", ".join(texts[:-1]), *texts[-1:]]))


def by_kind(
    here: Sequence[dict[str, Any]],
    *quantities: tuple[str, Callable[[Printed], str], Callable[[dict[str, Any]], str]],
) -> tuple[tuple[str, str, str], ...]:
    """Rows for vision and for language models: which, and for each quantity the paper's values and those here."""
    rows = []
    for kind in ("vision", "language"):
        printed = [row for row in PRINTED if row.kind == kind]
        measured = [row for row in here if row["kind"] == kind]
        names = ", ".join(row.name for row in printed), ", ".join(row["name"] for row in measured)
        rows.append((f"{kind} models", *names))
        for label, theirs, ours in quantities:
            rows.append((label, "; ".join(map(theirs, printed)), "; ".join(map(ours, measured))))
    return tuple(rows)


def measure(bench: Bench) -> dict[str, Any]:
    """The statistics of both tables for every subject."""
    return {"rows": [_row(bench.measured(key)) for key in bench.subjects()]}


def _row(subject: Measured) -> dict[str, Any]:
    spectrum, plan, count = subject.spectrum, subject.plan, subject.spectrum.num_parameters
    constant, top, density = spectrum.sampling_constant, spectrum.top_sampling_constant, spectrum.density
    assert count is not None
    assert constant is not None
    assert top is not None
    assert density is not None
    nodes, weights = density.gauss_nodes[0], density.gauss_weights[0]
    shown = nodes > 1e-3 * spectrum.lambda_max.value
    return {
        "name": subject.name,
        "data": subject.data_name,
        "note": subject.note,
        "kind": subject.kind,
        "num_parameters": count,
        "mean_eigenvalue": spectrum.trace.value / count,
        "mean_eigenvalue_stderr": spectrum.trace.stderr / count,
        "lambda_max": spectrum.lambda_max.value,
        "lambda_max_stderr": spectrum.lambda_max.stderr,
        "frobenius": spectrum.frobenius.value,
        "frobenius_stderr": spectrum.frobenius.stderr,
        "largest_frobenius": math.sqrt(spectrum.lambda_max.value * spectrum.trace.value),
        "consistent": not spectrum.inconsistencies(),
        "constant": constant.value,
        "constant_stderr": constant.stderr,
        "top_constant": top.value,
        "top_constant_stderr": top.stderr,
        "damping": subject.damping,
        "step_size": plan.step_size,
        "batch_size": plan.batch_size,
        "num_steps": plan.num_steps,
        "batch_with_measured_constant": math.ceil(spectrum.safe_constant / plan.constant * plan.batch_size),
        "eigenvalues": nodes[shown].tolist(),
        "eigenvalues_at_least_as_large": weights[shown].cumsum(0).tolist(),
    }


def conclude(numbers: dict[str, Any]) -> Conclusion:
    """Whether all batches are mild, beside the printed table."""
    rows = numbers["rows"]
    above_one = all(row["batch_size"] > 1 for row in rows)
    within_context = all(row["batch_size"] <= _CONTEXT for row in rows if row["kind"] == "language")
    batches = joined([f"{row['batch_size']} {_UNITS[row['kind']]} for {row['name']}" for row in rows])
    wrong = [p for p in PRINTED if p.batch_size != p.batch_by_formula]
    return Conclusion(
        title="Table 1: from the spectrum to step, batch and length",
        claim="Trace and λmax give η = 1/(λmax+λ), |B| = 2Tr(H)/λmax and T = 2/(λη); the batch must be larger than 1, "
        "but is mild, and for language models, counted in tokens, less than one sequence.",
        holds=above_one and within_context,
        verdict=f"The smallest batch is {batches}, where a sequence has {_CONTEXT} tokens.",
        rows=by_kind(
            rows,
            (
                "Tr(H)/N",
                lambda p: number(p.mean_eigenvalue),
                lambda row: plus_minus(row["mean_eigenvalue"], row["mean_eigenvalue_stderr"]),
            ),
            (
                "λmax",
                lambda p: number(p.lambda_max),
                lambda row: plus_minus(row["lambda_max"], row["lambda_max_stderr"]),
            ),
            ("damping λ", lambda p: "5", lambda row: number(row["damping"])),
            ("step η", lambda p: f"{p.step_size:g}", lambda row: number(row["step_size"])),
            (
                "smallest batch |B|",
                lambda p: (
                    f"{p.batch_size}" + (f" (by its formula {p.batch_by_formula})" if p in wrong else "")
                ),
                lambda row: f"{row['batch_size']}",
            ),
            ("steps T", lambda p: f"{p.num_steps:,}", lambda row: f"{row['num_steps']:,}"),
        ),
        details=tuple(
            f"{row['name']} on {row['data']} ({row['note'] or 'as in the paper'}): N = {row['num_parameters']:,}. "
            f"Measured C = {plus_minus(row['constant'], row['constant_stderr'])} on average and "
            f"{plus_minus(row['top_constant'], row['top_constant_stderr'])} along the top eigenvector; with the larger "
            f"and its error in place of 2, |B| would be {row['batch_with_measured_constant']:,}."
            for row in rows
        ),
        errata=tuple(
            f"{p.name}: the table's own statistics give |B| ≈ {p.batch_by_formula}, it prints {p.batch_size}."
            for p in wrong
        ),
    )


def draw(numbers: dict[str, Any]) -> Figure:
    """The spectra, and the smallest batches beside the paper's."""
    rows = numbers["rows"]
    with figure(1, 2, width=5.2, height=3.9) as (drawn, (left, right)):
        for k, row in enumerate(rows):
            counts, values = row["eigenvalues_at_least_as_large"], row["eigenvalues"]
            left.step(counts, values, "o-", where="pre", color=COLOURS[k], label=row["name"])
            left.errorbar(
                1, row["lambda_max"], 2 * row["lambda_max_stderr"], fmt="*", capsize=3, color=COLOURS[k],
                label="λmax ± 2 errors" if k == len(rows) - 1 else None,
            )  # fmt: skip
        left.set(xscale="log", yscale="log", title="Spectral density")
        left.set(xlabel="eigenvalues that are at least as large", ylabel="eigenvalue of H")
        left.legend()
        names = [row["name"] for row in rows] + [f"{p.name} (paper)" for p in PRINTED]
        sizes = [row["batch_size"] for row in rows] + [p.batch_by_formula for p in PRINTED]
        colours = [COLOURS[0]] * len(rows) + [COLOURS[6]] * len(PRINTED)
        places = list(range(len(names)))
        right.barh(places, sizes, color=colours, alpha=0.75)
        printed = [p.batch_size for p in PRINTED]
        right.scatter(printed, places[len(rows) :], marker="|", s=120, color=COLOURS[1], label="as printed")
        right.set_yticks(places, names)
        right.invert_yaxis()
        right.axvline(1, color=COLOURS[1], linestyle=":", linewidth=1)
        right.set(xscale="log", xlabel="|B| = 2·Tr(H)/λmax, in examples or tokens", title="Smallest batch")
        right.legend()
    return drawn
