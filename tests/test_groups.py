"""Groups of training examples, and rankings by unit gradients: sums, their errors, and who is first."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dense
import whence
from whence import Classification, GaussNewton, LanguageModeling
from whence.attribution import Attribution
from whence.attribution.groups import Grouping, measure_norms
from whence.errors import DataError, OptionError, RunDirectoryError
from zoo import mlp

GENERATOR = torch.Generator().manual_seed(0)
DATA = [(torch.randn(6, generator=GENERATOR).double(), i % 4) for i in range(60)]
TASK, DAMPING = Classification(), 0.05
NAMES = [None if i % 7 == 0 else "even" if i % 2 == 0 else "odd" for i in range(len(DATA))]


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return mlp().double().eval()


def ask(model: nn.Module, **given: Any) -> Attribution:
    return whence.attribute(model, DATA, DATA[:3], task=TASK, damping=DAMPING, **given)


@pytest.fixture(scope="module")
def exact(model: nn.Module) -> Tensor:
    gnh = GaussNewton(model, TASK, DATA)
    H = dense.dense_gauss_newton(gnh).matrix
    gradients = torch.cat([block.flatten(1) for block in gnh.gradients(DATA).values()], dim=1)
    return gradients[:3] @ torch.linalg.solve(H + DAMPING * torch.eye(len(H), dtype=H.dtype), gradients.T)


def sums(scores: Tensor) -> Tensor:
    return torch.stack(
        [scores[:, [name == group for name in NAMES]].sum(1) / len(DATA) for group in ("odd", "even")], dim=1
    )


@pytest.mark.parametrize(
    "given",
    [
        {"solver": "cg", "accuracy": 0.99},
        {"solver": "cg", "accuracy": "certified"},
        {"solver": "lissa", "chains": 6},
        {"accuracy": "quick"},
    ],
    ids=["expected", "certified", "chains", "quick"],
)
def test_effects_of_groups_are_sums_and_their_errors_hold(
    model: nn.Module, exact: Tensor, given: dict[str, Any]
) -> None:
    result = ask(model, groups=NAMES, **given)
    groups = result.groups()
    assert groups.names == ("odd", "even")
    assert groups.sizes.tolist() == [NAMES.count("odd"), NAMES.count("even")]
    torch.testing.assert_close(groups.effects, sums(result.scores.double()), rtol=1e-9, atol=1e-12)
    error = (groups.effects - sums(exact)).abs()
    assert bool((error <= 1.5 * groups.scored.half_width(0.99)).all())
    assert float(error.norm() / sums(exact).norm()) < (1.0 if given.get("accuracy") == "quick" else 0.2)
    if groups.bounds is not None:
        assert bool((error <= groups.bounds).all())


def test_chains_of_a_group_are_summed_before_their_spread_is_taken(model: nn.Module) -> None:
    result = ask(model, groups=NAMES, solver="lissa", chains=5)
    chains = torch.stack([sums(chain) for chain in result.chain_scores])
    torch.testing.assert_close(result.groups().stderr, chains.std(0) / 5**0.5, rtol=1e-9, atol=1e-14)


def test_lengths_of_groups_are_those_of_summed_gradients(model: nn.Module) -> None:
    gnh = GaussNewton(model, TASK, DATA)
    gradients = torch.cat([block.flatten(1) for block in gnh.gradients(DATA).values()], dim=1)
    found = measure_norms(gnh, Grouping.by(NAMES, len(DATA)), torch.arange(len(DATA))).norms
    expected = sums(gradients.T).T.norm(dim=1)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    single = gradients.norm(dim=1)
    assert bool((expected < 0.6 * sums(single.unsqueeze(0))[0]).all())  # far below the triangle inequality's


def test_the_certified_error_is_that_of_the_summed_gradient(model: nn.Module) -> None:
    result = ask(model, groups=NAMES, solver="cg", accuracy="certified")
    certificate, grouping = result.solve.certificate, result.grouping
    assert certificate is not None
    assert grouping is not None
    assert grouping.norms is not None
    groups = result.groups()
    trace = result.solve.plan.spectrum.trace.value
    torch.testing.assert_close(groups.stderr, certificate.upper.unsqueeze(1) * grouping.norms / trace**0.5)
    # without them, the triangle inequality
    again = result.groups(NAMES)
    assert bool((again.stderr > groups.stderr).all())
    assert bool((again.bounds > groups.bounds).all())


def test_terms_weigh_in_groups_of_passages() -> None:
    from test_questions import speaker

    model, generator = speaker(), torch.Generator().manual_seed(0)
    data = [{"input_ids": torch.randint(17, (4 + i % 5,), generator=generator)} for i in range(12)]
    result = whence.attribute(
        model, data, data[:1], task=LanguageModeling(), damping=1.0, solver="cg", groups=["a", "b"] * 6
    )
    expected = [float(result.effects[0, start::2].sum()) for start in (0, 1)]
    assert result.groups().effects[0].tolist() == pytest.approx(expected)


def test_rankings_tables_and_frames_of_groups(model: nn.Module, tmp_path: Path) -> None:
    result = ask(model, groups=NAMES)
    top = result.top_groups(2, query=1)
    best = result.groups().effects[1].argmax()
    assert (top[0].group, top[0].rank, top[0].query) == (("odd", "even")[int(best)], 1, 1)
    assert top[0].low < top[0].effect < top[0].high
    worst = result.top_groups(1, query=1, harmful=True)[0]
    assert worst.group == top[1].group
    assert "removal" in str(top)
    assert top[0].group in str(top)
    frame = result.groups().to_pandas()
    assert len(frame) == 6
    assert frame["effect"][0] >= frame["effect"][1]
    assert set(result.to_pandas()["group"].dropna()) == {"odd", "even"}
    result.save(tmp_path / "saved")
    assert str(whence.load(tmp_path / "saved").top_groups()) == str(result.top_groups())


def test_what_was_not_scored_is_in_no_sum(model: nn.Module) -> None:
    result = ask(model, groups=NAMES, candidates=[1, 2, 3, 30])
    assert result.groups().sizes.tolist() == [2, 2]
    assert bool(result.groups().effects.isfinite().all())


def test_names_may_be_a_field_of_the_examples(model: nn.Module) -> None:
    class Named(list):
        def column(self, name: str) -> list[str]:
            assert name == "source"
            return [str(i % 3) for i in range(len(self))]

    result = whence.attribute(model, Named(DATA), DATA[:1], task=TASK, damping=DAMPING, groups="source")
    assert result.groups().names == ("0", "1", "2")


def test_other_groups_are_another_run(model: nn.Module, tmp_path: Path) -> None:
    run = tmp_path / "run"
    first = ask(model, groups=NAMES, run_dir=run)
    assert str(ask(model, groups=NAMES, run_dir=run).top_groups()) == str(first.top_groups())
    with pytest.raises(RunDirectoryError, match="groups"):
        ask(model, groups=NAMES[::-1], run_dir=run)


@pytest.mark.parametrize(
    ("groups", "error", "says"),
    [
        (NAMES[:-1], DataError, "60 training examples"),
        ([None] * 60, DataError, "at least one"),
        ("source", DataError, "no such field"),
        ({"a": 1}, OptionError, "groups is {'a': 1}; it must be a text, a list"),
    ],
)
def test_groups_that_cannot_be_are_refused(
    model: nn.Module, groups: Any, error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        ask(model, groups=groups)


def test_no_groups_no_answer(model: nn.Module) -> None:
    result = ask(model)
    with pytest.raises(OptionError, match="no groups"):
        result.groups()
    assert result.groups(NAMES).names == ("odd", "even")


# --- unit gradients --------------------------------------------------------------------------------------------------


def test_units_rank_by_the_score_over_the_gradients_length(model: nn.Module) -> None:
    result = ask(model, solver="cg", method="gradients")
    assert result.norms is not None
    units = result.scores / result.norms
    for harmful in (False, True):
        found = result.top(5, query=1, by="unit", harmful=harmful)
        expected = (units[1] * (-1 if harmful else 1)).sort(descending=True, stable=True).indices[:5]
        assert [row.index for row in found] == expected.tolist()
        first = found[0]
        assert first.unit == pytest.approx(float(units[1, first.index]))
        assert (first.score, first.high) == pytest.approx(
            (float(result.scores[1, first.index]), float(result.interval()[1][1, first.index]))
        )
    frame = result.to_pandas()
    assert frame["unit"].to_list() == pytest.approx(
        (frame["score"] / result.norms[frame["index"]].numpy()).to_list()
    )


def test_units_need_lengths_which_can_be_asked_for(model: nn.Module) -> None:
    result = ask(model, accuracy="quick")
    with pytest.raises(OptionError, match="norms=True"):
        result.top(1, by="unit")
    with pytest.raises(OptionError, match="'score' or by 'unit'"):
        result.top(1, by="size")
    known = ask(model, accuracy="quick", norms=True)
    other = ask(model, solver="cg", method="gradients")
    assert known.norms is not None
    assert other.norms is not None
    torch.testing.assert_close(known.norms, other.norms)
    assert known.top(1, by="unit")[0].unit is not None
    assert json.dumps(known.settings["norms"]) == "true"
