"""λ chosen by retraining: where the right one is known, where it was interrupted, and on the command line."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.datasets import load_diabetes
from torch import Tensor, nn
from typer.testing import CliRunner

from whence import LanguageModeling, Regression, Training, Tuning, attribute, tune
from whence.attribution import damping as rule
from whence.cli import app
from whence.errors import DataError, ModelError, OptionError, RunDirectoryError, WhenceError

TASK = Regression()
RIDGE = 0.02
#: Says τ so that damping="auto" is sixteen times the penalty.
RECIPE = Training(rate=rule.RECIPE / (16 * RIDGE), steps=1)


def diabetes() -> tuple[Tensor, Tensor]:
    bunch = load_diabetes()
    x, y = torch.tensor(bunch.data), torch.tensor(bunch.target)
    x, y = (x - x.mean(0)) / x.std(0), ((y - y.mean()) / y.std()).unsqueeze(1)
    columns = [x, *(x[:, i : i + 1] * x[:, i:] for i in range(10))]  # and all products of two
    return torch.cat(columns, 1), y


X, Y = diabetes()
TRAIN, QUERIES = list(zip(X[:300], Y[:300], strict=True)), list(zip(X[300:340], Y[300:340], strict=True))


class Ridge:
    """Least squares with a penalty of RIDGE/2 ‖w‖²: influence with λ = RIDGE is the derivative of what it does."""

    def __init__(self) -> None:
        self.trained = 0

    def __call__(self, subset: Sequence[int], seed: int, /) -> nn.Module:
        self.trained += 1
        x, y = X[list(subset)], Y[list(subset)]
        hessian = x.T @ x / len(x) + RIDGE * torch.eye(x.shape[1], dtype=x.dtype)
        model = nn.Linear(x.shape[1], 1, bias=False).double().eval()
        model.weight.data = torch.linalg.solve(hessian, x.T @ y / len(x)).T
        return model


def tuned(trainer: Any = None, **given: Any) -> Tuning:
    trainer = trainer or Ridge()
    given = {"task": TASK, "training": RECIPE, "halves": 40, **given}
    return tune(Ridge()(range(300), 0), TRAIN, QUERIES, trainer, **given)


@pytest.fixture(scope="module")
def found() -> Tuning:
    return tuned()


def test_it_finds_the_penalty_of_ridge_regression(found: Tuning) -> None:
    assert found.auto == pytest.approx(16 * RIDGE)
    assert found.damping / RIDGE in (pytest.approx(0.5), pytest.approx(1), pytest.approx(2))
    assert len(found.lds) == len(found.dampings) == 12
    assert found.gain.first == found.lds[found.dampings.index(found.damping)]
    assert found.gain.second == found.lds[found.dampings.index(found.auto)]
    assert found.gain.first.value == max(each.value for each in found.lds)
    assert 0 < found.gain.low < found.gain.value
    assert 0.5 < found.sure <= 1
    assert 0 < found.held_out < found.gain.value + 0.02
    assert found.worthwhile


def test_scores_of_the_grid_are_exact(found: Tuning) -> None:
    residuals = Ridge()(range(300), 0)(X[:340]).detach() - Y[:340]
    gradients = residuals * X[:340]
    hessian = X[:300].T @ X[:300] / 300 + found.damping * torch.eye(X.shape[1], dtype=X.dtype)
    exact = gradients[300:] @ torch.linalg.solve(hessian, gradients[:300].T) / 300
    assert float(torch.corrcoef(torch.stack([exact.flatten(), found.effects.flatten()]))[0, 1]) > 0.999


def test_the_setting_gives_the_attribution(found: Tuning) -> None:
    model = Ridge()(range(300), 0)
    result = attribute(model, TRAIN, QUERIES, task=TASK, training=RECIPE, damping=found.setting, solver="cg")
    assert result.solve.plan.damping == pytest.approx(found.damping)
    pair = torch.stack([result.effects.flatten(), found.effects.flatten()])
    assert float(torch.corrcoef(pair)[0, 1]) > 0.99


def test_words_and_table_say_what_was_found(found: Tuning) -> None:
    words = found.words()
    assert f"LDS {found.gain.first.value:.3f}" in words
    assert f"gains {found.held_out:+.3f}" in words
    assert f'Give damping="{found.setting}"' in words
    table = str(found).splitlines()
    assert [line.split()[-1] for line in table if line.endswith(("best", "auto"))] == ["auto", "best"]
    assert len([line for line in table if "×" in line]) == 12
    assert json.loads(json.dumps(found.to_json()))["setting"] == found.setting


def test_where_auto_is_right_it_stays() -> None:
    right = tuned(training=Training(rate=rule.RECIPE / RIDGE, steps=1), multiples=[16, 1 / 16])
    assert right.damping == right.auto == pytest.approx(RIDGE)
    assert right.setting == "auto"
    assert right.gain.value == 0
    assert not right.worthwhile
    assert 'It is the one that damping="auto" takes' in right.words()
    assert "best" in str(right)


def test_the_end_of_the_grid_is_told() -> None:
    assert "at the end of the grid" in tuned(multiples=[1, 0.25]).words()


def test_without_a_training_the_metric_is_measured() -> None:
    measured = tuned(training=None, multiples=[0.25, 4], halves=6)
    assert measured.solve.solve.in_metric
    model = Ridge()(range(300), 0)
    assert measured.auto == pytest.approx(attribute(model, TRAIN, QUERIES, task=TASK).solve.plan.damping)


def test_examples_count_by_their_length() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 11)).double().eval()
    train = [{"input_ids": torch.randint(11, (length,))} for length in (3, 9, 4, 12, 5, 6, 7, 8)]

    def trainer(subset: Sequence[int], seed: int) -> nn.Module:
        changed = copy.deepcopy(model)
        for i in subset:
            changed[1].bias.data[train[i]["input_ids"]] += 0.01  # type: ignore[index, union-attr]
        return changed

    found = tune(model, train, train[:3], trainer, task=LanguageModeling(), halves=6, multiples=[0.5])
    one = attribute(model, train, train[:3], task=LanguageModeling(), damping=found.setting, solver="cg")
    pair = torch.stack([one.effects.flatten(), found.effects.flatten()])
    assert float(torch.corrcoef(pair)[0, 1]) > 0.99
    torch.testing.assert_close(found.effects.norm(), one.effects.norm().double(), rtol=0.1, atol=0.0)


# --- resumption --------------------------------------------------------------------------------------------------


class Interrupted(Ridge):
    def __call__(self, subset: Sequence[int], seed: int, /) -> nn.Module:
        if self.trained == 5:
            raise KeyboardInterrupt
        return super().__call__(subset, seed)


def test_it_goes_on_after_an_interruption(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        tuned(Interrupted(), halves=8, directory=tmp_path)
    second = Ridge()
    found = tuned(second, halves=8, directory=tmp_path)
    assert second.trained == 3
    third = Ridge()
    again = tuned(third, halves=8, directory=tmp_path)
    assert third.trained == 0
    assert again.to_json() == found.to_json() == tuned(halves=8).to_json()
    with pytest.raises(RunDirectoryError):
        tuned(halves=9, directory=tmp_path)


# --- what cannot be asked for ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"halves": 5}, "halves is 5; .* at least 6"),
        ({"halves": 20.0}, "halves is 20.0"),
        ({"seeds": 0}, "seeds is 0"),
        ({"seeds": (0, 1)}, "seeds is"),
        ({"multiples": []}, "multiples are"),
        ({"multiples": [0.0, 1.0]}, "multiples are"),
        ({"multiples": [float("nan")]}, "multiples are"),
        ({"trainer": 3}, "trainer is a int"),
        ({"damping": 3.0}, "no option 'damping'"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_what_cannot_be_used_is_refused_before_anything_is_trained(given: dict[str, Any], says: str) -> None:
    trainer = Ridge()
    with pytest.raises(OptionError, match=says):
        tuned(**{"trainer": trainer, **given})
    assert trainer.trained == 0


class Deaf(Ridge):
    def __call__(self, subset: Sequence[int], seed: int, /) -> nn.Module:
        return super().__call__(range(300), seed)


class Broken(Ridge):
    def __call__(self, subset: Sequence[int], seed: int, /) -> nn.Module:
        raise ZeroDivisionError("no data")


@pytest.mark.parametrize(
    ("trainer", "error", "says"),
    [
        (Deaf(), DataError, "the same whatever half"),
        (Broken(), ModelError, "training on subset 0 .* failed"),
    ],
)
def test_a_trainer_that_does_not_train_is_named(trainer: Ridge, error: type[WhenceError], says: str) -> None:
    with pytest.raises(error, match=says):
        tuned(trainer, halves=6, multiples=[0.25])


# --- the command line --------------------------------------------------------------------------------------------

SCRIPT = """
import torch
from sklearn.datasets import load_wine
from whence import Classification, Exhibit
from whence.sources import Problem

bunch = load_wine()
x = torch.tensor(bunch.data, dtype=torch.float32)
x, y = (x - x.mean(0)) / x.std(0), torch.tensor(bunch.target)
order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
data = [(x[i], int(y[i])) for i in order]

def train(subset, seed):
    with open("trained.txt", "a") as file:
        print(len(subset), seed, file=file)
    torch.manual_seed(seed)
    model = torch.nn.Linear(13, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    inputs, labels = torch.stack([data[i][0] for i in subset]), torch.tensor([data[i][1] for i in subset])
    for _ in range(30):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    return model.eval()

def build():
    return Problem(train(range(140), 0), Classification(), train=data[:140], queries=data[140:],
                   query_exhibits=lambda i: Exhibit(id=f"wine {140 + i}"))
"""


def invoke(*arguments: object, code: int = 0) -> Any:
    result = CliRunner().invoke(app, ["tune", "wine.py:build", *map(str, arguments)])
    assert result.exit_code == code, (result.output, result.exception)
    return result


def test_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("wine.py").write_text(SCRIPT)
    asked = ["--trainer", "wine.py:train", "--run-dir", "run", "--halves", 6]
    asked += ["--training", "optimizer=adam,rate=0.05,steps=30"]
    first = json.loads(invoke(*asked, "--processes", 2, "--json").stdout)
    halves = [line for line in Path("trained.txt").read_text().splitlines() if line.startswith("70 ")]
    assert halves == ["70 0"] * 6
    assert first["auto"] == pytest.approx(rule.RECIPE / 1.5)
    assert first["setting"].startswith("auto")
    assert first["halves"] == 6
    printed = invoke(*asked).stdout
    assert f"{first['auto']:.4g}" in printed
    assert "retrained halves" in printed
    assert Path("trained.txt").read_text().count("70 0") == 6

    assert "at least 6" in invoke("--trainer", "wine.py:train", "--halves", 2, code=2).output
    assert "has no function 'nothing'" in invoke("--trainer", "wine.py:nothing", code=2).output
    assert "leave --candidates out" in invoke(*asked, "--candidates", "bm25:3", code=2).output
    assert "trainer" in invoke(code=2).output
