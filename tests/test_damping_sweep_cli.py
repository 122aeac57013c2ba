"""What ``whence plan --damping-sweep`` says of other dampings, against the dense Hessian of a tiny model."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from dense import dense_gauss_newton
from whence import Classification, Dense, Estimate, GaussNewton, Spectrum
from whence.attribution.sweep import CONDITION_NUMBERS, DampingForecast, forecast_dampings
from whence.cli import app
from whence.cli.sweep import draw
from whence.errors import OptionError
from whence.solvers.plan import Plan
from whence.spectrum import Density, spectral_density

RUNNER = CliRunner()

BUILD = """
import torch
from whence import Classification
from whence.sources import Problem

def everything():
    torch.manual_seed(0)
    data = [(torch.randn(4), i % 3) for i in range(40)]
    return Problem(torch.nn.Linear(4, 3).eval(), Classification(), train=data, queries=data[:2])
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("sweep") / "build.py"
    path.write_text(BUILD)
    return f"{path}:everything"


def invoke(*arguments: object, code: int = 0) -> Any:
    result = RUNNER.invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, (result.output, result.exception)
    return result


@pytest.fixture(scope="module")
def printed(model: str) -> dict[str, Any]:
    asked = ("--damping", "lambda_max/200", "--damping-sweep", "--json")
    return json.loads(invoke("plan", model, *asked).stdout)


def eigenvalues() -> torch.Tensor:
    """Of the dense Hessian, in float64."""
    scope: dict[str, Any] = {}
    exec(BUILD, scope)
    problem = scope["everything"]()
    data = [(x.double(), y) for x, y in problem.train]
    gnh = GaussNewton(problem.model.double(), Classification(), data)
    return torch.linalg.eigvalsh(dense_gauss_newton(gnh).matrix).clamp_min(0.0)


# --- the command -------------------------------------------------------------------------------------------------


def test_json_gives_all_numbers_and_they_are_right(printed: dict[str, Any]) -> None:
    sweep, values = printed["damping_sweep"], eigenvalues()
    rows = sweep["dampings"]
    assert [row["condition_number"] for row in rows] == pytest.approx(CONDITION_NUMBERS)
    assert rows[sweep["chosen"]]["condition_number"] == pytest.approx(200)
    assert rows[sweep["chosen"]]["damping"] == printed["plan"]["damping"]
    assert (sweep["queries"], sweep["num_terms"]) == (2, 40)
    kept = [values / (values + row["damping"]) for row in rows]
    own = kept[sweep["chosen"]]
    for i, row in enumerate(rows):
        assert row["dimension"]["value"] == pytest.approx(float(kept[i].sum()), rel=1e-3)
        assert row["second_dimension"]["value"] == pytest.approx(float(kept[i].square().sum()), rel=1e-3)
        with_chosen = float(kept[i] @ own / (kept[i].norm() * own.norm()))
        assert row["agreement_with_chosen"] == pytest.approx(with_chosen, abs=1e-3)
        assert sweep["agreement"][i][sweep["chosen"]] == row["agreement_with_chosen"]
        assert row["lissa"]["passes"] == row["lissa"]["terms"] / 40
        assert row["lissa"]["seconds"] > 0
        assert row["cg"]["seconds"] > 0
    following = float(kept[0] @ kept[1] / (kept[0].norm() * kept[1].norm()))
    assert rows[0]["agreement_with_next"] == pytest.approx(following, abs=1e-3)
    assert rows[-1]["agreement_with_next"] is None
    chosen = rows[sweep["chosen"]]["lissa"]
    assert chosen["terms"] == printed["plan"]["num_steps"] * printed["plan"]["chains"] * chosen["batch_size"]
    assert chosen["seconds"] == pytest.approx(chosen["passes"] * printed["iteration_seconds"])
    passes = [row["lissa"]["passes"] for row in rows]
    assert passes == sorted(passes)
    iterations = [row["cg"]["iterations"] for row in rows]
    assert 1 <= iterations[0] <= iterations[-1] <= 10  # of the rank of H
    density = Density(
        **{
            name: torch.tensor(value, dtype=torch.float64) if isinstance(value, list) else value
            for name, value in sweep["density"].items()
        }
    )
    assert density.dimension(rows[3]["damping"]).value == rows[3]["dimension"]["value"]


def test_the_plan_itself_is_as_without_the_sweep(model: str, printed: dict[str, Any]) -> None:
    plain = json.loads(invoke("plan", model, "--damping", "lambda_max/200", "--json").stdout)
    assert "damping_sweep" not in plain
    for plan in (plain["plan"], printed["plan"]):
        assert plan["spectrum"].pop("seconds_per_term") > 0  # measured on a machine that does other things
    assert plain["plan"] == printed["plan"]


def test_the_table_is_followed_by_words(model: str) -> None:
    result = invoke("plan", model, "--damping-sweep", "--damping", "lambda_max/30")
    assert "4 × 24 products of 40 terms" in result.stderr
    table, _, words = result.stdout.partition("other dampings:")[2].partition("* chosen")
    lines = [line for line in table.splitlines() if line.strip()]
    assert len(lines) == 1 + 12  # the chosen λ joins the others
    (starred,) = (line for line in lines if "*" in line)
    assert starred.split()[1] == "30"
    assert starred.split()[-1] == "1.000"
    words = " ".join(words.split())
    for part in ("for 2 queries", "λmax/30", "passes over the data", "of 15.", "nothing about retraining"):
        assert part in words
    assert "The density is that of" not in words  # but of all terms


def test_a_subset_is_said_to_be_one(model: str) -> None:
    result = invoke("plan", model, "--damping-sweep", "--spectrum-terms", "10")
    words = " ".join(result.stdout.split())
    assert "The density is that of 10 of 40 terms" in words
    assert "would be off by" in words


def test_the_figure_is_written(model: str, tmp_path: Path) -> None:
    path = tmp_path / "sweep.png"
    printed = invoke("plan", model, "--damping-sweep", "--figure", path).stdout
    assert f"figure: {path}" in printed
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--figure", "sweep.svg"], "add --damping-sweep"),
        (["--damping-sweep", "--figure", "sweep.jpg"], "must end in .svg or .png"),
        (["--damping-sweep", "--damping", "much"], "damping is 'much'"),
    ],
    ids=["no sweep", "jpg", "damping"],
)
def test_bad_options_are_refused_before_the_model_is_loaded(options: list[str], message: str) -> None:
    result = invoke("plan", "no-such-model.py:build", *options, code=2)
    assert message in " ".join(result.stderr.split())


def test_a_figure_without_matplotlib_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = invoke("plan", "no-such-model.py:build", "--damping-sweep", "--figure", "a.png", code=2)
    assert "whence[reproduce]" in " ".join(result.stderr.split())


# --- the forecast ------------------------------------------------------------------------------------------------


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.fixture(scope="module")
def forecast() -> DampingForecast:
    values = torch.arange(1, 61, dtype=torch.float64) ** -1.5
    A = Dense(torch.diag(values))
    spectrum = Spectrum(
        trace=Estimate(float(values.sum())),
        frobenius=Estimate(float(values.norm())),
        lambda_max=Estimate(1.0),
    )
    density = spectral_density(A, generator=generator(), products=60)
    return forecast_dampings(spectrum, density, num_terms=1000, queries=3)


def test_costs_are_those_of_the_plans(forecast: DampingForecast) -> None:
    for outlook, passes in zip(forecast.outlooks, forecast.passes, strict=True):
        plan = outlook.plan
        assert plan == Plan.tuned(plan.spectrum, plan.damping, num_terms=1000)
        assert passes == plan.num_term_products / 1000
    assert forecast.seconds(10) is None
    timed = replace(forecast, seconds_per_term=0.5)
    assert timed.seconds(10) == 5.0
    assert "time" in str(timed).splitlines()[0]
    assert "time" not in str(forecast).splitlines()[0]
    assert len({len(line) for line in str(timed).splitlines()[:-1]}) == 1


def test_the_range_of_like_scores_lies_around_the_chosen_damping(forecast: DampingForecast) -> None:
    L, chosen = len(forecast.outlooks), forecast.chosen
    place = torch.arange(L, dtype=torch.float64)
    falling = 1 - 0.02 * (place.unsqueeze(0) - place.unsqueeze(1)).abs()
    found = replace(forecast, agreement=falling)
    assert found.alike() == (chosen - 2, chosen + 2)
    assert f"from {found.outlooks[chosen - 2].name} to {found.outlooks[chosen + 2].name}" in found.words()
    alone = replace(forecast, agreement=torch.eye(L, dtype=torch.float64))
    assert alone.alike() == (chosen, chosen)
    assert "no other λ of the range" in alone.words()
    same = replace(forecast, agreement=torch.ones(L, L, dtype=torch.float64))
    assert same.alike() == (0, L - 1)


def test_the_same_figure_is_the_same_file(forecast: DampingForecast, tmp_path: Path) -> None:
    one, two = tmp_path / "one.svg", tmp_path / "two.svg"
    for path in (one, two):
        draw(forecast, path)
    assert one.read_bytes() == two.read_bytes()
    assert one.read_text().count('id="axes_') == 3


def test_what_cannot_be_forecast_is_refused(forecast: DampingForecast) -> None:
    spectrum, density = forecast.outlooks[0].plan.spectrum, forecast.density
    given = {"num_terms": 10}
    with pytest.raises(OptionError, match="queries and num_terms"):
        forecast_dampings(spectrum, density, queries=0, **given)
    with pytest.raises(OptionError, match="at least two different"):
        forecast_dampings(spectrum, density, dampings=[0.5], chosen=0.5, **given)
    with pytest.raises(OptionError, match="damping is 'small'"):
        forecast_dampings(spectrum, density, chosen="small", **given)
    with pytest.raises(OptionError, match="square of agreements"):
        replace(forecast, agreement=torch.eye(2))
