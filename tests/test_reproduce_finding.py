"""Findings: what is refused, what is written, what is read back, and the page of them all."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from reproduction.finding import Finding, number, page, plus_minus, write
from reproduction.provenance import provenance
from whence.errors import OptionError, StorageError
from whence.report.drawing import COLOURS, figure

ORIGIN = {"cpu": "some <cpu>", "threads": "1", "commit": "abc"}


def finding(**changes: Any) -> Finding:
    values: dict[str, Any] = {
        "name": "floor",
        "title": "The floor of the last iterate",
        "claim": "More steps do not help.",
        "holds": True,
        "verdict": "0.92 after 228 steps, 0.89 after 912.",
        "rows": (("correlation", "not printed", "0.89"),),
        "details": ("With λ = 5.",),
        "errata": ("The factor 1/δ is lost.",),
        "numbers": {"correlation": [0.92, 0.89], "steps": [228, 912], "nothing": None},
        "profile": "quick",
        "seconds": 1.5,
    }
    return Finding(**{**values, **changes})


def drawing() -> Any:
    with figure() as (drawn, (panel,)):
        panel.plot([1, 2, 3], [0.3, 0.1, 0.2], "o-", label="measured")
        panel.set_xlabel("steps")
        panel.set_ylabel("error, nats")
        panel.legend()
    return drawn


@pytest.mark.parametrize("numbers", [{"x": math.nan}, {"x": {1, 2}}], ids=str)
def test_numbers_that_json_cannot_hold_are_refused(numbers: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=r"plain Python numbers.*None for what is not a number"):
        finding(numbers=numbers)


@pytest.mark.parametrize(
    ("value", "stderr", "words"),
    [
        (0.0, 0.0, "0"),
        (-1.271, 0.318, "-1.3 ± 0.3"),
        (82.48, 14.5, "82 ± 14"),
        (177123.0, 5000.0, "(1.77 ± 0.05)·10⁵"),
        (2.0, 0.0, "2"),
    ],
)
def test_numbers_with_their_errors(value: float, stderr: float, words: str) -> None:
    assert plus_minus(value, stderr) == words


def test_numbers_keep_three_digits() -> None:
    values = (999.7, 1234.5, 99_960.0, 0.0326, -0.5, 3.2e-15)
    assert [number(x) for x in values] == ["1,000", "1,230", "100,000", "0.0326", "-0.5", "3.2·10⁻¹⁵"]


def test_files_hold_the_finding_and_where_it_comes_from(tmp_path: Path) -> None:
    origin = provenance()
    write(finding(), drawing(), tmp_path / "results", provenance=origin)
    assert {path.name for path in (tmp_path / "results").iterdir()} == {
        f"floor.{e}" for e in ("json", "png", "svg")
    }
    written = json.loads((tmp_path / "results" / "floor.json").read_text())
    assert written["numbers"] == finding().numbers
    assert written["rows"] == [["correlation", "not printed", "0.89"]]
    assert written["provenance"] == origin
    for name in ("date", "commit", "whence", "torch", "python", "cpu", "cores", "platform", "threads"):
        assert name in origin
    assert origin["python"] == ".".join(map(str, sys.version_info[:3]))
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", origin["date"])


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_a_checkout_of_somebody_else_is_not_the_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package installed inside another project's repository has no commit."""
    from reproduction import provenance as module

    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    commit = ["commit", "--quiet", "--allow-empty", "-m", "theirs"]
    subprocess.run(["git", "-C", str(tmp_path), *identity, *commit], check=True)
    installed = tmp_path / "provenance.py"
    installed.write_text("")
    monkeypatch.setattr(module, "__file__", str(installed))
    assert provenance()["commit"] is None
    subprocess.run(["git", "-C", str(tmp_path), "add", "provenance.py"], check=True)
    assert re.fullmatch(r"[0-9a-f]{12}-dirty", provenance()["commit"])
    subprocess.run(["git", "-C", str(tmp_path), *identity, "commit", "--quiet", "-m", "file"], check=True)
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "kept.json").write_text("{}")
    subprocess.run(["git", "-C", str(tmp_path), "add", "results"], check=True)
    assert re.fullmatch(r"[0-9a-f]{12}", provenance()["commit"])  # results are no change of the code


def test_the_same_figure_is_the_same_file(tmp_path: Path) -> None:
    for directory in ("first", "second"):
        write(finding(), drawing(), tmp_path / directory, provenance=ORIGIN)
    for kind in ("svg", "png"):
        first, second = ((tmp_path / d / f"floor.{kind}").read_bytes() for d in ("first", "second"))
        assert first == second
    assert b"dc:date" not in (tmp_path / "first" / "floor.svg").read_bytes()
    assert (tmp_path / "first" / "floor.png").read_bytes().startswith(b"\x89PNG")


def test_a_file_that_cannot_be_written_leaves_the_old_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(finding(), drawing(), tmp_path, provenance=ORIGIN)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    drawn = drawing()

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(drawn, "savefig", full)
    with pytest.raises(StorageError, match="disk is full"):
        write(finding(holds=False), drawn, tmp_path, provenance=ORIGIN)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_the_page_has_all_verdicts_first_then_tables_and_figures_with_details_folded() -> None:
    findings = [finding(), finding(name="averages", holds=False), finding(name="other", holds=None)]
    text = page([(one, ORIGIN) for one in findings])
    table = [line for line in text.split("<a id=")[0].splitlines() if line.startswith("|")]
    assert [row.split(" | ")[1] for row in table[2:]] == ["holds", "does not hold", "cannot be told"]
    for one, section in zip(findings, text.split("<a id=")[1:], strict=True):
        assert section.startswith(f'"{one.name}"></a>')
        shown, folded = section.split("<details>")
        assert f"**{one.outcome.capitalize()}.** {one.verdict}" in shown
        assert "| correlation | not printed | 0.89 |" in shown
        assert f"({one.name}.svg)" in shown
        assert "The factor 1/δ is lost." in folded
        assert "With λ = 5." in folded
        assert "at commit abc." in folded
        assert folded.endswith("</details>\n") or "</details>\n\n" in folded
    assert "with measurements kept since older." in page([(finding(), {**ORIGIN, "begun_at": "older"})])


def test_the_page_is_what_a_reader_of_markdown_sees() -> None:
    """Tables are tables, the details are not eaten by the block of HTML around them."""
    from markdown_it import MarkdownIt

    html = MarkdownIt("commonmark").enable("table").render(page([(finding(), ORIGIN)]))
    assert html.count("<table>") == 2
    assert "<td>0.89</td>" in html
    assert "<li>With λ = 5.</li>" in html
    assert '<img src="floor.svg"' in html


def test_text_cannot_break_the_page() -> None:
    hostile = "a | b\n| c |\n# heading <script>alert(1)</script> *u* [x](javascript:1) `code` \\ $m$ &lt;"
    texts = dict.fromkeys(("title", "claim", "verdict"), hostile)
    one = finding(**texts, rows=((hostile,) * 3,), details=(hostile,), errata=(hostile,))
    lines = page([(one, {**ORIGIN, "cpu": hostile})]).splitlines()
    rows = [line for line in lines if line.startswith("|")]
    assert len(rows) == 6
    assert all(len(re.findall(r"(?<!\\)\|", row)) == 4 for row in rows)
    for line in lines[6:]:  # after what is said about the page itself
        for mark in ("<script>", "[x](", "`code`", "*u*", "$m$", "&lt;"):
            assert re.search(r"(?<!\\)" + re.escape(mark), line) is None
    assert [line[:3] for line in lines if line.startswith("#")] == ["# R", "## "]


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with (
        pytest.raises(OptionError, match=r'matplotlib is needed.*pip install "whence\[plot\]"'),
        figure(),
    ):
        pass


def test_figures_leave_matplotlib_as_it_was_and_open_no_window() -> None:
    import matplotlib

    before = dict(matplotlib.rcParams)
    drawn = drawing()
    assert dict(matplotlib.rcParams) == before
    assert type(drawn.canvas).__name__ == "FigureCanvasAgg"
    assert drawn.axes[0].lines[0].get_color() == COLOURS[0]
    code = "import sys, reproduction.finding; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
