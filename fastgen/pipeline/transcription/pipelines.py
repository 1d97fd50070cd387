"""Transcribes several recordings with a speech pipeline of Hugging Face transformers: each by a call of the pipeline.

The pipeline's own code prepares the sound, calls `model.generate` and makes texts; searches of Whisper models share the
steps of one batch. Other pipelines are called for one recording after the other.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fastgen import config
from fastgen.patching import hosts
from fastgen.patching.redirection import redirected
from fastgen.pipeline.transcription.audio import is_there
from fastgen.pipeline.transcription.calls import Call, outside, run_all
from fastgen.pipeline.transcription.progress import AudioProgress

_EXTRACTORS = "_torch_extract_fbank_features", "_np_extract_fbank_features"  # where a spectrogram is computed


def is_pipeline(model: Any) -> bool:
    """Whether `model` is a speech pipeline, of the host's class or one derived from that."""
    module = sys.modules.get("transformers.pipelines.automatic_speech_recognition")
    return isinstance(model, getattr(module, "AutomaticSpeechRecognitionPipeline", ()))


def transcribe(
    pipeline: Any, recordings: Sequence[Any], options: dict[str, Any], *, batch_size: int, progress: bool
) -> list[dict[str, Any]]:
    """See `fastgen.transcribe`."""
    sources = [_checked(source, number) for number, source in enumerate(recordings)]
    found: list[Any] = [None] * len(sources)
    show = AudioProgress(None, enabled=progress)

    def calls() -> Iterator[Call]:
        for number, source in enumerate(sources):

            def ended(result: Any, error: Exception | None, number: int = number, source: Any = source) -> None:
                if error is not None:
                    raise error
                found[number] = result
                show.advance(_seconds(pipeline, source))

            yield Call(functools.partial(_transcribed, pipeline, source, options), ended)

    try:
        with sharing_steps(pipeline, batch_size) as (size, answer):
            run_all(calls(), size, answer, pipeline.model.device)
    finally:
        show.close()
    return found


@contextlib.contextmanager
def sharing_steps(
    pipeline: Any, most: int, check: Callable[[], None] = lambda: None
) -> Iterator[tuple[int, Callable[[dict[int, Any]], Mapping[int, Any]]]]:
    """Inside the block, searches of calls of the pipeline that run in turn share the steps of one batch.

    Yields: how many calls may run at a time, or 0 for one after the other, and what answers them: see `together.run`.

    Args:
        most: the most calls at a time.
        check: called before each search of a call, within the call; what it raises ends the call.
    """
    joint = _joint_batches(most) if most > 1 and _shares_steps(pipeline) else None
    if joint is None:
        yield 0, dict
        return
    from transformers.generation.utils import GenerationMixin
    from transformers.models.whisper.generation_whisper import WhisperGenerationMixin

    from fastgen.optimizer.transformers.generate.joint_calls import joining

    extractor = type(pipeline.feature_extractor)
    places = [(extractor, name) for name in _EXTRACTORS]
    places += [(WhisperGenerationMixin, name) for name in ("detect_language", "_extract_token_timestamps")]
    places.append((GenerationMixin, "_assisted_decoding"))  # a search that no other joins
    seams = {(owner, name): outside for owner, name in places if callable(getattr(owner, name, None))}
    with redirected(seams), contextlib.closing(joint), joining(_Checked(joint, check)):
        yield most, joint.answer


def _shares_steps(pipeline: Any) -> bool:
    """Whether several calls may run in turn: a pipeline of a class of the user's might keep state in itself."""
    module = sys.modules["transformers.pipelines.automatic_speech_recognition"]
    is_hosts = type(pipeline) is module.AutomaticSpeechRecognitionPipeline
    return is_hosts and pipeline.type == "seq2seq_whisper" and hosts.is_on() and config.current().tier != "stock"


def _joint_batches(calls: int) -> Any:
    """`JointBatches` for so many calls; None if fastgen leaves this version of transformers alone."""
    try:
        from transformers.models.whisper.generation_whisper import WhisperGenerationMixin  # noqa: F401

        from fastgen.optimizer.transformers.generate.joint_batch import JointBatches
    except (ImportError, AttributeError):
        return None
    return JointBatches(calls)


class _Checked:
    """A `joint_calls.Joint` that calls `check` before each search."""

    def __init__(self, joint: Any, check: Callable[[], None]) -> None:
        self._joint, self._check = joint, check

    def run(self, request: Any, stock: Callable[..., Any], alone: Callable[..., Any]) -> Any:
        self._check()
        return self._joint.run(request, stock, alone)


def _transcribed(pipeline: Any, source: Any, options: dict[str, Any]) -> Any:
    # The pipeline takes out what it has read of a dictionary.
    return pipeline(dict(source) if isinstance(source, dict) else source, **options)


def _seconds(pipeline: Any, source: Any) -> float:
    """How long a recording is; 0 if only its name, or its bytes, are known."""
    rate = pipeline.feature_extractor.sampling_rate
    if isinstance(source, dict):
        rate, source = source.get("sampling_rate", rate), source.get("raw", source.get("array"))
    return source.shape[-1] / rate if hasattr(source, "shape") else 0.0


def _checked(source: Any, number: int) -> Any:
    """A recording as pipelines take it."""
    if isinstance(source, os.PathLike):
        source = os.fspath(source)
    is_name = isinstance(source, str) and not source.startswith(("http://", "https://"))
    if is_name and not is_there(Path(source)):
        raise ValueError(f"recording {number}, {source}, is no file")
    return source
