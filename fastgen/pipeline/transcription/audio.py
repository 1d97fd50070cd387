"""Reads audio from any container or codec that FFmpeg knows, by PyAV, which brings FFmpeg's libraries with it."""

from __future__ import annotations

import os
import stat
import tempfile
import wave
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from fastgen.pipeline.errors import InputError, counted, first_line, needing, writing

if TYPE_CHECKING:
    import numpy as np

RATE = 16_000  # samples a second, as Whisper reads them
FRAMES = 100  # of Whisper's spectrogram, a second
LONG = 10 * 60 * RATE  # samples: longer sounds lie in a temporary file
_AT_ONCE = 1 << 20  # bytes that are read from a pipe
_COUNTING = {"flac", "mov,mp4,m4a,3gp,3g2,mj2"}  # formats whose headers count the samples: others' are estimates
_UNKNOWN = 0x7FFFF000  # bytes that a WAV file has by the header, or more, if the writer did not know how many
_CUT_SECONDS = 0.25  # that may be missing of a file: what codecs pad
_DEFAULT = 1  # AV_DISPOSITION_DEFAULT
# A playlist names files and addresses, which may be anybody's: FFmpeg opens none of them. It needs no protocol for an
# open file, and none has this name.
_ALONE = {"protocol_whitelist": "none"}
_OPENING = 60.0  # seconds, at most: for a playlist that is said to grow FFmpeg waits as long as that says


@dataclass(frozen=True)
class Audio:
    """What a file sounds like: float32 `[samples]` from -1 to 1, one channel, 16 kHz."""

    samples: np.ndarray[Any, Any]  # in memory or, of long sounds, on disk
    fault: str = ""  # what of the file could not be decoded and why, or that it is cut off; a sentence without its end
    said: float | None = None  # seconds, by a header that counts them

    @property
    def seconds(self) -> float:
        return len(self.samples) / RATE


def is_there(path: Path) -> bool:
    """Whether there is a file of this name; a pipe is as good as one."""
    return path.exists() and not path.is_dir()


def last_frame(samples: np.ndarray[Any, Any]) -> float:
    """Where Whisper's spectrogram of these samples ends, in seconds: with a clip that goes on whisper never would."""
    return len(samples) // (RATE // FRAMES) / FRAMES


def read(source: Path | BinaryIO, name: str = "standard input", longest: float | None = None) -> Audio:
    """Decode an audio stream of a file, or of all that a pipe holds; what is damaged is left out.

    Of several streams it is the one that the program ffmpeg takes, by which `whisper.load_audio` reads files (see
    `_stream`).

    Samples are rounded to 16 bits, as `whisper.load_audio` has FFmpeg do it.

    Args:
        source: a file by its name, which may be that of a pipe or a device; or an open one, which is read to the end.
        name: what messages call a pipe.
        longest: seconds, of which a file may not have more.

    Raises:
        InputError: there is no file, or no audio in it, or too much, or no room for it on disk.
    """
    av = _av()
    name = str(source) if isinstance(source, Path) else name
    try:  # by Python's own open: FFmpeg would take a name with a colon for a protocol
        data = _opened(source) if isinstance(source, Path) else _on_disk(source)
    except OSError as error:
        raise InputError(f"Cannot read {name}: {_reason(error)}.") from error
    try:
        with data, _container(av, data) as file:
            if not file.streams.audio:
                raise InputError(f"{name} has no audio stream.")
            stream = _stream(file)
            found, faults = _decoded(av, file, stream, None if longest is None else round(longest * RATE))
            said = _said_by_wav(data) if file.format.name == "wav" else _said(file, stream)
    except (av.error.FFmpegError, OSError, ValueError) as error:
        raise InputError(f"{name} is no audio that FFmpeg knows ({_reason(error)}).") from error
    if longest is not None and found.count > longest * RATE:
        raise InputError(f"{name} has more than {counted(round(longest / 60), 'minute')} of sound.")
    samples = found.whole()
    if not len(samples):
        reason = f" ({faults[0]})" if faults else ""
        raise InputError(f"{name} has no audio in it{reason}.")
    return Audio(samples, _fault(name, faults, len(samples) / RATE, said), said)


def _fault(name: str, faults: list[str], seconds: float, said: float | None) -> str:
    """What is wrong with a file of which so many seconds could be decoded, for `Audio`."""
    missing = ""
    if said is not None and seconds < said - _CUT_SECONDS:
        missing = f"it says that it has {said:.1f} seconds of sound, and {seconds:.1f} are there"
    if not faults:
        return f"{name} is cut off: {missing}" if missing else ""
    damage = f"{name} is damaged: {counted(len(faults), 'part')} could not be decoded ({faults[0]})"
    return f"{damage}; {missing}" if missing else damage


def _opened(path: Path) -> BinaryIO:
    """The file; of a pipe or a device what it holds, as decoders go back and forth and these can be read only once."""
    file = path.open("rb")
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    with file:
        return _on_disk(file)


def _on_disk(pipe: BinaryIO) -> BinaryIO:
    """All that a pipe holds, in a file without a name: decoders go back and forth, and hours would fill the memory."""
    with writing(tempfile.gettempdir()):
        file: Any = tempfile.TemporaryFile()  # noqa: SIM115  # closed by whoever reads it
    while part := pipe.read(_AT_ONCE):
        with writing(tempfile.gettempdir()):
            file.write(part)
    file.seek(0)
    return file


class _Samples:
    """Samples as they are decoded: in memory, and as soon as there are many in a file without a name."""

    def __init__(self) -> None:
        self._parts: list[Any] = []
        self._waiting = self._stored = 0
        self._file: Any = None

    def add(self, part: np.ndarray[Any, Any]) -> None:
        """Add int16 `[samples]`."""
        self._parts.append(part)
        self._waiting += len(part)
        if self._waiting > LONG:
            self._store()

    @property
    def count(self) -> int:
        return self._waiting + self._stored

    def _store(self) -> None:
        with writing(tempfile.gettempdir()):
            if self._file is None:
                self._file = tempfile.TemporaryFile()  # noqa: SIM115  # closed in `whole`
            self._file.write(self._floats().tobytes())
        self._stored += self._waiting
        self._waiting, self._parts = 0, []

    def _floats(self) -> np.ndarray[Any, Any]:
        import numpy as np

        whole = np.concatenate([np.zeros(0, np.int16), *self._parts]).astype(np.float32)
        whole /= 32768
        return whole

    def whole(self) -> np.ndarray[Any, Any]:
        """All of them, float32."""
        import numpy as np

        if self._file is None:
            return self._floats()
        self._store()
        with writing(tempfile.gettempdir()), self._file:
            self._file.flush()
            return np.memmap(self._file, np.float32, "r", shape=(self._stored,))  # has a hold on the file of its own


def _stream(file: Any) -> Any:
    """The audio stream that the program ffmpeg takes if it isn't told which.

    Streams that the file marks as default come before others, those with more channels before those with fewer, and
    then the first one is taken. (ffmpeg also passes over a stream of which it sees no packet at first. PyAV's `best`
    goes by bit rates.)
    """

    def rank(stream: Any) -> tuple[bool, int]:
        context = stream.codec_context  # None if FFmpeg has no decoder for it
        return bool(stream.disposition.value & _DEFAULT), 0 if context is None else context.channels

    return max(file.streams.audio, key=rank)


def _decoded(av: Any, file: Any, stream: Any, most: int | None) -> tuple[_Samples, list[str]]:
    """Samples of an audio stream, and why packets could not be decoded; hardly more than `most` samples."""
    found = _Samples()
    faults: list[str] = []
    resampler = None
    setup: Any = None

    def flush() -> None:
        if resampler is not None:
            for each in resampler.resample(None):
                found.add(each.to_ndarray()[0])

    packets = file.demux(stream)
    while most is None or found.count <= most:
        try:
            packet = next(packets, None)
            if packet is None:
                break
            frames = packet.decode()
        except av.error.EOFError:
            break
        except IndexError:  # a packet of a stream that begins here, which PyAV does not know
            packets = file.demux(stream)
            continue
        except (av.error.FFmpegError, ValueError) as error:  # ValueError: a stream without a codec
            faults.append(_reason(error))
            if not isinstance(error, av.error.InvalidDataError):
                break  # the file itself can't be read on
            continue
        for frame in frames:
            if setup != (setup := (frame.format.name, frame.layout.name, frame.sample_rate)):
                flush()
                resampler = av.AudioResampler(format="s16", layout="mono", rate=RATE)
            frame.pts = None  # gaps and jumps in a file's own clock are no silence
            assert resampler is not None
            for each in resampler.resample(frame):
                found.add(each.to_ndarray()[0])
    flush()
    return found, faults


def _said(file: Any, stream: Any) -> float | None:
    """The seconds of sound that a stream has by a header that counts them; None if there is none."""
    is_counted = file.format.name in _COUNTING and stream.duration
    return float(stream.duration * stream.time_base) if is_counted else None


def _said_by_wav(data: BinaryIO) -> float | None:
    """The same of a WAV file, of which FFmpeg only counts what is there."""
    data.seek(0)
    try:
        with wave.open(data, "rb") as file:
            size = file.getnframes() * file.getnchannels() * file.getsampwidth()
            return file.getnframes() / file.getframerate() if size < _UNKNOWN else None
    except (wave.Error, EOFError, ArithmeticError):  # another coding than plain samples
        return None


def seconds_of(source: Path) -> float | None:
    """How long a file says that it is; None if it does not say, can't be read, or can be read only once."""
    av = _av()
    try:
        if not source.is_file():
            return None
        with source.open("rb") as data, _container(av, data) as file:
            return None if file.duration is None else float(file.duration / av.time_base)
    except (av.error.FFmpegError, OSError, ValueError):
        return None


def _container(av: Any, data: BinaryIO) -> Any:
    """What FFmpeg finds in an open file, and in no other."""
    return av.open(data, metadata_errors="ignore", container_options=_ALONE, timeout=(_OPENING, None))


def _av() -> Any:
    with needing("PyAV", "transcribe"):
        import av
    return av


def _reason(error: BaseException) -> str:
    """FFmpeg's words, without its number and the file's name."""
    return str(getattr(error, "strerror", None) or first_line(error))
