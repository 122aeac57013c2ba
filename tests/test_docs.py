"""The pages of docs/ keep up with the code: what docstrings and pages point to is there."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings(page: Path):
    missing = []
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, fragment = link.partition("#")
        target = page if not path else page.parent / path
        if not target.exists() or (fragment and fragment not in map(anchor, headings(target))):
            missing.append(link)
    assert missing == []
