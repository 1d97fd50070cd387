"""Shows a progress line on standard error: sentences, sentences/s, tokens/s, time left."""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import TextIO

_TERMINAL_SECONDS = 0.2
_LOG_SECONDS = 30.0  # between lines where the output is a file


class Progress:
    """Counts finished sentences from any thread. On a terminal one line is redrawn; a log gets a line now and then.

    Where the line can't be shown, since the terminal was closed or the reader of a pipe has gone, nothing is.
    """

    def __init__(self, total: int | None, *, done: int = 0, enabled: bool = True, stream: TextIO | None = None) -> None:
        self.total = total
        self.done = self._before = done
        self.tokens = 0
        self._stream = sys.stderr if stream is None else stream
        self._enabled = enabled and self._stream is not None  # None for a program without a console
        self._terminal = self._enabled and self._stream.isatty()
        self._started = self._shown = time.monotonic()
        self._width = 0
        self._lock = threading.Lock()

    def update(self, sentences: int, tokens: int) -> None:
        """Count `sentences` more as done, with `tokens` generated tokens."""
        with self._lock:
            self.done += sentences
            self.tokens += tokens
            now = time.monotonic()
            if self._enabled and now - self._shown >= (_TERMINAL_SECONDS if self._terminal else _LOG_SECONDS):
                self._shown = now
                self._show(self.line(now - self._started))

    def line(self, seconds: float) -> str:
        """The text of the line after `seconds` of work."""
        rate = (self.done - self._before) / max(seconds, 1e-9)
        parts = [f"{self.done:,}" if self.total is None else f"{self.done:,} / {self.total:,}"]
        if self.total:
            parts[0] += f" ({self.done / self.total:.0%})"
        parts += [f"{rate:.1f} sentences/s", f"{self.tokens / max(seconds, 1e-9):.0f} tokens/s"]
        if self.total is not None and rate > 0:
            parts.append(f"{clock((self.total - self.done) / rate)} left")
        return ", ".join(parts)

    def _show(self, text: str, end: str = "") -> None:
        """Show the line; `end`: what follows it on a terminal."""
        try:
            if self._terminal:
                room = self._columns() - 1  # a longer line could not be redrawn: its first row would stay
                text = text[:room]
                self._stream.write("\r" + text.ljust(min(self._width, room)) + end)
                self._width = len(text)
            else:
                self._stream.write(text + "\n")
            self._stream.flush()
        except (OSError, ValueError):  # the latter if the stream has been closed
            self._enabled = False

    def _columns(self) -> int:
        """The width of the terminal, or that of a usual one."""
        try:
            return os.get_terminal_size(self._stream.fileno()).columns or 80
        except (OSError, ValueError):
            return 80

    def close(self) -> None:
        """Show the last state, and end the line."""
        with self._lock:
            if self._enabled:
                self._show(self.line(time.monotonic() - self._started), end="\n")
            self._enabled = False


def clock(seconds: float) -> str:
    """`seconds` as minutes and seconds, with hours if there are any."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
