"""Gauss-Newton products against dense float64 matrices, for every architecture."""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from dense import dense_gauss_newton, per_example_matrices, relative_error, widen
from whence import Classification, Dense, GaussNewton, LanguageModeling, ParamVector, Regression
from whence.errors import ModelError
from whence.model.agreement import TOLERATED, disagreement
from whence.model.exact import tangent_only
from whence.model.sampled import SampledGaussNewton
from zoo import CASES, HUGGING_FACE, PLAIN, Case, sequences, vectors

PRODUCTS = ["exact", "finite-difference"]
# Their normalisation layers compute in float32 whatever the model's precision, and so does the reference.
FLOAT32_INSIDE = {"llama", "mistral", "qwen2"}


@functools.cache
def operator(case: Case, dtype: torch.dtype, product: str) -> GaussNewton:
    return GaussNewton(case.model(dtype), case.task, case.data(dtype), product=product)


@functools.cache
def reference(case: Case) -> Dense:
    return dense_gauss_newton(operator(case, torch.float64, "exact"))


@functools.cache
def directions(case: Case) -> dict[str, ParamVector]:
    gnh, dense = operator(case, torch.float64, "exact"), reference(case)
    _, eigenvectors = torch.linalg.eigh(dense.matrix)
    return {
        "random": gnh.zeros().randn_like(torch.Generator().manual_seed(5)),
        "gradient": gnh.gradients(case.data(torch.float64)[:1]).column(0),
        "top eigenvector": dense.unflatten(eigenvectors[:, -1]),
    }


def narrow(vector: ParamVector) -> ParamVector:
    return ParamVector({n: t.float() for n, t in vector.items()}, columns=vector.columns)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("product", PRODUCTS)
def test_float64_products_equal_the_dense_matrix(case: Case, product: str) -> None:
    gnh = operator(case, torch.float64, product)
    tolerance = {"exact": 1e-10, "finite-difference": 1e-6}[product]
    if case.name in FLOAT32_INSIDE:
        tolerance = {"exact": 1e-6, "finite-difference": 1e-3}[product]
    for direction in directions(case).values():
        assert relative_error(gnh.matvec(direction), reference(case).matvec(direction)) <= tolerance


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_float32_products_at_every_scale_and_direction(case: Case, product: str, scale: float) -> None:
    gnh = operator(case, torch.float32, product)
    for direction in directions(case).values():
        vector = narrow(direction).scale_(scale)
        expected = reference(case).matvec(widen(vector))
        assert relative_error(gnh.matvec(vector), expected) <= 1e-3


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("product", PRODUCTS)
def test_block_products_and_quadratic_forms_agree_with_the_matrix(case: Case, product: str) -> None:
    gnh, dense = operator(case, torch.float64, product), reference(case)
    block = ParamVector.stack(list(directions(case).values()))
    tolerance = 1e-3 if case.name in FLOAT32_INSIDE else 1e-6
    assert relative_error(gnh.matvec(block), dense.matvec(block)) <= tolerance
    expected = block.dot(dense.matvec(block))
    torch.testing.assert_close(gnh.quadratic_form(block), expected, rtol=2 * tolerance, atol=0)


@pytest.mark.parametrize("case", [*PLAIN, HUGGING_FACE[0]], ids=lambda case: case.name)
@pytest.mark.parametrize("product", PRODUCTS)
def test_micro_batches_do_not_change_the_product(case: Case, product: str) -> None:
    model, data = case.model(torch.float64), case.data(torch.float64)
    gnh = GaussNewton(model, case.task, data, product=product, micro_batch=1)
    direction = directions(case)["random"]
    assert relative_error(gnh.matvec(direction), reference(case).matvec(direction)) <= 1e-6


def test_auto_is_exact_for_every_architecture_and_says_why() -> None:
    for case in CASES:
        gnh = GaussNewton(case.model(torch.float32), case.task, case.data(torch.float32))
        assert gnh.product == "exact", (case.name, gnh.product_reason)
        assert "forward-mode" in gnh.product_reason
        assert "exact" in repr(gnh)


def test_fused_attention_is_exact_too() -> None:
    case = next(case for case in HUGGING_FACE if case.name == "llama")
    model = case.model(torch.float64)
    assert model.config._attn_implementation == "sdpa"
    gnh = GaussNewton(model, case.task, case.data(torch.float64), product="exact")
    direction = directions(case)["random"]
    assert relative_error(gnh.matvec(direction), reference(case).matvec(direction)) <= 1e-6


# --- parameters ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("product", PRODUCTS)
def test_a_parameter_filter_gives_the_diagonal_block(product: str) -> None:
    case = HUGGING_FACE[0]
    full = reference(case)
    model = case.model(torch.float64)
    gnh = GaussNewton(model, case.task, case.data(torch.float64), params=["transformer.h.*"], product=product)
    inside = torch.cat(
        [torch.full((p.numel(),), n.startswith("transformer.h.")) for n, p in model.named_parameters()]
    )
    block = Dense(full.matrix[inside][:, inside], gnh.zeros())
    direction = gnh.zeros().randn_like(torch.Generator().manual_seed(0))
    assert relative_error(gnh.matvec(direction), block.matvec(direction)) <= 1e-6


def test_frozen_parameters_stay_out_and_tied_ones_appear_once() -> None:
    case = next(case for case in PLAIN if case.name == "attention")
    model = case.model(torch.float64)
    model.norm.weight.requires_grad_(False)
    names = set(GaussNewton(model, case.task, case.data(torch.float64)).network.parameters)
    assert "norm.weight" not in names
    assert "embed.weight" in names
    assert "head.weight" not in names


def test_an_unused_parameter_gets_a_zero_product() -> None:
    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(6, 4), nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    for product in PRODUCTS:
        gnh = GaussNewton(Unused().eval(), Classification(), vectors(torch.float32), product=product)
        result = gnh.matvec(gnh.zeros().randn_like(torch.Generator().manual_seed(0)))
        assert float(result["unused.weight"].abs().max()) == 0.0
        assert float(result["used.weight"].abs().max()) > 0.0


# --- finite differences ----------------------------------------------------------------------------------------


def test_one_sided_bias_is_quadratic_in_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sign alone errs by O(δ); the mean over the two signs by O(δ²)."""
    from whence.model.finite_difference import FiniteDifferences

    case = HUGGING_FACE[0]
    gnh = operator(case, torch.float64, "finite-difference")
    dense, vector = reference(case), directions(case)["random"]
    everything = torch.arange(len(gnh.terms))
    gnh.matvec(vector)  # calibrates
    errors = []
    for aim in (0.08, 0.04, 0.02):
        monkeypatch.setattr(FiniteDifferences, "_aim", lambda self, some, aim=aim: aim)
        monkeypatch.setattr("whence.model.finite_difference._ACCEPT", 1.001)
        plus, minus = (SampledGaussNewton(gnh, everything, None, sign).matvec(vector) for sign in (1, -1))
        mean = plus.clone().lerp_(minus, 0.5)
        errors.append([relative_error(v, dense.matvec(vector)) for v in (plus, mean)])
    for (one_coarse, mean_coarse), (one_fine, mean_fine) in pairwise(errors):
        assert 1.6 < one_coarse / one_fine < 2.5
        assert 3.2 < mean_coarse / mean_fine < 5.0


def test_sampled_products_use_both_signs() -> None:
    gnh = operator(PLAIN[0], torch.float32, "finite-difference")
    generator = torch.Generator().manual_seed(0)
    signs = [gnh.sample(4, generator)._sign for _ in range(40)]
    assert {-1, 1} == set(signs)
    assert gnh.subset(4, generator)._sign is None


def test_holding_the_kinks_is_what_makes_relu_accurate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it, finite differences through ReLU in float32 are off by far more than with it."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(6, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 4)
    ).eval()
    data = vectors(torch.float32)
    exact = GaussNewton(model, Classification(), data)
    vector = exact.zeros().randn_like(torch.Generator().manual_seed(1))
    expected = exact.matvec(vector)
    held = GaussNewton(model, Classification(), data, product="finite-difference").matvec(vector)
    monkeypatch.setattr("whence.model.kinks._KINKED", {})
    free = GaussNewton(model, Classification(), data, product="finite-difference").matvec(vector)
    assert relative_error(held, expected) <= 1e-3
    assert relative_error(free, expected) >= 5 * relative_error(held, expected)


class Chooser(nn.Module):
    """A router whose two best experts are nearly tied on every example, so that any step crosses."""

    def __init__(self, choose: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router, self.choose = nn.Linear(6, 3), choose
        self.experts = nn.Parameter(torch.randn(3, 4, 6))
        with torch.no_grad():
            self.router.weight[1] = self.router.weight[0]
            self.router.bias.copy_(torch.tensor([9.0, 9.0 + 1e-5, 0.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = self.choose(self.router(x))
        return torch.einsum("noi,ni->no", self.experts[chosen.long()], x) + self.router(x).mean(
            1, keepdim=True
        )


CHOICES = {
    "topk": lambda h: h.topk(1).indices[:, 0],
    "topk along another dimension": lambda h: h.T.topk(1, 0).indices[0],
    "sort": lambda h: h.sort(descending=True).indices[:, 0],
    "stable sort": lambda h: h.argsort(dim=1, descending=True, stable=True)[:, 0],
    "max": lambda h: h.max(1).indices,
    "argmax": lambda h: h.argmax(1),
    "comparison": lambda h: h[:, 1] > h[:, 0],
}


@pytest.mark.parametrize("name", CHOICES)
def test_what_a_router_chose_is_held(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, data = Chooser(CHOICES[name]).eval(), vectors(torch.float32)
    exact = GaussNewton(model, Classification(), data, product="exact")
    vector = exact.zeros().randn_like(torch.Generator().manual_seed(1))
    held = GaussNewton(model, Classification(), data, product="finite-difference")
    assert relative_error(held.matvec(vector), exact.matvec(vector)) <= 1e-3
    monkeypatch.setattr("whence.model.kinks._KINKED", {})
    with pytest.raises(ModelError, match=r"backward pass disagree by \d.*the model jumps.*product='exact'"):
        GaussNewton(model, Classification(), data, product="finite-difference")


@pytest.mark.parametrize(
    "bound",
    [lambda h: h.clamp(min=0), lambda h: h.clamp(-9, 0), lambda h: h.clamp_min(0), lambda h: h.clamp_max(0)],
    ids=["min", "both", "clamp_min", "clamp_max"],
)
def test_clamping_is_held(bound: Callable[[torch.Tensor], torch.Tensor]) -> None:
    class Clamped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.linear, self.edge = nn.Linear(6, 4), nn.Linear(6, 4).requires_grad_(False)
            self.edge.load_state_dict(self.linear.state_dict())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.linear(x)
            edge = self.edge(x) + 1e-5 * (-1) ** torch.arange(4)  # on both sides of the bound, near it
            return bound(h - edge) + h.square()

    model, data = Clamped().eval(), vectors(torch.float32)
    exact, differences = (GaussNewton(model, Classification(), data, product=product) for product in PRODUCTS)
    vector = exact.zeros().randn_like(torch.Generator().manual_seed(1))
    assert relative_error(differences.matvec(vector), exact.matvec(vector)) <= 1e-3


def test_a_model_that_does_other_operations_elsewhere_has_no_differences() -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.start = nn.Linear(6, 4), None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.linear(x)
            self.start = self.linear.bias.detach().clone() if self.start is None else self.start
            return h.relu() if torch.equal(self.start, self.linear.bias) else h.clamp_min(0)

    with pytest.raises(
        ModelError, match=r"other operations at other parameters.*clamp_min.*relu.*product='exact'"
    ):
        GaussNewton(Branching().eval(), Classification(), vectors(torch.float32), product="finite-difference")


# --- derivatives that disagree ---------------------------------------------------------------------------------


class Cut(nn.Module):
    """Gradients stop where finite differences go on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 5), nn.Linear(5, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x).detach())


class WrongTangent(torch.autograd.Function):
    """Twice the input, whose forward-mode derivative says three times."""

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return 2 * gradient

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor) -> torch.Tensor:
        return 3 * tangent


class Doubled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return WrongTangent.apply(self.linear(x))


def test_finite_differences_through_a_detach_are_refused() -> None:
    data = vectors(torch.float32)
    assert GaussNewton(Cut().eval(), Classification(), data).product == "exact"
    with pytest.raises(ModelError, match=r"disagree by \d.*\(asked for\).*detach"):
        GaussNewton(Cut().eval(), Classification(), data, product="finite-difference")


def test_forward_mode_that_disagrees_with_the_backward_pass_is_not_used() -> None:
    data = vectors(torch.float32)
    with pytest.raises(ModelError, match=r"forward-mode derivatives .* disagree by \d.*'finite-difference'"):
        GaussNewton(Doubled().eval(), Classification(), data, product="exact")
    gnh = GaussNewton(Doubled().eval(), Classification(), data)
    assert gnh.product == "finite-difference"
    assert "it disagrees with the backward pass by" in gnh.product_reason


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_right_derivatives_agree_far_below_what_is_tolerated(case: Case, dtype: torch.dtype) -> None:
    gnh = GaussNewton(case.model(dtype), case.task, case.data(dtype))
    network, pilot = gnh.network, gnh.terms.fetch(gnh.terms.longest(2))
    differences = gnh.differences(pilot)
    base = differences.base(pilot, graph=False)
    assert disagreement(network, pilot, lambda v: tangent_only(network, pilot, v)[1]) <= 1e-5
    assert disagreement(network, pilot, lambda v: differences.tangent(base, pilot, v)) <= TOLERATED / 20


# --- low precision -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", [PLAIN[0], PLAIN[1], *HUGGING_FACE[:3]], ids=lambda case: case.name)
def test_low_precision_models_are_computed_in_float32(case: Case, dtype: torch.dtype, product: str) -> None:
    """Against the dense matrix of the same rounded weights; a filter leaves others to be widened as constants."""
    rounded = case.model(dtype)
    wide = case.model(torch.float64)
    wide.load_state_dict({n: t.double() for n, t in rounded.state_dict().items()})
    before = {n: t.clone() for n, t in rounded.state_dict().items()}
    some = [name for name, _ in rounded.named_parameters()][1:]
    for params in (None, some):
        data = [  # of the same numbers, in inputs too
            tuple(t.double() if isinstance(t, torch.Tensor) else t for t in row)
            if isinstance(row, tuple)
            else row
            for row in case.data(dtype)
        ]
        exact = GaussNewton(wide, case.task, data, params=params)
        gnh = GaussNewton(rounded, case.task, case.data(dtype), params=params, product=product)
        vector = exact.zeros().randn_like(torch.Generator().manual_seed(2))
        assert {t.dtype for t in gnh.zeros().values()} == {torch.float32}
        found = gnh.quadratic_form(narrow(vector)) / exact.quadratic_form(vector)
        assert abs(float(found) - 1) <= 2e-3
        assert relative_error(gnh.matvec(narrow(vector)), exact.matvec(vector)) <= 1e-3
        query = case.data(dtype)[:1]
        assert relative_error(gnh.gradients(query), exact.gradients(data[:1])) <= 1e-4
    assert all(torch.equal(before[n], t) for n, t in rounded.state_dict().items())
    assert {p.dtype for p in rounded.parameters()} == {dtype}


# --- sampling --------------------------------------------------------------------------------------------------


def test_sampling_is_unbiased_with_ragged_sequences() -> None:
    """Mean of vᵀH̃v over many draws equals vᵀHv within 4 standard errors; the naive normalisation does not."""
    case = HUGGING_FACE[0]
    gnh, dense = operator(case, torch.float64, "exact"), reference(case)
    matrices = per_example_matrices(gnh)
    lengths = torch.tensor([case.task.count_terms(e) for e in gnh.terms.data])
    assert len(lengths.unique()) > 1
    vector = directions(case)["random"]
    flat = dense.flatten(vector)
    true = float(flat @ dense.matrix @ flat)
    forms = torch.einsum("i,nij,j->n", flat, matrices, flat)
    generator = torch.Generator().manual_seed(0)
    ours = torch.tensor([float(gnh.sample(5, generator).quadratic_form(vector)) for _ in range(400)]).double()
    assert abs(float(ours.mean()) - true) <= 4 * float(ours.std()) / 20
    drawn = torch.randint(len(forms), (20000, 1), generator=generator)
    naive = forms[drawn].sum(1) / lengths[drawn].sum(1)
    assert abs(float(naive.mean()) - true) > 10 * float(naive.std()) / 20000**0.5
    weighted = forms[drawn].sum(1) * gnh.terms.weight(1)
    assert abs(float(weighted.mean()) - true) <= 4 * float(weighted.std()) / 20000**0.5


def test_batch_size_counts_terms_not_examples() -> None:
    gnh = operator(HUGGING_FACE[0], torch.float32, "exact")
    data = sequences(torch.float32)
    terms = sum(LanguageModeling().count_terms(row) for row in data)
    assert gnh.num_terms == terms > len(data)
    assert len(gnh.sample(terms, torch.Generator().manual_seed(0))._positions) == len(data)


# --- other losses ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("product", PRODUCTS)
def test_regression_products(product: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).double().eval()
    data = [(x, 1000 * x[:2]) for x, _ in vectors(torch.float64)]
    gnh = GaussNewton(model, Regression(variance=4.0), data, product=product)
    inputs = torch.stack([x for x, _ in data])
    params = dict(model.named_parameters())
    jac = torch.func.jacrev(lambda p: torch.func.functional_call(model, p, (inputs,)))(params)
    flat = torch.cat([j.reshape(len(inputs) * 2, -1) for j in jac.values()], 1).detach()
    dense = Dense(flat.T @ flat / len(inputs) / 4.0, gnh.zeros())
    vector = gnh.zeros().randn_like(torch.Generator().manual_seed(0))
    assert relative_error(gnh.matvec(vector), dense.matvec(vector)) <= 1e-6


def test_a_direction_that_moves_nothing_has_a_zero_product() -> None:
    """Shifting all logits alike changes no probability; scaling a layer no output depends on changes nothing."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double().eval()
    with torch.no_grad():
        model[2].weight.zero_()  # the outputs no longer depend on the first layer
    gnh = GaussNewton(model, Classification(), vectors(torch.float64), product="finite-difference")
    vector = gnh.zeros()
    vector["0.weight"].normal_()
    assert float(gnh.matvec(vector).norm()) == 0.0
    vector["2.bias"].fill_(1.0)
    assert float(gnh.matvec(vector).norm()) <= 1e-8


# --- how many examples a pass takes ----------------------------------------------------------------------


class _Widened(nn.Module):
    """One parameter, and as many equal outputs as asked for: large tensors without large weights."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.outputs = outputs
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.scale * x[:, :1]).repeat(1, self.outputs)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (_Widened(2**18), 3),  # 1 MiB of outputs an example, 3 MiB of cache
        (_Widened(2**22), 1),  # no less than one
        (nn.Linear(3, 2**20), 4),  # every pass goes through 16 MiB of parameters anyhow
        (nn.Linear(3, 10), 1024),  # small examples: no more than that
    ],
)
def test_a_pass_takes_as_many_examples_as_the_cache_holds(model: nn.Module, expected: int) -> None:
    data = [(torch.ones(3), torch.tensor(0)) for _ in range(3)]
    assert GaussNewton(model.eval(), Classification(), data, product="exact").micro_batch == expected
