"""The HTML report in a real browser: what a reader meets."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import pages
from whence import Classification, attribute
from whence.attribution.page import SHOWN, render, write_page

REPORTS = pages.REPORTS

Browser = Any  # selenium's driver: imported inside the fixture, where its warnings can be kept apart
FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage"
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """One headless Chromium for the module. Without one: skip, but fail in continuous integration."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    chromedriver = shutil.which("chromedriver")
    if chromium is None or chromedriver is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("chromium and chromedriver are needed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # selenium's own, at import
        from selenium import webdriver
        from selenium.webdriver.chrome.service import Service
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in (*FLAGS.split(), f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(chromedriver))
    driver.get("about:blank")
    driver.get_log("performance")  # of the browser's own first page
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("reports")
    return {name: write_page(render(make()), folder / f"{name}.html") for name, make in REPORTS.items()}


@pytest.fixture
def visit(browser: Browser, files: dict[str, Path]) -> Iterator[Callable[..., Browser]]:
    """Open a report; afterwards nothing may have been complained of or asked of the network."""

    def go(
        name: str, *, width: int = 1200, colours: str = "light", media: str = "", anchor: str = ""
    ) -> Browser:
        features = [
            {"name": "prefers-color-scheme", "value": colours},
            {"name": "prefers-reduced-motion", "value": "reduce"},  # or clicks would miss what still moves
        ]
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": media, "features": features})
        metrics = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 600}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        browser.get("about:blank")  # so that an anchor alone makes a new page, too
        browser.get(files[name].as_uri() + anchor)
        return browser

    yield go
    assert [line for line in browser.get_log("browser") if line["level"] != "DEBUG"] == []
    events = [json.loads(line["message"])["message"] for line in browser.get_log("performance")]
    asked = [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]
    assert asked  # the page itself: the log does work
    assert [url for url in asked if not url.startswith(("file:", "data:", "about:"))] == []


def shown(browser: Browser, listing: str, question: int = 0) -> list[str]:
    """Addresses of the entries that can be seen in a list, from top to bottom."""
    found: list[str] = browser.execute_script(
        """return [...document.querySelectorAll(`#q${arguments[0]} .${arguments[1]} .entry`)]
           .filter(e => e.checkVisibility()).map(e => [e.getBoundingClientRect().top, e.id])
           .sort((a, b) => a[0] - b[0]).map(pair => pair[1])""",
        question,
        listing,
    )
    return found


def anchors(
    entries: Any, key: Callable[[Any], Any], *, reverse: bool = False, question: int = 0
) -> list[str]:
    return [f"q{question}-t{e.index}" for e in sorted(entries, key=key, reverse=reverse)]


def fill(browser: Browser, selector: str, value: str) -> None:
    """Type into a field, as a reader does."""
    field = browser.find_element("css selector", selector)
    field.clear()
    field.send_keys(value)


def choose(browser: Browser, value: str) -> None:
    browser.find_element("css selector", f'#q0 .sort-by option[value="{value}"]').click()


@pytest.mark.parametrize("width", [360, 1200])
def test_links_beside_a_long_title_stay_on_one_line(visit: Callable[..., Browser], width: int) -> None:
    page = visit("text", width=width)
    heights = page.execute_script(
        """document.querySelectorAll(".question-head .id").forEach(e => e.textContent = "a long title ".repeat(9));
           return [...document.querySelectorAll(".steps a")].map(a => a.getBoundingClientRect().height)"""
    )
    assert heights
    assert max(heights) < 30


def test_sorting_changes_the_order_that_is_seen(visit: Callable[..., Browser]) -> None:
    result = pages.text_report()
    helpful, harmful = pages.ends(result, 0)
    page = visit("text")
    for name, entries in (("helpful", helpful), ("harmful", harmful)):
        assert shown(page, name) == [f"q0-t{e.index}" for e in entries]
    choose(page, "index")
    assert shown(page, "helpful") == anchors(helpful, lambda e: e.index)
    choose(page, "baseline")
    assert shown(page, "helpful") == anchors(helpful, lambda e: e.dot_product, reverse=True)
    choose(page, "score")
    assert shown(page, "harmful") == anchors(harmful, lambda e: e.score, reverse=True)
    choose(page, "effect")
    assert shown(page, "harmful") == anchors(harmful, lambda e: e.effect, reverse=True)
    button = page.find_element("css selector", "#q0 .direction")
    button.send_keys(" ")  # by keyboard
    assert button.get_attribute("aria-pressed") == "true"
    assert shown(page, "harmful") == anchors(harmful, lambda e: e.effect)
    choose(page, "id")
    ids = {f"q0-t{e.index}": result.exhibits[e.index].id or "" for e in helpful}
    order = [ids[anchor] for anchor in shown(page, "helpful")]
    assert order == sorted(order, reverse=True)
    assert len(order) == len(helpful)
    button.click()
    choose(page, "")
    assert shown(page, "helpful") == [f"q0-t{e.index}" for e in helpful]


def test_filters_leave_what_fits(visit: Callable[..., Browser]) -> None:
    result = pages.image_report()
    entries = [row for end in pages.ends(result, 0) for row in end]
    page = visit("image")

    def seen() -> set[str]:
        return {*shown(page, "helpful"), *shown(page, "harmful")}

    def expected(fits: Callable[[Any], bool]) -> set[str]:
        return {f"q0-t{e.index}" for e in entries if fits(e)}

    least = sorted(abs(e.score) for e in entries)[len(entries) // 2]
    fill(page, "#q0 .by-size", f"{least:.3f}")
    large = expected(lambda e: abs(e.score) >= float(f"{least:.3f}"))
    assert 0 < len(large) < len(entries)
    assert seen() == large
    assert page.find_element("css selector", "#q0 .shown").text == f"{len(large)} of {len(entries)} shown"
    page.find_element("css selector", "#q0 .reset").click()
    assert len(seen()) == len(entries)

    page.find_element("css selector", "#q0 .by-separation").click()
    separated = expected(lambda e: e.separated)
    assert 0 < len(separated) < len(entries)
    assert seen() == separated
    page.find_element("css selector", "#q0 .reset").click()

    fill(page, "#q0 .by-word", "FLIPPED")
    flipped = expected(lambda e: result.exhibits[e.index].note is not None)
    assert 0 < len(flipped) < len(entries)
    assert seen() == flipped
    fill(page, "#q0 .by-word", "no such label")
    assert seen() == set()
    assert page.find_element("css selector", "#q0 .helpful .nothing").is_displayed()
    assert len(shown(page, "helpful", 1)) == SHOWN  # the other question is as it was


def test_search_finds_texts_across_tokens_and_marks_them(visit: Callable[..., Browser]) -> None:
    result = pages.text_report()
    entries = [row for q in range(3) for end in pages.ends(result, q) for row in end]
    term = "Runtime Context"  # two tokens, in other letters
    matching = [e for e in entries if term.lower() in (result.exhibits[e.index].text or "").lower()]
    assert 0 < len(matching) < len(entries)
    page = visit("text")
    fill(page, "#search", term)
    visible = [a for q in range(3) for name in ("helpful", "harmful") for a in shown(page, name, q)]
    assert len(visible) == len(matching)
    found = page.find_element("id", "found").text
    assert found.startswith(f"{len(matching)} of {len(entries)} examples")
    marks = page.execute_script("return [...CSS.highlights.get('search')].map(range => range.toString())")
    assert len(marks) >= len(matching)
    assert {mark.lower() for mark in marks} == {"runtime context"}
    page.find_element("id", "search").send_keys("\ue007")  # Enter leads to the first
    assert page.find_element("css selector", ".entry.current").get_attribute("id") == visible[0]
    page.find_element("id", "search").send_keys("\ue00c")  # Escape gives everything back
    assert len(shown(page, "helpful")) == SHOWN
    assert page.find_element("id", "found").text == ""


@pytest.mark.parametrize("term", ["reference/section-1", "data model", "also in the tutorial"])
def test_search_covers_ids_labels_and_notes(visit: Callable[..., Browser], term: str) -> None:
    result = pages.text_report()
    page = visit("text")
    fill(page, "#search", term)
    shows = [(row.index, result.exhibits[row.index]) for row in pages.ends(result, 0)[0]]
    fits = [f"q0-t{index}" for index, x in shows if term in (x.id, x.label, x.note)]
    assert fits
    assert shown(page, "helpful") == fits


def test_a_link_to_an_entry_leads_there(visit: Callable[..., Browser]) -> None:
    index = pages.ends(pages.text_report(), 2)[1][-1].index
    page = visit("text", anchor=f"#q2-t{index}")
    entry = page.find_element("id", f"q2-t{index}")
    assert page.switch_to.active_element == entry
    fill(page, "#search", "nothing has this in it")
    assert not entry.is_displayed()
    page.execute_script("location.hash = ''; location.hash = arguments[0]", f"q2-t{index}")
    page.execute_async_script("setTimeout(arguments[0], 50)")
    assert entry.is_displayed()


def test_the_question_that_did_not_converge_says_so(visit: Callable[..., Browser]) -> None:
    page = visit("text")
    warnings = [
        " ".join(found.text for found in page.find_elements("css selector", f"#q{k} > .warning"))
        for k in range(3)
    ]
    assert ["Not converged" in warning for warning in warnings] == [False, False, True]
    assert all("Intervals in doubt" in warning for warning in warnings)  # of batches drawn by curvature
    top = page.find_element("css selector", "main > .warning").text
    assert "question 3" in top
    assert "diverged after 12 steps" in top


@pytest.mark.parametrize("width", [360, 1200])
def test_checks_can_be_told_apart_without_colours(visit: Callable[..., Browser], width: int) -> None:
    page = visit("text", width=width, anchor="#validation")
    rows = page.find_elements("css selector", "#validation .check")
    words = [row.find_element("css selector", ".word").text for row in rows]
    assert words == ["Trust", "Cannot tell", "Doubt", "Not run"]
    shapes = [row.find_element("css selector", ".mark").get_attribute("innerHTML") for row in rows]
    assert len(set(shapes)) == 3  # what was not run cannot tell either
    assert "reason to doubt" in page.find_element("css selector", "main > .warning").text
    places = page.execute_script(
        """const middle = e => { const r = e.getBoundingClientRect();
             return [r.left + r.width / 2, r.top + r.height / 2] };
           const frame = document.querySelector("#validation .plot").getBoundingClientRect();
           return [...document.querySelectorAll("#validation .pair circle, #validation .pair rect")].map(middle)
             .map(([x, y]) => [(x - frame.left) / frame.width, 1 - (y - frame.top) / frame.height])"""
    )
    assert len(places) == 24
    assert all(0 <= x <= 1 and 0 <= y <= 1 for x, y in places)
    assert np.corrcoef(np.array(places).T)[0, 1] < -0.99  # the scores have the wrong sign, and it shows
    assert visit("image", width=width).find_element("css selector", ".conclusion").text.startswith("Trust.")


def test_data_are_shown_and_never_run(visit: Callable[..., Browser]) -> None:
    page = visit("hostile")
    assert page.title.startswith("</style>")
    assert (
        page.execute_script("return document.querySelectorAll('main script, main style, main iframe').length")
        == 0
    )
    assert page.execute_script("return document.querySelectorAll('img').length") == 0
    assert page.find_element("css selector", "h1").text == pages.BREAKOUT
    assert page.find_element("css selector", "#q0-t0 .passage").text.startswith("<script>alert(1)</script>")
    assert "{{ 7 * 7 }}" in page.find_element("css selector", "#q0-t0 .note").text
    addresses = [a.get_attribute("href") for a in page.find_elements("css selector", "main a")]
    assert addresses
    assert all(a.startswith("file:") and "#" in a for a in addresses)
    long = page.find_element("css selector", "#q0-t2 .passage").text
    assert "‹NUL›‹ESC›‹BEL›‹U+009B›" in long


def test_the_policy_stops_code_that_gets_in_all_the_same(browser: Browser, files: dict[str, Path]) -> None:
    browser.get(files["text"].as_uri())
    browser.execute_script(
        """const script = document.createElement("script");
           script.textContent = "document.title = 'broken in'";
           document.body.append(script);
           document.body.insertAdjacentHTML("beforeend", "<img src='https://example.invalid/x.png'>");"""
    )
    assert browser.title != "broken in"
    complaints = " ".join(line["message"] for line in browser.get_log("browser"))
    browser.get_log("performance")
    assert complaints.count("Content Security Policy") == 2


def test_right_to_left_text_runs_from_the_right(visit: Callable[..., Browser]) -> None:
    page = visit("hostile")
    passage = page.find_element("css selector", "#q0-t1 .passage")
    assert passage.value_of_css_property("direction") == "rtl"
    assert pages.HEBREW in passage.text
    assert pages.ARABIC in passage.text
    assert "\u202e" not in passage.text
    first, last = page.execute_script(
        """const node = arguments[0].firstChild, at = k => {
             const range = document.createRange(); range.setStart(node, k); range.setEnd(node, k + 1);
             return range.getBoundingClientRect().left };
           return [at(0), at(3)]""",
        passage,
    )
    assert first > last
    name = page.find_element("css selector", "#q0-t1 .id")
    assert name.value_of_css_property("unicode-bidi") == "isolate"


@pytest.mark.parametrize("name", REPORTS)
@pytest.mark.parametrize("width", [360, 390])
def test_a_phone_needs_no_scrolling_sideways(visit: Callable[..., Browser], name: str, width: int) -> None:
    page = visit(name, width=width)
    page.execute_script("for (const d of document.querySelectorAll('details')) d.open = true")
    assert page.execute_script("return [innerWidth, document.documentElement.scrollWidth]") == [width, width]
    beyond = page.execute_script(
        """return [...document.querySelectorAll("main *, .toolbar *")]
           .filter(e => e.checkVisibility() && e.getBoundingClientRect().right > innerWidth + 0.5)
           .map(e => e.outerHTML.slice(0, 120))"""
    )
    assert beyond == []


# Colours of every visible text and of what is behind it, as the browser paints them.
CONTRASTS = """
const canvas = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
const paint = colours => {
  for (const colour of colours) { canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1); }
  return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
};
const light = rgb => rgb.map(c => c / 255).map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
  .reduce((sum, c, k) => sum + c * [0.2126, 0.7152, 0.0722][k], 0);
const known = new Map();
const poor = [];
let count = 0;
for (const element of document.querySelectorAll("body *")) {
  const says = [...element.childNodes].some(node => node.nodeType === 3 && node.data.trim());
  if (!says || !element.checkVisibility() || element.closest(".hidden-label, .skip, option, title")) continue;
  const behind = [];
  for (let e = element; e; e = e.parentElement) behind.unshift(getComputedStyle(e).backgroundColor);
  const style = getComputedStyle(element);
  const colour = element.closest("svg") ? style.fill : style.color;
  const key = [...behind, colour].join();
  if (!known.has(key)) {
    const [a, b] = [light(paint(behind)), light(paint([...behind, colour]))].sort((x, y) => y - x);
    known.set(key, (a + 0.05) / (b + 0.05));
  }
  count += 1;
  if (known.get(key) < 4.5) poor.push([known.get(key), element.outerHTML.slice(0, 100)]);
}
return [count, poor.slice(0, 10)];
"""


@pytest.mark.parametrize("name", ["text", "image"])
@pytest.mark.parametrize("colours", ["light", "dark"])
def test_every_text_has_enough_contrast(visit: Callable[..., Browser], name: str, colours: str) -> None:
    count, poor = visit(name, colours=colours).execute_script(CONTRASTS)
    assert count > 100
    assert poor == []


def test_dark_and_light_by_system_and_by_choice(visit: Callable[..., Browser]) -> None:
    def background() -> str:
        colour: str = page.execute_script("return getComputedStyle(document.body).backgroundColor")
        return colour

    page = visit("image", colours="light")
    light = background()
    page = visit("image", colours="dark")
    dark = background()
    assert light != dark
    button = page.find_element("id", "theme")
    assert button.get_attribute("aria-pressed") == "true"
    button.click()
    assert background() == light
    button.click()
    assert background() == dark
    page.execute_script("localStorage.clear()")


def test_tokens_are_shaded_and_tell_their_score(visit: Callable[..., Browser]) -> None:
    result = pages.text_report()
    index = pages.ends(result, 0)[0][0].index
    token_scores = result.token_scores[0, index]
    strongest = int(np.argmax(np.abs(token_scores)))
    page = visit("text")
    tokens = page.find_elements("css selector", f"#q0-t{index} .t")
    assert len(tokens) == len(token_scores)
    look = tokens[strongest].get_attribute("class")
    assert look.split()[1] == ("p10" if token_scores[strongest] > 0 else "n10")
    # scrolling hides the tip, and its event comes with the next frame: wait for it, or it may come after the pointer's
    page.execute_async_script(
        "arguments[0].scrollIntoView({block: 'center', behavior: 'instant'});"
        "requestAnimationFrame(() => requestAnimationFrame(arguments[1]))",
        tokens[strongest],
    )
    tip = tokens[strongest].get_attribute("title")
    page.execute_script(
        "arguments[0].dispatchEvent(new PointerEvent('pointerover', {bubbles: true}))", tokens[strongest]
    )
    shown_tip = page.find_element("id", "tip")
    assert shown_tip.is_displayed()
    assert shown_tip.text == tip
    assert tip.replace("−", "-").startswith(f"{token_scores[strongest]:+.1f}")


def test_long_texts_are_folded_until_asked_for(visit: Callable[..., Browser]) -> None:
    result = pages.text_report()
    long = [
        (q, row.index)
        for q in range(3)
        for end in pages.ends(result, q)
        for row in end
        if result.exhibits[row.index].id == "tutorial/all-of-it"
    ]
    assert long
    number, index = long[0]
    page = visit("text")
    passage = page.find_element("css selector", f"#q{number}-t{index} .passage")
    button = page.find_element("css selector", f"#q{number}-t{index} .unfold")
    folded = passage.size["height"]
    assert button.get_attribute("aria-expanded") == "false"
    button.send_keys("\ue007")
    assert passage.size["height"] > 2 * folded
    assert button.text == "Show less"
    assert passage.value_of_css_property("white-space") == "pre-wrap"


def test_small_images_are_enlarged_pixel_by_pixel(visit: Callable[..., Browser]) -> None:
    page = visit("image")
    sizes, looks = page.execute_script(
        """const images = [...document.images];
           return [images.map(i => i.naturalWidth), images.map(i => getComputedStyle(i).imageRendering)]"""
    )
    assert set(sizes) == {8}
    assert set(looks) == {"pixelated"}


@pytest.mark.parametrize("name", ["text", "image"])
def test_print_shows_everything_and_no_controls(visit: Callable[..., Browser], name: str) -> None:
    page = visit(name, width=794, colours="dark", media="print")
    visible = page.execute_script(
        """const seen = s => [...document.querySelectorAll(s)]
             .some(e => e.checkVisibility({contentVisibilityAuto: true}));
           return [seen(".controls"), seen(".toolbar"), seen(".unfold"), seen("details .entry"), seen("#json")]"""
    )
    assert visible == [False, False, False, True, True]
    light = page.execute_script("return getComputedStyle(document.documentElement).colorScheme")
    assert light == "light"
    cut = page.execute_script(
        "return [...document.querySelectorAll('.long')].filter(e => e.scrollHeight > e.clientHeight + 2).length"
    )
    assert cut == 0
    assert page.execute_script("return document.querySelector('.whisker .bar')?.checkVisibility()")
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "", "features": []})
    pdf = base64.b64decode(page.execute_cdp_cmd("Page.printToPDF", {"printBackground": True})["data"])
    assert len(re.findall(rb"/Type\s*/Page\b", pdf)) > 3
    assert page.execute_script("return document.querySelectorAll('details[open]').length") == 0


def test_everything_can_be_read_without_scripts(visit: Callable[..., Browser], browser: Browser) -> None:
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        page = visit("text")
        assert not page.find_element("css selector", ".toolbar").is_displayed()
        assert not page.find_element("css selector", "#q0 .controls").is_displayed()
        text = page.find_element("css selector", "main").text
        for query in pages.text_report().queries:
            assert query.prompt is not None
            assert query.prompt in text
        assert text.count("If removed") >= 3 * 2 * SHOWN
        assert page.find_elements("css selector", ".folded") == []
    finally:
        browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})


def test_controls_are_named_and_reached_by_keyboard(visit: Callable[..., Browser]) -> None:
    page = visit("image")
    nameless = page.execute_script(
        """return [...document.querySelectorAll("input, select, button, a[href], summary")]
           .filter(e => !(e.ariaLabel || e.textContent.trim() || [...(e.labels ?? [])].some(l => l.textContent.trim())))
           .map(e => e.outerHTML.slice(0, 100))"""
    )
    assert nameless == []
    twice = page.execute_script(
        "const ids = [...document.querySelectorAll('[id]')].map(e => e.id); return ids.length - new Set(ids).size"
    )
    assert twice == 0
    reached = []
    for _ in range(14):
        page.switch_to.active_element.send_keys("\ue004")  # Tab
        focus = page.switch_to.active_element
        reached.append(focus.get_attribute("id") or focus.get_attribute("class"))
    for control in ("jump", "search", "theme", "sort-by", "direction"):
        assert control in reached


def test_in_a_notebook_results_show_themselves(browser: Browser, tmp_path: Path) -> None:
    """The page and the card of λ stand in frames that cannot reach out, hostile texts included."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).eval()
    train = [(torch.randn(4), i % 3) for i in range(60)]
    result = attribute(
        model, train, train[:2], task=Classification(), solver="cg", title=f"Asked {pages.BREAKOUT}"
    )
    shown = [result._repr_html_(), result.over_damping()._repr_html_()]
    notebook = tmp_path / "notebook.html"
    notebook.write_text(f"<!DOCTYPE html><meta charset=utf-8><title>Notebook</title>{''.join(shown)}")
    browser.get(notebook.as_uri())
    frames = browser.find_elements("tag name", "iframe")
    assert len(frames) == 2
    browser.switch_to.frame(frames[0])
    assert "2 questions" in browser.find_element("tag name", "body").text
    assert len(browser.find_elements("css selector", ".item, .entry, li")) > 10
    browser.switch_to.default_content()
    browser.switch_to.frame(frames[1])
    words = browser.find_element("tag name", "body").text
    assert "depends on λ" in words
    assert "top ten" in words
    drawn = browser.find_element("css selector", "figure svg").size
    assert drawn["width"] > 200
    assert drawn["height"] > 100
    browser.switch_to.default_content()
    assert browser.title == "Notebook"
    refused = [entry for entry in browser.get_log("browser") if "localStorage" not in entry["message"]]
    assert not refused
    browser.get_log("performance")


@pytest.mark.parametrize("width", [360, 1200])
def test_checkpoints_are_told_with_the_error_that_dominates(
    visit: Callable[..., Browser], width: int
) -> None:
    result = pages.checkpoints_report()
    page = visit("checkpoints", width=width)
    told = page.find_element("css selector", ".guide .dominant").text
    assert told == result.dominant_error
    assert told.startswith("The spread between the 4 checkpoints dominates")
    rows = page.find_elements("css selector", "table.checkpoints tbody tr")
    assert [row.find_element("css selector", "th").text for row in rows] == [
        each.name for each in result.checkpoints
    ]
    assert [row.find_elements("css selector", "td")[4].text for row in rows] == ["2 of 3", *["3 of 3"] * 3]
    first = page.find_element("css selector", "#q0 .helpful .entry .numbers").text
    assert "Another model" in first
    assert page.execute_script("return document.documentElement.scrollWidth <= window.innerWidth")
