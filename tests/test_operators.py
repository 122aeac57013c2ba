"""Every operator passes the conformance checks; sampled ones are right on average."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import pytest
import torch
from torch import Tensor, nn

from conformance import CHECKS, Check, assert_close, assert_mean, random_vector
from dense import dense_gauss_newton
from whence import (
    Classification,
    Damped,
    Dense,
    FiniteSum,
    GaussNewton,
    LanguageModeling,
    LinearOperator,
    ParamVector,
)
from whence.errors import OptionError, VectorError
from zoo import PLAIN, VOCABULARY, vectors

EXACT = 1e-12
CENTRAL = 1e-8  # central differences in float64
ONE_SIDED = 1e-4  # one-sided differences: first order in the step
DAMPING = 0.3

Product = Literal["exact", "finite-difference"]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def template() -> ParamVector:
    shapes = {"weight": (2, 3), "bias": (4,), "kernel": (1, 2, 1)}
    return ParamVector({n: torch.zeros(s, dtype=torch.float64) for n, s in shapes.items()})


def matrices(count: int = 7, size: int = 12, rank: int = 3) -> Tensor:
    """Positive semi-definite terms of very different sizes, singular one by one."""
    factors = torch.randn(count, size, rank, generator=generator(1), dtype=torch.float64)
    scales = torch.linspace(0.2, 3.0, count, dtype=torch.float64)
    return scales[:, None, None] * factors @ factors.mT


@functools.cache
def network(product: Product, micro_batch: int | None = None) -> GaussNewton:
    case = next(case for case in PLAIN if case.name == "mlp")
    model, data = case.model(torch.float64), case.data(torch.float64)
    return GaussNewton(model, case.task, data, product=product, micro_batch=micro_batch)


@functools.cache
def dense_network() -> Dense:
    return dense_gauss_newton(network("exact"))


SHORT, LONG = range(5), range(5, VOCABULARY)  # tokens of short and of long sequences


@functools.cache
def language_model() -> GaussNewton:
    """Six sequences of 2 terms and six of 8, which share no token."""
    random = generator(7)
    sequences = [
        torch.randint(tokens.start, tokens.stop, (length,), generator=random)
        for tokens, length in ((SHORT, 3), (LONG, 9))
        for _ in range(6)
    ]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(VOCABULARY, 4), nn.Tanh(), nn.Linear(4, VOCABULARY))
    return GaussNewton(model.double().eval(), LanguageModeling(), sequences)


@functools.cache
def dense_language_model() -> Dense:
    return dense_gauss_newton(language_model())


def embedding_probe(tokens: range, seed: int) -> ParamVector:
    """A direction that only sequences with these tokens have curvature along."""
    probe = random_vector(language_model(), seed)
    for name, tensor in probe.items():
        tensor[[t for t in range(len(tensor)) if name != "0.weight" or t not in tokens]] = 0.0
    return probe


# --- conformance -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Subject:
    name: str
    build: Callable[[], LinearOperator]
    tolerance: float


def sampled(product: Product, micro_batch: int | None) -> LinearOperator:
    gnh = network(product, micro_batch)
    gnh.matvec(random_vector(gnh, 9))  # differences are one-sided only once curvature has been measured
    return gnh.sample(8, generator(2))


def _network_subjects() -> list[Subject]:
    found = []
    for product, tolerance, drawn in (("exact", EXACT, EXACT), ("finite-difference", CENTRAL, ONE_SIDED)):
        for micro_batch in (None, 6):
            pieces = f"{product}, {'one pass' if micro_batch is None else 'micro-batches'}"
            whole = functools.partial(network, product, micro_batch)
            draw = functools.partial(sampled, product, micro_batch)
            found += [
                Subject(f"GaussNewton ({pieces})", whole, tolerance),
                Subject(f"GaussNewton.sample ({pieces})", draw, drawn),
                Subject(
                    f"GaussNewton.subset ({pieces})",
                    lambda whole=whole: whole().subset(8, generator(2)),
                    tolerance,
                ),
            ]
        found += [
            Subject(
                f"Damped GaussNewton ({product})", lambda whole=whole: Damped(whole(), DAMPING), tolerance
            ),
            Subject(
                f"Damped GaussNewton.sample ({product})", lambda draw=draw: Damped(draw(), DAMPING), drawn
            ),
        ]
    return found


SUBJECTS = [
    Subject("Dense", lambda: Dense(matrices().mean(0), template()), EXACT),
    Subject("Dense without template", lambda: Dense(matrices().mean(0)), EXACT),
    Subject("FiniteSum", lambda: FiniteSum(matrices(), template()), EXACT),
    Subject("FiniteSum of a list", lambda: FiniteSum(list(matrices())), EXACT),
    Subject("FiniteSum.sample", lambda: FiniteSum(matrices(), template()).sample(3, generator()), EXACT),
    Subject("FiniteSum.subset", lambda: FiniteSum(matrices(), template()).subset(3, generator()), EXACT),
    Subject("Damped Dense", lambda: Damped(Dense(matrices().mean(0), template()), DAMPING), EXACT),
    Subject("Damped FiniteSum", lambda: Damped(FiniteSum(matrices()), DAMPING), EXACT),
    Subject("Damped.sample", lambda: Damped(FiniteSum(matrices()), DAMPING).sample(3, generator()), EXACT),
    Subject("Damped.subset", lambda: Damped(FiniteSum(matrices()), DAMPING).subset(3, generator()), EXACT),
    Subject("Damped twice", lambda: Damped(Damped(Dense(matrices().mean(0)), DAMPING), 1.0), EXACT),
    *_network_subjects(),
    Subject("GaussNewton.sample (sequences)", lambda: language_model().sample(15, generator(2)), EXACT),
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda subject: subject.name)
def test_conformance(subject: Subject, check: Check) -> None:
    check(subject.build(), subject.tolerance)


class ScalarParameter(nn.Module):
    """A temperature without dimensions, as in CLIP."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)
        self.temperature = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.temperature


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
@pytest.mark.parametrize(("product", "tolerance"), [("exact", EXACT), ("finite-difference", CENTRAL)])
def test_conformance_with_a_scalar_parameter(product: Product, tolerance: float, check: Check) -> None:
    torch.manual_seed(0)
    model = ScalarParameter().double().eval()
    check(
        GaussNewton(model, Classification(), vectors(torch.float64), product=product),
        tolerance,
    )


# --- values ----------------------------------------------------------------------------------------------


def test_dense_multiplies_by_its_matrix_in_the_templates_order() -> None:
    matrix, v = matrices().mean(0), random_vector(Dense(matrices()[0], template()), 0)
    rows = torch.cat([v["weight"].reshape(-1), v["bias"], v["kernel"].reshape(-1)])
    product = Dense(matrix, template()).matvec(v)
    result = torch.cat([product["weight"].reshape(-1), product["bias"], product["kernel"].reshape(-1)])
    torch.testing.assert_close(result, matrix @ rows, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("columns", [None, 3])
def test_dense_unflatten_undoes_flatten(columns: int | None) -> None:
    A = Dense(matrices()[0], template())
    v = random_vector(A, 0, columns)
    again = A.unflatten(A.flatten(v))
    assert again.columns == columns
    assert_close(again, v, 0.0)


def test_finite_sum_is_the_mean_of_its_terms() -> None:
    A = FiniteSum(matrices())
    v = random_vector(A, 0)
    expected = sum(matrix @ v["x"] for matrix in matrices()) / len(matrices())
    torch.testing.assert_close(A.matvec(v)["x"], expected, rtol=1e-13, atol=1e-13)
    assert A.num_terms == 7


def test_damped_adds_the_damping_once() -> None:
    A, v = Dense(matrices().mean(0)), random_vector(Dense(matrices()[0]), 0)
    expected = (A.matrix + DAMPING * torch.eye(12, dtype=torch.float64)) @ v["x"]
    torch.testing.assert_close(Damped(A, DAMPING).matvec(v)["x"], expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("draw", ["sample", "subset"])
def test_sampling_a_damped_operator_leaves_the_damping_alone(draw: str) -> None:
    A = FiniteSum(matrices())
    damped = getattr(Damped(A, DAMPING), draw)(2, generator(4))
    assert damped.damping == DAMPING
    v = random_vector(A, 0)
    expected = getattr(A, draw)(2, generator(4)).matvec(v).axpy_(DAMPING, v)
    assert_close(damped.matvec(v), expected, EXACT)


@pytest.mark.parametrize("scale", [-1 / DAMPING, -1 / DAMPING * (1 + 1e-12)])
def test_damped_add_matvec_where_the_scale_cancels_the_damping(scale: float) -> None:
    A = Damped(Dense(matrices().mean(0), template()), DAMPING)
    start = random_vector(A, 5)
    out = start.clone()
    A.add_matvec_(out, out, scale)
    assert_close(out, start.clone().axpy_(scale, A.matvec(start)), 1e-11)


def test_damped_counts_the_terms_of_its_operator() -> None:
    assert Damped(FiniteSum(matrices()), DAMPING).num_terms == 7
    assert Damped(Dense(matrices()[0]), DAMPING).num_terms == 1


@pytest.mark.parametrize("product", ["exact", "finite-difference"])
@pytest.mark.parametrize("micro_batch", [None, 3])
def test_gauss_newton_is_the_mean_of_j_s_jt(product: Product, micro_batch: int | None) -> None:
    gnh, tolerance = network(product, micro_batch), {"exact": EXACT}.get(product, CENTRAL)
    v = random_vector(gnh, 0, columns=2)
    assert_close(gnh.matvec(v), dense_network().matvec(v), tolerance)


@pytest.mark.parametrize("product", ["exact", "finite-difference"])
def test_parameters_that_the_outputs_do_not_use_have_no_curvature(product: Product) -> None:
    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 4)
            self.unused = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x)

    torch.manual_seed(0)
    model = Unused().double().eval()
    gnh = GaussNewton(model, Classification(), vectors(torch.float64), product=product)
    product_ = gnh.matvec(random_vector(gnh, 0, columns=2))
    assert not product_["unused"].any()
    assert product_["linear.weight"].any()
    assert not gnh.sample_factor(8, generator())["unused"].any()


# --- sampling --------------------------------------------------------------------------------------------


def functionals(A: LinearOperator) -> tuple[ParamVector, ParamVector]:
    """``v`` and ``w`` with a ``wᵀAv`` that is not small beside its sampling error."""
    v = random_vector(A, 20)
    return v, random_vector(A, 21).scale_(0.3).axpy_(1.0, v)


def draw_values(A: LinearOperator, batch_size: int, draws: int) -> tuple[Tensor, Tensor]:
    """``wᵀA_B v`` and ``vᵀA_B v`` over many draws."""
    v, w = functionals(A)
    random = generator(22)
    mixed, forms = [], []
    for _ in range(draws):
        drawn = A.sample(batch_size, random)
        mixed.append(float(w.dot(drawn.matvec(v))))
        forms.append(float(drawn.quadratic_form(v)))
    return torch.tensor(mixed), torch.tensor(forms)


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("damping", [None, DAMPING], ids=["plain", "damped"])
def test_samples_of_a_finite_sum_are_unbiased(batch_size: int, damping: float | None) -> None:
    A: LinearOperator = FiniteSum(matrices(), template())
    A = A if damping is None else Damped(A, damping)
    v, w = functionals(A)
    mixed, forms = draw_values(A, batch_size, 1500)
    assert_mean(mixed, float(w.dot(A.matvec(v))), resolution=0.03)
    assert_mean(forms, float(v.dot(A.matvec(v))), resolution=0.03)


@pytest.mark.parametrize(("product", "draws"), [("exact", 300), ("finite-difference", 200)])
def test_samples_of_gauss_newton_are_unbiased(product: Product, draws: int) -> None:
    gnh, dense = network(product), dense_network()
    v, w = functionals(gnh)
    mixed, forms = draw_values(gnh, 4, draws)
    assert_mean(mixed, float(w.dot(dense.matvec(v))), resolution=0.02)
    assert_mean(forms, float(v.dot(dense.matvec(v))), resolution=0.02)


@pytest.mark.parametrize("batch_size", [5, 10], ids=["one sequence", "two sequences"])
def test_samples_weigh_short_and_long_sequences_by_their_terms(batch_size: int) -> None:
    gnh, dense, random = language_model(), dense_language_model(), generator(23)
    probes = ParamVector.stack([embedding_probe(SHORT, 24), embedding_probe(LONG, 25)])
    forms = torch.stack([probes.dot(gnh.sample(batch_size, random).matvec(probes)) for _ in range(300)])
    expected = dense.quadratic_form(probes)
    assert_mean(forms[:, 0], float(expected[0]), resolution=0.08)
    assert_mean(forms[:, 1], float(expected[1]), resolution=0.08)


@pytest.mark.parametrize("draw", ["sample", "subset"])
@pytest.mark.parametrize(
    ("build", "tolerance"),
    [
        (lambda: FiniteSum(matrices()), EXACT),
        (lambda: network("exact"), EXACT),
        (lambda: network("finite-difference"), ONE_SIDED),
    ],
    ids=["FiniteSum", "exact", "finite-difference"],
)
def test_draws_are_reproducible_from_their_generator_and_differ_between_seeds(
    build: Callable[[], LinearOperator], tolerance: float, draw: str
) -> None:
    A = build()
    v = random_vector(A, 0)
    first, again, other = (getattr(A, draw)(4, generator(seed)).matvec(v) for seed in (5, 5, 6))
    assert_close(again, first, tolerance)
    assert float(other.axpy_(-1.0, first).norm() / first.norm()) > 0.01


def test_successive_draws_from_one_generator_differ() -> None:
    A, random = FiniteSum(matrices()), generator(5)
    v = random_vector(A, 0)
    first, second = (A.sample(4, random).matvec(v) for _ in range(2))
    assert float(second.axpy_(-1.0, first).norm() / first.norm()) > 0.01


@pytest.mark.parametrize("product", ["exact", "finite-difference"])
def test_a_subset_gives_the_same_answer_every_time(product: Product) -> None:
    gnh = network(product)
    subset = gnh.subset(6, generator(3))
    v = random_vector(gnh, 0)
    first = subset.matvec(v)
    gnh.sample(4, generator(4)).matvec(random_vector(gnh, 1).scale_(100.0))
    assert_close(subset.matvec(v), first, {"exact": 0.0}.get(product, CENTRAL))


def test_a_sample_knows_about_how_many_terms_it_holds() -> None:
    assert FiniteSum(matrices()).sample(3, generator()).num_terms == 3
    assert network("exact").sample(7, generator()).num_terms == 7
    assert language_model().num_terms == 60
    assert language_model().sample(16, generator()).num_terms == 15  # three sequences of 5 on average


# --- factors ---------------------------------------------------------------------------------------------


def squares(A: LinearOperator, probes: ParamVector, batch_size: int, draws: int) -> Tensor:
    """``(vᵀg)²`` for every probe v, ``[draws, probes]``."""
    random = generator(30)
    values = [probes.gram(A.sample_factor(batch_size, random)).squeeze(1) for _ in range(draws)]
    return torch.stack(values).square()


@pytest.mark.parametrize(
    ("build", "reference", "batch_size", "draws"),
    [
        (lambda: Dense(matrices().mean(0), template()), None, 1, 2000),
        (lambda: FiniteSum(matrices(), template()), None, 2, 2000),
        (lambda: network("exact"), dense_network, 1, 700),
        (lambda: network("exact", 3), dense_network, 8, 500),
    ],
    ids=["Dense", "FiniteSum", "GaussNewton, one example", "GaussNewton, micro-batches"],
)
def test_factors_have_the_operator_as_second_moment(
    build: Callable[[], LinearOperator],
    reference: Callable[[], LinearOperator] | None,
    batch_size: int,
    draws: int,
) -> None:
    A = build()
    truth = A if reference is None else reference()
    assert A.has_factors
    probes = A.matvec(random_vector(A, 31, columns=3))
    probes.scale_(1 / probes.norm())
    expected = truth.quadratic_form(probes)
    values = squares(A, probes, batch_size, draws)
    for k in range(3):
        assert_mean(values[:, k], float(expected[k]), resolution=0.08)


@pytest.mark.parametrize("batch_size", [5, 10], ids=["one sequence", "two sequences"])
def test_factors_weigh_short_and_long_sequences_by_their_terms(batch_size: int) -> None:
    probes = ParamVector.stack([embedding_probe(SHORT, 24), embedding_probe(LONG, 25)])
    expected = dense_language_model().quadratic_form(probes)
    values = squares(language_model(), probes, batch_size, 800)
    assert_mean(values[:, 0], float(expected[0]), resolution=0.1)
    assert_mean(values[:, 1], float(expected[1]), resolution=0.1)


def test_factors_have_the_operators_trace_as_mean_square() -> None:
    A = network("exact")
    random = generator(32)
    lengths = torch.tensor([float(A.sample_factor(6, random).norm()) ** 2 for _ in range(400)])
    assert_mean(lengths, float(dense_network().matrix.trace()), resolution=0.05)


def test_a_damped_operator_offers_no_factors() -> None:
    damped = Damped(FiniteSum(matrices()), DAMPING)
    assert not damped.has_factors
    with pytest.raises(OptionError, match="Damped cannot draw vectors g"):
        damped.sample_factor(1, generator())


# --- refusals --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(3,), (2, 3), (2, 2, 2)])
def test_dense_refuses_what_is_not_a_square_matrix(shape: tuple[int, ...]) -> None:
    with pytest.raises(OptionError) as caught:
        Dense(torch.zeros(shape))
    assert str(shape) in str(caught.value)


def test_dense_refuses_a_template_of_another_size() -> None:
    with pytest.raises(VectorError, match="the template has 12 numbers, the matrix 5 rows"):
        Dense(torch.eye(5), template())


@pytest.mark.parametrize(
    "A", [Dense(torch.eye(12), template()), FiniteSum(matrices(), template())], ids=["Dense", "FiniteSum"]
)
def test_a_vector_of_another_space_is_refused(A: LinearOperator) -> None:
    with pytest.raises(VectorError, match=r"missing 'weight', 'bias', 'kernel', unexpected 'x'"):
        A.matvec(ParamVector({"x": torch.zeros(12, dtype=torch.float64)}))


@pytest.mark.parametrize("draw", ["sample", "subset"])
def test_an_operator_without_terms_cannot_be_sampled(draw: str) -> None:
    with pytest.raises(OptionError, match="Dense is not a mean over terms"):
        getattr(Dense(torch.eye(2)), draw)(1, generator())


def test_the_largest_batch_is_the_whole_data() -> None:
    A = FiniteSum(matrices())
    assert isinstance(A.sample(7, generator()), Dense)
    assert network("exact").sample(20, generator()).num_terms == 20
    assert math.isclose(DAMPING, Damped(A, DAMPING).sample(7, generator()).damping)
