"""EK-FAC: a preconditioner that is diagonal in a Kronecker basis, layer by layer (George et al., 2018).

A linear layer with inputs ``a`` and gradients ``g`` of its outputs has the gradient ``G = Σ g aᵀ`` on an example.
With Q_A and Q_G the eigenvectors of the means of ``a aᵀ`` and ``g gᵀ``, its block of H is taken as diagonal in the
basis ``Q = Q_G ⊗ Q_A``, and the blocks between layers as zero:

    P = Q diag(E) Qᵀ + λ,      E = mean of (Q_Gᵀ G Q_A)² = diagonal of QᵀHQ

The work has three parts: `whence.preconditioners.ekfac_layers` finds the layers that can be covered,
`whence.preconditioners.ekfac_factors` measures Q and E of each, and `Ekfac` solves with them. Derived in docs/math.md,
"EK-FAC".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from whence.errors import OptionError, VectorError
from whence.model.gauss_newton import ACTIVATION_BUDGET, GaussNewton
from whence.preconditioners.base import Preconditioner, check_damping
from whence.preconditioners.ekfac_factors import KroneckerBlock, measure_factors
from whence.preconditioners.ekfac_layers import supported_layers
from whence.vectors import ParamVector

__all__ = ["Ekfac", "KroneckerBlock", "ekfac"]

Curvature = Literal["auto", "exact", "sampled"]

#: Examples with up to this many outputs get the exact curvature by default: a backward pass for each output.
_EXACT_OUTPUTS = 16


@dataclass(frozen=True, eq=False)
class Ekfac(Preconditioner):
    """``P = Q diag(E) Qᵀ + λ`` layer by layer; λ alone on the parameters that no layer covers.

    Made by `ekfac`. Products with any power of P are four small matrix products for each layer. It holds about three
    times the parameters of a square layer, and of an embedding little more than those.

    Attributes:
        damping: λ.
        blocks: the layers' factors.
        uncovered: the parameters where P is λ, each with the reason.
        terms: the terms of the examples that it was made from.
        num_passes: backward passes over them, for the basis and for E together; embeddings have passes of their own.
        curvature: ``"exact"`` or ``"sampled"``.

    Example:
        >>> turned = torch.tensor([[0.6, -0.8], [0.8, 0.6]])
        >>> block = KroneckerBlock("weight", None, torch.eye(1), turned, torch.tensor([[3.0, 1.0]]))
        >>> P = Ekfac(1.0, (block,), {}, terms=1, num_passes=1, curvature="exact")
        >>> P.solve(ParamVector({"weight": torch.tensor([[0.6, 0.8]])}))["weight"]
        tensor([[0.1500, 0.2000]])
        >>> P.smallest
        0.25
    """

    damping: float
    blocks: tuple[KroneckerBlock, ...]
    uncovered: dict[str, str]
    terms: int
    num_passes: int
    curvature: str

    def __post_init__(self) -> None:
        check_damping(self.damping)
        if not self.blocks:
            raise _nothing_covered(self.uncovered)

    def __repr__(self) -> str:
        return (
            f"Ekfac(λ = {self.damping:.3g}, {len(self.blocks)} layers, {len(self.uncovered)} parameters not "
            f"covered, {self.terms:,} terms, {self.curvature} curvature)"
        )

    def solve(self, vector: ParamVector) -> ParamVector:
        return self._apply(vector, lambda values: (values + self.damping).reciprocal_())

    def root_solve(self, vector: ParamVector) -> ParamVector:
        return self._apply(vector, lambda values: (values + self.damping).rsqrt_())

    def _apply(self, vector: ParamVector, function: Callable[[Tensor], Tensor]) -> ParamVector:
        known = {name for block in self.blocks for name in block.names} | set(self.uncovered)
        if known != set(vector):
            raise VectorError(
                f"the vector and the preconditioner differ in {sorted(known ^ set(vector))[:3]}; use it with the "
                "parameters that it was made for"
            )
        parts: dict[str, Tensor] = {}
        for block in self.blocks:
            parts |= block.apply(vector, function)
        rest = float(function(torch.zeros((), dtype=torch.float64)))
        return ParamVector(
            {name: parts[name] if name in parts else vector[name] * rest for name in vector},
            columns=vector.columns,
        )

    @property
    def largest(self) -> float:
        """‖P‖, its largest eigenvalue."""
        return self.damping + max(float(block.eigenvalues.max()) for block in self.blocks)

    @property
    def smallest(self) -> float:
        """``λ/‖P‖``, which needs nothing of H but ``H ≽ 0``: ``P^(-1/2)(H + λ)P^(-1/2) ≽ λP⁻¹ ≽ λ/‖P‖``."""
        return self.damping / self.largest

    @property
    def trace(self) -> float:
        """``Tr(P - λ)``: H's over the covered parameters, but for the error of sampling."""
        return sum(float(block.eigenvalues.sum(dtype=torch.float64)) for block in self.blocks)

    def with_damping(self, damping: float) -> Ekfac:
        """The same for another λ, at no cost: neither the basis nor E depends on it."""
        return replace(self, damping=damping)


def ekfac(
    gnh: GaussNewton,
    damping: float,
    *,
    generator: torch.Generator,
    examples: int | None = None,
    curvature: Curvature = "auto",
    samples: int = 1,
    widest: int = 16384,
) -> Ekfac:
    """An EK-FAC preconditioner for ``H + λ``, from two passes over the data: for the basis, then for E in it.

    Covers Linear layers, ungrouped 2d convolutions and embeddings, where a layer's parameters belong to it alone and it
    is called once in a forward pass, with a row for each example. Every other parameter is in the result's
    ``uncovered``, with the reason. Embeddings take two more passes; a model where nothing else is covered needs no
    curvlinops. The model is left as it is.

    Args:
        gnh: the operator H: model, task, data and selected parameters.
        damping: λ.
        generator: draws the examples, and the residuals of a sampled curvature.
        examples: how many examples to use, drawn without repetition; all by default.
        curvature: ``"exact"`` takes a backward pass for every output of an example: K, times the length of a sequence.
            ``"sampled"`` takes ``samples`` of them, each with residuals drawn anew, and E is unbiased. ``"auto"`` is
            exact up to 16 outputs.
        samples: draws per example and pass of a sampled curvature.
        widest: layers with more inputs or outputs are not covered; their factors are square matrices of that size. Of
            an embedding the width counts, and not the vocabulary, whose factor is the identity.

    Example:
        >>> from whence import Regression
        >>> data = [(torch.tensor([1.0, 0.0]), torch.ones(1)), (torch.tensor([0.0, 2.0]), torch.zeros(1))]
        >>> H = GaussNewton(torch.nn.Linear(2, 1, bias=False).eval(), Regression(), data)  # diag(0.5, 2)
        >>> P = ekfac(H, 0.5, generator=torch.Generator().manual_seed(0))
        >>> P.solve(ParamVector({"weight": torch.ones(1, 2)}))["weight"]
        tensor([[1.0000, 0.4000]])
    """
    check_damping(damping)
    _check_options(gnh, examples, curvature, samples, widest)
    with torch.enable_grad():
        layers, uncovered, outputs = supported_layers(gnh, widest)
        if not layers:
            raise _nothing_covered(uncovered)
        exact = _is_exact(gnh, curvature, outputs)
        positions = torch.arange(len(gnh.terms))
        if examples is not None:
            order = torch.randperm(len(gnh.terms), generator=generator, device=generator.device)
            positions = order[:examples].sort().values.cpu()
        blocks, passes = measure_factors(
            gnh, layers, positions, columns=outputs if exact else samples, exact=exact, generator=generator
        )
    return Ekfac(
        damping=float(damping),
        blocks=tuple(blocks[name] for name in layers),
        uncovered=uncovered,
        terms=int(gnh.terms.counts()[positions].sum()),
        num_passes=passes,
        curvature="exact" if exact else "sampled",
    )


def _is_exact(gnh: GaussNewton, curvature: Curvature, outputs: int) -> bool:
    if curvature == "sampled" and not gnh.has_factors:
        raise OptionError(
            f"{type(gnh.task).__name__} cannot draw residuals for a sampled curvature; use curvature='exact'"
        )
    exact = curvature == "exact" or (
        curvature == "auto" and (outputs <= _EXACT_OUTPUTS or not gnh.has_factors)
    )
    if exact and 8 * outputs**2 > ACTIVATION_BUDGET:
        remedy = "use curvature='sampled'" if gnh.has_factors else "use the Nyström preconditioner instead"
        raise OptionError(
            f"an exact curvature needs {outputs:,} backward passes and the root of a matrix of that size for each "
            f"example, too much for {outputs:,} outputs; {remedy}"
        )
    return exact


def _check_options(gnh: GaussNewton, examples: int | None, curvature: str, samples: int, widest: int) -> None:
    if not isinstance(gnh, GaussNewton):
        raise OptionError(
            f"EK-FAC is made of a network's layers; give a GaussNewton, not a {type(gnh).__name__}"
        )
    if gnh.network.metric is not None:
        raise OptionError(
            "EK-FAC's factors are in the parameters' own coordinates, and this operator has a metric; make it without"
        )
    if curvature not in ("auto", "exact", "sampled"):
        raise OptionError(f"curvature is {curvature!r}; it must be 'auto', 'exact' or 'sampled'")
    if examples is not None and not 1 <= examples <= len(gnh.terms):
        raise OptionError(
            f"examples is {examples}; it must be in 1..{len(gnh.terms)}, the examples in the data"
        )
    for name, value in (("samples", samples), ("widest", widest)):
        if value < 1:
            raise OptionError(f"{name} is {value}; it must be at least 1")


def _nothing_covered(uncovered: Mapping[str, str]) -> OptionError:
    """The error of a model without a layer for EK-FAC."""
    few = "; ".join(f"{name!r} is {reason}" for name, reason in list(uncovered.items())[:3])
    return OptionError(
        f"EK-FAC covers none of the parameters ({few}). Use the Nyström preconditioner instead"
    )
