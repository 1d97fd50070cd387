"""Transcribes several recordings with one model of whisper's: their windows share the steps of the decoder.

Each recording goes through `whisper.transcribe`, as if it were alone: text, tokens and times are the same.
"""

from __future__ import annotations

import contextvars
import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from fastgen import config
from fastgen.memory import limits
from fastgen.optimizer import together
from fastgen.patching import hosts
from fastgen.patching.redirection import redirected
from fastgen.patching.replaced_code import is_of
from fastgen.pipeline.batching import release_memory
from fastgen.pipeline.errors import needing
from fastgen.pipeline.transcription import silences
from fastgen.pipeline.transcription.audio import FRAMES, LONG, RATE, last_frame
from fastgen.pipeline.transcription.calls import Call, outside, run_all

if TYPE_CHECKING:
    import numpy as np


@dataclass
class Recording:
    """A recording that is to be transcribed."""

    samples: np.ndarray[Any, Any]  # float32 [samples], 16 kHz
    options: dict[str, Any]  # of whisper.transcribe
    advance: Callable[[float], None] = lambda seconds: None  # called with seconds of sound as they are transcribed
    # Called with the result, or what went wrong.
    done: Callable[[dict[str, Any] | None, Exception | None], None] = lambda result, error: None
    parts: list[Part] = field(default_factory=list)
    counted: float = 0.0  # seconds that `advance` has been told

    def count(self, seconds: float) -> None:
        self.counted += seconds
        self.advance(seconds)

    def end(self, result: dict[str, Any] | None, error: Exception | None) -> None:
        self.count(len(self.samples) / RATE - self.counted)
        self.parts = []  # which know this recording: so the samples are freed now
        self.done(result, error)

    def part_ended(self) -> None:
        """End once all parts have."""
        if any(part.result is None and part.error is None for part in self.parts):
            return
        error = next((part.error for part in self.parts if part.error is not None), None)
        self.end(None if error is not None else _joined(self.parts), error)


@dataclass
class Part:
    """What of a recording is transcribed on its own: all, or what lies between two silences."""

    recording: Recording
    start: float = 0.0  # seconds
    end: float | None = None
    result: dict[str, Any] | None = None
    error: Exception | None = None

    def ended(self, result: dict[str, Any] | None, error: Exception | None) -> None:
        self.result, self.error = result, error
        self.recording.part_ended()


def transcribe_all(
    model: Any, recordings: Iterable[Recording], batch_size: int, *, batched: bool = False, vad_filter: bool = False
) -> None:
    """Transcribe all recordings; the next one is asked for when there is room.

    What does not fit into memory beside others is transcribed once more, alone.

    Args:
        batch_size: the most recordings, or parts of some, whose windows decode together.
        batched: cut recordings at silences into parts of 30 seconds at most, each transcribed without what was said
            before.
        vad_filter: leave out silences of two seconds and more.
    """
    with needing("openai-whisper", "transcribe"):
        from whisper.model import Whisper
    from fastgen.optimizer.whisper.inference import answer

    crowded: list[Recording] = []  # which did not fit beside others while their parts were looked for

    def calls(some: Iterable[Recording], is_alone: bool) -> Iterator[Call]:
        for recording in some:
            try:
                with limits.relief():
                    parts = recording.parts = _parts(model, recording, batched, vad_filter)
                    nothing = None if parts else _nothing(model, recording)
            except Exception as error:
                if is_alone or not limits.is_out_of_memory(error):  # that recording alone has failed
                    recording.end(None, error)
                else:
                    crowded.append(recording)
                continue
            for part in parts:
                yield Call(functools.partial(_transcribed, model, part), part.ended)
            if nothing is not None:
                recording.end(nothing, None)

    module: Any = sys.modules["whisper.transcribe"]  # the attribute `whisper.transcribe` is the function
    seams: dict[Any, Any] = {
        (module, "tqdm"): _counting,
        (module, "log_mel_spectrogram"): _of_any_length,
        (module, "add_word_timestamps"): outside,
        (Whisper, "detect_language"): outside,
    }
    is_accelerated = hosts.is_on() and config.current().tier != "stock"
    size = batch_size if is_accelerated else 0
    with redirected(seams):
        run_all(calls(recordings, size < 2), size, answer, model.device)
        if crowded:
            release_memory()
            run_all(calls(crowded, True), 0, answer, model.device)


# ---------------------------------------------------------------------------------------------- parts
def _parts(model: Any, recording: Recording, batched: bool, vad_filter: bool) -> list[Part]:
    """What is to be transcribed of a recording; none if nobody speaks."""
    samples, last = recording.samples, last_frame(recording.samples)
    if not (batched or vad_filter):
        if (clips := recording.options.get("clip_timestamps")) is not None:
            recording.options = {**recording.options, "clip_timestamps": within(clips, last)}
        return [Part(recording)]
    found = silences.parts(samples) if batched else silences.speech(samples)
    if found:
        recording.options = {**recording.options, "language": _language(model, recording, found[0][0])}
    if batched:
        recording.options = {**recording.options, "condition_on_previous_text": False}
        return [Part(recording, start, end) for start, end in found]
    clips = [(start, min(end, last)) for start, end in found if start < last]
    recording.options = {**recording.options, "clip_timestamps": [each for clip in clips for each in clip]}
    return [Part(recording)] if clips else []


def within(clips: Any, last: float) -> list[float]:
    """The ends of clips, `start,end,start,end,...` as whisper takes them, in seconds, none later than `last`."""
    found = clips.split(",") if isinstance(clips, str) and clips else clips
    return [min(float(each), last) for each in found]


def _nothing(model: Any, recording: Recording) -> dict[str, Any]:
    """The result for a recording in which nobody speaks."""
    return {"text": "", "segments": [], "language": _language(model, recording, 0.0)}


def _language(model: Any, recording: Recording, start: float) -> str:
    """The language that was given or that whisper finds, in the 30 seconds from `start` on.

    A stretch of speech may be a word, which says little.
    """
    import torch
    from whisper.audio import N_FRAMES, N_SAMPLES, log_mel_spectrogram, pad_or_trim

    given: str | None = recording.options.get("language")
    if given is not None or not model.is_multilingual:
        return given or "en"
    samples = _between(recording.samples, start, start + silences.WINDOW)
    mel = pad_or_trim(log_mel_spectrogram(samples, model.dims.n_mels, padding=N_SAMPLES), N_FRAMES)
    is_half = recording.options.get("fp16", True) and model.device.type != "cpu"
    _, chances = model.detect_language(mel.to(model.device, torch.float16 if is_half else torch.float32))
    return max(chances, key=chances.get)


def _between(samples: np.ndarray[Any, Any], start: float, end: float | None) -> np.ndarray[Any, Any]:
    """A copy of the samples between these times; all of them, as they are, without an end."""
    return samples if end is None else samples[round(start * RATE) : round(end * RATE)].copy()


def _transcribed(model: Any, part: Part) -> dict[str, Any]:
    import whisper

    _advance.set(part.recording.count)
    samples = _between(part.recording.samples, part.start, part.end)
    result: dict[str, Any] = whisper.transcribe(model, samples, **part.recording.options)
    return result


def _joined(parts: list[Part]) -> dict[str, Any]:
    """The result for a recording, from those of all parts of it."""
    first = parts[0].result
    assert first is not None
    if parts[0].end is None:
        return first
    segments: list[dict[str, Any]] = []
    for part in parts:
        assert part.result is not None
        for segment in part.result["segments"]:
            times = _later(segment, part.start)
            if words := segment.get("words"):
                times["words"] = [{**word, **_later(word, part.start)} for word in words]
            frames = segment["seek"] + round(part.start * FRAMES)
            segments.append({**segment, **times, "id": len(segments), "seek": frames})
    text = "".join(part.result["text"] for part in parts if part.result is not None)
    return {"text": text, "segments": segments, "language": first["language"]}


def _later(one: dict[str, Any], seconds: float) -> dict[str, Any]:
    return {name: one[name] + seconds for name in ("start", "end")}


# ---------------------------------------------------------------------------------------------- seams of whisper
# Called with seconds of sound, as they are transcribed; set in the calls of `transcribe_all` alone.
_advance: contextvars.ContextVar[Callable[[float], None] | None] = contextvars.ContextVar(
    "fastgen_advance", default=None
)


class _Bar:
    """Takes the place of whisper's progress bar, which knows where in the sound it is."""

    def __init__(self, advance: Callable[[float], None]) -> None:
        self._advance = advance

    def update(self, frames: int) -> None:
        self._advance(frames / FRAMES)

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *_: Any) -> None:
        pass


def _counting(stock: Any) -> Any:
    """Wrap the module `tqdm`: progress goes to `_advance`, where there is one."""

    def bar(*args: Any, **kwargs: Any) -> Any:
        advance = _advance.get()
        return stock.tqdm(*args, **kwargs) if advance is None else _Bar(advance)

    return SimpleNamespace(tqdm=bar)


def _of_any_length(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `log_mel_spectrogram`: of long sounds it is computed where whisper looks at it."""

    @functools.wraps(stock)
    def log_mel_spectrogram(audio: Any, n_mels: int = 80, padding: int = 0, device: Any = None) -> Any:
        if _advance.get() is None or len(audio) <= LONG or not is_of(stock, "whisper"):
            return together.outside(stock, audio, n_mels, padding, device)
        from fastgen.pipeline.transcription.spectrogram import Spectrogram

        return together.outside(Spectrogram, audio, n_mels, padding)

    return log_mel_spectrogram
