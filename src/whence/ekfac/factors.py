"""`ekfac`: the factors of EK-FAC from two passes over the data, by way of curvlinops.

curvlinops finds Q_A, Q_G and E, and is told nothing of the task. The model that it sees ends in ``z = Rᵀh`` under
squared error, with a matrix R for each example such that ``R Rᵀ = S`` or, where R is random, ``E[R Rᵀ] = S``:

    Gauss-Newton Hessian of ‖z‖²  =  2 Σ J R Rᵀ Jᵀ  =  2 Σ J S Jᵀ

So the loss, its scale and the terms that count are those of `whence.tasks`, whatever the model, and sequences may be
ragged. Padding enters the mean of ``a aᵀ``, on which the choice of a basis depends, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from whence.ekfac.layers import (
    Layer,
    covered_leaves,
    curvlinops,
    supported_layers,
    watching,
    why_not_called_well,
)
from whence.ekfac.preconditioner import Ekfac, KroneckerBlock, check_damping, nothing_covered
from whence.errors import ModelError, OptionError
from whence.gauss_newton import ACTIVATION_BUDGET, GaussNewton
from whence.inspection import check_finite
from whence.progress import ticker
from whence.tasks import Batch, Task

__all__ = ["ekfac"]

Curvature = Literal["auto", "exact", "sampled"]

#: Examples with up to this many outputs get the exact curvature by default: a backward pass for each output.
_EXACT_OUTPUTS = 16


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

    Covers Linear layers and ungrouped 2d convolutions, where a layer's parameters belong to it alone and it is called
    once in a forward pass, with a row for each example. Every other parameter is in the result's ``uncovered``, with
    the reason. The model is left as it is.

    Args:
        gnh: the operator H: model, task, data and selected parameters.
        damping: λ.
        generator: draws the examples, and the residuals of a sampled curvature.
        examples: how many examples to use, drawn without repetition; all by default.
        curvature: ``"exact"`` takes a backward pass for every output of an example: K, times the length of a sequence.
            ``"sampled"`` takes ``samples`` of them, each with residuals drawn anew, and E is unbiased. ``"auto"`` is
            exact up to 16 outputs.
        samples: draws per example and pass of a sampled curvature.
        widest: layers with more inputs or outputs are not covered; their factors are square matrices of that size.

    Example:
        >>> from whence import ParamVector, Regression
        >>> data = [(torch.tensor([1.0, 0.0]), torch.ones(1)), (torch.tensor([0.0, 2.0]), torch.zeros(1))]
        >>> H = GaussNewton(nn.Linear(2, 1, bias=False).eval(), Regression(), data)  # diag(0.5, 2)
        >>> P = ekfac(H, 0.5, generator=torch.Generator().manual_seed(0))
        >>> P.solve(ParamVector({"weight": torch.ones(1, 2)}))["weight"]
        tensor([[1.0000, 0.4000]])
    """
    check_damping(damping)
    _check_options(gnh, examples, curvature, samples, widest)
    library = curvlinops()
    terms = gnh.terms
    with torch.enable_grad():
        layers, uncovered, outputs = supported_layers(gnh, widest)
        if not layers:
            raise nothing_covered(uncovered)
        exact = _is_exact(gnh, curvature, outputs)
        columns = outputs if exact else samples
        positions = torch.arange(len(terms))
        if examples is not None:
            order = torch.randperm(len(terms), generator=generator, device=generator.device)
            positions = order[:examples].sort().values.cpu()
        ending = _Ending(gnh, layers, None if exact else samples, generator)
        size = _micro_batch(gnh, layers, columns)
        with _hooks_restored(layers), ticker("EK-FAC", 2 * -(-len(positions) // size)) as tick:
            operator = library.EKFACLinearOperator(
                ending,
                nn.MSELoss(reduction="sum"),
                list(ending.leaves.values()),
                _Batches(gnh, positions, size, tick),
                check_deterministic=False,
                fisher_type="type-2",
                num_per_example_loss_terms=1,
                separate_weight_and_bias=False,
                num_data=len(positions),
                batch_size_fn=lambda inputs: inputs["batch"].size,
            )
            operator.compute_kronecker_factors()
            operator.compute_eigenvalue_correction()
    # curvlinops gives the sum over the examples, twice over; an unbiased mean over terms has TermSet's weight
    scale = 0.5 * terms.weight(len(positions)) / (1 if exact else samples)
    return Ekfac(
        damping=float(damping),
        blocks=tuple(_blocks(operator.state_dict(), layers, list(ending.leaves), scale)),
        uncovered=uncovered,
        num_terms=int(terms.counts()[positions].sum()),
        num_passes=2 * columns,
        curvature="exact" if exact else "sampled",
    )


class _Ending(nn.Module):
    """The model, followed by ``z = Rᵀh``, a row for each example.

    With ``samples``, a column of z is ``Σ_i ⟨r_i, h_i⟩`` over the example's terms, with residuals drawn anew in every
    pass: independent r_i have ``E[(Σ J_i r_i)(Σ J_i r_i)ᵀ] = Σ J_i S_i J_iᵀ``. Without, R is the root of all of the
    example's S_i together, block by block, and no column mixes two terms.
    """

    def __init__(
        self, gnh: GaussNewton, layers: Mapping[str, Layer], samples: int | None, generator: torch.Generator
    ) -> None:
        super().__init__()
        self.training = False
        self.model = gnh.network.model
        self.network, self.task = gnh.network, gnh.task
        self.layers, self.samples, self.generator = layers, samples, generator
        self.leaves = covered_leaves(gnh, layers)

    def forward(self, inputs: Mapping[str, Batch]) -> Tensor:
        batch = inputs["batch"]
        with watching(self.layers) as calls:
            outputs = self.network.outputs(batch, self.leaves)
        for name, layer in self.layers.items():
            reason = why_not_called_well(layer, calls[name], batch.size)
            if reason is not None:
                raise ModelError(
                    f"the weight of {name!r} is {reason}, from {batch.name(0)} on, though not on the longest: what "
                    "the model calls depends on its inputs. Use the Nyström preconditioner instead"
                )
        check_finite(outputs)
        rows = outputs.reshape(batch.size, -1)
        rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
        if self.samples is None:
            return torch.einsum("nm,nmc->nc", rows, _root(self.task, outputs.detach(), batch).to(rows))
        columns = []
        for _ in range(self.samples):
            residual = self.task.sample_residual(outputs.detach(), batch, self.generator)
            assert residual is not None  # `_is_exact` has seen to that
            columns.append(torch.linalg.vecdot(rows, residual.reshape(batch.size, -1).to(rows)))
        return torch.stack(columns, 1)


def _root(task: Task, outputs: Tensor, batch: Batch) -> Tensor:
    """``R`` with ``R Rᵀ = S``, ``[n, m, m]``, for all m outputs of each example."""
    n, m = batch.size, outputs[0].numel()
    identity = torch.eye(m, dtype=outputs.dtype, device=outputs.device)
    tangents = identity.reshape(m, 1, *outputs.shape[1:]).expand(m, *outputs.shape)
    hessians = task.hessian_product(outputs, tangents, batch).reshape(m, n, m).transpose(0, 1)
    values, vectors = torch.linalg.eigh(hessians.to(torch.promote_types(hessians.dtype, torch.float32)))
    root: Tensor = vectors * values.clamp_min(0).sqrt().unsqueeze(1)
    return root


class _Batches:
    """The drawn examples in micro-batches, as often as they are asked for."""

    def __init__(self, gnh: GaussNewton, positions: Tensor, size: int, tick: Callable[[], None]) -> None:
        self.terms, self.positions, self.size, self.tick = gnh.terms, positions, size, tick

    def __iter__(self) -> Iterator[tuple[dict[str, Batch], Tensor]]:
        for batch in self.terms.batches(self.positions, self.size):
            yield {"batch": batch}, torch.zeros(batch.size, 1)
            self.tick()


def _blocks(
    state: Mapping[str, Any], layers: Mapping[str, Layer], order: list[str], scale: float
) -> Iterator[KroneckerBlock]:
    """The factors in curvlinops' state, rescaled."""
    for name, layer in layers.items():
        key = f"model.{name}" if name else "model"
        weight, bias = layer.names.get("weight"), layer.names.get("bias")
        left = state["gradient_covariances_eigenvectors"][key]
        right = left.new_ones(1, 1) if weight is None else state["input_covariances_eigenvectors"][key]
        values = state["corrected_eigenvalues"][key]
        if not isinstance(values, Tensor):  # a weight or a bias alone stands under its position
            (position,) = (order.index(covered) for covered in layer.names.values())
            values = values[position]
        # where it expands the squares, rounding may leave a sum of them a little below 0
        values = values.reshape(len(left), len(right)).mul(scale).clamp_min_(0)
        yield KroneckerBlock(weight, bias, left.contiguous(), right.contiguous(), values)


def _micro_batch(gnh: GaussNewton, layers: Mapping[str, Layer], columns: int) -> int:
    """Examples per pass whose gradients of the largest layer, and whose roots, fit in the budget."""
    largest = max(layer.module.weight.numel() for layer in layers.values())
    each = max(largest, columns**2) * max(layer.module.weight.element_size() for layer in layers.values())
    return int(min(max(ACTIVATION_BUDGET // each, 1), gnh.micro_batch))


@contextmanager
def _hooks_restored(layers: Mapping[str, Layer]) -> Iterator[None]:
    """Remove the hooks that curvlinops leaves on the layers after an error."""
    modules = [layer.module for layer in layers.values()]
    hooks = [own for module in modules for own in (module._forward_hooks, module._forward_pre_hooks)]
    before = [set(own) for own in hooks]
    try:
        yield
    finally:
        for own, kept in zip(hooks, before, strict=True):
            for key in set(own) - kept:
                del own[key]


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
    if curvature not in ("auto", "exact", "sampled"):
        raise OptionError(f"curvature is {curvature!r}; it must be 'auto', 'exact' or 'sampled'")
    if examples is not None and not 1 <= examples <= len(gnh.terms):
        raise OptionError(
            f"examples is {examples}; it must be in 1..{len(gnh.terms)}, the examples in the data"
        )
    for name, value in (("samples", samples), ("widest", widest)):
        if value < 1:
            raise OptionError(f"{name} is {value}; it must be at least 1")
