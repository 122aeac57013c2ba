"""The demonstrations show what they claim, by their own figures."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from whence.cli import app
from whence.demo.corpus import corpus, passages, train_tokenizer
from whence.demo.digits import DigitsDemo, attribute_digits
from whence.demo.text import QUESTIONS, attribute_text


@pytest.fixture(scope="module")
def found() -> DigitsDemo:
    return attribute_digits()


def test_most_flipped_labels_are_among_the_most_harmful_images(found: DigitsDemo) -> None:
    assert 50 <= int(found.digits.flipped.sum()) <= 90
    assert found.accuracy > 0.9
    assert found.found >= 0.5
    assert bool(found.result.solve.converged.all())
    notes = [found.result.exhibits[row.index].note for row in found.result.top(1, harmful=True)]
    assert sum(note is not None for note in notes) >= len(notes) // 2


def test_the_manual_is_cut_into_passages_of_one_topic_each() -> None:
    documents = corpus()
    tokenizer = train_tokenizer(documents)
    data = passages(documents, tokenizer)
    assert len(data) > 1000
    assert max(len(passage.input_ids) for passage in data) <= 80
    assert len({passage.name for passage in data}) == len(data)
    for question in QUESTIONS:
        assert question.topics <= set(documents)


def test_the_digits_demo_prints_a_summary_and_writes_a_page(
    found: DigitsDemo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("whence.demo.digits.attribute_digits", lambda: found)
    done = CliRunner().invoke(app, ["demo", "digits", "--output", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert "of the flipped labels" in done.stdout.replace("\n", " ")
    assert (tmp_path / "digits.html").stat().st_size > 10_000


def test_an_unknown_demo() -> None:
    assert CliRunner().invoke(app, ["demo", "poems"]).exit_code == 2


@pytest.mark.slow
def test_the_top_passage_is_of_the_right_topic_for_four_of_five_questions() -> None:
    found = attribute_text()
    assert len(found.right) == 5
    assert sum(found.right) >= 4
