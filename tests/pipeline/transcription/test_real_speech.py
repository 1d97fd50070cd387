"""Whisper-base hears real speech, on both hosts: text, tokens and times are the host's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import real_speech
import torch
import whisper

import fastgen
from fastgen import report
from fastgen.optimizer.transformers import versions
from fastgen.pipeline.transcription import audio, load

pytestmark = [pytest.mark.usefixtures("own_threads"), pytest.mark.slow]
SAID = "Charles Dickens, A Tale of Two Cities."
# What whisper.transcribe is asked for.
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy, and the language is found out": dict(language=None),
    "five beams": dict(beam_size=5),
    "patience": dict(beam_size=5, patience=2.0),
    # No result is good enough: beams first, then samples.
    "temperatures": dict(beam_size=3, best_of=2, temperature=(0.0, 0.6), logprob_threshold=0.0),
    "a prompt": dict(beam_size=3, initial_prompt=SAID, carry_initial_prompt=True),
    "clips": dict(beam_size=3, clip_timestamps=[1.0, 4.5, 6.0, 11.0], condition_on_previous_text=False),
    "translation": dict(beam_size=5, task="translate", language="de"),
    "words": dict(beam_size=5, word_timestamps=True),
}
# What a pipeline is asked for; of `generate`.
PIPELINE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "greedy": (dict(return_timestamps=True), dict(num_beams=1)),
    "five beams": (dict(return_timestamps=True), dict(num_beams=5)),
    "temperatures": (
        dict(return_timestamps=True),
        dict(num_beams=3, temperature=(0.0, 0.6), logprob_threshold=-0.01, no_speech_threshold=0.9),
    ),
    "a prompt": (dict(return_timestamps=True), dict(num_beams=3, prompt_ids=SAID)),
    "translation": (dict(return_timestamps=True), dict(num_beams=5, task="translate", language="de")),
    "words": (dict(return_timestamps="word"), dict(num_beams=1)),
    "chunks": (dict(chunk_length_s=10), dict(num_beams=5)),
}


@pytest.fixture(scope="module")
def folder(shared: Path) -> Path:
    return real_speech.whisper_base(shared)


@pytest.fixture(scope="module")
def recordings(shared: Path) -> list[Any]:
    """Eleven seconds, and a passage of two windows."""
    passage = shared / "data/audio/two_cities.wav"
    if not passage.exists():
        pytest.skip(f"needs {passage}")
    return [real_speech.clip(shared), audio.read(passage).samples[: 32 * audio.RATE]]


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return load.of_transformers(str(folder))


@pytest.fixture(scope="module")
def pipeline(folder: Path) -> Any:
    from fastgen.bench.speech import pipeline

    return pipeline(folder)


def plain(result: Any, within: float = 1e-4) -> Any:
    """A result whose log-probabilities may be rounded otherwise, and whose words may begin a frame later."""
    if isinstance(result, dict):
        times = ("start", "end", "timestamp")
        return {name: plain(value, 0.021 if name in times else within) for name, value in result.items()}
    if isinstance(result, (list, tuple)):
        return type(result)(plain(value, within) for value in result)
    return pytest.approx(result, rel=1e-4, abs=within) if isinstance(result, float) else result


def assert_same_segments(expected: list[Any], found: list[Any]) -> None:
    for one, other in zip(expected, found, strict=True):
        assert plain(one) == other
        for name in ("tokens", "seek", "start", "end", "temperature"):
            assert [segment[name] for segment in one["segments"]] == [segment[name] for segment in other["segments"]]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_by_whisper(options: dict[str, Any], model: Any, recordings: list[Any]) -> None:
    """Each alone, and both at a time."""
    options = {"language": "en", "fp16": False, "temperature": 0.0, **options}

    def alone() -> list[Any]:
        found = []
        for recording in recordings:
            torch.manual_seed(11)
            found.append(whisper.transcribe(model, recording, **options))
        return found

    with fastgen.disabled():
        expected = alone()
    assert sum(len(result["segments"]) for result in expected) >= 2
    if "logprob_threshold" in options:
        assert {segment["temperature"] for result in expected for segment in result["segments"]} == {0.6}
    with fastgen.configured(strict=True):
        assert_same_segments(expected, alone())
        assert {call.tier for call in report.calls()} == {"compat"}
        torch.manual_seed(11)
        assert_same_segments(expected, fastgen.transcribe(model, recordings, **options))


@pytest.mark.skipif(not versions.PREFILLS, reason="the pipeline is made as newer versions make it")
@pytest.mark.parametrize(("options", "of_generate"), PIPELINE.values(), ids=PIPELINE)
def test_by_transformers(
    options: dict[str, Any], of_generate: dict[str, Any], pipeline: Any, recordings: list[Any]
) -> None:
    of_generate = {"language": "en", "task": "transcribe", **of_generate}
    if "prompt_ids" in of_generate:
        of_generate["prompt_ids"] = pipeline.tokenizer.get_prompt_ids(SAID, return_tensors="pt")
    options = {**options, "generate_kwargs": of_generate}

    def alone() -> list[Any]:
        found = []
        for recording in recordings:
            torch.manual_seed(11)
            pipeline.model.set_attn_implementation("sdpa")  # the host leaves it eager, for times of words
            found.append(pipeline(recording, **options))
        pipeline.model.set_attn_implementation("sdpa")
        return found

    with fastgen.disabled():
        expected = alone()
    assert all(len(result["text"]) > 50 for result in expected)
    with fastgen.configured(strict=True):
        assert plain(expected) == alone()
        assert {call.tier for call in report.calls()} <= {"fast", "compat"} and report.calls()
        torch.manual_seed(11)
        assert plain(expected) == fastgen.transcribe(pipeline, recordings, **options)
    pipeline.model.set_attn_implementation("sdpa")
