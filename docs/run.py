"""Run the code of the pages that keep its output, and write that down: ``python -m docs.run [PAGE …]``."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from docs.blocks import kept, run_page

DOCS = Path(__file__).parent

if __name__ == "__main__":
    chosen = [Path(name).resolve() for name in sys.argv[1:]] or sorted(DOCS.rglob("*.md"))
    for page in chosen:
        if kept(page.read_text(encoding="utf-8")) is None:
            continue
        begun = time.perf_counter()
        run_page(page)
        print(f"{page.relative_to(DOCS)}: {time.perf_counter() - begun:.0f} s", flush=True)
