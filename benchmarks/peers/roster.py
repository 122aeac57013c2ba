"""Who is compared: every peer's name, where its adapter is, and what tables call it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

__all__ = ["ROSTER", "Entry"]


@dataclass(frozen=True)
class Entry:
    """One way of attributing.

    Attributes:
        module: below `benchmarks.peers`; its environment is ``.venv-module``.
        words: in tables.
        environment: whether it has an environment of its own; else it runs in ours.
    """

    module: str
    words: str
    environment: bool = True


#: In the order of tables.
ROSTER: Mapping[str, Entry] = MappingProxyType(
    {
        "kronfluence": Entry("kronfluence", "Kronfluence EK-FAC"),
        "bergson": Entry("bergson", "Bergson EK-FAC"),
        "dattri": Entry("dattri", "dattri CG"),
        "dattri-lissa": Entry("dattri", "dattri LiSSA"),
        "dattri-trak": Entry("dattri", "dattri TRAK"),
        "traker": Entry("traker", "TRAK"),
        "pydvl": Entry("pydvl", "pyDVL Nyström"),
        "captum": Entry("captum", "Captum TracInCP"),
        "captum-fast": Entry("captum", "Captum TracInCPFast"),
        "dot": Entry("plain", "gradient dot product", environment=False),
        "cosine": Entry("plain", "gradient cosine", environment=False),
        "bm25": Entry("plain", "BM25", environment=False),
    }
)
