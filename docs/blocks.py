"""The code blocks of a page, and what running them printed and drew.

A page's blocks are run one after the other in one namespace, as a reader would. A page that ends in a line
``<!-- ran: … -->`` keeps what they gave (`python -m docs.run` writes it): what was printed, and the value of a last
line, stand in a block ``output`` under the code; a figure or a page is saved to the file that the link under the code
names. The line has a fingerprint of the code, so a page whose code was changed and not run again is found.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import html
import io
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Block", "blocks", "kept", "ran", "run_block", "run_page"]

#: Code, with why it is not run in a comment above it; what it printed; what it drew, as the text that names the file.
_BLOCK = re.compile(
    r"(?m)^(?:<!-- not run: (?P<reason>[^>]+) -->\n)?```python\n(?P<code>(?:.*\n)*?)```\n"
    r"(?P<output>\n```output\n(?:.*\n)*?```\n)?(?P<shown>\n(?:!\[[^\]]*\]\(|<iframe [^>]*src=\")(?P<file>_?[^)\"]+))?"
)
_RAN = re.compile(r"<!-- ran: (\w+)(, slow)? -->\n*\Z")


@dataclass(frozen=True)
class Block:
    """A code block: its line in the page, why it is not run, and the file under it that shows its last value."""

    code: str
    line: int
    reason: str | None
    file: str | None


def blocks(text: str) -> list[Block]:
    """A page's blocks, in order."""
    return [
        Block(m["code"], text.count("\n", 0, m.start("code")) + 1, m["reason"], m["file"])
        for m in _BLOCK.finditer(text)
    ]


def ran(text: str) -> str:
    """A fingerprint of a page's code, whatever its spaces, quotes and last commas, which a formatter may change."""
    code = "\0".join(re.sub(r"\s+", "", block.code) for block in blocks(text) if block.reason is None)
    code = re.sub(r",([)\]}])", r"\1", code.replace("'", '"'))
    return hashlib.blake2b(code.encode(), digest_size=8).hexdigest()


def kept(text: str) -> tuple[str, bool] | None:
    """The fingerprint of what was run, and whether that takes minutes; None where a page keeps nothing."""
    found = _RAN.search(text)
    return None if found is None else (found[1], found[2] is not None)


def run_block(block: Block, page: Path, scope: dict[str, Any]) -> tuple[str, Any]:
    """What a block printed, and the value of its last line where that is an expression."""
    tree = ast.parse("\n" * (block.line - 1) + block.code)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed, value = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, str(page), "exec"), scope)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), str(page), "eval"), scope)
    return printed.getvalue(), value


def run_page(page: Path) -> None:
    """Run all blocks, and write down what they gave."""
    text, scope, parts, end = page.read_text(encoding="utf-8"), {"__name__": "__main__"}, [], 0
    for match, block in zip(_BLOCK.finditer(text), blocks(text), strict=True):
        said = ""
        if block.reason is None:
            printed, value = run_block(block, page, scope)
            if block.file is not None:
                _show(value, page.parent / block.file)
            elif value is not None:
                printed += f"{value!r}\n"
            said = "\n".join(line.rstrip() for line in printed.rstrip().splitlines())
        parts += [text[end : match.end("code")], "```\n", f"\n```output\n{said}\n```\n" if said else ""]
        parts.append(match["shown"] or "")
        end = match.end()
    slow = ", slow" if (kept(text) or ("", False))[1] else ""
    text = _RAN.sub(f"<!-- ran: {ran(text)}{slow} -->\n", "".join([*parts, text[end:]]))
    page.write_text(text, encoding="utf-8")


def _show(value: Any, file: Path) -> None:
    """Write a figure, or what a notebook would show in a frame."""
    file.parent.mkdir(parents=True, exist_ok=True)
    if hasattr(value, "savefig"):
        from whence.report.drawing import save_figure

        save_figure(file, value, kind=file.suffix[1:])
    else:
        document = html.unescape(re.search(r'srcdoc="([^"]*)"', value._repr_html_())[1])
        file.write_text(document, encoding="utf-8")
