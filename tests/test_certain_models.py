"""A model that is certain of its data: ``1 - p_y`` is below the rounding of 1, and gradients are made of it."""

from __future__ import annotations

import copy
import math
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from whence import (
    Attribution,
    Classification,
    ConjugateGradient,
    Damped,
    GaussNewton,
    LanguageModeling,
    ParamVector,
    attribute,
    clean,
    load,
)
from whence.attribution.page import accuracy_words
from whence.cleaning import load_cleaning
from whence.errors import OptionError, WhenceWarning
from whence.scoring import Scorer
from whence.tasks import Batch, Task
from whence.validation.verdicts import solver_check

#: Logits of four classes, whose likeliest is the label in all rows but the last: p is 1 - 1e-9, 1 - 1e-10, 1 - 1e-16.
OUTPUTS = torch.tensor(
    [[1.0, -2.0, 22.0, 0.5], [25.0, 3.0, -1.0, 2.0], [-3.0, 34.0, -2.0, -4.0], [24, 1.0, 2.0, 0.0]]
)
LABELS = torch.tensor([2, 0, 1, 3])
TANGENTS = torch.tensor(
    [[0.3, -1.1, 0.7, 0.2], [1.4, 0.1, -0.6, 0.9], [-0.2, 5.0, 0.4, 0.3], [0.1, -2.0, 0.8, 0.5]]
)
TASKS = [
    pytest.param(Classification(), (4,), id="classification"),
    pytest.param(LanguageModeling(), (2, 2), id="language modelling"),
]
DIGITS = {"rtol": 1e-5, "atol": 0.0}


def in_both_precisions(lead: tuple[int, ...]) -> tuple[Batch, list[tuple[Tensor, Tensor]]]:
    outputs, tangents = OUTPUTS.reshape(*lead, 4), TANGENTS.reshape(*lead, 4)
    return Batch((), {}, LABELS.reshape(lead)), [(outputs, tangents), (outputs.double(), tangents.double())]


@pytest.mark.parametrize(("task", "lead"), TASKS)
def test_losses_and_their_gradients(task: Task, lead: tuple[int, ...]) -> None:
    batch, both = in_both_precisions(lead)
    found = []
    for outputs, _ in both:
        leaf = outputs.clone().requires_grad_()
        losses = task.losses(leaf, batch)
        found.append((losses.detach().double(), torch.autograd.grad(losses.sum(), leaf)[0].double()))
    (losses, slopes), (exact, exact_slopes) = found
    assert float(exact.min()) < 1e-15
    torch.testing.assert_close(losses, exact, **DIGITS)
    torch.testing.assert_close(slopes, exact_slopes, **DIGITS)


@pytest.mark.parametrize("way", ["loss_derivatives", "hessian_product", "derivatives_beside"])
@pytest.mark.parametrize(("task", "lead"), TASKS)
def test_derivatives_along_tangents(task: Task, lead: tuple[int, ...], way: str) -> None:
    batch, both = in_both_precisions(lead)

    def compute(outputs: Tensor, tangents: Tensor) -> Tensor:
        if way == "loss_derivatives":
            return task.loss_derivatives(outputs, tangents, batch)
        product = task.hessian_product(outputs, tangents, batch)
        return (
            product.double()
            if way == "hessian_product"
            else task.derivatives_beside(outputs, tangents, product, batch)
        )

    found, exact = (compute(*precision) for precision in both)
    assert float(exact.abs().min()) < 1e-14
    torch.testing.assert_close(found, exact, **DIGITS)


class Sure(nn.Module):
    """Three classes, of which the answer is always the first coordinate's sign, and beyond doubt."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(2, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        sure: Tensor = 12 * torch.stack([x[:, 0], -x[:, 0], torch.zeros(len(x)).to(x)], 1)
        return sure + self.out(self.hidden(x).tanh())


def problem() -> tuple[Sure, list[tuple[Tensor, int]]]:
    torch.manual_seed(0)
    model = Sure().eval()
    points = torch.randn(12, 2)
    points[:, 0] = points[:, 0].sign() * torch.linspace(0.8, 2.6, 12)
    return model, [(point, 0 if point[0] > 0 else 1) for point in points]


@pytest.mark.parametrize(
    ("product", "method", "digits"),
    [
        ("exact", "directional", 1e-4),
        ("exact", "gradients", 1e-4),
        ("finite-difference", "directional", 5e-2),
    ],
)
def test_scores_of_examples(product: str, method: str, digits: float) -> None:
    """In float32 as in float64, relative to each score's own size; and the lengths of their gradients."""
    model, data = problem()
    wide = [(x.double(), y) for x, y in data]
    reference = GaussNewton(copy.deepcopy(model).double(), Classification(), wide)
    gnh = GaussNewton(model, Classification(), data, product=product)  # type: ignore[arg-type]
    along = gnh.zeros(2).randn_like(torch.Generator().manual_seed(1))
    exactly = ParamVector({name: tensor.double() for name, tensor in along.items()}, columns=2)
    exact, lengths = Scorer(reference, exactly, method="gradients", norms=True).score_with_norms(
        torch.arange(12)
    )
    found, measured = Scorer(gnh, along, method=method, norms=True).score_with_norms(torch.arange(12))  # type: ignore[arg-type]
    assert float(lengths.min()) < 1e-12
    torch.testing.assert_close(found, exact, rtol=digits, atol=digits * 1e-3 * float(lengths.min()))
    # directional derivatives know lengths from eight random directions
    torch.testing.assert_close(measured, lengths, rtol=1e-4 if method == "gradients" else 0.7, atol=0.0)


def test_gradients_of_queries() -> None:
    """Why did it say this? Also where it had no doubt."""
    model, data = problem()
    wide = [(x.double(), y) for x, y in data]
    exact = GaussNewton(copy.deepcopy(model).double(), Classification(), wide).gradients(wide)
    found = GaussNewton(model, Classification(), data).gradients(data)
    for query in range(len(data)):
        error, size = (
            math.sqrt(sum(float(part[name][query].double().square().sum()) for name in exact))
            for part in (
                {name: found[name].double() - exact[name] for name in exact},
                exact,
            )
        )
        assert error < 1e-4 * size


# --- error bars ------------------------------------------------------------------------------------------------


def network() -> tuple[nn.Module, list[tuple[Tensor, int]]]:
    """A classifier of points that it has doubts about."""
    random = torch.Generator().manual_seed(0)
    points, labels = torch.randn(60, 2, generator=random), torch.randint(2, (60,), generator=random)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2)).eval()
    return model, [(x, int(y)) for x, y in zip(points, labels, strict=True)]


def sure_but_for_two() -> tuple[nn.Module, list[tuple[Tensor, int]]]:
    """A classifier that has no doubt of 198 of its 200 examples, not even in float32; of the second it has."""
    model = nn.Linear(2, 2, bias=False).eval()
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[-40.0, 0.3], [40.0, -0.2]]))
    first = torch.full((200,), 3.0)
    first[[1, 120]] = 0.001
    points = torch.stack([first, torch.linspace(-1, 1, 200)], 1)
    return model, [(x, 1) for x in points]


def asked(
    model: nn.Module, data: list[tuple[Tensor, int]], solver: str, queries: int = 3, accuracy: str = "auto"
) -> Attribution:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", WhenceWarning)  # estimates of the spectrum contradict each other
        return attribute(
            model,
            data,
            data[:queries],
            task=Classification(),
            damping="lambda_max/20",
            solver=solver,
            accuracy=accuracy,
            baseline=False,
        )


def covered(found: Attribution, model: nn.Module, data: list[tuple[Tensor, int]], queries: int = 3) -> float:
    """Share of the exact scores within the intervals."""
    wide = [(x.double(), y) for x, y in data]
    gnh = GaussNewton(copy.deepcopy(model).double(), Classification(), wide)
    solver = ConjugateGradient(tolerance=1e-7, max_iterations=300)
    exactly = solver.solve(
        Damped(gnh, found.solve.plan.damping), gnh.gradients(wide[:queries]), generator=torch.Generator()
    )
    exact = Scorer(gnh, exactly.value).score(torch.arange(len(data)))
    low, high = found.interval(0.95)
    return float(((low <= exact) & (exact <= high)).double().mean())


def test_intervals_of_a_model_with_doubts_are_not_doubted() -> None:
    model, data = network()
    found = asked(model, data, "cg")
    assert found.doubts == ()
    assert "in doubt" not in repr(found)
    assert covered(found, model, data) >= 0.9


def test_intervals_of_a_certain_model_are_doubted_with_the_cause() -> None:
    model, data = sure_but_for_two()
    found = asked(model, data, "cg")
    assert "a few examples carry the curvature" in found.doubts[0]
    assert "intervals in doubt" in repr(found)


@pytest.mark.parametrize("solver", ["cg", "lissa"])
@pytest.mark.parametrize("count", [1, 12])
def test_equal_examples_have_intervals_that_hold_or_are_doubted(count: int, solver: str) -> None:
    model, data = network()
    same = data[:1] * count
    found = asked(model, same, solver, queries=1)
    assert covered(found, model, same, queries=1) == 1.0 or "common start" in found.doubts[0]
    assert bool(found.doubts) == (solver == "lissa")


def test_a_plan_of_lissa_for_days_is_refused_before_it_begins() -> None:
    model, data = sure_but_for_two()
    options = {"task": Classification(), "damping": "lambda_max/300", "baseline": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", WhenceWarning)
        with pytest.raises(
            OptionError, match=r"LiSSA would go over the data [\d,]{5,} times.*gradients \d times"
        ):
            attribute(model, data, data[:3], solver="lissa", **options)
        assert attribute(model, data, data[:3], **options).solve.solver == "cg"


def test_a_query_that_has_no_gradient_left_is_doubted_by_its_number() -> None:
    model, data = sure_but_for_two()
    found = asked(model, data, "cg")
    assert any("gradient of query 0, 2 is zero" in doubt for doubt in found.doubts)
    assert not found.scores[0].any()
    assert found.scores[1].any()


@pytest.mark.parametrize("copies", [1, 40])
@pytest.mark.parametrize("different", [1, 12])
def test_a_quick_answer_from_few_examples_is_doubted_however_often_they_are_there(
    different: int, copies: int
) -> None:
    model, data = network()
    found = attribute(
        model,
        data[2 : 2 + different] * copies,
        data[:1],
        task=Classification(),
        damping="lambda_max/20",
        accuracy="quick",
    )
    assert found.solve.solver == "ekfac"
    assert f"of which only {different} {'is' if different == 1 else 'are'} different" in found.doubts[-1]
    assert "in doubt" in accuracy_words(found)


def test_a_quick_answer_about_what_the_examples_do_not_see_is_doubted() -> None:
    """Examples on a line, and a query off it: the error of the solution is where no example is, mostly."""
    model, _ = network()
    random = torch.Generator().manual_seed(1)
    points, labels = torch.randn(40, 2, generator=random), torch.randint(2, (40,), generator=random)
    query = [(torch.tensor([0.01, 2.0]), 0)]
    for off_the_line, seen in ((0.0, False), (1.0, True)):
        data = [(x * torch.tensor([1.0, off_the_line]), int(y)) for x, y in zip(points, labels, strict=True)]
        found = attribute(
            model, data, query, task=Classification(), damping="lambda_max/1000", accuracy="quick"
        )
        assert ("have no curvature" in " ".join(found.doubts)) == (not seen)


def test_a_quick_answer_from_examples_that_say_enough_is_not_doubted() -> None:
    model, data = network()
    found = asked(model, data, "auto", accuracy="quick")
    assert found.doubts == ()
    assert covered(found, model, data) >= 0.9
    assert "in doubt" not in accuracy_words(found)


def test_wherever_a_bar_is_shown_its_doubts_are_too(tmp_path: Path) -> None:
    """Also when it is read back, and in parts of a ranking."""
    model, data = sure_but_for_two()
    found = asked(model, data, "cg")
    found.save(tmp_path / "saved")
    for result in (found, load(tmp_path / "saved")):
        assert result.doubts == found.doubts
        doubt = found.doubts[0]
        ranking = result.top(2)
        for shown in (ranking, ranking.of_query(1), ranking[:1]):
            assert f"note: {doubt}" in str(shown)
        assert result.to_pandas().attrs["doubts"] == ranking.to_pandas().attrs["doubts"] == list(found.doubts)
        page = result.to_html(tmp_path / "page.html").read_text()
        assert page.count("Intervals in doubt.") == 3  # at each question
        assert solver_check(result).verdict == "cannot tell"
        assert doubt in solver_check(result).sentence


def test_harm_says_that_its_intervals_are_doubted(tmp_path: Path) -> None:
    model, data = sure_but_for_two()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", WhenceWarning)
        clean(model, data, task=Classification(), queries=data[1:2], rank=2, exact_solves=0, run_dir=tmp_path)
    assert any("few examples carry the curvature" in note for note in load_cleaning(tmp_path).notes)
