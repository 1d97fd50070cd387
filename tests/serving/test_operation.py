"""What those who run the service rely on: keys, ids of requests, logs, histograms, clients that leave, cores, TLS."""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import os
import re
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import certificate
import pytest
import uvicorn
from serving_kit import TEXTS, slowly

import fastgen
from fastgen.cli import serve
from fastgen.demo.job import SHIPPED_MODEL
from fastgen.pipeline.errors import InputError
from fastgen.serving import app as application
from fastgen.serving import certificates, cores, logs
from fastgen.serving.disconnects import EndedWithClient
from fastgen.serving.histograms import Histogram
from fastgen.serving.keys import keys_of
from fastgen.serving.observed import FIELDS, GONE
from fastgen.serving.request_ids import RequestIds, request_id

ASK = {"text": "1 2 3", "max_new_tokens": 5}


def until(what: Callable[[], bool]) -> None:
    end = time.monotonic() + 120
    while not what():
        assert time.monotonic() < end
        time.sleep(0.01)


# ---------------------------------------------------------------------------------------------- keys
def test_keys_of_the_environment_and_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("\n first-key \r\nsecond=/+key\nfirst-key\n")
    assert keys_of(None, None) is None
    assert keys_of("sesame", None) == ("sesame",)
    assert keys_of("sesame", str(file)) == ("sesame", "first-key", "second=/+key")
    assert keys_of(None, str(file)) == ("first-key", "second=/+key")


@pytest.mark.parametrize(
    "content, what",
    (
        (b"", "has no key: write one key a line."),
        (b"\n \n", "has no key: write one key a line."),
        (b"good\nsecret words\n", ", line 2: a key has letters, digits and signs of ASCII, no spaces."),
        ("schlüssel\n".encode(), ", line 1: a key has letters"),
        (b"\xff\xfe\n", "is no text in UTF-8: write one key a line."),
        (None, "No such file or directory."),
    ),
)
def test_a_file_without_keys_is_a_sentence_that_quotes_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | None, what: str
) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    assert serve.main([str(SHIPPED_MODEL), "--local", "--api-key-file", str(file)]) == 1
    said = capsys.readouterr().err
    assert f"--api-key-file {file}" in said and what in said and len(said.splitlines()) == 1
    assert "secret" not in said and "good" not in said


def test_a_token_that_is_no_text_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(os.environb, b"FASTGEN_SERVE_TOKEN", b"ses\xffame")
    assert serve.main([str(SHIPPED_MODEL), "--local"]) == 1
    said = capsys.readouterr().err
    assert "FASTGEN_SERVE_TOKEN is no text in UTF-8" in said and len(said.splitlines()) == 1 and "ses" not in said
    assert keys_of("schlüssel", None) == ("schlüssel",)


def test_each_of_several_keys_opens_all_pages_but_those_of_health(service: Any) -> None:
    from fastapi.testclient import TestClient

    with TestClient(application.build(service, ("first-key", "second-key"))) as client:
        for key, status in (("first-key", 200), ("second-key", 200), ("first", 401), ("first-key,second-key", 401)):
            headers = {"Authorization": f"Bearer {key}"}
            assert client.post("/v1/generate", json=ASK, headers=headers).status_code == status, key
            assert client.get("/metrics", headers=headers).status_code == status
        refused = client.get("/metrics")
        assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")
        assert refused.json()["detail"].count(". ") == 0
        for path in ("/health", "/health/live", "/health/ready"):
            assert client.get(path).status_code == 200
    with TestClient(application.build(service, ())) as client:  # no key is not any key
        assert client.get("/metrics").status_code == 401


# ---------------------------------------------------------------------------------------------- ids and logs
def test_an_answer_has_the_requests_id_and_the_log_too(client: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "fastgen.serving")
    answer = client.post("/v1/generate", json=ASK, headers={"X-Request-Id": "job-17/line:4"})
    refused = client.post("/v1/generate", json={})
    assert answer.headers.get_list("x-request-id") == ["job-17/line:4"]
    (made,) = refused.headers.get_list("x-request-id")
    assert re.fullmatch(r"[0-9a-f]{32}", made)
    first, second = (record for record in caplog.records if record.name == "fastgen.serving")
    assert [getattr(first, name) for name in FIELDS[:4]] == ["job-17/line:4", "POST", "/v1/generate", 200]
    assert (second.request_id, second.status) == (made, 422)  # type: ignore[attr-defined]


@pytest.mark.parametrize("given", (b"", b"a b", b"\xff", b"x" * 129, b"<script>", b"a\tb"))
def test_an_id_that_no_log_should_have_is_replaced(given: bytes) -> None:
    scope = {"type": "http", "headers": [(b"x-request-id", given)]}
    found = request_id(scope)
    assert re.fullmatch(r"[0-9a-f]{32}", found) and request_id(scope) == found
    assert request_id({"type": "http", "headers": []}) != found


def test_the_proxy_hands_on_the_id_and_leaves_the_answer_alone() -> None:
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.extend(scope["headers"])
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message: Any) -> None:
        seen.append(message["headers"])

    scope = {"type": "http", "headers": [(b"accept", b"*/*"), (b"x-request-id", b"a b")]}
    asyncio.run(RequestIds(app, answers=False)(scope, None, send))  # type: ignore[arg-type]
    assert seen[0] == (b"accept", b"*/*") and seen[1][0] == b"x-request-id" and b" " not in seen[1][1]
    assert seen[2:] == [[]]


@pytest.fixture
def log() -> Iterator[logging.Logger]:
    log = logging.getLogger("fastgen.serving")
    before = log.handlers, log.propagate, log.level
    yield log
    log.handlers, log.propagate = before[:2]
    log.setLevel(before[2])


def test_a_log_of_json_has_an_object_a_line(
    client: Any, log: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    logs.log_to_stderr(logs.JSON)
    client.post("/v1/generate", json=ASK | {"text": ["1", "2 3"]}, headers={"X-Request-Id": "a"})
    try:
        raise ValueError("two\nlines")
    except ValueError:
        log.exception("it failed")
    request, failure = map(json.loads, capsys.readouterr().err.splitlines())
    assert request["request_id"] == "a" and request["level"] == "INFO" and request["time"].endswith("+00:00")
    assert [request[name] for name in ("method", "path", "status", "inputs")] == ["POST", "/v1/generate", 200, 2]
    assert request["message"].startswith("POST /v1/generate 200 ") and request["tokens"] > 2
    assert failure["error"].endswith("ValueError: two\nlines") and "request_id" not in failure


OTHERS = """
import logging, sys, warnings
from fastgen.serving import logs

own = logging.getLogger("own")
own.addHandler(logging.StreamHandler(sys.stderr))  # beside the root logger's, which would write the record again
logs.log_others_as_json()
for name in sys.argv[1:]:
    logging.getLogger(name).warning("of %s", name)
from transformers.utils.logging import get_logger
get_logger("transformers.x").warning("of transformers.x")
warnings.warn("a warning")
"""


def test_a_log_of_json_has_what_other_libraries_say_once() -> None:
    names = ["own", "torch.utils._pytree", "torch._dynamo", "without.handlers"]
    done = subprocess.run([sys.executable, "-c", OTHERS, *names], capture_output=True, text=True, check=True)
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    said = [f"of {name}" for name in (*names, "transformers.x")]
    assert [line["message"] for line in lines[:-1]] == said
    assert "UserWarning: a warning" in lines[-1]["message"]


def test_a_log_of_text_has_the_id_before_the_message(
    client: Any, log: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    logs.log_to_stderr(logs.TEXT)
    client.post("/v1/generate", json=ASK, headers={"X-Request-Id": "a"})
    assert re.fullmatch(r"INFO \d{4}-\S+ \S+ a -- POST /v1/generate 200 .*\n", capsys.readouterr().err)


# ---------------------------------------------------------------------------------------------- histograms
def test_a_histogram_counts_what_does_not_exceed_a_bound() -> None:
    histogram = Histogram("x_seconds", "What", (0.5, 1.0))
    for value in (0.25, 0.5, 0.75, 3.0):
        histogram.observe(value)
    assert list(histogram.lines('model="m"')) == [
        "# HELP x_seconds What",
        "# TYPE x_seconds histogram",
        'x_seconds_bucket{model="m",le="0.5"} 2',
        'x_seconds_bucket{model="m",le="1.0"} 3',
        'x_seconds_bucket{model="m",le="+Inf"} 4',
        'x_seconds_sum{model="m"} 4.5',
        'x_seconds_count{model="m"} 4',
    ]


def _counted(client: Any) -> dict[str, int]:
    parser = pytest.importorskip("prometheus_client.parser", reason="prometheus_client is not installed")
    text = client.get("/metrics").text
    families = {family.name: family for family in parser.text_string_to_metric_families(text)}
    found = {}
    for name in ("queue", "time_to_first_token", "time_per_output_token"):
        family = families[f"fastgen_{name}_seconds"]
        assert family.type == "histogram"
        for sample in family.samples:
            assert sample.labels["model"] == SHIPPED_MODEL.name
            assert sample.labels["version"] == fastgen.__version__
            if sample.name.endswith("_count"):
                found[name] = int(sample.value)
        buckets = [sample.value for sample in family.samples if sample.name.endswith("_bucket")]
        assert buckets == sorted(buckets) and buckets[-1] == found[name]
    return found


def test_each_input_is_in_the_histograms(client: Any) -> None:
    def more(**body: Any) -> list[int]:
        before = _counted(client)
        assert client.post("/v1/generate", json=body).status_code == 200
        return [count - before[name] for name, count in _counted(client).items()]

    assert more(text=TEXTS[:3], num_beams=2, max_new_tokens=9, min_new_tokens=4) == [3, 3, 3]
    assert more(text=TEXTS[0], max_new_tokens=1) == [1, 1, 0]  # no token after the first
    # The host's own `generate` decodes it, and does not tell when the first token comes.
    assert more(text=TEXTS[0], num_beams=2, do_sample=True, max_new_tokens=9, min_new_tokens=4) == [1, 0, 0]


# ---------------------------------------------------------------------------------------------- clients that leave
SCOPE = {"type": "http", "method": "POST", "path": "/"}
WHOLE = {"type": "http.request", "body": b"x", "more_body": False}
LEFT = {"type": "http.disconnect"}


def _received(*messages: Any) -> Any:
    left = list(messages)

    async def receive() -> Any:
        if not left:
            await asyncio.Event().wait()
        return left.pop(0)

    return receive


async def _nothing(message: Any) -> None: ...


def test_work_for_a_client_that_has_gone_is_cancelled() -> None:
    said: list[str] = []

    async def works(scope: Any, receive: Any, send: Any) -> None:
        assert await receive() == WHOLE
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            said.append("cancelled")
            raise

    asyncio.run(asyncio.wait_for(EndedWithClient(works)(SCOPE, _received(WHOLE, LEFT), _nothing), 60))
    assert said == ["cancelled"]


def test_an_answer_that_has_begun_hears_itself_that_the_client_has_gone() -> None:
    heard: list[Any] = []

    async def streams(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        heard.append(await receive())
        heard.append(await receive())

    asyncio.run(asyncio.wait_for(EndedWithClient(streams)(SCOPE, _received(WHOLE, LEFT), _nothing), 60))
    assert heard == [LEFT, LEFT]


def test_who_is_cancelled_cancels_the_work() -> None:
    async def run() -> list[str]:
        begun, said = asyncio.Event(), []

        async def works(scope: Any, receive: Any, send: Any) -> None:
            await receive()
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                said.append("ended")

        task = asyncio.ensure_future(EndedWithClient(works)(SCOPE, _received(WHOLE), _nothing))
        await asyncio.wait_for(begun.wait(), 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return said

    assert asyncio.run(run()) == ["ended"]


@pytest.mark.parametrize("error", (ValueError("x"), None))
def test_what_the_work_ends_with_is_passed_on(error: Exception | None) -> None:
    async def ends(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        if error is not None:
            raise error

    ending = EndedWithClient(ends)(SCOPE, _received(WHOLE), _nothing)
    if error is None:
        asyncio.run(ending)
    else:
        with pytest.raises(ValueError, match="x"):
            asyncio.run(ending)


@pytest.fixture
def port(service: Any) -> Iterator[int]:
    """Where the service listens, on uvicorn alone."""
    config = uvicorn.Config(application.build(service, None), port=0, lifespan="off", log_config=None)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    until(lambda: server.started)
    yield server.servers[0].sockets[0].getsockname()[1]
    server.should_exit = True
    thread.join(60)


def test_a_client_that_leaves_uvicorn_is_counted_and_frees_its_rows(
    service: Any, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    slowly(monkeypatch)
    counts, gone = service.engine.counts, service.statuses[GONE]
    cancelled, freed = counts.cancelled, counts.freed_rows
    body = json.dumps({"text": TEXTS[:4], "num_beams": 2, "min_new_tokens": 60, "max_new_tokens": 64}).encode()
    head = f"POST /v1/generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(f"{head}\r\n\r\n".encode() + body)
        until(lambda: counts.running == 8)
    until(lambda: counts.cancelled == cancelled + 1 and counts.freed_rows == freed + 8)
    until(lambda: service.statuses[GONE] == gone + 1)
    until(lambda: service.running == 0)
    another = http.client.HTTPConnection("127.0.0.1", port)
    another.request("POST", "/v1/generate", json.dumps(ASK), {"Content-Type": "application/json"})
    assert another.getresponse().status == 200
    another.close()


@pytest.mark.parametrize("path", ("/v1/generate", "/v1/completions", "/v1/chat/completions"))
def test_a_client_that_resets_the_connection_within_the_body_is_gone(service: Any, port: int, path: str) -> None:
    """It is no bad request: nobody was answered."""
    before = dict(service.statuses)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n"
    connection = socket.create_connection(("127.0.0.1", port))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closing it resets it
    connection.sendall(head.encode() + b'{"text": "')
    time.sleep(0.2)  # or the reset overtakes the request
    connection.close()
    until(lambda: service.statuses[GONE] == before.get(GONE, 0) + 1)
    assert service.statuses[400] == before.get(400, 0)


# ---------------------------------------------------------------------------------------------- cores
def _groups(folder: Path, files: dict[str, str], membership: str) -> list[float]:
    for name, text in files.items():
        (folder / "cgroup" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "cgroup" / name).write_text(text)
    (folder / "self").write_text(membership)
    return list(cores.limits(folder / "cgroup", folder / "self"))


@pytest.mark.parametrize(
    "files, membership, found",
    (
        ({"cpu.max": "150000 100000\n"}, "0::/\n", [1.5]),
        ({"cpu.max": "max 100000\n"}, "0::/\n", []),
        ({"a/b/cpu.max": "max 100000\n", "a/cpu.max": "400000 100000\n"}, "0::/a/b\n", [4.0]),
        ({"a/b/cpu.max": "50000 100000\n", "a/cpu.max": "400000 100000\n"}, "0::/a/b\n", [0.5, 4.0]),
        ({"cpu.max": "200000 100000\n"}, "0::/kubepods/pod1/abc\n", [2.0]),  # the host's path, in a container
        (
            {"cpu/d/cpu.cfs_quota_us": "300000\n", "cpu/d/cpu.cfs_period_us": "100000\n"},
            "4:memory:/d\n3:cpu:/d\n0::/\n",
            [3.0],
        ),
        (
            {"cpu,cpuacct/cpu.cfs_quota_us": "25000\n", "cpu,cpuacct/cpu.cfs_period_us": "50000\n"},
            "3:cpu,cpuacct:/docker/abc\n",
            [0.5],
        ),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, "3:cpu:/\n", []),
        ({}, "", []),
    ),
)
def test_limits_of_control_groups(tmp_path: Path, files: dict[str, str], membership: str, found: list[float]) -> None:
    assert _groups(tmp_path, files, membership) == found


def test_no_more_cores_than_the_process_may_run_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "limits", lambda: [1000.0])
    most = cores.available()
    assert 1 <= most < 1000
    monkeypatch.setattr(cores, "limits", lambda: [0.5, 3.0])
    assert cores.available() == 0.5


def test_threads_that_share_cores_are_told() -> None:
    assert cores.oversubscribed(2, 2, 4.0) is None
    assert cores.oversubscribed(1, 1, 0.5) is None  # there is no less
    said = cores.oversubscribed(4, 2, 6.0)
    assert said is not None and said.startswith("4 replicas of 2 threads share 6 cores, ")
    said = cores.oversubscribed(1, 8, 1.0)
    assert said is not None and said.startswith("8 threads share 1 core, ")


# ---------------------------------------------------------------------------------------------- TLS
def test_a_certificate_needs_its_key(tmp_path: Path) -> None:
    cert, key = certificate.made(tmp_path)
    certificates.check(None, None)
    certificates.check(cert, key)
    settings = serve.settings_of(
        serve.parser().parse_args([str(SHIPPED_MODEL), "--ssl-certfile", cert, "--ssl-keyfile", key]), None
    )
    assert (settings.ssl_certfile, settings.ssl_keyfile) == (cert, key)
    for files, what in (
        ((cert, None), "--ssl-certfile needs --ssl-keyfile, too"),
        ((None, key), "--ssl-keyfile needs --ssl-certfile, too"),
        ((str(tmp_path / "no"), key), "Cannot read --ssl-certfile .*no: No such file"),
        ((key, cert), "Cannot use --ssl-certfile .* with --ssl-keyfile"),
    ):
        with pytest.raises(InputError, match=what):
            certificates.check(*files)


def test_a_key_with_a_password_is_a_sentence_and_no_question(tmp_path: Path) -> None:
    cert, key = certificate.made(tmp_path)
    locked = str(tmp_path / "locked.pem")
    subprocess.run(
        ["openssl", "rsa", "-aes128", "-passout", "pass:sesame", "-in", key, "-out", locked],
        check=True,
        capture_output=True,
    )
    with pytest.raises(InputError, match="without a password"):
        certificates.check(cert, locked)
