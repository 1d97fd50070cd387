"""Subtitles of a recording, in the formats SubRip (srt) and WebVTT (vtt), written as whisper's own command does."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Segment(NamedTuple):
    """What is said between two times."""

    start: float  # seconds
    end: float
    text: str


def srt(segments: Iterable[Segment]) -> str:
    """The segments in SubRip: each with a number."""
    return "".join(
        f"{number}\n{_time(one.start, ',')} --> {_time(one.end, ',')}\n{_shown(one.text)}\n\n"
        for number, one in enumerate(segments, 1)
    )


def vtt(segments: Iterable[Segment]) -> str:
    """The segments in WebVTT."""
    return "WEBVTT\n\n" + "".join(
        f"{_time(one.start)} --> {_time(one.end)}\n{_shown(one.text)}\n\n" for one in segments
    )


def _shown(text: str) -> str:
    return text.strip().replace("-->", "->")  # an arrow stands between times


def _time(seconds: float, mark: str = "") -> str:
    """A time to the thousandth. WebVTT has a full stop in place of a `mark`, and hours from the first hour on."""
    whole, thousandths = divmod(round(seconds * 1000), 1000)
    minutes, second = divmod(whole, 60)
    hours = f"{minutes // 60:02d}:" if mark or minutes >= 60 else ""
    return f"{hours}{minutes % 60:02d}:{second:02d}{mark or '.'}{thousandths:03d}"
