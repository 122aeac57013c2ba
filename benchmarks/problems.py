"""What solvers are compared on: a model, the data it was trained on or a declared part of them, and queries."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from whence import Classification, ConjugateGradient, Damped, GaussNewton, LanguageModeling, ParamVector
from whence.demo.corpus import Passage
from whence.demo.text import EPOCHS
from whence.scoring import Scorer

__all__ = ["Problem", "digits", "exact_scores_of_digits", "llama", "million", "resnet"]


@dataclass(frozen=True)
class Problem:
    """A model, queries and a damping.

    Attributes:
        name: for tables.
        gnh: the Gauss-Newton Hessian over the data.
        queries: what is asked.
        rhs: their gradients.
        condition_number: λmax / λ.
        limit: of a method's cost, in that of the cheapest conjugate gradients.
        proven: what the reference's error is proven to be at most, relative to the scores.
        every: scores are compared on every so many-th example.
        ranks: of Nyström's preconditioners that are tried, each with the share of the terms that it is made from.
        layers: whether EK-FAC is tried, too.
        enough: the correlation at which preconditioned conjugate gradients need not go on.
    """

    name: str
    gnh: GaussNewton
    queries: Sequence[Any]
    rhs: ParamVector
    condition_number: float
    limit: float = 25.0
    proven: float = 1e-3
    every: int = 1
    ranks: tuple[tuple[int, float], ...] = ((10, 0.25), (30, 1.0))
    layers: bool = True
    enough: float = 0.9999

    @property
    def compared(self) -> Tensor:
        """The examples whose scores are compared."""
        return torch.arange(0, len(self.gnh.terms), self.every)

    def scores(self, solution: ParamVector) -> Tensor:
        """Of the examples that are compared, ``[queries, examples]``."""
        return Scorer(self.gnh, solution).score(self.compared)


def digits(condition_number: float, queries: int) -> Problem:
    from whence.demo.digits import load_digits_with_flipped_labels, train_digits

    data = load_digits_with_flipped_labels()
    gnh = GaussNewton(train_digits(data.train), Classification(), data.train)
    asked = [data.test[i] for i in range(queries)]
    name = f"digits MLP, κ = {condition_number:g}, {_queries(queries)}"
    return Problem(name, gnh, asked, gnh.gradients(asked), condition_number)


def exact_scores_of_digits(model: nn.Module, queries: range, damping: float) -> Tensor:
    """Scores of test images for all training images, in float64, proven to a millionth of their size."""
    from whence.demo.digits import load_digits_with_flipped_labels

    data = load_digits_with_flipped_labels()
    wide_train, wide_test = (
        TensorDataset(s.tensors[0].double(), s.tensors[1]) for s in (data.train, data.test)
    )
    gnh = GaussNewton(copy.deepcopy(model).double(), Classification(), wide_train)
    rhs = gnh.gradients([wide_test[i] for i in queries])
    solver = ConjugateGradient(tolerance=1e-6, max_iterations=400)
    solution = solver.solve(Damped(gnh, damping), rhs, generator=torch.Generator())
    assert bool(solution.converged.all())
    return Scorer(gnh, solution.value).score(torch.arange(len(wide_train)))


@cache
def _manual(epochs: int) -> tuple[nn.Module, list[Passage]]:
    """A small Llama trained on Python's manual, and the passages."""
    from whence.demo.corpus import corpus, passages, train_tokenizer
    from whence.demo.text import train_model

    documents = corpus()
    data = passages(documents, train_tokenizer(documents))
    return train_model(data, epochs=epochs), data


def llama(condition_number: float, queries: int, epochs: int = EPOCHS) -> Problem:
    """By default the demonstration's model; after fewer epochs, one whose passages score nearly alike."""
    model, data = _manual(epochs)
    train = [{"input_ids": passage.input_ids} for passage in data[::4]]
    gnh = GaussNewton(model, LanguageModeling(), train)
    asked = [{"input_ids": data[4 * i + 1].input_ids} for i in range(queries)]
    name = f"two-layer Llama, {epochs} epochs, κ = {condition_number:g}, {_queries(queries)}"
    return _larger(name, gnh, asked, condition_number)


#: Training passages of the largest problem, their bytes, and how the model reads them.
PASSAGES, BYTES, TRAIN_BATCH, TRAIN_EPOCHS = 16_384, 64, 32, 5


def million(condition_number: float, queries: int) -> Problem:
    """A two-layer Llama that read a million bytes of Wikipedia; queries are the text that comes next.

    A pass over the data takes a minute, so the reference is proven to 3% of the scores alone, and compared on a quarter
    of the passages; preconditioners are tried as far as a chooser would: one small one, from a tenth of the terms.
    """
    from reproduction.assets import enwik8

    count = PASSAGES + queries
    text = torch.frombuffer(bytearray(enwik8(count * BYTES)), dtype=torch.uint8).long().reshape(count, BYTES)
    gnh = GaussNewton(
        _reader_of(text[:PASSAGES]), LanguageModeling(), [{"input_ids": row} for row in text[:PASSAGES]]
    )
    asked = [{"input_ids": row} for row in text[PASSAGES:]]
    name = f"Llama, {gnh.num_terms:,} bytes of Wikipedia, κ = {condition_number:g}, {_queries(queries)}"
    return Problem(
        name, gnh, asked, gnh.gradients(asked), condition_number,
        limit=1.0, proven=3e-2, every=4, ranks=((16, 0.1),), layers=False, enough=0.995,
    )  # fmt: skip


def _reader_of(text: Tensor) -> nn.Module:
    """A byte-level Llama, trained on these passages and returned in evaluation mode."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=96, num_hidden_layers=2, num_attention_heads=1,
        max_position_embeddings=BYTES, initializer_range=0.06, tie_word_embeddings=False,
        bos_token_id=0, eos_token_id=0, pad_token_id=None,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: nn.Module = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
    steps, order = TRAIN_EPOCHS * (len(text) // TRAIN_BATCH), torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=4e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: min((t + 1) / 100, 1 - t / steps))
    for _ in range(TRAIN_EPOCHS):
        for positions in torch.randperm(len(text), generator=order).split(TRAIN_BATCH):
            loss = model(input_ids=text[positions], labels=text[positions], use_cache=False).loss
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
    return model.eval()


def resnet(condition_number: float, queries: int, images: int) -> Problem:
    from reproduction.assets import cifar10, resnet56

    train, test = cifar10("train").select(torch.arange(images)), cifar10("test")
    gnh = GaussNewton(resnet56(), Classification(), train)
    name = f"ResNet-56, {images:,} of its images, κ = {condition_number:g}, {_queries(queries)}"
    return _larger(name, gnh, [test[i] for i in range(queries)], condition_number)


def _larger(name: str, gnh: GaussNewton, asked: Sequence[Any], condition_number: float) -> Problem:
    return Problem(name, gnh, asked, gnh.gradients(asked), condition_number, limit=5.0, proven=1e-2)


def _queries(count: int) -> str:
    return "1 query" if count == 1 else f"{count} queries"
