"""Transcribes a list of recordings: what is behind `fastgen.transcribe`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fastgen import report
from fastgen.pipeline.errors import InputError
from fastgen.pipeline.transcription import audio, pipelines, silences
from fastgen.pipeline.transcription.progress import AudioProgress
from fastgen.pipeline.transcription.together import Recording, transcribe_all


def transcribe(
    model: Any,
    recordings: Sequence[Any],
    options: dict[str, Any],
    *,
    batch_size: int,
    batched: bool,
    vad_filter: bool,
    progress: bool,
) -> list[dict[str, Any]]:
    """See `fastgen.transcribe`."""
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size} is not 1 or more")
    if isinstance(recordings, (str, bytes, dict, os.PathLike)) or hasattr(recordings, "ndim"):
        raise ValueError("recordings is one recording: give a list, [recording]")
    if pipelines.is_pipeline(model):
        for name, is_given in (("batched", batched), ("vad_filter", vad_filter)):
            if is_given:
                raise ValueError(f"{name} is for models of the package whisper; a pipeline cuts by chunk_length_s.")
        return pipelines.transcribe(model, recordings, options, batch_size=batch_size, progress=progress)
    if type(model).__module__.startswith("transformers."):
        raise ValueError(f"{type(model).__name__} takes no sound: give transformers.pipeline(..., model=model).")
    if not hasattr(model, "dims"):  # as of faster-whisper, or a name
        raise ValueError(f"{type(model).__name__} is no model of the package whisper: give whisper.load_model(NAME).")
    sources = [_checked(source, number) for number, source in enumerate(recordings)]  # before hours of work
    show = AudioProgress(None, enabled=progress)
    found: list[Any] = [None] * len(sources)

    def all_of_them() -> Iterator[Recording]:
        for number, source in enumerate(sources):

            def done(result: Any, error: Exception | None, number: int = number) -> None:
                if error is not None:
                    raise error
                found[number] = result

            samples = _read(source) if isinstance(source, Path) else source
            yield Recording(samples, dict(options), show.advance, done)

    try:
        silences.check(options.get("clip_timestamps", "0"), batched, vad_filter)
        transcribe_all(model, all_of_them(), batch_size, batched=batched, vad_filter=vad_filter)
    except InputError as error:
        raise ValueError(str(error)) from error
    finally:
        show.close()
    return found


def _read(path: Path) -> np.ndarray[Any, Any]:
    """The samples of a file; what is wrong with it is a warning."""
    sound = audio.read(path)
    if sound.fault:
        report.warn(f"{sound.fault}; what is there is transcribed.")
    return sound.samples


def _checked(source: Any, number: int) -> Path | np.ndarray[Any, Any]:
    """A file that is there, or float32 `[samples]`."""
    if isinstance(source, (str, os.PathLike)):
        path = Path(source)
        if not audio.is_there(path):
            raise ValueError(f"recording {number}, {path}, is no file")
        return path
    samples = np.asarray(source.cpu() if hasattr(source, "cpu") else source)
    if samples.ndim != 1 or samples.dtype != np.float32:
        shape = f"{samples.dtype} {list(samples.shape)}"
        raise ValueError(f"recording {number} is {shape}: give float32 [samples], one channel, 16 kHz")
    return samples
