"""Check a built site: it asks no other host for anything, and every link inside it leads somewhere."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from urllib.parse import unquote

LOADED = re.compile(r'<(?:script|img|iframe|link|source|video)\b[^>]*?\b(?:src|href)="([^"]*)"')
LINK = re.compile(r'<a\b[^>]*?\bhref="([^"]*)"')
STYLE = re.compile(r"(?:url\(|@import )\s*['\"]?((?:https?:)?//[^'\")]+)")


def problems(site: Path) -> list[str]:
    """What is wrong, in words."""
    found = []
    texts = {page: page.read_text(encoding="utf-8") for page in site.rglob("*.html")}
    anchors = {page: set(re.findall(r'\bid="([^"]*)"', text)) for page, text in texts.items()}
    for page, text in texts.items():
        name = page.relative_to(site)
        found += [f"{name} loads {a}" for a in LOADED.findall(text) if re.match(r"(?:\w+:)?//", a)]
        for address in {*LINK.findall(text), *LOADED.findall(text)}:
            path, _, fragment = unquote(address.partition("?")[0]).partition("#")
            if re.match(r"(?:\w+:|//)", address):
                continue
            target = (page.parent / path).resolve() if path else page
            if not target.exists():
                found.append(f"{name} links to {address}, which is not there")
            elif fragment and target in anchors and fragment not in anchors[target]:
                found.append(f"{name} links to {address}, which has no such part")
    for style in site.rglob("*.css"):
        found += [f"{style.name} loads {a}" for a in STYLE.findall(style.read_text(encoding="utf-8"))]
    return found


if __name__ == "__main__":
    wrong = problems(Path(sys.argv[1]).resolve())
    print("\n".join(wrong) or "no page asks another host for anything, and every link leads somewhere")
    sys.exit(bool(wrong))
