"""A quick part of the tests on every Python that is here, with the oldest and the newest torch.

    python tests/matrix.py [PYTHON …]      # such as 3.10 3.13; all that are found by default

Every pair gets an environment under ``.venv-matrix/`` with the base dependencies alone. pip looks where it always
does: PIP_INDEX_URL and PIP_FIND_LINKS can name a place with builds for the CPU. A pair that pip cannot install, or
whose torch does not start, is reported, and is no failure of whence.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PLACE = ROOT / ".venv-matrix"
#: Those that need no library but the base dependencies.
TESTS = ("codec", "lissa", "options", "plan", "progress", "run_directory", "shifted")
SETTINGS = (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def pythons() -> dict[str, str]:
    """Version -> interpreter, of the Pythons that pyproject.toml names: pyenv's, or on the path."""
    found = {}
    for version in re.findall(r"Python :: (3\.\d+)", SETTINGS):
        kept = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
        named = str(kept[-1]) if kept else shutil.which(f"python{version}")
        if named is not None:
            found[version] = named
    return found


def tried(version: str, interpreter: str, torch: str) -> str:
    """What became of a pair, in a few words."""
    place = PLACE / f"{version}-{'newest' if torch == 'torch' else 'oldest'}"
    python = place / "bin" / "python"
    subprocess.run([interpreter, "-m", "venv", "--clear", place], check=True)
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    if subprocess.run([*install, torch, str(ROOT), "pytest", "hypothesis"]).returncode:
        return "cannot be installed"
    if subprocess.run([python, "-c", "import torch; print('torch', torch.__version__)"]).returncode:
        return "torch does not start"
    tests = [str(ROOT / "tests" / f"test_{name}.py") for name in TESTS]
    options = ["-q", "-p", "no:cacheprovider", "-o", "addopts=", "-m", "not slow and not faults"]
    done = subprocess.run([python, "-m", "pytest", *options, *tests], cwd=ROOT)
    return "passed" if done.returncode == 0 else "FAILED"


if __name__ == "__main__":
    found = pythons()
    oldest = re.search(r'"torch>=([\d.]+)"', SETTINGS)[1]
    results = {
        (version, torch): tried(version, found[version], torch)
        for version in sys.argv[1:] or found
        for torch in (f"torch=={oldest}.*", "torch")
    }
    for (version, torch), result in results.items():
        print(f"Python {version}, {torch}: {result}")
    sys.exit("FAILED" in results.values())
