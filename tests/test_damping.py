"""Damping that finds itself: the metric, λ, other λ from the same solve, halves of the data."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import whence
from dense import dense_gauss_newton
from whence import Classification, GaussNewton, Options, ParamVector, attribute, load, validate
from whence.attribution import strain
from whence.attribution.damping import GUESS, RECIPE, STRAIN, first_damping, metric_of, raise_for
from whence.attribution.stability import measure_stability
from whence.attribution.strain import PROBES, measure_strain
from whence.errors import OptionError
from whence.model.second_moment import BATCH, factored, root_second_moment
from whence.preconditioners.ekfac import ekfac
from whence.spectrum import Estimate

TASK = Classification()


@cache
def problem() -> tuple[nn.Module, list[Any], torch.optim.Optimizer]:
    """A small network, trained on real digits by Adam."""
    from whence.demo.digits import load_digits_with_flipped_labels

    torch.manual_seed(0)
    data = load_digits_with_flipped_labels().train
    train = [(x[::4].double(), y) for x, y in (data[i] for i in range(160))]
    model = nn.Sequential(nn.Linear(16, 6), nn.Tanh(), nn.Linear(6, 10)).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    x, y = torch.stack([x for x, _ in train]), torch.stack([y for _, y in train])
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model.eval(), train, optimizer


def exact(damping: float, metric: ParamVector | None) -> torch.Tensor:
    model, train, _ = problem()
    gnh = GaussNewton(model, TASK, train)
    dense = dense_gauss_newton(gnh)
    D = torch.ones(len(dense.matrix), dtype=torch.float64) if metric is None else dense.flatten(metric)
    gradients = dense.flatten(gnh.gradients(train))
    return gradients[:3] @ torch.linalg.solve(dense.matrix + damping * torch.diag(D), gradients.T)


def correlation(one: torch.Tensor, other: torch.Tensor) -> float:
    return min(float(torch.corrcoef(torch.stack(pair))[0, 1]) for pair in zip(one, other, strict=True))


def test_the_second_moment_is_that_of_batches() -> None:
    model, train, _ = problem()
    gnh = GaussNewton(model, TASK, train)
    found = root_second_moment(gnh, generator=torch.Generator().manual_seed(0))
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(0))
    squares = []
    for positions in order.split(BATCH):
        x, y = torch.stack([train[i][0] for i in positions]), torch.stack([train[i][1] for i in positions])
        loss = nn.functional.cross_entropy(model(x), y)
        squares.append([g.square() for g in torch.autograd.grad(loss, list(model.parameters()))])
    expected = [torch.stack(parts).mean(0).sqrt() for parts in zip(*squares, strict=True)]
    whole = torch.cat([part.flatten() for part in expected])
    least = 1e-3 * float(whole.square().mean().sqrt())
    assert float(whole.min()) < least  # pixels that are always dark have the floor
    for layer, weight, bias in ((0, *expected[:2]), (2, *expected[2:])):
        truth = torch.cat([weight, bias.unsqueeze(1)], 1).clamp_min(least)
        part = torch.cat([found[f"{layer}.weight"], found[f"{layer}.bias"].unsqueeze(1)], 1)
        for side in (0, 1):  # the same means of squares by row and by column, and rank one
            torch.testing.assert_close(part.square().mean(side), truth.square().mean(side))
        torch.testing.assert_close(part * part[0, 0], part[:, :1] * part[:1])


def test_a_parameter_that_nothing_moves_has_a_floor() -> None:
    network = GaussNewton(
        nn.Linear(2, 2, bias=False).eval(), TASK, [(torch.ones(2), 0), (torch.zeros(2), 1)]
    ).network
    metric = factored(ParamVector({"weight": torch.tensor([[0.0, 0.0], [3.0, 4.0]])}), network)["weight"]
    floor = 1e-3 * 2.5
    rows = torch.tensor([floor**2, 12.5])
    columns = torch.tensor([(9 + floor**2) / 2, (16 + floor**2) / 2])
    torch.testing.assert_close(metric, (rows.unsqueeze(1) * columns / rows.mean()).sqrt())
    nothing = factored(ParamVector({"weight": torch.zeros(2, 2)}), network)["weight"]
    torch.testing.assert_close(nothing, torch.ones(2, 2))


def test_with_the_optimizer_scores_are_those_of_its_metric() -> None:
    model, train, optimizer = problem()
    result = attribute(model, train, train[:3], task=TASK, training=optimizer, accuracy=0.9999, solver="cg")
    assert result.solve.plan.damping == pytest.approx(RECIPE / (0.02 * 60))
    metric = whence.Training.read(optimizer, model).root_moment
    assert metric is not None
    network = GaussNewton(model, TASK, train).network
    assert correlation(result.scores, exact(result.solve.plan.damping, factored(metric, network))) > 0.999


def test_without_it_scores_are_those_of_the_measured_metric() -> None:
    model, train, _ = problem()
    result = attribute(model, train, train[:3], task=TASK, accuracy=0.9999, solver="cg")
    gnh = GaussNewton(model, TASK, train)
    metric = root_second_moment(gnh, generator=whence.Options().generator(5))
    assert result.solve.plan.damping >= GUESS * (1 - 1e-9)
    assert result.solve.in_metric
    assert correlation(result.scores, exact(result.solve.plan.damping, metric)) > 0.999


class Bigrams(nn.Module):
    """A table of logits: which token follows which."""

    def __init__(self, logits: torch.Tensor) -> None:
        super().__init__()
        self.table = nn.Embedding.from_pretrained(logits, freeze=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.table(input_ids)
        return found


def test_it_does_not_matter_how_text_is_cut_into_passages() -> None:
    """The same text in passages of 5 and of 33 tokens is damped alike, though √v is 2.8 times as large in the first."""
    vocabulary, random = 6, torch.Generator().manual_seed(0)
    chances = torch.rand(vocabulary, vocabulary, generator=random, dtype=torch.float64).softmax(-1)
    tokens = [0]
    for _ in range(32 * 1000):
        tokens.append(int(torch.multinomial(chances[tokens[-1]], 1, generator=random)))
    text = torch.tensor(tokens)
    counts = torch.zeros(vocabulary, vocabulary, dtype=torch.float64)
    counts.index_put_((text[:-1], text[1:]), torch.ones(len(text) - 1, dtype=torch.float64), accumulate=True)
    # trained to the end: no gradient is left
    model = Bigrams((counts / counts.sum(1, keepdim=True)).log()).eval()
    damped = []
    for length in (4, 32):  # every prediction is in both
        passages = [
            {"input_ids": text[start : start + length + 1]} for start in range(0, len(text) - length, length)
        ]
        gnh = GaussNewton(model, whence.LanguageModeling(), passages)
        metric = metric_of(gnh, None, Options())
        assert metric is not None
        spectrum = whence.Spectrum(trace=Estimate(1.0), frobenius=Estimate(1.0), lambda_max=Estimate(1.0))
        found, words = first_damping("auto", None, spectrum, gnh)
        assert f"{length} terms" in words
        damped.append(found * metric["table.weight"])
    ratio = damped[0] / damped[1]  # 64 batches know √v to 6%
    assert abs(float(ratio.log().mean())) < 4 * 0.06 * 2**0.5 / 36**0.5
    assert float(ratio.log().abs().max()) < 5 * 0.06 * 2**0.5


def test_plain_dot_products_stay_plain() -> None:
    model, train, _ = problem()
    result = attribute(model, train, train[:3], task=TASK)
    gnh = GaussNewton(model, TASK, train)
    gradients = gnh.gradients(train)
    torch.testing.assert_close(
        result.gradient_dot_products,
        gradients.part(0, 3).gram(gradients),
        rtol=1e-4,
        atol=1e-6,
        check_dtype=False,
    )


def test_a_given_damping_has_no_metric() -> None:
    model, train, _ = problem()
    result = attribute(model, train, train[:3], task=TASK, damping=0.1, accuracy=0.9999, solver="cg")
    assert not result.solve.in_metric
    assert result.stability is None
    assert result.data_stderr is None
    assert correlation(result.scores, exact(0.1, None)) > 0.999


def test_a_part_of_auto_is_in_the_same_metric() -> None:
    model, train, optimizer = problem()
    for training in (None, optimizer):
        whole = attribute(model, train, train[:3], task=TASK, training=training, solver="cg")
        part = attribute(
            model, train, train[:3], task=TASK, training=training, solver="cg", damping="auto/16"
        )
        assert part.solve.plan.damping == pytest.approx(whole.solve.plan.damping / 16)
        assert part.solve.in_metric
        assert part.stability is not None
        assert float(part.stability.dampings[0]) == pytest.approx(part.solve.plan.damping)
        assert "Divided by 16" in part.solve.damping_words
        again = part.over_damping([whole.solve.plan.damping]).scores[0]
        assert correlation(again, whole.scores) > 0.99
    asked = attribute(model, train, train[:3], task=TASK, damping="auto/16", stability=True)
    assert asked.stability is not None
    assert float(asked.stability.dampings[0]) == pytest.approx(asked.solve.plan.damping)


def dense_strain(damping: float) -> tuple[float, float]:
    """By all examples, and by those in the middle of parts of the sum of squares."""
    model, train, _ = problem()
    dense = dense_gauss_newton(GaussNewton(model, TASK, train))
    gradients = dense.flatten(GaussNewton(model, TASK, train).gradients(train))
    eye = torch.eye(len(dense.matrix), dtype=torch.float64)
    own = (gradients * torch.linalg.solve(dense.matrix + damping * eye, gradients.T).T).sum(1) / len(train)
    squares = gradients.square().sum(1).sort(descending=True)
    own, w = own[squares.indices], squares.values / squares.values.sum()
    middles = torch.searchsorted(w.cumsum(0), (torch.arange(PROBES) + 0.5).double() / PROBES)
    root = float(w.square().sum().sqrt())
    return float((w * own).sum()) * root, float(own[middles].mean()) * root


@pytest.mark.parametrize("damping", [0.02, 0.5])
def test_the_strain_is_that_of_dense_solves(damping: float) -> None:
    model, train, _ = problem()
    gnh = GaussNewton(model, TASK, train)
    whole, few = dense_strain(damping)
    found = measure_strain(gnh, damping, generator=torch.Generator())
    assert found == pytest.approx(few, rel=0.05)
    assert found == pytest.approx(whole, rel=0.35)
    factors = ekfac(gnh, 1.0, generator=torch.Generator().manual_seed(0))
    gradients = gnh.gradients(train)
    own = gradients.dot(factors.with_damping(damping).solve(gradients)) / len(train)
    by_factors = measure_strain(gnh, damping, generator=torch.Generator(), factors=factors)
    squares = gradients.dot(gradients)
    order = squares.argsort(descending=True)
    w = squares[order] / squares.sum()
    middles = torch.searchsorted(w.cumsum(0), (torch.arange(PROBES) + 0.5).double() / PROBES)
    assert by_factors == pytest.approx(float(own[order][middles].mean() * w.square().sum().sqrt()))


@pytest.mark.parametrize("seed", range(3))
def test_a_handful_that_carries_the_gradients_is_not_missed_among_many(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six of 600 examples have wrong labels, and the model is certain of all others."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(600, 4, generator=random) + 3 * torch.tensor([1.0, 0, 0, 0])
    x[::2, 0] *= -1
    y = torch.arange(600) % 2
    wrong = torch.randperm(600, generator=random)[:6]
    y[wrong] = 1 - y[wrong]
    model = nn.Linear(4, 2).eval()
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[-1.5, 0.1, 0.0, 0.0], [1.5, 0.0, 0.1, 0.0]]))
        model.bias.zero_()
    gnh = GaussNewton(model, TASK, [(row, int(label)) for row, label in zip(x, y, strict=True)])
    whole = measure_strain(gnh, 0.01, generator=random)
    monkeypatch.setattr(strain, "AMONG", 24)
    assert measure_strain(gnh, 0.01, generator=random) == pytest.approx(whole, rel=0.25)


def test_the_strain_of_examples_without_gradients_is_zero() -> None:
    class Dead(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.stack([(x * self.weight * 0).sum(1), torch.zeros(len(x))], 1) + 50 * x[:, :1]

    train = [(torch.ones(2), 0), (torch.full((2,), 2.0), 0)]
    assert measure_strain(GaussNewton(Dead().eval(), TASK, train), 1.0, generator=torch.Generator()) == 0


@pytest.mark.filterwarnings("ignore:the spectrum's estimates contradict")  # heavy tails, and few probes
def test_a_model_certain_of_all_but_a_few_examples_gets_more_damping() -> None:
    """Two clouds far apart, with two wrong labels, and a network that has learned all but these."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(120, 4, generator=random) + torch.tensor([2.5, 0, 0, 0]) * (
        torch.arange(120) % 2 * 2 - 1
    ).unsqueeze(1)
    y = torch.arange(120) % 2
    y[:2] = 1 - y[:2]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(150):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    model.eval()
    train = list(zip(x, y, strict=True))
    for training, first in ((None, GUESS), (optimizer, RECIPE / 3)):
        result = attribute(model, train, train[4:6], task=TASK, training=training)
        gnh = GaussNewton(model, TASK, train)
        metric = metric_of(
            gnh, None if training is None else whence.Training.read(training, model), Options()
        )
        found = measure_strain(gnh.in_metric(metric), first, generator=torch.Generator())
        assert found > STRAIN
        assert result.solve.plan.damping == pytest.approx(first * raise_for(found), rel=0.02)
        assert "first-order theory" in result.solve.damping_words
        quick = attribute(model, train, train[4:6], task=TASK, training=training, accuracy="quick")
        assert quick.solve.plan.damping > first


def test_halves_agree_as_dense_solves_on_them_do() -> None:
    model, train, _ = problem()
    gnh = GaussNewton(model, TASK, train)
    dampings = torch.tensor([0.02, 0.2, 2.0], dtype=torch.float64)
    rhs = gnh.gradients(train[:4])
    found = measure_stability(gnh, rhs, dampings, generator=torch.Generator().manual_seed(3))
    assert found is not None
    random = torch.Generator().manual_seed(3)
    signs = torch.randint(0, 2, (4, 4), generator=random).double() * 2 - 1
    order = torch.randperm(len(train), generator=random)
    gradients = dense_gauss_newton(gnh).flatten(gnh.gradients(train))
    mixed = (signs.T / gradients[:4].norm(dim=1)) @ gradients[:4]
    halves = []
    for half in (order[:80], order[80:]):
        matrix = dense_gauss_newton(GaussNewton(model, TASK, [train[i] for i in half])).matrix
        halves.append(
            [mixed @ torch.linalg.solve(matrix + d * torch.eye(len(matrix)), gradients.T) for d in dampings]
        )
    for k, (one, other) in enumerate(zip(*halves, strict=True)):
        pairs = [float(torch.corrcoef(torch.stack(pair))[0, 1]) for pair in zip(one, other, strict=True)]
        assert float(found.agreement[k]) == pytest.approx(sum(pairs) / 4, abs=0.02)
    assert bool((found.agreement.diff() > 0).all())


def test_the_error_of_halves_covers_a_fresh_half() -> None:
    model, train, _ = problem()
    result = attribute(model, train, train[:6], task=TASK, damping=0.2, stability=True, accuracy=0.999)
    gradients = dense_gauss_newton(GaussNewton(model, TASK, train)).flatten(
        GaussNewton(model, TASK, train).gradients(train)
    )
    inside = []
    for seed in range(6):
        half = torch.randperm(len(train), generator=torch.Generator().manual_seed(100 + seed))[:80]
        matrix = dense_gauss_newton(GaussNewton(model, TASK, [train[i] for i in half])).matrix
        fresh = gradients[:6] @ torch.linalg.solve(matrix + 0.2 * torch.eye(len(matrix)), gradients.T)
        assert result.data_stderr is not None
        inside.append((fresh - result.scores).abs() <= 2.13 * result.data_stderr)  # 90% of Student's t with 4
    assert 0.75 <= float(torch.stack(inside).double().mean()) <= 0.99


def test_over_damping_has_the_scores_of_other_solves() -> None:
    model, train, _ = problem()
    result = attribute(model, train, train[:3], task=TASK, damping=0.05, accuracy=0.9999, solver="cg")
    over = result.over_damping([0.8, 0.05])
    assert correlation(over.scores[0], exact(0.8, None)) > 0.999
    assert correlation(over.scores[1], result.scores) > 0.9999
    assert over.settled.tolist() == [True, True]
    assert over.top(1)[1, :, 0].tolist() == result.scores.argmax(1).tolist()
    assert over.shared()[1].tolist() == [1.0, 1.0, 1.0]
    assert "top ten" in over.words()


def test_over_damping_without_slopes_says_why() -> None:
    model, train, _ = problem()
    result = attribute(model, train, train[:1], task=TASK, damping=1.0, solver="lissa", chains=2)
    with pytest.raises(OptionError, match="conjugate gradients do"):
        result.over_damping()


def test_a_run_keeps_its_metric_and_another_training_is_another_run(tmp_path: Path) -> None:
    model, train, optimizer = problem()
    first = attribute(model, train, train[:2], task=TASK, training=optimizer, run_dir=tmp_path)
    again = load(tmp_path)
    torch.testing.assert_close(first.scores, again.scores)
    assert again.solve.damping_words == first.solve.damping_words
    found = validate(model, train, train[:2], again, task=TASK, points=1, directory=tmp_path)
    assert found["fine-tuning"].verdict == "trust"
    with pytest.raises(whence.errors.RunDirectoryError, match="training"):
        attribute(model, train, train[:2], task=TASK, run_dir=tmp_path)


def test_an_optimizer_of_other_parameters_is_refused() -> None:
    model, train, _ = problem()
    partly = torch.optim.Adam(model[0].parameters())  # type: ignore[index]
    for p in model[0].parameters():  # type: ignore[index]
        p.grad = torch.ones_like(p)
    partly.step = lambda: None  # type: ignore[method-assign,assignment]
    partly.state[model[0].weight] = {"step": 1, "exp_avg_sq": torch.ones_like(model[0].weight)}  # type: ignore[index]
    with pytest.raises(OptionError, match="did not train them"):
        attribute(model, train, train[:1], task=TASK, training=partly)


@pytest.mark.parametrize("count", [1, 2, 20])
def test_few_or_equal_examples_have_a_damping(count: int) -> None:
    torch.manual_seed(0)
    example = (torch.randn(2), 1)
    result = attribute(nn.Linear(2, 3).eval(), [example] * count, [example], task=TASK)
    assert result.solve.plan.damping >= GUESS * (1 - 1e-9)
    assert bool(result.scores.isfinite().all())
