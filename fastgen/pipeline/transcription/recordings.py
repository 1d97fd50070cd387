"""Transcribes a list of recordings: what is behind `fastgen.transcribe`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fastgen.pipeline.errors import InputError
from fastgen.pipeline.transcription import audio
from fastgen.pipeline.transcription.progress import AudioProgress
from fastgen.pipeline.transcription.together import Recording, transcribe_all


def transcribe(
    model: Any, recordings: Sequence[Any], options: dict[str, Any], *, batch_size: int, progress: bool, **cuts: bool
) -> list[dict[str, Any]]:
    """See `fastgen.transcribe`."""
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size} is not 1 or more")
    show = AudioProgress(None, enabled=progress)
    found: list[Any] = [None] * len(recordings)

    def all_of_them() -> Iterator[Recording]:
        for number, source in enumerate(recordings):

            def done(result: Any, error: Exception | None, number: int = number) -> None:
                if error is not None:
                    raise error
                found[number] = result

            yield Recording(_samples(source, number), dict(options), show.advance, done)

    try:
        transcribe_all(model, all_of_them(), batch_size, **cuts)
    finally:
        show.close()
    return found


def _samples(source: Any, number: int) -> np.ndarray[Any, Any]:
    """Float32 `[samples]` of a file, an array or a tensor."""
    if isinstance(source, (str, os.PathLike)):
        return audio.read(Path(source)).samples
    samples = np.asarray(source.cpu() if hasattr(source, "cpu") else source)
    if samples.ndim != 1 or samples.dtype != np.float32:
        raise InputError(
            f"Recording {number} is {samples.dtype} {list(samples.shape)}: give float32 [samples], one channel, 16 kHz."
        )
    return samples
