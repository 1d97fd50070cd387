"""Several recordings at a time: each as if it were alone, by whisper without fastgen; parts between silences."""

from __future__ import annotations

import functools
import gc
import itertools
import os
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import real_speech
import torch
import whisper
from near import near

import fastgen
from fastgen.optimizer.whisper import inference
from fastgen.pipeline.transcription import audio, load, silences, together

pytestmark = pytest.mark.usefixtures("own_threads")
FAST: dict[str, Any] = {"language": "en", "fp16": False, "temperature": 0.0}
OPTIONS: dict[str, dict[str, Any]] = {
    "five beams": dict(beam_size=5),
    "greedy, and the language is found out": dict(language=None),
    "patience": dict(beam_size=3, patience=2.0, length_penalty=0.5),
    # No result is good enough: beams first, then samples, whose prompts are left out.
    "temperatures": dict(beam_size=2, best_of=3, temperature=(0.0, 0.4, 0.8), logprob_threshold=0.0, sample_len=9),
    "words": dict(beam_size=3, word_timestamps=True, hallucination_silence_threshold=0.5),
    "a prompt": dict(beam_size=3, initial_prompt="Ada and Grace", carry_initial_prompt=True, task="translate"),
    "clips": dict(beam_size=3, clip_timestamps=[0.5, 1.5, 2.0, 3.0], condition_on_previous_text=False),
}


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> Any:
    return load.load(str(checkpoint), "cpu")


@pytest.fixture
def sounds(sound: Any) -> list[Any]:
    """Of several lengths, so that windows, prompts and ends differ."""
    seconds = (3.0, 41.0, 12.0, 33.0)
    return [audio.read(sound(f"{n}.wav", length, seed=n)).samples for n, length in enumerate(seconds)]


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many decodings each step was for."""
    seen: list[int] = []
    real = inference.step_together
    monkeypatch.setattr(inference, "step_together", lambda *args: (seen.append(len(args[0])), real(*args))[1])
    return seen


plain = functools.partial(near, rel=1e-4, abs=1e-4, nan_ok=True)


def alone(model: Any, sounds: list[Any], **options: Any) -> list[Any]:
    found = []
    with fastgen.disabled():
        for sound in sounds:
            torch.manual_seed(11)
            found.append(whisper.transcribe(model, sound, **options))
    return found


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_as_if_it_were_alone(options: dict[str, Any], model: Any, sounds: list[Any], steps: list[int]) -> None:
    options = {**FAST, **options}
    expected = alone(model, sounds, **options)
    torch.manual_seed(11)
    with fastgen.configured(strict=True):
        found = fastgen.transcribe(model, sounds, batch_size=3, **options)
    assert plain(expected) == found
    assert any(result["text"] for result in found)
    assert max(steps) == 3 and len(steps) > 5


def test_a_wrong_step_is_seen(model: Any, sounds: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers that go to another recording change what is found."""
    real = inference.step_together
    monkeypatch.setattr(inference, "step_together", lambda *args: real(*args)[::-1])
    options = {**FAST, "beam_size": 3}
    assert plain(alone(model, sounds, **options)) != fastgen.transcribe(model, sounds, batch_size=2, **options)


def test_files_and_tensors(model: Any, sound: Any, sounds: list[Any], tmp_path: Path) -> None:
    path = sound("0.wav", 3.0, seed=0)
    assert fastgen.transcribe(model, [], **FAST) == []
    first, second, third = fastgen.transcribe(model, [path, str(path), torch.from_numpy(sounds[0])], **FAST)
    assert first["text"] == second["text"] == third["text"]
    text = tmp_path / "text.wav"
    text.write_text("no sound")
    for wrong, said in (
        (sounds[0].astype(np.float64), "recording 1 is float64"),
        (sounds[0][None], "give float32"),
        (tmp_path / "none.wav", "none.wav, is no file"),
        (text, "is no audio that FFmpeg knows"),
    ):
        with pytest.raises(ValueError, match=said):
            fastgen.transcribe(model, [path, wrong], **FAST)
    for one in (path, sounds[0]):
        with pytest.raises(ValueError, match="give a list"):
            fastgen.transcribe(model, one, **FAST)
    with pytest.raises(ValueError, match="batch_size=0 is not 1 or more"):
        fastgen.transcribe(model, [path], batch_size=0)
    with pytest.raises(ValueError, match="str is no model of the package whisper: give whisper"):
        fastgen.transcribe("base", [path])
    with pytest.raises(ValueError, match="patience requires beam_size to be given"):  # whisper's own words
        fastgen.transcribe(model, [path], patience=2.0, **FAST)


@pytest.mark.skipif(sys.platform == "win32", reason="pipes have no names in folders there")
def test_pipes_and_files_that_are_cut_off(model: Any, sound: Any, tmp_path: Path) -> None:
    path, pipe = sound("half.wav", 3.0, seed=0), tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(path.read_bytes(),))
    writer.start()
    assert fastgen.transcribe(model, [pipe], **FAST) == fastgen.transcribe(model, [path], **FAST)
    writer.join()
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.warns(RuntimeWarning, match=r"half.wav is cut off: it says that it has 3.0 seconds of sound") as caught:
        fastgen.transcribe(model, [path], **FAST)
    assert caught[0].filename == __file__


@pytest.mark.parametrize("clips", ["1,2,2.5,9,20,30", [1, 2, 2.5, 9, 20.0, 30.0]], ids=["a text", "a list"])
def test_clips_beyond_the_end(clips: Any, model: Any, sounds: list[Any]) -> None:
    """They end with the sound: whisper itself would never end."""
    (expected,) = alone(model, sounds[:1], **FAST, clip_timestamps=[1.0, 2.0, 2.5, 3.0])
    (found,) = fastgen.transcribe(model, sounds[:1], **FAST, clip_timestamps=clips)
    assert plain(expected) == found
    expected = alone(model, sounds[:1], **FAST)[0]
    for whole in ("", [], "0"):
        assert plain(expected) == fastgen.transcribe(model, sounds[:1], **FAST, clip_timestamps=whole)[0]


def test_off(model: Any, sounds: list[Any]) -> None:
    with fastgen.disabled():
        found = fastgen.transcribe(model, sounds[:2], **FAST)
    assert found == alone(model, sounds[:2], **FAST)


def test_verified(model: Any, sounds: list[Any], steps: list[int]) -> None:
    """Whisper decodes again, each recording by itself."""
    from fastgen.optimizer import verification

    verification._counts.clear()
    with fastgen.configured(verify=1):
        found = fastgen.transcribe(model, sounds[:3], batch_size=2, **FAST, beam_size=2)
    assert max(steps) == 2
    assert plain(alone(model, sounds[:3], **FAST, beam_size=2)) == found
    assert set(verification._counts) <= {"same", "near-ties"} and sum(verification._counts.values()) >= 3


def test_progress(model: Any, sounds: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    fastgen.transcribe(model, sounds[:2], progress=True, **FAST)
    assert "0:44, " in capsys.readouterr().err


@pytest.fixture
def detector(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Where speech is, in seconds, by the length of the sound; and what was asked for."""
    said: dict[str, Any] = {}

    def found(samples: Any, **options: Any) -> list[tuple[float, float]]:
        said["options"] = options
        return said[len(samples) / audio.RATE]

    monkeypatch.setattr(silences, "_found", found)
    return said


def test_silences_are_left_out(model: Any, sounds: list[Any], detector: dict[str, Any]) -> None:
    odd = sounds[2][: 8 * 16_000 + 100]  # whose speech ends with the sound: whisper would never end there
    detector |= {3.0: [(0.5, 1.5)], 41.0: [], 12.0: [(0.0, 2.0), (4.5, 8.0)], len(odd) / 16_000: [(1.0, 8.00625)]}
    found = fastgen.transcribe(model, [*sounds[:3], odd], vad_filter=True, **FAST)
    assert detector["options"]["min_silence_duration_ms"] == 2000
    expected = alone(model, sounds[:1], clip_timestamps=[0.5, 1.5], **FAST)
    expected += alone(model, sounds[2:3], clip_timestamps=[0.0, 2.0, 4.5, 8.0], **FAST)
    expected += alone(model, [odd], clip_timestamps=[1.0, 8.0], **FAST)
    assert plain(expected) == [found[0], found[2], found[3]]
    assert found[1] == {"text": "", "segments": [], "language": "en"}
    for options, said in (
        (
            dict(vad_filter=True, clip_timestamps=[0.0, 1.0]),
            "clip_timestamps can't be given with batched or vad_filter",
        ),
        (dict(vad_filter=True, batched=True), "vad_filter can't be given with it"),
    ):
        with pytest.raises(ValueError, match=said):
            fastgen.transcribe(model, sounds[:1], **options, **FAST)


def test_cut_at_silences(model: Any, sounds: list[Any], detector: dict[str, Any], steps: list[int]) -> None:
    """Each part is what whisper finds in it alone, at a later time."""
    detector |= {3.0: [], 41.0: [(1.0, 9.0), (9.5, 20.0), (22.0, 40.0)], 12.0: [(0.0, 12.0)]}
    options = {**FAST, "beam_size": 2, "word_timestamps": True}
    long, empty, short = fastgen.transcribe(
        model, [sounds[1], sounds[0], sounds[2]], batched=True, batch_size=3, **options
    )
    assert max(steps) == 3
    options["condition_on_previous_text"] = False
    parts = [sounds[1][round(start * 16000) : round(end * 16000)] for start, end in ((1.0, 20.0), (22.0, 40.0))]
    first, second, only = alone(model, [*parts, sounds[2]], **options)
    assert plain(only) == short and empty["text"] == ""
    assert long["text"] == first["text"] + second["text"] and long["language"] == "en"
    assert [one["id"] for one in long["segments"]] == list(range(len(first["segments"]) + len(second["segments"])))
    for ours, theirs, start in (
        *zip(long["segments"], first["segments"], itertools.repeat(1.0)),
        *zip(long["segments"][len(first["segments"]) :], second["segments"], itertools.repeat(22.0)),
    ):
        assert ours["tokens"] == theirs["tokens"]
        assert (ours["start"], ours["end"]) == pytest.approx((theirs["start"] + start, theirs["end"] + start))
        assert ours["seek"] == theirs["seek"] + 100 * start
        times = [(word["start"] + start, word["end"] + start) for word in theirs["words"]]
        assert [(word["start"], word["end"]) for word in ours["words"]] == [pytest.approx(each) for each in times]


@pytest.mark.parametrize("cut", ["batched", "vad_filter"])
def test_the_language(
    cut: str, model: Any, sounds: list[Any], detector: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is found out once, in the 30 seconds from the first speech on: the first may be a word, which says little."""
    detector |= {41.0: [(2.0, 2.5), (13.0, 39.0)], 3.0: []}
    (part,) = alone(model, [sounds[1][2 * 16000 : 32 * 16000]], **{**FAST, "language": None})
    heard: list[Any] = []
    extract = whisper.audio.log_mel_spectrogram
    monkeypatch.setattr(
        whisper.audio, "log_mel_spectrogram", lambda *args, **more: (heard.append(args[0]), extract(*args, **more))[1]
    )
    seen: list[Any] = []
    real = type(model).detect_language
    monkeypatch.setattr(type(model), "detect_language", lambda *args: (seen.append(1), real(*args))[1])
    found, nothing = fastgen.transcribe(model, [sounds[1], sounds[0]], **{cut: True}, **{**FAST, "language": None})
    assert np.array_equal(heard[0], sounds[1][2 * 16000 : 32 * 16000])
    assert found["language"] == part["language"] and len(seen) == 2
    assert nothing == {"text": "", "segments": [], "language": nothing["language"]} and nothing["language"]


def test_what_does_not_fit_is_done_alone(
    model: Any, sounds: list[Any], monkeypatch: pytest.MonkeyPatch, steps: list[int]
) -> None:
    real = inference.step_together

    def small(decoders: Any, last: Any) -> Any:
        if len(decoders) > 1:
            raise MemoryError("full")
        return real(decoders, last)

    monkeypatch.setattr(inference, "step_together", small)
    options = {**FAST, "beam_size": 2}
    assert plain(alone(model, sounds, **options)) == fastgen.transcribe(model, sounds, batch_size=3, **options)


@pytest.mark.parametrize("cut", ["batched", "vad_filter"])
def test_a_language_that_does_not_fit_is_found_out_alone(
    cut: str, model: Any, sounds: list[Any], detector: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where memory runs out before a recording has begun, with speech in it or none, while another is at work."""
    detector |= {41.0: [(0.0, 20.0)], 12.0: [(0.0, 12.0)], 3.0: []}
    recordings = [sounds[1], sounds[2], sounds[0]]
    options: dict[str, Any] = {**FAST, "language": None}
    options["condition_on_previous_text"] = cut == "vad_filter"
    expected = []
    for sound, seconds in ((sounds[1], 20), (sounds[2], 12)):
        (start,) = alone(model, [sound[: 30 * 16_000]], **options)
        (part,) = alone(model, [sound[: seconds * 16_000]], **{**options, "language": start["language"]})
        own = {**options, "language": part["language"], "clip_timestamps": [0.0, float(seconds)]}
        expected += [part] if cut == "batched" else alone(model, [sound], **own)
    real, seen = type(model).detect_language, list[int]()

    def full(*args: Any) -> Any:
        seen.append(1)
        if len(seen) in failing:
            raise MemoryError("full")
        return real(*args)

    monkeypatch.setattr(type(model), "detect_language", full)
    failing = range(2, 4)  # the second recording, and the third
    *found, nothing = fastgen.transcribe(model, recordings, **{cut: True}, **options)
    assert len(seen) == 5 and nothing["segments"] == [] and nothing["language"]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours["language"] == theirs["language"]
        assert [one["tokens"] for one in ours["segments"]] == [one["tokens"] for one in theirs["segments"]]
    failing = range(2, 99)  # alone, too
    seen.clear()
    with pytest.raises(MemoryError, match="full"):
        fastgen.transcribe(model, recordings, **{cut: True}, **options)
    assert len(seen) == 4
    seen.clear()
    with pytest.raises(MemoryError, match="full"):  # each is alone anyway
        fastgen.transcribe(model, recordings, batch_size=1, **{cut: True}, **options)
    assert len(seen) == 2


@pytest.mark.usefixtures("rounded_weights")
def test_weights_in_8_bits(model: Any, sounds: list[Any], steps: list[int]) -> None:
    with fastgen.configured(weights="int8", packing="always"):
        found = fastgen.transcribe(model, sounds[:3], batch_size=3, beam_size=2, **FAST)
    assert max(steps) == 3 and all(result["segments"] for result in found)
    assert not fastgen.status().quantized.startswith("0 ")


def _seams() -> list[Any]:
    module: Any = sys.modules["whisper.transcribe"]
    return [module.tqdm, module.log_mel_spectrogram, module.add_word_timestamps, whisper.Whisper.detect_language]


def test_two_threads(model: Any, sounds: list[Any]) -> None:
    """One ends while the other is at work; then whisper is as it was."""
    before, found = _seams(), {}

    def work(name: str, some: list[Any]) -> None:
        found[name] = fastgen.transcribe(model, some, beam_size=2, **FAST)

    threads = [threading.Thread(target=work, args=each) for each in (("a", sounds[:1]), ("b", sounds[1:]))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert plain(alone(model, sounds, beam_size=2, **FAST)) == [*found["a"], *found["b"]]
    assert all(one is other for one, other in zip(before, _seams(), strict=True))


def test_an_error_leaves_nothing_behind(model: Any, sounds: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    before, count = _seams(), threading.active_count()
    real, calls = whisper.transcribe, itertools.count()

    def failing(*args: Any, **options: Any) -> Any:
        result = real(*args, **options)
        if next(calls) == 0:
            raise LookupError("of yours")
        return result

    monkeypatch.setattr(whisper, "transcribe", failing)
    with pytest.raises(LookupError, match="of yours"):
        fastgen.transcribe(model, sounds, batch_size=3, **FAST)
    assert all(one is other for one, other in zip(before, _seams(), strict=True))
    assert threading.active_count() == count and torch.get_num_threads() >= 1
    assert fastgen.transcribe(model, sounds[:1], **FAST)


def test_what_is_done_is_freed(model: Any, sounds: list[Any]) -> None:
    """Without the garbage collector: samples of a hundred files would wait for it."""
    alive: list[Any] = []
    most = 0

    def recordings() -> Iterator[Any]:
        nonlocal most
        for number in range(6):
            samples = sounds[0].copy()
            alive.append(weakref.ref(samples))
            yield together.Recording(samples, {**FAST, "language": "en"})
            del samples
            if number >= 2:
                most = max(most, sum(each() is not None for each in alive))

    gc.collect()
    gc.disable()
    try:
        together.transcribe_all(model, recordings(), 2)
        assert most <= 3
        assert not any(each() is not None for each in alive)
    finally:
        gc.enable()


def test_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts are joined up to 30 seconds."""
    found = [(0.0, 5.0), (6.0, 29.0), (29.5, 31.0), (40.0, 59.5), (59.9, 69.9), (70.5, 71.0)]
    monkeypatch.setattr(silences, "_found", lambda samples, **_: found)
    assert silences.parts(np.zeros(1, np.float32)) == [(0.0, 29.0), (29.5, 59.5), (59.9, 71.0)]
    monkeypatch.setattr(silences, "_found", lambda samples, **_: [])
    assert silences.parts(np.zeros(1, np.float32)) == []


def test_a_short_word_is_speech(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a "yes", with seconds of silence around it."""
    silero = pytest.importorskip("silero_vad.utils_vad", reason="needs the extra transcribe")
    chances = np.zeros(20 * 16_000 // 512, np.float32)
    chances[200:206] = 0.9  # 0.19 s
    chances[400:440] = 0.9

    class Detector:
        def audio_forward(self, samples: Any) -> Any:
            return chances

    monkeypatch.setattr(silences, "_detector", lambda: (Detector(), silero.get_speech_timestamps_from_probs))
    samples = np.zeros(20 * 16_000, np.float32)
    (first, second), (whole,) = silences.speech(samples), silences.parts(samples)
    assert first == (pytest.approx(6.0), pytest.approx(6.992)) and second[0] == pytest.approx(12.4)
    assert whole == (first[0], second[1])


def test_where_somebody_speaks(shared: Path) -> None:
    """By Silero's model, in a real recording with silence around it; torch's threads stay as many as they were."""
    pytest.importorskip("silero_vad", reason="needs the extra transcribe")
    speech, threads = real_speech.clip(shared), torch.get_num_threads()
    silences._detector.cache_clear()
    quiet = np.zeros(5 * audio.RATE, np.float32)
    found = silences.speech(np.concatenate([quiet, speech, quiet, speech]))
    assert torch.get_num_threads() == threads
    assert len(found) == 2
    assert found[0][0] == pytest.approx(5.0, abs=1.0) and found[1][0] == pytest.approx(21.0, abs=1.0)
    assert all(end - start <= 30 for start, end in silences.parts(np.tile(speech, 9)))
    assert silences.speech(quiet) == silences.parts(quiet) == []
