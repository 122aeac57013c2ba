"""Symmetric linear operators: the one interface between mathematics and networks.

`LinearOperator.sample` is the seam. ``A.sample(batch_size, generator)`` is an operator ``A_B`` with
``E[A_B] = A``, so a stochastic solver reads as in the paper, and is tested on `FiniteSum` matrices whose
answers are known in closed form. Damping has one home, `Damped`; nothing else adds or rescales anything.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from whence.arguments import checked
from whence.errors import OptionError, SolverError, VectorError
from whence.vectors import ParamVector

__all__ = ["Damped", "Dense", "FiniteSum", "LinearOperator", "check_damping", "failures_become_typed"]


class LinearOperator(ABC):
    """A symmetric positive semi-definite linear map ``A`` on parameter space.

    Only `zeros` and `matvec` are required. Operators that are means over terms (examples, tokens) also
    give `num_terms`, `sample` and, where they can, `sample_factor`.
    """

    @abstractmethod
    def zeros(self, columns: int | None = None) -> ParamVector:
        """The zero vector (or block) of the space the operator acts on."""

    @abstractmethod
    def matvec(self, vector: ParamVector) -> ParamVector:
        """``A v``; on a block, ``A v`` for each column."""

    def matvec_with_slopes(self, vector: ParamVector) -> tuple[ParamVector, Tensor | None]:
        """``A v``, and ``∇ℓ(z)ᵀv`` of every example z, ``[columns, examples]``, where the product passes by them.

        None where the operator is not made of examples.
        """
        return self.matvec(vector), None

    def add_matvec_(self, out: ParamVector, vector: ParamVector, scale: float) -> None:
        """``out += scale · A v``, where ``out`` may be ``vector`` itself.

        Operators override this when they can add the product piece by piece, without ever holding all
        of it: that is what keeps a LiSSA step within two vectors and one layer's gradient.
        """
        out.axpy_(scale, self.matvec(vector))

    def quadratic_form(self, vector: ParamVector) -> Tensor:
        """``vᵀ A v`` in float64, per column for a block. Often cheaper than a product."""
        return vector.dot(self.matvec(vector))

    @property
    def num_terms(self) -> int:
        """How many terms the operator averages: examples, or tokens for a language model."""
        return 1

    def sample(self, batch_size: int, generator: torch.Generator) -> LinearOperator:
        """An operator over about ``batch_size`` terms drawn independently, with ``E[A_B] = A``."""
        raise OptionError(f"{type(self).__name__} is not a mean over terms, so it cannot be sampled")

    def subset(
        self, batch_size: int, generator: torch.Generator, *, distinct: bool = False
    ) -> LinearOperator:
        """Like `sample`, for repeated use: products with it are deterministic.

        Args:
            batch_size: how many terms, about.
            generator: draws them.
            distinct: draw no term twice, where all have equal chances. The expectation is the same, the variance less,
                and `share_of_whole` more.
        """
        return self.sample(batch_size, generator)

    @property
    def share_of_whole(self) -> float:
        """Of an operator ``A_B`` that was drawn from ``A``: a c ≤ 1 with ``c·A_B ≼ A``, if every term is ≽ 0.

        A holds the terms that were drawn. So c is the least ratio of a drawn term's coefficient in A to its own in A_B:
        m/n for m of n terms, all different. 0 where nothing is known.
        """
        return 0.0

    def heaviest_term(self, vector: ParamVector) -> tuple[str, float] | None:
        """Of an operator that was drawn: the example with the most curvature along ``v``, by name, and how much it has.

        The curvature ``vᵀA_i v`` is that of the operator over this example alone. None where terms have no names.
        """
        return None

    @property
    def has_factors(self) -> bool:
        """Whether `sample_factor` works."""
        return False

    def sample_factor(self, batch_size: int, generator: torch.Generator) -> ParamVector:
        """A random vector ``g`` with ``E[g gᵀ] = A``, computed from about ``batch_size`` terms."""
        raise OptionError(f"{type(self).__name__} cannot draw vectors g with E[g gᵀ] = A")

    def state(self) -> dict[str, float | None]:
        """What earlier products left behind that later ones depend on: needed to repeat a run bit for bit."""
        return {}

    def restore_state(self, state: Mapping[str, float | None]) -> None:  # noqa: B027 (most operators have none)
        """Take back what `state` returned."""

    def check_batch_size(self, batch_size: int) -> None:
        """Raise `OptionError` unless ``1 ≤ batch_size ≤ num_terms``."""
        if not 1 <= batch_size <= self.num_terms:
            raise OptionError(
                f"batch size {batch_size} is outside 1..{self.num_terms}, the number of terms in the data. "
                "Use a smaller batch, or the whole operator in place of a sample"
            )


class Dense(LinearOperator):
    """A symmetric matrix, for references and tests.

    Args:
        matrix: ``[N, N]``.
        template: the space to act on, flattened in the template's order; by default one tensor ``"x"``.
        num_terms: how many terms the matrix is the mean of.
        share_of_whole: where it was drawn from another; see `LinearOperator.share_of_whole`.

    Example:
        >>> A = Dense(torch.diag(torch.tensor([1.0, 2.0])))
        >>> A.matvec(ParamVector({"x": torch.ones(2)}))["x"]
        tensor([1., 2.])
    """

    @checked()
    def __init__(
        self,
        matrix: Tensor,
        template: ParamVector | None = None,
        *,
        num_terms: int = 1,
        share_of_whole: float = 0.0,
    ) -> None:
        if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
            raise OptionError(f"Dense needs a square matrix, got shape {tuple(matrix.shape)}")
        self.matrix = matrix
        self._num_terms = num_terms
        self._share_of_whole = share_of_whole
        self._template = template or ParamVector({"x": matrix.new_zeros(matrix.shape[0])})
        if self._template.numel != matrix.shape[0]:
            raise VectorError(
                f"the template has {self._template.numel} numbers, the matrix {matrix.shape[0]} rows"
            )

    def zeros(self, columns: int | None = None) -> ParamVector:
        return self._template.zeros(columns)

    def matvec(self, vector: ParamVector) -> ParamVector:
        self._template.check_same_space(vector)
        return self.unflatten(self.flatten(vector) @ self.matrix.T)

    @property
    def num_terms(self) -> int:
        return self._num_terms

    @property
    def share_of_whole(self) -> float:
        return self._share_of_whole

    def flatten(self, vector: ParamVector) -> Tensor:
        """``[N]``, or ``[k, N]`` for a block: the order of the matrix's rows."""
        start = 0 if vector.columns is None else 1
        return torch.cat([vector[name].flatten(start) for name in self._template], dim=-1)

    def unflatten(self, flat: Tensor) -> ParamVector:
        """Inverse of `flatten`."""
        shapes = [self._template.shape_of(name) for name in self._template]
        pieces = flat.split([shape.numel() for shape in shapes], dim=-1)
        lead = flat.shape[:-1]
        named = zip(self._template, pieces, shapes, strict=True)
        return ParamVector(
            {name: piece.reshape(lead + shape) for name, piece, shape in named},
            columns=lead[0] if lead else None,
        )

    @property
    def has_factors(self) -> bool:
        return True

    def sample_factor(self, batch_size: int, generator: torch.Generator) -> ParamVector:
        values, vectors = torch.linalg.eigh(self.matrix)
        noise = torch.randn(len(values), generator=generator, dtype=values.dtype)
        return self.unflatten(vectors @ (values.clamp_min(0).sqrt() * noise))


class FiniteSum(LinearOperator):
    """``A = (1/n) Σ A_i``: the smallest operator that a stochastic method can be tested on.

    Example:
        >>> A = FiniteSum([torch.eye(2), 3 * torch.eye(2)])
        >>> A.matvec(ParamVector({"x": torch.ones(2)}))["x"]
        tensor([2., 2.])
    """

    @checked()
    def __init__(self, matrices: Tensor | Sequence[Tensor], template: ParamVector | None = None) -> None:
        if (isinstance(matrices, Tensor) and matrices.ndim != 3) or len(matrices) == 0:
            raise OptionError(
                "matrices are a list of at least one square matrix, or a tensor of them, [terms, n, n]"
            )
        self.matrices = matrices if isinstance(matrices, Tensor) else torch.stack(list(matrices))
        self._template = template
        self.mean = Dense(self.matrices.mean(0), template)

    def zeros(self, columns: int | None = None) -> ParamVector:
        return self.mean.zeros(columns)

    def matvec(self, vector: ParamVector) -> ParamVector:
        return self.mean.matvec(vector)

    @property
    def num_terms(self) -> int:
        return len(self.matrices)

    def sample(self, batch_size: int, generator: torch.Generator) -> Dense:
        self.check_batch_size(batch_size)
        return self._over(torch.randint(self.num_terms, (batch_size,), generator=generator))

    def subset(self, batch_size: int, generator: torch.Generator, *, distinct: bool = False) -> Dense:
        if not distinct:
            return self.sample(batch_size, generator)
        self.check_batch_size(batch_size)
        return self._over(torch.randperm(self.num_terms, generator=generator)[:batch_size])

    def _over(self, picks: Tensor) -> Dense:
        share = len(picks) / (self.num_terms * int(picks.bincount().max()))
        return Dense(self.matrices[picks].mean(0), self._template, num_terms=len(picks), share_of_whole=share)

    @property
    def has_factors(self) -> bool:
        return True

    def sample_factor(self, batch_size: int, generator: torch.Generator) -> ParamVector:
        return self.sample(batch_size, generator).sample_factor(batch_size, generator)


class Damped(LinearOperator):
    """``A + λI``, the system that influence functions solve.

    Example:
        >>> A = Damped(Dense(torch.eye(2)), 0.5)
        >>> A.matvec(ParamVector({"x": torch.ones(2)}))["x"]
        tensor([1.5000, 1.5000])
    """

    @checked()
    def __init__(self, operator: LinearOperator, damping: float) -> None:
        check_damping(damping)
        self.operator = operator
        self.damping = float(damping)

    def zeros(self, columns: int | None = None) -> ParamVector:
        return self.operator.zeros(columns)

    def matvec(self, vector: ParamVector) -> ParamVector:
        return self.operator.matvec(vector).axpy_(self.damping, vector)

    def matvec_with_slopes(self, vector: ParamVector) -> tuple[ParamVector, Tensor | None]:
        product, slopes = self.operator.matvec_with_slopes(vector)
        return product.axpy_(self.damping, vector), slopes

    def add_matvec_(self, out: ParamVector, vector: ParamVector, scale: float) -> None:
        shrink = 1 + scale * self.damping
        if out is vector and shrink != 0:  # shrink·out + scale·A·out, with the old `out` inside the product
            self.operator.add_matvec_(out, vector, scale / shrink)
            out.scale_(shrink)
        elif out is vector:
            out.copy_(self.operator.matvec(vector).scale_(scale))
        else:
            self.operator.add_matvec_(out, vector, scale)
            out.axpy_(scale * self.damping, vector)

    def quadratic_form(self, vector: ParamVector) -> Tensor:
        return self.operator.quadratic_form(vector) + self.damping * vector.dot(vector)

    @property
    def num_terms(self) -> int:
        return self.operator.num_terms

    def sample(self, batch_size: int, generator: torch.Generator) -> Damped:
        return Damped(self.operator.sample(batch_size, generator), self.damping)

    def subset(self, batch_size: int, generator: torch.Generator, *, distinct: bool = False) -> Damped:
        return Damped(self.operator.subset(batch_size, generator, distinct=distinct), self.damping)

    @property
    def share_of_whole(self) -> float:
        return self.operator.share_of_whole  # c·λ ≤ λ

    def heaviest_term(self, vector: ParamVector) -> tuple[str, float] | None:
        return self.operator.heaviest_term(vector)  # without λ


def check_damping(damping: float) -> None:
    """Refuse a λ that is not a positive number."""
    if not 0 < damping < float("inf"):
        raise OptionError(
            f"damping must be a positive number, got {damping}. Without it the system may be singular; "
            "λmax/200 is a good start"
        )


@contextmanager
def failures_become_typed() -> Iterator[None]:
    """What linear algebra gives up on in here (no convergence, a singular matrix) becomes a `SolverError`."""
    try:
        yield
    except (torch.linalg.LinAlgError, np.linalg.LinAlgError) as error:  # type: ignore[attr-defined]
        raise SolverError(
            f"a small matrix of the solve cannot be decomposed ({error}): its numbers overflowed or hold no digits, as "
            "with a model that is certain of all its answers. Use a larger damping, or the model in float64"
        ) from error
