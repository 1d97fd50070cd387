"""Runs a command that answers standard input line by line."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable

import pytest


class Pieces(io.StringIO):
    """Standard output that notes what is written at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[str] = []

    def write(self, text: str) -> int:
        self.pieces.append(text)
        return super().write(text)


def answered(lines: str, command: Callable[[], int]) -> tuple[int, Pieces]:
    """The exit code of a command that reads `lines`, and what it writes to standard output."""
    output = Pieces()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdin", io.StringIO(lines))
        patch.setattr(sys, "stdout", output)
        return command(), output
