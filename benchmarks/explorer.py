"""A walk through the explorer in a real browser, with the demo's Llama: seconds from prompt to passages, and pictures.

    python -m benchmarks.explorer

Trains the demo's Llama on Python's manual and makes an index of it (both kept in runs/explorer), starts `whence serve`
and asks the demo's questions in headless Chromium: the model completes a prompt, then the completion of the manual is
asked about. Seconds are those that a person waits, two cores. Pictures go to docs/.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.timing import report, save
from whence.demo.corpus import START, corpus, passages, train_tokenizer
from whence.demo.text import QUESTIONS, train_model

PLACE = Path("runs") / "explorer"
PICTURES = Path(__file__).parents[1] / "docs"
FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage --force-prefers-reduced-motion "
    "--window-size=1360,940"
)


def prepare() -> None:
    """The trained model, its tokenizer and its passages, as a user has them: a directory and a jsonl."""
    if (PLACE / "train.jsonl").exists():
        return
    from tokenizers import processors
    from transformers import PreTrainedTokenizerFast

    documents = corpus()
    tokenizer = train_tokenizer(documents)
    data = passages(documents, tokenizer)
    model = train_model(data)
    first = tokenizer.token_to_id(START)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{START} $A", special_tokens=[(START, first)]
    )
    PLACE.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(PLACE / "model")  # type: ignore[operator]  # a Llama's
    whole = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=START, eos_token=START)
    whole.save_pretrained(PLACE / "model")
    rows = [json.dumps({"id": passage.name, "text": passage.text}) + "\n" for passage in data]
    (PLACE / "train.jsonl").write_text("".join(rows), encoding="utf-8")


def whence(*arguments: str) -> list[str]:
    return [sys.executable, "-W", "ignore", "-m", "whence", *arguments]


def chromium() -> Any:
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = "/usr/bin/chromium"
    for flag in FLAGS.split():
        options.add_argument(flag)
    return webdriver.Chrome(options=options, service=Service("/usr/bin/chromedriver"))


def wait(true: Callable[[], Any], seconds: float = 600) -> float:
    """Seconds until something is so."""
    begun = time.monotonic()
    while not true():
        if time.monotonic() - begun > seconds:
            raise TimeoutError("the page did not get there")
        time.sleep(0.02)
    return time.monotonic() - begun


def walk(address: str) -> list[dict[str, Any]]:
    """Ask all questions of the demo."""
    browser = chromium()
    rows = []
    try:
        browser.get(address)
        by: Callable[[str], Any] = lambda name: browser.find_element("id", name)  # noqa: E731
        for number, question in enumerate(QUESTIONS):
            by("prompt").clear()
            by("prompt").send_keys(question.prompt)
            by("complete").click()
            completed = wait(lambda: by("status").text.startswith("Complete"))
            said = by("completion").get_attribute("value")
            if number == 0:
                browser.save_screenshot(str(PICTURES / "explorer-prompt.png"))
            by("completion").clear()
            by("completion").send_keys(question.completion)
            by("ask").click()
            first = wait(
                lambda: " after " in by("status").text and browser.find_elements("tag name", "iframe")
            )
            rest = wait(lambda: by("status").text.startswith("Done"))
            browser.switch_to.frame(browser.find_element("tag name", "iframe"))
            wait(lambda: browser.find_elements("css selector", ".elsewhere"))
            best = browser.find_element("css selector", ".helpful .entry .id").text
            if number == 0:
                browser.execute_script(
                    "arguments[0].click()", browser.find_element("css selector", ".elsewhere")
                )
            browser.switch_to.default_content()
            if number == 0:
                time.sleep(1)  # what is drawn
                browser.save_screenshot(str(PICTURES / "explorer-answer.png"))
            rows.append(
                {
                    "prompt": question.prompt,
                    "model_said": said,
                    "asked": question.completion,
                    "seconds_completing": completed,
                    "seconds_first": first,
                    "seconds_last": first + rest,
                    "best": best,
                    "right": best.partition("[")[0] in question.topics,
                }
            )
    finally:
        browser.quit()
    return rows


def main() -> None:
    argparse.ArgumentParser(
        prog="python -m benchmarks.explorer", description=__doc__.split(":")[0]
    ).parse_args()
    prepare()
    place = str(PLACE / "index")
    made = time.monotonic()
    subprocess.run(
        whence("index", str(PLACE / "model"), "--train", str(PLACE / "train.jsonl"), "--index", place),
        check=True,
    )
    made = time.monotonic() - made
    with subprocess.Popen(whence("serve", place, "--trust-run"), stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        found = re.search(r"http://\S+", server.stdout.readline())
        assert found is not None
        try:
            rows = walk(found[0])
        finally:
            server.terminate()
    report(
        "from a prompt to its passages, in seconds",
        ("", "completion", "first answer", "last answer", "best passage", "right"),
        [
            (
                row["asked"].strip(),
                *(f"{row[name]:.1f}" for name in ("seconds_completing", "seconds_first", "seconds_last")),
                row["best"],
                "yes" if row["right"] else "no",
            )
            for row in rows
        ],
    )
    totals = [row["seconds_completing"] + row["seconds_first"] for row in rows]
    print(f"median from prompt to first answer: {median(totals):.1f} s; most {max(totals):.1f} s")
    save("explorer", {"seconds_of_index": made, "questions": rows})


if __name__ == "__main__":
    main()
