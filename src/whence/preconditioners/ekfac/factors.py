"""`ekfac`: the factors of EK-FAC from two passes over the data, by way of curvlinops.

curvlinops finds Q_A, Q_G and E of linear layers and convolutions, and is told nothing of the task. The model that it
sees ends in ``z = Rᵀh`` under squared error, with a matrix R for each example such that ``R Rᵀ = S`` or, where R is
random, ``E[R Rᵀ] = S``:

    Gauss-Newton Hessian of ‖z‖²  =  2 Σ J R Rᵀ Jᵀ  =  2 Σ J S Jᵀ

So the loss, its scale and the terms that count are those of `whence.tasks`, whatever the model, and sequences may be
ragged. Padding enters the mean of ``a aᵀ``, on which the choice of a basis depends, and nothing else. Embeddings, which
curvlinops does not know, have two passes of their own over the same examples, of the same z or one drawn alike: see
`whence.preconditioners.ekfac.embeddings`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from whence.errors import OptionError
from whence.model.gauss_newton import ACTIVATION_BUDGET, GaussNewton
from whence.preconditioners.ekfac.embeddings import embedding_blocks
from whence.preconditioners.ekfac.ending import Ending
from whence.preconditioners.ekfac.layers import Layer, curvlinops, supported_layers
from whence.preconditioners.ekfac.preconditioner import Ekfac, KroneckerBlock, check_damping, nothing_covered
from whence.progress import ticker
from whence.tasks import Batch

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
        >>> from whence import ParamVector, Regression
        >>> data = [(torch.tensor([1.0, 0.0]), torch.ones(1)), (torch.tensor([0.0, 2.0]), torch.zeros(1))]
        >>> H = GaussNewton(nn.Linear(2, 1, bias=False).eval(), Regression(), data)  # diag(0.5, 2)
        >>> P = ekfac(H, 0.5, generator=torch.Generator().manual_seed(0))
        >>> P.solve(ParamVector({"weight": torch.ones(1, 2)}))["weight"]
        tensor([[1.0000, 0.4000]])
    """
    check_damping(damping)
    _check_options(gnh, examples, curvature, samples, widest)
    terms = gnh.terms
    with torch.enable_grad():
        layers, uncovered, outputs = supported_layers(gnh, widest)
        if not layers:
            raise nothing_covered(uncovered)
        embeddings = {name: layer for name, layer in layers.items() if isinstance(layer.module, nn.Embedding)}
        others = {name: layer for name, layer in layers.items() if name not in embeddings}
        if others:
            curvlinops()  # now, before any work, if it is missing
        exact = _is_exact(gnh, curvature, outputs)
        columns = outputs if exact else samples
        positions = torch.arange(len(terms))
        if examples is not None:
            order = torch.randperm(len(terms), generator=generator, device=generator.device)
            positions = order[:examples].sort().values.cpu()
        # the sum over the examples becomes an unbiased mean over terms with TermSet's weight
        scale = terms.weight(len(positions)) / (1 if exact else samples)
        parts = [part for part in (others, embeddings) if part]
        sizes = [_micro_batch(gnh, part, columns) for part in parts]
        blocks: dict[str, KroneckerBlock] = {}
        with ticker("EK-FAC", sum(2 * -(-len(positions) // size) for size in sizes)) as tick:
            for part, size in zip(parts, sizes, strict=True):
                ending = Ending(gnh, part, None if exact else samples, generator)
                batches = _Batches(gnh, positions, size, tick)
                if part is embeddings:
                    blocks |= embedding_blocks(ending, batches.examples, scale)
                else:
                    blocks |= _by_curvlinops(ending, batches, scale)
    return Ekfac(
        damping=float(damping),
        blocks=tuple(blocks[name] for name in layers),
        uncovered=uncovered,
        num_terms=int(terms.counts()[positions].sum()),
        num_passes=2 * columns * len(parts),
        curvature="exact" if exact else "sampled",
    )


class _Batches:
    """The drawn examples in micro-batches, as often as they are asked for."""

    def __init__(self, gnh: GaussNewton, positions: Tensor, size: int, tick: Callable[[], None]) -> None:
        self.terms, self.positions, self.size, self.tick = gnh.terms, positions, size, tick

    def examples(self) -> Iterator[Batch]:
        """The micro-batches."""
        for batch in self.terms.batches(self.positions, self.size):
            yield batch
            self.tick()

    def __iter__(self) -> Iterator[tuple[dict[str, Batch], Tensor]]:
        """The same as curvlinops reads them, beside targets of 0 for z."""
        for batch in self.examples():
            yield {"batch": batch}, torch.zeros(batch.size, 1)


def _by_curvlinops(ending: Ending, batches: _Batches, scale: float) -> dict[str, KroneckerBlock]:
    """The blocks of linear layers and convolutions, by their names."""
    with _hooks_restored(ending.layers):
        operator = curvlinops().EKFACLinearOperator(
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
    # the Hessian of squared error is twice the sum
    return dict(_blocks(operator.state_dict(), ending.layers, list(ending.leaves), 0.5 * scale))


def _blocks(
    state: Mapping[str, Any], layers: Mapping[str, Layer], order: list[str], scale: float
) -> Iterator[tuple[str, KroneckerBlock]]:
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
        yield name, KroneckerBlock(weight, bias, left.contiguous(), right.contiguous(), values)


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
