"""Long sounds lie on disk, and their spectrogram is computed where it is looked at: the same numbers, and texts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import whisper

import fastgen
from fastgen.pipeline.transcription import audio, load, together
from fastgen.pipeline.transcription.spectrogram import Spectrogram


@pytest.mark.parametrize("length", [480_000, 480_001, 16_000 * 61 + 7, 399, 200_160])
def test_the_numbers_are_whispers(length: int) -> None:
    samples = np.random.default_rng(length).normal(size=length).astype(np.float32) * 0.1
    samples[length // 2 :] *= 1e-6  # below the floor that the loudest part sets
    theirs = whisper.log_mel_spectrogram(samples, 80, padding=480_000)
    ours = Spectrogram(samples, 80, 480_000)
    assert ours.shape == tuple(theirs.shape)
    frames = theirs.shape[1]
    for start, end in (
        (0, 3000),
        (0, 1),
        (0, 2),
        (1, 2),
        (2, 3001),
        (frames - 3000, frames),
        (length // 160 - 5, length // 160 + 9),
    ):
        found = ours[:, max(start, 0) : end]
        torch.testing.assert_close(found, theirs[:, max(start, 0) : end], rtol=1e-5, atol=1e-5)
    first = whisper.pad_or_trim(ours, 3000)
    torch.testing.assert_close(first, whisper.pad_or_trim(theirs, 3000), rtol=1e-5, atol=1e-5)


def test_many_minutes() -> None:
    """The loudest part may be anywhere."""
    samples = np.random.default_rng(0).normal(size=16_000 * 150).astype(np.float32) * 1e-3
    samples[16_000 * 140 :] *= 500
    theirs = whisper.log_mel_spectrogram(samples, 128, padding=480_000)
    ours = Spectrogram(samples, 128, 480_000)
    for start in (0, 5_999, 6_000, 12_345):
        window = slice(start, start + 3000)
        torch.testing.assert_close(ours[:, window], theirs[:, window], rtol=1e-5, atol=1e-5)
    assert ours[:, 7:7].shape == (128, 0)


def test_samples_on_disk(sound: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = sound(seconds=7.0)
    expected = audio.read(path).samples
    monkeypatch.setattr(audio, "LONG", 20_000)
    found = audio.read(path).samples
    assert isinstance(found, np.memmap) and not isinstance(expected, np.memmap)
    assert found.dtype == np.float32 and np.array_equal(found, expected)


def test_no_room_on_disk(sound: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(audio, "LONG", 20_000)
    monkeypatch.setattr(audio.tempfile, "TemporaryFile", full)
    with pytest.raises(audio.InputError, match=r"Cannot write .*: No space left on device"):
        audio.read(sound(seconds=7.0))


def test_the_same_texts(checkpoint: Path, sound: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, files = load.load(str(checkpoint), "cpu"), [sound("a.wav", 41.0), sound("b.wav", 33.0, seed=1)]
    options: dict[str, Any] = dict(fp16=False, temperature=0.0, beam_size=2, word_timestamps=True)
    expected = fastgen.transcribe(model, files, **options)
    used: list[int] = []
    real = Spectrogram.__getitem__
    monkeypatch.setattr(Spectrogram, "__getitem__", lambda self, place: (used.append(1), real(self, place))[1])
    for module in (audio, together):
        monkeypatch.setattr(module, "LONG", 20_000)
    found = fastgen.transcribe(model, files, **options)
    assert len(used) >= 4
    assert [one["text"] for one in found] == [one["text"] for one in expected]
    for one, other in zip(found, expected, strict=True):
        assert one["language"] == other["language"]
        for name in ("tokens", "start", "end", "seek"):
            assert [segment[name] for segment in one["segments"]] == [segment[name] for segment in other["segments"]]


def test_a_users_own_spectrogram(checkpoint: Path, sound: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put in place of whisper's it is called for long sounds, too."""
    model, file, seen = load.load(str(checkpoint), "cpu"), sound("a.wav", 33.0), list[int]()
    module = sys.modules["whisper.transcribe"]
    real = vars(module)["log_mel_spectrogram"]
    for each in (audio, together):
        monkeypatch.setattr(each, "LONG", 20_000)

    def mine(samples: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(len(samples))
        return real(samples, *args, **kwargs) * 0.5

    monkeypatch.setattr(module, "log_mel_spectrogram", mine)
    options: dict[str, Any] = dict(fp16=False, temperature=0.0, language="en", sample_len=8)
    (found,) = fastgen.transcribe(model, [file], **options)
    assert seen
    with fastgen.disabled():
        expected = module.transcribe(model, audio.read(file).samples, **options)
    assert [one["tokens"] for one in found["segments"]] == [one["tokens"] for one in expected["segments"]]
