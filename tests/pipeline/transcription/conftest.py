"""Tests of `fastgen-transcribe`, with tiny random models and sounds made here."""

from __future__ import annotations

import wave
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
whisper = pytest.importorskip("whisper")
pytest.importorskip("av")

Make = Callable[..., Path]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model as whisper saves it, whose texts end soon, and which reads 30 seconds at a time."""
    from whisper_kit import tiny

    model = tiny(1500, seed=1)
    path = tmp_path_factory.mktemp("model") / "tiny.pt"
    torch.save({"dims": vars(model.dims), "model_state_dict": model.state_dict()}, path)
    return path


@pytest.fixture
def sound(tmp_path: Path) -> Make:
    """Writes a WAV file: tones that change, with some noise."""

    def make(name: str = "a.wav", seconds: float = 2.0, rate: int = 16_000, channels: int = 1, seed: int = 0) -> Path:
        chance = np.random.default_rng(seed)
        time = np.arange(int(seconds * rate)) / rate
        tone = np.sin(2 * np.pi * (200 + 300 * chance.random() + 50 * np.floor(time * 4) % 400) * time)
        samples = (8000 * tone + 500 * chance.standard_normal(len(time))).astype("<i2")
        path = tmp_path / name
        with wave.open(str(path), "wb") as file:
            file.setnchannels(channels)
            file.setsampwidth(2)
            file.setframerate(rate)
            file.writeframes(np.repeat(samples, channels).tobytes())
        return path

    return make
