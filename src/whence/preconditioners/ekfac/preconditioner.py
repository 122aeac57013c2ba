"""`Ekfac`: a matrix that is diagonal in a Kronecker basis, layer by layer (George et al., 2018).

A linear layer with inputs ``a`` and gradients ``g`` of its outputs has the gradient ``G = Σ g aᵀ`` on an example.
With Q_A and Q_G the eigenvectors of the means of ``a aᵀ`` and ``g gᵀ``, its block of H is taken as diagonal in the
basis ``Q = Q_G ⊗ Q_A``, and the blocks between layers as zero:

    P = Q diag(E) Qᵀ + λ,      E = mean of (Q_Gᵀ G Q_A)² = diagonal of QᵀHQ

So ``P - λ`` has H's trace, and is the nearest to H of all matrices that are diagonal in this basis. Products with any
power of P are four small matrix products for each layer. An embedding is a linear layer whose inputs are one-hot: the
mean of ``a aᵀ`` is diagonal, and that factor of the basis is the identity, which is not stored. Everything here is
plain tensors: no network, no curvlinops.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from whence.errors import OptionError, RunDirectoryError, VectorError
from whence.preconditioners import Preconditioner
from whence.vectors import ParamVector

__all__ = ["Ekfac", "KroneckerBlock", "check_damping", "nothing_covered"]

_PARTS = ("left", "right", "eigenvalues")


@dataclass(frozen=True, eq=False)
class KroneckerBlock:
    """One layer's block: ``(Q_G ⊗ Q_A) diag(E) (Q_G ⊗ Q_A)ᵀ``, weight and bias together.

    An embedding's weight is that of a linear layer transposed, ``[vocabulary, width]``: its block is
    ``(I ⊗ Q_G) diag(E) (I ⊗ Q_G)ᵀ``, with the vocabulary for outputs here and the width for inputs.

    Attributes:
        weight, bias: the parameters' names, None where one is absent or not selected.
        left: Q_G, ``[outputs, outputs]``; None for the identity.
        right: Q_A, ``[inputs, inputs]``; where a bias stands beside a weight, its input is the last, and always 1.
            Of an embedding, Q_G.
        eigenvalues: E, ``[outputs, inputs]``.
    """

    weight: str | None
    bias: str | None
    left: Tensor | None
    right: Tensor
    eigenvalues: Tensor

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters that it covers."""
        return tuple(name for name in (self.weight, self.bias) if name is not None)

    def apply(self, vector: ParamVector, function: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """``Q f(E) Qᵀ v`` for this layer's parameters; on a block, for each column."""
        lead = () if vector.columns is None else (vector.columns,)
        outputs, inputs = self.eigenvalues.shape
        parts = []
        for name in self.names:
            width = 1 if name == self.bias else inputs - (self.bias is not None)
            if vector.shape_of(name).numel() != outputs * width:
                raise VectorError(
                    f"{name!r} has shape {tuple(vector.shape_of(name))} in the vector; the preconditioner was made "
                    f"for {outputs} × {width} numbers. Use it with the model that it was made for"
                )
            parts.append(vector[name].reshape(*lead, outputs, width))
        left = None if self.left is None else self.left.to(parts[0])
        right = self.right.to(parts[0])
        together = torch.cat(parts, -1)
        rotated = (together if left is None else left.T @ together) @ right
        rotated.mul_(function(self.eigenvalues.to(parts[0])))
        result = (rotated if left is None else left @ rotated) @ right.T
        pieces = result.split([part.shape[-1] for part in parts], -1)
        return {n: piece.reshape(vector[n].shape) for n, piece in zip(self.names, pieces, strict=True)}


@dataclass(frozen=True, eq=False)
class Ekfac(Preconditioner):
    """``P = Q diag(E) Qᵀ + λ`` layer by layer; λ alone on the parameters that no layer covers.

    Made by `ekfac`. It holds about three times the parameters of a square layer, and of an embedding little more than
    those.

    Attributes:
        damping: λ.
        blocks: the layers.
        uncovered: the parameters where P is λ, each with the reason.
        num_terms: the terms of the examples that it was made from.
        num_passes: backward passes over them, for the basis and for E together; embeddings have passes of their own.
        curvature: ``"exact"`` or ``"sampled"``.

    Example:
        >>> turned = torch.tensor([[0.6, -0.8], [0.8, 0.6]])
        >>> block = KroneckerBlock("weight", None, torch.eye(1), turned, torch.tensor([[3.0, 1.0]]))
        >>> P = Ekfac(1.0, (block,), {}, num_terms=1, num_passes=1, curvature="exact")
        >>> P.solve(ParamVector({"weight": torch.tensor([[0.6, 0.8]])}))["weight"]
        tensor([[0.1500, 0.2000]])
        >>> P.smallest
        0.25
    """

    damping: float
    blocks: tuple[KroneckerBlock, ...]
    uncovered: Mapping[str, str]
    num_terms: int
    num_passes: int
    curvature: str

    def __post_init__(self) -> None:
        check_damping(self.damping)
        if not self.blocks:
            raise nothing_covered(self.uncovered)

    def __repr__(self) -> str:
        return (
            f"Ekfac(λ = {self.damping:.3g}, {len(self.blocks)} layers, {len(self.uncovered)} parameters not "
            f"covered, {self.num_terms:,} terms, {self.curvature} curvature)"
        )

    def solve(self, vector: ParamVector) -> ParamVector:
        return self._apply(vector, lambda values: (values + self.damping).reciprocal_())

    def root_solve(self, vector: ParamVector) -> ParamVector:
        return self._apply(vector, lambda values: (values + self.damping).rsqrt_())

    @property
    def largest(self) -> float:
        """‖P‖, its largest eigenvalue."""
        return self.damping + max(float(block.eigenvalues.max()) for block in self.blocks)

    @property
    def smallest(self) -> float:
        """``λ/‖P‖``, a bound that needs nothing of H but ``H ⪰ 0``, however good or bad P is.

        ``P⁻¹(H + λ)`` has the eigenvalues of ``P^(-1/2)(H + λ)P^(-1/2) ⪰ λP⁻¹ ⪰ λ/‖P‖``.
        """
        return self.damping / self.largest

    @property
    def trace(self) -> float:
        """``Tr(P - λ)``: H's over the covered parameters, but for the error of sampling."""
        return sum(float(block.eigenvalues.sum(dtype=torch.float64)) for block in self.blocks)

    def with_damping(self, damping: float) -> Ekfac:
        """The same for another λ, at no cost: neither the basis nor E depends on it."""
        return replace(self, damping=damping)

    # --- saving ------------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        """What to save, beside `notes`."""
        return {
            f"{k}.{part}": getattr(block, part)
            for k, block in enumerate(self.blocks)
            for part in _PARTS
            if getattr(block, part) is not None
        }

    def notes(self) -> dict[str, Any]:
        """What to save beside `tensors`: plain values, as JSON has them."""
        return {
            "damping": self.damping,
            "layers": [[block.weight, block.bias] for block in self.blocks],
            "identities": [k for k, block in enumerate(self.blocks) if block.left is None],
            "uncovered": dict(self.uncovered),
            "num_terms": self.num_terms,
            "num_passes": self.num_passes,
            "curvature": self.curvature,
        }

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], notes: Mapping[str, Any]) -> Ekfac:
        """From what `tensors` and `notes` gave."""
        try:
            # said, and not told from the absence of a tensor, which may have been lost; saved before there were any
            # embeddings, it says nothing
            identities = notes.get("identities", ())
            blocks = tuple(
                KroneckerBlock(
                    weight,
                    bias,
                    None if k in identities else tensors[f"{k}.left"],
                    tensors[f"{k}.right"],
                    tensors[f"{k}.eigenvalues"],
                )
                for k, (weight, bias) in enumerate(notes["layers"])
            )
            rest = {name: notes[name] for name in ("uncovered", "num_terms", "num_passes", "curvature")}
            return cls(notes["damping"], blocks, **rest)
        except KeyError as error:
            raise RunDirectoryError(f"a saved EK-FAC preconditioner lacks {error}; make it again") from error

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


def check_damping(damping: float) -> None:
    """Refuse what P could not be positive definite with."""
    if not 0 < damping < math.inf:
        raise OptionError(f"damping must be a positive number, got {damping}; λmax/200 is a good start")


def nothing_covered(uncovered: Mapping[str, str]) -> OptionError:
    """The error of a model without a layer for EK-FAC."""
    few = "; ".join(f"{name!r} is {reason}" for name, reason in list(uncovered.items())[:3])
    return OptionError(
        f"EK-FAC covers none of the parameters ({few}). Use the Nyström preconditioner instead"
    )
