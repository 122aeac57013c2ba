"""Models by directory and by function, their files and their tokenizers."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tiny_hf import byte_level, classifier_directory, gpt2_directory, llama_directory, vit_directory
from whence import Classification, LanguageModeling
from whence.errors import InputError, ModelError, OptionError
from whence.sources import ClassifiedTexts, Passages, RowList, language_queries, load_model
from whence.sources.models import context_length


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        "gpt2": gpt2_directory(root / "gpt2"),
        "llama": llama_directory(root / "llama"),
        "bert": classifier_directory(root / "bert", id2label={0: "bad", 1: "good", 2: "so-so"}),
        "vit": vit_directory(root / "vit"),
    }


@pytest.fixture
def gpt2(saved: dict[str, Path], tmp_path: Path) -> Path:
    """A copy to be damaged."""
    return Path(shutil.copytree(saved["gpt2"], tmp_path / "gpt2"))


@pytest.fixture
def llama(saved: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved["llama"], tmp_path / "llama"))


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


# --- directories ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "context"), [("gpt2", 32), ("llama", 64)])
def test_language_models(
    name: str, context: int, saved: dict[str, Path], capfd: pytest.CaptureFixture[str]
) -> None:
    problem = load_model(str(saved[name]))
    assert not problem.model.training
    assert isinstance(problem.task, LanguageModeling)
    assert (problem.kind, problem.context, problem.labels) == ("language-model", context, None)
    assert all(p.dtype == torch.float32 for p in problem.model.parameters())
    train = Passages(
        RowList([{"text": "the cat sat on the mat"}], name="data"), problem.tokenizer, max_length=8
    )
    pair = RowList([{"prompt": "the cat", "completion": " sat"}], name="queries")
    queries = language_queries(pair, problem.tokenizer, problem.task, max_length=problem.context)
    for example in (train[0], queries[0]):
        batch = problem.task.collate([example])
        outputs = problem.task.outputs(problem.model, batch)
        problem.task.check(outputs, batch)
    assert capfd.readouterr() == ("", "")


def test_text_classifiers(saved: dict[str, Path]) -> None:
    problem = load_model(saved["bert"], dtype="float64")
    assert isinstance(problem.task, Classification)
    assert problem.labels is not None
    assert problem.labels.names == ("bad", "good", "so-so")
    assert (problem.kind, problem.context, problem.num_labels) == ("text-classifier", 24, 3)
    rows = RowList([{"text": "the cat", "label": "good"}, {"text": "the dog sat", "label": 2}], name="data")
    train = ClassifiedTexts(rows, problem.tokenizer, labels=problem.labels, max_length=problem.context)
    batch = problem.task.collate([train[0], train[1]])
    outputs = problem.task.outputs(problem.model, batch)
    assert outputs.dtype == torch.float64
    problem.task.check(outputs, batch)


def test_image_classifiers(saved: dict[str, Path]) -> None:
    problem = load_model(saved["vit"])
    assert (problem.kind, problem.tokenizer, problem.labels, problem.num_labels) == (
        "image-classifier",
        None,
        None,
        2,
    )
    assert problem.directory == saved["vit"]


def test_the_librarys_settings_are_put_back(saved: dict[str, Path]) -> None:
    from transformers.utils import logging

    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    load_model(saved["gpt2"])
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before


@pytest.mark.parametrize(("dtype", "expected"), [("auto", torch.float32), (torch.bfloat16, torch.bfloat16)])
def test_dtypes(dtype: Any, expected: torch.dtype, saved: dict[str, Path]) -> None:
    assert next(load_model(saved["gpt2"], dtype=dtype).model.parameters()).dtype == expected


@pytest.mark.parametrize("dtype", ["float31", torch.int64])
def test_dtypes_that_do_not_exist(dtype: Any, saved: dict[str, Path]) -> None:
    with pytest.raises(OptionError, match=r"use one of float64, float32, bfloat16, float16, auto"):
        load_model(saved["gpt2"], dtype=dtype)


# --- damaged directories -------------------------------------------------------------------------------------


def test_missing_weights(gpt2: Path) -> None:
    (gpt2 / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"cannot be loaded: .*no file named model\.safetensors.*download"):
        load_model(gpt2)


def test_missing_shards(llama: Path) -> None:
    shards = sorted(llama.glob("model-*.safetensors"))
    assert len(shards) > 1
    shards[1].unlink()
    with pytest.raises(ModelError, match=rf"cannot be loaded: No such file.*{shards[1].name}; .*download"):
        load_model(llama)
    shards[0].write_bytes(shards[0].read_bytes()[:-1])
    with pytest.raises(ModelError, match=rf"{shards[0].name} is damaged or cut off: .*; download"):
        load_model(llama)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (slice(-100), "file not fully covered"),
        (slice(100), "header"),
        (slice(0), "header"),
        (b"\x04" + bytes(7) + b"abcd", "invalid JSON in header"),
    ],
)
def test_damaged_weights(content: slice | bytes, reason: str, gpt2: Path) -> None:
    path = gpt2 / "model.safetensors"
    path.write_bytes(path.read_bytes()[content] if isinstance(content, slice) else content)
    with pytest.raises(
        ModelError, match=rf"model\.safetensors is damaged or cut off: .*{reason}.*; download the model again"
    ):
        load_model(gpt2)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
def test_git_lfs_pointers(name: str, gpt2: Path) -> None:
    (gpt2 / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(
        ModelError, match=rf"{name} is a Git LFS pointer, not the file itself; run `git lfs pull`"
    ):
        load_model(gpt2)


def test_configurations_that_cannot_be_used(gpt2: Path) -> None:
    config = gpt2 / "config.json"
    whole = config.read_text()
    for change, match in [
        (
            {"architectures": ["T5ForConditionalGeneration"]},
            "has the architecture T5ForConditionalGeneration; known",
        ),
        (
            {"architectures": None},
            r"has no architecture in its config\.json; known are causal language models",
        ),
        ({"quantization_config": {"bits": 4}}, "holds quantised weights, which have no derivatives"),
        ({"model_type": "no-such-type"}, "cannot be loaded: .*no-such-type"),
        ({"n_embd": 32}, "wrong shape|cannot be loaded"),
        ({"n_layer": 2}, r"has no weights for transformer\.h\.1\.\S+ and \d+ more, which would be random"),
    ]:
        config.write_text(whole)
        edit(config, **change)
        with pytest.raises(ModelError, match=match):
            load_model(gpt2)
    config.write_text("{")
    with pytest.raises(ModelError, match=r"cannot be loaded: .*config\.json' is not a valid JSON file"):
        load_model(gpt2)
    config.unlink()
    with pytest.raises(ModelError, match=r"has no config\.json, so it is not a Hugging Face model"):
        load_model(gpt2)


def test_regression_models_need_a_task(tmp_path: Path) -> None:
    with pytest.raises(
        ModelError, match="is a model for regression, with 1 outputs; write a function that returns"
    ):
        load_model(classifier_directory(tmp_path, num_labels=1))


# --- tokenizers ----------------------------------------------------------------------------------------------


def test_a_tokenizer_with_too_many_tokens(tmp_path: Path) -> None:
    path = gpt2_directory(tmp_path, rows=100)
    largest = len(byte_level()) - 1
    with pytest.raises(ModelError, match=rf"its largest token id is {largest}, the model embeds 100 tokens"):
        load_model(path)


def test_a_tokenizer_with_too_few_tokens(tmp_path: Path) -> None:
    path = gpt2_directory(tmp_path, rows=2000)
    count = len(byte_level())
    with pytest.raises(
        ModelError, match=rf"it has {count} tokens, the model embeds 2000; .*check_vocabulary=False"
    ):
        load_model(path)
    assert load_model(path, check_vocabulary=False).tokenizer is not None


def test_a_vocabulary_rounded_up_is_fine(tmp_path: Path) -> None:
    assert load_model(gpt2_directory(tmp_path, rows=len(byte_level()) + 12)).kind == "language-model"


def test_a_tokenizer_that_knows_nothing(gpt2: Path, tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(
        models.WordLevel({"<unk>": 0, **{f"w{n}": n for n in range(1, 290)}}, unk_token="<unk>")
    )
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>").save_pretrained(tmp_path / "other")
    with pytest.raises(
        ModelError, match=r"turns '.*' into unknown tokens only; its files are damaged or belong to"
    ):
        load_model(gpt2, tokenizer=tmp_path / "other")


def test_a_missing_tokenizer_and_one_from_elsewhere(gpt2: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.move(gpt2 / name, tmp_path / "elsewhere" / name)
    with pytest.raises(
        ModelError, match=r"gpt2 has no tokenizer .*; put the model's tokenizer files .*--tokenizer"
    ):
        load_model(gpt2)
    assert len(load_model(gpt2, tokenizer=tmp_path / "elsewhere").tokenizer) == len(byte_level())


# --- names and functions -------------------------------------------------------------------------------------


def test_names_are_fetched_only_if_allowed(monkeypatch: pytest.MonkeyPatch, saved: dict[str, Path]) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    with pytest.raises(ModelError, match=r"there is no directory 'someone/gpt2'; .*--allow-download"):
        load_model("someone/gpt2")
    asked = []
    for loader in (AutoConfig, AutoModelForCausalLM, AutoTokenizer):
        original = loader.from_pretrained

        def instead(name: str, original: Any = original, **options: Any) -> Any:
            asked.append(name)
            return original(saved["gpt2"], **(options | {"local_files_only": True}))

        monkeypatch.setattr(loader, "from_pretrained", instead)
    assert load_model("someone/gpt2", allow_download=True).context == 32
    assert {name for name in asked if isinstance(name, str)} == {"someone/gpt2"}

    def failing(name: str, **options: Any) -> Any:
        raise OSError("no such repository\nmore")

    monkeypatch.setattr(AutoConfig, "from_pretrained", failing)
    with pytest.raises(
        ModelError, match="'someone/gpt3' cannot be loaded: no such repository; check the name"
    ):
        load_model("someone/gpt3", allow_download=True)


MODULE = """
import torch
from torch import nn
from whence import Classification
from whence.exhibit import Exhibit
from whence.sources import Problem
import helper_of_mine

class Wide(nn.Linear):
    pass

def model():
    return Wide(4, helper_of_mine.OUTPUTS).eval()

def whole():
    data = [(torch.zeros(4), 1), (torch.ones(4), 0)]
    return Problem(model(), Classification(), train=data, queries=data[:1], train_exhibits=[Exhibit(id="a"), Exhibit()])

def training():
    return nn.Linear(4, 3)

def nothing():
    return {"model": model()}

def broken():
    return 1 / 0

def greedy(size):
    return model()
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "helper_of_mine.py").write_text("OUTPUTS = 3\n")
    (tmp_path / "models_of_mine.py").write_text(MODULE)
    return tmp_path / "models_of_mine.py"


def test_functions_that_return_a_model(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = load_model(f"{mine}:model")
    assert (problem.kind, problem.task, problem.train) == ("custom", None, None)
    assert problem.model.weight.shape == (3, 4)
    monkeypatch.chdir(mine.parent)
    assert load_model("models_of_mine:model").model.weight.shape == (3, 4)


def test_functions_that_return_everything(mine: Path) -> None:
    from whence.sources import ListedExamples

    problem = load_model(f"{mine}:whole")
    assert isinstance(problem.task, Classification)
    examples = ListedExamples(problem.train, name="train", exhibits=problem.train_exhibits)
    assert list(examples.ids) == ["a", "train#2"]
    assert examples[1][1] == 0
    assert examples.find("a") == (0,)


@pytest.mark.parametrize(
    ("name", "match"),
    [
        (":training", r"returned a model in training mode; return model\.eval\(\)"),
        (":nothing", r"returned a dict; it must return a torch\.nn\.Module or a whence\.sources\.Problem"),
        (
            ":broken",
            r"failed at .*models_of_mine\.py:\d+ with ZeroDivisionError: division by zero; repair it",
        ),
        (":greedy", r"failed at .* with TypeError: greedy\(\) missing 1 required"),
        (":absent", r"has no function 'absent'; it has .*model"),
        (
            "",
            r"is a file, and the model cannot be told from it; .*a function that builds it, as file.py:function",
        ),
        (":", "must be module:function or path/to/file.py:function"),
    ],
)
def test_functions_that_do_not_work(name: str, match: str, mine: Path) -> None:
    with pytest.raises(InputError, match=match):
        load_model(f"{mine}{name}")


def test_modules_that_cannot_be_imported(mine: Path, tmp_path: Path) -> None:
    (tmp_path / "torn.py").write_text("import absent_library\n")
    for spec, match in [
        (f"{tmp_path}/nowhere.py:model", r"there is no file '.*nowhere\.py'"),
        (
            f"{tmp_path}/torn.py:model",
            r"torn\.py cannot be imported at .*torn\.py:1 with ModuleNotFoundError",
        ),
        ("absent_package.models:make", r"there is no module 'absent_package\.models'; check the name"),
    ]:
        with pytest.raises(OptionError, match=match):
            load_model(spec)
    (tmp_path / "weights.pt").write_bytes(b"x")
    with pytest.raises(ModelError, match="give the model's directory, or a function that builds it"):
        load_model(tmp_path / "weights.pt")


def test_transformers_is_named_where_it_is_missing(
    saved: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(OptionError, match=r'transformers is needed .*pip install "whence\[hf\]"'):
        load_model(saved["gpt2"])


def test_context_lengths() -> None:
    from types import SimpleNamespace as Config

    assert context_length(Config(n_positions=7)) == 7
    assert context_length(Config(text_config=Config(max_position_embeddings=9))) == 9
    assert context_length(Config()) is None


def test_nothing_optional_is_imported_with_the_package() -> None:
    import subprocess

    libraries = "{'transformers', 'sklearn', 'datasets', 'PIL', 'pyarrow', 'tokenizers'}"
    code = f"import sys, whence.sources, whence.sources.candidates; sys.exit(str({libraries} & set(sys.modules) or ''))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).stderr.strip() == b""
