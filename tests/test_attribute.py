"""`attribute` as its users call it: accuracy, error bars, units, rankings, saving, and what it refuses."""

from __future__ import annotations

import copy
import inspect
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import digits
import text
import whence
from digits import correlation
from small import classifier
from whence import Attribution, Classification, LanguageModeling
from whence.errors import DataError, ModelError, OptionError, RunDirectoryError, WhenceWarning
from whence.runs import Run
from zoo import vectors


@pytest.fixture(scope="module")
def read_digits() -> tuple[Attribution, digits.Digits]:
    problem = digits.problem()
    train, test = digits.load()
    queries = [test[i] for i in range(20)]
    options = whence.Options(damping="lambda_max/200")  # whose exact scores are known
    return whence.attribute(problem.model, train, queries, task=Classification(), options=options), problem


@pytest.fixture(scope="module")
def read_text() -> tuple[Attribution, text.Text]:
    problem = text.problem()
    with warnings.catch_warnings():
        # A few sequences carry much of the curvature; if the batch was too small for them, the solver says so.
        warnings.simplefilter("ignore", WhenceWarning)
        result = whence.attribute(
            problem.model, problem.train, problem.queries, damping="lambda_max/200", task=LanguageModeling()
        )
    return result, problem


@pytest.fixture(scope="module")
def small() -> Attribution:
    return attribute_small()


def attribute_small(**options: Any) -> Attribution:
    data = vectors(torch.float64)
    options = {"damping": "lambda_max/10", **options}  # fewer steps than by default: not what is tested here
    return whence.attribute(classifier(), data, data[:2], task=Classification(), **options)


# --- accuracy ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["read_digits", "read_text"])
def test_defaults_agree_with_exact_scores_within_honest_intervals(
    which: str, request: pytest.FixtureRequest
) -> None:
    result, problem = request.getfixturevalue(which)
    exact = problem.exact_scores(result.solve.plan.damping)
    assert float(correlation(result.scores, exact).min()) >= 0.99
    low, high = result.interval(0.95)
    inside = ((low <= exact) & (exact <= high)).double()
    assert 0.90 <= float(inside.mean()) <= (0.995 if result.solve.solver == "lissa" else 1.0)
    # the ends of rankings have long gradients and large errors: their intervals must be as honest
    assert float(inside.gather(1, exact.abs().topk(20).indices).mean()) >= 0.90
    assert bool(result.solve.converged.all())


def test_proven_bounds_hold_for_every_score(read_digits: tuple[Attribution, digits.Digits]) -> None:
    result, problem = read_digits
    exact = problem.exact_scores(result.solve.plan.damping)
    assert result.solve.solver == "cg"
    assert bool(((result.scores - exact).abs() <= result.bounds).all())
    certificate, size = result.solve.certificate, result.solve.score_rms
    assert certificate is not None
    assert size is not None
    wrong = (result.scores - exact).square().mean(1).sqrt()
    assert bool((wrong <= certificate.upper).all())
    assert "conjugate gradients" in result.solve.choice
    assert "LiSSA" in result.solve.choice


def test_lissa_on_request_has_honest_intervals(read_digits: tuple[Attribution, digits.Digits]) -> None:
    _, problem = read_digits
    train, test = digits.load()
    result = whence.attribute(
        problem.model,
        train,
        [test[i] for i in range(20)],
        task=Classification(),
        solver="lissa",
        damping="lambda_max/50",
        baseline=False,
    )
    exact = problem.exact_scores(result.solve.plan.damping)
    low, high = result.interval(0.95)
    assert float(correlation(result.scores, exact).min()) >= 0.99
    assert 0.90 <= float(((low <= exact) & (exact <= high)).double().mean()) <= 0.995
    with pytest.raises(OptionError, match="proves nothing"):
        _ = result.bounds


def test_one_query_with_little_damping(read_digits: tuple[Attribution, digits.Digits]) -> None:
    _, problem = read_digits
    train, test = digits.load()
    task, little = Classification(), "lambda_max/1000"
    first = whence.attribute(problem.model, train, [test[0]], task=task, damping=little, baseline=False)
    exact = problem.exact_scores(first.solve.plan.damping)[:1]
    assert float(correlation(first.scores, exact)) >= 0.99
    assert bool(((first.scores - exact).abs() <= first.bounds).all())
    low, high = first.interval(0.95)
    assert float(((low <= exact) & (exact <= high)).double().mean()) >= 0.90


def test_a_part_of_the_largest_eigenvalue_is_that(read_digits: tuple[Attribution, digits.Digits]) -> None:
    result, problem = read_digits
    assert result.solve.plan.damping == pytest.approx(problem.lambda_max / 200, rel=0.02)
    assert result.solve.plan.constant >= 2


def test_gradient_dot_products_come_along(read_digits: tuple[Attribution, digits.Digits]) -> None:
    result, problem = read_digits
    exact = problem.flat_queries @ problem.flat_train.T
    torch.testing.assert_close(result.gradient_dot_products, exact, rtol=1e-4, atol=1e-4)


def test_removal_effects_are_in_nats(read_text: tuple[Attribution, text.Text]) -> None:
    """A sequence's effect is its score times its share of all tokens."""
    result, problem = read_text
    tokens = torch.tensor([len(row["input_ids"]) - 1 for row in problem.train])
    torch.testing.assert_close(result.effects, result.scores * tokens / tokens.sum())
    row = result.top(1, query=0)[0]
    assert row.effect == pytest.approx(float(result.effects[0, row.index]))


def test_removal_effects_agree_with_a_newton_step(read_digits: tuple[Attribution, digits.Digits]) -> None:
    """The exact change of the loss under ``θ + (1/n)(H+λ)⁻¹∇ℓ(z)``, which is what removal does to first order."""
    result, problem = read_digits
    _, test = digits.load()
    index = result.top(1, query=3)[0].index
    system = problem.hessian + result.solve.plan.damping * torch.eye(len(problem.hessian)).double()
    small = 0.01  # to stay where the loss is linear
    step = small * torch.linalg.solve(system, problem.flat_train[index]) / len(problem.flat_train)
    model, start = copy.deepcopy(digits.problem().model).double(), 0
    moved = {}
    for name, parameter in model.named_parameters():
        moved[name] = parameter.detach() + step[start : start + parameter.numel()].reshape(parameter.shape)
        start += parameter.numel()
    x, y = test[3]
    with torch.no_grad():
        before, after = (
            nn.functional.cross_entropy(torch.func.functional_call(model, p, (x[None].double(),)), y[None])
            for p in (dict(model.named_parameters()), moved)
        )
    assert float(after - before) / small == pytest.approx(float(result.effects[3, index]), rel=0.05)


def test_token_scores_add_up_to_the_scores(read_text: tuple[Attribution, text.Text]) -> None:
    result, problem = read_text
    assert len(result.token_scores) >= 2 * 20
    for (query, index), shares in result.token_scores.items():
        assert len(shares) == len(problem.train[index]["input_ids"])
        assert shares[0] == 0.0
        assert sum(shares) == pytest.approx(float(result.scores[query, index]), rel=1e-3, abs=1e-4)


def test_influence_similarity_against_dense(read_text: tuple[Attribution, text.Text]) -> None:
    result, problem = read_text
    system = problem.hessian + result.solve.plan.damping * torch.eye(len(problem.hessian)).double()
    gram = problem.query_gradients @ torch.linalg.solve(system, problem.query_gradients.T)
    exact = gram / gram.diagonal().sqrt().outer(gram.diagonal().sqrt())
    value, stderr = result.influence_similarity()
    assert bool(((value - exact).abs() <= 6 * stderr + 1e-9).all())
    assert float(stderr[0, 1]) < 0.05
    g = problem.query_gradients / problem.query_gradients.norm(dim=1, keepdim=True)
    torch.testing.assert_close(result.gradient_similarity(), g @ g.T, rtol=1e-4, atol=1e-4)


# --- rankings ------------------------------------------------------------------------------------------------


def test_top_is_sorted_and_from_the_right_end(read_digits: tuple[Attribution, digits.Digits]) -> None:
    result, _ = read_digits
    for harmful in (False, True):
        rows = result.top(7, query=5, harmful=harmful)
        scores = [row.score for row in rows]
        assert scores == sorted(scores, reverse=not harmful)
        assert [row.rank for row in rows] == list(range(1, 8))
        end = result.scores[5].min() if harmful else result.scores[5].max()
        assert rows[0].score == pytest.approx(float(end))
        assert all(row.low < row.score < row.high for row in rows)
    assert len(result.top(3)) == 60


def test_a_single_candidate_has_a_ranking_of_its_own() -> None:
    result = attribute_small(candidates=[3])
    (row,) = result.top(5, query=0)
    assert row.index == 3
    assert row.separated  # there is no next to be confused with


def test_separated_ranks_are_in_the_right_order(read_digits: tuple[Attribution, digits.Digits]) -> None:
    """Of the neighbours that are called separated, at most a few are in the wrong order in truth."""
    result, problem = read_digits
    exact = problem.exact_scores(result.solve.plan.damping)
    right = wrong = tied = 0
    for query in range(20):
        rows = result.top(31, query=query)
        for row, following in pairwise(rows):
            if not row.separated:
                tied += 1
            elif exact[query, row.index] > exact[query, following.index]:
                right += 1
            else:
                wrong += 1
    assert right > 30
    assert tied > 50
    assert wrong <= 0.05 * (right + wrong)


def test_the_row_of_any_example(read_digits: tuple[Attribution, digits.Digits]) -> None:
    result, _ = read_digits
    for row in result.top(4, query=2):
        assert result.row(2, row.index) == row


def test_the_table_prints(small: Attribution) -> None:
    printed = str(small.top(2, query=0))
    assert "score" in printed
    assert len(printed.splitlines()) == 3


def test_to_pandas(small: Attribution) -> None:
    frame = small.to_pandas()
    assert len(frame) == 2 * 20
    assert list(frame[frame["query"] == 1]["score"]) == sorted(small.scores[1].tolist(), reverse=True)
    assert (frame["low"] < frame["high"]).all()


# --- a shortlist ---------------------------------------------------------------------------------------------


def test_only_candidates_are_scored_and_the_result_says_so() -> None:
    result = attribute_small(candidates=[7, 3, 11])
    assert (~result.scores.isnan()).sum(1).tolist() == [3, 3]
    assert {row.index for row in result.top(5, query=0)} == {3, 7, 11}
    assert "3 of 20" in result.not_scored
    everything = attribute_small()
    torch.testing.assert_close(result.scores[:, [3, 7, 11]], everything.scores[:, [3, 7, 11]])
    with pytest.raises(OptionError, match="example 4 was not scored"):
        result.row(0, 4)


@pytest.mark.parametrize("candidates", [[], [20], [-1, 3]])
def test_candidates_that_do_not_exist_are_refused(candidates: list[int]) -> None:
    with pytest.raises(OptionError, match=r"does not exist|is empty"):
        attribute_small(candidates=candidates)


# --- saving --------------------------------------------------------------------------------------------------


def same(a: Attribution, b: Attribution) -> None:
    for name in ("chain_scores", "indices", "terms", "dot_products", "query_losses", "query_products"):
        assert torch.equal(getattr(a, name), getattr(b, name)), name
    assert a.exhibits == b.exhibits
    assert a.queries == b.queries
    assert a.token_scores == b.token_scores
    assert torch.equal(a.solve.paths, b.solve.paths)
    ours, theirs = ({**vars(each.solve.plan), "spectrum": None} for each in (a, b))
    assert ours == theirs
    assert a.top(5) == b.top(5) or str(a.top(5)) == str(b.top(5))


def test_save_and_load(small: Attribution, tmp_path: Path) -> None:
    loaded = whence.load(small.save(tmp_path / "saved"))
    same(small, loaded)


def test_save_and_load_text(read_text: tuple[Attribution, text.Text], tmp_path: Path) -> None:
    same(read_text[0], whence.load(read_text[0].save(tmp_path / "saved")))


def test_a_run_directory_holds_the_same_numbers_and_is_loaded_when_asked_again(tmp_path: Path) -> None:
    plain = attribute_small(part_size=3)  # how examples are grouped decides the last bits
    run = attribute_small(run_dir=tmp_path / "run", part_size=3)
    same(plain, run)
    same(plain, whence.load(tmp_path / "run"))
    same(plain, attribute_small(run_dir=tmp_path / "run", part_size=3))


def test_another_configuration_is_refused_with_the_difference(tmp_path: Path) -> None:
    attribute_small(run_dir=tmp_path / "run")
    with pytest.raises(RunDirectoryError, match=r"damping: 'lambda_max/10' there, 0\.25 now"):
        attribute_small(run_dir=tmp_path / "run", damping=0.25)
    data = vectors(torch.float64)
    with pytest.raises(RunDirectoryError, match="queries"):
        whence.attribute(classifier(), data, data[2:4], task=Classification(), run_dir=tmp_path / "run")
    other = classifier()
    with torch.no_grad():
        next(other.parameters())[0, 0] += 1e-12
    with pytest.raises(RunDirectoryError, match="model"):
        whence.attribute(other, data, data[:2], task=Classification(), run_dir=tmp_path / "run")


def test_loading_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="holds no run"):
        whence.load(tmp_path)
    with pytest.raises(RunDirectoryError, match="holds no run"):
        whence.load(tmp_path / "nowhere")
    with pytest.raises(OptionError, match="refine"), Run(tmp_path, {}, identity={}):
        attribute_small(refine=0)
    with pytest.raises(RunDirectoryError, match="is not finished"):
        whence.load(tmp_path)


# --- from here to the model ------------------------------------------------------------------------------------

#: From `attribute` to the model's forward pass in a product of conjugate gradients: calls of whence's own functions.
CALLS = 10
#: The same on the longest way, through tangents and sampled batches; not to grow.
LONGEST = 17


def own_functions() -> list[str]:
    """Functions of the package on the stack, outermost first; not lambdas, comprehensions and decorators."""
    package, found = str(Path(whence.__file__).parent), []
    frame = inspect.currentframe()
    while frame is not None:
        code = frame.f_code
        own = code.co_filename.startswith(package) and not code.co_filename.endswith("arguments.py")
        if own and not code.co_name.startswith("<"):
            found.append(f"{Path(code.co_filename).relative_to(package)}:{code.co_name}")
        frame = frame.f_back
    return found[::-1]


@pytest.mark.parametrize("product", ["exact", "finite-difference"])
@pytest.mark.parametrize("solver", ["cg", "lissa"])
def test_from_attribute_to_the_model_is_not_far(solver: str, product: str) -> None:
    model, data, stacks = classifier(), vectors(torch.float64), set[tuple[str, ...]]()
    model.register_forward_pre_hook(lambda *_: stacks.add(tuple(own_functions())))
    whence.attribute(
        model, data, data[:2], task=Classification(), solver=solver, product=product, damping="lambda_max/10"
    )
    solving = [stack for stack in stacks if "attribution/pipeline.py:solve" in stack]
    assert solving
    longest = max(solving, key=len)
    assert len(longest) <= 1 + LONGEST, "\n".join(longest)
    if (solver, product) == ("cg", "exact"):
        assert min(map(len, solving)) == 1 + CALLS


# --- what it refuses -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"damping": 0.0}, "damping is 0.0"),
        ({"damping": "large"}, "damping is 'large'"),
        ({"solver": "newton"}, "solver is 'newton'"),
        ({"method": "fast"}, "method is 'fast'"),
        ({"chains": 1}, "at least 2 independent chains"),
        ({"refine": 0.5}, "refine is 0.5"),
        ({"product": "approximate"}, "product is"),
        ({"shown": 0}, "shown is 0"),
    ],
)
def test_bad_options_are_refused_before_any_work(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(OptionError, match=message):
        attribute_small(run_dir=tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


def test_queries_must_be_a_list() -> None:
    data = vectors(torch.float64)
    with pytest.raises(DataError, match=r"even if there is only one: \[query\]"):
        whence.attribute(classifier(), data, data[0], task=Classification())
    with pytest.raises(DataError, match=r"queries cannot be used.*empty"):
        whence.attribute(classifier(), data, [], task=Classification())


def test_a_query_that_the_model_cannot_read() -> None:
    data = vectors(torch.float64)
    with pytest.raises(DataError, match="label 9"):
        whence.attribute(classifier(), data, [(data[0][0], 9)], task=Classification())
    bad = data[0][0].clone()
    bad[0] = float("nan")
    with pytest.raises(DataError, match="NaN"):
        whence.attribute(classifier(), data, [(bad, 0)], task=Classification())


def test_a_query_longer_than_the_context() -> None:
    problem = text.problem()
    query = LanguageModeling().query(torch.zeros(70, dtype=torch.long), torch.zeros(3, dtype=torch.long))
    with pytest.raises(DataError, match="query 1 has 73 tokens, the model's context holds 64"):
        whence.attribute(problem.model, problem.train, [problem.queries[0], query], task=LanguageModeling())


def test_a_model_in_training_mode() -> None:
    data = vectors(torch.float64)
    with pytest.raises(ModelError, match="training mode"):
        whence.attribute(classifier().train(), data, data[:1], task=Classification())


def test_a_solver_of_ones_own() -> None:
    data = vectors(torch.float64)
    gnh = whence.GaussNewton(classifier(), Classification(), data)
    spectrum = whence.estimate_spectrum(gnh, generator=torch.Generator().manual_seed(0))
    plan = whence.Plan.from_spectrum(spectrum, 0.5, chains=3).replace(num_steps=17, batch_size=9)
    result = attribute_small(solver=whence.Lissa(plan), damping="auto")
    assert result.solve.plan.num_steps == 17
    assert result.chain_scores.shape[0] == 3
    with pytest.raises(OptionError, match=r"damping is 0\.4, the solver's plan was made for 0\.5"):
        attribute_small(solver=whence.Lissa(plan), damping=0.4)
    with pytest.raises(OptionError, match=r"damping is 0\.4, the solver's plan was made for 0\.5"):
        whence.attribute(
            classifier(),
            data,
            data[:1],
            task=Classification(),
            solver=whence.Lissa(plan),
            options=whence.Options(damping=0.4),
        )


def test_pictures_and_words_are_shown() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 3)).eval()
    images: list[tuple[Tensor, int]] = [
        (torch.rand(8, 8, generator=torch.Generator().manual_seed(i)), i % 3) for i in range(12)
    ]
    result = whence.attribute(
        model, images, images[:1], task=Classification(), class_names=["ant", "bee", "cat"], shown=2
    )
    exhibit = result.exhibits[result.top(1)[0].index]
    assert exhibit.label in ("ant", "bee", "cat")
    assert exhibit.image is not None
    assert exhibit.image.startswith(b"\x89PNG")
    assert result.queries[0].prediction is not None
    assert result.queries[0].prediction.split()[0] in ("ant", "bee", "cat")
