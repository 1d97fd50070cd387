"""Subtitles: byte for byte what whisper's own writers make of the same segments."""

from __future__ import annotations

import io
from typing import Any

import pytest
from whisper import utils

from fastgen.pipeline.transcription import subtitles
from fastgen.pipeline.transcription.subtitles import Segment

SEGMENTS = [
    Segment(0.0, 0.0004, " it begins"),
    Segment(0.9995, 59.9996, " an arrow --> here "),
    Segment(61.5, 3599.9999, ""),
    Segment(3661.25, 7325.0, " naïve 宇宙"),
]


@pytest.mark.parametrize("form", ("srt", "vtt"))
@pytest.mark.parametrize("count", (0, 1, 4))
def test_as_whisper_writes_them(form: str, count: int) -> None:
    writer: Any = {"srt": utils.WriteSRT, "vtt": utils.WriteVTT}[form]("")
    expected = io.StringIO()
    writer.write_result({"segments": [one._asdict() for one in SEGMENTS[:count]]}, expected)
    assert getattr(subtitles, form)(SEGMENTS[:count]) == expected.getvalue()
