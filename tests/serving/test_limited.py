"""Slow bodies, many of them, and connections that send nothing: without Ray, some without a model."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import uvicorn
from fastapi import FastAPI, Request
from uvicorn.protocols.http import h11_impl, httptools_impl

from fastgen.pipeline.errors import counted
from fastgen.serving import app as http
from fastgen.serving import limited, proxy
from fastgen.serving.limits import Limits
from fastgen.serving.observed import GONE, Observed
from fastgen.serving.request_ids import RequestIds

SLOW = 0.3  # seconds that a body may take


@pytest.mark.parametrize("number, said", ((0, "0 bytes"), (1, "1 byte"), (2, "2 bytes")))
def test_numbers_and_nouns(number: int, said: str) -> None:
    assert counted(number, "byte") == said
    assert counted(number, "body", "bodies").endswith("y" if number == 1 else "ies")


class _Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    detail: Any


WHOLE = (b'{"text": "1", "max_new_tokens": 2}',)
HALVES = (b'{"text": "1", ', b'"max_new_tokens": 2}')


async def _send(app: Any, body: Sequence[bytes], release: asyncio.Event | None = None) -> _Answer:
    """A request on the event loop of the others; after its first piece it waits for `release`."""
    left, messages = list(body), list[Any]()

    async def receive() -> Any:
        if not left:
            await asyncio.Event().wait()  # the client stays
        if len(left) < len(body) and release is not None:
            await release.wait()
        return {"type": "http.request", "body": left.pop(0), "more_body": bool(left)}

    async def send(message: Any) -> None:
        messages.append(message)

    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(b"".join(body)))]
    scope = dict(type="http", asgi={"version": "3.0"}, http_version="1.1", method="POST", path="/v1/generate")
    scope |= dict(raw_path=b"/v1/generate", root_path="", scheme="http", query_string=b"", headers=headers)
    await app({**scope, "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2)}, receive, send)
    start, *bodies = messages
    said = {name.decode(): value.decode() for name, value in start["headers"]}
    return _Answer(start["status"], said, json.loads(b"".join(one.get("body", b"") for one in bodies)).get("detail"))


def _limited(service: Any, monkeypatch: pytest.MonkeyPatch, **limits: Any) -> Any:
    monkeypatch.setattr(service, "limits", Limits(**limits))
    return http.build(service, None)


def test_a_slow_body_is_given_up(service: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    app = _limited(service, monkeypatch, receive_seconds=SLOW)

    async def run() -> tuple[_Answer, float]:
        began = time.monotonic()
        return await _send(app, HALVES, asyncio.Event()), time.monotonic() - began

    answer, took = asyncio.run(run())
    assert (answer.status, answer.headers["connection"]) == (408, "close")
    assert "The body took longer than" in answer.detail and SLOW <= took < 20 * SLOW
    assert _receiving(app) == 0


def test_so_many_bodies_come_at_the_same_time(service: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    app = _limited(service, monkeypatch, receiving=2)

    async def run() -> list[_Answer]:
        release = asyncio.Event()
        first = [asyncio.ensure_future(_send(app, HALVES, release)) for _ in range(2)]
        while app.middleware_stack is None or _receiving(app) < 2:
            await asyncio.sleep(0.01)
        third = await _send(app, WHOLE)
        release.set()
        return [third, *await asyncio.gather(*first), await _send(app, WHOLE)]

    refused, *others = asyncio.run(run())
    assert (refused.status, refused.headers["retry-after"]) == (503, "1")
    assert "The service is receiving 2 other bodies" in refused.detail
    assert [answer.status for answer in others] == [200, 200, 200]
    assert _receiving(app) == 0


def _receiving(app: Any) -> int:
    layer = app.middleware_stack
    while not isinstance(layer, limited.Limited):
        layer = getattr(layer, "_app", None) or layer.app
    return layer._receiving


class _Served:
    """uvicorn in a thread, with the protocol that Ray Serve's proxies get."""

    def __init__(self, protocol: Any) -> None:
        app = FastAPI()

        @app.post("/")
        async def read(request: Request) -> int:
            return len(await request.body())

        @app.get("/slow")
        async def slow() -> str:
            await asyncio.sleep(3 * SLOW)
            return "done"

        config = uvicorn.Config(app, port=0, http=protocol, lifespan="off", log_config=None)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run)
        self._thread.start()
        end = time.monotonic() + 60
        while not self._server.started:
            assert time.monotonic() < end
            time.sleep(0.01)
        self.port = self._server.servers[0].sockets[0].getsockname()[1]

    def connect(self, sent: bytes = b"") -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=60)
        connection.sendall(sent)
        return connection

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(60)


@pytest.fixture(params=(httptools_impl.HttpToolsProtocol, h11_impl.H11Protocol), ids=("httptools", "h11"))
def served(request: pytest.FixtureRequest) -> Iterator[_Served]:
    server = _Served(proxy.watched(request.param, SLOW, 3))
    yield server
    server.close()


def _ended(connection: socket.socket) -> bool:
    try:
        return connection.recv(1000) == b""
    except ConnectionResetError:
        return True


def test_connections_on_which_nothing_is_answered_end(served: _Served) -> None:
    silent, half = served.connect(), served.connect(b"GET / HTTP/1.1\r\nHos")
    began = time.monotonic()
    with silent, half:
        assert _ended(silent) and _ended(half)
        assert time.monotonic() - began < 20 * SLOW
    with served.connect(b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n") as asked:  # an answer may take longer
        assert b"200 OK" in asked.recv(1000)
        asked.sendall(b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n")  # on the same connection
        while b"200 OK" not in asked.recv(1000):
            pass
        while not _ended(asked):
            pass


def test_there_are_only_so_many_connections(served: _Served) -> None:
    many = [served.connect() for _ in range(3)]
    with served.connect() as refused:
        answer = b""
        while piece := refused.recv(1000):
            answer += piece
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503 ") and b"Retry-After: 1" in head
    assert "as many connections" in json.loads(body)["detail"]
    for connection in many:
        connection.close()


def test_ray_serves_proxies_are_given_the_protocol(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray.serve", reason="Ray Serve is not installed")
    from ray.serve._private.utils import call_function_from_import_path
    from uvicorn.protocols.http import auto

    monkeypatch.setattr(auto, "AutoHTTPProtocol", auto.AutoHTTPProtocol)
    variables = proxy.environment(30.0, 1024)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    (middleware,) = call_function_from_import_path(variables[proxy.CALLBACK])
    assert (middleware.cls, middleware.kwargs) == (RequestIds, {"answers": False})
    config = uvicorn.Config(FastAPI())
    config.load()
    assert config.http_protocol_class.__name__ == "Watched"


def test_a_stream_that_its_client_leaves_is_no_success() -> None:
    """Its status was sent at the start."""
    statuses: Counter[int] = Counter()

    async def streams(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x", "more_body": True})
        if scope["path"] == "/v1/whole":
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def nothing(*_: Any) -> None: ...

    for path in ("/v1/left", "/v1/whole"):
        scope = {"type": "http", "path": path, "method": "POST"}
        asyncio.run(Observed(streams, statuses)(scope, nothing, nothing))
    assert statuses == {GONE: 1, 200: 1}
