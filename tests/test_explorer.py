"""The page that answers: what its server lets in and out, and a walk through it in a real browser."""

from __future__ import annotations

import csv
import io
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from test_report_in_browser import Browser, browser  # noqa: F401  # a fixture
from tiny_hf import llama_directory
from whence import Classification, Options, Questions, attribute
from whence.errors import DataError, OptionError, StorageError
from whence.exhibit import Exhibit
from whence.explorer import Answering, application, serve
from whence.explorer.answering import BySolving
from whence.explorer.answers import KeptAnswer
from whence.explorer.questions import Question
from whence.sources import ListedExamples

TOKEN = "secret"
EVIL = "=HYPERLINK(1)<script>alert(1)</script>\u202e"


@pytest.fixture(scope="module")
def answering() -> Answering:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).eval()
    data = [(torch.randn(4), i % 3) for i in range(40)]
    train = ListedExamples(data, name="train", exhibits=[Exhibit(id=f"{EVIL}{i}") for i in range(40)])
    way = BySolving(model, train, Classification(), Options(accuracy="certified"))
    return Answering(way, model=model, task=Classification(), train=train, queries=data[:5])


@pytest.fixture(scope="module")
def client(answering: Answering) -> Any:
    from starlette.testclient import TestClient

    return TestClient(application(answering, TOKEN), base_url="http://127.0.0.1")


def said(response: Any) -> list[Any]:
    assert response.status_code == 200, response.text
    return [json.loads(line) for line in response.text.splitlines()]


def test_nothing_is_found_without_the_token(client: Any) -> None:
    for path in ("/", "/ask", "/answers", "/wrong/", "/wrong/answers", f"/{TOKEN}x/"):
        assert client.get(path).status_code == 404
    assert client.post("/wrong/ask", json={"query": 0}).status_code == 404


def test_other_names_of_this_machine_are_refused(client: Any) -> None:
    assert client.get(f"/{TOKEN}/", headers={"Host": "evil.example"}).status_code == 400
    assert client.get(f"/{TOKEN}/", headers={"Host": "localhost:8000"}).status_code == 200


def test_every_answer_carries_the_headers_that_keep_others_out(client: Any) -> None:
    for path in (f"/{TOKEN}/", f"/{TOKEN}/answers", "/nothing"):
        headers = client.get(path).headers
        assert headers["cache-control"] == "no-store"
        assert headers["cross-origin-resource-policy"] == "same-origin"
        assert headers["x-content-type-options"] == "nosniff"
    policy = client.get(f"/{TOKEN}/").headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy


def test_only_json_of_a_sane_size_is_read(client: Any) -> None:
    form = {"Content-Type": "text/plain"}  # what another site's page could send unasked
    assert client.post(f"/{TOKEN}/ask", content='{"query": 0}', headers=form).status_code == 415
    assert client.post(f"/{TOKEN}/ask", json={"prompt": "x" * 2_000_000}).status_code == 413
    own = {"Content-Type": "application/json"}
    for broken in ("", "{", "[" * 100_000, "\x00"):
        assert client.post(f"/{TOKEN}/ask", content=broken, headers=own).status_code == 400


@pytest.mark.parametrize(
    "question",
    [None, [], "x", {}, {"query": 5}, {"query": -1}, {"query": True}, {"query": 0.0}, {"example": 10**30},
     {"query": 0, "example": 0}, {"prompt": 3}, {"prompt": "a", "completion": " "}, {"prompt": "a", "completion": "b"}],
)  # fmt: skip
def test_what_is_no_question_is_refused_in_a_sentence(client: Any, question: Any) -> None:
    sent = {"content": json.dumps(question), "headers": {"Content-Type": "application/json"}}
    response = client.post(f"/{TOKEN}/ask", **sent)
    told = response.json() if response.status_code == 400 else said(response)[-1]
    assert set(told) == {"error"}
    assert len(told["error"]) > 20
    answered = client.post(f"/{TOKEN}/complete", **sent)
    assert "error" in json.loads(answered.text)


def test_a_question_has_one_answer_to_show_and_take_along(client: Any, answering: Answering) -> None:
    told = said(client.post(f"/{TOKEN}/ask", json={"query": 2}))
    assert [each["stage"] for each in told] == ["quick answer", "refined"]
    assert told[0]["number"] == told[1]["number"]  # the second in place of the first
    number = told[-1]["number"]
    kept = answering.kept.of(number)
    page = client.get(f"/{TOKEN}/answers/{number}/page.html").text
    assert "Query 2" in page
    assert "<script>alert(1)" not in page
    rows = list(csv.DictReader(io.StringIO(client.get(f"/{TOKEN}/answers/{number}/scores.csv").text)))
    assert len(rows) == 40
    assert rows[0]["id"].startswith("'=HYPERLINK")  # no spreadsheet takes it for a formula
    assert float(rows[0]["score"]) == pytest.approx(float(kept.result.scores.max()), rel=1e-6)
    line = json.loads(client.get(f"/{TOKEN}/answers/{number}/viewer.jsonl").text)
    assert line["proponent_scores"] == sorted(line["proponent_scores"], reverse=True)
    assert line["opponent_scores"] == sorted(line["opponent_scores"])
    assert len(line["proponents"]) == len(line["proponent_ids"]) == 20
    assert client.get(f"/{TOKEN}/answers/999/page.html").status_code == 400
    assert client.get(f"/{TOKEN}/answers/{number}/passwd").status_code == 404


def test_a_run_of_several_queries_is_taken_along_whole(answering: Answering) -> None:
    model, data = answering.model, answering.train
    result = attribute(model, data, [data[0], data[1], data[2]], task=Classification())
    kept = KeptAnswer(1, Question(completion="The run"), "finished", result)
    rows = list(csv.DictReader(io.StringIO(kept.table())))
    assert len(rows) == 3 * 40
    assert len(kept.viewer_lines().splitlines()) == 3
    found = kept.of_example(7)
    assert [one["value"] for one in found] == pytest.approx(result.scores[:, 7].tolist())
    assert kept.about()["loss"]


@pytest.mark.parametrize("more", [{"solver": "cg"}, {"until": "top-3 stable"}, {"budget": 2.0}], ids=str)
def test_a_query_is_asked_about_as_the_run_asked_about_it(answering: Answering, more: dict[str, Any]) -> None:
    """With its contrast and its group, by the run's own options."""
    data = [answering.train[i] for i in range(4)]
    asked = Questions(
        data, contrast=[(label + 1) % 3 for _, label in data], groups=[None, "pair", "pair", None]
    )
    options = Options(accuracy=0.99 if "until" not in more else 0.8, **more)
    way = BySolving(answering.model, answering.train, answering.task, options)
    again = Answering(way, model=answering.model, task=answering.task, train=answering.train, queries=asked)
    expected = attribute(answering.model, answering.train, asked, task=answering.task, options=options)
    assert len(again.queries) == len(expected.scores) == 3
    for number in range(3):
        *_, last = again.ask(Question(query=number))
        both = torch.stack([last.result.scores[0], expected.scores[number]])
        assert float(torch.corrcoef(both)[0, 1]) > 0.99
        assert last.result.queries[0].asked == expected.queries[number].asked


def test_an_example_tells_what_it_did_to_every_question(client: Any, answering: Answering) -> None:
    first, second = (
        said(client.post(f"/{TOKEN}/ask", json={"query": query}))[-1]["number"] for query in (0, 3)
    )
    found = {one["number"]: one for one in client.get(f"/{TOKEN}/examples/7").json()}
    for number in (first, second):
        scores = answering.kept.of(number).result.scores
        assert found[number]["value"] == pytest.approx(float(scores[0, 7]))
    assert client.get(f"/{TOKEN}/examples/40").status_code == 404


def test_a_training_example_can_be_asked_about(client: Any, answering: Answering) -> None:
    told = said(client.post(f"/{TOKEN}/ask", json={"example": 4}))[-1]
    best = int(answering.kept.of(told["number"]).result.scores.argmax())
    assert best == 4
    assert answering.kept.of(told["number"]).result.queries[0].id == f"{EVIL}4"


def test_texts_are_no_questions_for_a_classifier(answering: Answering) -> None:
    with pytest.raises(OptionError, match="Classification"):
        list(answering.ask(Question(prompt="a", completion="b")))
    with pytest.raises(DataError, match="at most"):
        Question.read({"completion": "x" * 100_001}, queries=0, examples=0)


def test_a_port_that_is_taken_is_told(answering: Answering) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(StorageError, match="cannot be had"):
            serve(answering, port=taken.getsockname()[1], told=lambda _: None)


# --- in the browser ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """`whence serve` over a run of a tiny Llama, with hostile texts among its passages."""
    folder = tmp_path_factory.mktemp("served")
    llama_directory(folder / "model")
    texts = ["the cat sat on the mat and the dog sat on the log", f"Paris is the capital {EVIL}"] * 8
    rows = [json.dumps({"id": f"{EVIL}{i}", "text": text}) + "\n" for i, text in enumerate(texts)]
    (folder / "train.jsonl").write_text("".join(rows))
    (folder / "queries.jsonl").write_text(json.dumps({"prompt": "the cat", "completion": " sat on"}) + "\n")
    whence = [sys.executable, "-W", "ignore", "-m", "whence"]
    asked = ["attribute", "model", "--train", "train.jsonl", "--queries", "queries.jsonl", "--run-dir", "run"]
    subprocess.run([*whence, *asked], cwd=folder, check=True, capture_output=True)
    refused = subprocess.run([*whence, "serve", "run"], cwd=folder, capture_output=True, text=True)
    assert refused.returncode == 2
    assert "--trust-run" in refused.stderr
    with subprocess.Popen(
        [*whence, "serve", "run", "--trust-run"], cwd=folder, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        found = re.search(r"http://127\.0\.0\.1:\d+/[\w-]{32}/", server.stdout.readline())
        assert found is not None
        yield found[0]
        server.send_signal(signal.SIGINT)
        server.wait(30)


def until(browser: Browser, true: Any, seconds: float = 120) -> None:  # noqa: F811
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, browser.find_element("tag name", "body").text
        time.sleep(0.05)


def test_a_walk_through_the_explorer(browser: Browser, served: str) -> None:  # noqa: F811
    """From a prompt to its passages, on to another question, two side by side; texts stay texts."""
    features = [
        {"name": "prefers-reduced-motion", "value": "reduce"}
    ]  # or clicks would miss what still moves
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "", "features": features})
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": 1300, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    )  # fmt: skip
    browser.get_log("browser")
    browser.get(served)

    def text(name: str) -> str:
        return str(browser.find_element("id", name).text)

    browser.find_element("id", "prompt").send_keys("the cat")
    browser.find_element("id", "limit").clear()
    browser.find_element("id", "limit").send_keys("3")
    browser.find_element("id", "complete").click()
    until(browser, lambda: text("status").startswith("Complete"))
    completion = browser.find_element("id", "completion")
    assert completion.get_attribute("value")
    completion.clear()
    completion.send_keys(" sat on the mat")
    browser.execute_script("arguments[0].setSelectionRange(4, 11)", completion)  # " on the"
    browser.find_element("id", "ask").click()
    until(browser, lambda: text("status").startswith("Done"))
    assert "the cat sat on the" in text("asked")
    assert browser.find_element("id", "error").is_displayed() is False

    def frames() -> list[Any]:
        return list(browser.find_elements("tag name", "iframe"))

    browser.switch_to.frame(frames()[0])
    until(browser, lambda: browser.find_elements("css selector", ".elsewhere"))
    marked = browser.find_element("css selector", ".query mark").text
    assert marked.strip() == "on the"
    browser.execute_script("arguments[0].click()", browser.find_elements("css selector", ".elsewhere")[0])
    browser.switch_to.default_content()
    until(browser, lambda: browser.find_element("id", "influenced").is_displayed())
    assert (
        len(browser.find_elements("css selector", "#influenced-list li")) == 2
    )  # the run's own question, too
    browser.find_element("id", "alike").click()
    until(browser, lambda: text("status").startswith("Done") and "Training example" in text("asked"))
    completion.clear()
    completion.send_keys(" sat on the log")
    browser.find_element("id", "set-aside").click()  # what the model itself went on with
    assert browser.find_element("id", "contrast").get_attribute("value")
    browser.execute_script("arguments[0].value = ' sat on the mat'", browser.find_element("id", "contrast"))
    browser.find_element("id", "ask").click()
    until(browser, lambda: text("status").startswith("Done") and "rather than" in text("asked"))
    browser.switch_to.frame(frames()[0])
    assert "rather than" in browser.find_element("css selector", ".question").text
    browser.switch_to.default_content()
    browser.find_elements("xpath", "//button[text()='beside']")[1].click()
    until(browser, lambda: len(frames()) == 2)
    assert len(browser.find_elements("css selector", "#asked li.shown")) == 2

    browser.find_element("id", "number").clear()
    browser.find_element("id", "number").send_keys("77")
    browser.find_element("css selector", "#number-form button").click()
    until(browser, lambda: browser.find_element("id", "error").is_displayed())
    assert "numbered from 0" in text("error")
    browser.find_element("id", "theme").click()
    assert browser.execute_script("return document.documentElement.dataset.theme") == "dark"
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": 390, "height": 800, "deviceScaleFactor": 1, "mobile": True}
    )  # fmt: skip
    assert browser.execute_script("return document.documentElement.scrollWidth") <= 390
    complaints = [
        entry["message"]
        for entry in browser.get_log("browser")
        if "400 (Bad Request)" not in entry["message"]
    ]
    assert complaints == []
    browser.get_log("performance")
