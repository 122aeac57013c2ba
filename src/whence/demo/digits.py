"""Digits with some wrong labels: what made the model misread this image, and which labels are to blame?"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from whence.attribution import Attribution, attribute
from whence.attribution.exhibits import png
from whence.exhibit import Exhibit
from whence.progress import track
from whence.sources.examples import ListedExamples
from whence.tasks import Classification

__all__ = ["DigitsDemo", "attribute_digits", "load_digits_with_flipped_labels", "train_digits"]

TRAIN = 1400
FLIPPED = 0.05
QUERIES = 16


@dataclass(frozen=True)
class Digits:
    """Real images, some training labels wrong.

    Attributes:
        train, test: 8×8 images as vectors, with labels.
        true_labels: of the training images.
    """

    train: TensorDataset
    test: TensorDataset
    true_labels: Tensor

    @property
    def flipped(self) -> Tensor:
        """Which training labels are wrong."""
        return self.train.tensors[1] != self.true_labels

    def exhibit(self, example: Any, index: int) -> Exhibit:
        """A training image, its label, and whether that is wrong."""
        wrong = bool(self.flipped[index])
        note = f"label flipped: it is a {int(self.true_labels[index])}" if wrong else None
        return _exhibit(f"train {index}", example, note)


@dataclass(frozen=True)
class DigitsDemo:
    """What the demonstration found.

    Attributes:
        result: the attribution of the misread images.
        digits: the data.
        accuracy: on the test images.
        harm: nats that the misread images would gain without each training image, added up over those that it
            harms: the demo's own aggregate.
        train_losses: of the training images, the plain baseline for finding wrong labels.
    """

    result: Attribution
    digits: Digits
    accuracy: float
    harm: Tensor
    train_losses: Tensor

    @property
    def found(self) -> float:
        """Share of the flipped labels among the tenth of the images that do most harm."""
        return self._share_of_flipped(self.harm)

    @property
    def found_by_loss(self) -> float:
        """The same for the tenth with the largest training loss."""
        return self._share_of_flipped(self.train_losses)

    def _share_of_flipped(self, suspicion: Tensor) -> float:
        worst = suspicion.argsort(descending=True)[: len(suspicion) // 10]
        return float(self.digits.flipped[worst].sum() / self.digits.flipped.sum())


def load_digits_with_flipped_labels(seed: int = 0) -> Digits:
    """scikit-learn's 1,797 digits: 1,400 to train on, one label in twenty flipped."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(bunch.data), generator=generator)
    x = torch.tensor(bunch.data, dtype=torch.float32)[order] / 16
    y = torch.tensor(bunch.target)[order]
    labels = y[:TRAIN].clone()
    flipped = torch.rand(TRAIN, generator=generator) < FLIPPED
    shift = torch.randint(1, 10, (int(flipped.sum()),), generator=generator)
    labels[flipped] = (labels[flipped] + shift) % 10
    return Digits(TensorDataset(x[:TRAIN], labels), TensorDataset(x[TRAIN:], y[TRAIN:]), y[:TRAIN])


def train_digits(data: TensorDataset, *, seed: int = 0, epochs: int = 40) -> nn.Module:
    """An ordinary training loop, as a user would write it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 32), nn.Tanh(), nn.Linear(32, 10))
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=1e-4)
    x, y = data.tensors
    for _ in track(range(epochs), "training on digits"):
        for index in torch.randperm(len(x), generator=generator).split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[index]), y[index]).backward()
            optimizer.step()
    return model.eval()


def attribute_digits(run_dir: Path | None = None) -> DigitsDemo:
    """Train, find misread test images, and ask what made the model misread them."""
    digits = load_digits_with_flipped_labels()
    model = train_digits(digits.train)
    x, y = digits.test.tensors
    with torch.no_grad():
        losses = nn.functional.cross_entropy(model(x), y, reduction="none")
        guesses = model(x).argmax(1)
    misread = (guesses != y).nonzero().flatten()
    queries = misread[losses[misread].argsort(descending=True)][:QUERIES].tolist()
    asked = "the question: what helps and hurts its true label?"
    shown = [_exhibit(f"test {i}", digits.test[i], asked) for i in queries]
    result = attribute(
        model,
        digits.train,
        ListedExamples([digits.test[i] for i in queries], name="test", exhibits=shown),
        task=Classification(),
        describe=digits.exhibit,
        title="What made the model misread these digits?",
        run_dir=run_dir,
    )
    accuracy = float((guesses == y).float().mean())
    with torch.no_grad():
        train_x, train_y = digits.train.tensors
        train_losses = nn.functional.cross_entropy(model(train_x), train_y, reduction="none")
    harm = (-result.effects).clamp_min(0).sum(0)
    return DigitsDemo(result, digits, accuracy, harm, train_losses)


def _exhibit(name: str, example: Any, note: str | None) -> Exhibit:
    """Dark ink on white paper."""
    x, y = example
    return Exhibit(id=name, image=png(1 - x.reshape(8, 8)), label=str(int(y)), note=note)
