"""Condition C.1 against its closed forms: E H̃² - H² = (E A_s² - H²)/m for m independent draws."""

from __future__ import annotations

import copy
import itertools
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn

import text
from digits import exact_hessian, load
from reproduction.condition_c1 import ConditionCheck, check_condition
from small import generator
from whence import Classification, Dense, Estimate, FiniteSum, GaussNewton, LanguageModeling
from whence.errors import OptionError, SolverError
from whence.operators import LinearOperator
from whence.vectors import ParamVector


def within(estimate: Estimate, true: float, errors: float = 4.0) -> bool:
    return abs(estimate.value - true) <= errors * estimate.stderr


@dataclass
class Truth:
    """Both sides of C.1 from the matrices A of single draws, which have the mean H."""

    mean: Tensor  # E A = H
    square: Tensor  # E A²

    @classmethod
    def of(cls, matrices: Tensor) -> Truth:
        return cls(matrices.mean(0), (matrices @ matrices).mean(0))

    @property
    def gap(self) -> Tensor:
        """``E H̃² - H²`` of one draw."""
        return self.square - self.mean @ self.mean

    def constant(self, terms: float = 1.0) -> float:
        return terms * float(self.gap.trace() / self.mean.trace() ** 2)

    def top_constant(self, terms: float = 1.0) -> float:
        values, vectors = torch.linalg.eigh(self.mean)
        v = vectors[:, -1]
        return terms * float(v @ self.gap @ v / (self.mean.trace() * values[-1]))


def rank_ones(count: int = 60, n: int = 8) -> FiniteSum:
    x = torch.randn(count, n, generator=generator(1), dtype=torch.float64)
    x = x * torch.linspace(2.0, 0.3, n, dtype=torch.float64)
    return FiniteSum(torch.einsum("ci,cj->cij", x, x))


# --- closed forms ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def measured() -> ConditionCheck:
    return check_condition(rank_ones(), [1, 4, 16, 60], generator=generator(), realisations=800)


def test_gap_and_bound_at_every_batch_size(measured: ConditionCheck) -> None:
    truth = Truth.of(rank_ones().matrices)
    trace = float(truth.mean.trace())
    assert [point.batch_size for point in measured.points] == [1, 4, 16, 60]
    for point in measured.points:
        assert within(point.gap, float(truth.gap.trace()) / point.batch_size)
        assert within(point.bound, trace**2 / point.batch_size)
        assert within(point.constant, truth.constant())
        assert within(point.top_constant, truth.top_constant())
        assert point.gap.stderr < 0.1 * point.gap.value
    assert within(measured.trace, trace)
    assert within(measured.curvature, float(torch.linalg.eigvalsh(truth.mean)[-1]))


def test_pooled_constants_are_sharper_than_single_ones(measured: ConditionCheck) -> None:
    truth = Truth.of(rank_ones().matrices)
    assert within(measured.constant, truth.constant())
    assert within(measured.top_constant, truth.top_constant())
    assert measured.constant.stderr < 0.03 * measured.constant.value
    for point in measured.points:
        assert measured.constant.stderr < 0.7 * point.constant.stderr
        assert measured.top_constant.stderr < point.top_constant.stderr


def test_slope_is_minus_one(measured: ConditionCheck) -> None:
    assert measured.slope is not None
    assert within(measured.slope, -1.0, errors=3)
    assert measured.slope.stderr < 0.03
    assert measured.falls_as_inverse
    assert "it must be -1." in measured.verdict


def test_errors_cover_the_truth_and_are_not_inflated() -> None:
    """Over seeds: about 68% within one standard error, 95% within two."""
    A = rank_ones(n=4)
    truth = Truth.of(A.matrices)
    distances = []
    for seed in range(60):
        check = check_condition(A, [2, 16], generator=generator(seed), realisations=48)
        assert check.slope is not None
        pairs = [
            (check.constant, truth.constant()),
            (check.top_constant, truth.top_constant()),
            (check.slope, -1.0),
            (check.trace, float(truth.mean.trace())),
        ]
        distances.append([(estimate.value - true) / estimate.stderr for estimate, true in pairs])
    spread = torch.tensor(distances)
    within_one = (spread.abs() <= 1).double().mean(0)
    within_two = (spread.abs() <= 2).double().mean(0)
    assert bool(((within_one > 0.5) & (within_one < 0.85)).all()), within_one
    assert bool((within_two >= 0.875).all()), within_two
    assert float(spread.mean(0).abs().max()) < 0.5


def test_the_papers_counterexample_has_its_constant() -> None:
    """x = (±1 … ±1): E A² = Tr(H)·H, so the gap is (Tr(H)H - H²)/|B| and C = 1 - 1/8 in every direction."""
    signs = torch.tensor(list(itertools.product([-1.0, 1.0], repeat=8)), dtype=torch.float64)
    A = FiniteSum(torch.einsum("ci,cj->cij", signs, signs))
    check = check_condition(A, [2, 8, 32], generator=generator(), realisations=400)
    assert within(check.constant, 0.875)
    assert within(check.top_constant, 0.875)
    assert check.holds() is True
    assert check.holds(0.5) is False
    assert check.recommended_constant == 2.0
    assert check.smallest_batch == pytest.approx(16, abs=1)
    assert check.verdict.startswith("C = 2 holds in what was measured")


def test_few_terms_that_carry_everything_refute_the_papers_constant() -> None:
    matrices = torch.zeros(60, 5, 5, dtype=torch.float64)
    matrices[:3] = rank_ones(3, 5).matrices
    truth = Truth.of(matrices)
    assert truth.constant() > 5
    check = check_condition(FiniteSum(matrices), [4, 16, 60], generator=generator(), realisations=400)
    assert within(check.constant, truth.constant())
    assert check.holds() is False
    assert check.recommended_constant > max(check.constant.value, check.top_constant.value) > 5
    assert "C = 2 does not hold" in check.verdict
    assert f"{check.smallest_batch:,} terms" in check.verdict


def test_what_errors_leave_open_is_said_to_be_open(measured: ConditionCheck) -> None:
    unsure = replace(measured, constant=Estimate(1.9, 0.3), top_constant=Estimate(1.0, 0.1))
    assert unsure.holds() is None
    assert unsure.recommended_constant == pytest.approx(2.5)
    assert "neither confirmed nor refuted" in unsure.verdict


def test_heavy_tails_are_said_aloud() -> None:
    """One term in 2,000 carries nearly all: few realisations meet it, and those that do make the mean."""
    matrices = torch.eye(3, dtype=torch.float64).repeat(2000, 1, 1)
    matrices[0, 0, 0] = 5000.0
    check = check_condition(FiniteSum(matrices), [2, 4, 8], generator=generator(), realisations=200)
    assert check.heavy_tailed
    assert "errors are too small" in check.verdict


# --- noise that batches do not average out -----------------------------------------------------------------------


class Rounded(LinearOperator):
    """A finite sum whose sampled products carry noise of a fixed size, as in low precision."""

    def __init__(self, inner: FiniteSum, noise: float) -> None:
        self.inner, self.noise = inner, noise

    def zeros(self, columns: int | None = None) -> ParamVector:
        return self.inner.zeros(columns)

    def matvec(self, vector: ParamVector) -> ParamVector:
        return self.inner.matvec(vector)

    @property
    def num_terms(self) -> int:
        return self.inner.num_terms

    def sample(self, batch_size: int, generator: torch.Generator) -> Dense:
        drawn = self.inner.sample(batch_size, generator)
        noise = torch.randn(drawn.matrix.shape, generator=generator, dtype=torch.float64)
        return Dense(drawn.matrix + self.noise * (noise + noise.T), num_terms=batch_size)


def test_a_floor_below_the_gap_shows_in_the_slope() -> None:
    check = check_condition(
        Rounded(rank_ones(), 0.3), [1, 4, 16, 60], generator=generator(), realisations=300
    )
    assert not check.falls_as_inverse
    assert "noise of their own" in check.verdict
    worst = max(point.constant.value for point in check.points)
    assert check.recommended_constant > worst


def test_equal_terms_have_no_gap() -> None:
    A = FiniteSum(torch.diag(torch.tensor([2.0, 1.0], dtype=torch.float64)).repeat(8, 1, 1))
    check = check_condition(A, [1, 2, 4], generator=generator(), realisations=8)
    assert check.slope is None
    assert check.constant == Estimate(0.0, 0.0)
    assert check.holds() is True
    assert "any batch size will do" in check.verdict


# --- networks ----------------------------------------------------------------------------------------------------


def truth_of(model: nn.Module, inputs: list[Tensor], terms: int) -> Truth:
    """With A = (n/N) Σ_i RᵢᵀRᵢ for every example, S = RᵀR, through Jacobians in float64."""
    model = copy.deepcopy(model).double()
    leaves = {name: p.detach() for name, p in model.named_parameters()}
    matrices = []
    for x in inputs:

        def outputs(p: dict[str, Tensor], x: Tensor = x) -> Tensor:
            return torch.func.functional_call(model, p, (x.unsqueeze(0),)).flatten(0, -2)

        J = torch.cat([part.flatten(2) for part in torch.func.jacrev(outputs)(leaves).values()], dim=2)
        p = outputs(leaves).softmax(-1).unsqueeze(2)
        R = (p.sqrt() * (J - (p * J).sum(1, keepdim=True))).flatten(0, 1)
        matrices.append(len(inputs) / terms * R.T @ R)
    return Truth(sum(matrices) / len(inputs), sum(A @ A for A in matrices) / len(inputs))


def trained(model: nn.Module, x: Tensor, y: Tensor, steps: int = 150) -> nn.Module:
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x).flatten(0, -2), y.flatten()).backward()
        optimizer.step()
    return model.eval()


def test_digits_against_the_dense_value() -> None:
    train, _ = load()
    x, y = (tensor[:150] for tensor in train.tensors)
    torch.manual_seed(0)
    model = trained(nn.Sequential(nn.Linear(64, 4), nn.Tanh(), nn.Linear(4, 10)), x, y)
    truth = truth_of(model, list(x.double()), len(x))
    torch.testing.assert_close(truth.mean, exact_hessian(model, x))

    gnh = GaussNewton(model, Classification(), torch.utils.data.TensorDataset(x, y))
    check = check_condition(gnh, [4, 8, 16, 32], generator=generator(), realisations=120)
    assert check.slope is not None
    assert within(check.slope, -1.0, errors=3)
    assert within(check.constant, truth.constant())
    assert within(check.top_constant, truth.top_constant())
    assert check.constant.stderr < 0.1 * check.constant.value


class Bigrams(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(len(text.CHARACTERS), 3)
        self.head = nn.Linear(3, len(text.CHARACTERS))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embed(tokens).tanh())


@pytest.fixture(scope="module")
def language_model() -> GaussNewton:
    """Ragged passages: 5 to 23 predicted characters in each."""
    passages = text.passages()[:24]
    passages = [{"input_ids": p["input_ids"][: 6 if i % 2 else None]} for i, p in enumerate(passages)]
    torch.manual_seed(0)
    model = Bigrams().double()
    ids = torch.cat([p["input_ids"] for p in passages])
    trained(model, ids[:-1], ids[1:])
    return GaussNewton(model, LanguageModeling(), passages)


def test_language_model_counts_the_batch_in_expected_tokens(language_model: GaussNewton) -> None:
    per_example = language_model.terms.terms_per_example
    assert per_example != round(per_example)
    inputs = [example["input_ids"][:-1] for example in language_model.terms.data]
    truth = truth_of(language_model.network.model, inputs, language_model.num_terms)
    check = check_condition(language_model, [20, 40, 80, 160], generator=generator(), realisations=100)
    sizes = [point.batch_size / per_example for point in check.points]
    assert sizes == pytest.approx([round(size) for size in sizes])
    assert len(sizes) == 4
    for point, size in zip(check.points, sizes, strict=True):
        assert within(point.gap, float(truth.gap.trace()) / size)
    assert check.slope is not None
    assert within(check.slope, -1.0, errors=3)
    assert check.slope.stderr < 0.12
    assert within(check.constant, truth.constant(per_example))
    assert within(check.top_constant, truth.top_constant(per_example))


def test_batch_sizes_that_draw_the_same_examples_are_refused(language_model: GaussNewton) -> None:
    with pytest.raises(OptionError, match="batch sizes 2 and 5 both draw about"):
        check_condition(language_model, [2, 5, 40], generator=generator(), realisations=8)


# --- cost and settings -------------------------------------------------------------------------------------------


class Counted(FiniteSum):
    """Counts the columns it is multiplied with, and their terms."""

    products = 0
    terms = 0

    def matvec(self, vector: ParamVector) -> ParamVector:
        self.count(vector, self.num_terms)
        return super().matvec(vector)

    def count(self, vector: ParamVector, terms: int) -> None:
        self.products += vector.columns or 1
        self.terms += (vector.columns or 1) * terms

    def sample(self, batch_size: int, generator: torch.Generator) -> Dense:
        outer, drawn = self, super().sample(batch_size, generator)

        class Sampled(Dense):
            def matvec(self, vector: ParamVector) -> ParamVector:
                outer.count(vector, batch_size)
                return super().matvec(vector)

        return Sampled(drawn.matrix, num_terms=batch_size)


@pytest.mark.parametrize("spectrum_terms", [4096, 20], ids=["whole", "subset"])
def test_the_cost_is_what_was_spent(spectrum_terms: int) -> None:
    A = Counted(rank_ones().matrices)
    check = check_condition(A, [3, 12], generator=generator(), realisations=10, spectrum_terms=spectrum_terms)
    assert (check.num_products, check.num_term_products) == (A.products, A.terms)


def test_a_direction_found_on_a_subset_is_measured_without_bias() -> None:
    """Its own subset's curvature would be too large: λmax of 40 terms against 3,000."""
    A = rank_ones(3000, 20)
    truth = Truth.of(A.matrices)
    check = check_condition(A, [8, 32], generator=generator(), realisations=400, spectrum_terms=40)
    top = float(torch.linalg.eigvalsh(truth.mean)[-1])
    assert check.curvature.value <= top + 4 * check.curvature.stderr
    assert check.curvature.value > 0.8 * top
    assert check.top_constant.value == pytest.approx(truth.top_constant(), rel=0.15)


def test_the_same_seed_gives_the_same_numbers() -> None:
    first, second = (
        check_condition(rank_ones(), [3, 12], generator=generator(3), realisations=8) for _ in range(2)
    )
    assert first == second


def test_batches_that_cannot_be_compared_are_named() -> None:
    A, g = rank_ones(), generator()
    with pytest.raises(OptionError, match="at least two"):
        check_condition(A, [4], generator=g, realisations=8)
    with pytest.raises(OptionError, match=r"batch size 61 is outside 1\.\.60"):
        check_condition(A, [4, 61], generator=g, realisations=8)
    with pytest.raises(OptionError, match="both draw about 4 terms"):
        check_condition(A, [4, 4], generator=g, realisations=8)
    with pytest.raises(SolverError, match="curvature is 0"):
        check_condition(FiniteSum(torch.zeros(4, 3, 3)), [1, 2], generator=g, realisations=8)
