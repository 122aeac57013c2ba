"""The documentation site: `make docs` builds it with warnings as errors."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

import whence

ROOT = Path(__file__).parents[1]
#: Pages that are files of the repository outside of docs/.
TAKEN = {"results": "results/RESULTS.md", "changes": "CHANGELOG.md", "contributing": "CONTRIBUTING.md"}

project = "whence"
project_copyright = "the authors of whence; Apache-2.0"
release = version = whence.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 4  # the addresses that GitHub gives headings
highlight_language = "text"
default_role = "code"  # single backticks in docstrings
exclude_patterns = ["_build"]
suppress_warnings = ["config.cache"]

html_theme = "furo"
html_title = "whence"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False

autodoc_member_order = "bysource"
autodoc_typehints = "none"
autodoc_default_options = {"members": True}
napoleon_use_ivar = True


def setup(app):
    """Blocks of code that no lexer knows, and what is made of sources before they are read."""
    from pygments.lexers.special import TextLexer

    for name in ("stack", "output"):
        app.add_lexer(name, TextLexer)
    app.connect("source-read", _read)
    app.connect("autodoc-process-docstring", _keep_bars)


def _read(app, docname, source):
    """Pages that stand elsewhere in the repository, and links to them."""
    text, folder = source[0], posixpath.dirname(f"docs/{docname}")
    if docname in TAKEN:
        text, folder = (ROOT / TAKEN[docname]).read_text(encoding="utf-8"), posixpath.dirname(TAKEN[docname])
        text = re.sub(r'<a id="(\w+)"></a>', r"(\1)=", text)
    pages = {target: docname for docname, target in TAKEN.items()}

    def leading(match):
        said, path, fragment = match[1], match[2], match[3] or ""
        target = posixpath.normpath(posixpath.join(folder, path))
        target = f"docs/{pages[target]}.md" if target in pages else target
        if not match[0].startswith("!") and not target.startswith("docs/"):
            return said[1:-1]  # in the repository alone
        return f"{said}({posixpath.relpath(target, posixpath.dirname(f'docs/{docname}'))}{fragment})"

    source[0] = re.sub(r"(!?\[[^\]]*\])\((?![a-z]+:|#)([^)#\s]+)(#[^)\s]*)?\)", leading, text)


def _keep_bars(app, what, name, obj, options, lines):
    """`|B|` is a size, not a substitution."""
    for i, line in enumerate(lines):
        parts = line.split("`")
        parts[::2] = [part.replace("|", r"\|") for part in parts[::2]]
        lines[i] = "`".join(parts)
