"""Scores for every λ from one solve, against dense solves."""

from __future__ import annotations

import pytest
import torch

from dense import dense_gauss_newton, relative_error
from small import PRODUCTS, Product, generator, operator
from whence import ConjugateGradient, Damped
from whence.errors import OptionError
from whence.preconditioners import nystrom
from whence.solvers.base import Solution
from zoo import vectors

DAMPING = 0.01


def solved(**options: float) -> Solution:
    gnh = operator(data=vectors(torch.float64) * 3)
    solver = ConjugateGradient(tolerance=1e-8, keep_slopes=True, **options)  # type: ignore[arg-type]
    return solver.solve(Damped(gnh, DAMPING), gnh.gradients(gnh.terms.data[:2]), generator=generator())


@pytest.mark.parametrize("damping", [1.0, 0.1, DAMPING])
def test_scores_of_every_damping_are_those_of_dense_solves(damping: float) -> None:
    gnh, solution = operator(data=vectors(torch.float64) * 3), solved()
    dense = dense_gauss_newton(gnh)
    gradients = dense.flatten(gnh.gradients(gnh.terms.data))
    exact = gradients[:2] @ torch.linalg.solve(
        dense.matrix + damping * torch.eye(len(dense.matrix)), gradients.T
    )
    assert solution.stats.shifted is not None
    found = solution.stats.shifted.scores(damping)
    torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-6)


def test_what_has_not_settled_is_known() -> None:
    shifted = solved(max_iterations=3).stats.shifted
    assert shifted is not None
    assert shifted.unsettled(10.0) < 1e-3 < shifted.unsettled(1e-4)


def test_not_with_a_preconditioner() -> None:
    gnh = operator()
    P = nystrom(gnh, DAMPING, rank=2, generator=generator())
    solver = ConjugateGradient(keep_slopes=True, preconditioner=P)
    with pytest.raises(OptionError, match="one λ"):
        solver.solve(Damped(gnh, DAMPING), gnh.gradients(gnh.terms.data[:1]), generator=generator())


@pytest.mark.parametrize("product", PRODUCTS)
def test_slopes_of_a_part_of_the_data_are_of_all_examples(product: Product) -> None:
    gnh = operator(product=product)
    half, block = torch.tensor([0, 2]), gnh.zeros(2).randn_like(generator())
    found, slopes = gnh.over(half).matvec_with_slopes(block)
    alone = operator(data=[gnh.terms.data[i] for i in half.tolist()], product=product).matvec(block)
    assert relative_error(found, alone) < 1e-6
    torch.testing.assert_close(slopes, gnh.matvec_with_slopes(block)[1], rtol=1e-5, atol=1e-7)
