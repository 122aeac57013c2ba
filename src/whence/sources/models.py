"""Models named on the command line: a Hugging Face directory, or a function that returns one.

Of a directory's files it is asked beforehand whether they are whole.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from torch import nn

from whence.errors import ModelError, OptionError
from whence.exhibit import Exhibit
from whence.libraries import load_library
from whence.sources.files import refusing
from whence.sources.functions import call_function
from whence.sources.labels import Labels
from whence.sources.tokenizers import check_tokenizer, load_tokenizer
from whence.tasks import Classification, LanguageModeling, Task

__all__ = ["Problem", "context_length", "load_model", "task_of"]

Kind = Literal["language-model", "text-classifier", "image-classifier", "custom"]
DTYPES = ("float64", "float32", "bfloat16", "float16", "auto")
#: By how an architecture's name ends: what it is, and the class that loads it.
ARCHITECTURES: dict[str, tuple[Kind, str]] = {
    "ForCausalLM": ("language-model", "AutoModelForCausalLM"),
    "LMHeadModel": ("language-model", "AutoModelForCausalLM"),
    "ForSequenceClassification": ("text-classifier", "AutoModelForSequenceClassification"),
    "ForImageClassification": ("image-classifier", "AutoModelForImageClassification"),
}
ADAPTER = "adapter_config.json"
LFS_POINTER = b"version https://git-lfs"
AGAIN = "download the model again (interrupted downloads can be resumed)"


@dataclass(frozen=True)
class Problem:
    """A model and what comes with it. A user's function may return one that gives everything.

    Attributes:
        model: a module in evaluation mode.
        task: what its outputs mean; None where the command line says it.
        train, queries: data sets; None where the command line names them.
        train_exhibits, query_exhibits: what to show of their examples: one each, or a function of the position.
        tokenizer: of a language model or text classifier.
        labels: the classes' names, where they are known.
        num_labels: a classifier's outputs.
        context: tokens that the model reads at most.
        kind: what the model is.
        directory: where it was loaded from; its image processor, if any, is there.

    Example:
        >>> from whence import Classification
        >>> problem = Problem(nn.Linear(4, 3).eval(), Classification(), train=[(torch.zeros(4), 1)])
        >>> problem.kind
        'custom'
    """

    model: nn.Module
    task: Task | None = None
    train: Any = None
    queries: Any = None
    train_exhibits: Sequence[Exhibit] | Callable[[int], Exhibit] | None = None
    query_exhibits: Sequence[Exhibit] | Callable[[int], Exhibit] | None = None
    tokenizer: Any = None
    labels: Labels | None = None
    num_labels: int | None = None
    context: int | None = None
    kind: Kind = "custom"
    directory: Path | None = None


def load_model(
    spec: str | Path,
    *,
    dtype: str | torch.dtype = "float32",
    tokenizer: str | Path | None = None,
    allow_download: bool = False,
    check_vocabulary: bool = True,
) -> Problem:
    """The model that ``spec`` names, ready to be attributed: in evaluation mode, its files and tokenizer checked.

    Args:
        spec: a Hugging Face model directory, or one of PEFT's with an adapter, whose base is a directory that it names;
            ``package.module:function`` or ``path/to/file.py:function``,
            called without arguments, which returns a module in evaluation mode or a `Problem`; or, with
            ``allow_download``, the name of a model on the Hugging Face hub.
        dtype: of a Hugging Face model's parameters; ``auto`` as they were saved.
        tokenizer: a directory, where the tokenizer is not beside the model.
        allow_download: whether names that are no directories may be fetched.
        check_vocabulary: whether to refuse a tokenizer whose vocabulary does not fit the model's.
    """
    chosen = str(dtype).removeprefix("torch.")
    if chosen not in DTYPES:
        raise OptionError(f"dtype is {str(dtype)!r}; use one of {', '.join(DTYPES)}")
    path = Path(spec).expanduser()
    local = path.is_dir()
    if path.is_file():
        raise ModelError(
            f"{spec} is a file, and the model cannot be told from it; give the model's directory, or a function that "
            "builds it, as file.py:function"
        )
    if not local and ":" in str(spec):
        return _from_function(str(spec))
    if not local and not allow_download:
        raise ModelError(
            f"there is no directory {str(spec)!r}; check the name. If it is a model on the Hugging Face hub, allow "
            "fetching it (--allow-download); a function is written package.module:function"
        )
    source, adapter = str(path) if local else str(spec), None
    if local and (path / ADAPTER).is_file() and not (path / "config.json").is_file():
        adapter, source = path, _base_of(path, allow_download)
        local, path = Path(source).is_dir(), Path(source)
    if local:
        _check_files(path)
    with _quiet(load_library("transformers", "hf", "to load a Hugging Face model")) as transformers:
        with refusing(ModelError, f"the model {source!r} cannot be loaded", f"check the name, or {AGAIN}"):
            config = transformers.AutoConfig.from_pretrained(
                source, local_files_only=local, trust_remote_code=False
            )
        if adapter is None and getattr(config, "quantization_config", None):
            raise ModelError(
                f"{source} holds quantised weights, which have no derivatives; give the model in floating point, or "
                "the directory of an adapter that was trained on it"
            )
        kind, loader = _architecture(config.to_dict(), source)
        model = _load_weights(getattr(transformers, loader), source, chosen, local)
        if adapter is not None:
            model = _with_adapter(model, adapter)
        reader = None
        if kind != "image-classifier":
            own = adapter is not None and (adapter / "tokenizer_config.json").is_file()
            beside = str(adapter) if own else source
            reader = load_tokenizer(beside if tokenizer is None else str(tokenizer), local=local or own)
            if check_vocabulary:
                check_tokenizer(reader, model)
        directory = path if local else None
        if kind == "image-classifier" and not local:
            # What images go through lies beside the model, in the library's cache.
            found = transformers.utils.cached_file(
                source, "preprocessor_config.json", _raise_exceptions_for_missing_entries=False
            )
            directory = None if found is None else Path(found).parent
    classifies = kind != "language-model"
    return Problem(
        model,
        _classification(model.config, source) if classifies else LanguageModeling(),
        tokenizer=reader,
        labels=Labels.from_config(getattr(model.config, "id2label", None)) if classifies else None,
        num_labels=int(model.config.num_labels) if classifies else None,
        context=None if kind == "image-classifier" else context_length(model.config),
        kind=kind,
        directory=directory,
    )


def task_of(model: nn.Module) -> Task:
    """What the outputs of a Hugging Face model mean, read off its class; adapters stand for their base."""
    base = getattr(model, "get_base_model", lambda: model)()
    config = getattr(base, "config", None)
    name = type(base).__name__
    if config is None:
        raise ModelError(f"{name} is not a Hugging Face model; say what its outputs mean by task=")
    kind, _ = _architecture({"architectures": [name]}, f"the model {name}")
    return LanguageModeling() if kind == "language-model" else _classification(config, f"the model {name}")


def context_length(config: Any) -> int | None:
    """How many tokens a model with this configuration reads; None if it does not say."""
    for holder in (config, getattr(config, "text_config", None)):
        for name in (
            "max_position_embeddings",
            "n_positions",
            "max_sequence_length",
            "max_seq_len",
            "seq_length",
        ):
            value = getattr(holder, name, None)
            if isinstance(value, int) and value > 0:
                return value
    return None


def _from_function(spec: str) -> Problem:
    result = call_function(spec, "the model")
    problem = Problem(result) if isinstance(result, nn.Module) else result
    if not isinstance(problem, Problem) or not isinstance(problem.model, nn.Module):
        raise ModelError(
            f"{spec} returned a {type(result).__name__}; it must return a torch.nn.Module or a "
            "whence.sources.Problem that holds one"
        )
    if problem.model.training:
        raise ModelError(f"{spec} returned a model in training mode; return model.eval()")
    return problem


def _base_of(directory: Path, allow_download: bool) -> str:
    """The base that an adapter was trained on, as its configuration names it; beside it where the path is relative."""
    named = None
    with refusing(ModelError, f"{directory / ADAPTER} cannot be read", "save the adapter again"):
        named = json.loads((directory / ADAPTER).read_text("utf-8")).get("base_model_name_or_path")
    if not isinstance(named, str) or not named:
        raise ModelError(
            f"{directory / ADAPTER} does not name the adapter's base model; write its directory there as "
            "base_model_name_or_path"
        )
    for found in (Path(named).expanduser(), directory / named):
        if found.is_dir():
            return str(found)
    if not allow_download:
        raise ModelError(
            f"the adapter in {directory} belongs to {named!r}, which is no directory here; give its directory as "
            f"base_model_name_or_path in {ADAPTER}, or allow fetching it (--allow-download)"
        )
    return named


def _with_adapter(model: nn.Module, directory: Path) -> Any:
    """The model with an adapter on it, whose parameters alone are trainable."""
    peft = load_library("peft", "hf", "to load an adapter")
    if not any(directory.glob("adapter_model*.safetensors")):
        raise ModelError(
            f"{directory} has no adapter_model.safetensors; save the adapter again with safe_serialization=True"
        )
    with refusing(ModelError, f"the adapter in {directory} cannot be loaded", "save it again for this base"):
        return peft.PeftModel.from_pretrained(model, str(directory), is_trainable=True).eval()


def _architecture(config: dict[str, Any], source: str) -> tuple[Kind, str]:
    names = config.get("architectures") or []
    for name in names:
        for ending, found in ARCHITECTURES.items():
            if str(name).endswith(ending):
                return found
    described = f"the architecture {names[0]}" if names else "no architecture in its config.json"
    raise ModelError(
        f"{source} has {described}; known are causal language models, sequence classifiers and image "
        "classifiers. For others, write a function that returns a whence.sources.Problem with the model and task"
    )


def _load_weights(loader: Any, source: str, dtype: Any, local: bool) -> Any:
    """The model in evaluation mode; refused if parameters are left out, which would be random numbers."""
    with refusing(ModelError, f"the model in {source} cannot be loaded", f"save it again, or {AGAIN}"):
        model, info = loader.from_pretrained(
            source, dtype=dtype, local_files_only=local, output_loading_info=True, trust_remote_code=False
        )
    for key, problem in (
        ("missing_keys", "has no weights for"),
        ("mismatched_keys", "has weights of the wrong shape for"),
    ):
        names = sorted(str(entry[0] if isinstance(entry, tuple) else entry) for entry in info.get(key) or ())
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise ModelError(
                f"{source} {problem} {names[0]}{more}, which would be random numbers; give a model that was "
                "trained and saved for this task"
            )
    return model.eval()


def _classification(config: Any, source: str) -> Task:
    kind = getattr(config, "problem_type", None)
    if kind not in (None, "single_label_classification") or config.num_labels < 2:
        raise ModelError(
            f"{source} is a model for {kind or 'regression'}, with {config.num_labels} outputs; write a function that "
            "returns a whence.sources.Problem with its task (Regression, or BinaryClassification for several labels) "
            "and data"
        )
    return Classification()


@contextmanager
def _quiet(transformers: Any) -> Iterator[Any]:
    """The library without its progress bars and notes; what matters in them is checked and raised."""
    logging = transformers.utils.logging
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield transformers
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _check_files(directory: Path) -> None:
    """Raise `ModelError` at a file of the model that is not whole, before any of them is loaded."""
    if not (directory / "config.json").is_file():
        raise ModelError(
            f"{directory} has no config.json, so it is not a Hugging Face model; give a directory written by "
            "save_pretrained, or a function as package.module:function"
        )
    for path in sorted(p for p in directory.iterdir() if p.suffix in (".json", ".safetensors", ".bin")):
        with path.open("rb") as file:
            if file.read(len(LFS_POINTER)) == LFS_POINTER:
                raise ModelError(
                    f"{path} is a Git LFS pointer, not the file itself; run `git lfs pull` in {directory}, or {AGAIN}"
                )
    for path in sorted(directory.glob("model*.safetensors")):
        with refusing(ModelError, f"{path} is damaged or cut off", AGAIN):
            safe_open(path, "pt")
