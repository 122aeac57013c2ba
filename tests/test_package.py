"""The package as a newcomer meets it: public names, README, resources."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest
import torch

import whence

ROOT = Path(__file__).parent.parent


def test_all_lists_exactly_the_public_names() -> None:
    import types

    submodules = {
        name
        for name, value in vars(whence).items()
        if isinstance(value, types.ModuleType) and name != "errors"
    }
    public = {name for name in vars(whence) if not name.startswith("_")} - submodules
    assert public == set(whence.__all__)


def test_types_are_shipped() -> None:
    assert files("whence").joinpath("py.typed").is_file()


def test_importing_whence_does_not_import_transformers() -> None:
    code = "import sys, whence; sys.exit('transformers' in sys.modules or 'sklearn' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_long_loops_are_silent_without_a_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    A = whence.FiniteSum([torch.diag(torch.tensor([1.0, 0.1 * k])) for k in range(8)])
    whence.estimate_spectrum(A, generator=torch.Generator().manual_seed(0))
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err == ""


def test_extras_that_errors_name_exist() -> None:
    """A missing library is reported with the extra that installs it."""
    root = ROOT
    lines = (root / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2]
    extras = set(re.findall(r"^(\w+) = \[", lines.partition("\n[project.scripts]")[0], re.MULTILINE))
    sources = (root / "src" / "whence").rglob("*.py")
    named = {
        extra
        for source in sources
        for extra in re.findall(r'load_library\(\s*"[\w.]+", "(\w+)"', source.read_text())
    }
    assert len(named) >= 2
    assert named <= extras


def test_transformers_may_not_be_older_than_its_dtype() -> None:
    """``from_pretrained(dtype=…)`` was ``torch_dtype`` before 4.56, which hands ``dtype`` to the model and fails."""
    wanted = re.findall(r'"transformers>=(\d+)\.(\d+)"', (ROOT / "pyproject.toml").read_text())
    assert len(wanted) == 2
    assert all((int(major), int(minor)) >= (4, 56) for major, minor in wanted)


def test_importing_loads_no_heavy_library() -> None:
    """They are for demos, pages' figures and formats that may never be asked for."""
    heavy = ["transformers", "datasets", "pandas", "matplotlib", "sklearn", "pyarrow"]
    program = f"import sys, whence, whence.cli; print([name for name in {heavy} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_curvlinops_is_for_benchmarks_alone() -> None:
    """They compare with it; EK-FAC was measured through it once."""
    importing = re.compile(r"(?m)^\s*(?:from|import) curvlinops")
    folders = ("src", "tests", "reproduction", "benchmarks")
    files = [file for folder in folders for file in (ROOT / folder).rglob("*.py")]
    found = {file.relative_to(ROOT).parts[0] for file in files if importing.search(file.read_text())}
    assert found == {"benchmarks"}


def test_a_newcomer_has_an_answer_after_three_commands(tmp_path: Path) -> None:
    import newcomer

    installs, *then = newcomer.commands()
    assert installs.startswith("pip install ")
    assert [command.split()[:2] for command in then] == [["whence", "plan"], ["whence", "attribute"]]
    newcomer.prepare(tmp_path)
    planned, answered = newcomer.follow(tmp_path, str(Path(sys.executable).with_name("whence")))
    assert "what attribute will do" in planned
    assert "Paris is the capital of" in answered
    assert "most helpful" in answered
    page = (tmp_path / "runs" / "first" / "report.html").read_text(encoding="utf-8")
    assert "Paris is the capital of" in page


def test_the_version_is_the_same_everywhere() -> None:
    for file, pattern in (
        ("pyproject.toml", r'(?m)^version = "(.+)"$'),
        ("CITATION.cff", r"(?m)^version: (.+)$"),
        ("CHANGELOG.md", r"(?m)^## (\d\S*)"),
    ):
        assert re.search(pattern, (ROOT / file).read_text())[1] == whence.__version__, file


def test_pythons_that_are_named_are_those_that_are_required() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    named = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', text)
    assert named == ["3.10", "3.11", "3.12", "3.13"]
    assert f'requires-python = ">={named[0]}"' in text
