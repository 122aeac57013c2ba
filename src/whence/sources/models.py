"""Models named on the command line: a Hugging Face directory, or a function that returns one.

Of a directory it is asked beforehand whether all files are there, and whole.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from whence.errors import ModelError, OptionError
from whence.exhibit import Exhibit
from whence.libraries import load_library
from whence.sources.files import refusing
from whence.sources.functions import call_function
from whence.sources.labels import Labels
from whence.sources.tokenizers import check_tokenizer, load_tokenizer
from whence.tasks import Classification, LanguageModeling, Task

__all__ = ["Problem", "context_length", "load_model"]

Kind = Literal["language-model", "text-classifier", "image-classifier", "custom"]
DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16")}
#: By how an architecture's name ends: what it is, and the class that loads it.
ARCHITECTURES: dict[str, tuple[Kind, str]] = {
    "ForCausalLM": ("language-model", "AutoModelForCausalLM"),
    "LMHeadModel": ("language-model", "AutoModelForCausalLM"),
    "ForSequenceClassification": ("text-classifier", "AutoModelForSequenceClassification"),
    "ForImageClassification": ("image-classifier", "AutoModelForImageClassification"),
}
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
        spec: a Hugging Face model directory; ``package.module:function`` or ``path/to/file.py:function``,
            called without arguments, which returns a module in evaluation mode or a `Problem`; or, with
            ``allow_download``, the name of a model on the Hugging Face hub.
        dtype: of a Hugging Face model's parameters; ``auto`` as they were saved.
        tokenizer: a directory, where the tokenizer is not beside the model.
        allow_download: whether names that are no directories may be fetched.
        check_vocabulary: whether to refuse a tokenizer whose vocabulary does not fit the model's.
    """
    chosen = _dtype(dtype)
    path = Path(spec).expanduser()
    local = path.is_dir()
    if path.is_file():
        remedy = (
            f"name its function, as {spec}:function"
            if path.suffix == ".py"
            else "give its directory, or a function that builds the model and loads the file"
        )
        raise ModelError(f"{spec} is a file, and the model cannot be told from it; {remedy}")
    if not local and ":" in str(spec):
        return _from_function(str(spec))
    if not local and not allow_download:
        raise ModelError(
            f"there is no directory {str(spec)!r}; check the name. If it is a model on the Hugging Face hub, allow "
            "fetching it (--allow-download); a function is written package.module:function"
        )
    source = str(path) if local else str(spec)
    kind, loader = _architecture(_read_config(path) if local else _fetch_config(source), source)
    if local:
        _check_files(path)
    with _quiet(load_library("transformers", "hf", "to load a Hugging Face model")) as transformers:
        model = _load_weights(getattr(transformers, loader), source, chosen, local)
        reader = None
        if kind != "image-classifier":
            reader = load_tokenizer(source if tokenizer is None else str(tokenizer), local=local)
            if check_vocabulary:
                check_tokenizer(reader, model)
        directory = path if local else None
        if kind == "image-classifier" and not local:
            # What images go through lies beside the model, in the library's cache.
            found = transformers.utils.cached_file(
                source, "preprocessor_config.json", _raise_exceptions_for_missing_entries=False
            )
            directory = None if found is None else Path(found).parent
    context = None if kind == "image-classifier" else context_length(model.config)
    if kind == "language-model":
        return Problem(
            model, LanguageModeling(), tokenizer=reader, context=context, kind=kind, directory=directory
        )
    return Problem(
        model,
        _classification(model.config, source),
        tokenizer=reader,
        labels=Labels.from_config(getattr(model.config, "id2label", None)),
        num_labels=int(model.config.num_labels),
        context=context,
        kind=kind,
        directory=directory,
    )


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


def _fetch_config(name: str) -> dict[str, Any]:
    transformers = load_library("transformers", "hf", "to load a Hugging Face model")
    with refusing(ModelError, f"the model {name!r} cannot be fetched", "check the name"):
        config: dict[str, Any] = transformers.AutoConfig.from_pretrained(name).to_dict()
    return config


def _architecture(config: dict[str, Any], source: str) -> tuple[Kind, str]:
    if config.get("quantization_config"):
        raise ModelError(
            f"{source} holds quantised weights, which have no gradients; give the model in floating point"
        )
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
    with refusing(ModelError, f"the model in {source} cannot be loaded", "save or download it again"):
        model, info = loader.from_pretrained(
            source, dtype=dtype, local_files_only=local, output_loading_info=True
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
            f"{source} is a model for {kind or 'regression'}, with {config.num_labels} outputs; write a function "
            "that returns a whence.sources.Problem with its task"
        )
    return Classification()


def _dtype(dtype: str | torch.dtype) -> Any:
    if dtype == "auto" or (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        return dtype
    if dtype not in DTYPES:
        raise OptionError(f"dtype is {str(dtype)!r}; use one of {', '.join(DTYPES)}, or auto")
    return DTYPES[str(dtype)]


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


# --- files of a model directory: are all there, and whole? -----------------------------------------------


def _read_config(directory: Path) -> dict[str, Any]:
    path = directory / "config.json"
    if not path.is_file():
        raise ModelError(
            f"{directory} has no config.json{_interrupted(directory)}, so it is not a Hugging Face model; give a "
            "directory written by save_pretrained, or a function as package.module:function"
        )
    return _read_object(path)


def _read_object(path: Path) -> dict[str, Any]:
    _check_pointer(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path} is not JSON ({error}); {AGAIN}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} holds no object; {AGAIN}")
    return content


def _check_files(directory: Path) -> None:
    """Raise `ModelError` unless the directory holds whole weights."""
    for path in sorted(directory.glob("*.json")):
        _check_pointer(path)
    for name in ("model.safetensors", "pytorch_model.bin"):
        index = directory / f"{name}.index.json"
        if (directory / name).is_file():
            return _check_weights(directory / name)
        if index.is_file():
            shards = _read_object(index).get("weight_map")
            if not isinstance(shards, dict) or not all(isinstance(shard, str) for shard in shards.values()):
                raise ModelError(f"{index} does not list the weights' files; {AGAIN}")
            for shard in sorted(set(shards.values())):
                if not (directory / shard).is_file():
                    raise ModelError(
                        f"{shard}, which {index} lists, is missing{_interrupted(directory)}; {AGAIN}"
                    )
                _check_weights(directory / shard)
            return None
    raise ModelError(
        f"{directory} holds no weights: neither model.safetensors nor model.safetensors.index.json is there"
        f"{_interrupted(directory)}; {AGAIN}"
    )


def _check_weights(path: Path) -> None:
    """A safetensors file says in its header how long it is: 8 bytes, the header's length; the header; data."""
    _check_pointer(path)
    if path.suffix != ".safetensors":
        return
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else None
        if length is None or 8 + length > size:
            raise ModelError(f"{path} is cut off after {size:,} bytes, inside its header; {AGAIN}")
        try:
            header = json.loads(file.read(length))
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise ModelError(f"{path} is not a safetensors file: its header is no JSON; {AGAIN}") from error
    expected = 8 + length + max(ends, default=0)
    if size < expected:
        raise ModelError(f"{path} is cut off: it has {size:,} bytes of {expected:,}; {AGAIN}")


def _check_pointer(path: Path) -> None:
    with path.open("rb") as file:
        start = file.read(len(LFS_POINTER))
    if start == LFS_POINTER:
        raise ModelError(
            f"{path} is a Git LFS pointer, not the file itself; run `git lfs pull` in {path.parent}, or download "
            "the model again"
        )
    if not start:
        raise ModelError(f"{path} is empty; {AGAIN}")


def _interrupted(directory: Path) -> str:
    """What to add to a message where a download was broken off."""
    parts = sorted(directory.rglob("*.incomplete"))
    return f", but {parts[0].name} is: a download was interrupted" if parts else ""
