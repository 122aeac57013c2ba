"""Similarity of examples, as the paper's Section 5 has it: by gradients, and by influence.

    gradient-similarity    ⟨∇ℓ(z), ∇ℓ(z')⟩ / ‖∇ℓ(z)‖‖∇ℓ(z')‖
    influence-similarity   ⟨∇ℓ(z), (H+λ)⁻¹∇ℓ(z')⟩ / √(self-influence of z · self-influence of z')

Both are 1 for z = z'. The inverse Hessian weighs down what any two examples have in common.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from whence.arguments import checked
from whence.errors import OptionError
from whence.solvers import Solution
from whence.vectors import ParamVector

__all__ = ["cosines", "gradient_similarity", "influence_similarity", "similarity_of_chains"]


@checked()
def gradient_similarity(gradients: ParamVector) -> Tensor:
    """Cosines between the columns of a block of gradients, ``[k, k]`` in float64.

    Example:
        >>> gradients = ParamVector({"x": torch.tensor([[1.0, 0.0], [1.0, 1.0]])}, columns=2)
        >>> gradient_similarity(gradients)
        tensor([[1.0000, 0.7071],
                [0.7071, 1.0000]], dtype=torch.float64)
    """
    if gradients.columns is None:
        raise OptionError("similarity needs a block of gradients, a column for each example")
    return cosines(gradients.gram(gradients))


@checked()
def influence_similarity(solution: Solution, gradients: ParamVector) -> tuple[Tensor, Tensor]:
    """Influence-similarity of the examples whose gradients were solved for, and its standard error.

    Args:
        solution: ``u = (H+λ)⁻¹g`` for the block of gradients.
        gradients: g.
    """
    if gradients.columns is None or gradients.columns != solution.value.columns:
        raise OptionError(
            f"the solution has {solution.value.columns} columns, the gradients {gradients.columns}; give those that "
            "were solved for"
        )
    return similarity_of_chains(torch.stack([chain.gram(gradients) for chain in solution.chains]))


def similarity_of_chains(products: Tensor) -> tuple[Tensor, Tensor]:
    """From ``gᵀu`` of m independent chains, ``[m, k, k]``, to similarities and their jackknife standard errors.

    ``g_iᵀ(H+λ)⁻¹g_j`` is symmetric; an estimate of it is made so.
    """
    symmetric = 0.5 * (products + products.transpose(1, 2))
    m = len(symmetric)
    value = cosines(symmetric.mean(0))
    if m < 2:
        return value, torch.full_like(value, math.nan)
    without = torch.stack([cosines((symmetric.sum(0) - part) / (m - 1)) for part in symmetric])
    return value, ((m - 1) / m * (without - without.mean(0)).square().sum(0)).sqrt()


def cosines(gram: Tensor) -> Tensor:
    """``G_ij / √(G_ii G_jj)``; NaN where noise left a diagonal entry without its sign."""
    length = gram.diagonal().sqrt()
    return gram / (length.unsqueeze(0) * length.unsqueeze(1))
