"""Sound from files of any kind: the samples, or a sentence that says what is wrong with the file."""

from __future__ import annotations

import io
import os
import sys
import threading
import wave
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import web
from av.stream import Disposition

from fastgen.pipeline.errors import InputError
from fastgen.pipeline.transcription import audio


def samples_of(path: Path) -> Any:
    with wave.open(str(path), "rb") as file:
        return np.frombuffer(file.readframes(file.getnframes()), "<i2").astype(np.float32) / 32768


def encoded(path: Path, into: Path, codec: str) -> Path:
    """The sound of a WAV file in another codec."""
    with wave.open(str(path), "rb") as file:
        samples = np.frombuffer(file.readframes(file.getnframes()), "<i2")
    with av.open(str(into), "w") as out:
        stream: Any = out.add_stream(codec, rate=16_000)
        stream.layout = "mono"
        frame = av.AudioFrame.from_ndarray(samples[None], format="s16", layout="mono")
        frame.sample_rate, frame.pts = 16_000, 0
        resampler = av.AudioResampler(format=stream.format.name, layout="mono", rate=16_000)
        for each in [*resampler.resample(frame), *resampler.resample(None)]:
            out.mux(stream.encode(each))
        out.mux(stream.encode(None))
    return into


def test_a_wav_file_as_it_is(sound: Any) -> None:
    path = sound(seconds=1.234)
    found = audio.read(path)
    assert found.samples.dtype == np.float32 and not found.fault
    assert np.array_equal(found.samples, samples_of(path))
    assert found.seconds == pytest.approx(1.234, abs=1e-3) == audio.seconds_of(path)


class Pipe:
    """Can be read once, forwards."""

    def __init__(self, content: bytes) -> None:
        self.content, self.most = content, 0

    def read(self, size: int = -1) -> bytes:
        end = len(self.content) if size < 0 else size
        self.most = max(self.most, end)
        found, self.content = self.content[:end], self.content[end:]
        return found


@pytest.mark.parametrize(("extension", "codec"), [("wav", ""), ("m4a", "aac")])  # m4a has a table at the end
def test_a_pipe(sound: Any, tmp_path: Path, extension: str, codec: str) -> None:
    """It lies on disk, and not in memory."""
    path = sound(seconds=70.0)
    if codec:
        path = encoded(path, tmp_path / f"b.{extension}", codec)
    pipe: Any = Pipe(path.read_bytes())
    assert np.array_equal(audio.read(pipe).samples, audio.read(path).samples)
    assert not pipe.content and pipe.most <= 1 << 20


def test_a_pipe_without_room_on_disk(sound: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(io.BytesIO):
        def write(self, data: Any) -> int:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(audio.tempfile, "TemporaryFile", Full)
    with pytest.raises(InputError, match=r"Cannot write .*: No space left on device"):
        audio.read(io.BytesIO(sound().read_bytes()))


@pytest.mark.parametrize(("extension", "codec"), [("flac", "flac"), ("mp3", "mp3"), ("m4a", "aac"), ("mkv", "aac")])
def test_other_codecs(sound: Any, tmp_path: Path, extension: str, codec: str) -> None:
    path = sound()
    found = audio.read(encoded(path, tmp_path / f"b.{extension}", codec))
    expected = samples_of(path)
    if codec == "flac":  # loses nothing
        assert np.array_equal(found.samples, expected)
        return
    assert abs(len(found.samples) - len(expected)) < 4096  # codecs pad
    spectra = [np.abs(np.fft.rfft(each[:30_000])) for each in (found.samples, expected)]
    assert np.corrcoef(*spectra)[0, 1] > 0.9


@pytest.mark.parametrize(("rate", "channels"), [(8_000, 1), (44_100, 2), (48_000, 7)])
def test_other_rates_and_channels(sound: Any, rate: int, channels: int) -> None:
    found = audio.read(sound(rate=rate, channels=channels))
    assert abs(found.seconds - 2.0) < 0.01 and found.samples.ndim == 1 and np.abs(found.samples).max() > 0.1


def with_streams(path: Path, channels: tuple[int, ...], defaults: tuple[bool, ...]) -> Path:
    """A file with several audio streams of so many channels; the first lasts one second, and each later one more."""
    with av.open(str(path), "w", options={"default_mode": "passthrough"}) as out:
        streams: list[Any] = []
        for count, is_default in zip(channels, defaults, strict=True):
            streams.append(out.add_stream("pcm_s16le", rate=16_000))
            streams[-1].layout = {1: "mono", 2: "stereo", 6: "5.1"}[count]
            streams[-1].disposition = Disposition.default if is_default else Disposition(0)
        for number, stream in enumerate(streams):
            samples = np.full((1, 16_000 * (number + 1) * channels[number]), 1000, np.int16)
            frame = av.AudioFrame.from_ndarray(samples, format="s16", layout=stream.layout.name)
            frame.sample_rate, frame.pts = 16_000, 0
            out.mux(stream.encode(frame))
            out.mux(stream.encode(None))
    return path


@pytest.mark.parametrize(
    ("channels", "defaults", "chosen"),
    [
        ((1, 2), (False, False), 1),
        ((2, 1), (False, False), 0),
        ((2, 2), (False, False), 0),
        ((2, 6, 1), (False, False, False), 1),
        ((2, 1), (False, True), 1),
        ((1, 2), (True, False), 0),
        ((1, 2, 2), (True, True, True), 1),
    ],
)
def test_several_streams(channels: tuple[int, ...], defaults: tuple[bool, ...], chosen: int, tmp_path: Path) -> None:
    """The one that the program ffmpeg takes by itself."""
    found = audio.read(with_streams(tmp_path / "a.mkv", channels, defaults))
    assert found.seconds == chosen + 1 and np.abs(found.samples).max() > 0.02


def transport_stream(path: Path, streams: int, seconds: int) -> bytes:
    """A recording of as many audio streams as MPEG's transport streams have them."""
    size, rate = 1152, 48_000
    with av.open(str(path), "w", format="mpegts") as out:
        tracks: list[Any] = [out.add_stream("mp2", rate=rate) for _ in range(streams)]
        for track in tracks:
            track.layout, track.bit_rate = "stereo", 384_000
        for start in range(0, seconds * rate, size):
            tone = (8000 * np.sin(np.arange(start, start + size) / 20)).astype("<i2")
            frame = av.AudioFrame.from_ndarray(np.repeat(tone, 2)[None], format="s16", layout="stereo")
            frame.sample_rate, frame.pts = rate, start
            for track in tracks:
                out.mux(track.encode(frame))
        for track in tracks:
            out.mux(track.encode(None))
    return path.read_bytes()


def test_a_stream_in_the_midst(tmp_path: Path) -> None:
    """It begins and ends long after what FFmpeg looks at first: the one that was there from the beginning goes on."""
    path, seconds = tmp_path / "joined.ts", 40
    one, two = (transport_stream(tmp_path / f"{streams}.ts", streams, seconds) for streams in (1, 2))
    path.write_bytes(one + two + one)
    found = audio.read(path)
    assert found.seconds == pytest.approx(3 * seconds, abs=0.5) and not found.fault


@pytest.mark.skipif(sys.platform == "win32", reason="pipes have no names in folders there")
def test_a_pipe_with_a_name(sound: Any, tmp_path: Path) -> None:
    """It is read once, by decoders that go back and forth."""
    path, pipe = encoded(sound(seconds=3.0), tmp_path / "b.m4a", "aac"), tmp_path / "pipe.m4a"
    os.mkfifo(pipe)
    assert audio.seconds_of(pipe) is None  # and does not wait for a writer
    writer = threading.Thread(target=pipe.write_bytes, args=(path.read_bytes(),))
    writer.start()
    assert np.array_equal(audio.read(pipe).samples, audio.read(path).samples)
    writer.join()


@pytest.mark.parametrize("seconds", [0.01, 0.0001])
def test_hardly_any_sound(sound: Any, seconds: float) -> None:
    assert audio.read(sound(seconds=seconds)).seconds == pytest.approx(seconds, abs=1e-4)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "Cannot read .*: No such file or directory"),
        (b"", "is no audio that FFmpeg knows"),
        (b"This is a text, whatever it is called.\n" * 50, "is no audio that FFmpeg knows"),
    ],
)
def test_what_is_no_sound(content: bytes | None, said: str, tmp_path: Path) -> None:
    path = tmp_path / "a.mp3"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=said):
        audio.read(path)
    assert audio.seconds_of(path) is None


@pytest.mark.parametrize("duration", [1, 1_000_000])
@pytest.mark.parametrize("kind", ["ffconcat", "m3u8"])
def test_a_playlist_leads_to_no_other_file(
    sound: Any, monkeypatch: pytest.MonkeyPatch, kind: str, duration: int
) -> None:
    """Neither to one on the disk nor to an address: whoever sends it need not be allowed to read those."""
    other, asked = sound(), list[str]()
    monkeypatch.chdir(other.parent)  # where FFmpeg looks for the files of a playlist without a name
    monkeypatch.setattr(audio, "_OPENING", 0.5)
    monkeypatch.setattr(web._Quiet, "do_GET", lambda self: asked.append(self.path))
    with web.served(other.parent) as address:
        for place in (other.name, f"{address}/{other.name}"):
            content = f"ffconcat version 1.0\nfile {place}\n"
            if kind == "m3u8":
                content = f"#EXTM3U\n#EXT-X-TARGETDURATION:{duration}\n#EXTINF:1,\n{place}\n"
            path = other.with_name(f"list.{kind}")
            path.write_text(content)
            for source in (io.BytesIO(content.encode()), path):
                with pytest.raises(InputError, match="is no audio that FFmpeg knows"):
                    audio.read(source)
            assert audio.seconds_of(path) is None
    assert asked == []


def test_no_samples(sound: Any) -> None:
    with pytest.raises(InputError, match="has no audio in it"):
        audio.read(sound(seconds=0))


def test_without_pyav(sound: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = sound()
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(InputError, match=r"PyAV is needed: pip install .*\[transcribe\]"):
        audio.read(path)


def test_a_folder(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="Is a directory"):
        audio.read(tmp_path)


@pytest.mark.parametrize("extension", ["wav", "flac"])
def test_a_truncated_file(sound: Any, tmp_path: Path, extension: str) -> None:
    """What there is of it is read."""
    path = sound(seconds=4)
    if extension == "flac":
        path = encoded(path, tmp_path / "a.flac", "flac")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    found = audio.read(path)
    assert 1.0 < found.seconds < 3.0 and found.said == pytest.approx(4.0, abs=0.01)
    missing = f"it says that it has 4.0 seconds of sound, and {found.seconds:.1f} are there"
    damage = f"{path} is damaged: 1 part could not be decoded"
    assert found.fault.startswith(f"{path} is cut off: " if extension == "wav" else damage)
    assert found.fault.endswith(missing)


def test_a_length_that_no_header_says(sound: Any, tmp_path: Path) -> None:
    """A writer that can't go back leaves a length that means nothing; of an MP3 it is an estimate."""
    path = sound(seconds=2)
    assert audio.read(encoded(path, tmp_path / "a.mp3", "mp3")).said is None
    data = bytearray(path.read_bytes())
    place = data.index(b"data") + 4
    for length in (0, 0x7FFFFFFF, 0xFFFFFFFF):
        data[place : place + 4] = length.to_bytes(4, "little")
        found = audio.read(io.BytesIO(data))
        assert found.seconds == pytest.approx(2.0, abs=0.01) and not found.said and not found.fault, hex(length)


def test_no_more_than_the_longest(sound: Any) -> None:
    data = sound(seconds=4).read_bytes()
    assert audio.read(io.BytesIO(data), "it", 4.0).seconds == 4.0
    with pytest.raises(InputError, match="it has more than 0 minutes of sound"):
        audio.read(io.BytesIO(data), "it", 3.9)


@pytest.mark.parametrize(("extension", "codec"), [("mp3", "mp3"), ("flac", "flac")])
def test_a_damaged_part_is_left_out(sound: Any, tmp_path: Path, extension: str, codec: str) -> None:
    path = encoded(sound(seconds=20), tmp_path / f"a.{extension}", codec)
    data = bytearray(path.read_bytes())
    data[len(data) // 4 : len(data) // 4 + 600] = bytes(255 - byte for byte in data[len(data) // 4 :][:600])
    path.write_bytes(data)
    found = audio.read(path)
    assert 19.0 < found.seconds < 20.2
