"""The progress line."""

from __future__ import annotations

import io

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
