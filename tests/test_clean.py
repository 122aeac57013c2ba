"""`whence.cleaning.clean` and ``whence clean``: ranking, files, interruptions, the page, the command."""

from __future__ import annotations

import csv
import dataclasses
import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from typer.testing import CliRunner

import digits
import pages
from test_report_in_browser import CONTRASTS, Browser, browser, fill, visit  # noqa: F401 (fixtures)
from tiny_hf import gpt2_directory
from whence import Classification, Cleaning, Exhibit, LanguageModeling, Regression, attribute, clean
from whence.attribution import load
from whence.cleaning import load_cleaning
from whence.cleaning import pipeline as measuring
from whence.cleaning.page import render
from whence.cleaning.result import safe_cell
from whence.cli import app
from whence.errors import DataError, OptionError, RunDirectoryError
from whence.runs import Run

EXAMPLES = 90
NAMES = [f"class {k}" for k in range(10)]


class Named(TensorDataset):
    """Digits with names, one of them a formula, and notes that would be code."""

    def id(self, index: int) -> str:
        return "=1+1" if index == 0 else f"digit {index}"

    def exhibit(self, index: int) -> Exhibit:
        x, _ = self[index]
        return Exhibit(
            id=self.id(index), image=pages.png(255 - 255 * x.reshape(8, 8).numpy()), note=pages.SCRIPT
        )


@functools.cache
def problem() -> tuple[nn.Module, Named, list[Any]]:
    train, test = digits.load()
    torch.manual_seed(0)
    x, y = (tensor[:EXAMPLES] for tensor in train.tensors)
    model = nn.Sequential(nn.Linear(64, 12), nn.Tanh(), nn.Linear(12, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(40):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model.eval(), Named(x, y), [test[i] for i in range(3)]


def run(**options: Any) -> Cleaning:
    model, train, _ = problem()
    settings = {"task": Classification(), "rank": 8, "class_names": NAMES, "part_size": 20, **options}
    return clean(model, train, **settings)


@functools.cache
def finished() -> Cleaning:
    return run(queries=problem()[2], shown=30)


def regression() -> list[tuple[Tensor, Tensor]]:
    return [(x, x[:2]) for x in problem()[1].tensors[0][:12]]


def same(one: Cleaning, other: Cleaning) -> bool:
    names = ("values", "low", "high", "norms", "losses", "predictions")
    return all(torch.equal(getattr(one.found, name), getattr(other.found, name)) for name in names)


# --- the ranking -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["self-influence", "loss", "gradient-norm"])
def test_examples_are_ranked_by_what_was_asked_for(by: Any) -> None:
    result = dataclasses.replace(finished(), by=by)
    measure = {
        "self-influence": result.found.values,
        "loss": result.found.losses,
        "gradient-norm": result.found.norms,
    }[by]
    order = measure.argsort(descending=True)
    top = result.top(7)
    assert [suspect.index for suspect in top] == order[:7].tolist()
    assert [suspect.rank for suspect in top] == list(range(1, 8))
    assert [getattr(s, f"{by.replace('-', '_')}_rank") for s in top] == list(range(1, 8))
    for suspect in top:
        assert suspect.loss == float(result.found.losses[suspect.index])
        assert suspect.loss_rank == 1 + int((result.found.losses > suspect.loss).sum())
        assert suspect.low <= suspect.self_influence <= suspect.high
        assert suspect.effect == pytest.approx(suspect.self_influence / EXAMPLES)


def test_labels_and_predictions_are_in_words() -> None:
    model, train, _ = problem()
    with torch.no_grad():
        probabilities = model(train.tensors[0]).softmax(1)
    for suspect in finished().top(10):
        assert suspect.label == NAMES[int(train.tensors[1][suspect.index])]
        assert suspect.prediction == NAMES[int(probabilities[suspect.index].argmax())]
        assert suspect.probability == pytest.approx(float(probabilities[suspect.index].max()), abs=1e-5)
        assert suspect.disagrees == (suspect.label != suspect.prediction)


def test_harm_is_the_sum_of_the_scores() -> None:
    model, train, queries = problem()
    result = finished()
    scores = attribute(
        model, train, queries, task=Classification(), damping=result.found.damping, baseline=False
    )
    assert result.harm is not None
    total = scores.scores.sum(0)
    assert torch.allclose(result.harm.scores, total, rtol=1e-6, atol=1e-6 * float(total.abs().max()))
    harmful = result.most_harmful(5)
    assert [one.index for one in harmful] == total.argsort()[:5].tolist()
    for one in harmful:
        assert one.score is not None
        assert one.score_low is not None
        assert one.score_high is not None
        assert one.score < 0
        assert one.score_low <= one.score <= one.score_high
        assert one.score_effect == pytest.approx(one.score / EXAMPLES)
    with pytest.raises(OptionError, match="no queries were given"):
        run(exact_solves=0).most_harmful()


def test_the_damping_is_a_part_of_the_largest_eigenvalue() -> None:
    model, train, queries = problem()
    named = "lambda_max/200"
    scores = attribute(model, train, queries, task=Classification(), damping=named, baseline=False)
    assert finished().found.damping == scores.solve.plan.damping


def test_a_subset_of_the_terms_and_other_tasks() -> None:
    part = run(spectrum_terms=30)
    assert part.found.bounds.operator_terms == 30
    assert "30 of 90" in render(part)
    assert not torch.equal(part.found.values, finished().found.values)
    torch.manual_seed(0)
    result = clean(nn.Linear(64, 2).eval(), regression(), task=Regression(), rank=8)
    first = result.top(1)[0]
    assert (first.label, first.prediction, first.probability) == (None, None, None)
    assert first.id == str(first.index)


# --- files -----------------------------------------------------------------------------------------------------


def test_the_table_has_every_example_and_no_formula(tmp_path: Path) -> None:
    result = finished()
    path = result.to_csv(tmp_path / "deep" / "table.csv")
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    expected = "index id label prediction probability loss gradient_norm self_influence low high rank"
    assert list(rows[0]) == [*expected.split(), "score", "score_low", "score_high"]
    assert [int(row["index"]) for row in rows] == result.order.tolist()
    assert [int(row["rank"]) for row in rows] == list(range(1, EXAMPLES + 1))
    values = torch.tensor([float(row["self_influence"]) for row in rows], dtype=torch.float64)
    assert torch.allclose(values, result.found.values[result.order], rtol=1e-8)
    ids = {int(row["index"]): row["id"] for row in rows}
    assert ids[0] == "'=1+1"
    assert ids[5] == "digit 5"
    frame = result.to_pandas()
    assert frame["index"].tolist() == result.order.tolist()
    assert frame.loc[frame["index"] == 0, "id"].item() == "=1+1"  # no spreadsheet, no apostrophe


@pytest.mark.parametrize("text", ["=1", "+1", "-1", "@x", "\t=1", "\rx", "  =1", "＝1", "\n=1"])
def test_cells_that_would_be_formulas(text: str) -> None:
    assert safe_cell(text) == f"'{text}"


@pytest.mark.parametrize("value", ["a=1", "", "x-1", "1", 'say "=1"'])
def test_other_cells_are_as_they_are(value: str) -> None:
    assert safe_cell(value) == value


def test_names_that_cannot_be_encoded_are_written_all_the_same(tmp_path: Path) -> None:
    result = finished()
    odd = dataclasses.replace(result, ids=("half \ud83d of a pair, \0 and\nlines", *result.ids[1:]))
    with odd.to_csv(tmp_path / "t.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(line.replace("\0", "") for line in file))
    assert len(rows) == EXAMPLES
    odd.to_html(tmp_path / "t.html")


def test_a_directory_is_no_file(tmp_path: Path) -> None:
    for write in (finished().to_csv, finished().to_html):
        with pytest.raises(OptionError, match="is a directory"):
            write(tmp_path)
    assert list(tmp_path.iterdir()) == []


# --- interruptions -----------------------------------------------------------------------------------------------


class Stopped(BaseException):
    """As a keyboard interrupt: nothing catches it."""


@pytest.mark.parametrize("product", ["exact", "finite-difference"])
def test_an_interrupted_run_goes_on_and_ends_in_the_same_bits(
    product: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(product=product)
    read_examples, parts = measuring.read_examples, list[int]()

    def reading(*given: Any, stop_after: int | None = None, **options: Any) -> Any:
        if len(parts) == stop_after:
            raise Stopped
        parts.append(int(given[2][0]))
        return read_examples(*given, **options)

    def stop(*_: Any, **__: Any) -> None:
        raise Stopped

    def interrupted(name: str, how: Callable[..., Any]) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(measuring, "read_examples", reading)
            patch.setattr(measuring, name, how)
            with pytest.raises(Stopped):
                run(product=product, run_dir=tmp_path / "run")

    interrupted("nystrom", stop)
    interrupted("measure_bounds", stop)
    interrupted("read_examples", functools.partial(reading, stop_after=1))
    interrupted("read_examples", functools.partial(reading, stop_after=3))
    interrupted("calibrate", stop)
    assert parts == [0, 20, 40, 60, 80]  # none of them twice
    assert (tmp_path / "run" / "curvature.safetensors").exists()
    assert same(run(product=product, run_dir=tmp_path / "run"), whole)
    assert not (tmp_path / "run" / "curvature.safetensors").exists()  # as large as the model, times the rank


def test_a_finished_run_is_read_and_not_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = run(run_dir=tmp_path)

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("this was computed before")

    for name in ("estimate_spectrum", "nystrom", "measure_bounds", "read_examples", "calibrate"):
        monkeypatch.setattr(measuring, name, never)
    again = run(run_dir=tmp_path, by="loss", shown=3, title="another page of the same run")
    assert same(first, again)
    assert again.by == "loss"
    assert again.found.calibration == first.found.calibration
    assert set(again.seconds) >= {"spectrum", "curvature", "examples", "scale"}
    with pytest.raises(RunDirectoryError, match="rank"):
        run(run_dir=tmp_path, rank=9)
    harm = run(run_dir=tmp_path, queries=problem()[2]).harm  # nothing but the queries is solved for
    assert harm is not None
    assert torch.equal(harm.scores, finished().harm.scores)  # type: ignore[union-attr]


def test_a_broken_part_is_named(tmp_path: Path) -> None:
    run(run_dir=tmp_path)
    with Run.again(tmp_path) as directory:
        directory.drop("self-influence")
    part = tmp_path / "readings" / "part-00002.parquet"
    whole = part.read_bytes()
    part.write_bytes(b"not parquet")
    with pytest.raises(RunDirectoryError, match=r"part-00002\.parquet was damaged or changed"):
        run(run_dir=tmp_path)
    part.write_bytes(whole)
    assert same(run(run_dir=tmp_path), run())


@pytest.mark.parametrize("by", ["self-influence", "loss"])
def test_the_page_is_written_again_without_the_model(by: Any, tmp_path: Path) -> None:
    queries = problem()[2] if by == "loss" else None
    result = run(run_dir=tmp_path / "run", by=by, queries=queries, shown=5, title=f"ranked by {by}")
    loaded = load_cleaning(tmp_path / "run")
    assert same(loaded, result)
    assert list(loaded.rows()) == list(result.rows())
    written = [one.to_html(tmp_path / f"{k}.html").read_text() for k, one in enumerate((result, loaded))]
    assert written[0] == written[1]


def test_tasks_without_labels_are_read_again(tmp_path: Path) -> None:
    result = clean(nn.Linear(64, 2).eval(), regression(), task=Regression(), rank=8, run_dir=tmp_path)
    loaded = load_cleaning(tmp_path)
    assert (loaded.labels, loaded.predictions, loaded.harm) == (None, None, None)
    assert loaded.ids == result.ids


def test_what_is_not_there_is_not_read(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="holds no run; give the directory of one"):
        load_cleaning(tmp_path)
    run(run_dir=tmp_path, exact_solves=0)
    with pytest.raises(RunDirectoryError, match=rf"a run of whence clean.*`whence report {tmp_path}`"):
        load(tmp_path)
    (cleaning,) = tmp_path.glob("cleaning.*")
    cleaning.write_bytes(b"{}")
    with pytest.raises(RunDirectoryError, match="was damaged or changed"):
        load_cleaning(tmp_path)
    with Run.again(tmp_path) as directory:
        directory.drop("cleaning")
    assert "is not finished" in invoke("report", tmp_path, code=2).stderr
    run(run_dir=tmp_path, exact_solves=0)
    assert same(load_cleaning(tmp_path), run(exact_solves=0))


# --- bad input -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"by": "magic"}, "'self-influence', 'loss' or 'gradient-norm'"),
        ({"rank": 0}, "rank is 0"),
        ({"damping": 0.0}, "damping is 0"),
        ({"damping": "large"}, "lambda_max/50"),
        ({"exact_solves": 1}, "exact_solves is 1"),
        ({"exact_solves": -3}, "exact_solves is -3"),
        ({"shown": 0}, "shown is 0"),
        ({"spectrum_terms": 0}, "spectrum_terms is 0"),
        ({"part_size": 0}, "part_size is 0"),
        ({"product": "guess"}, "product is 'guess'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_impossible_settings_are_refused_before_any_work(
    options: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("work was begun")

    monkeypatch.setattr(measuring, "estimate_spectrum", never)
    with pytest.raises(OptionError, match=says):
        run(**options)


@pytest.mark.parametrize(
    "queries",
    [[], {"x": 1}, (torch.zeros(64), 1), [(torch.zeros(64), 11)], 5],
    ids=["none", "dict", "example", "label", "number"],
)
def test_queries_that_cannot_be_used_are_refused_before_any_work(
    queries: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "estimate_spectrum", None)
    with pytest.raises(DataError, match="queries"):
        run(queries=queries)


def test_at_least_one_example_is_asked_for() -> None:
    with pytest.raises(OptionError, match="k is 0"):
        finished().top(0)
    with pytest.raises(OptionError, match="by is 'age'"):
        finished().suspicion("age")


# --- the page --------------------------------------------------------------------------------------------------------


def test_the_figure_says_what_it_counts() -> None:
    (figure,) = re.findall(r'<figure class="all-scores">.*?</figure>', render(finished()), flags=re.DOTALL)
    assert "Histogram of 90 values of self-influence, from" in figure
    assert ">self-influence, even near zero, then by powers of ten<" in figure
    counts = re.findall(r"<title>(\d+) with values of self-influence from", figure)
    assert sum(map(int, counts)) == EXAMPLES
    assert re.search(r'<text x="0\.00%"[^>]*>0<', figure)  # none is negative: the axis begins at zero
    assert "score" not in re.sub(r"<figure[^>]*>", "", figure)


class Texts:
    """Ragged sequences of tokens with texts that would be code."""

    def __init__(self) -> None:
        numbers = torch.Generator().manual_seed(0)
        self.rows = [torch.randint(11, (n % 5 + 3,), generator=numbers) for n in range(14)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.rows[index]}

    def exhibit(self, index: int) -> Exhibit:
        return Exhibit(id=f"text {index}", text=f"{pages.BREAKOUT} {{{{ 7 * 7 }}}} number {index}")


@functools.cache
def language() -> Cleaning:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 11)).eval()
    return clean(model, Texts(), task=LanguageModeling(), rank=8, title=pages.BREAKOUT)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    return {
        "digits": finished().to_html(folder / "digits.html"),
        "texts": language().to_html(folder / "texts.html"),
    }


def listed(page: Browser, section: str) -> list[int]:
    """Examples that can be seen in a list, from top to bottom."""
    found: list[int] = page.execute_script(
        """return [...document.querySelectorAll(`#${arguments[0]} .entry`)].filter(e => e.checkVisibility())
           .map(e => [e.getBoundingClientRect().top, Number(e.dataset.index)])
           .sort((a, b) => a[0] - b[0]).map(pair => pair[1])""",
        section,
    )
    return found


def choose(page: Browser, value: str) -> None:
    page.find_element("css selector", f'#suspects .sort-by option[value="{value}"]').click()


def test_the_page_sorts_filters_and_searches(visit: Callable[..., Browser]) -> None:  # noqa: F811
    page = visit("digits")
    suspects = finished().top(30)
    assert listed(page, "suspects") == [s.index for s in suspects]
    assert listed(page, "harmful") == [s.index for s in finished().most_harmful(30)]
    choose(page, "effect")
    assert listed(page, "suspects") == [s.index for s in sorted(suspects, key=lambda s: -s.loss)]
    choose(page, "baseline")
    assert listed(page, "suspects") == [s.index for s in sorted(suspects, key=lambda s: -s.gradient_norm)]
    choose(page, "index")
    assert listed(page, "suspects") == sorted(s.index for s in suspects)
    choose(page, "")
    page.find_element("css selector", "#suspects .by-separation").click()
    disagreeing = [s.index for s in suspects if s.disagrees]
    assert 0 < len(disagreeing) < 30
    assert listed(page, "suspects") == disagreeing
    page.find_element("css selector", "#suspects .reset").click()
    fill(page, "#suspects .by-word", suspects[0].label or "")
    assert listed(page, "suspects") == [
        s.index for s in suspects if suspects[0].label in (s.label, s.prediction)
    ]
    page.find_element("css selector", "#suspects .reset").click()
    fill(page, "#search", suspects[3].id)
    assert suspects[3].index in listed(page, "suspects")
    assert len(listed(page, "suspects")) < 30
    assert "of" in page.find_element("id", "found").text


def test_the_page_shows_the_numbers_and_what_the_model_says(visit: Callable[..., Browser]) -> None:  # noqa: F811
    page = visit("digits", anchor="#suspects")
    first = finished().top(1)[0]
    entry = page.find_element("id", f"suspects-{first.index}")
    said = entry.text
    assert f"label {first.label}" in said
    assert f"model says {first.prediction}" in said
    assert f"rank {first.loss_rank}, " in said
    assert "nats" in said
    assert pages.SCRIPT in said  # a note, shown and not run
    assert page.title != "broken in"
    assert page.execute_script("return [...document.images].every(i => i.naturalWidth === 8)")
    grounds = page.find_element("id", "grounds").text
    assert "Upper over lower bound" in grounds
    assert "8 examples that were solved for" in grounds
    page.find_element("css selector", f"#suspects-{first.index} .rank").click()
    assert page.execute_script("return location.hash") == f"#suspects-{first.index}"


def test_texts_are_shown_and_never_run(visit: Callable[..., Browser]) -> None:  # noqa: F811
    page = visit("texts")
    assert page.title.startswith("</style>")
    assert page.find_element("css selector", "h1").text == pages.BREAKOUT
    assert (
        page.execute_script("return document.querySelectorAll('main script, main img, main iframe').length")
        == 0
    )
    texts = [e.text for e in page.find_elements("css selector", "#suspects .passage")]
    assert len(texts) == 14
    assert all("<script>" in text and "{{ 7 * 7 }}" in text for text in texts)
    assert page.find_elements("css selector", "#harmful") == []
    assert not page.find_element("css selector", "#suspects .by-separation").is_displayed()  # no labels
    fill(page, "#search", "number 11")
    assert listed(page, "suspects") == [11]


@pytest.mark.parametrize("name", ["digits", "texts"])
@pytest.mark.parametrize(("width", "colours"), [(360, "light"), (1200, "dark")], ids=["phone", "dark"])
def test_the_page_fits_and_can_be_read(
    visit: Callable[..., Browser],  # noqa: F811
    name: str,
    width: int,
    colours: str,
) -> None:
    page = visit(name, width=width, colours=colours)
    assert page.execute_script("return document.documentElement.scrollWidth <= innerWidth")
    count, poor = page.execute_script(CONTRASTS)
    assert count > 100
    assert poor == []
    twice = page.execute_script(
        "const ids = [...document.querySelectorAll('[id]')].map(e => e.id); return ids.length - new Set(ids).size"
    )
    assert twice == 0


# --- the command -----------------------------------------------------------------------------------------------------

BUILD = """
import torch
from whence import Classification
from whence.sources import Problem

def everything():
    torch.manual_seed(0)
    data = [(torch.randn(4), i % 3) for i in range(12)]
    return Problem(torch.nn.Linear(4, 3).eval(), Classification(), train=data)
"""


def invoke(*arguments: object, code: int = 0) -> Any:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, (result.output, result.exception)
    return result


def test_the_command_over_a_language_model(tmp_path: Path) -> None:
    gpt2_directory(tmp_path / "model")
    texts = ["the cat sat on the mat", "Paris is the capital", "=cat", "the dog sat on the log and the mat"]
    rows = [{"id": f"-{k}", "text": text} for k, text in enumerate(texts)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "queries.jsonl").write_text(json.dumps({"prompt": "the cat", "completion": " sat"}) + "\n")
    job = [tmp_path / "model", "--train", tmp_path / "train.jsonl", "--queries", tmp_path / "queries.jsonl"]
    job += ["--rank", 8, "--run-dir", tmp_path / "run"]
    printed = invoke("clean", *job, "--top", 2).stdout
    assert "most suspicious by self-influence" in printed
    assert "most harmful for the queries" in printed
    assert "clean.html" in printed
    page = (tmp_path / "run" / "clean.html").read_text()
    assert "the cat sat on the mat" in page
    with (tmp_path / "run" / "clean.csv").open() as file:
        assert {row["id"] for row in csv.DictReader(file)} == {"'-0", "'-1", "'-2", "'-3"}
    again = json.loads(invoke("clean", *job, "--by", "loss", "--top", 3, "--json").stdout)
    losses = [row["loss"] for row in again["suspects"]]
    assert losses == sorted(losses, reverse=True)
    assert len(losses) == 3
    assert again["by"] == "loss"
    assert again["bounds"]["largest"] >= again["bounds"]["smallest"] > 0
    assert all(row["score"] < 0 for row in again["harmful"])
    assert "other.html" in invoke("report", tmp_path / "run", "--output", tmp_path / "other.html").stdout
    assert (tmp_path / "other.html").read_text() == (tmp_path / "run" / "clean.html").read_text()
    (tmp_path / "run" / "clean.html").unlink()
    assert "clean.html" in invoke("report", tmp_path / "run").stdout
    assert (tmp_path / "run" / "clean.html").exists()


def test_the_command_over_a_function(tmp_path: Path) -> None:
    (tmp_path / "build.py").write_text(BUILD)
    model = f"{tmp_path / 'build.py'}:everything"
    printed = invoke("clean", model, "--csv", tmp_path / "t.csv", "--report", tmp_path / "p.html").stdout
    assert "label → model says" in printed or "label" in printed
    assert (tmp_path / "t.csv").exists()
    assert (tmp_path / "p.html").exists()
    found = json.loads(invoke("clean", model, "--json", "--damping", "lambda_max/10").stdout)
    assert found["report"] is None
    assert found["harmful"] == []
    assert found["num_examples"] == 12
    assert "Example" in invoke("clean", "--help").output


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--by", "magic"], "by is 'magic'"),
        (["--top", "0"], "--top is 0"),
        (["--rank", "0"], "rank is 0"),
        (["--damping", "much"], "lambda_max/50"),
    ],
    ids=["by", "top", "rank", "damping"],
)
def test_the_command_says_what_is_wrong(tmp_path: Path, options: list[str], says: str) -> None:
    (tmp_path / "build.py").write_text(BUILD)
    assert says in invoke("clean", f"{tmp_path / 'build.py'}:everything", *options, code=2).stderr
