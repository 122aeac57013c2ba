"""The works that scores are judged on: real data, a model, and the training that made it.

A work can be trained on any part of its data with any seed, as `whence.validation.retrain` asks, so that scores can be
compared with what retraining does. Works differ in everything that could decide how much damping is right: certain and
uncertain models, SGD and Adam and AdamW, short and long training, weight decay, classification, regression, language.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from whence import Classification, LanguageModeling, Regression
from whence.tasks import Task

__all__ = [
    "WORKS",
    "Checkpoint",
    "Trained",
    "Work",
    "flip",
    "mean_loss",
    "mean_loss_of",
    "mislabelled",
    "mislabelled_digits",
    "work",
]


@dataclass(frozen=True)
class Data:
    """Examples as tensors: inputs and targets of classification and regression, rows of tokens of a language model."""

    train: tuple[Tensor, ...]
    test: tuple[Tensor, ...]


#: A model's state, and the learning rate of the step that led there.
Checkpoint = tuple[dict[str, Tensor], float]


@dataclass(frozen=True)
class Trained:
    """A trained model, and what is known of its training.

    Attributes:
        model: in evaluation mode.
        optimizer: as it was after the last step.
        rates: the learning rate of every step.
        checkpoints: the model's state at some steps, with the learning rate there; only where they were asked for.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    rates: tuple[float, ...]
    checkpoints: tuple[Checkpoint, ...] = ()


@dataclass(frozen=True)
class Work:
    """A model's architecture, data and training.

    Attributes:
        name: on the command line and of its files.
        about: in a few words, for tables.
        task: what outputs mean.
        data: where the examples come from.
        build: the untrained model, from torch's global random numbers.
        optimizer: from parameters.
        epochs, batch: of training.
        cosine: whether the rate falls to zero; else it stays.
        queries: how many test examples are asked about.
        halves, seeds: of the ground truth.
        clip: of gradients' norms.
    """

    name: str
    about: str
    task: Task
    data: Callable[[], Data]
    build: Callable[[], nn.Module]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    epochs: int
    batch: int = 32
    cosine: bool = False
    queries: int = 50
    halves: int = 100
    seeds: int = 3
    clip: float = math.inf

    def train_set(self) -> list[Any]:
        """The training examples, as `whence.attribute` reads them."""
        return self._examples(self.data().train)

    def asked(self) -> list[Any]:
        """The queries: the first test examples."""
        return self._examples(self.data().test)[: self.queries]

    def _examples(self, tensors: tuple[Tensor, ...]) -> list[Any]:
        if isinstance(self.task, LanguageModeling):
            return [{"input_ids": row} for row in tensors[0]]
        return list(zip(*tensors, strict=True))

    def fit(self, subset: Sequence[int], seed: int, *, checkpoints: int = 0) -> Trained:
        """Train on these examples: as many epochs as for all of them, so fewer steps.

        Kept are so many ``checkpoints`` as far from each other as can be, the last of them of the trained model.
        """
        chosen = torch.tensor(list(subset))
        tensors = [tensor[chosen] for tensor in self.data().train]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = self.build().train()
        optimizer = self.optimizer(model.parameters())
        order = torch.Generator().manual_seed(seed)
        steps = self.epochs * -(-len(chosen) // self.batch)
        base, rates = [group["lr"] for group in optimizer.param_groups], list[float]()
        stops, kept = {-(-steps * (i + 1) // checkpoints) for i in range(checkpoints)}, list[Checkpoint]()
        for _ in range(self.epochs):
            for positions in torch.randperm(len(chosen), generator=order).split(self.batch):
                if self.cosine:
                    falling = 0.5 * (1 + math.cos(math.pi * len(rates) / steps))
                    for group, rate in zip(optimizer.param_groups, base, strict=True):
                        group["lr"] = rate * falling
                optimizer.zero_grad()
                mean_loss(model, self.task, [tensor[positions] for tensor in tensors]).backward()
                if math.isfinite(self.clip):
                    nn.utils.clip_grad_norm_(model.parameters(), self.clip)
                optimizer.step()
                rates.append(optimizer.param_groups[0]["lr"])
                if len(rates) in stops:
                    kept.append(
                        ({name: part.clone() for name, part in model.state_dict().items()}, rates[-1])
                    )
        return Trained(model.eval(), optimizer, tuple(rates), tuple(kept))

    def __call__(self, subset: Sequence[int], seed: int) -> nn.Module:
        """As `whence.validation.retrain` asks."""
        return self.fit(subset, seed).model

    def __reduce__(self) -> tuple[Any, ...]:
        return work, (self.name,)


def mean_loss(model: nn.Module, task: Task, batch: Sequence[Tensor]) -> Tensor:
    """What works are trained on: the mean over a batch's examples, or over a language model's tokens."""
    if isinstance(task, LanguageModeling):
        logits = model(input_ids=batch[0], use_cache=False).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch[0][:, 1:].flatten())
    return mean_loss_of(model(batch[0]), batch[1], task)


def mean_loss_of(outputs: Tensor, targets: Tensor, task: Task) -> Tensor:
    """The same from outputs, where they are one row per example."""
    if isinstance(task, Regression):
        return (outputs - targets).square().sum(-1).mean() / (2 * task.variance)
    return F.cross_entropy(outputs, targets)


def mlp(*widths: int, activation: type[nn.Module]) -> nn.Module:
    """Linear layers with an activation between them."""
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), activation()]
    return nn.Sequential(*layers[:-1])


# --- data --------------------------------------------------------------------------------------------------------


@cache
def digits_data() -> Data:
    from whence.demo.digits import load_digits_with_flipped_labels

    digits = load_digits_with_flipped_labels()
    return Data(digits.train.tensors, digits.test.tensors)


@cache
def _clean_digits() -> Data:
    from whence.demo.digits import load_digits_with_flipped_labels

    digits = load_digits_with_flipped_labels()
    return Data((digits.train.tensors[0], digits.true_labels), digits.test.tensors)


#: Of labels, in data for finding wrong ones.
FLIPPED = 0.1


def flip(labels: Tensor, classes: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Labels of which every tenth is another one, and which these are."""
    wrong = torch.rand(len(labels), generator=generator) < FLIPPED
    shift = torch.randint(1, classes, (len(labels),), generator=generator)
    return torch.where(wrong, (labels + shift) % classes, labels), wrong


@cache
def mislabelled_digits(seed: int) -> tuple[Data, Tensor]:
    """Digits with one label in ten flipped, and which; all is drawn from the seed."""
    from sklearn.datasets import load_digits

    from whence.demo.digits import TRAIN

    bunch, generator = load_digits(), torch.Generator().manual_seed(seed)
    order = torch.randperm(len(bunch.data), generator=generator)
    x, y = torch.tensor(bunch.data, dtype=torch.float32)[order] / 16, torch.tensor(bunch.target)[order]
    labels, wrong = flip(y[:TRAIN], 10, generator)
    return Data((x[:TRAIN], labels), (x[TRAIN:], y[TRAIN:])), wrong


@cache
def table_data(name: str, train: int) -> Data:
    """One of scikit-learn's tables in random order, columns standardised by the training rows."""
    from sklearn import datasets

    bunch = getattr(datasets, f"load_{name}")()
    order = torch.randperm(len(bunch.data), generator=torch.Generator().manual_seed(0))
    x, y = torch.tensor(bunch.data, dtype=torch.float32)[order], torch.tensor(bunch.target)[order]
    x = (x - x[:train].mean(0)) / x[:train].std(0)
    if name == "diabetes":
        y = y.float().unsqueeze(1)
        y = (y - y[:train].mean()) / y[:train].std()
    return Data((x[:train], y[:train]), (x[train:], y[train:]))


@cache
def _diamonds(train: int = 2000, test: int = 200) -> Data:
    """The logarithm of a diamond's price from its size, cut, colour and clarity."""
    from reproduction.assets import diamonds

    x, y = diamonds()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))[: train + test]
    x, y = x[order], y[order].log().unsqueeze(1)
    x = (x - x[:train].mean(0)) / x[:train].std(0)
    y = (y - y[:train].mean()) / y[:train].std()
    return Data((x[:train], y[:train]), (x[train:], y[train:]))


@cache
def mnist_data(train: int, *, flat: bool) -> Data:
    from reproduction.assets import mnist

    parts = []
    for part, count in (("train", train), ("test", 200)):
        x, y = mnist(part)
        x = x[:count].float() / 255
        parts.append((x.flatten(1) if flat else x.unsqueeze(1), y[:count]))
    return Data(*parts)


@cache
def _cifar10(train: int = 3072) -> Data:
    from reproduction.assets import cifar10

    parts = []
    for part, count in (("train", train), ("test", 200)):
        images = cifar10(part)  # type: ignore[arg-type]
        parts.append((images.inputs(torch.arange(count)) * 2 - 1, images.labels[:count]))
    return Data(*parts)


MANUAL_TOKENS, MANUAL_PASSAGES = 64, 800


@cache
def _manual() -> tuple[Tensor, list[str]]:
    """Python's manual in windows of 64 tokens, ``[windows, tokens]``, and the topic that each is (mostly) of."""
    from whence.demo.corpus import corpus, train_tokenizer

    documents = corpus()
    tokenizer = train_tokenizer(documents)
    ids, topics = list[int](), list[str]()
    for topic, texts in documents.items():
        found = tokenizer.encode("\n".join(texts)).ids
        ids += found
        topics += [topic] * len(found)
    rows = len(ids) // MANUAL_TOKENS
    windows = torch.tensor(ids[: rows * MANUAL_TOKENS]).reshape(rows, MANUAL_TOKENS)
    return windows, [topics[row * MANUAL_TOKENS + MANUAL_TOKENS // 2] for row in range(rows)]


def _manual_windows() -> Tensor:
    return _manual()[0]


def _manual_places() -> tuple[Tensor, Tensor]:
    """Of every four windows two to fine-tune on; one was for pretraining, one is for queries."""
    places = torch.arange(len(_manual_windows()))
    tuned, held = torch.cat([places[0::4], places[2::4]]), places[3::4]
    generator = torch.Generator().manual_seed(0)
    tuned = tuned[torch.randperm(len(tuned), generator=generator)[:MANUAL_PASSAGES]]
    return tuned, held[torch.randperm(len(held), generator=generator)]


def manual_data() -> Data:
    tuned, held = _manual_places()
    return Data((_manual_windows()[tuned],), (_manual_windows()[held],))


def manual_topics() -> list[str]:
    """The topic of every passage to fine-tune on."""
    return [_manual()[1][place] for place in _manual_places()[0].tolist()]


@cache
def speeches_data(rows: int = 600, tokens: int = 48) -> Data:
    """Windows of State of the Union addresses, one from each of many places, in their own 1,000 tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    from reproduction.assets import speeches

    texts = [speech.text for speech in speeches()]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1000, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    tokenizer.train_from_iterator(texts[::4], trainer)
    ids = torch.cat([torch.tensor(tokenizer.encode(text[:20_000]).ids) for text in texts])
    windows = ids[: len(ids) // tokens * tokens].reshape(-1, tokens)
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(0))
    return Data((windows[order[:rows]],), (windows[order[rows : rows + 100]],))


# --- models ------------------------------------------------------------------------------------------------------


def cnn(channels: int, size: int, widths: Sequence[int], classes: int = 10) -> nn.Module:
    """Convolutions that halve the picture, then a linear layer."""
    layers: list[nn.Module] = []
    for before, after in pairwise([channels, *widths]):
        layers += [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.ReLU()]
        size = -(-size // 2)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(widths[-1] * size * size, classes))


def _llama_config() -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=1500, hidden_size=128, intermediate_size=352, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=MANUAL_TOKENS, tie_word_embeddings=True, attn_implementation="eager",
        bos_token_id=0, eos_token_id=0, pad_token_id=None,
    )  # fmt: skip


@cache
def _pretrained() -> dict[str, Tensor]:
    """A small Llama that has read a quarter of the manual: what is fine-tuned."""
    from transformers import LlamaForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(_llama_config())  # type: ignore[no-untyped-call]
    rows = _manual_windows()[1::4]
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    order = torch.Generator().manual_seed(0)
    for _ in range(8):
        for positions in torch.randperm(len(rows), generator=order).split(16):
            optimizer.zero_grad()
            model(input_ids=rows[positions], labels=rows[positions], use_cache=False).loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def _llama() -> nn.Module:
    from transformers import LlamaForCausalLM

    model: nn.Module = LlamaForCausalLM(_llama_config())  # type: ignore[no-untyped-call]
    model.load_state_dict(_pretrained())
    return model


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=1000, n_embd=64, n_layer=2, n_head=2, n_positions=48, attn_implementation="eager",
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


# --- works -------------------------------------------------------------------------------------------------------

_adam, _adamw, _sgd = torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD

_LIST = [
    Work(
        "digits", "digits, 5% flipped, tanh MLP, Adam", Classification(), digits_data,
        partial(mlp, 64, 48, 32, 10, activation=nn.Tanh),
        partial(_adam, lr=1e-3, weight_decay=1e-4), epochs=40, batch=64,
    ),
    Work(
        "mnist", "MNIST, 5,000, ReLU MLP, Adam", Classification(), partial(mnist_data, 5000, flat=True),
        partial(mlp, 784, 64, 32, 10, activation=nn.ReLU), partial(_adam, lr=1e-3), epochs=15, batch=64,
    ),
    Work(
        "diabetes", "diabetes, regression, Adam", Regression(), partial(table_data, "diabetes", 342),
        partial(mlp, 10, 32, 16, 1, activation=nn.Tanh), partial(_adam, lr=1e-3), epochs=60,
    ),
    Work(
        "cancer", "breast cancer, GELU MLP, certain, AdamW", Classification(),
        partial(table_data, "breast_cancer", 420),
        partial(mlp, 30, 32, 16, 2, activation=nn.GELU), partial(_adamw, lr=2e-3), epochs=25,
    ),
    Work(
        "wine", "wine, small, trained to the end, Adam", Classification(), partial(table_data, "wine", 128),
        partial(mlp, 13, 32, 3, activation=nn.Tanh), partial(_adam, lr=5e-3), epochs=120, batch=16,
    ),
    Work(
        "diamonds", "diamonds, regression, SiLU MLP, AdamW 0.1, cosine", Regression(), _diamonds,
        partial(mlp, 9, 64, 64, 1, activation=nn.SiLU), partial(_adamw, lr=3e-3, weight_decay=0.1),
        epochs=20, cosine=True,
    ),
    Work(
        "digits-deep", "clean digits, deep ReLU MLP, SGD momentum", Classification(), _clean_digits,
        partial(mlp, 64, 40, 40, 40, 40, 10, activation=nn.ReLU),
        partial(_sgd, lr=0.03, momentum=0.9, weight_decay=5e-4), epochs=30, batch=64,
    ),
    Work(
        "digits-early", "digits, 5% flipped, wide MLP stopped early, SGD", Classification(), digits_data,
        partial(mlp, 64, 256, 10, activation=nn.ReLU), partial(_sgd, lr=0.1), epochs=5, batch=32,
    ),
    Work(
        "mnist-cnn", "MNIST, 2,000, CNN, SGD Nesterov, cosine", Classification(),
        partial(mnist_data, 2000, flat=False), partial(cnn, 1, 28, (8, 16)),
        partial(_sgd, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3), epochs=15, batch=64, cosine=True,
    ),
    Work(
        "cancer-long", "breast cancer, ReLU MLP, trained to the end, Adam", Classification(),
        partial(table_data, "breast_cancer", 420),
        partial(mlp, 30, 48, 2, activation=nn.ReLU), partial(_adam, lr=1e-3), epochs=80,
    ),
    Work(
        "cancer-sgd", "breast cancer, deep tanh MLP, SGD momentum", Classification(),
        partial(table_data, "breast_cancer", 420),
        partial(mlp, 30, 24, 24, 2, activation=nn.Tanh), partial(_sgd, lr=0.05, momentum=0.9), epochs=15,
    ),
    Work(
        "digits-long", "clean digits, tanh MLP, trained to the end, AdamW", Classification(), _clean_digits,
        partial(mlp, 64, 48, 10, activation=nn.Tanh), partial(_adamw, lr=2e-3), epochs=60, batch=64,
    ),
    Work(
        "wine-sgd", "wine, deep GELU MLP, SGD", Classification(), partial(table_data, "wine", 128),
        partial(mlp, 13, 32, 32, 3, activation=nn.GELU), partial(_sgd, lr=0.1), epochs=60, batch=16,
    ),
    Work(
        "iris-long", "iris, SiLU MLP, trained long, AdamW 0.1", Classification(), partial(table_data, "iris", 100),
        partial(mlp, 4, 32, 3, activation=nn.SiLU), partial(_adamw, lr=5e-3, weight_decay=0.1), epochs=150, batch=16,
    ),
    Work(
        "mnist-long", "MNIST, 1,000, GELU MLP, trained to the end, AdamW", Classification(),
        partial(mnist_data, 1000, flat=True),
        partial(mlp, 784, 64, 10, activation=nn.GELU), partial(_adamw, lr=1e-3), epochs=40, batch=32,
    ),
    Work(
        "diabetes-long", "diabetes, regression, overfitted wide MLP, Adam", Regression(),
        partial(table_data, "diabetes", 342), partial(mlp, 10, 64, 1, activation=nn.Tanh), partial(_adam, lr=3e-3),
        epochs=150,
    ),
    Work(
        "cifar10-cnn", "CIFAR-10, 3,072, CNN, AdamW 0.05", Classification(), _cifar10,
        partial(cnn, 3, 32, (16, 32, 32)), partial(_adamw, lr=1e-3, weight_decay=0.05), epochs=15, batch=64,
        halves=60,
    ),
    Work(
        "llama", "Llama fine-tuned on Python's manual, AdamW", LanguageModeling(), manual_data, _llama,
        partial(_adamw, lr=5e-4, weight_decay=0.01), epochs=4, batch=16, queries=20, halves=50, clip=1.0,
    ),
    Work(
        "gpt2", "GPT-2 from scratch on speeches, AdamW 0.1, cosine", LanguageModeling(), speeches_data, _gpt2,
        partial(_adamw, lr=3e-3, weight_decay=0.1), epochs=8, batch=16, cosine=True, queries=20, halves=50,
        clip=1.0,
    ),
]  # fmt: skip

#: By name.
WORKS: dict[str, Work] = {each.name: each for each in _LIST}


def mislabelled(seed: int) -> Work:
    """The digits with one label in ten flipped; not one of `WORKS`, since nothing is retrained."""
    return replace(WORKS["digits"], name=f"mislabelled-{seed}", data=lambda: mislabelled_digits(seed)[0])


def work(name: str) -> Work:
    """The work of this name."""
    if name not in WORKS:
        raise SystemExit(f"there is no work {name!r}; there are {', '.join(WORKS)}")
    return WORKS[name]
