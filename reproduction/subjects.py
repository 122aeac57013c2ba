"""What the paper's tables and figures are about: models with their data and the parameters that count.

The paper's own are read from directories or the hub (profile ``paper``); real ones that package registries carry stand
in for them offline, and small ones trained on the spot in tests. From here on the code is the same for all.

Parameters are the paper's subsets: language models without embeddings and head, convolutional networks without
BatchNorm.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from reproduction.finding import Profile
from whence.errors import OptionError
from whence.model.choice import Product
from whence.model.gauss_newton import GaussNewton
from whence.sources import Labels, Problem
from whence.tasks import Classification, LanguageModeling, Task
from whence.tasks.categorical import IGNORED

__all__ = ["PAPER", "Subject", "inner_parameters", "load_subject", "subjects"]

Kind = Literal["vision", "language"]
_PASSAGE = 256  # tokens, as in the paper's appendix


@dataclass(frozen=True)
class Subject:
    """A model, its training data and the part of its parameters that is studied.

    Attributes:
        name, data_name: for tables.
        kind: ``"vision"`` or ``"language"``.
        model: in evaluation mode.
        task: what its outputs mean.
        train, test: data sets; a language model's test set may be empty.
        params: names of the parameters.
        damping: λ, or a part of λmax.
        tokenizer: of a language model: called with a text, gives its ``input_ids``, as the model wants them to begin,
            and ``labels`` where not all are predicted.
        certain: whether the model is certain of nearly all of its training data, so that batches should be drawn by
            curvature (`whence.model.importance`).
        importance: the chances of examples to be drawn, once measured; None for equal ones.
        note: what a reader should know about it.
    """

    name: str
    data_name: str
    kind: Kind
    model: nn.Module
    task: Task
    train: Any
    test: Any
    params: frozenset[str]
    damping: float | str
    tokenizer: Any = None
    note: str = ""
    certain: bool = False
    importance: Tensor | None = None

    def operator(self, *, product: Product = "auto", uniform: bool = False) -> GaussNewton:
        """The Gauss-Newton Hessian over the training data; ``uniform`` draws batches with equal chances anyhow."""
        gnh = GaussNewton(self.model, self.task, self.train, params=self.params.__contains__, product=product)
        gnh.terms.draw_by(None if uniform else self.importance)
        return gnh


def inner_parameters(model: nn.Module) -> frozenset[str]:
    """All trainable parameters but those of BatchNorm, embeddings, and a language model's head."""
    outer: set[int] = set()
    head = getattr(model, "get_output_embeddings", lambda: None)()
    for module in model.modules():
        if isinstance(module, (_BatchNorm, nn.Embedding)) or module is head:
            outer |= {id(parameter) for parameter in module.parameters(recurse=False)}
    return frozenset(n for n, p in model.named_parameters() if p.requires_grad and id(p) not in outer)


# --- small ones, trained here ----------------------------------------------------------------------------


def _digits_mlp() -> Subject:
    from whence.demo.digits import load_digits_with_flipped_labels, train_digits

    digits = load_digits_with_flipped_labels()
    model = train_digits(digits.train)
    return Subject(
        "MLP", "digits", "vision", model, Classification(), digits.train, digits.test,
        inner_parameters(model), "lambda_max/100", note="trained here in seconds; 5% of its labels are wrong",
    )  # fmt: skip


def _pydoc_llama(epochs: int) -> Subject:
    from whence.demo.corpus import corpus, passages, train_tokenizer
    from whence.demo.text import train_model

    documents = corpus()
    tokenizer = train_tokenizer(documents)
    data = passages(documents, tokenizer)
    model = train_model(data, epochs=epochs)
    train = [{"input_ids": passage.input_ids} for passage in data]
    return Subject(
        "Llama, 2 layers", "Python's manual", "language", model, LanguageModeling(), train, [],
        inner_parameters(model), "lambda_max/50", tokenizer=lambda text: {"input_ids": tokenizer.encode(text).ids},
        note=f"trained here for {epochs} passes",
    )  # fmt: skip


# --- real ones that registries carry ---------------------------------------------------------------------


def _resnet56() -> Subject:
    from reproduction.assets import TRAINED_ON, cifar10, resnet56

    model = resnet56()
    return Subject(
        "ResNet-56", "CIFAR-10", "vision", model, Classification(),
        cifar10("train").select(torch.arange(TRAINED_ON)), cifar10("test"), inner_parameters(model), "lambda_max/50",
        note="trained to the end on these 45,000 images by somebody else, 93.2% on the test images; batches drawn by "
        "curvature",
        certain=True,
    )  # fmt: skip


def _smollm2() -> Subject:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from reproduction.assets import enwik8, smollm2_directory

    directory = smollm2_directory()
    model: nn.Module = AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=False)
    model.eval()
    tokenizer = _Beginning(AutoTokenizer.from_pretrained(directory, trust_remote_code=False))
    text = enwik8(4_000_000).decode("utf-8", errors="ignore")
    return Subject(
        "SmolLM2-135M-Instruct", "enwik8", "language", model, LanguageModeling(),
        tokenizer.passages(text, _PASSAGE), [], inner_parameters(model), _PAPER_DAMPING, tokenizer=tokenizer,
        note="4-bit weights, dequantised; the text is not what it was trained on, though much of it surely was",
    )  # fmt: skip


class _Beginning:
    """Texts as the model is used to: a line of their own after the token that texts begin with.

    The beginning is not predicted. Why it is needed: docs/math.md, 'Texts that begin in the middle'.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._before = [tokenizer.bos_token_id, *tokenizer("\n")["input_ids"]]

    def __call__(self, text: str) -> dict[str, list[int]]:
        return self._after_beginning(self._tokenizer(text)["input_ids"])

    def _after_beginning(self, ids: list[int]) -> dict[str, list[int]]:
        return {"input_ids": self._before + ids, "labels": [IGNORED] * len(self._before) + ids}

    def passages(self, text: str, length: int) -> list[dict[str, Tensor]]:
        """A long text cut into examples of so many tokens each."""
        own = length - len(self._before)
        parts = torch.tensor(self._tokenizer(text)["input_ids"]).split(own)
        return [
            {name: torch.tensor(values) for name, values in self._after_beginning(part.tolist()).items()}
            for part in parts
            if len(part) == own
        ]


# --- the paper's own -------------------------------------------------------------------------------------

#: Directory (and name on the hub) of each of the paper's models; data are in ``imagenet`` and ``openwebtext``.
PAPER: dict[str, tuple[str, str, Kind]] = {
    "resnet-18": ("ResNet-18", "microsoft/resnet-18", "vision"),
    "resnet-50": ("ResNet-50", "microsoft/resnet-50", "vision"),
    "opt-1.3b": ("OPT-1.3B", "facebook/opt-1.3b", "language"),
    "llama-7b": ("Llama-7B", "huggyllama/llama-7b", "language"),
    "mistral-7b": ("Mistral-7B", "mistralai/Mistral-7B-v0.1", "language"),
}
_PAPER_DAMPING = 5.0
#: Name on the hub of the data for each kind, and its splits.
_PAPER_DATA: dict[Kind, tuple[str, str, tuple[str, ...]]] = {
    "vision": ("imagenet", "ILSVRC/imagenet-1k", ("train", "validation")),
    "language": ("openwebtext", "Skylion007/openwebtext", ("train",)),
}
#: Of OpenWebText's eight million: 110 million tokens, hundreds of times what any of the estimates draw.
_DOCUMENTS = 100_000


def _from_paper(key: str, inputs: Path | None, allow_download: bool) -> Subject:
    from whence.sources import Passages, hub_dataset, load_model, open_records

    title, hub, kind = PAPER[key]
    directory = _input(inputs, key, hub, allow_download)
    problem = load_model(directory or hub, allow_download=directory is None)
    params = inner_parameters(problem.model)
    folder, data_hub, splits = _PAPER_DATA[kind]
    data = _input(inputs, folder, "the training data", allow_download)
    if kind == "vision":
        train, test = _images(data, problem) if data else _hub_images(data_hub, splits, problem)
        return Subject(
            title, "ImageNet", kind, problem.model, Classification(), train, test, params, _PAPER_DAMPING
        )
    length = min(problem.context or _PASSAGE, _PASSAGE)
    records = open_records(data) if data else hub_dataset(data_hub, split=splits[0])
    documents = records.first(_DOCUMENTS)
    return Subject(
        title, "OpenWebText", kind, problem.model, LanguageModeling(),
        Passages(documents, problem.tokenizer, max_length=length, skip_empty=True), [], params, _PAPER_DAMPING,
        tokenizer=problem.tokenizer, note=f"the first {len(documents):,} documents",
    )  # fmt: skip


def _input(inputs: Path | None, name: str, what: str, allow_download: bool) -> Path | None:
    """A directory of the inputs, or None where it is to be fetched from the hub."""
    if inputs is not None and (inputs / name).exists():
        return inputs / name
    if allow_download:
        return None
    place = f"directory of inputs with {name} in it" if inputs is None else f"directory {inputs / name}"
    raise OptionError(
        f"there is no {place}; put {what} there, name another directory with --inputs, or allow fetching it "
        "(--allow-download)"
    )


def _images(data: Path, problem: Problem) -> tuple[Any, Any]:
    """Training and validation images of a directory."""
    from whence.sources import open_images

    parts = [data / part for part in ("train", "val") if (data / part).is_dir()] or [data]
    read = partial(open_images, transform=problem.directory, labels=_classes(parts[0], problem))
    return read(parts[0]), read(parts[-1])


def _hub_images(hub: str, splits: tuple[str, ...], problem: Problem) -> tuple[Any, Any]:
    """Training and validation images of the hub."""
    from whence.sources import hub_dataset, open_images

    train, test = (
        open_images(
            hub_dataset(hub, split=split), transform=problem.directory, mode="RGB", labels=problem.labels
        )
        for split in splits
    )
    return train, test


def _classes(train: Path, problem: Problem) -> Labels | None:
    """The model's classes; as ImageNet's folders are named, by WordNet number, they come in the order of the names."""
    folders = sorted(place.name for place in train.iterdir() if place.is_dir())
    if not folders or not all(re.fullmatch(r"n\d{8}", name) for name in folders):
        return problem.labels
    if len(folders) != problem.num_labels:
        raise OptionError(
            f"{train} has {len(folders)} folders, the model {problem.num_labels} classes; put all of ImageNet's there"
        )
    return Labels(tuple(folders))


# --- by profile ------------------------------------------------------------------------------------------

_BUILDERS: dict[str, Callable[[], Subject]] = {
    "digits-mlp": _digits_mlp,
    "pydoc-llama": partial(_pydoc_llama, epochs=2),
    "resnet-56": _resnet56,
    "smollm2-135m": _smollm2,
}


def subjects(profile: Profile, kind: Kind | None = None) -> tuple[str, ...]:
    """The keys of a profile's subjects, those of one kind where given."""
    chosen: dict[Profile, dict[str, Kind]] = {
        "quick": {"digits-mlp": "vision", "pydoc-llama": "language"},
        "offline": {"resnet-56": "vision", "smollm2-135m": "language", "digits-mlp": "vision"},
        "paper": {key: row[2] for key, row in PAPER.items()},
    }
    return tuple(key for key, its in chosen[profile].items() if kind in (None, its))


def load_subject(key: str, *, inputs: Path | None = None, allow_download: bool = False) -> Subject:
    """The subject of this key; the paper's own from ``inputs/KEY``."""
    if key in _BUILDERS:
        return _BUILDERS[key]()
    if key not in PAPER:
        raise OptionError(f"there is no subject {key!r}; it is one of {', '.join([*_BUILDERS, *PAPER])}")
    return _from_paper(key, inputs, allow_download)
