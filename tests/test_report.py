"""The HTML report: what it is made of."""

from __future__ import annotations

import dataclasses
import errno
import html
import json
import math
import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import pages
import whence.report
from whence.attribution.page import render, write_page
from whence.errors import OptionError, StorageError
from whence.report import figures
from whence.report.formatting import interval
from whence.report.untrusted import href

REPORTS = pages.REPORTS


@pytest.mark.parametrize("name", REPORTS)
def test_a_page_asks_for_nothing_outside_itself(name: str) -> None:
    page = render(REPORTS[name]())
    loaded = re.findall(
        r"<(?:img|link|script|iframe|source|object|embed)\b[^>]*?\b(?:src|href|data)=\"([^\"]*)", page
    )
    assert all(address.startswith("data:") for address in loaded)
    assert "@import" not in page
    assert "url(" not in page
    assert page.isascii() or page.encode("utf-8")


def test_policy_allows_no_inline_code_but_the_page_s_own() -> None:
    page = render(pages.text_report())
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    policy = html.unescape(policy)
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy
    assert "http" not in policy


@pytest.mark.parametrize(
    "link",
    [
        "javascript:alert(1)",
        "JaVaScRiPt:alert(1)",
        "java\nscript:alert(1)",
        "\x01javascript:alert(1)",
        " javascript:alert(1)",
        "data:text/html,<script>alert(1)</script>",
        "vbscript:x",
        "mailto:someone@example.org",
        "//host/share",
        "\\\\host\\share",
        "file://host/share",
        "https:",
        "http://[broken",
        "",
        None,
    ],
)
def test_links_that_lead_nowhere_safe_are_refused(link: str | None) -> None:
    assert href(link) is None


@pytest.mark.parametrize(
    ("link", "expected"),
    [
        ("https://example.org/a?b=c&d#e", "https://example.org/a?b=c&d#e"),
        ("train/0001.png", "train/0001.png"),
        ("../a b/c.txt", "../a%20b/c.txt"),
        ("/data/x.txt", "/data/x.txt"),
        ("C:\\data\\x.txt", "file:///C:/data/x.txt"),
        ("#here", "#here"),
    ],
)
def test_links_to_pages_and_files_are_kept(link: str, expected: str) -> None:
    assert href(link) == expected


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ((123456.0, 121000.0, 125900.0), ("+123,500", "121,000 to 125,900")),
        ((0.5, -0.25, 1.25), ("+0.50", "−0.25 to 1.25")),
        ((-1e-12, -1e-12, -1e-12), ("−1.000×10⁻¹²", "(−1.000 to −1.000)×10⁻¹²")),
        ((0.0, 0.0, 0.0), ("0.0", "0.0 to 0.0")),
        ((math.nan, math.nan, math.nan), ("NaN", "no interval")),
        ((1.0, -math.inf, math.inf), ("+1.000", "−∞ to ∞")),
        ((-math.inf, -math.inf, 2.0), ("−∞", "−∞ to 2.000")),
        ((1e300, 0.9e300, 1.1e300), ("+1.00×10³⁰⁰", "(0.90 to 1.10)×10³⁰⁰")),
    ],
)
def test_intervals_have_the_digits_that_their_width_justifies(
    numbers: tuple[float, float, float], expected: tuple[str, str]
) -> None:
    assert interval(*numbers) == expected


def test_a_million_scores_make_no_larger_page() -> None:
    few, total = pages.image_report(), 1_000_000
    scores = torch.tensor(np.random.default_rng(0).standard_t(2, size=(2, total)))
    many = dataclasses.replace(
        few,
        chain_scores=torch.stack([scores - 0.1, scores + 0.1]),
        indices=torch.arange(total),
        terms=torch.ones(total, dtype=torch.long),
        num_examples=total,
        num_terms=total,
        dot_products=None,
    )
    page = render(many)
    assert len(page) < len(render(dataclasses.replace(few, dot_products=None))) + 10_000
    for shown in re.findall(r'aria-label="Histogram of 1,000,000 scores.*?</svg>', page, flags=re.DOTALL):
        counts = [int(n.replace(",", "")) for n in re.findall(r"<title>([\d,]+) with scores", shown)]
        assert sum(counts) == total
    assert page.count("Histogram of 1,000,000 scores") == 2


def test_a_path_begins_at_its_first_step() -> None:
    """The first point is what the first iteration found; there is none before it."""
    drawn = figures.chain_paths(np.array([[1.0, 2.0, 3.0, 4.0]]), 0.5, unit="iteration")
    assert drawn is not None
    (points,) = re.findall(r'<polyline class="chain c0" points="([^"]*)"', drawn)
    assert [point.split(",")[0] for point in points.split()] == ["0.0", "333.3", "666.7", "1000.0"]
    below = re.findall(rf'<text x="([\d.]+%)" y="{figures.HEIGHT + 17}"[^>]*>([^<]*)<', drawn)
    assert below == [("0.00%", "1"), ("33.33%", "2"), ("66.67%", "3"), ("100.00%", "4")]
    (averaged,) = re.findall(r'<rect class="tail" x="([^"]*)"', drawn)  # the third and the fourth
    assert averaged == "66.67%"
    assert "path of 4 iterations" in drawn
    assert ">iteration<" in drawn


def test_long_paths_are_thinned_out_and_stay_in_place() -> None:
    drawn = figures.chain_paths(np.linspace(1.0, 2.0, 5000)[None], 0.0)
    assert drawn is not None
    (points,) = re.findall(r'<polyline class="chain c0" points="([^"]*)"', drawn)
    x, y = np.array([[float(part) for part in point.split(",")] for point in points.split()]).T
    assert 200 <= len(x) <= figures.POINTS
    assert (x[0], x[-1]) == (0.0, 1000.0)
    line = np.polynomial.Polynomial.fit(x, y, 1)  # a straight path is drawn as a straight line
    assert np.abs(line(x) - y).max() < 0.1
    assert ">step<" in drawn


@pytest.mark.parametrize("scores", [[0.0, 0.0], [math.nan], [5.0], [-1e-30, 1e30]])
@pytest.mark.parametrize("chains", [1, 2])
def test_every_kind_of_scores_is_rendered(scores: list[float], chains: int) -> None:
    result = pages.image_report()
    plan = result.solve.plan
    plan = dataclasses.replace(plan, spectrum=dataclasses.replace(plan.spectrum, eigenvalues=None))
    few = dataclasses.replace(
        result,
        chain_scores=torch.tensor(scores, dtype=torch.float64).expand(chains, 2, -1),
        indices=torch.arange(len(scores)),
        terms=torch.ones(len(scores), dtype=torch.long),
        dot_products=None,
        exhibits={},
        solve=dataclasses.replace(result.solve, plan=plan, paths=torch.ones(chains, 1, 2)),
    )
    assert "<h1" in render(few)


def test_embedded_json_gives_back_the_settings() -> None:
    page = render(pages.hostile_report())
    (data,) = re.findall(r'<script type="application/json" id="reproduce-data">(.*?)</script>', page)
    assert json.loads(data)["settings"][pages.SCRIPT] == pages.BREAKOUT


def test_writing_replaces_the_whole_file_or_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, before = tmp_path / "new" / "report.html", render(pages.image_report())
    assert write_page(before, target) == target
    assert target.read_text(encoding="utf-8") == before

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(StorageError, match="the disk is full"):
        write_page(render(pages.text_report()), target)
    assert target.read_text(encoding="utf-8") == before
    assert list(target.parent.iterdir()) == [target]


def test_a_directory_is_no_place_to_write_to(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"report\.html"):
        write_page(render(pages.text_report()), tmp_path)


def test_pages_import_no_torch_of_their_own() -> None:
    sources = list(Path(whence.report.__file__).parent.glob("*.py"))
    assert len(sources) > 5
    for source in sources:
        assert not re.search(
            r"^\s*(import|from) torch", source.read_text(encoding="utf-8"), flags=re.MULTILINE
        )


def test_a_page_without_checks_says_how_to_get_them() -> None:
    page = render(pages.image_report(validation=None))
    (section,) = re.findall(r'<section class="validation".*?</section>', page, flags=re.DOTALL)
    assert "<code>whence validate RUN</code>" in section
    assert "<svg" not in section
    assert "whence validate" not in render(pages.image_report())


def test_checks_are_shown_with_their_words_and_numbers() -> None:
    page = render(pages.text_report())
    (section,) = re.findall(r'<section class="validation".*?</section>', page, flags=re.DOTALL)
    text = " ".join(html.unescape(re.sub(r"<[^>]*>", " ", section)).split())
    for words in (
        "Doubt. Not as they stand: fine-tuning gives reason to doubt these scores.",
        "Trust Did the solver find what it looked for?",
        "Not run Would another damping rank differently? Not run: it would take about 3.1 h.",
        "correlation −0.999 ± 0.001 slope −1.020 ± 0.040",
        "converged solves 3 of 3",
        "None of these checks retrains the model.",
    ):
        assert words in text
    assert section.count('<g class="pair') == 24  # eight examples converged, for three questions


@pytest.mark.parametrize("queries", [0, 1, 60])
def test_comparisons_of_any_number_are_drawn(queries: int) -> None:
    """At most 400 marks, whatever was compared."""
    found = pages.validation(np.random.default_rng(0), queries=queries)
    page = render(pages.image_report(validation=found))
    marks = page.count('<g class="pair')
    assert (marks == 8 * queries) if queries < 50 else 100 < marks <= 400


def test_where_the_model_is_wrong_the_label_is_what_examples_help_or_hurt() -> None:
    both = pages.image_report()
    for query, of_what, wrong in ((0, "the label", True), (1, "this", False)):
        one = slice(query, query + 1)
        page = render(
            dataclasses.replace(
                both,
                chain_scores=both.chain_scores[:, one],
                dot_products=None,
                queries=both.queries[one],
            )
        )
        assert f"would be less sure of {of_what}." in page
        assert f"would be surer of {of_what}." in page
        assert ("those behind the mistake" in page) == wrong
