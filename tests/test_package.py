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


def test_the_readme_examples_run_as_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from digits import load, train_mlp

    train_set, test_set = load()
    subset = torch.utils.data.TensorDataset(*(t[:200] for t in train_set.tensors))
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    monkeypatch.chdir(tmp_path)
    scope = {
        "model": train_mlp(train_set, epochs=5),
        "train_set": subset,
        "queries": [test_set[0], test_set[1]],
    }
    exec("".join(blocks), scope)
    assert scope["scores"].shape == (2, 200)
    assert bool((scope["stderr"] > 0).all())
    assert scope["similarity"].shape == (2, 2)
    assert (tmp_path / "report.html").is_file()


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


def test_importing_loads_no_heavy_library() -> None:
    """They are for demos, pages' figures and formats that may never be asked for."""
    heavy = ["transformers", "datasets", "pandas", "matplotlib", "sklearn", "pyarrow", "curvlinops"]
    program = f"import sys, whence, whence.cli; print([name for name in {heavy} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
