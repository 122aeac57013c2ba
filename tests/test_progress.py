"""Progress where there is no terminal."""

from __future__ import annotations

import pytest

from whence import progress
from whence.progress import ticker


def test_without_a_terminal_a_line_now_and_then_says_what_is_done_and_left(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    clock = iter([0.0, 12.0, 31.0, 40.0, 62.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    with ticker("[solving]", 10, done=2) as tick:
        for _ in range(4):
            tick()
    lines = capfd.readouterr().err.splitlines()
    assert lines == [
        "[solving]: 4 of 10 after 31.0 s, at most about 1.6 min left",
        "[solving]: 6 of 10 after 62.0 s, at most about 62.0 s left",
    ]


def test_what_is_short_says_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    with ticker("solving", 3) as tick:
        for _ in range(3):
            tick()
    assert capfd.readouterr().err == ""
