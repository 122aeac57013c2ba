"""The command line as a user meets it: over Hugging Face directories, functions, and files of every kind."""

from __future__ import annotations

import json
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits
from typer.testing import CliRunner

import whence
from tiny_hf import classifier_directory, gpt2_directory, pieces_with_fallback, vit_directory
from whence.cli import app
from whence.runs import Run

RUNNER = CliRunner()
NAMES = ["with", "try", "for", "while", "if", "pass", "return", "lambda", "yield", "assert"]
QUESTION = {"prompt": "The with statement", "completion": " is used to wrap"}
FAST = ["--damping", "20", "--chains", "2", "--refine", "1", "--max-length", "24"]

BUILD = """
import torch
from whence import Classification, Exhibit
from whence.sources import Problem

def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 8 * 8, 2)).eval()

def everything():
    torch.manual_seed(0)
    data = [(torch.randn(4), i % 3) for i in range(12)]
    return Problem(torch.nn.Linear(4, 3).eval(), Classification(), train=data, queries=data[:1],
                   train_exhibits=lambda i: Exhibit(id=f"toy {i}", text=f"row {i}"))
"""


def write_lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A language model, real text, and a question."""
    root = tmp_path_factory.mktemp("cli")
    gpt2_directory(root / "model")
    rows = [{"id": name, "text": topics[name][60:200]} for name in NAMES if name in topics]
    write_lines(root / "train.jsonl", rows)
    write_lines(root / "queries.jsonl", [QUESTION])
    (root / "build.py").write_text(BUILD)
    return root


def invoke(*arguments: object, code: int = 0) -> Any:
    result = RUNNER.invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, (result.output, result.exception)
    return result


def training(place: Path) -> list[object]:
    return [place / "model", "--train", place / "train.jsonl"]


def test_help_shows_examples() -> None:
    assert "whence attribute my-model/" in invoke("attribute", "--help").output
    for command in ("spectrum", "plan", "tune", "resume", "report", "demo"):
        assert "Example" in invoke(command, "--help").output


def test_spectrum(place: Path) -> None:
    assert "λmax" in invoke("spectrum", *training(place), "--max-length", "24").stdout
    measured = json.loads(invoke("spectrum", *training(place), "--max-length", "24", "--json").stdout)
    assert measured["trace"]["value"] > measured["lambda_max"]["value"] > 0
    assert measured["num_terms"] > 100


def test_plan_tells_time_memory_and_disk_before_anything_long(place: Path) -> None:
    queries = ["--queries", place / "queries.jsonl", "--max-length", "24"]
    printed = invoke("plan", *training(place), *queries).stdout
    for word in ("time", "memory", "disk", "1 query", "what attribute will do"):
        assert word in printed
    cost = json.loads(invoke("plan", *training(place), *queries, "--accuracy", "0.995", "--json").stdout)
    parameters = cost["spectrum"]["num_parameters"]
    assert cost["memory_bytes"] >= 4 * parameters * 5
    assert cost["disk_bytes"] > 4 * parameters * 5
    assert 0 < cost["iteration_seconds"] < cost["exact_seconds"] == cost["seconds"]
    assert cost["choice"]["solver"] in ("cg", "lissa")
    assert cost["choice"]["words"].startswith("To reach a correlation of 0.995")
    alone = json.loads(
        invoke("plan", *training(place), *queries, "--no-baseline", "--solver", "lissa", "--json").stdout
    )
    with_it = json.loads(invoke("plan", *training(place), *queries, "--solver", "lissa", "--json").stdout)
    assert alone["memory_bytes"] < with_it["memory_bytes"]


def test_attribute_writes_a_run_a_page_and_a_table(place: Path, tmp_path: Path) -> None:
    job = [*training(place), "--queries", place / "queries.jsonl", *FAST, "--run-dir", tmp_path / "run"]
    printed = invoke("attribute", *job, code=0).stdout
    assert "most helpful" in printed
    assert "report.html" in printed
    page = (tmp_path / "run" / "report.html").read_text()
    assert "The with statement" in page
    result = whence.load(tmp_path / "run")
    assert result.exhibits[result.top(1)[0].index].tokens is not None
    again = json.loads(invoke("attribute", *job, "--json").stdout)
    row = result.top(1)[0]
    assert again["queries"][0]["helpful"][0]["score"] == row.score
    assert again["queries"][0]["helpful"][0]["id"] == result.exhibits[row.index].id
    resumed = json.loads(invoke("resume", tmp_path / "run", "--trust-run", "--json").stdout)
    assert resumed["queries"] == again["queries"]
    other = invoke("report", tmp_path / "run", "--output", tmp_path / "other.html").stdout
    assert (tmp_path / "other.html").read_text() == page
    assert "other.html" in other


def test_a_disk_run_cut_short_is_resumed_by_name(place: Path, tmp_path: Path) -> None:
    """Without its last files, a run is unfinished: `report` says so, `resume` finishes it."""
    job = [*training(place), "--prompt", "The with", "--completion", " statement", *FAST]
    invoke("attribute", *job, "--run-dir", tmp_path / "run")
    before = whence.load(tmp_path / "run")
    with Run.again(tmp_path / "run") as run:
        for name in ("result", "scores-1/part-00000"):
            assert run.has(name)
            run.drop(name)
    assert "not finished" in invoke("report", tmp_path / "run", code=2).stderr
    invoke("resume", tmp_path / "run", "--trust-run")
    assert torch.equal(whence.load(tmp_path / "run").chain_scores, before.chain_scores)


@pytest.mark.parametrize("method", ["bm25:3", "tfidf:3", "file"])
def test_a_shortlist(place: Path, tmp_path: Path, method: str) -> None:
    if method == "file":
        (tmp_path / "ids.txt").write_text("with\npass\n")
        method = str(tmp_path / "ids.txt")
    job = [*training(place), "--queries", place / "queries.jsonl", *FAST, "--candidates", method]
    printed = invoke("attribute", *job).stdout
    assert "the others have no score" in printed.replace("\n", " ")


@pytest.mark.parametrize("kind", ["parquet", "csv", "txt", "folder", "datasets"])
def test_training_data_of_every_kind(place: Path, tmp_path: Path, kind: str) -> None:
    texts = {name: topics[name][60:200] for name in NAMES if name in topics}
    path = tmp_path / f"train.{kind}"
    if kind in ("parquet", "csv"):
        import pandas

        frame = pandas.DataFrame({"id": list(texts), "text": list(texts.values())})
        frame.to_parquet(path) if kind == "parquet" else frame.to_csv(path, index=False)
    elif kind == "txt":
        path.write_text("\n\n".join(texts.values()))
    elif kind == "folder":
        path.mkdir()
        for name, text in texts.items():
            (path / f"{name}.txt").write_text(text)
    else:
        datasets = pytest.importorskip("datasets")
        datasets.Dataset.from_dict({"id": list(texts), "text": list(texts.values())}).save_to_disk(path)
    job = [place / "model", "--train", path, "--queries", place / "queries.jsonl", *FAST]
    found = json.loads(invoke("attribute", *job, "--json").stdout)
    assert len(found["queries"][0]["helpful"]) == 5


def test_images_with_a_function_and_with_a_hugging_face_model(place: Path, tmp_path: Path) -> None:
    bunch = load_digits()
    for split, numbers in (("train", range(12)), ("odd", range(20, 22))):
        for number in numbers:
            folder = tmp_path / split / ("even" if bunch.target[number] % 2 == 0 else "odd")
            folder.mkdir(parents=True, exist_ok=True)
            pixels = Image.fromarray((bunch.images[number] * 15).astype("uint8")).convert("RGB")
            pixels.save(folder / f"{number}.png")
    data = ["--train", tmp_path / "train", "--queries", tmp_path / "odd", *FAST[:6]]
    job = [f"{place / 'build.py'}:model", "--task", "classification", *data, "--run-dir", tmp_path / "run"]
    invoke("attribute", *job)
    result = whence.load(tmp_path / "run")
    assert result.queries[0].image is not None
    assert result.exhibits[result.top(1)[0].index].label in ("even", "odd")
    vit_directory(
        tmp_path / "vit", num_labels=2, id2label={0: "even", 1: "odd"}, label2id={"even": 0, "odd": 1}
    )
    invoke("attribute", tmp_path / "vit", *data)


def test_a_table_of_images_in_another_encoding(place: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        Image.new("RGB", (8, 8), "red" if name == "a" else "blue").save(tmp_path / f"{name}.png")
    (tmp_path / "list.csv").write_bytes("image,label\na.png,né\nb.png,non\n".encode("latin-1"))
    job = [f"{place / 'build.py'}:model", "--task", "classification", "--train", tmp_path / "list.csv"]
    measured = invoke("spectrum", *job, "--encoding", "latin-1", "--json").stdout
    assert json.loads(measured)["num_terms"] == 2


def test_text_classification(tmp_path: Path) -> None:
    model = classifier_directory(tmp_path / "model")
    rows = [{"text": f"the cat sat on the mat {i}", "label": i % 2} for i in range(9)]
    train = write_lines(tmp_path / "train.jsonl", rows)
    odd = write_lines(tmp_path / "odd.jsonl", rows[:1])
    found = json.loads(
        invoke("attribute", model, "--train", train, "--queries", odd, *FAST[:6], "--json").stdout
    )
    assert found["queries"][0]["helpful"]


def test_texts_to_classify_without_text_are_left_out_where_asked(tmp_path: Path) -> None:
    model = classifier_directory(tmp_path / "model")
    rows = [{"text": text, "label": i % 2} for i, text in enumerate(["the cat", " ", "sat", "on", "", "it"])]
    train = write_lines(tmp_path / "train.jsonl", rows)
    assert "(--skip-empty)" in invoke("spectrum", model, "--train", train, code=2).stderr.replace("\n", " ")
    measured = invoke("spectrum", model, "--train", train, "--skip-empty", "--json").stdout
    assert json.loads(measured)["num_terms"] == 4


def test_a_function_that_gives_everything(place: Path, tmp_path: Path) -> None:
    job = [f"{place / 'build.py'}:everything", *FAST[:6], "--run-dir", tmp_path / "run"]
    assert "toy " in invoke("attribute", *job).stdout


# --- what it refuses -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"--train": "nothing.jsonl"}, "nothing.jsonl"),
        ({"--train": "empty.jsonl"}, "empty"),
        ({"--train": "broken.jsonl"}, "line 2"),
        ({"--train": "fieldless.jsonl"}, "text"),
        ({"--train": "latin.txt"}, "--encoding"),
        ({"--queries": "long.jsonl"}, "line 2 is 1802 tokens long, and the model reads 32"),
        ({"--queries": "unanswered.jsonl"}, "completion"),
        ({"--candidates": "unknown.txt"}, "no-such-id"),
        ({"--candidates": "bm25"}, "unknown|bm25"),
        ({"--damping": "much"}, "damping is 'much'"),
        ({"--damping": "-1"}, "damping is -1"),
        ({"--params": "layers.*"}, "layers"),
        ({"--max-length": "100000"}, "context holds"),
        ({"--run-dir": "taken"}, "holds no run"),
        ({"--prompt": "and"}, "not both"),
    ],
)
def test_bad_input_gets_one_clear_message(
    place: Path, tmp_path: Path, changes: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import re

    monkeypatch.chdir(tmp_path)
    Path("empty.jsonl").touch()
    Path("broken.jsonl").write_text('{"text": "a good row"}\n{"text": \n')
    Path("fieldless.jsonl").write_text('{"body": "no text"}\n')
    Path("latin.txt").write_bytes("caf\xe9 au lait".encode("latin-1"))
    write_lines(Path("long.jsonl"), [QUESTION, {"prompt": "the cat " * 900, "completion": " sat"}])
    write_lines(Path("unanswered.jsonl"), [{"prompt": "The with statement"}])
    Path("unknown.txt").write_text("with\nno-such-id\n")
    Path("taken").mkdir()
    Path("taken/something.txt").touch()
    options = {
        "--train": str(place / "train.jsonl"),
        "--queries": str(place / "queries.jsonl"),
        "--max-length": "24",
        **changes,
    }
    flat = [part for pair in options.items() for part in pair]
    result = invoke("attribute", place / "model", *flat, code=2)
    assert "error:" in result.stderr
    assert re.search(message, result.stderr.replace("\n", " ")), result.stderr
    assert "Traceback" not in result.output


def test_a_tokenizer_that_does_not_fit_and_weights_that_are_not_whole(place: Path, tmp_path: Path) -> None:
    small = gpt2_directory(tmp_path / "small", rows=50)
    data = ["--train", place / "train.jsonl"]
    assert "50" in invoke("spectrum", small, *data, code=2).stderr
    cut = gpt2_directory(tmp_path / "cut")
    weights = cut / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:2000])
    assert "again" in invoke("spectrum", cut, *data, code=2).stderr.replace("\n", " ")


def test_an_unwritable_run_directory(place: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    job = [*training(place), "--queries", place / "queries.jsonl", "--run-dir", tmp_path / "file" / "run"]
    assert "choose another" in invoke("attribute", *job, "--max-length", "24", code=4).stderr.replace(
        "\n", " "
    )


def test_a_run_of_an_older_format(place: Path, tmp_path: Path) -> None:
    job = [*training(place), "--queries", place / "queries.jsonl", *FAST, "--run-dir", tmp_path / "run"]
    invoke("attribute", *job)
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    (tmp_path / "run" / "manifest.json").write_text(json.dumps({**manifest, "format": 0}))
    assert "format 0" in invoke("attribute", *job, code=2).stderr
    assert "format 0" in invoke("report", tmp_path / "run", code=2).stderr


def test_several_checkpoints_are_averaged_and_one_is_added_later(place: Path, tmp_path: Path) -> None:
    seeds = [gpt2_directory(tmp_path / f"seed{seed}", seed=seed) for seed in (1, 2)]
    rest = ["--train", place / "train.jsonl", "--queries", place / "queries.jsonl", *FAST]
    invoke("attribute", seeds[0], place / "model", *rest, "--run-dir", tmp_path / "run")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("run/checkpoint-*/result.json")}
    assert len(before) == 2
    job = [*rest, "--run-dir", tmp_path / "run"]
    printed = invoke("attribute", place / "model", *seeds, *job).stdout
    assert {path: path.stat().st_mtime_ns for path in before} == before
    result = whence.load(tmp_path / "run")
    assert {each.name for each in result.checkpoints} == {str(path) for path in (place / "model", *seeds)}
    assert result.dominant_error in printed
    assert "another model" in printed
    assert "scores of 3 checkpoints correlate" in " ".join(printed.split())
    assert result.dominant_error in (tmp_path / "run" / "report.html").read_text()
    assert result.token_scores
    shares = result.token_scores[0, result.top(1)[0].index]
    assert sum(shares) == pytest.approx(result.top(1)[0].score, rel=1e-3)
    again = json.loads(invoke("resume", tmp_path / "run", "--trust-run", "--json").stdout)["queries"][0]
    row = result.top(1)[0]
    assert again["helpful"][0]["score"] == row.score
    assert again["helpful"][0]["another_high"] == row.another_high
    assert again["dominant_error"] == result.dominant_error
    assert "seed2" in invoke("resume", tmp_path / "run", code=2).stderr
    assert "means over 3 checkpoints" in invoke("validate", tmp_path / "run", "--trust-run", code=2).stderr


def test_models_that_are_no_checkpoints_of_one_training_are_refused(place: Path, tmp_path: Path) -> None:
    gpt2_directory(tmp_path / "other", tokenizer=pieces_with_fallback())
    rest = ["--train", place / "train.jsonl", "--queries", place / "queries.jsonl", *FAST]
    said = invoke("attribute", place / "model", tmp_path / "other", *rest, code=2).stderr
    assert "have another tokenizer" in said.replace("\n", " ")
    assert "named twice" in invoke("attribute", place / "model", place / "model", *rest, code=2).stderr
    recipe = ["--training", "optimizer=sgd,rate=0.1,steps=10"]
    assert "for one model" in invoke("attribute", place / "model", *rest, *recipe, *recipe, code=2).stderr


def test_each_checkpoint_has_a_recipe_of_its_own(place: Path, tmp_path: Path) -> None:
    gpt2_directory(tmp_path / "model", seed=1)
    rest = ["--train", place / "train.jsonl", "--queries", place / "queries.jsonl", "--max-length", "24"]
    recipes = [f"optimizer=sgd,rate=0.01,steps={steps}" for steps in (100, 200)]
    training = [part for recipe in recipes for part in ("--training", recipe)]
    models = [place / "model", tmp_path / "model"]
    job = [*models, *rest, *training, "--accuracy", "quick", "--run-dir", tmp_path / "run"]
    invoke("attribute", *job)
    words = {each.name: each.damping_words for each in whence.load(tmp_path / "run").checkpoints}
    assert "τ = 1 " in words[str(models[0])]
    assert "τ = 2 " in words[str(models[1])]
