"""Shows how much sound has been transcribed, on standard error, and how long the rest will take."""

from __future__ import annotations

import contextlib
import math
from typing import TextIO

from fastgen.pipeline.progress import Progress, clock


class AudioProgress(Progress):
    """Counts seconds of sound: `total` of them, or None if files do not say how long they are."""

    def __init__(self, total: float | None, *, enabled: bool = True, stream: TextIO | None = None) -> None:
        super().__init__(None if total is None else math.ceil(total), enabled=enabled, stream=stream)
        self.seconds = 0.0

    def advance(self, seconds: float) -> None:
        """Count so many seconds more; back, if fewer than 0."""
        self.seconds += seconds
        self.update(int(self.seconds) - self.done, 0)

    def say(self, text: str) -> None:
        """Print a sentence, on a line of its own."""
        with self._lock, contextlib.suppress(OSError, ValueError):  # as where the line can't be shown
            if self._stream is not None:
                before = "\n" if self._terminal and self._width else ""
                self._stream.write(f"{before}{text}\n")
                self._stream.flush()

    def line(self, seconds: float) -> str:
        rate = self.seconds / max(seconds, 1e-9)
        parts = [clock(self.seconds) if self.total is None else f"{clock(self.seconds)} / {clock(self.total)}"]
        if self.total:
            parts[0] += f" ({min(self.seconds / self.total, 1):.0%})"
        parts.append(f"{rate:.1f} s of sound a second")
        if self.total is not None and rate > 0:
            parts.append(f"{clock(max(self.total - self.seconds, 0) / rate)} left")
        return ", ".join(parts)
