"""What a newcomer does after installing: the README's commands, on a model directory and jsonl of their own.

    python tests/newcomer.py DIRECTORY WHENCE      # the command `whence` of the environment to try

`make dist` runs it with the wheel in an environment of its own, tests/test_package.py with this one.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def commands() -> list[str]:
    """The README's commands for a model directory and files, in order; the first installs."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    block = re.search(r"(?ms)^<!-- newcomer: .*?-->\n```\n(.*?)^```", text)[1]
    return [line.partition("  #")[0].strip() for line in block.splitlines()]


def prepare(directory: Path) -> None:
    """A model directory, training texts and questions, as they would be there."""
    from tiny_hf import CORPUS, gpt2_directory

    gpt2_directory(directory / "my-model")
    rows = [{"text": f"{text} {number}"} for number, text in enumerate(CORPUS * 3)]
    questions = [{"prompt": "Paris is the capital of", "completion": " France"}]
    for name, content in (("train", rows), ("queries", questions)):
        lines = "".join(json.dumps(row) + "\n" for row in content)
        (directory / f"{name}.jsonl").write_text(lines, encoding="utf-8")


def follow(directory: Path, whence: str) -> list[str]:
    """Run the commands after the installation; what each printed."""
    printed = []
    for command in commands()[1:]:
        name, *arguments = command.split()
        if name != "whence":
            raise ValueError(f"{command!r} is no command of whence")
        done = subprocess.run([whence, *arguments], cwd=directory, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{command}\nended with {done.returncode}:\n{done.stdout}{done.stderr}")
        printed.append(done.stdout)
    return printed


if __name__ == "__main__":
    place = Path(sys.argv[1])
    place.mkdir(parents=True, exist_ok=True)
    prepare(place)
    print("\n".join(follow(place, sys.argv[2])))
