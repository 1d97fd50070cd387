"""Lines of output that are written piece by piece while their texts grow."""

from __future__ import annotations

import io
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator

from fastgen.pipeline.errors import InputError, first_line, is_utf8, writing


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


def grown(tokens: Iterable[int], decode: Callable[[list[int]], str], settled: Callable[[str], str]) -> Iterator[str]:
    """The pieces of the text of `tokens`, which come one by one.

    `settled`: the part of a growing text that will not change.
    """
    line, found = GrowingLine(), list[int]()
    for token in tokens:
        found.append(token)
        yield line.grow(settled(decode(found)))
    yield line.end(decode(found))


def in_one_line(text: str) -> str:
    """A text without line ends: a line is a record, so one inside would shift all that follow."""
    return " ".join(text.splitlines())


def answer_lines(pieces: Callable[[int, str], Iterable[str]]) -> None:
    """Answer each line of standard input by a line of standard output, as fast as the pieces of an answer come.

    As in files, lines end at line feeds alone and are UTF-8, whatever the locale; a terminal has its own encoding.

    `pieces`: those of the answer to a line, by its number and its text; a blank line is answered by one.

    Raises InputError, which names the line, if the line is not UTF-8 or `pieces` raises a ValueError.
    """
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding=_encoding_of(sys.stdin), errors="surrogateescape", newline="\n")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding=_encoding_of(sys.stdout))
    for number, line in enumerate(sys.stdin, 1):
        text = line.rstrip("\r\n")
        if not is_utf8(text):
            raise InputError(f"Line {number} is not UTF-8.")
        if text.strip():
            try:
                for piece in filter(None, pieces(number, text)):
                    _write(piece)
            except ValueError as error:
                raise InputError(f"Line {number}: {first_line(error)}.") from error
        _write("\n")


def _encoding_of(stream: io.TextIOWrapper) -> str:
    return stream.encoding if stream.isatty() else "utf-8"


def _write(text: str) -> None:
    with writing("standard output"):
        print(text, end="", flush=True)
