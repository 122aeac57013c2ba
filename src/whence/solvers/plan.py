"""`Plan`: LiSSA's step, batch and length from the measured spectrum (the paper's Corollary 1).

    η = 1 / (λmax + λ),      |B| ≥ C·Tr(H) / λmax,      T = 2 / (λη)

Estimates are uncertain, and the two sides of an error are not alike: a step that is a little too small costs a
few percent, one that is too large diverges. So λmax and the trace enter at their upper ends.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Any

from whence.arguments import check_fields, checked
from whence.cards import table_card
from whence.errors import OptionError
from whence.operators import check_damping as check_number
from whence.spectrum import Spectrum
from whence.units import format_bytes, format_duration

__all__ = ["Plan", "auto_damping", "check_damping", "part_of_auto", "resolve_damping"]

#: κ = λmax/λ where nothing but the spectrum is known.
AUTO_CONDITION_NUMBER = 200.0
_PART = re.compile(r"(auto|lambda_max|λmax) */ *(\d+(?:\.\d+)?(?:e[+-]?\d+)?)")


def auto_damping(spectrum: Spectrum) -> float:
    """``λ = λmax / 200``, where nothing but the spectrum is known; `whence.attribution.damping` has the better rule.

    A larger λ makes influence a gradient dot product, a smaller one fits noise in flat directions, and costs more. The
    best κ = λmax/λ was between 3 and 3,000 on the works of ``benchmarks.damping``.
    """
    return spectrum.lambda_max.value / AUTO_CONDITION_NUMBER


def check_damping(damping: float | str) -> None:
    """Refuse what `resolve_damping` could not use, before anything is measured."""
    if isinstance(damping, str):
        part = _PART.fullmatch(damping)
        if damping != "auto" and (part is None or not 0 < float(part[2]) < math.inf):
            raise OptionError(
                f"damping is {damping!r}; give a positive number, 'auto', a part of it as 'auto/4', or a "
                "part of λmax as 'lambda_max/50'"
            )
    elif not 0 < damping < math.inf:
        raise OptionError(f"damping is {damping}; give a positive number or 'auto'")


def resolve_damping(damping: float | str, spectrum: Spectrum, *, rounding: float = 0.0) -> float:
    """λ itself, from a number, ``"auto"``, ``"auto/4"``, or ``"lambda_max/50"``.

    With the rounding unit ε of vectors, refuses a λ outside of ``ε·λmax … λmax/ε``: next to the larger, the smaller
    would have no digits.
    """
    check_damping(damping)
    top, of_auto = spectrum.lambda_max.value, part_of_auto(damping)
    if of_auto is not None:
        found = auto_damping(spectrum) / of_auto
    elif isinstance(damping, str):
        part = _PART.fullmatch(damping)
        assert part is not None
        found = top / float(part[2])
    else:
        found = damping
    if rounding and not rounding * top <= found <= top / rounding:
        raise OptionError(
            f"damping is {found:.3g} and λmax {top:.3g}: with a rounding of {rounding:.1g}, the smaller is lost beside "
            f"the larger. Give a λ between {rounding * top:.2g} and {top / rounding:.2g}, such as 'lambda_max/200'"
        )
    return found


def part_of_auto(damping: float | str) -> float | None:
    """What the automatic λ is divided by: 1 for ``"auto"``, 4 for ``"auto/4"``; None for a λ that is given.

    Example:
        >>> part_of_auto("auto"), part_of_auto("auto/4"), part_of_auto("lambda_max/50")
        (1.0, 4.0, None)
    """
    if damping == "auto":
        return 1.0
    part = _PART.fullmatch(damping) if isinstance(damping, str) else None
    return float(part[2]) if part is not None and part[1] == "auto" else None


@dataclass(frozen=True)
class Plan:
    """How to solve ``(H + λ)u = g`` by LiSSA, and what to expect of it.

    Attributes:
        damping: λ.
        step_size: η.
        batch_size: |B|, in terms: examples, or tokens for language models.
        num_steps: T.
        chains: independent runs; their mean is the solution and their spread its error.
        spectrum: what the plan was made from.
        constant: the C of condition C.1 that the batch was made with.

    Example:
        >>> from whence.spectrum import Estimate, Spectrum
        >>> spectrum = Spectrum(trace=Estimate(1000.0), frobenius=Estimate(150.0), lambda_max=Estimate(95.0))
        >>> plan = Plan.from_spectrum(spectrum, damping=5.0)
        >>> plan.step_size, plan.batch_size, plan.num_steps
        (0.01, 22, 40)
    """

    damping: float
    step_size: float
    batch_size: int
    num_steps: int
    chains: int
    spectrum: Spectrum
    constant: float

    def __post_init__(self) -> None:
        check_fields(self, "batch_size", "num_steps", "chains")
        for name in ("damping", "step_size", "constant"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise OptionError(f"{name} must be a positive number, got {value}")
        for name in ("batch_size", "num_steps", "chains"):
            value = getattr(self, name)
            if (
                not isinstance(value, (int, float))
                or not math.isfinite(value)
                or value != int(value)
                or value < 1
            ):
                raise OptionError(f"{name} must be a whole number of at least 1, got {value}")

    @classmethod
    @checked()
    def from_spectrum(
        cls, spectrum: Spectrum, damping: float, *, C: float = 2.0, chains: int = 4, errors: float = 2.0
    ) -> Plan:
        """The paper's plan for this spectrum and damping, on the stable side of the estimates' errors.

        Args:
            spectrum: from `whence.estimate_spectrum`, or given.
            damping: λ > 0.
            C: the constant of condition C.1; give ``spectrum.safe_constant`` to plan with what was measured.
            chains: independent runs for the error bars.
            errors: how many standard errors λmax and the trace are raised by.
        """
        check_number(damping)
        if not 0 < C < math.inf:
            raise OptionError(f"C must be a positive number, got {C}")
        lambda_max = spectrum.largest(errors)
        trace = spectrum.trace.upper(errors)
        if not (lambda_max > 0 and trace > 0):
            raise OptionError(
                f"a plan needs a positive λmax and trace, got {spectrum.lambda_max} and {spectrum.trace}"
            )
        step_size = 1 / (lambda_max + damping)
        return cls(
            damping=damping,
            step_size=step_size,
            batch_size=max(1, _ceil(C * trace / lambda_max)),
            num_steps=max(1, _ceil(2 / (damping * step_size))),
            chains=chains,
            spectrum=spectrum,
            constant=C,
        )

    @classmethod
    @checked()
    def tuned(
        cls,
        spectrum: Spectrum,
        damping: float | str = "auto",
        *,
        num_terms: int,
        chains: int = 4,
        refine: float = 2.0,
    ) -> Plan:
        """The plan that needs no tuning: damping and C from the measured spectrum, the batch within the data.

        Args:
            spectrum: measured.
            damping: λ, ``"auto"`` (`auto_damping`), or a part of that or of λmax, as ``"auto/4"`` or
                ``"lambda_max/50"``.
            num_terms: of the data; a batch cannot be larger, and a shorter step makes up for it.
            chains: independent runs.
            refine: cost of each chain as a multiple of the paper's plan; see `refined`. At 1, what the start leaves
                behind is not small beside the averaged noise, and intervals may cover a little too little.
        """
        if num_terms < 1:
            raise OptionError(f"num_terms is {num_terms}; a plan needs data of at least one term")
        damping = resolve_damping(damping, spectrum)
        plan = cls.from_spectrum(spectrum, damping, C=spectrum.safe_constant, chains=chains).refined(refine)
        return plan._within(num_terms)

    @classmethod
    def preconditioned(
        cls, spectrum: Spectrum, *, smallest: float = 1.0, num_terms: int | None = None, chains: int = 4
    ) -> Plan:
        """The plan for steps through a preconditioner P, in its coordinates, where ``H`` is ``P^(-1/2)HP^(-1/2)``.

        The system there is ``P^(-1/2)(H + λ)P^(-1/2)``. As ``P ≽ λ``, its eigenvalues are at most λmax + 1, and at
        least ``smallest``, which takes the place of λ:

            η = 1 / (λmax + 1),      |B| ≥ C·Tr / λmax,      T = 2 / (η·smallest),      T·|B| ≈ 2C·Tr(P⁻¹H)

        Args:
            spectrum: of ``P^(-1/2)HP^(-1/2)``, measured: its C is not that of H.
            smallest: the smallest eigenvalue of ``P⁻¹(H + λ)``: 1 for a low-rank P made from all terms. Made from some
                hundred terms, P has curvature that H has not, and a few directions at 0.2 to 0.5 (`measure_quality`)
                are so much slower. A plan for 1 leaves them to a good start.
            num_terms: of the data, where a batch must stay within them.
            chains: independent runs.
        """
        if not 0 < smallest <= 1:
            raise OptionError(f"smallest is {smallest}; an eigenvalue of P⁻¹(H + λ) in (0, 1] is needed")
        plan = cls.from_spectrum(spectrum, smallest, C=spectrum.safe_constant, chains=chains)
        step = 1 / (spectrum.largest() + 1)
        plan = plan.replace(step_size=step, num_steps=max(1, _ceil(2 / (smallest * step))))
        return plan if num_terms is None else plan._within(num_terms)

    def _within(self, num_terms: int) -> Plan:
        """The same with batches of at most ``num_terms``, and steps short enough for them."""
        if self.batch_size <= num_terms:
            return self
        step = min(
            self.step_size, 1 / (self.constant * self.spectrum.trace.upper() / num_terms + self.damping)
        )
        longer = _ceil(self.num_steps * self.step_size / step)
        return self.replace(batch_size=num_terms, step_size=step, num_steps=longer)

    def replace(self, **changes: Any) -> Plan:
        """The same plan with some values changed, such as ``plan.replace(batch_size=100)``."""
        return replace(self, **changes)

    def refined(self, factor: float) -> Plan:
        """The plan at ``factor`` times its cost: batch and steps each grow by √factor.

        A longer tail and a larger batch lower the error of one chain more than as many chains would.
        """
        if not 1 <= factor < math.inf:
            raise OptionError(f"factor must be a number of at least 1, got {factor}")
        root = math.sqrt(factor)
        return self.replace(batch_size=_ceil(root * self.batch_size), num_steps=_ceil(root * self.num_steps))

    # --- predictions -------------------------------------------------------------------------------------

    @property
    def condition_number(self) -> float:
        """``κ = λmax / λ``."""
        return self.spectrum.lambda_max.value / self.damping

    @property
    def bias(self) -> float:
        """Theorem 1: ``‖E u^T - u*‖ ≤ (1 - ηλ)^T ‖u⁰ - u*‖``, and ``‖u⁰ - u*‖ ≤ ‖g‖/λ`` from u⁰ = g/λ."""
        return float((1 - self.step_size * self.damping) ** self.num_steps)

    @property
    def sampling_error(self) -> float:
        """Theorem 1: root of ``η²Δ̃/δ``, the last iterate's error from sampling, in units of ‖g‖/λ.

        ``δ = 2ηλ - (ηλ)²``; under C.1, ``Δ̃ ≤ (C·Tr(H)/|B|) u*ᵀHu*``, and ``u*ᵀHu* ≤ ‖g‖²/4λ``. Averaging the tail
        and the chains makes it smaller; how much depends on the spectrum, and the solution measures it.
        """
        contraction = 2 * self.step_size * self.damping - (self.step_size * self.damping) ** 2
        noise = self.constant * self.spectrum.trace.value / self.batch_size / (4 * self.damping)
        return math.sqrt(self.step_size**2 * noise / contraction) * self.damping

    @property
    def smallest_stable_batch(self) -> int:
        """``C·Tr(H) / (1/η - λ)``: what the Corollary asks of the batch at this step size."""
        room = 1 / self.step_size - self.damping
        return max(1, _ceil(self.constant * self.spectrum.trace.value / room)) if room > 0 else 1

    @property
    def stable(self) -> bool:
        """Whether step and batch satisfy the Corollary at the spectrum's central estimates."""
        step_fits = self.step_size * (self.spectrum.lambda_max.value + self.damping) <= 1 + 1e-9
        return step_fits and self.batch_size >= self.smallest_stable_batch

    @property
    def num_products(self) -> int:
        """Sampled products, over all chains."""
        return self.num_steps * self.chains

    @property
    def num_term_products(self) -> int:
        """Terms gone through, over all chains: what the time is proportional to."""
        return self.num_products * self.batch_size

    @property
    def seconds(self) -> float | None:
        """Predicted seconds for one right-hand side, where the spectrum measured a product's time."""
        per_term = self.spectrum.seconds_per_term
        return None if per_term is None else self.num_term_products * per_term

    @property
    def memory_copies(self) -> int:
        """Vectors of the parameters' size held at once for one right-hand side, beside the model.

        The most is held by the residual at the end: the right-hand side, one average per chain, their mean, and
        two more. A step holds one less, or two less when its batch fits in a single pass.
        """
        return 4 + self.chains

    def _rows(self) -> list[tuple[str, str, str]]:
        """Name, symbol and value of everything that is shown."""
        cost = f"{self.num_products:,} products over {self.num_term_products:,} terms"
        if self.seconds is not None:
            cost += f", about {format_duration(self.seconds)}"
        memory = f"{self.memory_copies} vectors of the parameters' size per right-hand side"
        if self.spectrum.num_parameters is not None:
            memory += f": {format_bytes(4 * self.spectrum.num_parameters * self.memory_copies)} in float32"
        expected = f"bias ≤ {self.bias:.2g}, sampling ≤ {self.sampling_error:.2g} of ‖g‖/λ (last iterate)"
        rows = [
            ("damping", "λ", f"{self.damping:.4g}   (κ = λmax/λ = {self.condition_number:.3g})"),
            ("step", "η", f"{self.step_size:.4g}"),
            ("batch", "|B|", f"{self.batch_size:,} terms   (C = {self.constant:.3g})"),
            ("steps", "T", f"{self.num_steps:,}   in each of {self.chains} chains"),
            ("expected", "", expected),
            ("cost", "", cost),
            ("memory", "", memory),
        ]
        if not self.stable:
            rows.append(("warning", "", "step or batch is outside the stable range: expect divergence"))
        return rows

    def __str__(self) -> str:
        return "\n".join(f"{name:<8} {symbol:^4}  {value}" for name, symbol, value in self._rows())

    def _repr_html_(self) -> str:
        """A card, for notebooks."""
        return table_card(
            "LiSSA's plan", [(f"{name} {symbol}", value) for name, symbol, value in self._rows()]
        )


def _ceil(x: float) -> int:
    """Ceiling that forgives rounding: 40.00000000001 is 40."""
    return math.ceil(x * (1 - 1e-9))
