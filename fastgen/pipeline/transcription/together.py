"""Transcribes several recordings with one model of whisper's: their windows share the steps of the decoder.

Each recording goes through `whisper.transcribe`, as if it were alone: text, tokens and times are the same.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from fastgen.optimizer import together
from fastgen.patching.patch_set import PatchSet
from fastgen.pipeline.errors import InputError, needing
from fastgen.pipeline.transcription import silences
from fastgen.pipeline.transcription.audio import RATE

if TYPE_CHECKING:
    import numpy as np

_FRAMES = 100  # of whisper's spectrogram, a second


@dataclass
class Recording:
    """A recording that is to be transcribed."""

    samples: np.ndarray[Any, Any]  # float32 [samples], 16 kHz
    options: dict[str, Any]  # of whisper.transcribe
    advance: Callable[[float], None] = lambda seconds: None  # called with seconds of sound as they are transcribed
    # Called with the result, or what went wrong.
    done: Callable[[dict[str, Any] | None, Exception | None], None] = lambda result, error: None
    parts: list[Part] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return len(self.samples) / RATE

    def ended(self) -> None:
        """Call `done` once all parts have ended."""
        if any(part.result is None and part.error is None for part in self.parts):
            return  # some are left
        error = next((part.error for part in self.parts if part.error is not None), None)
        self.done(None if error is not None else _joined(self.parts), error)


@dataclass
class Part:
    """What of a recording is transcribed on its own: all, or what lies between two silences."""

    recording: Recording
    start: float = 0.0  # seconds
    end: float | None = None
    result: dict[str, Any] | None = None
    error: Exception | None = None


def transcribe_all(
    model: Any, recordings: Iterable[Recording], batch_size: int, *, batched: bool = False, vad_filter: bool = False
) -> None:
    """Transcribe all recordings; the next one is asked for when there is room.

    Args:
        batch_size: the most recordings, or parts of some, whose windows decode together.
        batched: cut recordings at silences into parts of 30 seconds at most, each transcribed without what was said
            before.
        vad_filter: leave out silences of two seconds and more.
    """
    with needing("openai-whisper", "transcribe"):
        from fastgen.optimizer.whisper.inference import answer

    begun: dict[int, Part] = {}
    numbers = itertools.count()

    def calls() -> Iterator[Callable[[], Any]]:
        for recording in recordings:
            try:
                parts = recording.parts = _parts(model, recording, batched, vad_filter)
            except Exception as error:  # that recording alone has failed
                recording.done(None, error)
                continue
            for part in parts:
                begun[next(numbers)] = part
                yield functools.partial(_transcribed, model, part)
            if not parts:
                recording.done({"text": "", "segments": [], "language": recording.options.get("language")}, None)

    def done(number: int, result: Any, error: Exception | None) -> None:
        part = begun.pop(number)
        part.result, part.error = result, error
        part.recording.ended()

    with _redirected():
        together.run(calls(), batch_size, answer, done, model.device)


def _parts(model: Any, recording: Recording, batched: bool, vad_filter: bool) -> list[Part]:
    samples, options = recording.samples, recording.options
    if not (batched or vad_filter):
        return [Part(recording)]
    if options.get("clip_timestamps", "0") not in ("0", [0.0]):
        raise InputError("clip_timestamps can't be given with batched or vad_filter: these choose clips themselves.")
    if not batched:
        ends = [end for stretch in silences.speech(samples) for end in stretch]
        recording.options = {**options, "clip_timestamps": ends}
        return [Part(recording)] if ends else []
    windows = silences.windows(samples)
    recording.options = {**options, "condition_on_previous_text": False}
    if windows and options.get("language") is None and model.is_multilingual:
        start, end = windows[0]
        recording.options["language"] = _language(model, _between(samples, start, end), options.get("fp16", True))
    return [Part(recording, start, end) for start, end in windows]


def _language(model: Any, samples: np.ndarray[Any, Any], fp16: bool) -> str:
    """The language that whisper finds in at most 30 seconds of sound."""
    import torch
    from whisper.audio import N_FRAMES, N_SAMPLES, log_mel_spectrogram, pad_or_trim

    mel = pad_or_trim(log_mel_spectrogram(samples, model.dims.n_mels, padding=N_SAMPLES), N_FRAMES)
    is_half = fp16 and model.device.type != "cpu"
    _, chances = model.detect_language(mel.to(model.device, torch.float16 if is_half else torch.float32))
    return max(chances, key=chances.get)


def _between(samples: np.ndarray[Any, Any], start: float, end: float | None) -> np.ndarray[Any, Any]:
    return samples[round(start * RATE) : None if end is None else round(end * RATE)]


def _transcribed(model: Any, part: Part) -> dict[str, Any]:
    import whisper

    samples = _between(part.recording.samples, part.start, part.end)
    counted = 0.0

    def advance(seconds: float) -> None:
        nonlocal counted
        counted += seconds
        part.recording.advance(seconds)

    _advance.set(advance)
    result: dict[str, Any] = whisper.transcribe(model, samples, **part.recording.options)
    advance(len(samples) / RATE - counted)  # what was silent is not counted by whisper
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
            frames = segment["seek"] + round(part.start * _FRAMES)
            segments.append({**segment, **times, "id": len(segments), "seek": frames})
    text = "".join(part.result["text"] for part in parts if part.result is not None)
    return {"text": text, "segments": segments, "language": first["language"]}


def _later(one: dict[str, Any], seconds: float) -> dict[str, Any]:
    return {name: one[name] + seconds for name in ("start", "end")}


# Called with seconds of sound, as they are transcribed, in the calls that want it.
_advance: contextvars.ContextVar[Callable[[float], None] | None] = contextvars.ContextVar(
    "fastgen_advance", default=None
)


class _Bar(contextlib.AbstractContextManager[Any]):
    """Takes the place of whisper's progress bar, which knows where in the sound it is."""

    def __init__(self, advance: Callable[[float], None]) -> None:
        self._advance = advance

    def update(self, frames: int) -> None:
        self._advance(frames / _FRAMES)

    def __exit__(self, *_: Any) -> None:
        pass


@contextlib.contextmanager
def _redirected() -> Iterator[None]:
    """Inside the block, large operations of calls that run together are run outside, and progress goes to `_advance`.

    For other calls, of other threads, nothing changes.
    """
    from whisper.model import Whisper

    module: Any = sys.modules["whisper.transcribe"]  # the attribute `whisper.transcribe` is the function
    hosts = module.tqdm

    def bar(*args: Any, **kwargs: Any) -> Any:
        advance = _advance.get()
        return hosts.tqdm(*args, **kwargs) if advance is None else _Bar(advance)

    patches = PatchSet()
    try:
        patches.replace(module, "tqdm", SimpleNamespace(tqdm=bar))
        for owner, name in (
            (module, "log_mel_spectrogram"),
            (module, "add_word_timestamps"),
            (Whisper, "detect_language"),
        ):
            patches.replace(owner, name, _outside(getattr(owner, name)))
        yield
    finally:
        patches.revert()


def _outside(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def run(*args: Any, **kwargs: Any) -> Any:
        return together.outside(stock, *args, **kwargs)

    return run
