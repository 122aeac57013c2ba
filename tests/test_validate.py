"""Why should one believe these scores? What is affordable, what it finds, and that wrong scores are found out."""

from __future__ import annotations

import copy
import functools
import importlib
import json
import math
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import spearmanr
from sklearn.datasets import load_digits
from torch import nn
from typer.testing import CliRunner

import whence
from small import generator
from whence import Attribution, Classification, Estimate, validate
from whence.attribution.over_damping import OverDamping
from whence.cli import app
from whence.cli.validate import parse_duration
from whence.errors import DataError, OptionError, RunDirectoryError, SolverError
from whence.report.checks import LIMITS, NAMES, Check, Comparison, Validation
from whence.runs import Run, as_json, read
from whence.validation import ProximalResponse
from whence.validation.verdicts import DAMPINGS, batch_check, damping_check, fine_tuning_check, solver_check

RUNNER = CliRunner()
validating = importlib.import_module("whence.validation.validate")  # the package has a function of that name
DAMPING = "lambda_max/20"  # few steps
BUILD = """
from test_validate import problem
from whence import Classification
from whence.sources import Problem

def everything():
    model, train, queries = problem()
    return Problem(model, Classification(), train=train, queries=queries)
"""


def problem() -> tuple[nn.Module, list[Any], list[Any]]:
    """Real digits, a small network trained on them, two questions."""
    model, data = trained()
    return copy.deepcopy(model), data[:120], data[120:122]


@functools.cache
def trained() -> tuple[nn.Module, list[Any]]:
    bunch = load_digits()
    x, y = torch.tensor(bunch.data[:150]).float() / 16, torch.tensor(bunch.target[:150])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[:120]), y[:120]).backward()
        optimizer.step()
    return model.eval(), [(x[i], int(y[i])) for i in range(150)]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer measurements than a user would want, so that a second is enough."""
    monkeypatch.setattr(validating, "_REALISATIONS", (16, 48))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a finished run, made by the command line."""
    root = tmp_path_factory.mktemp("validate")
    (root / "build.py").write_text(BUILD)
    lissa = ["--solver", "lissa", "--refine", "2"]  # which has batches to check, and chains to compare
    invoke(
        "attribute",
        f"{root / 'build.py'}:everything",
        "--damping",
        DAMPING,
        "--run-dir",
        root / "run",
        *lissa,
    )
    return root


@pytest.fixture(scope="module")
def result(place: Path) -> Attribution:
    return whence.load(place / "run")


@pytest.fixture
def run(place: Path, tmp_path: Path) -> Path:
    """A copy of the run, to write into."""
    shutil.copytree(place / "run", tmp_path / "run")
    return tmp_path / "run"


def invoke(*arguments: object, code: int = 0) -> Any:
    found = RUNNER.invoke(app, [str(argument) for argument in arguments])
    assert found.exit_code == code, (found.output, found.exception)
    return found


def check_all(result: Attribution, *, only: str | None = None, **options: Any) -> Validation:
    """All checks, or only one of those that take time."""
    options = {"budget_seconds": 600, "points": 2, **options}
    with pytest.MonkeyPatch.context() as patch:
        if only is not None:
            patch.setattr(validating, "CHECKS", {only: validating.CHECKS[only]})
        return validate(*problem(), result, task=Classification(), **options)


def with_plan(result: Attribution, *, seconds_per_term: float | None = None, **changes: Any) -> Attribution:
    """The result as if its plan, or the time of its products, had been another."""
    plan = result.solve.plan
    spectrum = replace(plan.spectrum, seconds_per_term=seconds_per_term or plan.spectrum.seconds_per_term)
    return replace(result, solve=replace(result.solve, plan=plan.replace(spectrum=spectrum, **changes)))


# --- the command ---------------------------------------------------------------------------------------------


def test_the_command_checks_writes_shows_and_goes_on(run: Path) -> None:
    before = (run / "report.html").read_text()
    assert "have not been checked" in before
    printed = invoke("validate", run, "--trust-run", "--budget", "10min", "--points", "2").stdout
    text = " ".join(printed.split())
    assert "trust: Does fine-tuning agree with the scores?" in text
    assert "linear_datamodeling_score" in text
    assert "report.html" in text
    found = read(run, "validation", Validation)
    assert [check.name for check in found.checks] == list(NAMES)
    assert [check.name for check in found.checks if not check.ran] == ["damping"]
    assert "kept nothing of other dampings" in found["damping"].sentence  # by LiSSA
    assert found.finished
    assert found.verdict == "trust"
    correlation, slope = (found["fine-tuning"].numbers[name] for name in ("correlation", "slope"))
    assert correlation[0] > 0.99
    assert abs(slope[0] - 1) < max(0.1, 3 * slope[1])
    page = (run / "report.html").read_text()
    assert "have not been checked" not in page
    assert page.count('<li class="check says-') == 4
    assert "losses moved as the scores say" in page
    assert invoke("report", run, "--output", run / "other.html").exit_code == 0
    assert (run / "other.html").read_text() == page
    again = json.loads(
        invoke("validate", run, "--trust-run", "--budget", "10min", "--points", "2", "--json").stdout
    )
    assert again.pop("report") == str(run / "report.html")
    assert (again.pop("verdict"), again.pop("summary")) == (found.verdict, found.summary)
    assert again.pop("limits") == LIMITS
    first, second = (
        {**told, "checks": [check for check in told["checks"] if check["ran"]]}
        for told in (json.loads(json.dumps(as_json(found))), again)
    )
    assert second == first  # with all its seconds: nothing was computed again


def test_scores_that_are_wrong_end_the_command_with_a_code_of_their_own(run: Path) -> None:
    wrong = whence.load(run)
    with Run.again(run) as directory:
        directory.put("result", Attribution, replace(wrong, chain_scores=-wrong.chain_scores))
    found = json.loads(invoke("validate", run, "--trust-run", "--points", "1", "--json", code=5).stdout)
    assert found["verdict"] == "doubt"
    page = (run / "report.html").read_text()
    assert "Before you read on" in page
    assert page.count("fine-tuning gives reason to doubt") == 2  # at the top, and with the checks


def test_a_saved_copy_keeps_what_was_found(result: Attribution, tmp_path: Path) -> None:
    known = replace(result, validation=Validation("x", (Check("solver", "doubt", "It did not."),)))
    assert whence.load(known.save(tmp_path / "copy")).validation == known.validation


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "nothing holds no run"),
        (["unfinished"], "not finished"),
        (["python"], r"whence\.validate\(model, train, queries, whence\.load\('python'\)"),
        (["changed"], r"validation.* was damaged or changed"),
        (["run", "--budget", "0"], "budget is 0"),
        (["run", "--budget", "soon"], "'soon'.*10min"),
        (["run", "--points", "0"], "points is 0"),
    ],
)
def test_bad_input_gets_one_clear_message(
    run: Path, arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run.parent)
    for name, missing in (("unfinished", "result"), ("python", "command")):
        shutil.copytree(run, name)
        with Run.again(name) as copied:
            copied.drop(missing)
    shutil.copytree(run, "changed")
    with Run.again("changed") as copied:
        copied.put("validation", Validation, Validation("", ()))
    (changed,) = Path("changed").glob("validation.*")
    changed.write_text('{"checks": [{"name": "solver"}], "about": ""}')
    found = invoke("validate", *arguments, code=2)
    assert re.search(message, " ".join(found.stderr.split())), found.stderr
    assert "Traceback" not in found.output


def test_help_shows_an_example_and_the_exit_code() -> None:
    text = " ".join(invoke("validate", "--help").output.split())
    assert "whence validate runs/first" in text
    assert "code 5" in text


@pytest.mark.parametrize(("text", "seconds"), [("90", 90), ("90s", 90), ("2 min", 120), ("0.5h", 1800)])
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "min", "-3s", "3 days", "1e3", "nan"])
def test_durations_that_are_none(text: str) -> None:
    with pytest.raises(OptionError, match="10min"):
        parse_duration(text)


# --- interruptions and budgets -------------------------------------------------------------------------------


class Counted:
    """A function that counts its calls, and is interrupted at one of them."""

    def __init__(self, function: Callable[..., Any], interrupt_at: int | None = None) -> None:
        self.function, self.interrupt_at, self.calls = function, interrupt_at, 0

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        if self.calls == self.interrupt_at:
            raise KeyboardInterrupt
        self.calls += 1
        return self.function(*arguments, **options)


def count_calls(
    monkeypatch: pytest.MonkeyPatch, names: Sequence[str], **interrupt_at: int
) -> dict[str, Counted]:
    counters = {name: Counted(getattr(validating, name), interrupt_at.get(name)) for name in names}
    for name, counter in counters.items():
        monkeypatch.setattr(validating, name, counter)
    return counters


def test_an_interrupted_call_goes_on_where_it_was(result: Attribution, tmp_path: Path) -> None:
    names = ["estimate_spectrum", "pbrf"]
    whole = check_all(result, points=3)
    with pytest.MonkeyPatch.context() as patch:
        count_calls(patch, names, pbrf=2)
        with pytest.raises(KeyboardInterrupt):
            check_all(result, points=3, directory=tmp_path)
    partial = read(tmp_path, "validation", Validation)
    assert [check.name for check in partial.checks] == ["solver", "batch"]
    assert "fine-tuning and the damping are missing" in partial.summary
    assert len(partial.comparisons) == 6
    with pytest.MonkeyPatch.context() as patch:
        counters = count_calls(patch, names)
        resumed = check_all(result, points=3, directory=tmp_path)
        assert {name: counter.calls for name, counter in counters.items()} == {
            "estimate_spectrum": 0,
            "pbrf": 1,
        }
    assert resumed.comparisons == whole.comparisons
    assert resumed["fine-tuning"].numbers == whole["fine-tuning"].numbers
    assert resumed.finished


def test_other_scores_in_the_same_directory_start_anew(result: Attribution, tmp_path: Path) -> None:
    first = check_all(result, points=1, directory=tmp_path, only="fine-tuning")
    flipped = replace(result, chain_scores=-result.chain_scores)
    second = check_all(flipped, points=1, directory=tmp_path, only="fine-tuning")
    assert first.about != second.about
    assert first["fine-tuning"].verdict == "trust"
    assert second["fine-tuning"].verdict == "doubt"


def test_what_does_not_fit_is_skipped_with_the_reason_and_run_when_it_fits(
    result: Attribution, tmp_path: Path
) -> None:
    slow = with_plan(result, seconds_per_term=1.0)
    poor = check_all(slow, budget_seconds=10, directory=tmp_path)
    assert poor["solver"].ran
    for name in ("batch", "fine-tuning"):
        assert not poor[name].ran
        assert poor[name].verdict == "cannot tell"
        assert re.search(r"would take about .* of the budget of 10\.0 s .* would do", poor[name].sentence)
    assert poor.verdict == "cannot tell"
    assert poor.comparisons == ()
    richer = check_all(result, directory=tmp_path)
    assert [check.name for check in richer.checks if not check.ran] == ["damping"]  # LiSSA


def test_the_budget_that_a_check_asks_for_is_enough_for_it(result: Attribution) -> None:
    slow = with_plan(result, seconds_per_term=1.0)
    asked = check_all(slow, budget_seconds=10, only="batch")["batch"].sentence
    (number, unit) = re.findall(r"A budget of ([\d.]+) (s|min|h) would do", asked)[0]
    enough = 1.05 * float(number) * {"s": 1, "min": 60, "h": 3600}[unit]
    assert check_all(slow, budget_seconds=enough, only="batch")["batch"].ran


def test_more_points_are_added_to_those_that_are_there(result: Attribution, tmp_path: Path) -> None:
    few = check_all(result, points=1, directory=tmp_path, only="fine-tuning")
    more = check_all(result, points=2, directory=tmp_path, only="fine-tuning")
    assert len(few.comparisons) == 3
    assert len(more.comparisons) == 6
    assert more.comparisons[:3] == few.comparisons


def test_random_batches_where_all_of_the_data_do_not_fit(
    result: Attribution, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Predicted at a second for each term, full batches are too dear and random ones are not."""
    monkeypatch.setattr(validating, "_iterations", lambda *_: 1000)
    plan = result.solve.plan
    per_point = 1.5 * (2 * plan.num_steps + 32) * plan.batch_size
    slow = with_plan(result, seconds_per_term=1.0)
    found = check_all(slow, budget_seconds=3.1 * per_point / 0.9, only="fine-tuning")
    assert len(found.comparisons) == 6
    assert not any(comparison.full_batch for comparison in found.comparisons)
    assert max(error for comparison in found.comparisons for error in comparison.fine_tuned_error) > 0
    assert "random batches" in found["fine-tuning"].sentence
    assert found["fine-tuning"].numbers["correlation"][0] > 0.9
    assert found["fine-tuning"].verdict != "doubt"


# --- what is found -------------------------------------------------------------------------------------------


def test_examples_are_of_every_kind_and_of_every_query(result: Attribution) -> None:
    chosen = validating._choose(result, 2, 2, generator())
    assert [kind for _, kind in chosen] == ["most helpful", "most harmful", "random"] * 2
    assert len({index for index, _ in chosen}) == 6
    assert chosen[0][0] == result.top(1, query=0)[0].index
    assert chosen[1][0] == result.top(1, query=0, harmful=True)[0].index
    second = [row.index for row in result.top(3, query=1) if row.index not in {i for i, _ in chosen[:3]}]
    assert chosen[3][0] == second[0]
    assert validating._choose(result, 2, 4, generator())[:6] == chosen
    everything = validating._choose(result, 2, 1000, generator())
    assert sorted(index for index, _ in everything) == list(range(120))


def test_only_scored_examples_are_chosen(result: Attribution) -> None:
    kept = torch.arange(10, 50)
    short = replace(
        result, chain_scores=result.chain_scores[:, :, kept], indices=kept, terms=result.terms[kept]
    )
    found = check_all(short, points=1, only="fine-tuning")
    assert {comparison.index for comparison in found.comparisons} <= set(kept.tolist())
    assert found["fine-tuning"].verdict == "trust"


@pytest.mark.parametrize("wrong", ["flipped", "shuffled", "scaled"])
def test_wrong_scores_are_doubted(result: Attribution, wrong: str) -> None:
    scores = result.chain_scores
    change = {
        "flipped": lambda: -scores,
        "shuffled": lambda: scores[:, :, torch.randperm(120, generator=generator())],
        "scaled": lambda: 2.5 * scores,
    }[wrong]
    found = check_all(replace(result, chain_scores=change()), only="fine-tuning")
    assert found["fine-tuning"].verdict == "doubt"
    assert found.verdict == "doubt"
    assert "Do not rely on these scores" in found["fine-tuning"].sentence


def test_noisy_scores_are_neither_trusted_nor_doubted(result: Attribution) -> None:
    """Error bars as wide as the scores: what they say may be right, and is not known to be."""
    noise = torch.randn(result.chain_scores.shape, generator=generator(), dtype=torch.float64)
    typical = result.chain_scores.std((0, 2), keepdim=True)
    found = check_all(
        replace(result, chain_scores=result.chain_scores + 4 * typical * noise), only="fine-tuning"
    )
    assert found["fine-tuning"].verdict == "cannot tell"
    assert "those are wide" in found["fine-tuning"].sentence


def comparison(index: int, truth: list[float], result: Attribution, *, converged: bool = True) -> Comparison:
    score = result.scores[:, index].tolist()
    return Comparison(index, "random", converged, True, tuple(score), (0.1, 0.1), tuple(truth), (0.0, 0.0))


def test_fine_tuning_that_did_not_converge_is_counted_and_not_used(result: Attribution) -> None:
    good = [comparison(i, result.scores[:, i].tolist(), result) for i in range(5)]
    lost = [comparison(i, [1e6, -1e6], result, converged=False) for i in range(5, 7)]
    found = fine_tuning_check(result, [*good, *lost], planned=9)
    assert found.numbers["correlation"][0] == pytest.approx(1)
    assert found.numbers["not converged"] == (2.0, 0.0)
    assert "on 2 more did not converge" in found.sentence
    assert "For 2 more the budget did not suffice" in found.sentence
    assert fine_tuning_check(result, [*good[:2], *lost], planned=4).verdict == "cannot tell"
    still = [comparison(i, [0.0, 0.0], result) for i in range(4)]
    assert "no question’s loss moved" in fine_tuning_check(result, still, planned=4).sentence


def test_correlation_and_slope_are_those_of_numpy(result: Attribution) -> None:
    import numpy

    alone = replace(result, chain_scores=result.chain_scores[:, :1])
    scores = alone.scores[0, :8]
    truth = scores + scores.std() * torch.randn(8, generator=generator(), dtype=torch.float64)
    rows = [(float(scores[i]), float(truth[i])) for i in range(8)]
    compared = [
        Comparison(i, "random", True, True, (score,), (0.1,), (y,), (0.0,))
        for i, (score, y) in enumerate(rows)
    ]
    found = fine_tuning_check(alone, compared, planned=8)
    assert found.numbers["correlation"][0] == pytest.approx(numpy.corrcoef(scores, truth)[0, 1])
    each = (alone.chain_scores[:, 0, :8] * truth).sum(1) / truth.square().sum()
    assert found.numbers["slope"][0] == pytest.approx(float(each.mean()))
    assert found.numbers["slope"][1] == pytest.approx(float(each.std()) / math.sqrt(len(each)))


def test_a_query_for_which_nothing_matters_does_not_spoil_the_others(result: Attribution) -> None:
    """Of one query all scores are noise about zero; of the other they agree with fine-tuning."""
    scores = result.chain_scores.clone()
    size = float(scores[:, 0, :6].mean(0).std())
    scores[:, 1] = 0.01 * size * torch.randn(scores[:, 1].shape, generator=generator(), dtype=torch.float64)
    noisy = replace(result, chain_scores=scores)
    truth = noisy.scores[:, :6]
    truth[1] = 0.01 * size * torch.randn(6, generator=generator(1), dtype=torch.float64)
    found = fine_tuning_check(
        noisy, [comparison(i, truth[:, i].tolist(), noisy) for i in range(6)], planned=6
    )
    assert found.numbers["correlation"][0] > 0.99
    assert found.verdict == "trust"
    wrong = noisy.scores[:, :6] * torch.tensor([[1.0], [-1.0]])
    wrong[1] *= 100  # resolved as well as the first, and wrong
    scores[:, 1] = 100 * scores[:, 1].mean(0) + scores[:, 1]
    noisy = replace(result, chain_scores=scores)
    found = fine_tuning_check(
        noisy, [comparison(i, wrong[:, i].tolist(), noisy) for i in range(6)], planned=6
    )
    assert found.verdict != "trust"


def test_diverged_fine_tuning_costs_only_its_own_example(
    result: Attribution, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = result.top(1, query=0)[0].index
    inputs = problem()[1][bad][0]
    respond = validating.pbrf

    def sometimes(model: Any, train: Any, points: Any, *others: Any, **options: Any) -> ProximalResponse:
        if any(torch.equal(x, inputs) for x, _ in points):
            raise SolverError("fine-tuning diverged")
        return respond(model, train, points, *others, **options)

    monkeypatch.setattr(validating, "pbrf", sometimes)
    found = check_all(result, only="fine-tuning")
    assert [c.index for c in found.comparisons if not c.converged] == [bad]
    assert len(found.comparisons) == 6
    assert found["fine-tuning"].verdict == "trust"


def test_a_check_that_fails_says_why_and_the_others_go_on(
    result: Attribution, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise SolverError("there is no curvature")

    monkeypatch.setattr(validating, "estimate_spectrum", fail)
    found = check_all(result, points=1)
    assert found["batch"].sentence == "Not run: it failed. there is no curvature"
    assert found["fine-tuning"].ran


def test_the_solver_s_own_account(result: Attribution) -> None:
    assert solver_check(result).verdict == "trust"
    lost = replace(result.solve, converged=torch.tensor([True, False]), events=("the step was halved",))
    found = solver_check(replace(result, solve=lost))
    assert found.verdict == "doubt"
    assert "for 1 of 2 questions" in found.sentence
    assert "the step was halved" in found.sentence
    noise = torch.randn(result.chain_scores.shape, generator=generator(), dtype=torch.float64)
    apart = replace(result, chain_scores=result.chain_scores + 100 * noise)
    assert solver_check(apart).verdict == "cannot tell"
    nothing = replace(result.solve, residual=torch.full((2,), math.nan), converged=torch.tensor([False] * 2))
    assert "largest residual" not in solver_check(replace(result, solve=nothing)).numbers


def test_a_batch_below_what_is_measured_is_doubted(result: Attribution) -> None:
    assert check_all(result, only="batch")["batch"].verdict == "trust"
    small = check_all(with_plan(result, batch_size=1), only="batch")["batch"]
    assert small.verdict == "doubt"
    assert "looked at 1 example." in small.sentence
    assert small.numbers["batch"][0] < small.numbers["stable from"][0]


def test_what_is_measured_of_batches_decides(result: Attribution) -> None:
    gnh = whence.GaussNewton(problem()[0], Classification(), problem()[1])
    found = whence.estimate_spectrum(gnh, generator=generator(), probes=128, probe_batch=8)
    assert found.sampling_constant is not None
    assert found.top_sampling_constant is not None
    plan, room = result.solve.plan, 1 / result.solve.plan.step_size - result.solve.plan.damping
    upper = max(found.sampling_constant.upper(), found.top_sampling_constant.upper())
    enough = upper * found.trace.value / room
    assert batch_check(result, plan, enough, found, 32).verdict == "trust"
    assert batch_check(result, plan, 0.99 * enough, found, 32).verdict == "cannot tell"
    assert batch_check(result, plan, 0.3 * enough, found, 32).verdict == "doubt"
    unlike = replace(found, lambda_max=Estimate(2 * found.trace.value))
    said = batch_check(result, plan, enough, unlike, 32)
    assert said.verdict == "cannot tell"
    assert "could not be measured well: λmax" in said.sentence


def test_the_check_of_the_damping_compares_the_scores_of_the_solve() -> None:
    model, train, queries = problem()
    exact = whence.attribute(
        model, train, queries, task=Classification(), damping=DAMPING, solver="cg", accuracy=0.9999
    )
    found = check_all(exact, only="damping")["damping"]
    assert found.ran
    assert found.verdict == "trust"
    assert found.numbers["examples ranked"][0] == 48
    own = exact.solve.plan.damping
    twice = whence.attribute(
        model, train, queries, task=Classification(), damping=2 * own, solver="cg", accuracy=0.9999
    )
    ranked = [index for index, _ in validating._choose(exact, 2, 16, generator())]
    rows = zip(exact.scores[:, ranked], twice.scores[:, ranked], strict=True)
    expected = [spearmanr(one, other).statistic for one, other in rows]
    assert found.numbers["damping × 2"][0] == pytest.approx(sum(expected) / 2, abs=2e-3)


def test_orders_that_change_with_the_damping_are_doubted(result: Attribution) -> None:
    def found(reversed_: int, *, settled: bool = True) -> Check:
        scores = torch.arange(20.0).expand(5, 2, 20).clone()
        scores[3, :, :reversed_] = scores[3, :, :reversed_].flip(-1)
        ready = torch.tensor([True, True, True, settled, False])
        dampings = torch.tensor(list(DAMPINGS.values()))
        over = OverDamping(dampings, scores, torch.arange(20), ready, chosen=1.0)
        return damping_check(result, over, range(20), queries=2)

    for reversed_, verdict in ((5, "trust"), (9, "cannot tell"), (14, "doubt")):
        check = found(reversed_)
        assert check.verdict == verdict
        correlation = 1 - 2 * reversed_ * (reversed_**2 - 1) / (20 * (20**2 - 1))
        assert check.numbers["damping × ½"][0] == pytest.approx(correlation)
        assert "damping × ¼" not in check.numbers
    alone = found(14, settled=False)
    assert alone.verdict == "trust"  # by twice the damping; and it says so
    assert "with twice the damping" in alone.sentence
    assert "Half the damping was not compared" in alone.sentence


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [
        (("trust", "trust", "trust", "trust"), "trust"),
        (("trust", "cannot tell", "trust", "cannot tell"), "trust"),
        (("trust", "trust", "cannot tell", "trust"), "cannot tell"),
        (("cannot tell", "trust", "trust", "trust"), "cannot tell"),
        (("trust", "trust", "trust", "doubt"), "doubt"),
    ],
)
def test_the_verdict_of_all_checks(verdicts: Sequence[Any], expected: str) -> None:
    found = Validation("", tuple(Check(n, v, "Said.") for n, v in zip(NAMES, verdicts, strict=True)))
    assert found.verdict == expected
    assert str(found).count("Said.") == 4
    assert ("Left open" in found.summary) == ("cannot tell" in verdicts)


# --- what is refused -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["model", "train", "queries", "params"])
def test_other_things_than_the_scores_are_about_are_recognised(result: Attribution, what: str) -> None:
    model, train, queries = problem()
    options: dict[str, Any] = {}
    if what == "model":
        with torch.no_grad():
            next(model.parameters())[0, 0] += 1e-6
    elif what == "train":
        train = train[::-1]
    elif what == "queries":
        queries = queries[:1]
    else:
        options = {"params": ["0.*"]}
    with pytest.raises(RunDirectoryError, match=f"the {what} given now"):
        validate(model, train, queries, result, task=Classification(), **options)


@pytest.mark.parametrize("options", [{"budget_seconds": 0.0}, {"budget_seconds": math.inf}, {"points": 0}])
def test_options_that_cannot_work(result: Attribution, options: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=r"budget|points"):
        check_all(result, **options)


def test_queries_that_are_no_list(result: Attribution) -> None:
    model, train, _ = problem()
    with pytest.raises(DataError, match="random access"):
        validate(model, train, 3, result, task=Classification())
