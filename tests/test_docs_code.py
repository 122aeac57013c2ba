"""The code of README and docs/ runs, and what pages keep of it is of the code that they show."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import whence
from digits import load, train_mlp
from docs import blocks as parsed
from docs.blocks import blocks, kept, ran, run_block

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
TEXTS = {str(page.relative_to(ROOT)): page.read_text(encoding="utf-8") for page in PAGES}
KEPT = {name: found for name, text in TEXTS.items() if (found := kept(text)) is not None}
WITH_CODE = [
    name
    for name, text in TEXTS.items()
    if name not in KEPT and any(block.reason is None for block in blocks(text))
]


def run(name: str, scope: dict[str, Any]) -> None:
    for block in blocks(TEXTS[name]):
        if block.reason is None:
            run_block(block, ROOT / name, scope)


def test_every_block_of_code_is_known() -> None:
    """One that the pattern does not see is one that nobody runs."""
    for name, text in TEXTS.items():
        assert len(blocks(text)) == len(re.findall(r"(?m)^```python", text)), name
    assert len(KEPT) > 10
    assert len(WITH_CODE) > 3


@pytest.mark.parametrize("name", KEPT)
def test_what_a_page_keeps_is_of_its_code(name: str) -> None:
    """`make docs-run` writes it."""
    assert KEPT[name][0] == ran(TEXTS[name])
    for block in blocks(TEXTS[name]):
        assert block.file is None or (ROOT / name).parent.joinpath(block.file).is_file()


@pytest.mark.filterwarnings(
    "ignore:the spectrum's estimates contradict each other"
)  # of models that are certain
@pytest.mark.parametrize("name", [name for name, (_, slow) in KEPT.items() if not slow])
def test_code_that_keeps_its_output_runs(name: str) -> None:
    run(name, {"__name__": "__main__"})


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, (_, slow) in KEPT.items() if slow])
def test_code_that_takes_minutes_runs(name: str) -> None:
    run(name, {"__name__": "__main__"})


@pytest.fixture(scope="module")
def model() -> Any:
    return train_mlp(load()[0], epochs=5)


@pytest.fixture
def scope(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What pages speak of without making it: a model, its data, questions, a finished run."""
    train_set, test_set = load()
    subset = torch.utils.data.TensorDataset(*(t[:200] for t in train_set.tensors))
    queries, task = [test_set[0], test_set[1]], whence.Classification()

    def fit(examples: list[Any], seed: int) -> Any:
        x, y = (torch.stack(parts) for parts in zip(*examples, strict=True))
        return train_mlp(torch.utils.data.TensorDataset(x, y), epochs=2)

    monkeypatch.chdir(tmp_path)
    whence.attribute(model, subset, queries, task=task, run_dir=tmp_path / "runs" / "first")
    return {
        "model": model,
        "train_set": subset,
        "queries": queries,
        "task": task,
        "fit": fit,
        "whence": whence,
    }


@pytest.mark.parametrize("name", WITH_CODE)
def test_code_runs(name: str, scope: dict[str, Any]) -> None:
    run(name, scope)
    for written in re.findall(
        r'\.(?:to_html|to_csv)\("([^"]+)"\)',
        "".join(block.code for block in blocks(TEXTS[name]) if block.reason is None),
    ):
        assert Path(written).is_file()


def test_output_is_written_under_its_code(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A page\n\n```python\nx = 2\nprint('said')\nx + 1\n```\n\n```output\nold\n```\n\n"
        "<!-- not run: a reason -->\n```python\nraise SystemExit\n```\n\n"
        "```python\nclass Shown:\n    def _repr_html_(self):\n"
        "        return '<iframe srcdoc=\"&lt;p&gt;\"></iframe>'\nShown()\n```\n\n"
        '<iframe title="t" src="shown.html"></iframe>\n\nEnd.\n\n<!-- ran: 0, slow -->\n'
    )
    before = ran(page.read_text())
    parsed.run_page(page)
    text = page.read_text()
    assert "```output\nsaid\n3\n```" in text
    assert "old" not in text
    assert (tmp_path / "shown.html").read_text() == "<p>"
    assert kept(text) == (before, True) == (ran(text), True)
    parsed.run_page(page)
    assert page.read_text() == text
