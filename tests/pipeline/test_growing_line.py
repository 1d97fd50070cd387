"""What is written of a line that grows: all of it in the end, in pieces that are never taken back."""

from __future__ import annotations

from fastgen.pipeline.growing_line import GrowingLine


def test_pieces_make_the_line() -> None:
    line = GrowingLine()
    assert [line.grow(text) for text in ("", "a", "a", "a bc", "a b")] == ["", "a", "", " bc", ""]
    assert line.end("a bcd e") == "d e"


def test_a_text_that_begins_otherwise_goes_on_behind_what_is_the_same() -> None:
    line = GrowingLine()
    line.grow("one two")
    assert line.grow("one tw, three") == ""
    assert line.end("one tw, three") == ", three"
