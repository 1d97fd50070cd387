"""A line of output that is written piece by piece while its text grows."""

from __future__ import annotations

import itertools


class GrowingLine:
    """Says what to write of a text that grows.

    What is written stays. Should a longer text begin otherwise, the line goes on behind what both begin with.
    """

    def __init__(self) -> None:
        self._sent = ""

    def grow(self, settled: str) -> str:
        """The next piece, perhaps none; `settled`: the part of the text so far that will not change."""
        if len(settled) <= len(self._sent) or not settled.startswith(self._sent):
            return ""
        piece, self._sent = settled[len(self._sent) :], settled
        return piece

    def end(self, text: str) -> str:
        """The last piece; `text`: all of it."""
        same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(self._sent, text, strict=False))
        return text[len(list(same)) :]
