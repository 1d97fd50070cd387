"""Reads audio from any container or codec that FFmpeg knows, by PyAV, which brings FFmpeg's libraries with it."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastgen import installing
from fastgen.pipeline.errors import InputError, first_line
from fastgen.pipeline.progress import clock

if TYPE_CHECKING:
    import numpy as np

RATE = 16_000  # samples a second, as Whisper reads them


@dataclass(frozen=True)
class Audio:
    """What a file sounds like: float32 `[samples]` from -1 to 1, one channel, 16 kHz."""

    samples: np.ndarray[Any, Any]
    fault: str = ""  # why not all of the file could be decoded

    @property
    def seconds(self) -> float:
        return len(self.samples) / RATE


def read(source: Path | bytes) -> Audio:
    """Decode the first audio stream of a file, or of the bytes of one, to the end or to the first fault.

    Samples are rounded to 16 bits, as `whisper.load_audio` has FFmpeg do it.

    Raises:
        InputError: there is no file, or no audio in it.
    """
    import numpy as np

    av = _av()
    name = source if isinstance(source, Path) else "standard input"
    parts: list[Any] = []
    fault = ""
    try:
        with av.open(
            io.BytesIO(source) if isinstance(source, bytes) else str(source), metadata_errors="ignore"
        ) as file:
            if not file.streams.audio:
                raise InputError(f"{name} has no audio stream.")
            resampler = av.AudioResampler(format="s16", layout="mono", rate=RATE)
            try:
                for frame in file.decode(audio=0):
                    frame.pts = None  # gaps and jumps in a file's own clock are no silence
                    parts += [each.to_ndarray()[0] for each in resampler.resample(frame)]
                parts += [each.to_ndarray()[0] for each in resampler.resample(None)]
            except (av.error.FFmpegError, ValueError) as error:  # ValueError: a stream without a codec
                if not parts:
                    raise
                fault = f"{name} can't be decoded beyond {clock(sum(map(len, parts)) / RATE)} ({_reason(error)})"
    except OSError as error:  # av's errors of files are OSErrors, too
        raise InputError(f"Cannot read {name}: {_reason(error)}.") from error
    except (av.error.FFmpegError, ValueError) as error:
        raise InputError(f"{name} is no audio that FFmpeg knows ({_reason(error)}).") from error
    if not parts:
        raise InputError(f"{name} has no audio in it.")
    return Audio(np.concatenate(parts).astype(np.float32) / 32768, fault)


def seconds_of(source: Path) -> float | None:
    """How long a file says that it is; None if it does not say, or can't be read."""
    av = _av()
    try:
        with av.open(str(source), metadata_errors="ignore") as file:
            return None if file.duration is None else float(file.duration / av.time_base)
    except (av.error.FFmpegError, OSError, ValueError):
        return None


def _av() -> Any:
    try:
        import av
    except ImportError as error:
        raise InputError(f"PyAV is needed: {installing.command('transcribe')} ({first_line(error)}).") from error
    return av


def _reason(error: BaseException) -> str:
    """FFmpeg's words, without its number and the file's name."""
    return str(getattr(error, "strerror", None) or first_line(error))
