"""Drawing examples by curvature: the same expectations, less noise where a few examples carry the Hessian."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import nn

from dense import dense_gauss_newton, per_example_matrices, relative_error, softmax_hessian
from small import DOUBLE, classifier, generator, operator
from whence import Classification, GaussNewton, ParamVector, Regression, estimate_spectrum
from whence.errors import OptionError
from whence.model.importance import Importance, measure_importance
from whence.model.sampled import SampledGaussNewton
from zoo import CASES, Case, vectors

PRODUCTS: list[Literal["exact", "finite-difference"]] = ["exact", "finite-difference"]


def certain_of_most() -> GaussNewton:
    """A model whose outputs are large: nearly certain of all but a few examples."""
    model = classifier()
    with torch.no_grad():
        list(model.parameters())[-2].mul_(60.0)
    return operator(model, vectors(DOUBLE) + vectors(DOUBLE))


def test_curvature_is_the_trace_of_the_output_hessian() -> None:
    gnh = operator()
    found = measure_importance(gnh).curvature
    with torch.no_grad():
        traces = [softmax_hessian(gnh.network.model(x.unsqueeze(0))[0]).trace() for x, _ in vectors(DOUBLE)]
    assert torch.allclose(found, torch.stack(traces).double(), rtol=1e-10)


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.name in ("gpt2", "llama")], ids=lambda c: c.name
)
def test_curvature_of_sequences_leaves_padding_out(case: Case) -> None:
    gnh = GaussNewton(case.model(torch.float32), case.task, case.data(torch.float32))
    together = measure_importance(gnh).curvature
    gnh.micro_batch = 1
    assert torch.allclose(together, measure_importance(gnh).curvature, rtol=1e-4)


def test_curvature_of_a_regression_is_the_same_for_all() -> None:
    data = [(torch.randn(3, generator=generator(i)), torch.zeros(2)) for i in range(5)]
    gnh = GaussNewton(nn.Linear(3, 2).eval(), Regression(variance=0.5), data)
    assert measure_importance(gnh).curvature.tolist() == [4.0] * 5


@pytest.mark.parametrize("product", PRODUCTS)
def test_the_expectation_over_all_draws_is_the_hessian(
    product: Literal["exact", "finite-difference"],
) -> None:
    """Σ_z p(z) H̃_z v = H v exactly: every example drawn alone, with its weight, times its chance."""
    gnh = operator(certain_of_most().network.model, product=product)
    gnh.terms.importance = chances = measure_importance(gnh).probabilities()
    v = gnh.zeros().randn_like(generator(1))
    total, form = gnh.zeros(), 0.0
    for position, chance in enumerate(chances):
        weight = 1 / (len(chances) * chance.reshape(1))
        where = torch.tensor([position])
        drawn = SampledGaussNewton(gnh, where, weight)
        total.axpy_(float(chance), drawn.matvec(v))
        form += float(chance) * float(drawn.quadratic_form(v))
    assert relative_error(total, dense_gauss_newton(gnh).matvec(v)) < (1e-10 if product == "exact" else 1e-3)
    assert form == pytest.approx(float(v.dot(gnh.matvec(v))), rel=1e-3)


def test_draws_follow_the_chances_and_carry_their_weights() -> None:
    gnh = certain_of_most()
    gnh.terms.importance = chances = measure_importance(gnh).probabilities()
    positions, weights = gnh.terms.draw_weighted(40_000, generator())
    assert weights is not None
    counts = torch.bincount(positions, minlength=len(chances)).double() / len(positions)
    assert bool(((counts - chances).abs() <= 4.5 * (chances * (1 - chances) / len(positions)).sqrt()).all())
    assert torch.allclose(weights, 1 / (len(chances) * chances[positions]))


def test_blocks_single_vectors_and_micro_batches_agree() -> None:
    gnh = certain_of_most()
    gnh.terms.importance = measure_importance(gnh).probabilities()
    block = gnh.zeros(3).randn_like(generator(2))
    together = gnh.sample(9, generator(3)).matvec(block)
    gnh.micro_batch = 2
    sampled = gnh.sample(9, generator(3))
    apart = ParamVector.stack([sampled.matvec(column) for column in block.unstack()])
    assert relative_error(together, apart) < 1e-10
    grown = block.clone()
    sampled.add_matvec_(grown, grown, -0.5)
    assert relative_error(grown, block.clone().axpy_(-0.5, together)) < 1e-10


def test_gradients_with_drawn_labels_have_the_hessian_as_covariance() -> None:
    gnh = certain_of_most()
    gnh.terms.importance = measure_importance(gnh).probabilities()
    v = gnh.zeros().randn_like(generator(1))
    stream = generator(4)
    squares = torch.tensor([float(gnh.sample_factor(4, stream).dot(v)) for _ in range(600)]).square().double()
    exact = float(v.dot(gnh.matvec(v)))
    assert abs(float(squares.mean()) - exact) <= 4 * float(squares.std()) / 600**0.5


def test_it_lowers_the_constant_where_few_examples_carry_the_hessian() -> None:
    """C = E‖H_z v‖²/(Tr(H) vᵀHv) on average over directions, exactly from per-example matrices."""
    gnh = certain_of_most()
    matrices = per_example_matrices(gnh)
    importance = measure_importance(gnh)
    chances = importance.probabilities()
    count = len(matrices)
    traces = torch.einsum("zij,zji->z", matrices, matrices)  # Tr H_z²
    uniform = traces.mean()
    weighted = (traces / (count * chances) ** 2 * chances).sum()
    assert float(weighted) < 0.5 * float(uniform)
    assert importance.gain() == pytest.approx(
        float(uniform / weighted), rel=0.6
    )  # Jacobians are not all alike


def test_spectrum_is_the_same_under_both_ways_of_drawing() -> None:
    gnh = certain_of_most()
    exact = dense_gauss_newton(gnh).matrix
    gnh.terms.importance = measure_importance(gnh).probabilities()
    spectrum = estimate_spectrum(gnh, generator=generator(5), probes=200, terms=gnh.num_terms)
    assert abs(spectrum.trace.value - float(exact.trace())) <= 4 * spectrum.trace.stderr
    assert abs(spectrum.frobenius.value - float(exact.norm())) <= 4 * spectrum.frobenius.stderr


def test_share_of_top_counts_from_the_most_uncertain() -> None:
    importance = Importance(torch.tensor([1.0, 0.0, 5.0, 2.0]))
    assert importance.share_of_top(1) == pytest.approx(5 / 8)
    assert importance.share_of_top(10) == pytest.approx(1.0)
    assert float(importance.probabilities(0.5).sum()) == pytest.approx(1.0)


def test_a_model_that_is_certain_of_everything_is_refused() -> None:
    with pytest.raises(OptionError, match="certain of every example"):
        Importance(torch.zeros(3))
    with pytest.raises(OptionError, match="uniform is 0"):
        Importance(torch.ones(3)).probabilities(0)


def test_a_task_without_curvature_is_refused() -> None:
    class Silent(Classification):
        def curvature(self, outputs: torch.Tensor, batch: object) -> None:  # type: ignore[override]
            return None

    with pytest.raises(OptionError, match="Silent does not tell"):
        measure_importance(GaussNewton(classifier(), Silent(), vectors(DOUBLE)))
