"""`Spanned`: an error bound that needs nothing of a preconditioner, from all that the solver has multiplied.

After j steps of block Lanczos, ``A Z = V B`` is known for ``Z = P⁻¹V`` of all blocks but the last, A = H + λ; B is the
block tridiagonal T with the β that leads out of the space. Of all positive semi-definite H that agree with these
products, ``N = HZ = VB - λZ``, the least is ``N (ZᵀN)⁻¹ Nᵀ``. The error of an iterate with the residual r is largest
for it:

    ‖e‖²_A = rᵀA⁻¹r ≤ rᵀ(λ + N (ZᵀN)⁻¹ Nᵀ)⁻¹r = min_y (rᵀr - 2 yᵀNᵀr + yᵀ(λZᵀN + NᵀN)y) / λ

and any y bounds it. Without a preconditioner this is the rule of Gauss and Radau with its node at λ, which needs two
blocks. With one, that rule has a node below the eigenvalues of P⁻¹A; where nobody knows these, as of EK-FAC, this bound
takes its place, and needs the inner products of all V: one vector of the parameters' size for each column and step.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from whence.preconditioners import Preconditioner
from whence.solvers.certificate import BlockTridiagonal
from whence.vectors import ParamVector

__all__ = ["Spanned"]

#: Roundings of a product that are allowed for.
_MARGIN = 8.0


def _empty() -> Tensor:
    return torch.zeros(0, 0, dtype=torch.float64)


@dataclass
class Spanned:
    """All blocks of the basis, and their inner products in float64.

    Attributes:
        blocks: V_1 … V_{j+1}.
        plain, once, twice: VᵀV, VᵀP⁻¹V and VᵀP⁻²V.
    """

    blocks: list[ParamVector] = field(default_factory=list)
    plain: Tensor = field(default_factory=_empty)
    once: Tensor = field(default_factory=_empty)
    twice: Tensor = field(default_factory=_empty)

    def add(self, V: ParamVector, Z: ParamVector, preconditioner: Preconditioner) -> None:
        """The next block, with ``Z = P⁻¹V``. Costs a solve with P."""
        self.blocks.append(V)
        self.plain, self.once, self.twice = (
            self._bordered(matrix, other)
            for matrix, other in (
                (self.plain, V),
                (self.once, Z),
                (self.twice, preconditioner.solve(Z)),
            )
        )

    def _bordered(self, matrix: Tensor, other: ParamVector) -> Tensor:
        """With the inner products of all blocks with another form of the last."""
        border = torch.cat([block.gram(other, exact=True).cpu() for block in self.blocks])
        above, corner = border[: len(matrix)], border[len(matrix) :]
        corner = 0.5 * (corner + corner.T)
        return torch.cat([torch.cat([matrix, above], 1), torch.cat([above.T, corner], 1)])

    def energy(self, zeta: Tensor, T: BlockTridiagonal, damping: float, rounding: float) -> Tensor:
        """Above ``‖e‖²_A``, one number per column.

        Products that are rounded to ``ε‖A‖`` change ``2 yᵀNᵀr`` by up to ``ε‖A‖·‖Zy‖·‖r‖``, and ``‖Zy‖ ≤ ‖r‖/λ``.

        Args:
            zeta: the residual in the last block.
            T: of the steps so far.
            damping: λ.
            rounding: ε‖A‖, of the products.
        """
        B = T.extended()
        total, known = B.shape
        r = torch.zeros(total, zeta.shape[1], dtype=torch.float64)
        r[total - len(zeta) :] = zeta
        of_Z, Z_and_Z = self.once[:known], self.twice[:known, :known]
        of_N = B.T @ self.plain - damping * of_Z  # NᵀV
        N_and_N = of_N @ B - damping * (B.T @ of_Z.T - damping * Z_and_Z)
        inner = damping * (of_Z @ B - damping * Z_and_Z) + N_and_N
        inner, along = 0.5 * (inner + inner.T), of_N @ r
        # any y will do: directions whose curvature may be rounding are not asked
        values, vectors = torch.linalg.eigh(inner)
        noise = _MARGIN * damping * rounding * float(Z_and_Z.diagonal().max())
        safe = values > max(noise, 1e-12 * float(values[-1]))
        y = vectors[:, safe] @ ((vectors[:, safe].T @ along) / values[safe].unsqueeze(1))
        square = torch.sum(r * (self.plain @ r), dim=0)
        left = square - torch.sum(y * (2 * along - inner @ y), dim=0)
        return (left.clamp_min(0.0) + _MARGIN * rounding / damping * square) / damping
