"""Three ways to ``∇ℓ(z)ᵀu``: derivatives along u, examples' gradients layer by layer, a gradient for each example.

The derivative of every term's loss along u is one dual-number forward (exact), or the difference of two plain
forwards at ``θ ± δu``. A batch's terms come out one by one, so scores per token are free.

    exact                ∇ℓ_iᵀ u = ⟨∂ℓ_i/∂h_i, J_i u⟩            one dual forward; several directions vectorised
    finite differences   (ℓ_i(θ+δu) - ℓ_i(θ-δu)) / 2δ          two forwards per direction
    layers               Σ_p ⟨u_p, ∂ℓ(z)/∂θ_p⟩                 one backward per batch, for all directions
    gradients            the same                              one backward per example, for all directions
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from whence.model.exact import tangent_only
from whence.model.finite_difference import FiniteDifferences, StepMemory
from whence.model.gauss_newton import GaussNewton
from whence.model.inspection import check_finite
from whence.tasks import Batch
from whence.vectors import ParamVector

__all__ = ["DirectionalDerivatives", "gradient_products", "layer_products", "loss_slopes"]


class DirectionalDerivatives:
    """Derivatives of per-term losses along the columns of a block.

    Args:
        gnh: the network, its task, and how its products are computed.
        directions: a block of k directions u.
        pilot: a batch to measure finite differences' steps on; what is computed later does not depend on the
            order in which batches come.
    """

    def __init__(self, gnh: GaussNewton, directions: ParamVector, pilot: Batch) -> None:
        self._gnh, self._directions = gnh, directions
        self._columns = directions.unstack()
        #: Its own: the operator's memory is left alone, on which its next product depends.
        self._differences: FiniteDifferences | None = None
        self._calibrations: list[tuple[StepMemory, float]] = []
        if gnh.product != "exact":
            self._differences = FiniteDifferences(gnh.network, pilot)
            self._calibrations = [self._differences.calibrate(pilot, column) for column in self._columns]

    def of_terms(self, batch: Batch) -> Tensor:
        """``∇ℓ_iᵀu`` for every term: ``[k, *losses]`` in float64, zero where the batch has no term."""
        task, differences = self._gnh.task, self._differences
        if differences is None:
            return self._exact(batch)
        rows = [
            differences.loss_derivatives(
                batch, column, calibration, lambda outputs: task.losses(outputs, batch)
            ).double()
            for column, calibration in zip(self._columns, self._calibrations, strict=True)
        ]
        return torch.stack(rows)

    def _exact(self, batch: Batch) -> Tensor:
        gnh = self._gnh
        if len(self._columns) > 1 and gnh.vectorises(batch, self._directions):
            with torch.no_grad():
                outputs = gnh.network.outputs(batch)
            check_finite(outputs)
            parts = gnh.tangents(outputs, batch, self._directions)
            return torch.cat([gnh.task.loss_derivatives(outputs, tangents, batch) for tangents in parts])
        rows = []
        for column in self._columns:
            outputs, tangent = tangent_only(gnh.network, batch, column)
            check_finite(outputs)
            rows.append(gnh.task.loss_derivatives(outputs, tangent, batch))
        return torch.stack(rows)


def gradient_products(gnh: GaussNewton, directions: ParamVector, batch: Batch) -> tuple[Tensor, float]:
    """``∇ℓ(z)ᵀu``, ``[k]`` in float64, and ``‖∇ℓ(z)‖²``, of one example; ``ℓ(z)`` is the mean over its terms.

    Each parameter's gradient is multiplied with all directions as soon as the backward pass has it, and dropped: a
    whole gradient never exists.
    """
    square = 0.0
    rows = {name: tensor.reshape(len(tensor), tensor[0].numel()) for name, tensor in directions.items()}
    total = torch.zeros(directions.columns or 1, dtype=torch.float64, device=batch.targets.device)

    def receive(name: str, gradient: Tensor) -> None:
        nonlocal square
        flat = gradient.reshape(-1).to(rows[name].dtype)
        total.add_(torch.mv(rows[name], flat))
        # of an example that the model is certain of, squares of entries are below what float32 can hold
        square += float(torch.linalg.vector_norm(flat, dtype=torch.float64)) ** 2

    leaves = gnh.network.leaves()
    outputs = gnh.network.outputs(batch, leaves)
    check_finite(outputs)
    loss = gnh.task.query_losses(outputs, batch).sum()
    gnh.network.pull_back(loss, leaves, torch.ones_like(loss), receive)
    return total, square


def loss_slopes(gnh: GaussNewton, batch: Batch) -> Callable[[Tensor], list[Tensor]]:
    """From a batch's outputs to ``∂ℓ(z)/∂h`` of its examples: what passes by layers go back from."""

    def slopes(outputs: Tensor) -> list[Tensor]:
        check_finite(outputs)
        with torch.enable_grad():
            leaf = outputs.detach().requires_grad_()
            return list(torch.autograd.grad(gnh.task.query_losses(leaf, batch).sum(), leaf))

    return slopes


def layer_products(
    gnh: GaussNewton, directions: ParamVector, batch: Batch, *, norms: bool
) -> tuple[Tensor, Tensor]:
    """The same of every example of a batch, ``[k, n]`` and ``[n]`` in float64, from one backward pass.

    Examples' gradients exist for one parameter at a time (`whence.model.layers`); without ``norms``, which are then 0,
    not always so.
    """
    network, n = gnh.network, batch.size
    total = torch.zeros(directions.columns or 1, n, dtype=torch.float64, device=batch.targets.device)
    squares = torch.zeros(n, dtype=torch.float64, device=batch.targets.device)

    for passed in gnh.example_gradients().passes(batch, loss_slopes(gnh, batch)):
        for name, own in directions.items():
            rows = network.whole(name, own)
            if not norms:
                products = passed.products(name, network.scaled_whole(name, rows))
                if products is not None:
                    total.add_(products)
                continue
            first, along = 0, rows.reshape(len(rows), -1)
            scale = network.scaled_whole(
                name, rows.new_ones(rows.shape[1:])
            )  # once, since processes must meet for it
            for few in passed.of_few([name], along.shape[1]):
                gradient = few.gradients(name)
                if gradient is None:
                    break
                flat = (gradient * scale).reshape(len(gradient), -1)
                columns = slice(first, first + len(flat))
                total[:, columns] += along @ flat.T
                squares[columns] += torch.linalg.vector_norm(flat, dim=1, dtype=torch.float64).square_()
                first = columns.stop
    return total, squares
