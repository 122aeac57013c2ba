"""`KroneckerBlock`, the factors of one layer, and `measure_factors`, which finds them in two passes over the data.

The model is differentiated as if it ended in ``z = Rᵀh``, with a matrix R for each example such that ``R Rᵀ = S``, the
Hessian of the task's loss in the outputs h. R may be random, with ``E[R Rᵀ] = S``. The gradients of z then have H as
their second moment, whatever the task. Linear layers and convolutions are measured by curvlinops, which is told nothing
of the task. Embeddings, which it does not know, have two passes of their own. Derived in docs/math.md, "EK-FAC".
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from whence.errors import ModelError, VectorError
from whence.libraries import load_library
from whence.model.gauss_newton import ACTIVATION_BUDGET, GaussNewton
from whence.model.inspection import check_finite
from whence.preconditioners.ekfac_layers import Call, Layer, covered_leaves, watching, why_not_called_well
from whence.progress import ticker
from whence.tasks import Batch, Task
from whence.vectors import ParamVector

__all__ = ["KroneckerBlock", "measure_factors"]


@dataclass(frozen=True, eq=False)
class KroneckerBlock:
    """The factors of one layer: its block of H is ``(Q_G ⊗ Q_A) diag(E) (Q_G ⊗ Q_A)ᵀ``, weight and bias together.

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


def measure_factors(
    gnh: GaussNewton,
    layers: Mapping[str, Layer],
    positions: Tensor,
    *,
    columns: int,
    exact: bool,
    generator: torch.Generator,
) -> tuple[dict[str, KroneckerBlock], int]:
    """The factors of every layer by its name, and the backward passes over the examples that this took.

    Args:
        gnh: H: model, task and data.
        layers: those to cover.
        positions: the examples to use; they stand for all.
        columns: of z: the outputs of an example where R is the root of S, the number of draws where it is random.
        exact: which of the two R is.
        generator: draws R.
    """
    embeddings = {name: layer for name, layer in layers.items() if isinstance(layer.module, nn.Embedding)}
    others = {name: layer for name, layer in layers.items() if name not in embeddings}
    if others:
        _curvlinops()  # now, before any work, if it is missing
    # the sum over the examples becomes an unbiased mean over terms with TermSet's weight
    scale = gnh.terms.weight(len(positions)) / (1 if exact else columns)
    parts = [part for part in (others, embeddings) if part]
    sizes = [_micro_batch(gnh, part, columns) for part in parts]
    blocks: dict[str, KroneckerBlock] = {}
    with ticker("EK-FAC", sum(2 * -(-len(positions) // size) for size in sizes)) as tick:
        for part, size in zip(parts, sizes, strict=True):
            ending = _Ending(gnh, part, None if exact else columns, generator)
            batches = _Batches(gnh, positions, size, tick)
            measure = _of_embeddings if part is embeddings else _by_curvlinops
            blocks |= measure(ending, batches, scale)
    return blocks, 2 * columns * len(parts)


def _micro_batch(gnh: GaussNewton, layers: Mapping[str, Layer], columns: int) -> int:
    """Examples per pass whose gradients of the largest layer, and whose roots, fit in the budget.

    Examples have no gradients of an embedding's weight, but of its outputs, which are activations.
    """
    largest = max(
        0 if isinstance(layer.module, nn.Embedding) else layer.module.weight.numel()
        for layer in layers.values()
    )
    each = max(largest, columns**2) * max(layer.module.weight.element_size() for layer in layers.values())
    return int(min(max(ACTIVATION_BUDGET // each, 1), gnh.micro_batch))


class _Batches:
    """The examples in micro-batches, as often as they are asked for."""

    def __init__(self, gnh: GaussNewton, positions: Tensor, size: int, tick: Callable[[], None]) -> None:
        self.terms, self.positions, self.size, self.tick = gnh.terms, positions, size, tick

    def __iter__(self) -> Iterator[tuple[dict[str, Batch], Tensor]]:
        """As curvlinops reads them, beside targets of 0 for z."""
        for batch in self.terms.batches(self.positions, self.size):
            yield {"batch": batch}, torch.zeros(batch.size, 1)
            self.tick()


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
        return self.run(inputs["batch"])[0]

    def run(self, batch: Batch) -> tuple[Tensor, dict[str, Call]]:
        """``z``, ``[n, columns]``, and the one call of each layer."""
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
        once = {name: call for name, (call,) in calls.items()}
        rows = outputs.reshape(batch.size, -1)
        rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
        if self.samples is None:
            return torch.einsum("nm,nmc->nc", rows, _root(self.task, outputs.detach(), batch).to(rows)), once
        columns = []
        for _ in range(self.samples):
            residual = self.task.sample_residual(outputs.detach(), batch, self.generator)
            assert residual is not None  # `ekfac` has seen to that
            columns.append(torch.linalg.vecdot(rows, residual.reshape(batch.size, -1).to(rows)))
        return torch.stack(columns, 1), once


def _root(task: Task, outputs: Tensor, batch: Batch) -> Tensor:
    """``R`` with ``R Rᵀ = S``, ``[n, m, m]``, for all m outputs of each example."""
    n, m = batch.size, outputs[0].numel()
    identity = torch.eye(m, dtype=outputs.dtype, device=outputs.device)
    tangents = identity.reshape(m, 1, *outputs.shape[1:]).expand(m, *outputs.shape)
    hessians = task.hessian_product(outputs, tangents, batch).reshape(m, n, m).transpose(0, 1)
    values, vectors = torch.linalg.eigh(hessians.to(torch.promote_types(hessians.dtype, torch.float32)))
    root: Tensor = vectors * values.clamp_min(0).sqrt().unsqueeze(1)
    return root


# --- linear layers and convolutions ------------------------------------------------------------------------


def _by_curvlinops(ending: _Ending, batches: _Batches, scale: float) -> dict[str, KroneckerBlock]:
    """The factors of linear layers and convolutions, the sums over examples times ``scale``."""
    with _hooks_restored(ending.layers):
        operator = _curvlinops().EKFACLinearOperator(
            ending,
            nn.MSELoss(reduction="sum"),
            list(ending.leaves.values()),
            batches,
            check_deterministic=False,
            fisher_type="type-2",
            num_per_example_loss_terms=1,
            separate_weight_and_bias=False,
            num_data=len(batches.positions),
            batch_size_fn=lambda inputs: inputs["batch"].size,
        )
        operator.compute_kronecker_factors()
        operator.compute_eigenvalue_correction()
    state, order = operator.state_dict(), list(ending.leaves)
    blocks = {}
    for name, layer in ending.layers.items():
        key = f"model.{name}" if name else "model"
        weight, bias = layer.names.get("weight"), layer.names.get("bias")
        left = state["gradient_covariances_eigenvectors"][key]
        right = left.new_ones(1, 1) if weight is None else state["input_covariances_eigenvectors"][key]
        values = state["corrected_eigenvalues"][key]
        if not isinstance(values, Tensor):  # a weight or a bias alone stands under its position
            (position,) = (order.index(covered) for covered in layer.names.values())
            values = values[position]
        # The Hessian of squared error is twice the sum. Where the squares are expanded, rounding may leave their sum a
        # little below 0.
        values = values.reshape(len(left), len(right)).mul(0.5 * scale).clamp_min_(0)
        blocks[name] = KroneckerBlock(weight, bias, left.contiguous(), right.contiguous(), values)
    return blocks


def _curvlinops() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # one of its libraries compiles with torch.jit
        return load_library("curvlinops", "curvlinops", "for EK-FAC")


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


# --- embeddings --------------------------------------------------------------------------------------------


def _of_embeddings(ending: _Ending, batches: _Batches, scale: float) -> dict[str, KroneckerBlock]:
    """The factors of embeddings: ``E[v, o] = mean of ((G Q)[v, o])²`` with Q the eigenvectors of ``Σ g_t g_tᵀ``.

    ``G = Σ_t e_{token t} g_tᵀ`` is never made: its rows that are not zero are those of the tokens in the example, and E
    is added to where they stand. Memory is E, and the gradients of the outputs of a micro-batch.
    """
    weights = {name: layer.module.weight.detach() for name, layer in ending.layers.items()}
    moments = {name: w.new_zeros(w.shape[1], w.shape[1]) for name, w in weights.items()}
    for name, lookups, g in _output_gradients(ending, batches):
        g = lookups.reaching(g)
        moments[name].addmm_(g.T, g)
    bases = {name: torch.linalg.eigh(moment).eigenvectors for name, moment in moments.items()}
    values = {name: torch.zeros_like(w) for name, w in weights.items()}
    for name, lookups, g in _output_gradients(ending, batches):
        lookups.add_squares(g, bases[name], values[name])
    return {
        name: KroneckerBlock(
            layer.names["weight"], None, None, bases[name].contiguous(), values[name].mul_(scale)
        )
        for name, layer in ending.layers.items()
    }


def _output_gradients(ending: _Ending, batches: _Batches) -> Iterator[tuple[str, _Lookups, Tensor]]:
    """The gradients of the embeddings' outputs in a pass, for one column of z after another.

    An example's outputs depend on its own inputs alone, so the sum over the examples has the gradients of each.
    """
    for inputs, _ in batches:
        z, calls = ending.run(inputs["batch"])
        edges = {name: call.edge for name, call in calls.items() if call.edge is not None}
        lookups = {name: _Lookups(ending.layers[name].module, calls[name].inputs[0]) for name in edges}
        for k in range(z.shape[1] if edges else 0):
            keep = k < z.shape[1] - 1
            found = torch.autograd.grad(
                z[:, k].sum(), list(edges.values()), allow_unused=True, retain_graph=keep
            )
            yield from ((n, lookups[n], g) for n, g in zip(edges, found, strict=True) if g is not None)


class _Lookups:
    """What a batch looks up in an embedding: at every position a token, for which several positions may ask."""

    def __init__(self, module: nn.Module, tokens: Tensor) -> None:
        assert isinstance(module, nn.Embedding)
        tokens = tokens.detach().long().reshape(len(tokens), -1)
        # autograd gives the padding's row no gradient, and H has no curvature there
        self.held = None if module.padding_idx is None else (tokens == module.padding_idx).reshape(-1, 1)
        examples = torch.arange(len(tokens), device=tokens.device).unsqueeze(1)
        # the rows of all examples' G that are not zero, and which of them each position is added to
        pairs, places = torch.unique(examples * module.num_embeddings + tokens, return_inverse=True)
        self.rows, self.places = pairs % module.num_embeddings, places.flatten()

    def reaching(self, gradient: Tensor) -> Tensor:
        """The outputs' gradients that reach the weight, a row for each position."""
        g = gradient.reshape(len(self.places), -1)
        return g if self.held is None else g.masked_fill(self.held, 0)

    def add_squares(self, gradient: Tensor, basis: Tensor, out: Tensor) -> None:
        """Add ``(G Q)²`` of every example: within one, the positions of a token are summed before they are squared."""
        g = self.reaching(gradient)
        G = g.new_zeros(len(self.rows), g.shape[1]).index_add_(0, self.places, g)
        out.index_add_(0, self.rows, (G @ basis).square_())
