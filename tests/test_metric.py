"""Damping in a metric, ``H + λD``: vectors in the coordinates in which it is a number, against dense matrices."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from dense import dense_gauss_newton, relative_error
from small import DOUBLE, PRODUCTS, Product, classifier, generator, operator
from test_ekfac import assert_diagonal_of, by_hand, from_zoo, tied_language_model
from whence import ConjugateGradient, Damped, GaussNewton, Lissa, ParamVector, Plan, estimate_spectrum
from whence.errors import OptionError, VectorError
from whence.model.second_moment import factored
from whence.preconditioners.ekfac import ekfac
from whence.scoring import Scorer

DAMPING = 0.05


def metric() -> ParamVector:
    random = generator(3)
    return ParamVector(
        {
            n: torch.rand(p.shape, generator=random, dtype=DOUBLE) + 0.2
            for n, p in classifier().named_parameters()
        }
    )


def scores_by_dense_matrices() -> torch.Tensor:
    """``∇ℓ(q)ᵀ (H + λD)⁻¹ ∇ℓ(z)`` of the operator's first two examples, for all of them."""
    gnh = operator()
    dense = dense_gauss_newton(gnh)
    D = dense.flatten(metric())
    gradients = dense.flatten(gnh.gradients(gnh.terms.data))
    return gradients[:2] @ torch.linalg.solve(dense.matrix + DAMPING * torch.diag(D), gradients.T)


@pytest.mark.parametrize("product", PRODUCTS)
def test_products_are_those_of_the_rescaled_matrix(product: Product) -> None:
    gnh, dense = operator(product=product, metric=metric()), dense_gauss_newton(operator())
    scale = dense.flatten(metric()).rsqrt()
    block = gnh.zeros(3).randn_like(generator())
    for vector in (block, block.column(0)):
        expected = dense.flatten(vector) * scale @ dense.matrix * scale
        torch.testing.assert_close(dense.flatten(gnh.matvec(vector)), expected, rtol=1e-5, atol=1e-8)


def test_a_quadratic_form_and_drawn_factors_are_in_the_same_coordinates() -> None:
    gnh, dense = operator(metric=metric()), dense_gauss_newton(operator())
    scale = dense.flatten(metric()).rsqrt()
    v = gnh.zeros().randn_like(generator())
    whole = dense.flatten(v) * scale
    assert float(gnh.quadratic_form(v)) == pytest.approx(float(whole @ dense.matrix @ whole))
    plain, scaled = (o.sample_factor(4, generator(7)) for o in (operator(), gnh))
    torch.testing.assert_close(dense.flatten(scaled), dense.flatten(plain) * scale)


@pytest.mark.parametrize("method", ["directional", "gradients"])
def test_scores_of_conjugate_gradients_are_exact(method: str) -> None:
    gnh = operator(metric=metric())
    data = gnh.terms.data
    solver = ConjugateGradient(tolerance=1e-9)
    solution = solver.solve(Damped(gnh, DAMPING), gnh.gradients(data[:2]), generator=generator())
    scores = Scorer(gnh, solution.value, method=method).score(torch.arange(len(data)))  # type: ignore[arg-type]
    torch.testing.assert_close(scores, scores_by_dense_matrices(), rtol=1e-6, atol=1e-8)


def test_proven_errors_hold_in_these_coordinates() -> None:
    gnh = operator(metric=metric())
    data = gnh.terms.data
    solver = ConjugateGradient(tolerance=0.3)
    solution = solver.solve(Damped(gnh, DAMPING), gnh.gradients(data[:2]), generator=generator())
    values, errors = solution.project(gnh.gradients(data))
    off = (values - scores_by_dense_matrices()).abs()
    assert float(off.max()) > 1e-6  # else there is nothing to bound
    assert bool((off <= errors).all())


def test_lissa_works_in_these_coordinates() -> None:
    gnh = operator(metric=metric())
    spectrum = estimate_spectrum(gnh, generator=generator(1))
    plan = Plan.from_spectrum(spectrum, DAMPING).replace(num_steps=3000)
    solution = Lissa(plan).solve(
        Damped(gnh, DAMPING), gnh.gradients(gnh.terms.data[:2]), generator=generator()
    )
    values, errors = solution.project(gnh.gradients(gnh.terms.data))
    off = (values - scores_by_dense_matrices()).abs() / errors
    assert float(off.median()) < 2


@pytest.mark.parametrize(
    "make",
    [
        operator,
        tied_language_model,
        lambda: from_zoo("gpt2"),
        lambda: from_zoo("convnet"),
        lambda: by_hand(micro_batch=1),
    ],
    ids=["classifier", "tied", "gpt2", "convnet", "batches"],
)
def test_ekfac_is_in_these_coordinates(make: Callable[[], GaussNewton]) -> None:
    gnh = make()
    random = generator(3)
    uneven = ParamVector({n: p + 0.2 for n, p in gnh.zeros().randn_like(random).power(2).items()})
    D = factored(uneven, gnh.network)
    dense = dense_gauss_newton(gnh)
    scale = dense.flatten(D).rsqrt()
    assert float(scale.max() / scale.min()) > 2
    scaled = gnh.in_metric(D)
    P = ekfac(scaled, DAMPING, generator=generator(), curvature="exact")
    assert_diagonal_of(P, scale.unsqueeze(1) * dense.matrix * scale, scaled)


def test_ekfac_in_a_metric_of_one_number_is_that_of_the_number() -> None:
    gnh = operator()
    four = ParamVector({n: p + 4.0 for n, p in gnh.zeros().items()})
    v = gnh.zeros().randn_like(generator())
    plain = ekfac(gnh, 4 * DAMPING, generator=generator(), curvature="exact").solve(v).scale_(4.0)
    in_four = ekfac(gnh.in_metric(four), DAMPING, generator=generator(), curvature="exact").solve(v)
    assert relative_error(in_four, plain) < 1e-9  # (H/4 + λ)⁻¹ = 4(H + 4λ)⁻¹


def test_what_is_no_metric_is_refused() -> None:
    with pytest.raises(OptionError, match="not positive and finite"):
        operator(metric=metric().scale_(-1.0))
    with pytest.raises(VectorError, match="another model"):
        operator(metric=ParamVector({"x": torch.ones(2)}))
