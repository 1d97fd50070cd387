"""OpenAI's endpoints of speech, asked by OpenAI's own client: what the pipeline returns when it is called directly."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import io
import json
import os
import random
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

openai = pytest.importorskip("openai", reason="OpenAI's client is not installed: pip install -c constraints.txt openai")
pytest.importorskip("av", reason="PyAV is not installed: pip install -c constraints.txt -e '.[transcribe]'")
pytest.importorskip("python_multipart", reason="python-multipart is not installed")

import real_speech  # noqa: E402
import speech_kit  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from openai_kit import listening  # noqa: E402
from serve_process import Server, until  # noqa: E402
from serving_kit import model_settings  # noqa: E402

import fastgen  # noqa: E402
from fastgen.cli import serve  # noqa: E402
from fastgen.optimizer.transformers import versions  # noqa: E402
from fastgen.optimizer.transformers.generate.batch_decoder import BatchDecoder  # noqa: E402
from fastgen.pipeline.errors import InputError  # noqa: E402
from fastgen.pipeline.transcription import audio, subtitles  # noqa: E402
from fastgen.pipeline.transcription.subtitles import Segment  # noqa: E402
from fastgen.serving import generation_request, services, speech  # noqa: E402
from fastgen.serving.app import build  # noqa: E402
from fastgen.serving.limits import Limits  # noqa: E402

pytestmark = pytest.mark.skipif(not versions.PREFILLS, reason="the tiny pipeline is made as newer versions make it")
BODIES = int(os.environ.get("FASTGEN_FUZZ", "400"))  # malformed ones
MOST = 400_000  # bytes of a body


SHORT, LONG = speech_kit.wav(speech_kit.sound(1.5, 1)), speech_kit.wav(speech_kit.sound(5.5, 2))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("speech") / "tiny-whisper"
    made = speech_kit.tiny(3)
    made.save_pretrained(place)
    _save_settings(made, place)
    return place


def _save_settings(made: Any, place: Path) -> None:
    """Save a pipeline's generation config as one that was made for it, whose fields are read again."""
    made.model.generation_config._from_model_config = False
    made.model.generation_config.save_pretrained(place)


@pytest.fixture(scope="module")
def direct(folder: Path) -> Any:
    """The pipeline of the same model, to be called directly."""
    return transformers.pipeline("automatic-speech-recognition", model=str(folder), device="cpu")


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = ("--local", "--max-body", str(MOST), "--max-beams", "6")
    found = Server(tmp_path_factory.mktemp("local") / "log", *flags, model=folder)
    yield found
    assert found.stop() == 0, found.log.read_text()


def client_of(url: str) -> Any:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, timeout=240)


@pytest.fixture(scope="module")
def client(server: Server) -> Any:
    return client_of(f"http://127.0.0.1:{server.port}")


@pytest.fixture(scope="module")
def service(folder: Path) -> Iterator[Any]:
    settings = serve.settings_of(serve.parser().parse_args([str(folder)]), None).model
    found = services.service_of(settings, Limits(body_bytes=MOST, beams=6, rows=24), 5)
    yield found
    found.engine.close()


def expected(direct: Any, data: bytes, times: Any = True, seed: int = 0, **options: Any) -> Any:
    """What the host's pipeline says of a file, without fastgen."""
    direct.model.set_attn_implementation("sdpa")  # the host leaves it eager, for times of words
    torch.manual_seed(seed)
    with fastgen.disabled():
        return direct(audio.read(io.BytesIO(data)).samples, return_timestamps=times, generate_kwargs=options)


def segments(found: Any, seconds: float) -> list[Segment]:
    pieces: list[Segment] = []
    for one in found["chunks"]:
        start, end = one["timestamp"]
        if start is None:
            start = pieces[-1].end if pieces else 0.0
        pieces.append(Segment(start, max(start, seconds) if end is None else end, one["text"]))
    return pieces


def prompt_ids(direct: Any, text: str, most: int = 31) -> Any:
    tokens = direct.tokenizer.get_prompt_ids(text, return_tensors="pt")
    return torch.cat([tokens[:1], tokens[1:][-most:]])


# What a client asks for, and what `generate` is to be asked for.
KINDS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (dict(), dict(task="transcribe")),
    (dict(temperature=0, extra_body=dict(num_beams=1)), dict(task="transcribe", num_beams=1)),
    (dict(extra_body=dict(num_beams=3)), dict(task="transcribe", num_beams=3)),
    (dict(language="de"), dict(task="transcribe", language="de")),
    (dict(language="German", extra_body=dict(num_beams=2)), dict(task="transcribe", language="de", num_beams=2)),
    (dict(temperature=0.7, extra_body=dict(seed=4)), dict(task="transcribe", temperature=0.7, seed=4)),
    (dict(prompt="of the sea", language="en"), dict(task="transcribe", language="en", prompt="of the sea")),
    (dict(prompt="a long prompt " * 9), dict(task="transcribe", prompt="a long prompt " * 9)),
]


@pytest.mark.parametrize("data", (SHORT, LONG), ids=("short", "long"))
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: json.dumps(kind[0])[:60])
def test_texts_are_those_of_the_pipeline(
    client: Any, direct: Any, folder: Path, kind: tuple[dict[str, Any], dict[str, Any]], data: bytes
) -> None:
    asked, options = kind
    answer = client.audio.transcriptions.create(model=folder.name, file=("a.wav", data), **asked)
    wanted = dict(options)
    if "prompt" in wanted:
        wanted["prompt_ids"] = prompt_ids(direct, wanted.pop("prompt"))
    found = expected(direct, data, **wanted)
    assert answer.text == found["text"].strip() != ""
    assert (answer.usage.type, answer.usage.seconds) == ("duration", 2 if data is SHORT else 6)


def test_what_is_asked_for_matters(direct: Any) -> None:
    """Or the tests above would show nothing."""
    texts = [
        expected(direct, LONG, **({**options, "prompt_ids": prompt_ids(direct, prompt)} if prompt else options))["text"]
        for _, options in KINDS
        for options in [dict(options)]
        for prompt in [options.pop("prompt", None)]
    ]
    assert len(set(texts)) >= 5


@pytest.mark.parametrize("form", ("json", "text", "srt", "vtt", "verbose_json"))
@pytest.mark.parametrize("task", ("transcribe", "translate"))
def test_formats(client: Any, direct: Any, folder: Path, form: Any, task: str) -> None:
    create = client.audio.transcriptions.create if task == "transcribe" else client.audio.translations.create
    answer = create(model=folder.name, file=("a.wav", LONG), response_format=form, extra_body=dict(num_beams=2))
    found = expected(direct, LONG, task=task, num_beams=2)
    pieces, text = segments(found, 5.5), found["text"].strip()
    assert len(pieces) > 1
    if form == "json":
        assert answer.text == text
    elif form == "text":
        assert answer == f"{text}\n"
    elif form in ("srt", "vtt"):
        assert answer == getattr(subtitles, form)(pieces)
    else:
        assert (answer.text, answer.task, answer.duration) == (text, task, pytest.approx(5.5, abs=1e-3))
        assert [one.text for one in answer.segments] == [one.text for one in pieces]
        for times in ("start", "end"):
            assert [getattr(one, times) for one in answer.segments] == pytest.approx(
                [getattr(one, times) for one in pieces], abs=1e-3
            )
        assert [one.id for one in answer.segments] == list(range(len(pieces)))
        assert answer.segments[0].avg_logprob is None and answer.segments[0].temperature == 0
        spoken = expected(direct, LONG, **dict(task=task, num_beams=2, language=None))
        assert spoken["text"] == found["text"] and getattr(answer, "words", None) is None
        assert answer.language == ("english" if task == "translate" else _language(direct, LONG))


def _language(direct: Any, data: bytes) -> str:
    """The language that the host finds, as its name."""
    (inputs,) = direct.preprocess(audio.read(io.BytesIO(data)).samples)
    with fastgen.disabled(), torch.no_grad():
        frames = 2 * direct.model.config.max_source_positions
        (found,) = direct.model.detect_language(inputs["input_features"], num_segment_frames=frames).tolist()
    names = {direct.model.generation_config.lang_to_id[f"<|{code}|>"]: name for code, name in LANGUAGES.items()}
    return names[found]


LANGUAGES = {"en": "english", "de": "german"}


@pytest.mark.parametrize("granularities", (["word"], ["word", "segment"]), ids="-".join)
@pytest.mark.parametrize("data", (SHORT, LONG), ids=("short", "long"))
def test_words_have_times(client: Any, direct: Any, folder: Path, granularities: Any, data: bytes) -> None:
    answer = client.audio.transcriptions.create(
        model=folder.name,
        file=("a.wav", data),
        response_format="verbose_json",
        timestamp_granularities=granularities,
        language="en",
        extra_body=dict(num_beams=1),
    )
    options = dict(task="transcribe", language="en", num_beams=1)
    seconds = 1.5 if data is SHORT else 5.5
    words = segments(expected(direct, data, "word", **options), seconds)
    assert [one.word for one in answer.words] == [one.text.strip() for one in words] and words
    for times in ("start", "end"):
        assert [getattr(one, times) for one in answer.words] == pytest.approx(
            [getattr(one, times) for one in words], abs=0.021
        )
    assert answer.language == "english"
    if "segment" in granularities:
        pieces = segments(expected(direct, data, **options), seconds)
        assert [one.text for one in answer.segments] == [one.text for one in pieces]
    else:
        assert answer.segments is None


def test_many_clients_share_steps(service: Any, direct: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recordings come while others are at work; each gets what it gets alone."""
    seen: list[int] = []
    counts = service.engine.counts
    before = counts.finished, counts.requests  # of other tests
    real = BatchDecoder.step_all
    monkeypatch.setattr(BatchDecoder, "step_all", lambda self: (seen.append(len(self.calls)), real(self))[1])
    chance = random.Random(3)
    jobs = [
        (speech_kit.wav(speech_kit.sound(chance.choice((1.0, 1.9, 4.2)), seed)), 1 + seed % 2) for seed in range(12)
    ]

    with listening(build(service, None)) as url:

        def ask(job: Any) -> str:
            data, beams = job
            create = client_of(url).audio.transcriptions.create
            text: str = create(model=service.name, file=("a", data), extra_body=dict(num_beams=beams)).text
            return text

        with concurrent.futures.ThreadPoolExecutor(4) as threads:  # as many work at a time, and five may wait
            answers = list(threads.map(ask, jobs))
    assert answers == [
        expected(direct, data, task="transcribe", num_beams=beams)["text"].strip() for data, beams in jobs
    ]
    assert max(seen) > 1, "they share steps"
    assert service.running == 0 and service.engine.counts.running == service.engine.counts.queued == 0
    assert (counts.finished - before[0], counts.requests - before[1]) == (12, 12)


def _cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


def encoded(samples: Any, form: str, codec: str) -> bytes:
    import av

    file = io.BytesIO()
    with av.open(file, "w", format=form) as out:
        stream: Any = out.add_stream(codec, rate=speech_kit.RATE)
        stream.layout = "mono"
        frame = av.AudioFrame.from_ndarray((samples * 32767).astype("<i2")[None], format="s16", layout="mono")
        frame.sample_rate, frame.pts = speech_kit.RATE, 0
        resampler = av.AudioResampler(format=stream.format.name, layout="mono", rate=speech_kit.RATE)
        for each in [*resampler.resample(frame), *resampler.resample(None)]:
            out.mux(stream.encode(each))
        out.mux(stream.encode(None))
    return file.getvalue()


@pytest.mark.parametrize("form, codec", (("mp3", "mp3"), ("flac", "flac"), ("ogg", "libopus"), ("webm", "libopus")))
def test_other_kinds_of_files(client: Any, direct: Any, folder: Path, form: str, codec: str) -> None:
    data = encoded(speech_kit.sound(1.8, 5), form, codec)
    answer = client.audio.transcriptions.create(model=folder.name, file=(f"a.{form}", data))
    assert answer.text == expected(direct, data, task="transcribe")["text"].strip()


BAD_FILES: list[tuple[Any, str]] = [
    (b"", "file is no audio that FFmpeg knows"),
    (b"This is a text, whatever it is called.\n" * 50, "file is no audio that FFmpeg knows"),
    (_cut(LONG), "file is cut off: it says that it has 5.5 seconds of sound, and 2.7 are there."),
    (_cut(encoded(speech_kit.sound(4, 1), "flac", "flac")), "file is "),
    (LONG[:30], "file is no audio that FFmpeg knows"),
    (speech_kit.wav(speech_kit.sound(0, 1)), "file has no audio in it"),
]


@pytest.mark.parametrize("data, sentence", BAD_FILES, ids=lambda one: str(one)[:40] if isinstance(one, str) else "")
def test_bad_sound_is_a_sentence(client: Any, folder: Path, data: bytes, sentence: str) -> None:
    for create in (client.audio.transcriptions.create, client.audio.translations.create):
        with pytest.raises(openai.BadRequestError) as caught:
            create(model=folder.name, file=("a.mp3", data))
        error = caught.value
        assert error.body["message"].startswith(sentence) and error.body["message"].count(".\n") == 0, error.body
        assert (error.param, error.type) == ("file", "invalid_request_error")
        assert error.response.headers["x-should-retry"] == "false"


def test_more_sound_than_there_is_time_for(client: Any, folder: Path, service: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(speech, "_LONGEST", 60.0)
    data = encoded(np.zeros(speech_kit.RATE * 90, np.float32), "flac", "flac")
    assert len(data) < MOST
    with listening(build(service, None)) as url, pytest.raises(openai.BadRequestError, match="more than 1 minute of"):
        client_of(url).audio.transcriptions.create(model=folder.name, file=("a", data))


def test_a_full_disk_is_not_the_clients_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(audio.tempfile, "TemporaryFile", full)
    with pytest.raises(speech.Refusal, match="The service's disk is full") as caught:
        speech._sound(SHORT)
    assert caught.value.status == 503 and caught.value.field is None


BAD: list[tuple[dict[str, Any], str, str | None]] = [
    (dict(response_format="docx"), "response_format should be 'json', 'text', 'srt'", "response_format"),
    (dict(temperature="x"), "temperature should be a valid number", "temperature"),
    (dict(temperature=1.5), "temperature should be less than or equal to 1.", "temperature"),
    (dict(temperature=0.001), "temperature should be 0, or at least 0.01.", "temperature"),
    (dict(temperature=0.5, extra_body=dict(num_beams=2)), "num_beams is for a temperature of 0", "num_beams"),
    (dict(extra_body=dict(num_beams=7)), "num_beams should be less than or equal to 6.", "num_beams"),
    (dict(extra_body=dict(num_beams="x")), "num_beams should be a valid integer", "num_beams"),
    (dict(timestamp_granularities=["word"]), "timestamp_granularities is for a response_format of verbose_json", None),
    (
        dict(timestamp_granularities=["day"], response_format="verbose_json"),
        "timestamp_granularities[0] should be 'word' or 'segment'.",
        "timestamp_granularities[0]",
    ),
    (dict(language="xx"), "language should be a code or a name of one that the model knows", "language"),
    (dict(prompt="<|en|>"), "prompt can't be used: Encountered text in the prompt", "prompt"),
    (dict(prompt="a" * 10_001), "prompt should have at most 10000 characters", "prompt"),
    (dict(extra_body=dict(stream=True)), "stream is not offered: leave it out.", "stream"),
    (dict(include=["logprobs"]), "include is not offered: leave it out.", "include"),
    (dict(chunking_strategy="auto"), "chunking_strategy is not offered", "chunking_strategy"),
    (dict(extra_body=dict(nonsense=1)), "nonsense is no field of the service: /docs lists", "nonsense"),
    (dict(extra_body=dict(do_sample=True)), "does not offer (temperature above 0 samples)", "do_sample"),
    (dict(extra_body=dict(timeout=0)), "timeout should be greater than 0.", "timeout"),
]


@pytest.mark.parametrize("asked, sentence, field", BAD, ids=lambda one: str(one)[:50])
def test_what_cannot_be_used_is_a_sentence(
    client: Any, folder: Path, asked: dict[str, Any], sentence: str, field: str | None
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.audio.transcriptions.create(model=folder.name, file=("a.wav", SHORT), **asked)
    assert sentence in caught.value.body["message"], caught.value.body
    assert (caught.value.param, caught.value.type) == (field or caught.value.param, "invalid_request_error")


def test_neutral_and_empty_fields_change_nothing(client: Any, direct: Any, folder: Path) -> None:
    answer = client.audio.transcriptions.create(
        model=folder.name, file=("a.wav", SHORT), stream=False, prompt="", language="", extra_body=dict(num_beams="")
    )
    assert answer.text == expected(direct, SHORT, task="transcribe")["text"].strip()


def test_another_model_and_too_large_a_file(client: Any, folder: Path, server: Server) -> None:
    with pytest.raises(openai.NotFoundError, match="has no model 'whisper-1'") as caught:
        client.audio.transcriptions.create(model="whisper-1", file=("a.wav", SHORT))
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.APIStatusError, match="The body has more than 400000 bytes") as large:
        client.audio.transcriptions.create(model=folder.name, file=("a.wav", b"x" * (MOST + 1)))
    assert large.value.status_code == 413
    assert client.models.list().data[0].id == folder.name
    assert "/v1/audio/transcriptions answers" in server.log.read_text()


def test_a_whisper_takes_no_texts(client: Any, folder: Path, server: Server) -> None:
    for call in (
        lambda: client.completions.create(model=folder.name, prompt="a"),
        lambda: client.chat.completions.create(model=folder.name, messages=[{"role": "user", "content": "a"}]),
    ):
        with pytest.raises(openai.BadRequestError, match="is a Whisper, which writes down speech") as caught:
            call()
        assert caught.value.code == "no_text"
    for more in ({}, {"stream": True}):
        status, answer = server.ask(text="a", **more)
        assert status == 422 and answer["detail"].startswith("The model is a Whisper, which writes down speech: ")


def test_a_model_of_texts_takes_no_sound() -> None:
    from fastapi.testclient import TestClient

    from fastgen.serving.service import Service

    service = Service(model_settings(), Limits(), 4)
    try:
        with TestClient(build(service, None)) as client:
            for path in ("/v1/audio/transcriptions", "/v1/audio/translations"):
                for sent in (dict(files={"file": ("a.wav", SHORT)}), dict(content=b"{")):
                    answer = client.post(path, **sent)
                    assert answer.status_code == 400
                    assert answer.json()["error"]["message"].startswith("The model is no Whisper, and takes no sound")
    finally:
        service.engine.close()


def test_bodies_that_are_no_forms(service: Any) -> None:
    from fastapi.testclient import TestClient

    head = {"content-type": "multipart/form-data; boundary=x"}
    with TestClient(build(service, None)) as client:
        for sent, headers, message in (
            (b"{}", {"content-type": "application/json"}, "The body is not said to be a form with a file: send"),
            (b"", {}, "The body is not said to be a form"),
            (b"a=b", {"content-type": "application/x-www-form-urlencoded"}, "The body is not said to be a form"),
            (b"nonsense", head, "The body is no form that can be read ("),
            (b"", {"content-type": "multipart/form-data"}, "The body is no form that can be read (Missing boundary"),
            (b'--x\r\nContent-Disposition: form-data; name="file"\r\n\r\na\r\n--x--\r\n', head, "file is a text: send"),
            (b'--x\r\nContent-Disposition: form-data; name="a"\r\n\r\nb\r\n--x--\r\n', head, "file is missing: "),
        ):
            answer = client.post("/v1/audio/transcriptions", content=sent, headers=headers)
            assert answer.status_code == 400, answer.text
            assert answer.json()["error"]["message"].startswith(message), answer.text
        twice = [("file", ("a", SHORT)), ("file", ("b", SHORT))]
        answer = client.post("/v1/audio/transcriptions", files=twice)
        assert answer.status_code == 400 and "Too many files" in answer.json()["error"]["message"]


def test_who_waits_too_long_or_leaves(service: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work on a recording for which nobody waits ends before the next window."""
    counts, windows = service.engine.counts, list[int]()
    real = BatchDecoder.step_all

    def slow(self: Any) -> Any:
        windows.append(len(self.calls))
        time.sleep(0.02)
        return real(self)

    monkeypatch.setattr(BatchDecoder, "step_all", slow)
    data = speech_kit.wav(speech_kit.sound(10.0, 1))
    with listening(build(service, None)) as url:
        client = client_of(url)
        expired, cancelled = counts.expired, counts.cancelled
        with pytest.raises(openai.InternalServerError, match="send a shorter one or a longer `timeout`") as caught:
            client.audio.transcriptions.create(model=service.name, file=("a", data), extra_body=dict(timeout=0.3))
        assert (caught.value.status_code, caught.value.code) == (504, "timeout")
        until(lambda: counts.expired + counts.cancelled == expired + cancelled + 1 and not counts.running)
        cancelled = counts.cancelled
        with pytest.raises(openai.APITimeoutError):
            client.with_options(timeout=0.3).audio.transcriptions.create(model=service.name, file=("a", data))
        until(lambda: counts.cancelled == cancelled + 1 and not counts.running and not service.running)
    assert windows


def test_the_attention_of_word_times_is_taken_back(service: Any) -> None:
    """The host leaves it set: recordings that are still at work, and those to come, have the model's own again."""
    config = service._model.config
    before = config._attn_implementation

    async def ask() -> tuple[str, int]:
        long = speech_kit.wav(speech_kit.sound(10.0, 1))
        others = [asyncio.create_task(service.transcribe(long, speech.Asked(speech.TRANSCRIBE))) for _ in range(3)]
        words = speech.Asked(speech.TRANSCRIBE, language="en", beams=1, segments=False, words=True)
        assert (await service.transcribe(SHORT, words)).words
        seen = config._attn_implementation, service.engine.counts.running
        await asyncio.gather(*others)
        return seen

    attention, running = asyncio.run(ask())
    assert running and attention == before != "eager"


def test_what_does_not_fit_beside_others_is_done_alone(service: Any, direct: Any, monkeypatch: Any) -> None:
    """Where memory runs out in a step for several recordings, each is tried once more, and nothing runs beside it."""
    from fastgen.serving.speech_engine import SpeechRequest

    real, calls, failing = BatchDecoder.step_all, list[int](), 0

    def small(self: Any) -> None:
        calls.append(len(self.calls))
        if len(self.calls) > 1 or failing:
            raise MemoryError("full")
        real(self)

    monkeypatch.setattr(BatchDecoder, "step_all", small)
    begun, gate, told = threading.Event(), threading.Event(), dict[int, Any]()

    def wait() -> None:
        begun.set()
        assert gate.wait(60)

    def ask() -> list[Any]:
        for one in (begun, gate, calls):
            one.clear()  # type: ignore[attr-defined]
        requests = [SpeechRequest(wait, lambda result: None)]
        service.engine.submit(requests[0])
        assert begun.wait(60)
        for number, data in enumerate((LONG, SHORT, LONG)):
            samples, asked = audio.read(io.BytesIO(data)).samples, speech.Asked(speech.TRANSCRIBE)
            work = functools.partial(speech._transcript, service._pipeline, samples, asked, {"task": "transcribe"})
            requests.append(SpeechRequest(work, functools.partial(told.__setitem__, number)))
            service.engine.submit(requests[-1])
        gate.set()
        until(lambda: all(one.is_over for one in requests))
        return [told[number] for number in range(3)]

    texts = [expected(direct, data, task="transcribe")["text"] for data in (LONG, SHORT, LONG)]
    assert [getattr(one, "text", one) for one in ask()] == texts
    assert max(calls) > 1 and set(calls[calls.index(1) :]) == {1}
    failing = 1
    assert {one.status for one in ask()} == {503}
    assert not service.engine._again and not service.engine._begun and service.engine.is_alive


def test_a_full_queue_and_a_stopping_service(service: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with listening(build(service, None)) as url:
        asked = dict(model=folder.name, file=("a.wav", SHORT))
        for why, kind, status in (
            (generation_request.Full, openai.RateLimitError, 429),
            (generation_request.Stopped, openai.InternalServerError, 503),
        ):
            with monkeypatch.context() as patch:

                def refuse(request: Any, why: Any = why) -> None:
                    raise why

                patch.setattr(service.engine, "submit", refuse)
                with pytest.raises(kind) as caught:
                    client_of(url).audio.transcriptions.create(**asked)
            assert caught.value.status_code == status
            assert caught.value.response.headers["retry-after"] == "1"
        service.stop()
        try:
            with pytest.raises(openai.InternalServerError, match="is stopping"):
                client_of(url).audio.transcriptions.create(**asked)
        finally:
            service._is_stopping = False


def test_a_model_that_fails_ends_its_own_request(service: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with listening(build(service, None)) as url:
        create = client_of(url).audio.transcriptions.create
        with monkeypatch.context() as patch:
            patch.setattr(service._pipeline, "preprocess", lambda *_, **__: 1 / 0)
            with pytest.raises(openai.BadRequestError, match="transformers refuses to generate: division by zero"):
                create(model=folder.name, file=("a.wav", SHORT))
            patch.setattr(service._pipeline, "preprocess", lambda *_, **__: [][0])
            with pytest.raises(openai.InternalServerError, match="The model failed with IndexError"):
                create(model=folder.name, file=("a.wav", SHORT))
        assert create(model=folder.name, file=("a.wav", SHORT)).text


def test_the_engine_waits_its_queue_out_and_refuses_when_it_is_closed(folder: Path) -> None:
    settings = serve.settings_of(serve.parser().parse_args([str(folder)]), None).model
    found: Any = services.service_of(settings, Limits(beams=6, rows=6), 1)
    told: list[Any] = []
    begun, gate = threading.Event(), threading.Event()

    def work() -> str:
        begun.set()
        assert gate.wait(60)
        return "done"

    from fastgen.serving.speech_engine import SpeechRequest

    requests = [SpeechRequest(work, told.append) for _ in range(3)]
    found.engine.submit(requests[0])
    assert begun.wait(60)
    found.engine.submit(requests[1])
    with pytest.raises(generation_request.Full):
        found.engine.submit(requests[2])
    threading.Timer(0.2, gate.set).start()
    found.engine.close()
    assert [getattr(one, "status", one) for one in told] == [503, 503] and not found.engine.is_alive
    with pytest.raises(generation_request.Stopped):
        found.engine.submit(requests[2])


def test_who_leaves_the_queue_makes_room_there(folder: Path) -> None:
    from fastgen.serving.speech_engine import SpeechRequest

    settings = serve.settings_of(serve.parser().parse_args([str(folder)]), None).model
    engine: Any = services.service_of(settings, Limits(beams=6, rows=6), 1).engine
    begun, gate = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        assert gate.wait(60)

    running, leaves, comes = (SpeechRequest(work, lambda result: None) for _ in range(3))
    engine.submit(running)
    assert begun.wait(60)
    engine.submit(leaves)
    with pytest.raises(generation_request.Full):
        engine.submit(comes)
    engine.cancel(leaves)
    assert (engine.counts.cancelled, engine.counts.queued) == (1, 0)
    engine.submit(comes)
    gate.set()
    until(lambda: running.is_over and comes.is_over)
    assert engine.counts.finished == 2
    engine.close()


def test_recordings_that_wait_take_a_part_of_the_memory_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fastgen.memory import limits
    from fastgen.serving.speech_engine import SpeechRequest

    settings = serve.settings_of(serve.parser().parse_args([str(folder)]), None).model
    service: Any = services.service_of(settings, Limits(beams=6, rows=6), 100)
    begun, gate = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        assert gate.wait(60)

    monkeypatch.setattr(limits, "free", lambda: 1000)
    first, small, large = (SpeechRequest(work, lambda result: None, size=size) for size in (5000, 0, 5000))
    service.engine.submit(first)  # one may be of any size
    assert begun.wait(60)
    monkeypatch.setattr(limits, "free", lambda: 100_000)
    service.engine.submit(small)
    monkeypatch.setattr(limits, "free", lambda: 20_000)
    with pytest.raises(generation_request.Full):
        service.engine.submit(large)
    monkeypatch.setattr(limits, "free", lambda: 1000)
    monkeypatch.setattr(speech, "_sound", lambda data: pytest.fail("it is read for nothing"))
    with pytest.raises(speech.Refusal, match="The queue is full"):
        asyncio.run(service.transcribe(SHORT, speech.Asked(speech.TRANSCRIBE)))
    assert service.engine.counts.refused == 2
    gate.set()
    until(lambda: first.is_over and small.is_over)
    service.engine.close()


def test_settings_of_texts_are_refused(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert serve.main([str(folder), "--local", "--task-prefix", "a"]) == 1
    assert "--task-prefix is for models that take texts, and " in capfd.readouterr().err


@pytest.mark.parametrize("name, what", (("python_multipart", "python-multipart"), ("av", "PyAV")))
def test_what_is_not_installed_is_said_at_once(folder: Path, name: str, what: str, monkeypatch: Any) -> None:
    import sys

    monkeypatch.setitem(sys.modules, name, None)
    settings = serve.settings_of(serve.parser().parse_args([str(folder)]), None).model
    with pytest.raises(InputError, match=f"{what} is needed: pip install "):
        services.check(settings)


def test_an_outdated_generation_config_is_a_sentence(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "old")
    path = tmp_path / "old" / "generation_config.json"
    settings = json.loads(path.read_text())
    del settings["no_timestamps_token_id"]
    path.write_text(json.dumps(settings))
    asked = serve.settings_of(serve.parser().parse_args([str(tmp_path / "old")]), None).model
    with pytest.raises(InputError, match=r"generation_config.json of .* has no no_timestamps_token_id"):
        services.service_of(asked, Limits(), 4)


def test_a_model_that_knows_english_alone(folder: Path, tmp_path: Path, direct: Any) -> None:
    shutil.copytree(folder, tmp_path / "english")
    path = tmp_path / "english" / "generation_config.json"
    settings = json.loads(path.read_text()) | {"is_multilingual": False}
    for name in ("lang_to_id", "task_to_id"):
        del settings[name]
    path.write_text(json.dumps(settings))
    asked = serve.settings_of(serve.parser().parse_args([str(path.parent)]), None).model
    found: Any = services.service_of(asked, Limits(), 4)
    own = transformers.pipeline("automatic-speech-recognition", model=str(path.parent), device="cpu")
    text = expected(own, SHORT)["text"].strip()
    try:
        with listening(build(found, None)) as url:
            create = client_of(url).audio.transcriptions.create
            for more in (dict(), dict(language="en"), dict(language="English")):
                answer = create(model="english", file=("a", SHORT), response_format="verbose_json", **more)
                assert answer.text == text and answer.language == "english"
            with pytest.raises(openai.BadRequestError, match="the model knows English alone"):
                create(model="english", file=("a", SHORT), language="de")
            with pytest.raises(openai.BadRequestError, match="translates nothing"):
                client_of(url).audio.translations.create(model="english", file=("a", SHORT))
    finally:
        found.engine.close()


@pytest.mark.parametrize("form", ("{code}", "{name}", "<|{code}|>"))
def test_a_model_that_says_which_language_it_is_for(form: str, folder: Path, tmp_path: Path, direct: Any) -> None:
    """The host does not find it out then, and neither do we: the text is the same in all formats."""
    (code,) = {"en", "de"} - {code for code, name in LANGUAGES.items() if name == _language(direct, LONG)}
    shutil.copytree(folder, tmp_path / "own")
    path = tmp_path / "own" / "generation_config.json"
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"language": form.format(code=code, name=LANGUAGES[code])})
    )
    asked = serve.settings_of(serve.parser().parse_args([str(path.parent)]), None).model
    found: Any = services.service_of(asked, Limits(), 4)
    own = transformers.pipeline("automatic-speech-recognition", model=str(path.parent), device="cpu")
    text = expected(own, LONG, task="transcribe")["text"].strip()
    assert text != expected(direct, LONG, task="transcribe")["text"].strip()
    other = "en" if code == "de" else "de"
    wanted = expected(own, LONG, task="transcribe", language=other)["text"].strip()
    try:
        with listening(build(found, None)) as url:
            create = client_of(url).audio.transcriptions.create
            answer = create(model="own", file=("a", LONG), response_format="verbose_json")
            assert (answer.text, answer.language) == (text, LANGUAGES[code])
            assert create(model="own", file=("a", LONG)).text == text
            answer = create(model="own", file=("a", LONG), response_format="verbose_json", language=other)
            assert (answer.text, answer.language) == (wanted, LANGUAGES[other])
    finally:
        found.engine.close()


@pytest.mark.slow
def test_malformed_forms_are_never_the_services_fault(service: Any) -> None:
    from fastapi.testclient import TestClient

    chance, statuses = random.Random(5), set()
    fields = {"model": service.name, "temperature": "0", "response_format": "verbose_json", "num_beams": "1"}
    values = ["", "x", "-1", "1e999", "nan", "[]", "\u0000", "a" * 5000, "word", "true"]
    tiny = speech_kit.wav(speech_kit.sound(0.2, 1))
    with TestClient(build(service, None), raise_server_exceptions=False) as client:
        for _ in range(BODIES):
            parts = dict(fields)
            for _ in range(chance.randrange(3)):
                parts[chance.choice([*fields, "language", "prompt", "seed", "x[]"])] = chance.choice(values)
            request = client.build_request("POST", "/v1/audio/transcriptions", data=parts, files={"file": ("a", tiny)})
            body = bytearray(request.read())
            for _ in range(chance.randrange(3)):
                body[chance.randrange(min(len(body), 900))] = chance.randrange(256)
            body = body[: chance.choice((len(body), chance.randrange(len(body))))]
            answer = client.post(
                request.url, content=bytes(body), headers={"content-type": request.headers["content-type"]}
            )
            statuses.add(answer.status_code)
            assert answer.status_code in (200, 400, 404), answer.text
            assert answer.status_code == 200 or set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert {200, 400} <= statuses and service.engine.is_alive


@pytest.mark.slow
def test_real_speech(tmp_path: Path, shared: Path) -> None:
    from fastgen.bench.speech import pipeline as made

    place, clip = real_speech.whisper_base(shared), real_speech.clip(shared)
    real = made(place)
    for file in place.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    _save_settings(real, tmp_path)
    data = speech_kit.wav(clip)
    server = Server(tmp_path / "log", "--local", model=tmp_path)
    try:
        create = client_of(f"http://127.0.0.1:{server.port}").audio.transcriptions.create
        answer = create(model=tmp_path.name, file=("jfk.wav", data), response_format="verbose_json")
        found = expected(real, data, task="transcribe")
        assert answer.text == found["text"].strip() and "ask not what your country can do for you" in answer.text
        assert answer.language == "english" and answer.segments[-1].end <= 11.0
        words = create(
            model=tmp_path.name,
            file=("jfk.wav", data),
            response_format="verbose_json",
            timestamp_granularities=["word"],
            language="en",
            extra_body=dict(num_beams=1),
        ).words
        wanted = expected(real, data, "word", task="transcribe", language="en", num_beams=1)
        assert [one.word for one in words] == [one["text"].strip() for one in wanted["chunks"]]
        assert server.stop() == 0
    finally:
        server.process.kill()
