"""The Lanczos recurrence, which everything that needs a Krylov space goes through.

    V₁β₀ = R,      Z_j = P⁻¹V_j,      V_{j+1}β_{j+1} = A Z_j - V_jα_j - V_{j-1}β_jᵀ,      V_jᵀP⁻¹V_j = I

It runs in three forms. A *block* spans one space, which all its columns share: α and β are small matrices. Columns
*apart* span a space each and share the passes of a product: α and β hold one number per column. A *single vector* is
one column apart, with scalars. All have an optional inner product of P⁻¹, and an optional basis that is kept and
reorthogonalised against.

Directions that rounding cannot tell from zero are left out, so that equal columns and exhausted spaces are no special
cases. A block then shrinks, and β has fewer rows than columns; a column apart goes on with zeros, which change nothing
of what is read from it. How much was left out is known.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from whence.errors import SolverError
from whence.operators import LinearOperator
from whence.vectors import ParamVector

__all__ = [
    "BASIS_BUDGET",
    "BlockLanczos",
    "BlockTridiagonal",
    "HasSolve",
    "as_block",
    "cholesky",
    "column_dots",
    "finite",
    "found_within",
    "tridiagonal",
]

#: Bases are kept while they take less than this many bytes.
BASIS_BUDGET = 2 * 2**30
_DOUBLE = torch.finfo(torch.float64).eps


class HasSolve(Protocol):
    """What the recurrence needs of a preconditioner P."""

    def solve(self, vector: ParamVector, /) -> ParamVector:
        """``P⁻¹v``, a new vector; on a block, for each column."""


# --- T -------------------------------------------------------------------------------------------------------


@dataclass
class BlockTridiagonal:
    """T of Lanczos, in float64: α on the diagonal and β below it.

    In a block they are matrices, and β may have fewer rows than columns. For columns apart they hold a number per
    column, and `columns` reads them; `extended`, `pivot` and `energy` are about blocks.

    Attributes:
        diagonal: α_1 … α_j.
        below: β_2 … β_{j+1}; the last one leads out of the space.
    """

    diagonal: list[Tensor] = field(default_factory=list)
    below: list[Tensor] = field(default_factory=list)
    _known: dict[float, tuple[float, int, Tensor | None]] = field(
        default_factory=dict, repr=False, compare=False, metadata={"saved": False}
    )

    def columns(self) -> tuple[Tensor, Tensor]:
        """All α and all β of columns apart, each ``[columns, j]``; ``[j]`` for a single vector."""
        return torch.stack(self.diagonal, -1), torch.stack(self.below, -1)

    def extended(self) -> Tensor:
        """T as one matrix, with the last β below it."""
        sizes = [len(alpha) for alpha in self.diagonal] + [len(self.below[-1])]
        starts = [sum(sizes[:j]) for j in range(len(sizes))]
        matrix = torch.zeros(sum(sizes), starts[-1], dtype=torch.float64)
        for j, (alpha, beta) in enumerate(zip(self.diagonal, self.below, strict=True)):
            here, below = (slice(starts[k], starts[k] + sizes[k]) for k in (j, j + 1))
            matrix[here, here], matrix[below, here] = alpha, beta
            if j + 1 < len(self.diagonal):
                matrix[here, below] = beta.T
        return matrix

    def pivot(self, node: float = 0.0, side: float = 1.0) -> Tensor | None:
        """Cholesky factor of the last pivot of ``side · (T - node)``; None if that is not positive definite."""
        known, done, factor = self._known.get(side, (node, 0, None))
        if known != node:  # else go on from where the last call came to
            done, factor = 0, None
        for j in range(done, len(self.diagonal)):
            alpha = self.diagonal[j]
            block = side * (alpha - node * torch.eye(len(alpha), dtype=alpha.dtype))
            if factor is not None:
                block = block - _schur(factor, self.below[j - 1])
            factor = cholesky(block)
            if factor is None:
                return None
        self._known[side] = (node, len(self.diagonal), factor)
        return factor

    def energy(self, zeta: Tensor, pivot: Tensor, node: float, side: float = 1.0) -> Tensor | None:
        """``diag(ζᵀ d̃⁻¹ ζ)``: above ``‖e‖²_A`` for a node below the spectrum, below it for one above (side -1).

        With ζ the residual in the next block of the basis, and the Cholesky factor of T's last pivot; one number per
        column, or None if T shows that the node is not there. See docs/math.md, "Gauss-Radau bounds for a block".
        """
        shifted = self.pivot(node, side)
        if shifted is None:
            return None
        beta = self.below[-1]
        eye = torch.eye(len(beta), dtype=beta.dtype)
        last = cholesky(node * eye + side * _schur(shifted, beta) - _schur(pivot, beta))
        return None if last is None else torch.sum(zeta * torch.cholesky_solve(zeta, last), dim=0)


def tridiagonal(diagonal: Tensor, off_diagonal: Tensor) -> Tensor:
    """The matrix ``[…, k, k]`` of a diagonal ``[…, k]`` and what is beside it, ``[…, k]``; the last is not used."""
    beside = torch.diag_embed(off_diagonal[..., :-1], offset=1)
    return torch.diag_embed(diagonal) + beside + beside.mT


def found_within(values: Tensor) -> Tensor:
    """Ritz values, falling along the last dimension, whose residuals are below this are eigenvalues.

    It is 2% of the distance to their neighbours; their vectors are then off by about as much.
    """
    gaps = torch.nn.functional.pad(-values.diff(dim=-1), (1, 1), value=math.inf)
    return 0.02 * torch.minimum(gaps[..., 1:], gaps[..., :-1])


def _schur(factor: Tensor, beta: Tensor) -> Tensor:
    """``β d⁻¹ βᵀ`` from the Cholesky factor of d."""
    half: Tensor = torch.linalg.solve_triangular(factor, beta.T, upper=False)
    return half.T @ half


def cholesky(matrix: Tensor) -> Tensor | None:
    """The factor of a symmetric matrix, or None if it is not positive definite."""
    factor, info = torch.linalg.cholesky_ex(matrix)
    return None if int(info) or not bool(torch.isfinite(factor).all()) else factor


# --- the recurrence --------------------------------------------------------------------------------------------


@dataclass
class BlockLanczos:
    """Where the recurrence stands after j steps.

    Attributes:
        current: the next vectors V_{j+1}; None when the space is exhausted.
        weighted: P⁻¹V_{j+1}; the same object without a preconditioner.
        previous: V_j.
        T: all α and β so far.
        norm: the largest norm of A and of P that was met, ``‖Az‖/‖z‖`` and ``‖v‖²``.
        reach: the largest ``‖z‖²``: 1 without a preconditioner, else up to the norm of P⁻¹.
        basis: V_1 … V_j, each with its P⁻¹V, where they are kept and reorthogonalised against.
        apart: whether columns have a space each.

    Example:
        >>> from whence import Dense
        >>> A = Dense(torch.diag(torch.tensor([3.0, 1.0], dtype=torch.float64)))
        >>> start = ParamVector({"x": torch.ones(2, dtype=torch.float64)})
        >>> state, norm, _ = BlockLanczos.begin(start, apart=True)
        >>> for _ in range(2):
        ...     _ = state.step(A)
        >>> torch.linalg.eigvalsh(tridiagonal(*state.T.columns())).round(decimals=6)
        tensor([1., 3.], dtype=torch.float64)
    """

    current: ParamVector | None
    weighted: ParamVector | None
    previous: ParamVector | None = None
    T: BlockTridiagonal = field(default_factory=BlockTridiagonal)
    norm: float = 0.0
    reach: float = 0.0
    basis: list[tuple[ParamVector, ParamVector]] | None = None
    apart: bool = False

    @classmethod
    def begin(
        cls,
        block: ParamVector,
        preconditioner: HasSolve | None = None,
        *,
        apart: bool = False,
        keep_basis: bool = False,
    ) -> tuple[BlockLanczos, Tensor, Tensor]:
        """From starts: also returns β₀, and the Gram matrix (its diagonal, for columns apart) of what was left out.

        Args:
            block: the starts, which stay as they are; a single vector only apart.
            preconditioner: P.
            apart: give every column a space of its own.
            keep_basis: keep all vectors, and make each new one orthogonal to all.
        """
        own = block.clone() if apart else block
        V, Z, beta, left_out, _ = _orthonormal(own, preconditioner, floor=0.0, apart=apart)
        return cls(V, Z, basis=[] if keep_basis else None, apart=apart), beta, left_out

    @property
    def noise(self) -> float:
        """T and its eigenvalues are known to the rounding of this; a power of two, so that it seldom changes."""
        return 2.0 ** math.ceil(math.log2(self.norm * self.reach)) if self.norm * self.reach > 0 else 0.0

    def step(
        self, A: LinearOperator, preconditioner: HasSolve | None = None, *, slopes: bool = False
    ) -> tuple[ParamVector, Tensor, Tensor | None]:
        """One product. α and β are added to T.

        Returns:
            The Z_j that was multiplied, the Gram matrix of what was left out of the next block, and, if they are asked
            for and A has them, the examples' slopes along Z_j.
        """
        V, Z, T = self.current, self.weighted, self.T
        assert V is not None
        assert Z is not None
        product, noted = A.matvec_with_slopes(Z) if slopes else (A.matvec(Z), None)
        W = finite(product)
        del product
        before, after = self._squares(Z), self._squares(W)
        tiny = torch.finfo(before.dtype).tiny  # a column that goes on with zeros
        self.norm = max(self.norm, float((after / before.clamp_min(tiny)).max()) ** 0.5)
        if preconditioner is not None:
            self.norm = max(self.norm, float(self._squares(V).max()))
        self.reach = max(self.reach, float(before.max()))
        if self.previous is not None:
            _subtract_(W, self.previous, T.below[-1].t())
            self.previous = None
        alpha = _inner(Z, W, self.apart).cpu()
        _subtract_(W, V, alpha)
        if self.basis is not None:
            self.basis.append((V, Z))
        self.current, self.weighted, beta, left_out, missed = _orthonormal(
            W,
            preconditioner,
            floor=2 * W.rounding * self.noise,
            apart=self.apart,
            against=[(V, Z)] if self.basis is None else self.basis,
        )
        alpha = alpha + missed
        T.diagonal.append(0.5 * (alpha + alpha.t()))
        T.below.append(beta)
        self.previous = V
        skew = 0.5 * (alpha - alpha.t())  # by the errors of products; T goes on without it
        return Z, left_out + _after(skew.t(), skew), noted

    def _squares(self, block: ParamVector) -> Tensor:
        return block.dot(block).cpu() if self.apart else column_dots(block, block)


def _orthonormal(
    block: ParamVector,
    preconditioner: HasSolve | None,
    *,
    floor: float,
    apart: bool,
    against: Sequence[tuple[ParamVector, ParamVector]] = (),
) -> tuple[ParamVector | None, ParamVector | None, Tensor, Tensor, Tensor]:
    """Orthonormal columns V of a block in the inner product of P⁻¹, without what is rounding; units, for columns apart.

    Twice, because once leaves the errors that short columns magnify; between the two, what the vectors still have in
    common with ``against`` (each with its P⁻¹) is taken out. Columns apart are overwritten.

    Returns:
        ``V, P⁻¹V, β, left_out, missed``: the block is ``Vβ``, plus ``missed`` times the last of ``against``, plus what
        was left out, of which the Gram matrix in the inner product of P⁻¹ is given.
    """
    V: ParamVector | None = block
    Z = block if preconditioner is None else preconditioner.solve(block)
    q, eps = block.columns, block.rounding
    first: Tensor | None = None
    missed: Tensor | None = None
    beta = torch.ones(() if q is None else q, dtype=torch.float64)
    beta = beta if apart else torch.diag(beta)
    for turn in range(2):
        assert V is not None
        gram = _inner(V, Z, apart).cpu()
        first = gram if first is None else first
        if apart:
            length = gram.clamp_min(0.0).sqrt()
            factor = torch.where(length * beta > floor, length, torch.zeros_like(length))
            weights = torch.where(factor > 0, 1 / factor, factor)
        else:
            weights, factor = _orthonormal_factors(gram, rounding=eps, floor=floor, outer=beta)
        beta = _after(factor, beta)
        if not bool(beta.any()):
            V = None
            break
        V = V.scale_(weights) if apart else V.mix(weights)
        if against and turn == 0:
            for vectors, weighted in against:
                common = _inner(weighted, V, apart)
                _subtract_(V, vectors, common)
            missed = _after(common.cpu(), beta)
        # Anew: mixed like V it would keep the errors that short columns magnify.
        Z = V if preconditioner is None else preconditioner.solve(V)
    assert first is not None
    left_out = torch.zeros_like(first)
    if apart:
        left_out = torch.where(beta > 0, left_out, first)
    elif len(beta) < len(first):
        rest = block.clone()
        if V is not None:
            _subtract_(rest, V, beta)
        if missed is not None:
            _subtract_(rest, against[-1][0], missed)
        weighted = rest if preconditioner is None else preconditioner.solve(rest)
        left_out = rest.gram(weighted, exact=True).cpu()
    missed = torch.zeros((), dtype=torch.float64) if missed is None else missed
    return V, None if V is None else Z, beta, left_out, missed


def _orthonormal_factors(
    gram: Tensor, *, rounding: float, floor: float, outer: Tensor
) -> tuple[Tensor, Tensor]:
    """From ``WᵀP⁻¹W``, the weights that make ``V = W·weights`` orthonormal, and β: ``W = Vβ`` but for what is left out.

    Left out are directions that rounding cannot tell from zero, and those into which ``W·outer`` reaches no further
    than the floor. Columns are brought to length one first: a short right-hand side counts as much as a long one.
    """
    length = gram.diagonal().clamp_min(0.0).sqrt()
    inverse = torch.where(length > 0, 1 / length, torch.zeros_like(length))
    values, vectors = torch.linalg.eigh(0.5 * inverse.unsqueeze(1) * (gram + gram.T) * inverse)
    # A Gram matrix squares: below √ε of float64 a direction's length is not known, whatever the vectors' precision.
    resolved = len(gram) * max(64 * _DOUBLE, (4 * rounding) ** 2)
    beta = values.clamp_min(0.0).sqrt().unsqueeze(1) * vectors.T * length
    kept = (values > resolved) & (torch.linalg.norm(beta @ outer, dim=1) > floor)
    weights, beta = inverse.unsqueeze(1) * vectors[:, kept] / values[kept].sqrt(), beta[kept]
    # Nearly orthonormal before: stay near, do not mix long and short.
    if bool(kept.all()) and float(values[0]) > 0.5:
        weights, beta = weights @ vectors.T, vectors @ beta
    return weights, beta


# --- coefficients: matrices for a block, numbers for columns apart -----------------------------------------------


def _inner(left: ParamVector, right: ParamVector, apart: bool) -> Tensor:
    return left.dot(right) if apart else left.gram(right, exact=True)


def _subtract_(from_: ParamVector, vectors: ParamVector, coefficients: Tensor) -> None:
    if coefficients.ndim == 2:
        from_.axpy_(-1.0, vectors.mix(coefficients))
    else:
        from_.axpy_(-coefficients, vectors)


def _after(left: Tensor, right: Tensor) -> Tensor:
    return left @ right if left.ndim == 2 else left * right


# --- vectors ---------------------------------------------------------------------------------------------------


def as_block(vector: ParamVector) -> ParamVector:
    """A single vector as a block of one, without a copy; a block as it is."""
    if vector.columns is not None:
        return vector
    return vector.like({name: tensor.unsqueeze(0) for name, tensor in vector.items()}, 1)


def column_dots(left: ParamVector, right: ParamVector) -> Tensor:
    """Inner products of corresponding columns, multiplied and added in float64."""
    pairs = zip(left.unstack(), right.unstack(), strict=True)
    return torch.cat([one.gram(other, exact=True).reshape(1) for one, other in pairs]).cpu()


def finite(product: ParamVector) -> ParamVector:
    """The product itself; a `SolverError` if it holds NaN or infinity."""
    if not product.is_finite():
        raise SolverError(
            "a product with H holds NaN or infinity: the model's outputs or their derivatives overflow. Check the "
            "model on its training data, or use a higher precision"
        )
    return product
