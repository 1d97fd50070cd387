"""Requests that the service's own OpenAPI describes, and such as it rules out: answers are those that it promises."""

from __future__ import annotations

import os
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed")
pytest.importorskip("av", reason="PyAV is not installed: pip install -c constraints.txt -e '.[transcribe]'")

import speech_kit  # noqa: E402
from hypothesis import HealthCheck, given, seed, settings  # noqa: E402
from openai_kit import served  # noqa: E402
from schemathesis.checks import not_a_server_error  # noqa: E402
from schemathesis.specs.openapi import checks  # noqa: E402
from schemathesis.transport.serialization import Binary  # noqa: E402
from serving_kit import model_settings  # noqa: E402

from fastgen.cli import serve  # noqa: E402
from fastgen.optimizer.transformers import versions  # noqa: E402
from fastgen.serving import services  # noqa: E402
from fastgen.serving.app import build  # noqa: E402
from fastgen.serving.limits import Limits  # noqa: E402
from fastgen.serving.service import Service  # noqa: E402

pytestmark = pytest.mark.slow
BODIES = int(os.environ.get("FASTGEN_FUZZ", "400"))  # of all endpoints together
PROMISES = [
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
]
TEXTS = ("/v1/generate", "/v1/completions", "/v1/chat/completions")
SPEECH = ("/v1/audio/transcriptions", "/v1/audio/translations")
LISTS = ("/v1/models", "/v1/models/{model}")


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A model that goes on with prompts and has a chat template."""
    with served("gpt2", tmp_path_factory.mktemp("gpt2")) as found:
        yield found.service


@pytest.fixture(scope="module")
def shipped() -> Iterator[Any]:
    """A model that answers sources, and has no chat template."""
    found = Service(model_settings(), Limits(body_bytes=20_000, inputs=8, new_tokens=64, beams=6, rows=48), 64)
    yield found
    found.engine.close()


@pytest.fixture(scope="module")
def speech(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    if not versions.PREFILLS:
        pytest.skip("the tiny pipeline is made as newer versions make it")
    folder: Path = tmp_path_factory.mktemp("speech") / "tiny-whisper"
    made = speech_kit.tiny(3)
    made.save_pretrained(folder)
    made.model.generation_config._from_model_config = False
    made.model.generation_config.save_pretrained(folder)
    asked = serve.settings_of(serve.parser().parse_args([str(folder)]), None).model
    found = services.service_of(asked, Limits(body_bytes=400_000, beams=6, rows=24), 5)
    yield found
    found.engine.close()


PLACES = [
    *(("texts", path) for path in TEXTS),
    *(("shipped", path) for path in TEXTS),
    *(("speech", path) for path in (*SPEECH, "/v1/completions")),
]
NEVER = {("shipped", "/v1/chat/completions"), ("speech", "/v1/completions")}  # what the model can't answer


@pytest.mark.parametrize("mode", ("positive", "negative"))
@pytest.mark.parametrize("name, path", [*PLACES, *(("texts", path) for path in LISTS)])
def test_answers_are_those_of_the_schema(name: str, path: str, mode: str, request: pytest.FixtureRequest) -> None:
    service = request.getfixturevalue(name)
    schema = schemathesis.openapi.from_asgi("/openapi.json", build(service, None))
    operation = schema[path]["GET" if path in LISTS else "POST"]
    statuses = Counter[int]()
    sound = Binary(speech_kit.wav(speech_kit.sound(0.2, 1)))
    most = 20 if path in LISTS else max(1, BODIES // len(PLACES) // 2)

    @seed(zlib.crc32(f"{name} {path} {mode}".encode()))
    @given(case=operation.as_strategy(generation_mode=schemathesis.GenerationMode(mode)))
    @settings(max_examples=most, derandomize=False, database=None, suppress_health_check=list(HealthCheck))
    def send(case: Any) -> None:
        if path in SPEECH and mode == "positive" and statuses.total() % 2:
            case.body = {**case.body, "file": sound}  # bytes that are drawn are no sound
        answer = case.call()
        statuses[answer.status_code] += 1
        if answer.status_code == 504 and "timeout" in str(case.body):
            return  # of next to nothing
        case.validate_response(answer, checks=[not_a_server_error, *PROMISES])

    send()
    print(name, path, mode, dict(statuses))  # shown with -s
    assert service.engine.is_alive and service.running == 0
    if mode == "positive" and path not in LISTS:
        assert (200 in statuses) is ((name, path) not in NEVER)


@pytest.mark.parametrize(
    "path, asked",
    [
        ("/v1/generate", {"text": ["on we", "go"]}),
        ("/v1/completions", {"prompt": "on we", "max_tokens": 4}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "on we"}], "max_tokens": 4}),
    ],
)
def test_streams_are_those_of_the_schema(texts: Service, path: str, asked: dict[str, Any]) -> None:
    """Bodies that are drawn seldom ask for one. Each event is held against the schema."""
    schema = schemathesis.openapi.from_asgi("/openapi.json", build(texts, None))
    case = schema[path]["POST"].Case(body={**asked, "stream": True}, media_type="application/json")
    answer = case.call()
    assert answer.status_code == 200 and answer.headers["content-type"][0].startswith("text/event-stream")
    case.validate_response(answer, checks=[not_a_server_error, *PROMISES])
