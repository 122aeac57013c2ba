"""Block Lanczos in the inner product of P⁻¹, without keeping the basis: what conjugate gradients are built on.

    V₁β₀ = R,      Z_j = P⁻¹V_j,      V_{j+1}β_{j+1} = A Z_j - V_jα_j - V_{j-1}β_jᵀ,      V_jᵀP⁻¹V_j = I

Directions that rounding cannot tell from zero are left out, so that equal columns and exhausted spaces are no special
cases: the block shrinks, and β has fewer rows than columns. How much was left out is known.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from whence.errors import SolverError
from whence.operators import LinearOperator
from whence.preconditioners import Preconditioner
from whence.solvers.certificate import BlockTridiagonal, cholesky, orthonormal_factors
from whence.vectors import ParamVector

__all__ = ["BlockLanczos", "BlockTridiagonal", "cholesky", "as_block", "column_dots", "finite", "rounding_of"]


@dataclass
class BlockLanczos:
    """Where the recurrence stands after j steps.

    Attributes:
        current: the next block V_{j+1}; None when the space is exhausted.
        weighted: P⁻¹V_{j+1}; the same object without a preconditioner.
        previous: V_j.
        T: all α and β so far.
        norm: the largest norm of A and of P that was met, ``‖Az‖/‖z‖`` and ``‖v‖²``.
        reach: the largest ``‖z‖²``: 1 without a preconditioner, else up to the norm of P⁻¹.
    """

    current: ParamVector | None
    weighted: ParamVector | None
    previous: ParamVector | None = None
    T: BlockTridiagonal = field(default_factory=BlockTridiagonal)
    norm: float = 0.0
    reach: float = 0.0

    @classmethod
    def begin(
        cls, block: ParamVector, preconditioner: Preconditioner | None
    ) -> tuple[BlockLanczos, Tensor, Tensor]:
        """From a block of starts: also returns β₀, and the Gram matrix of what was left out."""
        V, Z, beta, left_out, _ = _orthonormal(block, preconditioner, floor=0.0)
        return cls(V, Z), beta, left_out

    @property
    def noise(self) -> float:
        """T and its eigenvalues are known to the rounding of this; a power of two, so that it seldom changes."""
        return 2.0 ** math.ceil(math.log2(self.norm * self.reach)) if self.norm * self.reach > 0 else 0.0

    def step(
        self, A: LinearOperator, preconditioner: Preconditioner | None, *, slopes: bool = False
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
        before, after = column_dots(Z, Z), column_dots(W, W)
        self.norm = max(self.norm, float((after / before).max()) ** 0.5)
        if preconditioner is not None:
            self.norm = max(self.norm, float(column_dots(V, V).max()))
        self.reach = max(self.reach, float(before.max()))
        if self.previous is not None:
            W.axpy_(-1.0, self.previous.mix(T.below[-1].T))
            self.previous = None
        alpha = Z.gram(W, exact=True).cpu()
        W.axpy_(-1.0, V.mix(alpha))
        floor = 2 * rounding_of(W) * self.noise
        self.current, self.weighted, beta, left_out, missed = _orthonormal(
            W, preconditioner, floor=floor, basis=(V, Z)
        )
        alpha = alpha + missed
        T.diagonal.append(0.5 * (alpha + alpha.T))
        T.below.append(beta)
        self.previous = V
        skew = 0.5 * (alpha - alpha.T)  # by the errors of products; T goes on without it
        return Z, left_out + skew.T @ skew, noted


def _orthonormal(
    block: ParamVector,
    preconditioner: Preconditioner | None,
    *,
    floor: float,
    basis: tuple[ParamVector, ParamVector] | None = None,
) -> tuple[ParamVector | None, ParamVector | None, Tensor, Tensor, Tensor]:
    """Orthonormal columns V of a block in the inner product of P⁻¹, without what is rounding.

    Twice, because once leaves the errors that short columns magnify; between the two, what the block still has in
    common with ``basis`` (a block V and its P⁻¹V) is taken out.

    Returns:
        ``V, P⁻¹V, β, left_out, missed``: the block is ``Vβ``, plus ``basis·missed``, plus what was left out, of which
        the Gram matrix in the inner product of P⁻¹ is given.
    """
    q, eps = block.columns or 0, rounding_of(block)
    V: ParamVector | None = block
    Z = block if preconditioner is None else preconditioner.solve(block)
    beta, missed = torch.eye(q, dtype=torch.float64), torch.zeros(1, q, dtype=torch.float64)
    for turn in range(2):
        assert V is not None
        gram = V.gram(Z, exact=True).cpu()
        weights, factor = orthonormal_factors(gram, rounding=eps, floor=floor, outer=beta)
        beta = factor @ beta
        if not len(beta):
            V = None
            break
        V = V.mix(weights)
        if basis is not None and turn == 0:
            common = basis[1].gram(V, exact=True).cpu()
            missed = common @ beta
            V.axpy_(-1.0, basis[0].mix(common))
        # Anew: mixed like V it would keep the errors that short columns magnify.
        Z = V if preconditioner is None else preconditioner.solve(V)
    if len(beta) == q:
        return V, Z, beta, torch.zeros(q, q, dtype=torch.float64), missed
    rest = block.clone()
    if V is not None:
        rest.axpy_(-1.0, V.mix(beta))
    if basis is not None and len(missed) == basis[0].columns:
        rest.axpy_(-1.0, basis[0].mix(missed))
    gram = rest.gram(rest if preconditioner is None else preconditioner.solve(rest), exact=True).cpu()
    return V, None if V is None else Z, beta, gram, missed


def as_block(vector: ParamVector) -> ParamVector:
    """A single vector as a block of one, without a copy; a block as it is."""
    if vector.columns is not None:
        return vector
    return ParamVector({name: tensor.unsqueeze(0) for name, tensor in vector.items()}, columns=1)


def column_dots(left: ParamVector, right: ParamVector) -> Tensor:
    """Inner products of corresponding columns, multiplied and added in float64."""
    pairs = zip(left.unstack(), right.unstack(), strict=True)
    return torch.cat([one.gram(other, exact=True).reshape(1) for one, other in pairs]).cpu()


def rounding_of(vector: ParamVector) -> float:
    """Relative rounding of the coarsest of a vector's tensors."""
    return max(torch.finfo(tensor.dtype).eps for tensor in vector.values())


def finite(product: ParamVector) -> ParamVector:
    """The product itself; a `SolverError` if it holds NaN or infinity."""
    if not product.is_finite():
        raise SolverError(
            "a product with H holds NaN or infinity: the model's outputs or their derivatives overflow. Check the "
            "model on its training data, or use a higher precision"
        )
    return product
