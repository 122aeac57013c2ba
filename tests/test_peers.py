"""The comparison with other libraries: its verdicts, its page, and the adapters that need no library."""

from __future__ import annotations

import pytest
import torch

from benchmarks.peers import page
from benchmarks.peers.__main__ import broken_queries, earlier, judge, rival, verdict
from benchmarks.peers.answers import Answer, Answers
from benchmarks.peers.plain import check
from benchmarks.works import work
from whence.validation import Outcomes, half_subsets
from whence.validation.datamodeling import Bench


@pytest.fixture(scope="module")
def bench() -> Bench:
    """Of outcomes that the scores [[1, 2, …, 8], [8, 7, …, 1]] predict exactly."""
    subsets = half_subsets(8, 40, generator=torch.Generator().manual_seed(0))
    losses = -(subsets.double() @ _true().double().T).unsqueeze(1)
    return Bench(Outcomes(losses, subsets, seeds=(0,)), 0.95, 200, torch.Generator().manual_seed(0))


def _true() -> torch.Tensor:
    helps = torch.arange(1.0, 9.0)
    return torch.stack([helps, helps.flip(0)])


def _answers(*scores: tuple[str, float | None, torch.Tensor]) -> Answers:
    answers = [Answer(setting, None, multiple, 2.0, each) for setting, multiple, each in scores]
    return Answers("someone", "some work", "unit", 1.0, 3.0, answers, {})


def test_the_best_of_the_grid_is_the_one_that_agrees_most_with_retraining(bench: Bench) -> None:
    noise = torch.randn(2, 8, generator=torch.Generator().manual_seed(1))
    found = judge(
        _answers(("default", None, -_true()), ("grid", 0.1, noise), ("grid", 1.0, _true())), bench, {}
    )
    assert found["best"]["multiple"] == 1.0
    assert found["best"]["lds"] == pytest.approx(1.0)
    assert found["settings"]["default"]["lds"] == pytest.approx(-1.0)
    assert rival(found) == "best"


def test_who_has_no_grid_is_compared_at_the_defaults(bench: Bench) -> None:
    ours = {"default": bench.correlations(_true())}
    found = judge(_answers(("default", None, -_true())), bench, ours)
    assert rival(found) == "default"
    less = found["ours"]["default"]["less"]["default"]
    assert less["by"] == pytest.approx(2.0)
    assert verdict(less) == "above"


def test_verdicts() -> None:
    assert verdict({"by": 0.1, "low": 0.05, "high": 0.2}) == "above"
    assert verdict({"by": 0.1, "low": -0.05, "high": 0.2}) == "undecided"
    assert verdict({"by": -0.1, "low": -0.2, "high": -0.05}) == "BELOW"


def test_scores_that_are_no_numbers_are_told_and_lose(bench: Bench) -> None:
    broken = _true().clone()
    broken[1, 3] = torch.nan
    found = judge(_answers(("default", None, broken)), bench, {"default": bench.correlations(_true())})
    assert broken_queries(broken) == 1
    assert found["settings"]["default"]["lds"] is None
    assert verdict(found["ours"]["default"]["less"]["default"]) == "above"


def test_gradients_and_bm25_are_what_their_formulas_say(capsys: pytest.CaptureFixture[str]) -> None:
    check()  # ends the program where they differ
    assert "BM25" in capsys.readouterr().out


def test_checkpoints_end_with_the_trained_model() -> None:
    trained = work("wine").fit(range(40), 0, checkpoints=5)
    assert len(trained.checkpoints) == 5
    assert all(rate == trained.rates[0] for _, rate in trained.checkpoints)
    state, _ = trained.checkpoints[-1]
    assert all(torch.equal(value, state[name]) for name, value in trained.model.state_dict().items())
    first, _ = trained.checkpoints[0]
    assert not all(torch.equal(value, first[name]) for name, value in state.items())


def test_what_stands_in_the_readme_was_measured() -> None:
    text = page.README.read_text(encoding="utf-8")
    block = page.BEGIN + text.split(page.BEGIN)[1].split(page.END)[0] + page.END
    assert block == page.readme(earlier())
    assert f"{earlier()['kronfluence']['digits']['settings']['default']['lds']:.3f}" in block


def test_the_page_is_written_from_the_results() -> None:
    assert page.PAGE.read_text(encoding="utf-8") == page.page(earlier())


def test_the_highest_of_a_column_is_bold() -> None:
    assert page.emphasised([0.1, None, 0.3, 0.3004], ["a", "", "b", "c"]) == ["a", "", "**b**", "**c**"]
