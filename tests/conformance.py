"""What every `LinearOperator` has to satisfy, whatever it is made of.

Each check takes an operator and the relative accuracy of its products.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from dense import widen
from whence import LinearOperator, ParamVector

Check = Callable[[LinearOperator, float], None]

_SMALL = 40  # spaces up to this dimension are checked on a whole basis


def random_vector(A: LinearOperator, seed: int, columns: int | None = None) -> ParamVector:
    return A.zeros(columns).randn_like(torch.Generator().manual_seed(seed))


def basis(A: LinearOperator) -> ParamVector:
    """Every unit vector of a small space, some random directions of a large one."""
    space = A.zeros()
    if space.numel > _SMALL:
        return random_vector(A, 11, columns=4)
    block, row = space.zeros(space.numel), 0
    for name in space:
        for position in range(space[name].numel()):
            block[name][row].view(-1)[position] = 1.0
            row += 1
    return block


def assert_close(actual: ParamVector, expected: ParamVector, tolerance: float) -> None:
    difference = widen(actual).clone().axpy_(-1.0, widen(expected))
    error = float((difference.norm() / widen(expected).norm()).max())
    assert error <= tolerance, f"relative error {error:.3g} exceeds {tolerance:.3g}"


def check_linearity(A: LinearOperator, tolerance: float) -> None:
    v, w = random_vector(A, 0), random_vector(A, 1)
    combined = A.matvec(v.clone().scale_(2.5).axpy_(-1.5, w))
    assert_close(combined, A.matvec(v).scale_(2.5).axpy_(-1.5, A.matvec(w)), 4 * tolerance)
    for scale in (1e-6, 1e6):
        assert_close(A.matvec(v.clone().scale_(scale)), A.matvec(v).scale_(scale), 2 * tolerance)


def check_zero_goes_to_zero(A: LinearOperator, tolerance: float) -> None:
    assert float(A.matvec(A.zeros()).norm()) == 0.0
    assert A.matvec(A.zeros(2)).norm().tolist() == [0.0, 0.0]


def check_symmetry(A: LinearOperator, tolerance: float) -> None:
    V = basis(A)
    AV = A.matvec(V)
    projected = V.gram(AV)
    scale = float(V.norm().max() * AV.norm().max())
    assert float((projected - projected.T).abs().max()) <= 2 * tolerance * scale


def check_positive_semi_definite(A: LinearOperator, tolerance: float) -> None:
    V = basis(A)
    projected = V.gram(A.matvec(V))
    values = torch.linalg.eigvalsh((projected + projected.T) / 2)
    assert float(values[-1]) > 0
    assert float(values[0]) >= -tolerance * float(values[-1])


def check_block_matches_columns(A: LinearOperator, tolerance: float) -> None:
    V = random_vector(A, 2, columns=3)
    V.column(1).scale_(1e3)
    product = A.matvec(V)
    assert product.columns == 3
    for column, vector in zip(product.unstack(), V.unstack(), strict=True):
        assert_close(column, A.matvec(vector), 2 * tolerance)
    assert_close(A.matvec(random_vector(A, 2, 1)).column(0), A.matvec(random_vector(A, 2)), 2 * tolerance)


def check_add_matvec(A: LinearOperator, tolerance: float) -> None:
    for columns in (None, 3):
        for scale in (0.7, -1.3):
            v, start = random_vector(A, 3, columns), random_vector(A, 4, columns)
            out = start.clone()
            A.add_matvec_(out, v, scale)
            assert_close(v, random_vector(A, 3, columns), 0.0)
            added = out.axpy_(-1.0, start)
            assert_close(added, A.matvec(v).scale_(scale), 2 * tolerance + _cancellation(added, start))


def check_add_matvec_onto_the_vector_itself(A: LinearOperator, tolerance: float) -> None:
    for columns in (None, 3):
        for scale in (0.7, -1.3):
            start = random_vector(A, 5, columns)
            out = start.clone()
            A.add_matvec_(out, out, scale)
            added = out.axpy_(-1.0, start)
            assert_close(added, A.matvec(start).scale_(scale), 2 * tolerance + _cancellation(added, start))


def check_quadratic_form(A: LinearOperator, tolerance: float) -> None:
    for columns in (None, 3):
        v = random_vector(A, 6, columns)
        form = A.quadratic_form(v)
        expected = v.dot(A.matvec(v))
        assert form.dtype == torch.float64
        assert form.shape == expected.shape
        assert float(((form - expected) / expected).abs().max()) <= 4 * tolerance


def check_arguments_and_results_are_independent(A: LinearOperator, tolerance: float) -> None:
    v = random_vector(A, 7)
    first = A.matvec(v)
    A.quadratic_form(v)
    assert_close(v, random_vector(A, 7), 0.0)
    kept = first.clone()
    second = A.matvec(v)
    second.zero_()
    v.zero_()
    assert_close(first, kept, 0.0)
    assert_close(A.matvec(random_vector(A, 7)), kept, tolerance)


def check_products_keep_the_form_of_the_vector(A: LinearOperator, tolerance: float) -> None:
    space = A.zeros()
    for columns in (None, 1, 3):
        product = A.matvec(random_vector(A, 8, columns))
        assert product.columns == columns
        assert [(n, product.shape_of(n), product[n].dtype) for n in product] == [
            (n, space.shape_of(n), space[n].dtype) for n in space
        ]


CHECKS: Sequence[Check] = [
    check_linearity,
    check_zero_goes_to_zero,
    check_symmetry,
    check_positive_semi_definite,
    check_block_matches_columns,
    check_add_matvec,
    check_add_matvec_onto_the_vector_itself,
    check_quadratic_form,
    check_arguments_and_results_are_independent,
    check_products_keep_the_form_of_the_vector,
]


def assert_mean(samples: torch.Tensor, expected: float, *, errors: float = 4.0, resolution: float) -> None:
    """The samples' mean is within some standard errors of ``expected``, and these resolve a difference.

    ``resolution`` bounds the standard error, relative to ``expected``: without it the test could not fail.
    """
    stderr = float(samples.std()) / math.sqrt(len(samples))
    assert stderr <= resolution * abs(expected), f"standard error {stderr:.3g} resolves too little"
    difference = float(samples.mean()) - expected
    assert abs(difference) <= errors * stderr, f"{difference / stderr:.2f} standard errors off"


def _cancellation(added: ParamVector, start: ParamVector) -> float:
    """What rounding ``start + added`` costs, relative to ``added``, when ``start`` is taken off again."""
    return float((4e-16 * start.norm() / added.norm()).max())
