"""The randomised Nyström approximation: k products with random vectors, all at once, give the top of the spectrum.

    N = Y(M + ν)⁻¹Yᵀ = UΛUᵀ,       Y = HΩ,   M = ΩᵀY,   Ω of k normal columns

``N ≼ H``, and on average ``‖H - N‖`` is about twice λ_{k/2}. The shift ν allows for the error of products, which the
asymmetry of M shows for nothing. Derived in docs/math.md, "The Nyström approximation".

Memory: k copies of the model, and three more for each of the columns ``at_once``; Ω is never held whole.
"""

from __future__ import annotations

import math

import torch
from scipy.special import gammaincinv
from torch import Tensor

from whence.errors import OptionError, SolverError, VectorError
from whence.operators import LinearOperator
from whence.preconditioners.low_rank import LowRank, check_rank, mix_
from whence.progress import ticker
from whence.vectors import ParamVector

__all__ = ["nystrom"]

_SAFETY = 2.0  # on the measured error of products
_DOUBT = 1e-2  # chance that the error is larger than it is taken to be, from so few pairs
_FEWEST_TESTS = 8  # so that there are some pairs to measure it from
_LEAST_SHARE = 1e-12  # of Λ₁: below it, inner products in float64 cannot tell an eigenvalue


def nystrom(
    operator: LinearOperator,
    damping: float,
    *,
    rank: int,
    generator: torch.Generator,
    terms: int | None = None,
    at_once: int = 8,
) -> LowRank:
    """A low-rank preconditioner from one product with each of ``rank`` random vectors.

    Its rank is less where the operator has less: eigenvalues that rounding could have made are dropped.

    Args:
        operator: H, undamped.
        damping: λ.
        rank: k: products spent (but at least 8), and copies of the model kept.
        generator: draws Ω, and the subset.
        terms: how many terms of the data to work on, of different examples (unless they are drawn by importance); None:
            all of them.
        at_once: columns multiplied together. They share a pass over the data, and take three copies of the model each.
    """
    check_rank(operator, damping, rank)
    if at_once < 1:
        raise OptionError(f"at_once is {at_once}; at least one column has to be multiplied")
    used, share = operator, 1.0
    if terms is not None and terms != operator.num_terms:
        operator.check_batch_size(terms)
        used = operator.subset(terms, generator, distinct=True)
        share = used.share_of_whole
    columns = min(max(rank, _FEWEST_TESTS), operator.zeros().numel)
    block, matrix, error = _products(used, columns, at_once, generator)
    epsilon = block.rounding
    error = _SAFETY * max(error, epsilon * float(block.norm().max()))
    vectors, values, root_slack = _decompose(block, matrix, error, epsilon, rank)
    correction = _correction(vectors)
    # the later half of Λ is too small: half of the products behind P is what it can be taken to know
    settled = min(len(values), (max(min(rank, columns), _FEWEST_TESTS) + 1) // 2)
    return LowRank(
        vectors=vectors,
        eigenvalues=values,
        damping=float(damping),
        correction=correction,
        slack=(root_slack + _moved(correction, values)) ** 2,
        settled=settled,
        terms=used.num_terms,
        exact_for_terms=operator.num_terms if share > 0 else None,
        num_products=columns,
        share=share,
    )


def _products(
    operator: LinearOperator, columns: int, at_once: int, generator: torch.Generator
) -> tuple[ParamVector, Tensor, float]:
    """``Y = HΩ``, M made symmetric, and the error ‖e‖ of one product as M's asymmetry shows it.

    Ω passes by a few columns at a time. ω_i meets the products y_j of its own group and of those before; the first
    group stays, and meets those after it. So both ``M_ij`` and ``M_ji`` are seen within groups and with the first.
    """
    block = operator.zeros(columns)
    matrix = torch.zeros(columns, columns, dtype=torch.float64)
    squares: list[Tensor] = []
    first: ParamVector | None = None
    with ticker("products for the preconditioner", columns) as tick:
        for start in range(0, columns, at_once):
            stop = min(start + at_once, columns)
            tests = operator.zeros(stop - start)
            for column in tests.unstack():  # one by one, so that grouping does not change what is drawn
                column.copy_(column.randn_like(generator))
            block.part(start, stop).copy_(operator.matvec(tests))
            met = tests.gram(block.part(0, stop), exact=True).cpu()
            before, own = met[:, :start], met[:, start:]
            above = torch.ones_like(own).triu(1) > 0
            squares.append(0.5 * (own - own.T)[above].square())
            if first is None:
                first = tests
            else:
                back = first.gram(block.part(start, stop), exact=True).cpu()
                squares.append(0.5 * (before[:, : len(back)] - back.T).square().flatten())
            matrix[start:stop, :start] = before
            matrix[:start, start:stop] = before.T
            matrix[start:stop, start:stop] = 0.5 * (own + own.T)
            for _ in range(start, stop):
                tick()
    if not bool(torch.isfinite(matrix).all()):
        raise VectorError("a product holds NaN or infinity; check the model's outputs and its precision")
    return block, matrix, _root_mean_square(torch.cat(squares))


def _root_mean_square(squares: Tensor) -> float:
    """Of normal numbers, from their squares: what it is below but for a chance of `_DOUBT`, by the χ² distribution."""
    if not len(squares):
        return 0.0
    return math.sqrt(float(squares.sum()) / (2 * float(gammaincinv(len(squares) / 2, _DOUBT))))


def _decompose(
    block: ParamVector, matrix: Tensor, error: float, epsilon: float, rank: int
) -> tuple[ParamVector, Tensor, float]:
    """U, Λ and ‖D‖ from Y, M and ‖e‖, at most ``rank`` eigenpairs. Y's memory becomes U's."""
    shift = 2 * math.sqrt(len(matrix)) * error
    inverted, directions = torch.linalg.eigh(matrix)
    inverted = inverted + shift
    real = inverted > 0.5 * shift  # a test direction without curvature to be seen tells nothing
    if not bool(real.any()):
        raise SolverError(
            "the operator has no curvature in any of the directions tried: the outputs do not depend on the selected "
            "parameters, or the model is certain of every answer. There is nothing to precondition"
        )
    weights = directions[:, real] / inverted[real].sqrt()
    block = mix_(block, weights)  # B + D
    values, rotation = torch.linalg.eigh(block.gram(block, exact=True).cpu())
    values, rotation = values.flip(0), rotation.flip(1)
    rounding = epsilon * math.sqrt(float(values.clamp_min(0.0).sum()))
    error *= math.sqrt(len(matrix))  # of all products: ‖E‖ at most
    noise = error * (weights @ rotation).norm(dim=0) + rounding
    kept = (values > _LEAST_SHARE * values[0]) & (values.clamp_min(0.0).sqrt() > 2 * noise)
    if not bool(kept.any()):
        raise SolverError(
            f"products are too inaccurate for a preconditioner: their relative error is about "
            f"{float(noise[0] / values[0].sqrt()):.2g}. Use exact products or a higher precision"
        )
    values, rotation = values[kept][:rank], rotation[:, kept][:, :rank]
    block = mix_(block, rotation / values.sqrt())
    return block, values, error * float(torch.linalg.matrix_norm(weights @ rotation, 2)) + 2 * rounding


def _correction(block: ParamVector) -> Tensor:
    """``(UᵀU)^(-1/2)`` in float64, of a block that is orthonormal but for rounding."""
    values, vectors = torch.linalg.eigh(block.gram(block, exact=True).cpu())
    correction: Tensor = (vectors / values.sqrt()) @ vectors.T
    return correction


def _moved(correction: Tensor, values: Tensor) -> float:
    """``‖(U·correction - U)√Λ‖`` at most: by so much D grows when U is made orthonormal to the last bit."""
    change = (correction - torch.eye(len(values), dtype=values.dtype)) * values.sqrt()
    return 2 * float(torch.linalg.matrix_norm(change, 2))
