"""The pages of docs/ keep up with the code: what docstrings and pages point to is there."""

import re
import traceback
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from torch import nn

import whence
from whence.cli.inputs import InputOptions
from whence.options import AskOptions, CleanOptions, IndexOptions, Options
from zoo import ARCHITECTURES, CASES

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    [
        *(ROOT / f"{name}.md" for name in ("README", "CHANGELOG", "CONTRIBUTING", "SECURITY")),
        *(ROOT / "docs").rglob("*.md"),
    ]
)


def headings(page: Path) -> list[str]:
    text = re.sub(r"(?ms)^```.*?^```", "", page.read_text())
    return re.findall(r"(?m)^#+ (.+?) *$", text)


def anchor(heading: str) -> str:
    """As GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def derivations_named_in_code() -> Iterator[tuple[str, str]]:
    """File, and the words between quotation marks after each mention of docs/math.md."""
    for folder in ("src", "reproduction", "benchmarks"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            text = re.sub(r"\s*\n\s*(?:#:? *)?", " ", file.read_text())
            for mention in re.finditer(r"docs/math\.md", text):
                named = re.match(r""", (?:"([^"]+)"|'(.+?)'(?!\w))""", text[mention.end() :])
                yield str(file.relative_to(ROOT)), "" if named is None else (named[1] or named[2])


def test_every_derivation_that_code_names_is_a_section():
    named = list(derivations_named_in_code())
    sections = headings(ROOT / "docs/math.md")
    assert len(named) > 15
    assert [each for each in named if each[1] not in sections] == []


def test_no_section_of_the_mathematics_is_there_twice():
    sections = headings(ROOT / "docs/math.md")
    assert len(sections) == len(set(sections))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page: Path):
    missing = []
    text = page.read_text()
    for link in re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'<iframe [^>]*src="([^"]+)"', text):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, fragment = link.partition("#")
        target = page if not path else page.parent / path
        if not target.exists() or (fragment and fragment not in map(anchor, headings(target))):
            missing.append(link)
    assert missing == []


def test_the_walk_is_the_stack_of_a_forward_pass():
    page = (ROOT / "docs/walk.md").read_text()
    told = [tuple(line.split()) for line in re.search(r"(?ms)^```stack\n(.*?)^```", page)[1].splitlines()]
    seen = set()

    def note(module, inputs):
        frames = [frame for frame in traceback.extract_stack() if "/src/whence/" in frame.filename]
        frames = [
            frame for frame in frames if not frame.filename.endswith("arguments.py")
        ]  # around what users call
        seen.add(tuple((frame.filename.partition("/src/whence/")[2], frame.name) for frame in frames))

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).eval()
    model.register_forward_pre_hook(note)
    train = [(torch.randn(4), i % 3) for i in range(60)]
    whence.attribute(model, train, train[:2], task=whence.Classification(), solver="cg")
    assert tuple(told) in seen


def test_every_architecture_of_the_zoo_is_named():
    page = re.sub(r"\s+", " ", (ROOT / "docs/data.md").read_text())
    told = re.search(r"Compared with dense float64 matrices .*?parametrizations\.", page)[0].lower()
    names = {
        "resnet": "resnet",
        "attention": "attention of pytorch",
        "mlp": "mlps",
        "convnet": "convolutional",
    }
    names |= {"gptneox": "gpt-neox", "lstm": "lstms", "parametrized": "parametrizations", "gpt2": "gpt-2"}
    names |= {"qwen2": "qwen 2", "qwen3": "2 and 3", "gemma2": "gemma 2", "gemma3": "gemma 2 and 3"}
    names |= {
        "mamba": "mamba 1",
        "mamba2": "mamba 1 and 2",
        "phi3": "phi-3",
        "t5 classifier": "t5 (classification",
    }
    names |= {"bert, masked": "masked)", "bert, tokens": "(sequences, tokens"}
    missing = [case.name for case in CASES + ARCHITECTURES if names.get(case.name, case.name) not in told]
    assert missing == []


OPTIONS = [InputOptions, Options, CleanOptions, IndexOptions, AskOptions]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda cls: cls.__name__)
def test_every_option_of_the_command_line_is_explained(options: type):
    page = (ROOT / "docs/command-line.md").read_text()
    names = [f"--{field.name.replace('_', '-')}" for field in fields(options) if field.name != "model"]
    assert [name for name in names if f"`{name}`" not in page] == []


def test_every_public_name_is_in_the_reference():
    page = (ROOT / "docs/api.md").read_text()
    listed = re.findall(r"(?m)^\.\. auto(?:class|function):: (\w+)$", page)
    assert sorted(listed) == sorted(set(whence.__all__) - {"errors"})
    assert ".. automodule:: whence.errors" in page


def test_every_page_is_in_the_site():
    trees = re.findall(r"(?ms)^```\{toctree\}\n(.*?)^```", (ROOT / "docs/index.md").read_text())
    listed = {
        line.split("<")[-1].strip(" >")
        for tree in trees
        for line in tree.splitlines()
        if line and line[0] != ":"
    }
    there = {str(page.relative_to(ROOT / "docs").with_suffix("")) for page in (ROOT / "docs").rglob("*.md")}
    assert listed == there - {"index"}
