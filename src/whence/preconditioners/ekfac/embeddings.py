"""The blocks of embeddings, which curvlinops does not know.

An embedding is a linear layer whose inputs are one-hot. With g_t the gradient of its output at position t, its weight
``[vocabulary, width]`` has on an example the gradient

    G = Σ_t e_{token t} g_tᵀ

One-hot inputs have a diagonal covariance, whose eigenvectors are the identity. So only the width has a basis to find,
Q, the eigenvectors of ``Σ g_t g_tᵀ``; and the eigenvalues are

    E[v, o] = mean of ((G Q)[v, o])² = diagonal of (I ⊗ Q)ᵀ H (I ⊗ Q)

G is never made: its rows that are not zero are those of the tokens in the example, and E is added to where they stand.
Memory is E, and the gradients of the outputs of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn

from whence.preconditioners.ekfac.ending import Ending
from whence.preconditioners.ekfac.layers import Call
from whence.preconditioners.ekfac.preconditioner import KroneckerBlock
from whence.tasks import Batch

__all__ = ["embedding_blocks"]


def embedding_blocks(
    ending: Ending, batches: Callable[[], Iterable[Batch]], scale: float
) -> dict[str, KroneckerBlock]:
    """The block of every embedding, by its layer's name, from two passes: for the basis, then for E in it.

    Args:
        ending: the model and what its outputs are multiplied by; its layers are the embeddings.
        batches: the drawn examples in micro-batches, for each pass anew.
        scale: what the sum over examples and columns of z is multiplied by.
    """
    modules: dict[str, nn.Embedding] = {}
    for name, layer in ending.layers.items():
        assert isinstance(layer.module, nn.Embedding)
        modules[name] = layer.module
    weights = {name: module.weight.detach() for name, module in modules.items()}
    moments = {name: w.new_zeros(w.shape[1], w.shape[1]) for name, w in weights.items()}
    for batch in batches():
        z, calls = ending.run(batch)
        lookups = {name: _Lookups(modules[name], call) for name, call in calls.items()}
        for name, gradient in _gradients(z, calls):
            g = lookups[name].reaching(gradient)
            moments[name].addmm_(g.T, g)
    bases = {name: torch.linalg.eigh(moment).eigenvectors for name, moment in moments.items()}
    values = {name: torch.zeros_like(w) for name, w in weights.items()}
    for batch in batches():
        z, calls = ending.run(batch)
        lookups = {name: _Lookups(modules[name], call) for name, call in calls.items()}
        for name, gradient in _gradients(z, calls):
            lookups[name].add_squares(gradient, bases[name], values[name])
    return {
        name: KroneckerBlock(
            layer.names["weight"], None, None, bases[name].contiguous(), values[name].mul_(scale)
        )
        for name, layer in ending.layers.items()
    }


def _gradients(z: Tensor, calls: dict[str, Call]) -> Iterator[tuple[str, Tensor]]:
    """The gradients of the embeddings' outputs, for one column of z after another.

    An example's outputs depend on its own inputs alone, so the sum over the examples has the gradients of each.
    """
    edges = {name: call.edge for name, call in calls.items() if call.edge is not None}
    if not edges:
        return
    last = z.shape[1] - 1
    for k in range(z.shape[1]):
        found = torch.autograd.grad(
            z[:, k].sum(), list(edges.values()), allow_unused=True, retain_graph=k < last
        )
        yield from ((name, g) for name, g in zip(edges, found, strict=True) if g is not None)


class _Lookups:
    """What a batch looks up in an embedding: at every position a token, for which several positions may ask."""

    def __init__(self, module: nn.Embedding, call: Call) -> None:
        tokens = call.inputs[0].detach().long()
        tokens = tokens.reshape(len(tokens), -1)
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
