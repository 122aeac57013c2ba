"""Scores against per-example gradients by plain autograd, and what they may and may not depend on."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from small import DOUBLE, classifier, generator, operator
from test_untouched import state, used_model
from whence import Classification, GaussNewton, LanguageModeling, ParamVector
from whence.errors import DataError, ModelError, OptionError, VectorError
from whence.scoring import Scorer
from whence.scoring.cost import Work, count_work
from zoo import CASES, PLAIN, Case, sequences, vectors

WAYS = [("exact", "directional"), ("exact", "gradients"), ("finite-difference", "directional")]
# Their normalisation layers compute in float32 whatever the model's precision.
FLOAT32_INSIDE = {"llama", "mistral", "qwen2"}
BY_NAME = {case.name: case for case in CASES}
FEW = [BY_NAME[name] for name in ("mlp", "convnet", "gpt2", "llama")]
FEW_IN_PRECISIONS = [*[(case, torch.float32) for case in FEW], (BY_NAME["llama"], DOUBLE)]
PRECISION_NAMES = [f"{case.name} {dtype}" for case, dtype in FEW_IN_PRECISIONS]
RAGGED = [BY_NAME[name] for name in ("attention", "gpt2")]


def term_losses(model: nn.Module, example: Any) -> Tensor:
    """The losses of one example's terms, from the definition: no batch, no padding, no mask."""
    if isinstance(example, tuple):
        return F.cross_entropy(model(example[0][None]), torch.tensor([example[1]]), reduction="none")
    inputs = example["pixel_values"] if "pixel_values" in example else example["input_ids"]
    outputs = model(inputs[None])
    logits = getattr(outputs, "logits", outputs)
    labels = torch.as_tensor(example["labels"])
    if labels.ndim == 0:
        return F.cross_entropy(logits, labels[None], reduction="none")
    kept = labels[1:] != -100
    return F.cross_entropy(logits[0, :-1][kept], labels[1:][kept], reduction="none")


def flat_gradient(model: nn.Module, loss: Tensor) -> Tensor:
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True, retain_graph=True)
    pairs = zip(parameters, gradients, strict=True)
    return torch.cat([(torch.zeros_like(p) if g is None else g).reshape(-1) for p, g in pairs])


def flat(model: nn.Module, block: ParamVector) -> Tensor:
    return torch.cat([block[name].flatten(1) for name, _ in model.named_parameters()], 1).double()


@functools.cache
def directions(case: Case) -> ParamVector:
    """A random direction, a gradient, and (by power iteration) one of large curvature, at odd scales."""
    data = case.data(DOUBLE)
    gnh = GaussNewton(case.model(DOUBLE), case.task, data)
    gradient = gnh.gradients(data[:1]).column(0)
    steep = gradient.clone()
    for _ in range(8):
        steep = gnh.matvec(steep.scale_(1 / float(steep.norm())))
    random = gnh.zeros().randn_like(generator(5))
    return ParamVector.stack([random, gradient, steep.scale_(1e3 / float(steep.norm()))])


@functools.cache
def expected(case: Case) -> Tensor:
    model = case.model(DOUBLE)
    losses = [term_losses(model, example).mean() for example in case.data(DOUBLE)]
    return flat(model, directions(case)) @ torch.stack([flat_gradient(model, loss) for loss in losses]).T


def narrow(block: ParamVector) -> ParamVector:
    return ParamVector({name: tensor.float() for name, tensor in block.items()}, columns=block.columns)


def scorer(case: Case, product: str, method: str, dtype: torch.dtype = DOUBLE, **options: Any) -> Scorer:
    """On an operator of its own, which has computed nothing yet."""
    block = directions(case) if dtype == DOUBLE else narrow(directions(case))
    gnh = GaussNewton(case.model(dtype), case.task, case.data(dtype), product=product, **options)
    return Scorer(gnh, block, method=method)


def everything(scorer: Scorer) -> Tensor:
    return scorer.score(torch.arange(len(scorer.terms)))


def error(scores: Tensor, truth: Tensor) -> float:
    """Of the worst direction, relative to its largest score."""
    return float(((scores - truth).abs().amax(1) / truth.abs().amax(1)).max())


# --- values ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize(("product", "method"), WAYS)
def test_float64_scores_are_inner_products_with_plain_gradients(
    case: Case, product: str, method: str
) -> None:
    tolerance = {"exact": 1e-9, "finite-difference": 1e-7}[product]
    if case.name in FLOAT32_INSIDE:
        tolerance = {"exact": 1e-5, "finite-difference": 5e-3}[
            product
        ]  # the steep direction is the worst there is
    scores = everything(scorer(case, product, method))
    assert scores.dtype == DOUBLE
    assert error(scores, expected(case)) <= tolerance


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize(("product", "method"), WAYS)
def test_float32_scores(case: Case, product: str, method: str) -> None:
    tolerance = {"exact": 5e-5, "finite-difference": 5e-3}[product]  # float32 differs from CPU to CPU
    assert error(everything(scorer(case, product, method, torch.float32)), expected(case)) <= tolerance


@pytest.mark.parametrize("case", FEW, ids=lambda case: case.name)
@pytest.mark.parametrize(("product", "method"), WAYS)
def test_several_directions_score_as_each_alone(case: Case, product: str, method: str) -> None:
    scores = everything(scorer(case, product, method))
    for k, column in enumerate(directions(case).unstack()):
        gnh = GaussNewton(case.model(DOUBLE), case.task, case.data(DOUBLE), product=product)
        alone = everything(Scorer(gnh, column, method=method))  # a single vector, not a block
        assert alone.shape == (1, len(gnh.terms))
        if product == "finite-difference":  # each has a step of its own
            assert torch.equal(alone[0], scores[k])
        else:
            tolerance = 1e-6 if case.name in FLOAT32_INSIDE else 1e-12
            assert error(alone, scores[k : k + 1]) <= tolerance


@pytest.mark.parametrize("case", RAGGED, ids=lambda case: case.name)
@pytest.mark.parametrize(("product", "method"), WAYS)
def test_ragged_sequences_in_any_order_and_batch(case: Case, product: str, method: str) -> None:
    positions = torch.tensor([2, 0, 3, 1, 0])
    for micro_batch in (1, 2, 5):
        scores = scorer(case, product, method, micro_batch=micro_batch).score(positions)
        assert error(scores, expected(case)[:, positions]) <= 1e-6


@pytest.mark.parametrize(("product", "method"), WAYS)
def test_data_other_than_the_training_data(product: str, method: str) -> None:
    case = BY_NAME["gpt2"]
    gnh = GaussNewton(case.model(DOUBLE), case.task, case.data(DOUBLE)[:2], product=product)
    other = Scorer(gnh, directions(case), data=case.data(DOUBLE)[2:], method=method)
    assert len(other.terms) == 2
    assert error(everything(other), expected(case)[:, 2:]) <= 1e-6
    assert error(everything(Scorer(gnh, directions(case), method=method)), expected(case)[:, :2]) <= 1e-6


def test_an_example_in_a_large_batch_is_scored_as_well_as_alone() -> None:
    """The one that a direction comes from moves further than its batch does on average."""
    case = BY_NAME["gpt2"]
    rows = [torch.randint(17, (3 + i % 9,), generator=generator(i)) for i in range(128)]
    exact = GaussNewton(case.model(DOUBLE), case.task, rows)
    direction = exact.gradients([rows[10], rows[50], rows[77]])
    truth = everything(Scorer(exact, direction))
    for micro_batch in (1, 128):
        options = {"product": "finite-difference", "micro_batch": micro_batch}
        gnh = GaussNewton(case.model(torch.float32), case.task, rows, **options)
        assert error(everything(Scorer(gnh, narrow(direction), method="directional")), truth) <= 1e-3


@pytest.mark.parametrize("name", ["mlp", "gpt2"])
def test_bfloat16_models_are_scored_in_float32(name: str) -> None:
    """Against plain gradients of the same rounded weights."""
    case = BY_NAME[name]
    rounded, wide = case.model(torch.bfloat16), case.model(DOUBLE)
    wide.load_state_dict({n: t.double() for n, t in rounded.state_dict().items()})
    data = case.data(torch.bfloat16)
    exact = GaussNewton(
        wide, case.task, [(x.double(), y) for x, y in data] if name == "mlp" else case.data(DOUBLE)
    )
    truth = everything(Scorer(exact, directions(case), method="gradients"))
    gnh = GaussNewton(rounded, case.task, data, product="finite-difference")
    scores = everything(Scorer(gnh, narrow(directions(case)), method="directional"))
    assert error(scores, truth) <= 1e-3


# --- terms -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", RAGGED, ids=lambda case: case.name)
@pytest.mark.parametrize(("product", "method"), WAYS)
def test_each_terms_share_is_its_own_derivative_and_they_add_up(
    case: Case, product: str, method: str
) -> None:
    model, data = case.model(DOUBLE), case.data(DOUBLE)
    scored = scorer(case, product, method, micro_batch=3)
    order = [3, 2, 0, 1]
    shares = scored.term_shares(torch.tensor(order))
    for position, share in zip(order, shares, strict=True):
        labels = data[position]["labels"]
        predicts = torch.zeros(share.shape[1], dtype=torch.bool)
        predicts[: len(labels) - 1] = labels[1:] != -100  # entry j belongs to the prediction of token j + 1
        losses = term_losses(model, data[position])
        gradients = torch.stack([flat_gradient(model, loss) for loss in losses])
        truth = flat(model, directions(case)) @ gradients.T / len(losses)
        assert error(share[:, predicts], truth) <= 1e-6
        assert torch.equal(share[:, ~predicts], torch.zeros_like(share[:, ~predicts]))
        torch.testing.assert_close(
            share.sum(1), scored.score(torch.tensor([position]))[:, 0], rtol=1e-6, atol=1e-9
        )


@pytest.mark.parametrize(("product", "method"), WAYS)
def test_an_example_without_terms_scores_zero(product: str, method: str) -> None:
    case = BY_NAME["gpt2"]
    rows = sequences(DOUBLE)
    rows[1]["labels"][:] = -100
    gnh = GaussNewton(case.model(DOUBLE), case.task, rows, product=product)
    scores = everything(Scorer(gnh, directions(case), method=method))
    assert torch.equal(scores[:, 1], torch.zeros(3, dtype=DOUBLE))
    assert error(scores[:, [0, 2, 3]], expected(case)[:, [0, 2, 3]]) <= 1e-6


# --- what a score depends on -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("case", "dtype"), FEW_IN_PRECISIONS, ids=PRECISION_NAMES)
@pytest.mark.parametrize(("product", "method"), WAYS)
def test_scores_do_not_depend_on_what_was_scored_before(
    case: Case, dtype: torch.dtype, product: str, method: str
) -> None:
    one, two = scorer(case, product, method, dtype), scorer(case, product, method, dtype)
    batches = [torch.tensor([0]), torch.tensor([2, 1]), torch.tensor([3, 0, 1])]
    forwards = [one.score(batch) for batch in batches]
    backwards = [two.score(batch) for batch in reversed(batches)][::-1]
    again = [one.score(batch) for batch in batches]
    for first, second, third in zip(forwards, backwards, again, strict=True):
        assert torch.equal(first, second)
        assert torch.equal(first, third)


@pytest.mark.parametrize(("case", "dtype"), FEW_IN_PRECISIONS, ids=PRECISION_NAMES)
def test_scores_do_not_depend_on_earlier_products(case: Case, dtype: torch.dtype) -> None:
    """Neither on products before the first score, which measures the step, nor on those in between."""
    fresh = everything(scorer(case, "finite-difference", "directional", dtype))
    used = scorer(case, "finite-difference", "directional", dtype)
    vector = used.gnh.zeros().randn_like(generator(1)).scale_(1e4)
    used.gnh.matvec(vector)
    before = everything(used)
    used.gnh.sample(4, generator()).matvec(vector)
    used.gnh.restore_state({"gain": 1e6, "curvature": 1e9, "epsilon": 1e-3})
    assert torch.equal(everything(used), before)
    assert torch.equal(before, fresh)


def test_a_derivative_is_divided_by_the_step_it_was_taken_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the corrections of a badly guessed step run out."""
    case = PLAIN[0]
    gnh = GaussNewton(case.model(DOUBLE), case.task, case.data(DOUBLE), product="finite-difference")
    batch, column = gnh.terms.fetch(torch.arange(6)), directions(case).column(0)
    differences = gnh.differences(batch)
    memory, step = differences.calibrate(batch, column)
    truth = everything(scorer(case, "exact", "directional"))[0, :6]
    monkeypatch.setattr("whence.model.finite_difference._MAX_CORRECTIONS", 1)
    for off in (1.0, 0.01, 20.0):
        derivatives = differences.loss_derivatives(
            batch, column, (memory, off * step), lambda outputs: gnh.task.losses(outputs, batch)
        )
        assert error(derivatives[None], truth[None]) <= 1e-3


@pytest.mark.parametrize(("product", "method"), WAYS)
def test_the_model_is_left_bit_for_bit_as_it_was(product: str, method: str) -> None:
    model = used_model()
    before = state(model)
    gnh = operator(model, product=product, micro_batch=4)
    scored = Scorer(gnh, gnh.zeros(3).randn_like(generator()), method=method)
    everything(scored)
    scored.term_shares(torch.arange(3))
    assert state(model) == before
    model.fuse.calls = 3 if method == "gradients" else 2
    with pytest.raises(ModelError, match="RuntimeError: the model's own error"):
        everything(scored)
    assert state(model) == before


# --- what it costs ---------------------------------------------------------------------------------------------


def test_the_work_of_a_linear_layer_is_counted() -> None:
    model = nn.Linear(6, 4).eval()
    gnh = GaussNewton(model, Classification(), vectors(torch.float32), micro_batch=16)
    pilot = gnh.terms.fetch(torch.arange(5))
    work = count_work(gnh, pilot)
    assert work.flops == 2 * 6 * 4  # a multiplication and an addition per weight, of one example
    assert work.launches == 1  # one matrix product; transposing is a view
    assert (work.parameters, work.batch, work.device) == (6 * 4 + 4, 16, "cpu")
    assert Scorer(gnh, gnh.zeros(2)).work == work


@pytest.mark.parametrize("flops", [1e4, 1e9])
@pytest.mark.parametrize("launches", [1, 300])
@pytest.mark.parametrize("parameters", [1_000, 10_000_000])
@pytest.mark.parametrize("batch", [1, 64])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_ways_cross_once(flops: float, launches: int, parameters: int, batch: int, device: str) -> None:
    work = Work(flops, launches, parameters, batch, device)
    for exact, vectorised in ((True, True), (True, False), (False, False)):
        switch = work.switch_point(exact=exact, vectorised=vectorised)
        for directions in {1, 2, switch // 2, switch - 1, switch, switch + 1, 10 * switch} - {0}:
            gradients = work.gradients(directions)
            directional = work.directional(directions, exact=exact, vectorised=vectorised)
            assert (gradients < directional) == (directions >= switch) or switch == 100_000
        assert switch > 1
        cheaper = work.directional(7, exact=True, vectorised=True)
        assert cheaper <= work.directional(7, exact=True, vectorised=False)


def test_auto_takes_the_cheapest_way_by_count() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"n_embd": 96, "n_layer": 1, "n_head": 2, "n_positions": 64, "vocab_size": 50}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).eval()
    rows = [torch.randint(50, (64,), generator=generator(i)) for i in range(4)]
    for product in ("exact", "finite-difference"):
        exact = product == "exact"
        gnh = GaussNewton(model, LanguageModeling(), rows, product=product, micro_batch=4)
        for count in (1, 4, 40):
            scorer = Scorer(gnh, gnh.zeros(count))
            costs = {
                "directional": scorer.work.directional(count, exact=exact, vectorised=exact),
                "layers": scorer.work.layers(count, norms=False),
                "gradients": scorer.work.gradients(count),
            }
            assert scorer.method == min(costs, key=costs.__getitem__)
            assert scorer.cost == costs[scorer.method]
            assert f"for {count} direction" in scorer.describe()
        assert scorer.method == "layers"


def test_where_layers_cannot_be_read_many_queries_take_a_gradient_for_each_example() -> None:
    model = nn.Sequential(nn.LSTM(6, 24, batch_first=True), _Last(), nn.Linear(24, 4)).to(DOUBLE).eval()
    rows = [(torch.randn(5, 6, generator=generator(i), dtype=DOUBLE), i % 4) for i in range(4)]
    gnh = GaussNewton(model, Classification(), rows, micro_batch=4)
    with pytest.raises(OptionError, match=r"method is 'layers', and .* cannot be read"):
        Scorer(gnh, gnh.zeros(), method="layers")
    one = Scorer(gnh, gnh.zeros())
    assert one.method == "directional"
    exact = gnh.product == "exact"
    switch = one.work.switch_point(exact=exact, vectorised=exact and gnh.vectorises(one._pilot, gnh.zeros(1)))
    assert Scorer(gnh, gnh.zeros(switch - 1)).method == "directional"
    assert Scorer(gnh, gnh.zeros(switch)).method == "gradients"


class _Last(nn.Module):
    def forward(self, outputs: tuple[Tensor, Any]) -> Tensor:
        return outputs[0][:, -1]


@pytest.mark.parametrize("norms", [True, False])
@pytest.mark.parametrize("columns", [1, 40])
def test_scores_by_layers_are_those_by_gradients(columns: int, norms: bool) -> None:
    for case in CASES:
        gnh = GaussNewton(case.model(DOUBLE), case.task, case.data(DOUBLE))
        if gnh.example_gradients().missing:
            continue
        metric = gnh.zeros().randn_like(generator()).power(2.0)
        gnh = gnh.in_metric(ParamVector({name: part + 0.1 for name, part in metric.items()}))
        block, positions = gnh.zeros(columns).randn_like(generator(1)), torch.arange(len(gnh.terms))
        by_layers, by_gradients = (
            Scorer(gnh, block, method=method, norms=norms) for method in ("layers", "gradients")
        )
        torch.testing.assert_close(
            by_layers.score(positions), by_gradients.score(positions), rtol=1e-6, atol=1e-8
        )
        if norms:
            torch.testing.assert_close(
                by_layers.score_with_norms(positions)[1],
                by_gradients.score_with_norms(positions)[1],
                rtol=1e-6,
                atol=0,
            )


def test_a_way_that_was_asked_for_is_not_called_cheaper_where_it_is_not() -> None:
    gnh = operator()
    chosen = Scorer(gnh, gnh.zeros())
    assert chosen.method == "layers"
    assert "times cheaper" in chosen.describe()
    forced = Scorer(gnh, gnh.zeros(), method="gradients")
    assert forced.cost > chosen.cost
    assert "cheaper" not in forced.describe()


# --- what cannot work ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fast", "", None, "Gradients"])
def test_an_unknown_method_is_refused_naming_the_known_ones(method: Any) -> None:
    gnh = operator()
    with pytest.raises(
        OptionError, match=r"method is .*'auto', 'directional', 'layers' or 'gradients'"
    ) as caught:
        Scorer(gnh, gnh.zeros(), method=method)
    assert repr(method) in str(caught.value)


def test_directions_of_another_selection_or_shape_are_refused() -> None:
    model = classifier()
    gnh, other = operator(model), operator(model, params=["4.*"])
    with pytest.raises(VectorError, match=r"direction belongs to another model.*missing '0\.weight'"):
        Scorer(gnh, other.zeros(2))
    with pytest.raises(VectorError, match=r"unexpected '0\.weight'"):
        Scorer(other, gnh.zeros())
    wrong = {name: tensor.clone() for name, tensor in gnh.zeros().items()} | {"4.bias": torch.zeros(5)}
    with pytest.raises(VectorError, match=r"direction's '4\.bias' has shape \(5,\), expected \(4,\)"):
        Scorer(gnh, ParamVector(wrong))


@pytest.mark.parametrize("given", [None, {"x": torch.ones(2)}, torch.ones(3)], ids=["None", "dict", "tensor"])
def test_directions_that_are_no_vector_are_refused(given: Any) -> None:
    with pytest.raises(VectorError, match=f"direction.*{type(given).__name__}"):
        Scorer(operator(), given)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_directions_with_nan_are_refused(value: float) -> None:
    gnh = operator()
    block = gnh.zeros(2)
    block["4.bias"][1, 0] = value
    with pytest.raises(VectorError, match="NaN or infinity"):
        Scorer(gnh, block)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "data set is empty"),
        ({"x": [1, 2]}, "list of examples"),
        ([(torch.ones(6, dtype=DOUBLE), 0), (torch.full((6,), math.nan, dtype=DOUBLE), 1)], "NaN"),
        ([(torch.ones(6, dtype=DOUBLE), 0), (torch.ones(6, dtype=DOUBLE), 9)], "label 9 .* out of range"),
    ],
    ids=["empty", "dict", "NaN", "label"],
)
def test_data_that_cannot_be_scored_are_refused(data: Any, message: str) -> None:
    gnh = operator()
    with pytest.raises(DataError, match=message):
        everything(Scorer(gnh, gnh.zeros(2), data=data, method="directional"))


@pytest.mark.parametrize(("product", "method"), WAYS)
def test_no_positions_have_no_scores(product: str, method: str) -> None:
    scored = scorer(PLAIN[0], product, method)
    none = torch.empty(0, dtype=torch.long)
    assert scored.score(none).shape == (3, 0)
    assert scored.term_shares(none) == []
