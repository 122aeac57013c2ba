"""A run directory or a model of a stranger's: nothing is run, followed or taken on its word."""

from __future__ import annotations

import ast
import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import whence
from run_samples import forged
from small import DOUBLE, classifier
from tiny_hf import gpt2_directory
from whence import Classification
from whence.cli import app
from whence.errors import ModelError, OptionError, RunDirectoryError, StorageError
from whence.runs import Run
from whence.runs.files import checksum
from whence.sources import load_model
from zoo import vectors

ROOT = Path(__file__).parent.parent
MARK = """
from pathlib import Path
Path(__file__).with_name("it ran").touch()
"""
BUILD = (
    MARK
    + """
import torch, whence
from whence.sources import Problem

def everything():
    torch.manual_seed(0)
    data = [(torch.randn(2), i % 3) for i in range(12)]
    return Problem(torch.nn.Linear(2, 3).eval(), whence.Classification(), train=data, queries=data[:1])
"""
)


def invoke(*arguments: object, code: int = 0) -> Any:
    found = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert found.exit_code == code, (found.output, found.exception)
    return found


# --- code -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["resume", "validate"])
def test_what_a_directory_names_is_run_only_where_the_user_says_so(tmp_path: Path, command: str) -> None:
    build, run = tmp_path / "build.py", tmp_path / "run"
    build.write_text(BUILD)
    invoke("attribute", f"{build}:everything", "--run-dir", run, "--solver", "cg")
    (tmp_path / "it ran").unlink()
    told = " ".join(invoke(command, run, code=2).stderr.split())
    assert not (tmp_path / "it ran").exists()
    for part in (f"model '{build}:everything'", "can run code", "say --trust-run"):
        assert part in told
    more = ["--points", 1, "--budget", "5s"] if command == "validate" else []
    invoke(command, run, "--trust-run", *more)
    assert (tmp_path / "it ran").exists()


def test_what_a_directory_names_cannot_speak_to_the_terminal(tmp_path: Path) -> None:
    (tmp_path / "build.py").write_text(BUILD)
    run = tmp_path / "run"
    invoke("attribute", f"{tmp_path / 'build.py'}:everything", "--run-dir", run, "--solver", "cg")
    command = json.loads((run / "command.json").read_text())
    command["inputs"]["train"] = "\x1b]0;owned\x07\u202e[red]"
    (run / "command.json").write_text(json.dumps(command))
    renamed(run, "command")
    told = invoke("resume", run, code=2).stderr
    assert "\x1b]" not in told
    assert "\u202e" not in told
    assert "owned" in told


def renamed(run: Path, name: str) -> None:
    """The manifest with the checksum of an artifact as it is now."""

    def change(tree: Any) -> None:
        file = run / tree["artifacts"][name]["file"]
        tree["artifacts"][name] |= {"bytes": file.stat().st_size, "blake2b": checksum(file)}

    forged(run, change)


def test_code_beside_a_model_is_not_run(tmp_path: Path) -> None:
    directory = gpt2_directory(tmp_path / "model")
    (directory / "mine.py").write_text(
        MARK + "from transformers import GPT2Config as Config, GPT2LMHeadModel as Model"
    )
    config = json.loads((directory / "config.json").read_text())
    config |= {
        "model_type": "mine",
        "auto_map": {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"},
    }
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"cannot be loaded"):
        load_model(directory)
    assert not list(tmp_path.rglob("it ran"))


@pytest.mark.parametrize("folder", ["src", "reproduction", "examples"])
def test_code_of_others_is_refused_wherever_their_files_are_loaded(folder: str) -> None:
    found = 0
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            called = (
                node.func.attr if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else ""
            )
            of_peft = called and "PeftModel" in ast.unparse(
                node
            )  # loads tensors alone, and knows no such option
            if called in ("from_pretrained", "load_dataset") and not of_peft:
                given = {word.arg: ast.unparse(word.value) for word in node.keywords}  # type: ignore[attr-defined]
                assert given.get("trust_remote_code") == "False", (path, ast.unparse(node))
                found += 1
    assert found >= 3


# --- links, pipes, counts ---------------------------------------------------------------------------------------------


def clean(path: Path) -> Any:
    data = vectors(DOUBLE)
    return whence.clean(
        classifier(), data, task=Classification(), queries=data[:1], rank=2, exact_solves=0, run_dir=path
    )


def test_a_run_inside_a_run_is_not_somewhere_else(tmp_path: Path) -> None:
    clean(tmp_path / "run")
    (tmp_path / "run" / "attribution").rename(tmp_path / "elsewhere")
    (tmp_path / "run" / "attribution").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RunDirectoryError, match=r"attribution is a link"):
        clean(tmp_path / "run")


@pytest.mark.parametrize("name", ["lock", "config.json", "manifest.json"])
def test_a_pipe_in_a_files_place_keeps_nobody_waiting(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises((RunDirectoryError, StorageError), match=r"cannot be|holds no run"):
        Run(tmp_path, {}, identity={})


def attribute(path: Path) -> Any:
    data = vectors(DOUBLE)
    return whence.attribute(
        classifier(),
        data,
        data[:1],
        task=Classification(),
        solver="cg",
        damping=0.1,
        part_size=8,
        run_dir=path,
    )


@pytest.mark.parametrize("examples", [0, -3])
def test_parts_of_no_examples_are_refused(tmp_path: Path, examples: int) -> None:
    attribute(tmp_path)
    (tmp_path / "scores-1" / "size.json").write_text(json.dumps({"examples": examples}))
    renamed(tmp_path, "scores-1/size")
    with Run.again(tmp_path) as run:
        run.drop("result")
    with pytest.raises(RunDirectoryError, match=r"size\.json cannot be used"):
        attribute(tmp_path)


def test_scores_are_those_of_the_examples_that_were_asked_for(tmp_path: Path) -> None:
    """Even where a stranger has made all checksums right."""
    attribute(tmp_path)

    def exchange(tree: Any) -> None:
        parts = tree["artifacts"]
        first, second = "scores-1/part-00000", "scores-1/part-00001"
        parts[first], parts[second] = parts[second], parts[first]
        del parts["result"]

    forged(tmp_path, exchange)
    with pytest.raises(RunDirectoryError, match=r"scores-1/ in .* are of other examples"):
        attribute(tmp_path)


@pytest.mark.parametrize("change", ["twice", "outside", "fewer"])
def test_a_result_is_of_its_examples_each_once(tmp_path: Path, change: str) -> None:
    attribute(tmp_path)
    tree = json.loads((tmp_path / "result.json").read_text())
    match change:
        case "twice":
            tree["indices"]["values"][3] = 4
        case "outside":
            tree["indices"]["values"][3] = 20
        case "fewer":
            tree["num_examples"] = 21
    (tmp_path / "result.json").write_text(json.dumps(tree))
    renamed(tmp_path, "result")
    for use in (whence.load, attribute):
        with pytest.raises(RunDirectoryError, match=r"not those of its 2[01] examples, each once"):
            use(tmp_path)


def test_examples_that_are_claimed_take_no_memory(tmp_path: Path) -> None:
    """Ten quadrillion, of which 20 were scored: what is there can be shown, and nothing is made for the others."""
    attribute(tmp_path)
    tree = json.loads((tmp_path / "result.json").read_text())
    tree |= {"num_examples": 10**16, "not_scored": "the others"}
    (tmp_path / "result.json").write_text(json.dumps(tree))
    renamed(tmp_path, "result")
    result = whence.load(tmp_path)
    assert len(result.top(3)) == 3
    assert len(result.to_pandas()) == 20
    result.to_html(tmp_path / "page.html")
    for use in (lambda: result.scores, lambda: result.stderr, result.interval, lambda: result.effects):
        with pytest.raises(OptionError, match=r"all 10,000,000,000,000,000 examples take .*use to_pandas"):
            use()


@pytest.mark.parametrize("changes", [{"chains": 5000}, {"damping": 1e-9}])
def test_a_plan_that_was_not_asked_for_is_refused(tmp_path: Path, changes: dict[str, float]) -> None:
    attribute(tmp_path)
    tree = json.loads((tmp_path / "plan.json").read_text())
    tree["plan"] |= changes
    (tmp_path / "plan.json").write_text(json.dumps(tree))
    renamed(tmp_path, "plan")
    with Run.again(tmp_path) as run:
        run.drop("result")
    with pytest.raises(RunDirectoryError, match=r"the plan in .* is for .* the run for 4 and 0\.1"):
        attribute(tmp_path)


@pytest.mark.parametrize("changes", [{"rank": 0}, {"rank": 10**9}, {"at_once": 10**9}, {"part": -1}])
def test_sizes_of_a_cleaning_that_nobody_asked_for_are_refused(
    tmp_path: Path, changes: dict[str, int]
) -> None:
    clean(tmp_path)
    (tmp_path / "size.json").write_text(json.dumps({"rank": 2, "at_once": 8, "part": 8, **changes}))
    renamed(tmp_path, "size")
    with Run.again(tmp_path) as run:
        run.drop("self-influence")
    with pytest.raises(RunDirectoryError, match=r"size\.json cannot be used|more than was ever asked for"):
        clean(tmp_path)
