"""The largest eigenvalue, by Lanczos and by the paper's random sketch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from whence.arguments import checked
from whence.errors import OptionError
from whence.operators import LinearOperator
from whence.progress import ticker
from whence.spectrum.estimate import Estimate
from whence.spectrum.lanczos import BASIS_BUDGET, BlockLanczos, found_within, tridiagonal
from whence.vectors import ParamVector

__all__ = ["LanczosResult", "SketchResult", "lanczos", "sketch"]

_FEWEST_PRODUCTS = 8


# --- Lanczos -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LanczosResult:
    """What k products showed of the spectrum.

    Attributes:
        lambda_max: largest Ritz value, with the residual-based bound of its error as standard error.
        eigenvalues: Ritz values, largest first, spurious copies left out.
        residuals: an eigenvalue lies within ``residuals[i]`` of ``eigenvalues[i]``.
        weights: how many eigenvalues each of them stands for, adding up to the dimension of the space: the start's
            share in its vector, or 1 for those that were found (their residual is a fraction of the distance to the
            next).
        num_products: products spent.
        top_vector: unit Ritz vector of the largest, where the basis was kept or the vector asked for.
    """

    lambda_max: Estimate
    eigenvalues: Tensor
    residuals: Tensor
    weights: Tensor
    num_products: int
    top_vector: ParamVector | None = None


@checked()
def lanczos(
    operator: LinearOperator,
    *,
    generator: torch.Generator,
    max_products: int = 40,
    relative_error: float = 0.005,
    keep_basis: bool | None = None,
    want_vector: bool = False,
) -> LanczosResult:
    """Run Lanczos from a random start until λmax is known well enough, or the products are spent.

    The largest Ritz value θ never exceeds λmax. Its error is estimated as ``min(r, r²/gap)``, with r the Ritz residual
    and gap the distance to the next Ritz value: the standard bounds for a symmetric operator. Derived in docs/math.md,
    "The largest eigenvalue by Lanczos".

    Args:
        operator: a deterministic operator: the whole data or a fixed subset.
        generator: draws the start.
        max_products: budget.
        relative_error: of λmax, to stop at.
        keep_basis: keep and reorthogonalise the basis; by default where it fits in memory. Without it three vectors
            suffice, and copies of eigenvalues, which lost orthogonality breeds, are recognised and left out.
        want_vector: return the top Ritz vector even if the basis is not kept, by running twice.
    """
    if max_products < 1:
        raise OptionError(f"max_products is {max_products}; Lanczos needs at least one product")
    replay, start = generator.clone_state(), operator.zeros().randn_like(generator)
    dimension = start.numel
    max_products = min(max_products, dimension)
    if keep_basis is None:
        keep_basis = start.nbytes * max_products <= BASIS_BUDGET
    state, _, _ = BlockLanczos.begin(start, apart=True, keep_basis=keep_basis)
    del start
    tops: list[float] = []
    with ticker("largest eigenvalue", max_products) as tick:
        while True:
            state.step(operator)
            tick()
            diagonal, beside = state.T.columns()
            values, vectors = torch.linalg.eigh(tridiagonal(diagonal, beside))
            residuals = beside[-1] * vectors[-1].abs()
            error = _top_error(values, residuals)
            tops.append(float(values[-1]))
            done = _settled(tops, float(residuals[-1]), error, relative_error)
            exhausted = float(beside[-1]) <= 1e-7 * max(abs(tops[-1]), 1e-300)
            if done or exhausted or len(tops) >= max_products:
                break
    genuine = torch.ones_like(values, dtype=torch.bool)
    if not keep_basis:
        genuine = _not_spurious(diagonal, beside, values)
    eigenvalues, residuals = values[genuine].flip(0), residuals[genuine].flip(0)
    weights = _weights(eigenvalues, residuals, vectors[0].square()[genuine].flip(0), dimension)
    products, top = len(tops), None
    if state.basis is not None:
        top = _combine((vector for vector, _ in state.basis), vectors[:, -1])
    elif want_vector:
        start = operator.zeros().randn_like(replay)
        top = _combine(_basis_again(operator, start, products), vectors[:, -1])
        products += products - 1
    return LanczosResult(Estimate(tops[-1], error), eigenvalues, residuals, weights, products, top)


def _weights(values: Tensor, residuals: Tensor, shares: Tensor, dimension: int) -> Tensor:
    """How many eigenvalues each Ritz value stands for; those from the top that were found count once."""
    found = (residuals < found_within(values)).long().cumprod(0).bool()
    rest = shares.masked_fill(found, 0.0)
    left = max(dimension - int(found.sum()), 0)
    return torch.where(found, 1.0, rest * (left / max(float(rest.sum()), 1e-300)))


def _top_error(values: Tensor, residuals: Tensor) -> float:
    residual = float(residuals[-1])
    if len(values) < 2:
        return residual
    gap = float(values[-1] - values[-2])
    return min(residual, residual**2 / gap) if gap > 0 else residual


def _settled(tops: list[float], residual: float, error: float, relative_error: float) -> bool:
    """Whether the top Ritz value can be believed.

    A small ``error`` alone cannot: with few products θ may sit on the second eigenvalue, the first not yet in
    sight. So θ must also have stood still for a while, and its plain residual must be small.
    """
    if len(tops) < _FEWEST_PRODUCTS:
        return False
    allowed = relative_error * tops[-1]
    return error <= allowed and tops[-1] - tops[-4] <= allowed and residual <= 0.05 * tops[-1]


def _not_spurious(diagonal: Tensor, beside: Tensor, values: Tensor) -> Tensor:
    """Cullum-Willoughby: keep one of several copies, drop simple values of the trimmed matrix."""
    if len(values) < 2:
        return torch.ones_like(values, dtype=torch.bool)
    trimmed = torch.linalg.eigvalsh(tridiagonal(diagonal[1:], beside[1:]))
    close = 1e-8 * max(float(values.abs().max()), 1e-300) * math.sqrt(len(values))
    above = torch.nn.functional.pad(values.diff() < close, (0, 1))  # rising: of a cluster, the largest stays
    copies = above | torch.nn.functional.pad(above[:-1], (1, 0))
    spurious: Tensor = (values.unsqueeze(1) - trimmed).abs().amin(1) < close
    return ~above & (copies | ~spurious)


def _basis_again(operator: LinearOperator, start: ParamVector, count: int) -> Iterator[ParamVector]:
    """The vectors of the recurrence from the same start once more, each while it is there."""
    state, _, _ = BlockLanczos.begin(start, apart=True)
    for number in range(count):
        if number:
            state.step(operator)
        assert state.current is not None
        yield state.current


def _combine(basis: Iterable[ParamVector], weights: Tensor) -> ParamVector:
    """``Σ weight·vector``, brought to length one."""
    total: ParamVector | None = None
    for weight, vector in zip(weights.tolist(), basis, strict=True):
        total = (vector.zeros_like() if total is None else total).axpy_(weight, vector)
    assert total is not None
    return total.scale_(1 / float(total.norm()))


# --- the sketch ----------------------------------------------------------------------------------------------

Variant = Literal["dense", "concatenated"]
_PRIME = 1_000_003


@dataclass(frozen=True)
class SketchResult:
    """Top eigenvalues from a sketch.

    Attributes:
        lambda_max: corrected largest eigenvalue, with its standard error.
        eigenvalues: corrected eigenvalues, largest first; only the first few mean something.
        trace: ``Tr(Ĥ)``, an unbiased estimate of ``Tr(H)``.
        num_products: products spent.
    """

    lambda_max: Estimate
    eigenvalues: Tensor
    trace: float
    num_products: int


@checked()
def sketch(
    operator: LinearOperator,
    *,
    dimension: int,
    seed: int,
    variant: Variant = "dense",
    batch_size: int | None = None,
    at_once: int = 32,
) -> SketchResult:
    """The top of the spectrum from the paper's random sketch ``Ĥ = Φ H Φᵀ``.

    ``"dense"`` draws ``Φ ∈ R^{d×N}`` with entries ``N(0, 1/d)``, and ``λ̂ = λ(Ĥ) - Tr(Ĥ)/d`` as in the paper.
    ``"concatenated"`` draws one such block for each parameter tensor, and ``λ̂ = λ(Ĥ) - (1/d) Σ_l ŵ_l Tr(Ĥ_ll)`` with
    ŵ_l the tensor's share in Ĥ's own eigenvector. Derived in docs/math.md, "Bias of the concatenated sketch". Φ is
    generated from the seed whenever it is needed, and never stored.

    Args:
        operator: the operator.
        dimension: d. The relative standard error is √(2/d) for ``"dense"``: 5% at two errors needs d = 3,200. For
            ``"concatenated"`` it is √((2/d) Σ w_l²), less where many tensors share the top eigenvector.
        seed: the one integer that Φ comes from.
        variant: how Φ is drawn.
        batch_size: estimate each product on a fresh batch, as the paper does; None uses the whole operator.
        at_once: rows held in memory together; Φ is regenerated once for each such group.
    """
    if variant not in ("dense", "concatenated"):
        raise OptionError(f"variant is {variant!r}; it must be 'dense' or 'concatenated'")
    if not 2 <= dimension < 2**20 or at_once < 1:
        raise OptionError(
            f"a sketch needs dimension from 2 to 2^20 and at_once ≥ 1, got {dimension} and {at_once}"
        )
    if not 0 <= seed < 2**40:
        raise OptionError(f"seed is {seed}; give a whole number from 0 to 2^40")
    space = operator.zeros()
    blocks: list[str | None] = [None] if variant == "dense" else list(space)
    size = dimension * len(blocks)
    batches = torch.Generator().manual_seed(seed + 1)
    matrix = torch.zeros(size, size, dtype=torch.float64)
    for start, rows in _rows(space, blocks, dimension, seed, at_once):
        drawn = operator if batch_size is None else operator.sample(batch_size, batches)
        products = drawn.matvec(rows)
        for other_start, others in _rows(space, blocks, dimension, seed, at_once):
            part = others.gram(products).cpu()
            matrix[other_start : other_start + part.shape[0], start : start + part.shape[1]] = part
    return _read(0.5 * (matrix + matrix.T), dimension, len(blocks))


def _rows(
    space: ParamVector, blocks: list[str | None], dimension: int, seed: int, at_once: int
) -> Iterator[tuple[int, ParamVector]]:
    """Φ's rows in order, as blocks of vectors, each drawn again from the seed whenever it is needed."""
    generator = torch.Generator()
    for number, block in enumerate(blocks):
        for start in range(0, dimension, at_once):
            count = min(at_once, dimension - start)
            rows = space.zeros(count)
            for i in range(count):  # each row has a seed of its own, so grouping changes nothing
                generator.manual_seed(seed + _PRIME * (1 + number * dimension + start + i))
                for name in space if block is None else [block]:
                    shape, dtype = space.shape_of(name), rows[name].dtype
                    drawn = torch.randn(shape, generator=generator, dtype=dtype)
                    rows[name][i] = rows.own_rows(name, drawn)
            yield number * dimension + start, rows.scale_(dimension**-0.5)


def _read(matrix: Tensor, dimension: int, blocks: int) -> SketchResult:
    values, vectors = torch.linalg.eigh(matrix)
    traces = matrix.diagonal().reshape(blocks, dimension).sum(1)
    shares = vectors.square().reshape(blocks, dimension, -1).sum(1)  # [block, eigenvector]
    corrected = (values - traces @ shares / dimension).flip(0)
    spread = float((2 / dimension * shares[:, -1].square().sum()).sqrt())
    top = float(corrected[0])
    return SketchResult(Estimate(top, abs(top) * spread), corrected, float(traces.sum()), len(matrix))
