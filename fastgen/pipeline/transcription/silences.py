"""Finds where somebody speaks, by Silero's voice activity detection (https://github.com/snakers4/silero-vad)."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from fastgen.pipeline.errors import InputError, needing
from fastgen.pipeline.transcription.audio import RATE

if TYPE_CHECKING:
    import numpy as np

WINDOW = 30.0  # seconds that Whisper reads at a time
_PAUSE = 2.0  # seconds of silence that part two stretches; shorter ones Whisper hears
_PADDING = 0.4  # seconds before and after what is taken for speech
_BREATH = 0.16  # seconds of silence at which a sound may be cut


def check(clips: Any, batched: bool, vad_filter: bool, prefix: str = "") -> None:
    """Raise InputError if these options of a transcription, written with `prefix`, do not go together.

    `clips`: `clip_timestamps`; "0" or [0.0] is all of a sound.
    """
    if (batched or vad_filter) and clips not in ("0", [0.0]):
        raise InputError(
            f"{prefix}clip_timestamps can't be given with {prefix}batched or {prefix}vad_filter, which choose clips."
        )
    if batched and vad_filter:
        raise InputError(f"{prefix}batched leaves out silences already: {prefix}vad_filter can't be given with it.")


def speech(samples: np.ndarray[Any, Any]) -> list[tuple[float, float]]:
    """Start and end in seconds of each stretch of speech that silence of two seconds or more parts from the next.

    `samples`: float32 `[samples]`, 16 kHz.
    """
    return _found(samples, min_silence_duration_ms=int(_PAUSE * 1000), speech_pad_ms=int(_PADDING * 1000))


def parts(samples: np.ndarray[Any, Any]) -> list[tuple[float, float]]:
    """Start and end in seconds of parts of 30 seconds at most, cut where it is silent, that have all speech in them.

    `samples`: float32 `[samples]`, 16 kHz. Speech of more than 30 seconds without a pause is cut where it goes on.
    """
    found = _found(
        samples,
        min_silence_duration_ms=int(_BREATH * 1000),
        max_speech_duration_s=WINDOW,  # with the padding
        speech_pad_ms=int(_PADDING * 1000),  # half of a shorter silence
    )
    joined: list[tuple[float, float]] = []
    for start, end in found:
        if joined and end - joined[-1][0] <= WINDOW:
            joined[-1] = joined[-1][0], end
        else:
            joined.append((start, end))
    return joined


def _found(samples: np.ndarray[Any, Any], **options: Any) -> list[tuple[float, float]]:
    model, timestamps = _detector()
    chances = model.audio_forward(samples)
    # Speech may be as short as it likes: Silero would drop what is shorter than a quarter of a second, as a "yes" is.
    found = timestamps(chances, audio_length_samples=len(samples), min_speech_duration_ms=0, **options)
    return [(one["start"] / RATE, one["end"] / RATE) for one in found]


@functools.lru_cache(maxsize=1)
def _detector() -> tuple[Any, Any]:
    import torch

    threads = torch.get_num_threads()
    with needing("silero-vad", "transcribe"):
        try:
            import silero_vad
            from silero_vad.utils_vad import get_speech_timestamps_from_probs

            return silero_vad.load_silero_vad(sequence=True), get_speech_timestamps_from_probs
        finally:
            torch.set_num_threads(threads)  # its import sets one thread, for everybody
