"""Several recordings at a time through a pipeline of transformers: each is what the pipeline returns by stock."""

from __future__ import annotations

import functools
import gc
import itertools
import os
import sys
import threading
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import real_speech
import speech_kit
import torch
from near import near
from transformers import LogitsProcessor, LogitsProcessorList

import fastgen
from fastgen import report
from fastgen.optimizer.transformers import versions
from fastgen.optimizer.transformers.generate import joint_batch
from fastgen.optimizer.transformers.generate.batch_decoder import BatchDecoder

pytestmark = [
    pytest.mark.usefixtures("own_threads"),
    pytest.mark.skipif(not versions.PREFILLS, reason="the tiny pipeline is made as newer versions make it"),
]
SHORT, LONG = (1.0, 1.9, 0.4, 1.5), (5.5, 1.0, 4.2, 7.0)  # seconds
BEAMS = dict(num_beams=3)
# Lengths of the sounds, options of the pipeline's call, the chunks that it decodes at a time.
CASES: dict[str, tuple[tuple[float, ...], dict[str, Any], int]] = {
    "greedy": (SHORT, dict(generate_kwargs=dict(num_beams=1, max_new_tokens=20)), 1),
    "three beams": (SHORT, dict(generate_kwargs=dict(BEAMS, max_new_tokens=20)), 1),
    "the pipeline's own options": (SHORT, dict(generate_kwargs=dict(max_new_tokens=20)), 1),
    "a language and a task": (SHORT, dict(generate_kwargs=dict(BEAMS, language="de", task="translate")), 1),
    "times, greedy": (SHORT, dict(return_timestamps=True, generate_kwargs=dict(num_beams=1)), 1),
    "times": (SHORT, dict(return_timestamps=True, generate_kwargs=BEAMS), 1),
    "words": (SHORT, dict(return_timestamps="word", generate_kwargs=dict(num_beams=1, max_new_tokens=20)), 1),
    "a language of each": (SHORT, dict(return_timestamps=True, return_language=True, generate_kwargs=BEAMS), 1),
    "chunks, greedy": (LONG, dict(chunk_length_s=2, generate_kwargs=dict(num_beams=1, max_new_tokens=20)), 2),
    "chunks": (LONG, dict(chunk_length_s=2, generate_kwargs=dict(BEAMS, max_new_tokens=20)), 3),
    "chunks with times": (LONG, dict(chunk_length_s=2, return_timestamps=True, generate_kwargs=BEAMS), 2),
    "long form, greedy": (LONG, dict(return_timestamps=True, generate_kwargs=dict(num_beams=1)), 1),
    "long form": (LONG, dict(return_timestamps=True, generate_kwargs=BEAMS), 1),
    "long form, words": (LONG, dict(return_timestamps="word", generate_kwargs=dict(num_beams=1)), 1),
    "what was said before": (
        LONG,
        dict(return_timestamps=True, generate_kwargs=dict(BEAMS, condition_on_prev_tokens=True, max_new_tokens=20)),
        1,
    ),
    "scores": (
        LONG,
        dict(
            return_timestamps=True,
            generate_kwargs=dict(num_beams=1, temperature=(0.0,), logprob_threshold=-20.0, max_new_tokens=20),
        ),
        1,
    ),
}
FALLBACK = dict(temperature=(0.0, 0.4, 0.8), logprob_threshold=-0.1, no_speech_threshold=0.9, max_new_tokens=20)
TIMES = dict(return_timestamps=True)


@pytest.fixture(scope="module")
def pipeline() -> Any:
    return speech_kit.tiny(3)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many calls of `generate` each step was for."""
    seen: list[int] = []
    real = BatchDecoder.step_all
    monkeypatch.setattr(BatchDecoder, "step_all", lambda self: (seen.append(len(self.calls)), real(self))[1])
    return seen


def sounds(seconds: tuple[float, ...]) -> list[Any]:
    return [speech_kit.sound(each, seed) for seed, each in enumerate(seconds)]


def alone(pipeline: Any, recordings: list[Any], **options: Any) -> list[Any]:
    found = []
    with fastgen.disabled():
        for recording in recordings:
            torch.manual_seed(11)
            pipeline.model.set_attn_implementation("sdpa")  # the host leaves it eager, for times of words
            found.append(pipeline(recording, **options))
    pipeline.model.set_attn_implementation("sdpa")
    return found


def together(pipeline: Any, recordings: list[Any], **options: Any) -> list[Any]:
    torch.manual_seed(11)
    found = fastgen.transcribe(pipeline, recordings, **options)
    pipeline.model.set_attn_implementation("sdpa")
    return found


plain = functools.partial(near, abs=0.021)  # times may differ by a frame


@pytest.mark.parametrize(("seconds", "options", "chunks"), CASES.values(), ids=CASES)
def test_as_if_it_were_alone(
    seconds: tuple[float, ...], options: dict[str, Any], chunks: int, pipeline: Any, steps: list[int], monkeypatch: Any
) -> None:
    monkeypatch.setattr(pipeline, "_batch_size", chunks)
    recordings = sounds(seconds)
    expected = alone(pipeline, recordings, **options)
    report.reset()
    with fastgen.configured(strict=True):
        found = together(pipeline, recordings, batch_size=3, **options)
    assert plain(expected) == found
    assert len({one["text"] for one in found}) > 1, "recordings say different things"
    assert max(steps) == 3 and sum(steps) / len(steps) > 1.5
    assert {call.tier for call in report.calls()} == {"fast"}
    assert sum(call.batch for call in report.calls()) >= len(recordings)


@pytest.mark.parametrize("beams", [1, 3])
def test_chunks_after_what_was_said_before(beams: int, steps: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts before are padded on the left: the host tells the positions of each row."""
    pipeline, recordings = speech_kit.tiny(0), sounds(LONG)
    monkeypatch.setattr(pipeline, "_batch_size", 2)
    of_generate = dict(num_beams=beams, condition_on_prev_tokens=True, max_new_tokens=20)
    options = dict(chunk_length_s=1, generate_kwargs=of_generate)
    expected = alone(pipeline, recordings, **options)
    assert plain(expected) == together(pipeline, recordings, batch_size=3, **options) and max(steps) == 3


def test_words_with_beams(pipeline: Any, steps: list[int]) -> None:
    """The host reads other beams' attentions: ours are those of one recording after the other."""
    options = dict(return_timestamps="word", generate_kwargs=dict(BEAMS, max_new_tokens=20))
    expected = []
    for recording in sounds(SHORT):
        expected.append(pipeline(recording, **options))
    found = together(pipeline, sounds(SHORT), **options)
    assert plain(expected) == found and any(one["chunks"] for one in found) and max(steps) > 1
    assert [one["text"] for one in alone(pipeline, sounds(SHORT), **options)] == [one["text"] for one in found]


def test_temperatures(pipeline: Any, steps: list[int]) -> None:
    """No result is good enough: first beams, in a batch, then samples, each as if drawn first."""
    options = dict(TIMES, generate_kwargs=dict(BEAMS, **FALLBACK))
    expected = alone(pipeline, sounds(LONG), **options)
    report.reset()
    found = together(pipeline, sounds(LONG), batch_size=3, **options)
    assert plain(expected) == found and max(steps) == 3
    assert {"fast", "compat"} <= {call.tier for call in report.calls()}


def test_a_wrong_step_is_seen(pipeline: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits that go to another recording change what is found."""
    real = BatchDecoder.step

    def swapped(self: Any, inputs: Any) -> Any:
        outputs = real(self, inputs)
        outputs.logits = outputs.logits.roll(self.beams, 0)
        return outputs

    monkeypatch.setattr(BatchDecoder, "step", swapped)
    options = dict(TIMES, generate_kwargs=BEAMS)
    assert plain(alone(pipeline, sounds(SHORT), **options)) != together(pipeline, sounds(SHORT), **options)


def test_whatever_a_pipeline_takes(pipeline: Any, tmp_path: Path, monkeypatch: Any) -> None:
    samples, options = speech_kit.sound(1.5, 0), dict(generate_kwargs=dict(num_beams=1, max_new_tokens=20))
    (expected,) = alone(pipeline, [samples], **options)
    given = {"raw": samples, "sampling_rate": 16_000}
    assert together(pipeline, [samples, given, torch.from_numpy(samples)], **options) == [expected] * 3
    assert set(given) == {"raw", "sampling_rate"}
    path = tmp_path / "a.wav"
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, 16_000, 0, "NONE", ""))
        file.writeframes((samples * 32767).astype("<i2").tobytes())
    monkeypatch.setattr("transformers.pipelines.automatic_speech_recognition.ffmpeg_read", lambda *_: samples)
    assert together(pipeline, [path, os.fspath(path)], **options) == [expected] * 2
    if sys.platform != "win32":  # where pipes have no names in folders
        os.mkfifo(tmp_path / "pipe")
        writer = threading.Thread(target=(tmp_path / "pipe").write_bytes, args=(path.read_bytes(),))
        writer.start()
        assert together(pipeline, [tmp_path / "pipe"], **options) == [expected]
        writer.join()
    assert fastgen.transcribe(pipeline, []) == []
    for wrong, said in (([tmp_path / "none.wav"], "none.wav, is no file"), (samples, "give a list"), (given, "a list")):
        with pytest.raises(ValueError, match=said):
            fastgen.transcribe(pipeline, wrong, **options)
    for name in ("batched", "vad_filter"):
        with pytest.raises(ValueError, match=f"{name} is for models of the package whisper"):
            fastgen.transcribe(pipeline, [samples], **{name: True})
    with pytest.raises(ValueError, match="WhisperForConditionalGeneration takes no sound"):
        fastgen.transcribe(pipeline.model, [samples])
    with pytest.raises(ValueError, match="batch_size=0 is not 1 or more"):
        fastgen.transcribe(pipeline, [samples], batch_size=0)


def test_one_after_the_other(pipeline: Any, steps: list[int]) -> None:
    """Without fastgen, and where a pipeline might keep state in itself."""
    options = dict(TIMES, generate_kwargs=BEAMS)
    recordings = sounds(SHORT)
    expected = alone(pipeline, recordings, **options)
    with fastgen.disabled():
        assert fastgen.transcribe(pipeline, recordings, **options) == expected
    with fastgen.configured(tier="stock"):
        assert fastgen.transcribe(pipeline, recordings, **options) == expected
    own = type("Own", (type(pipeline),), {})
    given = dict(model=pipeline.model, tokenizer=pipeline.tokenizer, feature_extractor=pipeline.feature_extractor)
    assert plain(fastgen.transcribe(own(**given, device="cpu"), recordings, **options)) == expected
    assert not steps
    with fastgen.configured(tier="compat"):  # in turn, each search in a batch of its own
        assert plain(expected) == together(pipeline, recordings, **options)
    assert not steps


class Biased(LogitsProcessor):
    """The user's own: it looks at each step."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        self.rows.append(len(scores))
        return scores + 0.1 * torch.arange(scores.shape[1]).remainder(7)


def test_what_does_not_share_a_batch(pipeline: Any, steps: list[int]) -> None:
    """Code of the user's sees the rows of one recording; hooks and samples run alone, too."""
    seen = Biased()
    options: dict[str, Any] = dict(generate_kwargs=dict(BEAMS, max_new_tokens=10))
    options["generate_kwargs"]["logits_processor"] = LogitsProcessorList([seen])
    expected = alone(pipeline, sounds(SHORT), **options)
    assert plain(expected) == together(pipeline, sounds(SHORT), **options) and set(seen.rows) == {3}
    sampled: dict[str, Any] = dict(generate_kwargs=dict(temperature=0.7, max_new_tokens=10))
    expected = alone(pipeline, sounds(SHORT), **sampled)
    assert plain(expected) == together(pipeline, sounds(SHORT), **sampled)
    rows: list[int] = []
    hook = pipeline.model.model.decoder.layers[0].register_forward_hook(lambda *args: rows.append(len(args[1][0])))
    hooked: dict[str, Any] = dict(generate_kwargs=dict(BEAMS, max_new_tokens=10))
    try:
        expected = alone(pipeline, sounds(SHORT), **hooked)
        assert plain(expected) == together(pipeline, sounds(SHORT), **hooked)
    finally:
        hook.remove()
    assert not steps and max(rows) <= 3


def test_an_assistant_drafts(pipeline: Any, steps: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's search with an assistant computes with all threads, as if it were alone."""
    options = dict(generate_kwargs=dict(assistant_model=speech_kit.tiny(5).model, num_beams=1, max_new_tokens=20))
    expected = alone(pipeline, sounds(SHORT), **options)
    threads: set[Any] = set()
    forward = type(pipeline.model).forward

    @functools.wraps(forward)
    def noting(self: Any, *args: Any, **kwargs: Any) -> Any:
        threads.add(threading.current_thread())
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(type(pipeline.model), "forward", noting)
    assert plain(expected) == together(pipeline, sounds(SHORT), **options)
    assert threads == {threading.current_thread()} and not steps


def test_verified(pipeline: Any, steps: list[int]) -> None:
    """The host searches again, each call by itself."""
    from fastgen.optimizer import verification

    verification.reset()
    options = dict(TIMES, generate_kwargs=BEAMS)
    with fastgen.configured(verify=1):
        found = together(pipeline, sounds(SHORT), **options)
    assert plain(alone(pipeline, sounds(SHORT), **options)) == found and max(steps) > 1
    assert set(verification.counts()) <= {"same", "near-ties"} and sum(verification.counts().values()) >= 4


def _seams(pipeline: Any) -> list[Any]:
    kind, mixin = type(pipeline.feature_extractor), type(pipeline.model)
    return [
        kind._torch_extract_fbank_features,
        kind._np_extract_fbank_features,
        mixin.detect_language,
        mixin._extract_token_timestamps,
        mixin.__call__,
        mixin.generate,
    ]


@pytest.mark.parametrize("error", [LookupError("of yours"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_an_error_leaves_nothing_behind(pipeline: Any, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    """Raised in the middle of another recording's search."""
    before, count, threads = _seams(pipeline), threading.active_count(), torch.get_num_threads()
    real, number = BatchDecoder.step_all, itertools.count()

    def failing(self: Any) -> None:
        if next(number) == 5:
            raise error
        real(self)

    options = dict(TIMES, generate_kwargs=BEAMS)
    with monkeypatch.context() as patched:
        patched.setattr(BatchDecoder, "step_all", failing)
        with pytest.raises(type(error)):
            fastgen.transcribe(pipeline, sounds(LONG), batch_size=3, **options)
    assert all(one is other for one, other in zip(before, _seams(pipeline), strict=True))
    assert threading.active_count() == count and torch.get_num_threads() == threads
    assert plain(alone(pipeline, sounds(SHORT), **options)) == together(pipeline, sounds(SHORT), **options)


def test_a_recording_that_fails_ends_alone(pipeline: Any) -> None:
    """The others go on: what is raised is the first failure's, of the pipeline's own words."""
    from fastgen.pipeline.transcription import pipelines
    from fastgen.pipeline.transcription.calls import Call, run_all

    options = dict(TIMES, generate_kwargs=BEAMS)
    recordings: list[Any] = sounds(LONG)
    expected = alone(pipeline, recordings, **options)
    recordings[1] = {"samples": recordings[1]}
    found: dict[int, Any] = {}

    def call(number: int) -> Call:
        def run() -> Any:
            return pipelines._transcribed(pipeline, recordings[number], options)

        return Call(run, lambda result, error: found.update({number: error or result}))

    with pipelines.sharing_steps(pipeline, 3) as (size, answer):
        run_all([call(number) for number in range(4)], size, answer, pipeline.model.device)
    assert isinstance(found.pop(1), ValueError)
    assert plain([expected[0], *expected[2:]]) == [found[0], found[2], found[3]]
    with pytest.raises(ValueError, match="the dict needs to contain"):
        fastgen.transcribe(pipeline, recordings, **options)


def test_what_does_not_fit_is_done_alone(pipeline: Any, monkeypatch: pytest.MonkeyPatch, steps: list[int]) -> None:
    real = BatchDecoder.step_all

    def small(self: Any) -> None:
        if len(self.calls) > 1:
            raise MemoryError("full")
        real(self)

    options = dict(TIMES, generate_kwargs=BEAMS)
    expected = alone(pipeline, sounds(LONG), **options)
    monkeypatch.setattr(BatchDecoder, "step_all", small)
    assert plain(expected) == together(pipeline, sounds(LONG), batch_size=3, **options)


def test_no_room_for_what_a_search_needs(pipeline: Any, monkeypatch: pytest.MonkeyPatch, steps: list[int]) -> None:
    """Memory runs out when a recording joins: nothing is left of the batch, and all of them are tried alone."""
    options = dict(TIMES, generate_kwargs=BEAMS)
    expected = alone(pipeline, sounds(LONG), **options)
    real, number = joint_batch._Decoder, itertools.count()
    kept: list[int] = []

    def full(*args: Any) -> Any:
        if next(number) == 2:
            raise MemoryError("full")
        return real(*args)

    class Kept(joint_batch.JointBatches):
        def close(self) -> None:
            super().close()
            kept.append(len(self._live) + len(self._batches))

    monkeypatch.setattr(joint_batch, "_Decoder", full)
    monkeypatch.setattr(joint_batch, "JointBatches", Kept)
    assert plain(expected) == together(pipeline, sounds(LONG), batch_size=3, **options)
    assert next(number) > 2 and kept and not any(kept)


def test_batches_in_which_nobody_is_are_let_go(pipeline: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Searches with other numbers of beams have batches of their own, whose places take memory."""
    from fastgen.pipeline.transcription import pipelines
    from fastgen.pipeline.transcription.calls import Call, run_all

    batches: list[int] = []

    class Watched(joint_batch.JointBatches):
        def answer(self, needs: Any) -> Any:
            found = super().answer(needs)
            batches.append(len(self._batches))
            return found

    monkeypatch.setattr(joint_batch, "JointBatches", Watched)
    recordings, found = sounds(LONG), dict[int, Any]()
    options = [dict(TIMES, generate_kwargs=dict(num_beams=1 + number)) for number in range(len(recordings))]
    expected = [alone(pipeline, [recording], **each)[0] for recording, each in zip(recordings, options, strict=True)]

    def call(number: int) -> Call:
        run = functools.partial(pipelines._transcribed, pipeline, recordings[number], options[number])
        return Call(run, lambda result, error: found.update({number: error or result}))

    with pipelines.sharing_steps(pipeline, 2) as (size, answer):
        run_all([call(number) for number in range(len(recordings))], size, answer, pipeline.model.device)
    assert plain(expected) == [found[number] for number in range(len(recordings))]
    assert max(batches) == 2


def test_as_many_as_are_asked_for(pipeline: Any, steps: list[int]) -> None:
    options = dict(TIMES, generate_kwargs=BEAMS)
    recordings = sounds(SHORT * 3)
    expected = alone(pipeline, recordings, **options)
    assert plain(expected) == together(pipeline, recordings, batch_size=12, **options) and max(steps) == 12
    steps.clear()
    assert plain(expected) == together(pipeline, recordings, batch_size=10, **options) and max(steps) == 10


def test_two_threads(pipeline: Any) -> None:
    options = dict(TIMES, generate_kwargs=BEAMS)
    before, found = _seams(pipeline), dict[str, Any]()
    own = {name: speech_kit.tiny(3) for name in "ab"}

    def work(name: str, some: list[Any]) -> None:
        found[name] = fastgen.transcribe(own[name], some, **options)

    recordings = sounds(LONG)
    threads = [threading.Thread(target=work, args=each) for each in (("a", recordings[:1]), ("b", recordings[1:]))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(one is other for one, other in zip(before, _seams(pipeline), strict=True))
    assert plain(alone(pipeline, recordings, **options)) == [*found["a"], *found["b"]]


def test_progress(pipeline: Any, capsys: pytest.CaptureFixture[str]) -> None:
    fastgen.transcribe(pipeline, sounds((1.0, 2.0)), progress=True, generate_kwargs=dict(max_new_tokens=4))
    assert "0:03, " in capsys.readouterr().err


def test_memory_is_freed(pipeline: Any, steps: list[int]) -> None:
    """No recording, and no batch, outlives the call."""

    def live() -> int:
        return sum(isinstance(each, BatchDecoder) for each in gc.get_objects())

    gc.collect()
    before = live()
    together(pipeline, sounds(SHORT), generate_kwargs=dict(BEAMS, max_new_tokens=6))
    gc.collect()
    assert live() == before and steps


@pytest.mark.slow
def test_real_speech(steps: list[int], shared: Path) -> None:
    """Whisper-base, on a recording of eleven seconds and parts of it, and a long one made of them."""
    from fastgen.bench.speech import pipeline as made

    real, speech = made(real_speech.whisper_base(shared)), real_speech.clip(shared)
    for recordings, options in (
        ([speech, speech[:80_000], speech[60_000:]], dict(generate_kwargs=dict(num_beams=5, language="en"))),
        ([speech, speech[:80_000]], dict(return_timestamps="word", generate_kwargs=dict(num_beams=1, language="en"))),
        ([np.tile(speech, 4), speech], dict(return_timestamps=True, generate_kwargs=dict(num_beams=3, language="en"))),
    ):
        assert plain(alone(real, recordings, **options)) == together(real, recordings, **options)
    assert max(steps) == 3
