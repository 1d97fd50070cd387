"""Answers requests with a Whisper of transformers: reads the sound, and has the engine write down what is said."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import io
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fastgen.pipeline.errors import InputError, UnwritableError, first_line, needing
from fastgen.pipeline.transcription import audio
from fastgen.pipeline.transcription.subtitles import Segment
from fastgen.pipeline.transformers import prepare, tokenizing
from fastgen.pipeline.transformers.load import load_speech_model
from fastgen.pipeline.transformers.settings import ModelSettings
from fastgen.serving.base_engine import STOPPED
from fastgen.serving.generation_request import Failed, Full, Stopped
from fastgen.serving.limits import Limits
from fastgen.serving.service import BaseService, Refusal
from fastgen.serving.speech_engine import LATE, SpeechEngine, SpeechRequest

TRANSCRIBE, TRANSLATE = "transcribe", "translate"
_LONGEST = 2 * 3600.0  # seconds of sound, which a small file may have many of
_ENGLISH = ("en", "english")


@dataclass(frozen=True)
class Asked:
    """What a request asks for, beside the sound."""

    task: str  # TRANSCRIBE, or TRANSLATE into English
    language: str | None = None  # that is spoken: a code or a name; by default found out
    prompt: str = ""  # what comes before, as text
    temperature: float = 0.0  # above it, tokens are drawn
    beams: int | None = None
    seed: int | None = None  # of drawing
    seconds: float | None = None  # for the answer
    segments: bool = True  # with times
    words: bool = False  # with times
    names_language: bool = False  # in the result


@dataclass(frozen=True)
class Transcript:
    """What is said in a recording."""

    text: str
    seconds: float  # of the recording
    segments: list[Segment]
    words: list[Segment]
    language: str | None  # the name


class SpeechService(BaseService):
    """Loads a Whisper once; `transcribe` answers requests, on an event loop."""

    engine: SpeechEngine

    def __init__(self, settings: ModelSettings, limits: Limits, most_queued: int) -> None:
        """`settings`: their field `generation` has the defaults of requests.

        Raises:
            InputError: the model, or a setting, can't be used for speech.
        """
        super().__init__(settings.model, limits)
        check_settings(settings)
        known = prepare.prepared(settings)
        model, extractor = load_speech_model(settings.model, settings.dtype, known.device)
        if getattr(model.generation_config, "no_timestamps_token_id", None) is None:
            raise InputError(
                f"The generation_config.json of {settings.model!r} has no no_timestamps_token_id, which times need: "
                "take that of the published Whisper."
            )
        from transformers import pipeline

        self._given = known.given
        self._model, self._prompts = model, tokenizing.load_tokenizer(known.spec)  # the pipeline's may be at work
        self._pipeline = pipeline(
            "automatic-speech-recognition",
            model=model,
            tokenizer=known.tokenizer,
            feature_extractor=extractor,
            device=known.device,
        )
        self.engine = SpeechEngine(
            self._pipeline, most_together=max(1, limits.rows // limits.beams), most_queued=most_queued
        )

    async def transcribe(self, data: bytes, asked: Asked) -> Transcript:
        """Write down what is said in a file with these bytes; raises Refusal if there is no answer."""
        options = self._options(asked)
        with _refusing():
            self.engine.check_room()  # before minutes of sound are read for nothing
        sound = await asyncio.to_thread(_sound, data)
        work = functools.partial(_transcript, self._pipeline, sound.samples, asked, options)
        size = len(data) + (0 if isinstance(sound.samples, np.memmap) else sound.samples.nbytes)
        return await self._result(work, asked, size)

    async def _result(self, work: Any, asked: Asked, size: int) -> Transcript:
        """What `work` returns; `size`: bytes of memory that are held until then."""
        seconds = asked.seconds or self.limits.seconds
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()

        def end(result: Any) -> None:
            if not future.done():  # it is cancelled when the client leaves
                future.set_result(result)

        def tell(result: Any) -> None:
            loop.call_soon_threadsafe(end, result)

        request = SpeechRequest(work, tell, time.monotonic() + seconds, size, sets_attention=asked.words)
        with _refusing():
            self.engine.submit(request)
        try:
            found = await asyncio.wait_for(future, seconds + 1.0)
        except asyncio.TimeoutError:
            found = Failed(504, LATE)
        finally:
            self.engine.cancel(request)  # if it is not over
        if isinstance(found, Failed):
            raise Refusal(found.status, found.message)
        transcript: Transcript = found
        return transcript

    def _options(self, asked: Asked) -> dict[str, Any]:
        """The options of `generate`; Refusal for what the model can't do."""
        options = dict(self._given)
        if self._is_multilingual:
            options["task"] = asked.task
            if asked.language is not None:
                options["language"] = self._language(asked.language)
        elif asked.task == TRANSLATE:
            raise Refusal(422, "The model knows English alone, and translates nothing.", code="not_multilingual")
        elif asked.language is not None and asked.language.lower() not in _ENGLISH:
            raise Refusal(422, "language should be en: the model knows English alone.", "language")
        if asked.beams is not None:
            options["num_beams"] = asked.beams
        if asked.temperature > 0:
            if asked.beams is not None and asked.beams > 1:
                what = "num_beams is for a temperature of 0: Whisper draws without beams."
                raise Refusal(422, what, "num_beams")
            options["temperature"] = asked.temperature
        if asked.prompt.strip():
            options["prompt_ids"] = self._prompt(asked.prompt)
        return options

    @property
    def _is_multilingual(self) -> bool:
        config = self._model.generation_config
        return bool(getattr(config, "is_multilingual", hasattr(config, "lang_to_id")))

    def _language(self, given: str) -> str:
        """The code of a language that is given by the code or the name."""
        from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

        code = TO_LANGUAGE_CODE.get(given.lower(), given.lower())
        if f"<|{code}|>" not in self._model.generation_config.lang_to_id:
            what = "language should be a code or a name of one that the model knows, such as en or english."
            raise Refusal(422, what, "language")
        return code

    def _prompt(self, text: str) -> Any:
        """The tokens of a prompt, int64 `[length]`: as many of the last ones as Whisper reads."""
        try:
            tokens = self._prompts.get_prompt_ids(text, return_tensors="pt")
        except ValueError as error:
            raise Refusal(422, f"prompt can't be used: {first_line(error)}.", "prompt") from None
        most = self._model.config.max_target_positions // 2 - 1
        return torch.cat([tokens[:1], tokens[1:][-most:]]).to(self._model.device)


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    """Turn the engine's refusal into a Refusal."""
    try:
        yield
    except Full:
        raise Refusal(429, "The queue is full: send the request again later.") from None
    except Stopped:
        raise Refusal(503, STOPPED) from None


def check_settings(settings: ModelSettings) -> None:
    """Raise InputError for settings that are of texts alone, and for packages that are missing."""
    of_texts = {
        "--task-prefix": settings.task_prefix,
        "--source-lang": settings.source_lang,
        "--target-lang": settings.target_lang,
    }
    if name := next((name for name, value in of_texts.items() if value), None):
        raise InputError(f"{name} is for models that take texts, and {settings.model!r} is a Whisper.")
    with needing("python-multipart", "serve"):
        import python_multipart  # noqa: F401
    with needing("PyAV", "transcribe"):
        import av  # noqa: F401


def _sound(data: bytes) -> audio.Audio:
    """The sound in a file; Refusal if there is none, or not all of it."""
    try:
        found = audio.read(io.BytesIO(data), "file", _LONGEST)
    except UnwritableError:
        raise Refusal(503, "The service's disk is full: send the request again later.") from None
    except InputError as error:
        raise Refusal(422, str(error), "file") from None
    if found.fault:
        raise Refusal(422, f"{found.fault}.", "file")
    return found


def _transcript(pipeline: Any, samples: Any, asked: Asked, options: dict[str, Any]) -> Transcript:
    """What is said, by the pipeline; in the engine's thread."""
    seconds, seed = len(samples) / audio.RATE, secrets.randbits(31) if asked.seed is None else asked.seed
    language = options.get("language", "en" if "task" not in options else None)
    if asked.names_language and language is None:
        language = _own_language(pipeline.model)
        if language is None:
            language = options["language"] = _detected(pipeline, samples)

    def result(times: bool | str) -> dict[str, Any]:
        torch.manual_seed(seed)  # each time, or the words would not be those of the segments
        found: dict[str, Any] = pipeline(samples, return_timestamps=times, generate_kwargs=dict(options))
        return found

    words = result("word") if asked.words else {}
    whole = result(True) if asked.segments or not words else words
    return Transcript(
        whole["text"],
        seconds,
        _segments(whole, seconds) if asked.segments else [],
        _segments(words, seconds),
        None if language is None else _name(language),
    )


def _segments(found: dict[str, Any], seconds: float) -> list[Segment]:
    """The pieces that have times; where a time is missing, the piece begins with the last one's end, or ends last."""
    pieces: list[Segment] = []
    for one in found.get("chunks", ()):
        start, end = one["timestamp"]
        start = (pieces[-1].end if pieces else 0.0) if start is None else float(start)
        pieces.append(Segment(start, max(start, seconds) if end is None else float(end), one["text"]))
    return pieces


def _own_language(model: Any) -> str | None:
    """The language that the checkpoint's generation config says, which the host then does not find out."""
    found = getattr(model.generation_config, "language", None)
    if isinstance(found, (list, tuple)):  # one for each recording of a call, which has one here
        found = found[0] if found else ""
    language: str | None = found
    return language


def _detected(pipeline: Any, samples: Any) -> str:
    """The code of the language, which the host finds out by the same spectrogram when it isn't told."""
    model = pipeline.model
    (inputs,) = pipeline.preprocess(samples)
    strides = [conv.stride[0] for conv in (model.model.encoder.conv1, model.model.encoder.conv2)]
    frames = strides[0] * strides[1] * model.config.max_source_positions
    (found,) = model.detect_language(inputs["input_features"].to(model.device), num_segment_frames=frames).tolist()
    by_token = {token: name for name, token in model.generation_config.lang_to_id.items()}
    return by_token[found].strip("<|>")


def _name(language: str) -> str:
    """The name of a language that is given by the code, the name or the token, as the host takes it."""
    from transformers.models.whisper.tokenization_whisper import LANGUAGES, TO_LANGUAGE_CODE

    found = language.lower().strip("<|>")
    return LANGUAGES.get(TO_LANGUAGE_CODE.get(found, found), found)
