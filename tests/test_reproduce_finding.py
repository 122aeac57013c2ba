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

from reproduction.finding import Finding
from reproduction.provenance import provenance
from reproduction.writing import read, read_provenance, summary, write
from whence.errors import OptionError, RunDirectoryError, StorageError
from whence.report.drawing import COLOURS, figure


def finding(**changes: Any) -> Finding:
    values: dict[str, Any] = {
        "name": "floor",
        "title": "The floor of the last iterate",
        "claim": "More steps do not help.",
        "measured": "0.92 after 228 steps, 0.89 after 912.",
        "holds": True,
        "numbers": {"correlation": [0.92, 0.89], "steps": [228, 912], "nothing": None},
        "profile": "quick",
        "seconds": 1.5,
        "errata": ("The factor 1/δ is lost.",),
    }
    return Finding(**{**values, **changes})


def drawing() -> Any:
    with figure() as (drawn, (panel,)):
        panel.plot([1, 2, 3], [0.3, 0.1, 0.2], "o-", label="measured")
        panel.set_xlabel("steps")
        panel.set_ylabel("error, nats")
        panel.legend()
    return drawn


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "../escape"}, "names files"),
        ({"name": "Upper"}, "names files"),
        ({"name": ""}, "names files"),
        ({"claim": " "}, "claim"),
        ({"measured": ""}, "measured"),
        ({"holds": "yes"}, "True, False or None"),
        ({"profile": "fast"}, "quick, offline, paper"),
        ({"seconds": math.nan}, "duration"),
        ({"seconds": -1.0}, "duration"),
        ({"numbers": {"x": math.nan}}, "None for what is not a number"),
        ({"numbers": {"x": {1, 2}}}, "plain Python numbers"),
        ({"errata": ["a list"]}, "tuple"),
    ],
    ids=str,
)
def test_what_could_not_be_written_or_read_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        finding(**changes)


@pytest.mark.parametrize(
    ("holds", "words"), [(True, "holds"), (False, "does not hold"), (None, "cannot be told from this run")]
)
def test_verdict_in_words(holds: bool | None, words: str) -> None:
    assert finding(holds=holds).verdict == words


def test_written_findings_are_read_back_by_name(tmp_path: Path) -> None:
    second = finding(name="averages", holds=None, errata=())
    assert write(finding(), drawing(), tmp_path / "results") == tmp_path / "results" / "floor.json"
    write(second, drawing(), tmp_path / "results")
    assert read(tmp_path / "results") == [second, finding()]
    names = {path.name for path in (tmp_path / "results").iterdir()}
    assert names == {f"{n}.{e}" for n in ("floor", "averages") for e in ("json", "md", "png", "svg")}


def test_numbers_come_with_where_they_are_from(tmp_path: Path) -> None:
    write(finding(), drawing(), tmp_path)
    written = json.loads((tmp_path / "floor.json").read_text())
    assert written["finding"]["numbers"] == finding().numbers
    found = written["provenance"]
    assert found["seconds"] == 1.5
    for name in ("date", "commit", "whence", "torch", "python", "cpu", "cores", "platform", "threads"):
        assert name in found
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", found["date"])


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
    assert provenance(0.0)["commit"] is None
    subprocess.run(["git", "-C", str(tmp_path), "add", "provenance.py"], check=True)
    assert re.fullmatch(r"[0-9a-f]{12}-dirty", provenance(0.0)["commit"])
    subprocess.run(["git", "-C", str(tmp_path), *identity, "commit", "--quiet", "-m", "file"], check=True)
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "kept.json").write_text("{}")
    subprocess.run(["git", "-C", str(tmp_path), "add", "results"], check=True)
    assert re.fullmatch(r"[0-9a-f]{12}", provenance(0.0)["commit"])  # results are no change of the code


def test_the_same_figure_is_the_same_file(tmp_path: Path) -> None:
    for directory in ("first", "second"):
        write(finding(), drawing(), tmp_path / directory)
    for kind in ("svg", "png"):
        first, second = ((tmp_path / d / f"floor.{kind}").read_bytes() for d in ("first", "second"))
        assert first == second
    assert b"dc:date" not in (tmp_path / "first" / "floor.svg").read_bytes()
    assert (tmp_path / "first" / "floor.png").read_bytes().startswith(b"\x89PNG")


def test_a_file_that_cannot_be_written_leaves_the_old_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(finding(), drawing(), tmp_path)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    drawn = drawing()

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(drawn, "savefig", full)
    with pytest.raises(StorageError, match="disk is full"):
        write(finding(holds=False), drawn, tmp_path)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before
    assert read(tmp_path) == [finding()]
    assert path.is_file()


def test_what_is_no_finding_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="not a directory"):
        read(tmp_path / "missing")
    assert read(tmp_path) == []
    write(finding(), drawing(), tmp_path)
    content = json.loads((tmp_path / "floor.json").read_text())
    for change, message in (
        ({"format": 99}, "format 99"),
        ({"finding": 3}, "no finding"),
        ({"finding": {**content["finding"], "extra": 1}}, "extra"),
        ({"finding": {**content["finding"], "holds": "yes"}}, "True, False or None"),
    ):
        (tmp_path / "floor.json").write_text(json.dumps({**content, **change}))
        with pytest.raises(RunDirectoryError, match=message):
            read(tmp_path)
    (tmp_path / "floor.json").write_text("{")
    with pytest.raises(RunDirectoryError, match="cannot be read"):
        read(tmp_path)


def test_the_page_has_all_verdicts_first_and_every_figure() -> None:
    findings = [finding(), finding(name="averages", holds=False), finding(name="other", holds=None)]
    page = summary(findings)
    table = [line for line in page.splitlines() if line.startswith("|")]
    assert [row.split(" | ")[1] for row in table[2:]] == [
        "holds",
        "does not hold",
        "cannot be told from this run",
    ]
    for one in findings:
        assert f"({one.name}.svg)" in page
        assert f'<a id="{one.name}"></a>' in page
        assert page.index(f"](#{one.name})") < page.index(f'<a id="{one.name}">')
    assert page.count("The factor 1/δ is lost.") == 3


def test_the_page_says_where_numbers_come_from(tmp_path: Path) -> None:
    """Once for what findings have in common, by name where they differ."""
    write(finding(), drawing(), tmp_path)
    write(finding(name="averages"), drawing(), tmp_path)
    found = read_provenance(tmp_path)
    page = summary(read(tmp_path), found)
    assert page.count("Commit ") == 1
    assert f"torch {found['floor']['torch']}" in page
    assert "Times include measurements that several findings share" in page
    write(finding(name="averages"), drawing(), tmp_path, begun_at="an-older-one")
    page = summary(read(tmp_path), read_provenance(tmp_path))
    assert "averages: Commit" in page
    assert "partial results kept since an-older-one;" in page


def test_text_cannot_break_the_page() -> None:
    hostile = "a | b\n| c |\n# heading <script>alert(1)</script> *u* [x](javascript:1) `code` \\ $m$ &lt;"
    page = summary([finding(title=hostile, claim=hostile, measured=hostile, errata=(hostile,))])
    rows = [line for line in page.splitlines() if line.startswith("|")]
    assert len(rows) == 3
    for row in rows:
        assert len(re.findall(r"(?<!\\)\|", row)) == 5
    for line in page.splitlines():
        for mark in ("<script>", "[x](", "`code`", "*u*", "$m$", "&lt;"):
            assert re.search(r"(?<!\\)" + re.escape(mark), line) is None
    assert [line for line in page.splitlines() if line.startswith("#")] == [
        "# Results",
        next(line for line in page.splitlines() if line.startswith("## ")),
    ]


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with (
        pytest.raises(OptionError, match=r'matplotlib is needed.*pip install "whence\[reproduce\]"'),
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
