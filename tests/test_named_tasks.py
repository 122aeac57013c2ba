"""Tasks beyond plain cross-entropy against PyTorch's own losses and autograd; what a task would misread is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dense import jacobian, relative_error
from small import DOUBLE, PRODUCTS, Product, evaluated
from whence import (
    BinaryClassification,
    Classification,
    ConvexLoss,
    Dense,
    GaussNewton,
    LanguageModeling,
    MaskedLanguageModeling,
    Options,
    Regression,
    SequenceToSequence,
    TokenClassification,
    attribute,
)
from whence.attribution.exhibits import exhibit_of
from whence.attribution.identity import operator_identity
from whence.cli.inputs import InputOptions, Inputs
from whence.errors import DataError, ModelError, OptionError
from whence.tasks import Batch, Task
from zoo import ARCHITECTURES, VOCABULARY, masked_sequences, sequences, vectors

EXACT = {"rtol": 1e-11, "atol": 1e-12}
CASES = {case.name: case for case in ARCHITECTURES}
WEIGHTS = torch.tensor([1.0, 2.0, 0.5, 0.0], dtype=DOUBLE)
Loss = Callable[[Tensor, Tensor], Tensor]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)


def cross_entropy(**options: Any) -> Loss:
    """Of every term, as PyTorch says it."""

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        rows = outputs.reshape(-1, outputs.shape[-1])
        return F.cross_entropy(rows, targets.reshape(-1), reduction="none", **options).reshape(targets.shape)

    return loss


def yes_or_no(**options: Any) -> Loss:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        rows = outputs.reshape(len(outputs), -1)
        found = F.binary_cross_entropy_with_logits(
            rows, targets.reshape(rows.shape), reduction="none", **options
        )
        return found.sum(1)

    return loss


LABELS = torch.tensor([2, 0, 3, 1, 1])
TOKENS = torch.tensor([[3, 1, 0, -100], [2, -100, 1, -100], [0, 0, 1, 2]])
SMOOTH, WEIGHTED = {"label_smoothing": 0.1}, {"weight": WEIGHTS}
SEVERAL = torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 0.3], [1.0, 1.0, 0.0]], dtype=DOUBLE)
HEAVY = torch.tensor([0.5, 3.0, 1.0], dtype=DOUBLE)
PROBLEMS = [
    pytest.param(Classification(**SMOOTH), cross_entropy(**SMOOTH), normal(5, 4, seed=1), LABELS, id="smoothed"),
    pytest.param(
        Classification(class_weights=WEIGHTS), cross_entropy(**WEIGHTED), normal(5, 4, seed=1), LABELS, id="weighted"
    ),
    pytest.param(
        TokenClassification(class_weights=WEIGHTS.tolist(), **SMOOTH),
        cross_entropy(**WEIGHTED, **SMOOTH),
        normal(3, 4, 4, seed=2),
        TOKENS,
        id="weighted and smoothed tokens",
    ),
    pytest.param(LanguageModeling(**SMOOTH), cross_entropy(**SMOOTH), normal(3, 4, 5), TOKENS, id="smoothed lm"),
    pytest.param(BinaryClassification(), yes_or_no(), normal(3), SEVERAL[:, 0], id="binary, one output"),
    pytest.param(BinaryClassification(), yes_or_no(), normal(3, 1), SEVERAL[:, 0], id="binary, a column"),
    pytest.param(
        BinaryClassification(positive_weight=HEAVY), yes_or_no(pos_weight=HEAVY), normal(3, 3), SEVERAL, id="labels"
    ),
    pytest.param(Regression(), lambda h, y: (h - y).square() / 2, normal(3), SEVERAL[:, 0], id="regression, [n]"),
]  # fmt: skip
each_problem = pytest.mark.parametrize(("task", "loss", "outputs", "targets"), PROBLEMS)


def with_targets(targets: Tensor) -> Batch:
    return Batch((), {}, targets)


def hessian(loss: Loss, outputs: Tensor, targets: Tensor) -> Tensor:
    full = torch.autograd.functional.hessian(lambda h: loss(h, targets).sum(), outputs)
    return full.reshape(outputs.numel(), outputs.numel())


@each_problem
def test_losses_are_those_of_torch(task: Task, loss: Loss, outputs: Tensor, targets: Tensor) -> None:
    torch.testing.assert_close(
        task.losses(2 * outputs, with_targets(targets)), loss(2 * outputs, targets), **EXACT
    )


@each_problem
def test_the_output_hessian_is_autograds(task: Task, loss: Loss, outputs: Tensor, targets: Tensor) -> None:
    batch, S = with_targets(targets), hessian(loss, outputs, targets)
    tangents = normal(3, *outputs.shape, seed=9)
    expected = (tangents.reshape(3, -1) @ S).reshape(tangents.shape)
    torch.testing.assert_close(task.hessian_product(outputs, tangents, batch), expected, **EXACT)
    torch.testing.assert_close(task.hessian_product(outputs, tangents[0], batch), expected[0], **EXACT)
    trace = task.curvature(outputs, batch)
    assert trace is not None
    torch.testing.assert_close(trace.double().sum(), S.trace(), rtol=1e-6, atol=0)


@each_problem
def test_derivatives_along_tangents_are_autograds(
    task: Task, loss: Loss, outputs: Tensor, targets: Tensor
) -> None:
    batch, tangents = with_targets(targets), normal(2, *outputs.shape, seed=9)
    (slope,) = torch.autograd.grad(loss(leaf := outputs.clone().requires_grad_(), targets).sum(), leaf)
    terms = task.losses(outputs, batch).shape
    expected = (tangents * slope).reshape(2, *terms, -1).sum(-1)
    product = task.hessian_product(outputs, tangents, batch)
    for found in (
        task.loss_derivatives(outputs, tangents, batch),
        task.derivatives_beside(outputs, tangents, product, batch),
    ):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(task.loss_derivatives(outputs, tangents[0], batch), expected[0], **EXACT)


@each_problem
def test_the_divergence_has_the_slope_of_its_definition(
    task: Task, loss: Loss, outputs: Tensor, targets: Tensor
) -> None:
    anchor = outputs + normal(*outputs.shape, seed=3)
    slope = torch.func.grad(lambda h: loss(h, targets).sum())
    found = task.divergence_slope(outputs, anchor, with_targets(targets))
    torch.testing.assert_close(found, slope(outputs) - slope(anchor), **EXACT)


@each_problem
def test_residuals_have_the_hessian_as_second_moment(
    task: Task, loss: Loss, outputs: Tensor, targets: Tensor
) -> None:
    draws, random = 3000, torch.Generator().manual_seed(5)
    drawn = [task.sample_residual(outputs, with_targets(targets), random) for _ in range(draws)]
    rows = torch.stack([r for r in drawn if r is not None]).reshape(draws, -1)
    products = rows.unsqueeze(2) * rows.unsqueeze(1)
    S, stderr = hessian(loss, outputs, targets), products.std(0) / math.sqrt(draws)
    assert float((products.mean(0) - S).norm()) <= 2 * float(stderr.norm())
    assert float(stderr.norm()) < 0.1 * float(S.norm())


def test_a_certain_answer_keeps_its_digits() -> None:
    """As `Classification` of two classes, which never subtracts a probability from 1."""
    h = torch.tensor([30.0, -25.0, 60.0])
    two = torch.stack([torch.zeros(3), h], 1)
    yes = torch.tensor([1.0, 0.0, 1.0])
    binary, classes = with_targets(yes), with_targets(yes.long())
    expected = Classification().losses(two, classes)
    torch.testing.assert_close(BinaryClassification().losses(h, binary), expected, rtol=1e-5, atol=0)
    t = torch.tensor([1.0, 2.0, -1.0])
    slopes = Classification().loss_derivatives(two, torch.stack([torch.zeros(3), t], 1), classes)
    torch.testing.assert_close(
        BinaryClassification().loss_derivatives(h, t, binary), slopes, rtol=1e-5, atol=0
    )
    assert (slopes != 0).all()


# --- whole operators -------------------------------------------------------------------------------------


def net(outputs: int, squeeze: bool = False) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, outputs)]
    return evaluated(nn.Sequential(*layers, *([nn.Flatten(0)] if squeeze else [])))


def dense_of(gnh: GaussNewton, loss: Loss) -> Dense:
    """``(1/N) Σ JᵀSJ`` with S by autograd of PyTorch's loss."""
    total: Tensor | float = 0.0
    for example in gnh.terms.data:
        rows, outputs, batch = jacobian(gnh, example)
        total = total + rows.T @ hessian(loss, outputs, batch.targets) @ rows
    assert isinstance(total, Tensor)
    return Dense(total / gnh.num_terms, gnh.zeros())


INPUTS = [x for x, _ in vectors(DOUBLE)]
OPERATORS = [
    pytest.param(
        net(4), Classification(class_weights=WEIGHTS, **SMOOTH), cross_entropy(**WEIGHTED, **SMOOTH),
        [(x, i % 4) for i, x in enumerate(INPUTS)], id="weighted and smoothed",
    ),
    pytest.param(
        net(3), BinaryClassification(positive_weight=HEAVY), yes_or_no(pos_weight=HEAVY),
        [(x, SEVERAL[i % 3]) for i, x in enumerate(INPUTS)], id="multi-label",
    ),
    pytest.param(
        net(1, squeeze=True), BinaryClassification(), yes_or_no(),
        [(x, i % 2) for i, x in enumerate(INPUTS)], id="binary, outputs [n]",
    ),
    pytest.param(
        net(1, squeeze=True), Regression(), lambda h, y: (h - y).square() / 2,
        [(x, float(i)) for i, x in enumerate(INPUTS)], id="regression, outputs [n]",
    ),
    pytest.param(
        net(1, squeeze=True), ConvexLoss(lambda h, y: (h - y).cosh().log()), lambda h, y: (h - y).cosh().log(),
        [(x, 0.1 * i) for i, x in enumerate(INPUTS)], id="convex, outputs [n]",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("model", "task", "loss", "data"), OPERATORS)
@pytest.mark.parametrize("product", PRODUCTS)
def test_products_and_scores_equal_the_dense_ones(
    model: nn.Module, task: Task, loss: Loss, data: Any, product: Product
) -> None:
    gnh = GaussNewton(model, task, data, product=product)
    dense = dense_of(gnh, loss)
    vectors = gnh.zeros(3).randn_like(torch.Generator().manual_seed(0))
    assert relative_error(gnh.matvec(vectors), dense.matvec(vectors)) <= 1e-6
    torch.testing.assert_close(
        gnh.quadratic_form(vectors), vectors.dot(dense.matvec(vectors)), rtol=1e-5, atol=0
    )
    gradients = torch.stack([dense.flatten(g) for g in gnh.gradients(data).unstack()])
    slopes = gnh.matvec_with_slopes(vectors)[1]
    expected = torch.stack([gradients @ dense.flatten(v) for v in vectors.unstack()])
    torch.testing.assert_close(slopes, expected, rtol=1e-5, atol=1e-6)
    damped = dense.matrix + 0.1 * torch.eye(len(dense.matrix), dtype=DOUBLE)
    result = attribute(
        model, data, data[:2], task=task, damping=0.1, solver="cg", accuracy="0.1%", product=product
    )
    scores = gradients[:2] @ torch.linalg.solve(damped, gradients.T)
    torch.testing.assert_close(result.scores.double(), scores, rtol=0, atol=5e-3 * float(scores.abs().max()))


def test_the_quick_answer_knows_outputs_without_a_column() -> None:
    data = [(x, i % 2) for i, x in enumerate(INPUTS)]
    column, flat = (
        attribute(
            net(1, squeeze), data, data[:2], task=BinaryClassification(), damping=0.1, accuracy="quick"
        ).scores
        for squeeze in (False, True)
    )
    torch.testing.assert_close(flat, column)


def test_a_run_knows_the_settings_of_its_task() -> None:
    data = [(x, i % 4) for i, x in enumerate(INPUTS)]

    def named(task: Task) -> str:
        return operator_identity(GaussNewton(net(4), task, data))["task"]

    assert named(Classification()) == "Classification"
    assert named(Classification(label_smoothing=0.1)) == "Classification(label_smoothing=0.1)"
    assert (
        named(Classification(class_weights=WEIGHTS)) == "Classification(class_weights=[1.0, 2.0, 0.5, 0.0])"
    )
    assert repr(Regression(variance=2.0)) == "Regression(variance=2.0)"
    assert repr(BinaryClassification()) == "BinaryClassification()"
    assert "cross_entropy" in repr(ConvexLoss(cross_entropy()))


# --- sequences -------------------------------------------------------------------------------------------


def test_the_decoder_reads_the_labels_shifted_unless_it_is_told_what() -> None:
    case = CASES["t5"]
    model, task = case.model(DOUBLE), SequenceToSequence()
    row = {"input_ids": torch.tensor([3, 4, 5]), "labels": torch.tensor([6, 7, 8])}
    batch = task.collate([row])
    outputs = task.outputs(model, batch).detach()
    expected = model(input_ids=row["input_ids"][None], labels=row["labels"][None])
    torch.testing.assert_close(outputs, expected.logits)
    assert float(task.query_losses(outputs, batch)) == pytest.approx(float(expected.loss.detach()), rel=1e-6)
    told = task.collate(
        [row | {"decoder_input_ids": torch.tensor([2, 6, 7])}]
    )  # 2 is what its decoder starts with
    torch.testing.assert_close(task.outputs(model, told), outputs)


def test_answers_of_different_lengths_are_padded_without_a_term() -> None:
    task = SequenceToSequence()
    rows = [task.query([3, 4, 5], [6, 7, 8]), task.query([3, 4], [6])]
    batch = task.collate(rows)
    assert batch.targets.tolist() == [[6, 7, 8], [6, -100, -100]]
    assert batch.kwargs["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]
    assert task.num_terms(batch).tolist() == [task.count_terms(row) for row in rows] == [3, 1]
    model = CASES["t5"].model(DOUBLE)
    together = task.query_losses(task.outputs(model, batch), batch)
    alone = [task.collate([row]) for row in rows]
    apart = torch.cat([task.query_losses(task.outputs(model, each), each) for each in alone])
    torch.testing.assert_close(together, apart, rtol=1e-5, atol=1e-6)


def test_a_decoder_that_cannot_be_told_what_to_read_is_refused() -> None:
    with pytest.raises(ModelError, match=r"prepare_decoder_input_ids_from_labels.*add 'decoder_input_ids'"):
        SequenceToSequence().outputs(
            nn.Linear(2, 2), SequenceToSequence().collate([{"input_ids": [1], "labels": [2]}])
        )


def test_masked_tokens_are_counted_and_padded() -> None:
    task, rows = MaskedLanguageModeling(), masked_sequences(DOUBLE)
    batch = task.collate(rows)
    assert task.num_terms(batch).tolist() == [task.count_terms(row) for row in rows]
    assert int(task.num_terms(batch).sum()) < sum(len(row["input_ids"]) for row in rows)
    model = CASES["bert, masked"].model(DOUBLE)
    row = rows[0]
    expected = model(input_ids=row["input_ids"][None], labels=row["labels"][None]).loss.detach()
    batch = task.collate([row])
    assert float(task.query_losses(task.outputs(model, batch).detach(), batch)) == pytest.approx(
        float(expected), rel=1e-6
    )


# --- none misread ----------------------------------------------------------------------------------------


def test_classification_refuses_labels_of_tokens() -> None:
    case = CASES["bert, tokens"]
    with pytest.raises(DataError, match=r"labels have shape .*one for each example.*TokenClassification"):
        GaussNewton(case.model(DOUBLE), Classification(), case.data(DOUBLE))


def test_language_modelling_refuses_a_masked_model() -> None:
    with pytest.raises(ModelError, match=r"no causal language model.*later ones.*MaskedLanguageModeling"):
        GaussNewton(CASES["bert, masked"].model(DOUBLE), LanguageModeling(), sequences(DOUBLE))


@pytest.mark.parametrize("length", [1, 2, 3])
def test_language_modelling_takes_a_causal_model_with_any_padding(length: int) -> None:
    model = evaluated(nn.Sequential(nn.Embedding(VOCABULARY, 4), nn.Linear(4, VOCABULARY)))
    row = {"input_ids": torch.tensor([0, 1, 2, 0]), "attention_mask": torch.tensor([1, 1, 1, 0])}
    left = {"input_ids": torch.tensor([9, 5, 6, 7]), "attention_mask": torch.tensor([0, 1, 1, 1])}
    GaussNewton(model, LanguageModeling(), [row, left, {n: t[: length + 1] for n, t in row.items()}])


def test_token_tasks_refuse_one_label_per_example() -> None:
    with pytest.raises(DataError, match=r"labels have shape \(1,\).*one at every token.*Use Classification"):
        TokenClassification().collate([{"input_ids": [1, 2], "labels": 1}])
    with pytest.raises(DataError, match=r"'labels' has shape \(1, 1\) beside 'input_ids' of shape \(1, 2\)"):
        TokenClassification().collate([{"input_ids": [1, 2], "labels": [1]}])


def test_one_output_is_no_class() -> None:
    data = [(x, 0) for x in INPUTS]
    with pytest.raises(ModelError, match=r"one output per term.*Use BinaryClassification or Regression"):
        GaussNewton(net(1), Classification(), data)


@pytest.mark.parametrize("label", [2, -100, -1])
def test_labels_that_are_not_yes_or_no_are_refused(label: int) -> None:
    data = [(x, label if i == 7 else i % 2) for i, x in enumerate(INPUTS)]
    with pytest.raises(DataError, match=rf"label {label} \(example 7 of the data\).*from 0 \(no\) to 1"):
        GaussNewton(net(1), BinaryClassification(), data)


def test_several_classes_are_not_read_as_yes_or_no() -> None:
    with pytest.raises(ModelError, match=r"shape \(2, 4\) for targets of shape \(2,\).*Use Classification"):
        GaussNewton(net(4), BinaryClassification(), [(x, i % 2) for i, x in enumerate(INPUTS)])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Classification(label_smoothing=1.0), r"label_smoothing is 1\.0; it must be"),
        (lambda: Classification(class_weights=[1.0, -1.0]), r"class_weights are \[1\.0, -1\.0\]; give"),
        (lambda: Classification(class_weights=[0.0, 0.0]), "class_weights are"),
        (lambda: BinaryClassification(positive_weight=0.0), r"positive_weight is 0\.0; give a positive"),
    ],
)
def test_settings_that_cannot_work_are_refused(make: Callable[[], Task], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        make()


def test_weights_must_be_as_many_as_classes() -> None:
    data = [(x, i % 4) for i, x in enumerate(INPUTS)]
    with pytest.raises(OptionError, match="3 class_weights for 4 outputs; give one for each"):
        GaussNewton(net(4), Classification(class_weights=[1.0, 1.0, 1.0]), data)
    several = [(x, SEVERAL[i % 3]) for i, x in enumerate(INPUTS)]
    with pytest.raises(OptionError, match="2 positive_weights for 3 labels; give one for each"):
        GaussNewton(net(3), BinaryClassification(positive_weight=[1.0, 2.0]), several)


@pytest.mark.parametrize(
    "loss",
    [lambda h, y: (h - y).abs().sum(1), lambda h, y: (1 - h * y).relu().sum(1)],
    ids=["absolute", "hinge"],
)
def test_a_loss_without_curvature_is_refused(loss: Loss) -> None:
    data = [(x, normal(4, seed=i)) for i, x in enumerate(INPUTS)]
    with pytest.raises(ModelError, match=r"no curvature.*zero on all of 20 examples.*hyperbolic cosine"):
        GaussNewton(net(4), ConvexLoss(loss), data)


def test_a_loss_that_is_not_convex_on_later_examples_is_refused() -> None:
    """Convex where targets are zero, as those of the first examples are."""
    task = ConvexLoss(lambda h, y: (1 - y) * h.square().sum(1) + y * h.cos().sum(1))
    data = [(x, float(i > 15)) for i, x in enumerate(INPUTS)]
    with pytest.raises(ModelError, match=r"not convex in the outputs.* is -\d"):
        GaussNewton(net(4), task, data)
    GaussNewton(net(4), task, data[:16])


# --- models that are not what they seem ------------------------------------------------------------------


class Listed(nn.Module):
    """Keeps a parameter in a list, where nobody can replace it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)
        self.kept = [self.linear.weight]

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.kept[0].T + self.linear.bias


def scripted() -> nn.Module:
    with pytest.warns(DeprecationWarning, match="torch.jit"):
        return torch.jit.trace(net(4), torch.zeros(2, 6, dtype=DOUBLE))  # type: ignore[no-any-return]


def compiled_in_place() -> nn.Module:
    model = net(4)
    model.compile(backend="eager")
    return model


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (scripted, r"the model is TorchScript.*products would be zero\. Give the Python module"),
        (lambda: evaluated(nn.Sequential(net(4), scripted())), "the layer '1' is TorchScript"),
        (lambda: torch.compile(net(4), backend="eager"), r"compiled by torch\.compile.*model\._orig_mod"),
        (compiled_in_place, r"compiled in place by its compile\(\).*do not compile it"),
        (
            lambda: evaluated(Listed()),
            r"reads 'linear\.weight' from a copy of its own.*through their modules",
        ),
    ],
    ids=["traced", "partly traced", "compiled", "compiled in place", "kept in a list"],
)
@pytest.mark.parametrize("product", PRODUCTS)
def test_code_that_reads_parameters_in_its_own_way_is_refused(
    make: Callable[[], nn.Module], message: str, product: Product
) -> None:
    with pytest.raises(ModelError, match=message):
        GaussNewton(make(), Classification(), vectors(DOUBLE), product=product)


def test_a_view_of_a_parameter_may_be_passed_to_a_layer() -> None:
    class Viewed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.table, self.layer = nn.Parameter(torch.randn(8, 6)), nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) + self.layer(self.table[2:4]).tanh().sum(0)

    loss = cross_entropy()
    for product in PRODUCTS:
        gnh = GaussNewton(evaluated(Viewed()), Classification(), vectors(DOUBLE), product=product)
        dense = dense_of(gnh, loss)
        v = gnh.zeros().randn_like(torch.Generator().manual_seed(0))
        assert relative_error(gnh.matvec(v), dense.matvec(v)) <= 1e-6


# --- around them -----------------------------------------------------------------------------------------


def test_the_command_line_knows_tasks_by_name(tmp_path: Path) -> None:
    (tmp_path / "given.py").write_text(
        "import torch\nfrom whence.sources import Problem\n"
        "def build():\n"
        "    rows = [(torch.ones(3), i % 2) for i in range(4)]\n"
        "    return Problem(torch.nn.Linear(3, 1).eval(), train=rows, queries=rows[:1])\n"
    )
    spec = f"{tmp_path / 'given.py'}:build"
    inputs = Inputs(InputOptions(model=spec, task="binary-classification"))
    assert isinstance(inputs.task, BinaryClassification)
    assert inputs.operator(Options()).num_terms == 4
    files = Inputs(InputOptions(model=spec, task="binary-classification", train=str(tmp_path)))
    with pytest.raises(OptionError, match=r"not for BinaryClassification.*Problem with train and queries"):
        _ = files.train
    with pytest.raises(
        OptionError, match=r"--task is 'ranking'; it must be one of classification, .*sequence-to"
    ):
        _ = Inputs(InputOptions(model=spec, task="ranking")).task


def test_an_answer_is_shown_beside_what_it_answers() -> None:
    shown = exhibit_of(SequenceToSequence().query([3, 4, 5], [6, 7]), 0)
    assert (shown.prompt, shown.text, shown.tokens) == ("3 4 5 ", "6 7 ", ("6 ", "7 "))
