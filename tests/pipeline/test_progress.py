"""The progress line."""

from __future__ import annotations

import errno
import io
import sys

import pytest

from fastgen.pipeline.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_line_says_rates_and_time_left() -> None:
    progress = Progress(1000, done=200, stream=io.StringIO())
    progress.update(300, 6000)
    assert progress.line(10.0) == "500 / 1,000 (50%), 30.0 sentences/s, 600 tokens/s, 0:17 left"


def test_without_a_total_there_is_no_time_left() -> None:
    progress = Progress(None, stream=io.StringIO())
    progress.update(5, 10)
    assert progress.line(2.0) == "5, 2.5 sentences/s, 5 tokens/s"


def test_a_terminal_sees_one_line_redrawn() -> None:
    terminal = Terminal()
    progress = Progress(10, stream=terminal)
    progress._shown -= 1
    progress.update(3, 30)
    progress.update(7, 70)
    progress.close()
    text = terminal.getvalue()
    assert text.count("\r") == 2 and text.count("\n") == 1
    assert "10 / 10 (100%)" in text.split("\r")[-1]


def test_disabled_is_silent() -> None:
    terminal = Terminal()
    progress = Progress(10, enabled=False, stream=terminal)
    progress.update(10, 10)
    progress.close()
    assert terminal.getvalue() == ""


class Gone(Terminal):
    """A terminal that was closed, or a pipe whose reader has gone."""

    def write(self, text: str) -> int:
        raise OSError(errno.EIO, "Input/output error")


def test_a_terminal_that_is_gone_ends_nothing() -> None:
    progress = Progress(10, stream=Gone())
    progress._shown -= 1
    progress.update(3, 30)
    progress.close()
    assert progress.done == 3


def test_without_standard_error_it_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    progress = Progress(10)
    progress.update(10, 100)
    progress.close()
    assert progress.done == 10


def test_the_line_is_no_longer_than_a_row_of_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal breaks a longer line, and what is redrawn is its last row alone."""
    terminal = Terminal()
    progress = Progress(1_000_000, done=123_456, stream=terminal)
    for columns in (40, 30):
        monkeypatch.setattr(progress, "_columns", lambda columns=columns: columns)
        progress._shown -= 1
        progress.update(3000, 30)
    first, second = terminal.getvalue().split("\r")[1:]
    assert (len(first), len(second)) == (39, 29) and first.startswith("126,456 / 1,000,000")
