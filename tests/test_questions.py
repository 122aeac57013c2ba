"""What is asked beside the loss: margins, contrasts, sums, groups of queries. References: autograd in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dense
import whence
from whence import (
    BinaryClassification,
    Classification,
    ConvexLoss,
    GaussNewton,
    LanguageModeling,
    Questions,
    Regression,
    SequenceToSequence,
)
from whence.errors import DataError, OptionError, RunDirectoryError
from whence.tasks import Task
from whence.validation import removal_effects
from whence.validation.retraining import query_losses
from zoo import VOCABULARY, mlp, vectors

DATA = vectors(torch.float64)
TASK = Classification()
EXACT = {"rtol": 1e-9, "atol": 1e-12}


def classifier() -> nn.Module:
    torch.manual_seed(0)
    return mlp().double().eval()


class Speaker(nn.Module):
    """Next tokens from the mean of those before: causal, and small."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, 5), nn.Linear(5, VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        seen = self.embed(input_ids).cumsum(1)
        return self.head(torch.tanh(seen / torch.arange(1, input_ids.shape[1] + 1).reshape(1, -1, 1)))


def speaker() -> nn.Module:
    torch.manual_seed(1)
    return Speaker().double().eval()


def log_p(model: nn.Module, x: Tensor) -> Tensor:
    return model(x.unsqueeze(0))[0].log_softmax(-1)


def spoken(model: nn.Module, prompt: list[int], completion: list[int]) -> Tensor:
    """Log-probabilities of all tokens where the completion's are predicted."""
    ids = torch.tensor([prompt + completion])
    return model(ids)[0, len(prompt) - 1 : -1].log_softmax(-1)


def gradient(model: nn.Module, value: Tensor) -> Tensor:
    return torch.cat([g.flatten() for g in torch.autograd.grad(value, list(model.parameters()))])


def flat(block: whence.ParamVector, model: nn.Module) -> Tensor:
    return torch.cat([block[name].flatten(1) for name, _ in model.named_parameters()], dim=1)


def odds_against(rows: Tensor, labels: list[int]) -> Tensor:
    chosen = rows[range(len(labels)), labels]
    return torch.log1p(-chosen.exp()) - chosen


def test_margins_of_labels() -> None:
    model = classifier()
    found = flat(GaussNewton(model, TASK, DATA).gradients(Questions(DATA[:3], measure="margin")), model)
    for row, (x, y) in zip(found, DATA[:3], strict=True):
        expected = odds_against(log_p(model, x).unsqueeze(0), [y]).sum()
        torch.testing.assert_close(row, gradient(model, expected), **EXACT)


@pytest.mark.parametrize("smoothed", [False, True])
def test_contrasts_of_labels(smoothed: bool) -> None:
    """log p(A) - log p(B), also where the loss is smoothed and weighted: it is about what the model says."""
    task = Classification(label_smoothing=0.2, class_weights=[1.0, 2.0, 3.0, 4.0]) if smoothed else TASK
    model, others = classifier(), [3, 0, 0]
    asked = Questions(DATA[:3], contrast=others)
    found = flat(GaussNewton(model, task, DATA).gradients(asked), model)
    values = query_losses(model, asked, task)
    for row, value, (x, y), other in zip(found, values, DATA[:3], others, strict=True):
        says = log_p(model, x)
        torch.testing.assert_close(value, says[other].detach() - says[y].detach(), **EXACT)
        torch.testing.assert_close(row, gradient(model, says[other] - says[y]), **EXACT)


PROMPT, SAID, OTHER = [1, 2, 3], [4, 5], [6, 7, 8]


def sentences() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [{"input_ids": torch.randint(VOCABULARY, (6,), generator=generator)} for _ in range(12)]


@pytest.mark.parametrize("reduce", ["mean", "sum"])
@pytest.mark.parametrize("what", ["loss", "margin", "contrast"])
def test_completions(what: str, reduce: str) -> None:
    model, task = speaker(), LanguageModeling()
    query = task.query(PROMPT, SAID)
    asked = Questions(
        [query],
        contrast=[OTHER] if what == "contrast" else None,
        measure="margin" if what == "margin" else "loss",
        reduce=reduce,
    )
    found = flat(GaussNewton(model, task, sentences()).gradients(asked), model)[0]
    total = torch.mean if reduce == "mean" else torch.sum
    rows = spoken(model, PROMPT, SAID)
    expected = total(odds_against(rows, SAID)) if what == "margin" else -total(rows[range(2), SAID])
    if what == "contrast":
        expected = expected + total(spoken(model, PROMPT, OTHER)[range(3), OTHER])
    torch.testing.assert_close(found, gradient(model, expected), **EXACT)


def test_a_contrast_may_be_an_example_of_its_own() -> None:
    model, task = speaker(), LanguageModeling()
    gnh, query = GaussNewton(model, task, sentences()), task.query(PROMPT, SAID)
    own = Questions([query], contrast=[task.query(PROMPT, OTHER)])
    tokens = Questions([query], contrast=[torch.tensor(OTHER)])
    torch.testing.assert_close(flat(gnh.gradients(own), model), flat(gnh.gradients(tokens), model), **EXACT)


def test_groups_are_means_and_stand_where_their_first_query_does() -> None:
    model = classifier()
    gnh = GaussNewton(model, TASK, DATA)
    asked = Questions(DATA[:5], groups=["a", None, "b", "a", "b"])
    assert [asked.group(k) for k in range(len(asked))] == ["a", None, "b"]
    found, each = flat(gnh.gradients(asked), model), flat(gnh.gradients(DATA[:5]), model)
    expected = torch.stack([(each[0] + each[3]) / 2, each[1], (each[2] + each[4]) / 2])
    torch.testing.assert_close(found, expected, **EXACT)
    losses = query_losses(model, DATA[:5], TASK)
    torch.testing.assert_close(query_losses(model, asked, TASK)[2], (losses[2] + losses[4]) / 2, **EXACT)


def test_yes_or_no_and_numbers() -> None:
    torch.manual_seed(0)
    one = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1), nn.Flatten(0)).double().eval()
    binary = BinaryClassification(positive_weight=3.0)
    data = [(x, float(y % 2)) for x, y in DATA]
    gnh = GaussNewton(one, binary, data)
    for asked, sign in (
        (Questions(data[:2], measure="margin"), 1),
        (Questions(data[:2], contrast=[1.0, 0.0]), 1),
    ):
        found = flat(gnh.gradients(asked), one)
        for row, (x, y) in zip(found, data[:2], strict=True):
            torch.testing.assert_close(
                row, sign * gradient(one, (1 - 2 * y) * one(x.unsqueeze(0)).sum()), **EXACT
            )
    numbers = [(x, torch.tensor(float(y)).double()) for x, y in DATA]
    gnh = GaussNewton(one, Regression(variance=0.5), numbers)
    found = flat(gnh.gradients(Questions(numbers[:1], contrast=[2.5])), one)[0]
    h = one(numbers[0][0].unsqueeze(0)).sum()
    torch.testing.assert_close(found, gradient(one, (h - numbers[0][1]) ** 2 - (h - 2.5) ** 2), **EXACT)


def test_answers_of_encoder_decoders_are_replaced() -> None:
    task = SequenceToSequence()
    query = task.query([5, 6, 7], [8, 1])
    asked = Questions([query], contrast=[[9, 2, 1]]).parts(task)
    assert asked.examples[1]["labels"].tolist() == [9, 2, 1]
    assert asked.examples[1]["input_ids"] is query["input_ids"]


def exact_scores(model: nn.Module, columns: Tensor, damping: float) -> Tensor:
    gnh = GaussNewton(model, TASK, DATA)
    H = dense.dense_gauss_newton(gnh).matrix
    system = H + damping * torch.eye(len(H), dtype=H.dtype)
    order = [name for name, _ in model.named_parameters()]
    assert list(gnh.network.parameters) == order
    return columns @ torch.linalg.solve(system, flat(gnh.gradients(DATA), model).T)


@pytest.mark.parametrize(
    "asked",
    [
        {"measure": "margin"},
        {"contrast": [3, 0, None]},
        {"query_groups": ["slice", None, "slice"]},
        {"contrast": [3, 0, 1], "query_groups": ["s", "s", "s"]},
    ],
    ids=["margin", "contrast", "groups", "contrast of a group"],
)
def test_attributions_are_those_of_dense_matrices(asked: dict[str, Any]) -> None:
    model, queries = classifier(), DATA[:3]
    names = {"query_groups": "groups"}
    questions = Questions(queries, **{names.get(name, name): value for name, value in asked.items()})
    result = whence.attribute(
        model, DATA, queries, task=TASK, damping=0.05, solver="cg", accuracy=0.9999999, **asked
    )
    columns = flat(GaussNewton(model, TASK, DATA).gradients(questions), model)
    expected = exact_scores(model, columns, 0.05)
    assert float((result.scores - expected).norm() / expected.norm()) < 1e-3
    torch.testing.assert_close(
        result.query_losses, query_losses(model, questions, TASK), rtol=1e-6, atol=1e-9
    )
    assert len(result.queries) == len(questions)
    same = whence.attribute(model, DATA, questions, task=TASK, damping=0.05, solver="cg", accuracy=0.9999999)
    assert torch.equal(same.scores, result.scores)


def test_what_is_asked_is_said() -> None:
    model = classifier()
    result = whence.attribute(
        model,
        DATA,
        DATA[:2],
        task=TASK,
        contrast=[3, None],
        class_names=["cat", "dog", "owl", "eel"],
        damping=0.1,
    )
    assert result.queries[0].asked == "why “cat” rather than “eel”"
    facts = dict(result.queries[0].facts)
    chance = float(log_p(model, DATA[0][0])[3].detach().exp())
    assert facts["“eel”"] == f"probability {chance:.2%}"
    assert result.queries[1].asked is None
    assert result.settings["asked"] == "contrast"
    page = whence.attribution.page.render(result)
    assert "why “cat” rather than “eel”" in page
    assert "less inclined to “cat” rather than “eel”" in page
    groups = whence.attribute(
        model,
        DATA,
        DATA[:4],
        task=TASK,
        contrast=[3, 0, None, None],
        query_groups=["a", "a", "b", "b"],
        damping=0.1,
    )
    told = [(exhibit.id, exhibit.asked, exhibit.facts[0][0]) for exhibit in groups.queries]
    assert told == [
        ("a", "why this rather than that, the mean over 2 queries (0, 1)", "Mean log-odds"),
        ("b", "why this, the mean over 2 queries (2, 3)", "Mean loss"),
    ]


def test_another_question_is_another_run(tmp_path: Any) -> None:
    model = classifier()

    def ask(**asked: Any) -> whence.Attribution:
        return whence.attribute(
            model, DATA, DATA[:2], task=TASK, damping=0.1, run_dir=tmp_path / "run", **asked
        )

    first = ask(contrast=[3, 3])
    assert torch.equal(ask(contrast=[3, 3]).scores, first.scores)
    for other in (
        {},
        {"contrast": [3, 2]},
        {"contrast": [3, None]},
        {"measure": "margin"},
        {"reduce": "sum"},
    ):
        with pytest.raises(RunDirectoryError, match=r"asked|queries"):
            ask(**other)


def test_validation_knows_what_was_asked(tmp_path: Any) -> None:
    model, questions = classifier(), Questions(DATA[:3], contrast=[3, 0, 0], groups=["a", "a", "a"])
    result = whence.attribute(model, DATA, questions, task=TASK, damping=0.1)
    found = whence.validate(model, DATA, questions, result, task=TASK, points=2)
    assert found["fine-tuning"].verdict == "trust"
    with pytest.raises(RunDirectoryError, match="queries"):
        whence.validate(model, DATA, DATA[:3], result, task=TASK, points=2)


def test_signs_and_units_are_those_of_retraining() -> None:
    """Of a logistic regression trained to its end, removal changes log p(A) - log p(B) as was foretold."""
    torch.manual_seed(0)
    x = torch.randn(300, 3).double()
    y = (x @ torch.randn(3, 3).double() + torch.randn(300, 3).double()).argmax(1)
    data = list(zip(x, y, strict=True))

    def train(subset: Any, seed: int) -> nn.Module:
        model = nn.Linear(3, 3).double()
        nn.init.zeros_(model.weight), nn.init.zeros_(model.bias)
        chosen = torch.tensor(list(subset))
        optimizer = torch.optim.LBFGS(model.parameters(), lr=1, max_iter=300, tolerance_grad=1e-10)

        def loss() -> Tensor:
            optimizer.zero_grad()
            # over all examples: those that are left out count nothing
            value = F.cross_entropy(model(x[chosen]), y[chosen], reduction="sum") / len(x)
            value = value + 0.05 / 2 * sum(p.square().sum() for p in model.parameters())
            value.backward()
            return value

        optimizer.step(loss)
        return model.eval()

    others = [(int(label) + 1) % 3 for label in y[:4]]
    questions = Questions(data[:4], contrast=others)
    result = whence.attribute(train(range(300), 0), data, questions, task=TASK, damping=0.05)
    removed = [[i] for i in range(10, 20)]
    found = removal_effects(train, 300, removed, questions, task=TASK, seeds=[0])
    predicted = found.predicted(result.effects)
    ratio = float((predicted * found.effects).sum() / predicted.square().sum())
    assert 0.95 < ratio < 1.1
    assert float(torch.corrcoef(torch.stack([predicted.flatten(), found.effects.flatten()]))[0, 1]) > 0.98


@pytest.mark.parametrize(
    ("asked", "error", "says"),
    [
        ({"measure": "odds"}, OptionError, "'loss' or 'margin'"),
        ({"reduce": "max"}, OptionError, "'mean' or 'sum'"),
        ({"contrast": [1]}, DataError, "one entry for each of the 3"),
        ({"contrast": 1}, OptionError, "contrast is 1"),
        ({"contrast": [0, 0, 0]}, DataError, "contrast of query 0 is what the query says itself"),
        ({"contrast": [9, 0, 0]}, DataError, "label 9"),
        ({"contrast": [1, 0, 0], "measure": "margin"}, OptionError, "leave one of them out"),
        ({"query_groups": ["a", 3, None]}, OptionError, "a text or None"),
        ({"query_groups": ["a", "a", None], "contrast": [1, None, None]}, DataError, "different things"),
    ],
)
def test_what_cannot_be_asked_is_refused(asked: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        whence.attribute(classifier(), DATA, DATA[:3], task=TASK, damping=0.1, **asked)


def test_questions_refuse_what_is_no_list_of_names_or_contrasts() -> None:
    with pytest.raises(DataError, match="a single one"):
        Questions(DATA[:3], contrast=1)
    with pytest.raises(DataError, match="3; give a name"):
        Questions(DATA[:3], groups=["a", 3, None])


def test_questions_say_themselves_what_they_are() -> None:
    with pytest.raises(OptionError, match="measure"):
        whence.attribute(classifier(), DATA, Questions(DATA[:1]), task=TASK, measure="margin")


@pytest.mark.parametrize(
    ("task", "asked"),
    [
        (ConvexLoss(lambda h, y: (h - y).square().sum(-1)), {"contrast": [torch.zeros(4).double()]}),
        (Regression(), {"measure": "margin"}),
        (whence.Preference(), {"contrast": [1]}),
    ],
    ids=repr,
)
def test_tasks_without_probabilities_refuse(task: Task, asked: dict[str, Any]) -> None:
    data = [(x, torch.ones(4).double()) for x, _ in DATA]
    with pytest.raises(OptionError, match=r"does not give; ask for the loss"):
        Questions(data[:1], **asked).parts(task)


def test_a_text_without_prompt_needs_a_whole_contrast() -> None:
    asked = Questions([{"input_ids": torch.tensor([1, 2, 3])}], contrast=[[4, 5]])
    with pytest.raises(DataError, match="has no prompt"):
        asked.parts(LanguageModeling())
    asked = replace(asked, contrast=[{"input_ids": torch.tensor([1, 4, 5])}])
    assert len(asked.parts(LanguageModeling()).examples) == 2
