"""What is proven about an iterate of conjugate gradients, from its recurrence and from one product.

The rules of Gauss and Radau (`whence.spectrum.lanczos.BlockTridiagonal`) bound the error of exact arithmetic. Here they
meet what is not exact: μ may be wrong, products and sums are rounded, and directions too short to tell from noise are
left out of the space.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from whence.preconditioners import Preconditioner
from whence.solvers.cg_state import CGState
from whence.spectrum.lanczos import BlockTridiagonal, column_dots
from whence.vectors import ParamVector

__all__ = ["ErrorBounds"]

#: Eigenvalues are believed to so many roundings of the products.
_MARGIN = 64.0


@dataclass(frozen=True)
class ErrorBounds:
    """Bounds of ``‖e‖_A``, A = H + λ, written into a `CGState`.

    Attributes:
        damping: λ.
        preconditioner: P, or None for the identity.
        largest: an upper bound of the eigenvalues of H, or None.
    """

    damping: float
    preconditioner: Preconditioner | None
    largest: float | None

    @property
    def smallest(self) -> float:
        """μ, below all eigenvalues of P⁻¹A."""
        return self.damping if self.preconditioner is None else self.preconditioner.smallest

    def after_step(self, g: ParamVector, state: CGState, *, decrease: Tensor, length: Tensor) -> None:
        """What is proven about the iterate: the best of all bounds, an earlier one less the decrease since included.

        Rounding changes the residual by ``‖A‖`` times the length of what was added to x, and by the length of what the
        residual is made of; in both, columns may cancel.

        Args:
            g: the right-hand sides.
            state: after the step.
            decrease: of ``‖e‖²_A``, per column.
            length: of what was added to x, per column, at most.
        """
        x, V, T, zeta = state.iterate, state.lanczos.current, state.lanczos.T, state.zeta
        weighted = zeta.square().sum(0)  # ‖r‖² in the norm of P⁻¹
        square, along = weighted, torch.zeros_like(weighted)
        parts = torch.zeros_like(weighted)
        if V is not None:
            along = torch.sum(zeta * V.gram(x, exact=True).cpu(), dim=0)
            gram = V.gram(V, exact=True).cpu()
            square = torch.sum(zeta * (gram @ zeta), dim=0)
            parts = gram.diagonal().sqrt() @ zeta.abs()
        state.residual = _relative(square, g)
        state.score_rms = self._score_rms(x, g, along)
        length = state.lanczos.norm * torch.maximum(length, column_dots(x, x).sqrt()) + parts
        state.rounding = torch.hypot(state.rounding, g.rounding * length / math.sqrt(self.damping))
        node = self._node(g, state)
        if state.trusted and state.iteration and T.pivot(node) is None:
            self._contradicted(state)
            if state.failed:
                return
        # a bound from all of the basis may be all but exact: what a step took off it would be off by its rounding
        earlier = state.energy * (1 + 8 * g.rounding) - decrease if state.spanned is None else state.energy
        candidates = [square / self.damping, earlier]
        if state.spanned is not None and state.iteration and V is not None:
            noise = g.rounding * state.lanczos.norm
            candidates.append(state.spanned.energy(zeta, T, self.damping, noise))
        if state.trusted:
            candidates.append(weighted / self.smallest)
            if V is not None and state.pivot is not None:
                radau = T.energy(zeta, state.pivot, node)
                candidates += [] if radau is None else [radau]
        state.energy = torch.stack(candidates).amin(0).clamp_min(0.0)
        state.slack = state.left_out / math.sqrt(self.smallest) + state.rounding
        state.upper = state.energy.sqrt() + state.slack
        state.lower = (self._from_largest(g, state, square).sqrt() - state.slack).clamp_min(0.0)

    def after_measurement(
        self, g: ParamVector, state: CGState, residual: ParamVector, curvature: Tensor | None
    ) -> None:
        """The same from a measured residual ``g - Ax``, and from ``ZᵀAZ`` of the basis' next block, if there is one."""
        x, lanczos = state.iterate, state.lanczos
        state.residual = _relative(column_dots(residual, residual), g)
        state.score_rms = self._score_rms(x, g, column_dots(residual, x))
        lower = state.lower
        if curvature is not None:
            alpha = 0.5 * (curvature + curvature.T)
            lanczos.T = BlockTridiagonal([*lanczos.T.diagonal, alpha], lanczos.T.below)
            pivot = lanczos.T.pivot()
            if pivot is None:
                state.fail("A direction without positive curvature was met", self.damping)
            else:
                gauss = torch.sum(state.zeta * torch.cholesky_solve(state.zeta, pivot), dim=0)
                lower = torch.maximum(lower, gauss.sqrt())
                if state.trusted and lanczos.T.pivot(self._node(g, state)) is None:
                    self._contradicted(state)
        if state.failed:
            return
        unseen = residual.clone()  # by the recurrence
        if lanczos.current is not None:
            unseen.axpy_(-1.0, lanczos.current.mix(state.zeta))
        drift = self._energy_norm(unseen, state)
        upper = torch.minimum(state.energy.sqrt() + drift, self._energy_norm(residual, state))
        state.upper = upper + state.rounding
        state.lower = torch.minimum((lower - drift - state.rounding).clamp_min(0.0), state.upper)

    def _node(self, g: ParamVector, state: CGState) -> float:
        """μ, less what the rounding of products can do to an eigenvalue."""
        return self.smallest - min(_MARGIN * g.rounding * state.lanczos.noise, 0.5 * self.smallest)

    def _from_largest(self, g: ParamVector, state: CGState, square: Tensor) -> Tensor:
        """A lower bound of ``‖e‖²_A`` that rests on `largest`."""
        if self.largest is None or not state.capped:
            return torch.zeros_like(square)
        top = self.largest + self.damping
        if self.preconditioner is not None or state.pivot is None or state.lanczos.current is None:
            return square / top
        node = top + _MARGIN * g.rounding * state.lanczos.noise
        energy = state.lanczos.T.energy(state.zeta, state.pivot, node, side=-1.0)
        if energy is None:
            state.capped = False
            state.events.append(
                f"Iteration {state.iteration} met an eigenvalue of H above largest = {self.largest:.4g}: the lower "
                "bound that rests on it is given up."
            )
            return torch.zeros_like(square)
        return energy

    def _contradicted(self, state: CGState) -> None:
        """T shows an eigenvalue below μ: bounds that rest on μ are void, the earlier ones, too."""
        state.trusted = False
        state.energy = torch.full_like(state.energy, math.inf)
        if self.preconditioner is not None:
            what = f"an eigenvalue of P⁻¹(H + λ) below the preconditioner's smallest = {self.smallest:.4g}"
        elif state.lanczos.T.pivot(0.5 * self.damping) is not None:
            what = f"less curvature than λ = {self.damping:.4g}: "
            what += "products are inexact, or H is not positive semi-definite"
        else:
            state.fail("An eigenvalue of H below -λ/2 was met", self.damping)
            return
        state.events.append(
            f"Iteration {state.iteration} met {what}. The error is bounded by ‖r‖/√λ from here on."
        )

    def _energy_norm(self, vector: ParamVector, state: CGState) -> Tensor:
        """An upper bound of ``‖A⁻¹v‖_A``: ``‖v‖/√λ``, or ``‖v‖_{P⁻¹}/√μ`` where μ is known."""
        plain = column_dots(vector, vector).sqrt() / math.sqrt(self.damping)
        if self.preconditioner is None or not state.trusted:
            return plain
        weighted = column_dots(vector, self.preconditioner.solve(vector)).clamp_min(0.0).sqrt()
        return torch.minimum(plain, weighted / math.sqrt(self.smallest))

    def _score_rms(self, x: ParamVector, g: ParamVector, along: Tensor) -> Tensor:
        """``‖x‖_H`` from ``xᵀHx = gᵀx - rᵀx - λ‖x‖²``, and not below the rounding of these."""
        whole, damped = column_dots(x, g) - along, self.damping * column_dots(x, x)
        return torch.maximum(whole - damped, x.rounding * (whole.abs() + damped)).sqrt()


def _relative(square: Tensor, g: ParamVector) -> Tensor:
    norm = column_dots(g, g).sqrt().clamp_min(torch.finfo(torch.float64).tiny)
    return square.clamp_min(0.0).sqrt() / norm
