"""Several checkpoints: the mean of their scores, with two errors, from runs of their own."""

from __future__ import annotations

import gc
import math
import shutil
import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import t as student
from torch import Tensor, nn

import whence
from dense import dense_gauss_newton
from run_samples import Failing, Killed, contents, same
from small import DOUBLE, evaluated
from whence import Attribution, Classification, ConjugateGradient, GaussNewton, Lissa
from whence.attribution.scored import Scored
from whence.attribution.several import joined
from whence.errors import DataError, ModelError, OptionError, RunDirectoryError
from whence.runs import holds
from zoo import mlp, vectors

EXACT: dict[str, Any] = {"solver": ConjugateGradient(tolerance=1e-12), "damping": 0.05}


def checkpoint(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return evaluated(mlp())


def attribute(models: Any, **options: Any) -> Attribution:
    data = vectors(DOUBLE)
    return whence.attribute(
        models,
        options.pop("train", data),
        options.pop("queries", data[:2]),
        task=Classification(),
        **{"damping": 0.05, **options},
    )


def exact_scores(model: nn.Module, damping: float) -> Tensor:
    """``∇ℓ(query)ᵀ (H + λ)⁻¹ ∇ℓ(z)`` from dense matrices, by backward passes of each example."""
    data = vectors(DOUBLE)
    gnh = GaussNewton(model, Classification(), data)
    rows = []
    for x, label in data:
        loss = nn.functional.cross_entropy(model(x.unsqueeze(0)), torch.as_tensor(label).reshape(1))
        found = torch.autograd.grad(loss, list(gnh.network.parameters.values()))
        rows.append(torch.cat([each.flatten() for each in found]))
    gradients, H = torch.stack(rows), dense_gauss_newton(gnh).matrix
    return gradients[:2] @ torch.linalg.solve(H + damping * torch.eye(len(H), dtype=DOUBLE), gradients.T)


# --- scores and errors ---------------------------------------------------------------------------------------


def test_mean_and_both_errors_are_those_of_dense_matrices() -> None:
    models = [checkpoint(seed) for seed in range(4)]
    result = attribute(models, **EXACT)
    exact = torch.stack([exact_scores(model, 0.05) for model in models])
    mean, spread = exact.mean(0), exact.std(0)
    torch.testing.assert_close(result.scores, mean, rtol=1e-6, atol=1e-8)
    assert result.checkpoint_stderr is not None
    torch.testing.assert_close(result.checkpoint_stderr, spread / 2, rtol=1e-5, atol=1e-8)
    assert bool((result.solver_stderr >= 0).all())
    assert float(result.solver_stderr.max()) < 1e-6 < float(result.checkpoint_stderr.min())
    low, high = result.interval(0.9)
    times = float(student.ppf(0.95, 3))
    torch.testing.assert_close((high - low) / 2, times * spread / 2, rtol=1e-5, atol=1e-8)
    low, high = result.interval_of_another(0.9)
    torch.testing.assert_close((high - low) / 2, times * spread * math.sqrt(1.25), rtol=1e-5, atol=1e-8)
    torch.testing.assert_close((high + low) / 2, mean, rtol=1e-6, atol=1e-8)
    data = vectors(DOUBLE)
    torch.testing.assert_close(result.effects, mean / len(data), rtol=1e-6, atol=1e-10)
    x, y = torch.stack([x for x, _ in data[:2]]), torch.tensor([int(y) for _, y in data[:2]])
    losses = torch.stack([nn.functional.cross_entropy(m(x), y, reduction="none") for m in models])
    torch.testing.assert_close(result.query_losses, losses.mean(0).detach(), rtol=1e-9, atol=0)


def test_the_solvers_error_is_the_mean_of_theirs_and_part_of_the_interval() -> None:
    models = [checkpoint(seed) for seed in range(3)]
    alone = [attribute(model, accuracy=0.9, solver="cg") for model in models]
    result = attribute(models, accuracy=0.9, solver="cg")
    solver = torch.stack([each.stderr for each in alone]).mean(0)
    torch.testing.assert_close(result.solver_stderr, solver)
    assert result.checkpoint_stderr is not None
    between = torch.stack([each.scores for each in alone]).std(0) / math.sqrt(3)
    torch.testing.assert_close(result.stderr, torch.hypot(solver, between))
    low, high = result.interval(0.95)
    width = torch.hypot(1.959964 * solver, float(student.ppf(0.975, 2)) * between)
    torch.testing.assert_close((high - low) / 2, width, rtol=1e-6, atol=0)
    row = result.top(1)[0]
    at = (row.query, row.index)
    assert row.solver_stderr == pytest.approx(float(solver[at]))
    assert row.checkpoint_stderr == pytest.approx(float(between[at]))
    another = [float(end[at]) for end in result.interval_of_another()]
    assert [row.another_low, row.another_high] == pytest.approx(another)
    frame = result.to_pandas()
    first = frame[(frame["query"] == row.query) & (frame["index"] == row.index)].iloc[0]
    for name in ("solver_stderr", "checkpoint_stderr", "another_low", "another_high"):
        assert first[name] == pytest.approx(getattr(row, name))


def test_chains_of_a_random_solver_count_by_their_interval() -> None:
    models = [checkpoint(seed) for seed in range(2)]
    options: dict[str, Any] = {"solver": "lissa", "chains": 3, "refine": 1.0, "accuracy": 0.9}
    alone = [attribute(model, **options) for model in models]
    result = attribute(models, **options)
    assert result.chain_scores.shape[0] == 2
    torch.testing.assert_close(result.scores, torch.stack([each.scores for each in alone]).mean(0))
    widths = [(each.interval(0.95)[1] - each.scores) / 1.959964 for each in alone]
    torch.testing.assert_close(result.solver_stderr, torch.stack(widths).mean(0), rtol=1e-6, atol=0)


def test_intervals_of_another_contain_it_as_often_as_they_say() -> None:
    """Scores of five checkpoints, normal around a mean of their own: four foretell the fifth, and the mean."""
    generator = torch.Generator().manual_seed(0)
    true = torch.randn(40_000, generator=generator, dtype=DOUBLE)
    drawn = true + 0.5 * torch.randn(5, 40_000, generator=generator, dtype=DOUBLE)
    four = Scored(drawn[:4], torch.zeros(40_000, dtype=DOUBLE))
    inside = (drawn[4] - four.mean).abs() < four.half_width_of_another(0.9)
    assert float(inside.double().mean()) == pytest.approx(0.9, abs=4 * math.sqrt(0.09 / 40_000))
    inside = (true - four.mean).abs() < four.half_width(0.9)
    assert float(inside.double().mean()) == pytest.approx(0.9, abs=4 * math.sqrt(0.09 / 40_000))


def test_checkpoints_may_differ_in_their_architecture() -> None:
    torch.manual_seed(5)
    wide = nn.Sequential(nn.Linear(6, 11), nn.ReLU(), nn.Linear(11, 4)).to(DOUBLE).eval()
    result = attribute([checkpoint(0), wide], **EXACT)
    mean = (exact_scores(checkpoint(0), 0.05) + exact_scores(wide, 0.05)) / 2
    torch.testing.assert_close(result.scores, mean, rtol=1e-6, atol=1e-8)


def test_each_has_a_damping_and_a_recipe_of_its_own() -> None:
    recipes = [{"optimizer": "sgd", "rate": 0.1, "steps": steps} for steps in (100, 1000)]
    models = {"short": checkpoint(0), "long": checkpoint(1)}
    result = attribute(models, training=recipes, damping="auto")
    found = {each.name: each.damping for each in result.checkpoints}
    alone = {
        name: attribute(model, training=recipe, damping="auto").solve.plan.damping
        for (name, model), recipe in zip(models.items(), recipes, strict=True)
    }
    assert found == alone
    assert found["short"] != found["long"]
    assert "Checkpoint short: λ = 3/τ" in result.solve.damping_words


def test_the_larger_error_is_named() -> None:
    models = [checkpoint(seed) for seed in range(3)]
    exact = attribute(models, **EXACT)
    assert exact.dominant_error.startswith("The spread between the 3 checkpoints dominates")
    assert exact.dominant_error in str(exact.top(1))
    near = [checkpoint(0), checkpoint(0)]
    with torch.no_grad():
        next(near[1].parameters()).mul_(1 + 1e-9)
    assert attribute(near, solver="cg", accuracy=0.8).dominant_error.startswith(
        "The solver’s error dominates"
    )
    assert attribute(models[0]).dominant_error == ""


def test_until_is_told_for_the_mean_with_both_errors() -> None:
    models = [checkpoint(seed) for seed in range(2)]
    result = attribute(models, solver="cg", until="top-3 stable", budget=50.0)
    assert (
        "By the mean over 2 checkpoints, with both of its errors, the 3 most helpful"
        in result.solve.events[-1]
    )
    assert "for 0 of 2 queries" in result.solve.events[-1]  # two checkpoints tell little
    again = attribute([models[0]], solver="cg", until="top-3 stable", budget=50.0)
    assert "of all 2 queries" in again.solve.events[-1]


# --- runs in runs --------------------------------------------------------------------------------------------


def timeless(result: Attribution) -> Attribution:
    """Without what a stopwatch says."""
    spectrum = replace(result.solve.plan.spectrum, seconds_per_term=None)
    plan = replace(result.solve.plan, spectrum=spectrum)
    return replace(result, seconds={}, solve=replace(result.solve, plan=plan))


def named(*seeds: int) -> dict[str, Callable[[], nn.Module]]:
    return {f"seed {seed}": partial(checkpoint, seed) for seed in seeds}


def test_the_order_does_not_matter(tmp_path: Path) -> None:
    results = [
        attribute(named(*seeds), run_dir=run_dir)
        for seeds, run_dir in (((0, 1, 2), None), ((2, 0, 1), tmp_path), ((1, 2, 0), tmp_path))
    ]
    assert same(timeless(results[0]), timeless(results[1]))
    assert same(results[1], results[2])


def test_one_that_is_added_later_is_the_only_one_computed(tmp_path: Path) -> None:
    whole = attribute(named(0, 1, 2), run_dir=tmp_path / "whole")
    place = tmp_path / "later"
    first = attribute(named(0), run_dir=place)
    assert same(timeless(first), timeless(attribute(checkpoint(0))))
    assert same(whence.load(place), first)
    attribute(named(0, 2), run_dir=place)
    before = {path: contents(path) for path in place.glob("checkpoint-*")}
    assert len(before) == 2
    later = attribute(named(0, 1, 2), run_dir=place)
    assert len(list(place.glob("checkpoint-*"))) == 3
    assert {path: contents(path) for path in before} == before
    assert same(timeless(later), timeless(whole))
    assert same(whence.load(place), later)
    two = attribute(named(2, 0), run_dir=place)  # what was asked is what there is
    assert [each.name for each in sorted(two.checkpoints, key=lambda c: c.name)] == ["seed 0", "seed 2"]
    assert same(whence.load(place), two)


def test_a_run_of_each_is_a_whole_run(tmp_path: Path) -> None:
    result = attribute(named(0, 1), run_dir=tmp_path)
    parts = [whence.load(path) for path in sorted(tmp_path.glob("checkpoint-*"))]
    assert torch.equal(torch.stack([part.scores for part in parts]), result.chain_scores)
    again = joined({each.name: part for each, part in zip(result.checkpoints, parts, strict=True)})
    assert torch.equal(again.scores, result.scores)
    assert torch.equal(again.stderr, result.stderr)


def test_what_is_done_can_be_read_before_the_rest(tmp_path: Path) -> None:
    def gone() -> nn.Module:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        attribute({**named(0, 1), "gone": gone}, run_dir=tmp_path)
    so_far = whence.load(tmp_path)
    assert sorted(each.name for each in so_far.checkpoints) == ["seed 0", "seed 1"]
    done = attribute(named(0, 1, 2), run_dir=tmp_path)
    assert len(done.checkpoints) == 3
    assert not holds(tmp_path, "quick")


def test_a_run_stopped_at_any_file_operation_ends_in_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # by finite differences, whose every product depends on the ones before: nothing is right by chance
    options: dict[str, Any] = {"product": "finite-difference", "part_size": 16, "checkpoint_seconds": 0.0}
    failing = Failing(monkeypatch, fatal=True)
    truth = attribute(named(0, 1), run_dir=tmp_path / "whole", **options)
    total = failing.count
    assert total > 60
    for limit in (2, *range(total // 6, total - 20, total // 4), *range(total - 12, total - 2, 4)):
        path = tmp_path / str(limit)
        failing.count, failing.limit = 0, limit
        with pytest.raises(Killed):
            attribute(named(0, 1), run_dir=path, **options)
        failing.limit = sys.maxsize
        again = attribute(named(1, 0), run_dir=path, **options)
        assert same(timeless(again), timeless(truth))
        assert same(whence.load(path), again)
        shutil.rmtree(path)


def test_models_that_are_made_are_held_one_at_a_time() -> None:
    alive: list[weakref.ref[nn.Module]] = []

    def make(seed: int) -> nn.Module:
        gc.collect()
        assert [each for each in alive if each() is not None] == []
        model = checkpoint(seed)
        alive.append(weakref.ref(model))
        return model

    result = attribute([partial(make, seed) for seed in range(3)])
    assert len(alive) == 3
    assert torch.equal(result.scores, attribute([checkpoint(seed) for seed in range(3)]).scores)


def test_a_result_is_saved_and_loaded_and_other_things_are_not_there(tmp_path: Path) -> None:
    result = attribute(named(0, 1))
    result.save(tmp_path)
    assert same(whence.load(tmp_path), result)
    for use in (result.over_damping, lambda: result.bounds):
        with pytest.raises(OptionError, match="means over 2 checkpoints"):
            use()
    assert result.data_stderr is None
    assert "2 checkpoints" in repr(result)


# --- what is refused -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("models", "options", "error", "said"),
    [
        ([], {}, OptionError, "no checkpoints in the list"),
        ([0, 0], {}, OptionError, "checkpoints 1 and 2 are the same"),
        (["a/"], {}, ModelError, "checkpoint 1 is a str; give modules, or functions"),
        ([0, nn.Linear], {}, ModelError, "checkpoint 2 is a type"),
        ({"odd": lambda: 5}, {}, ModelError, "function of checkpoint odd returned a int"),
        ([0, 1], {"training": [None]}, OptionError, "training has 1 entries for 2 checkpoints"),
    ],
)
def test_what_is_no_list_of_checkpoints_is_refused(
    models: Any, options: Any, error: type[Exception], said: str
) -> None:
    if isinstance(models, list):
        models = [checkpoint(each) if isinstance(each, int) else each for each in models]
    with pytest.raises(error, match=said):
        attribute(models, **options)


def test_what_belongs_to_one_model_is_refused() -> None:
    models = [checkpoint(0), checkpoint(1)]
    optimizer = torch.optim.Adam(models[0].parameters())
    with pytest.raises(OptionError, match="optimizer, whose state is of one model"):
        attribute(models, training=optimizer, damping="auto")
    plan = attribute(models[0]).solve.plan
    with pytest.raises(OptionError, match="plan is of one model"):
        attribute(models, solver=Lissa(plan))
    result, data = attribute(models), vectors(DOUBLE)
    with pytest.raises(OptionError, match="means over 2 checkpoints, and the checks are about one model"):
        whence.validate(models[0], data, data[:2], result, task=Classification())
    for function in (whence.tune, whence.clean):
        rest = (data[:2], lambda subset, seed: models[0]) if function is whence.tune else ()
        with pytest.raises((ModelError, OptionError), match="one model"):
            function(models, data, *rest, task=Classification())  # type: ignore[operator]
    with pytest.raises(OptionError, match="scores of one model do not tell"):
        attribute(models[0]).interval_of_another()


def test_another_question_in_the_same_directory_is_refused_before_the_work(tmp_path: Path) -> None:
    attribute(named(0, 1), run_dir=tmp_path / "run")
    data = vectors(DOUBLE)
    for other in ({"train": data[:-1]}, {"queries": data[1:3]}, {"candidates": [0, 1, 2]}):
        with pytest.raises(RunDirectoryError, match=f"{next(iter(other))}: .* there, .* now"):
            attribute(named(2, 0), run_dir=tmp_path / "run", **other)
        (new,) = [
            path for path in (tmp_path / "run").glob("checkpoint-*") if not (path / "result.json").exists()
        ]
        assert not holds(new, "spectrum")
        shutil.rmtree(new)
    with pytest.raises(RunDirectoryError, match=r"damping: 0\.05 there, 0\.1 now"):
        attribute(named(0, 1), run_dir=tmp_path / "run", damping=0.1)
    attribute(checkpoint(0), run_dir=tmp_path / "single")
    with pytest.raises(RunDirectoryError, match="another configuration"):
        attribute(named(0, 1), run_dir=tmp_path / "single")


def test_results_about_different_things_are_not_joined() -> None:
    one, other = attribute(checkpoint(0)), attribute(checkpoint(1), queries=vectors(DOUBLE)[1:3])
    with pytest.raises(DataError, match=r"checkpoints a and b were asked about different things \(queries\)"):
        joined({"a": one, "b": other})
    with pytest.raises(OptionError, match="two or more"):
        joined({"a": one})
    with pytest.raises(OptionError, match="single models"):
        joined({"a": one, "b": attribute(named(0, 1))})


# --- groups, questions and rankings per unit -------------------------------------------------------------------


def test_groups_and_units_of_the_mean() -> None:
    models = [checkpoint(seed) for seed in range(3)]
    names = [f"group {i % 3}" for i in range(len(vectors(DOUBLE)))]
    result = attribute(models, **EXACT, groups=names, norms=True)
    exact = torch.stack([exact_scores(model, 0.05) for model in models]) / len(names)
    sums = torch.stack([exact[:, :, k::3].sum(2) for k in range(3)], dim=2)
    groups = result.groups()
    torch.testing.assert_close(groups.effects, sums.mean(0), rtol=1e-6, atol=1e-10)
    torch.testing.assert_close(groups.stderr, sums.std(0) / math.sqrt(3), rtol=1e-4, atol=1e-9)
    alone = [attribute(model, **EXACT, norms=True) for model in models]
    lengths = torch.stack([each.norms for each in alone if each.norms is not None]).mean(0)
    first = result.top(1, query=0, by="unit")[0]
    assert first.index == int((result.scores[0] / lengths).argmax())


def test_contrasts_are_averaged() -> None:
    models = [checkpoint(seed) for seed in range(2)]
    results = [attribute(model, **EXACT, contrast=[2, 3]) for model in (models, *models)]
    torch.testing.assert_close(results[0].scores, (results[1].scores + results[2].scores) / 2)
