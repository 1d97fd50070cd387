"""`fastgen-serve` in a process of its own, and clients that say what they like."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from serving_kit import TEXTS, stock

from fastgen.demo.job import SHIPPED_MODEL

COMMAND = (sys.executable, "-m", "fastgen.cli.serve")
GENERATE = "/v1/generate"


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class Server:
    """A `fastgen-serve` in a process of its own, with a Ray of its own unless the flags have --local."""

    def __init__(
        self, log: Path, *flags: str, command: Sequence[str] = COMMAND, model: str | Path = SHIPPED_MODEL
    ) -> None:
        self.port = _free_port()
        words = [*command, str(model), "--port", str(self.port), *flags]
        environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        self.log = log
        with open(log, "wb") as file:
            self.process = subprocess.Popen(words, stderr=file, stdout=file, env=environment)
        end = time.monotonic() + 240
        while b"answers" not in log.read_bytes():
            assert self.process.poll() is None and time.monotonic() < end, log.read_text()
            time.sleep(0.1)

    def send(self, method: str, path: str, body: Any = None, timeout: float = 60) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            data = None if body is None else json.dumps(body)
            connection.request(method, path, data, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    def refusal(self, method: str, path: str, body: Any = None) -> tuple[int, str | None]:
        """The status, and what Retry-After says; 0 where nobody listens any more."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return answer.status, answer.getheader("Retry-After")
        except (OSError, http.client.HTTPException):
            return 0, None
        finally:
            connection.close()

    def ask(self, **body: Any) -> tuple[int, Any]:
        status, text = self.send("POST", "/v1/generate", body)
        return status, json.loads(text) if text.startswith("{") else text

    def metric(self, name: str) -> int:
        lines = self.send("GET", "/metrics")[1].splitlines()
        return next(int(line.split()[1]) for line in lines if line.split()[0].startswith(f"fastgen_{name}{{"))

    def stop(self) -> int:
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(timeout=120)


HEAD = "POST /v1/generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n"


def raw_request(server: Server, body: dict[str, Any]) -> socket.socket:
    """A connection whose request has been sent."""
    connection = socket.create_connection(("127.0.0.1", server.port))
    data = json.dumps(body).encode()
    connection.sendall(HEAD.format(len(data)).encode() + data)
    return connection


def until(what: Any, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end
        time.sleep(0.02)


# As long as the model can: 64 rows take more than a second.
LONG = dict(num_beams=8, min_new_tokens=110, max_new_tokens=112)


def check_a_client_that_goes_away(server: Server) -> None:
    """Its rows are freed."""
    freed, cancelled = server.metric("freed_rows_total"), server.metric("cancelled_total")
    connection = raw_request(server, dict(text=TEXTS[:8], **LONG))
    until(lambda: server.metric("running") == 64)
    connection.close()
    until(lambda: server.metric("freed_rows_total") - freed == 64)
    assert server.metric("cancelled_total") - cancelled == 1


def check_a_stream_whose_client_goes_away(server: Server) -> None:
    """Its row is freed."""
    freed = server.metric("freed_rows_total")
    beside = raw_request(server, dict(text=TEXTS[:7], **LONG))  # with which a step takes its time
    until(lambda: server.metric("running") == 56)
    connection = raw_request(server, dict(text=TEXTS[0], stream=True, min_new_tokens=110, max_new_tokens=112))
    assert b"200 OK" in connection.recv(1000)
    until(lambda: server.metric("running") == 57)
    connection.close()
    until(lambda: server.metric("freed_rows_total") - freed == 1)
    beside.close()
    until(lambda: server.metric("running") == 0)


def check_who_sends_nothing_or_too_slowly(server: Server) -> None:
    """They are not waited for."""
    silent = socket.create_connection(("127.0.0.1", server.port), timeout=120)
    slow = socket.create_connection(("127.0.0.1", server.port), timeout=120)
    slow.sendall(HEAD.format(15).encode() + b"{")
    assert slow.recv(1000).startswith(b"HTTP/1.1 408 ")
    assert silent.recv(1000) == b""
    for connection in (silent, slow):
        connection.close()


def asked_by_openais_client(server: Server) -> None:
    """Texts, streams and an error, as OpenAI's client reads them."""
    openai = pytest.importorskip("openai", reason="OpenAI's client is not installed")
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="any", max_retries=0, timeout=240)
    asked = dict(model=SHIPPED_MODEL.name, prompt=TEXTS[3], max_tokens=20, temperature=0)
    answer = client.completions.create(n=2, best_of=4, **asked)
    texts, scores = stock(TEXTS[3], num_beams=4, num_return_sequences=2, max_new_tokens=20)
    assert [choice.text for choice in answer.choices] == texts
    assert [choice.score for choice in answer.choices] == pytest.approx(scores, abs=1e-4)
    pieces = client.completions.create(stream=True, **asked)
    assert "".join(one.choices[0].text for one in pieces) == stock(TEXTS[3], max_new_tokens=20)[0][0]
    grown = ["", "", ""]
    for chunk in client.completions.create(stream=True, n=3, seed=6, **{**asked, "temperature": 2.5}):
        grown[chunk.choices[0].index] += chunk.choices[0].text
    options = dict(do_sample=True, top_k=0, temperature=2.5, num_return_sequences=3, max_new_tokens=20)
    assert grown == stock(TEXTS[3], 6, **options)[0] and len(set(grown)) == 3
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(**{**asked, "model": "other"})
    assert caught.value.code == "model_not_found"


def flags_of_keys_and_tls(folder: Path, cert: str, key: str) -> list[str]:
    """Flags of a server with two keys, a log of JSON and a certificate."""
    keys = folder / "keys"
    keys.write_text("first\nsecond\n")
    return ["--api-key-file", str(keys), "--log-format", "json", "--ssl-certfile", cert, "--ssl-keyfile", key]


def asked_with_keys_over_tls(server: Server, cert: str) -> dict[str, tuple[str, int]]:
    """Ask a server that has `flags_of_keys_and_tls`; returns the path and the status of each request, by its id."""
    assert f"https://127.0.0.1:{server.port}/v1/generate answers" in server.log.read_text()
    context = ssl.create_default_context(cafile=cert)

    def ask(path: str, identity: str, authorization: str) -> tuple[int, list[str], Any]:
        connection = http.client.HTTPSConnection("127.0.0.1", server.port, timeout=60, context=context)
        headers = {"Authorization": authorization, "X-Request-Id": identity, "Content-Type": "application/json"}
        body = {"text": TEXTS[3], "max_new_tokens": 3} if path == GENERATE else {"prompt": TEXTS[3], "max_tokens": 3}
        connection.request("POST", path, json.dumps(body), headers)
        answer = connection.getresponse()
        found = json.loads(answer.read())
        connection.close()
        return answer.status, answer.headers.get_all("x-request-id") or [], found

    found: dict[str, tuple[str, int]] = {}
    for path in (GENERATE, "/v1/completions"):
        status, ids, answer = ask(path, f"{path}/1", "Bearer second")
        assert (status, ids) == (200, [f"{path}/1"]), answer
        status, ids, refused = ask(path, f"{path}/2", "Bearer third")
        assert (status, ids) == (401, [f"{path}/2"])
        if path == GENERATE:
            assert set(refused) == {"detail"}
        else:
            assert refused["error"]["code"] == "invalid_api_key"
        status, (made,), _ = ask(path, "a b", "Bearer first")
        assert status == 200 and re.fullmatch("[0-9a-f]{32}", made)
        found |= {f"{path}/1": (path, 200), f"{path}/2": (path, 401), made: (path, 200)}
    return found


def logged(lines: Iterable[str]) -> dict[str, tuple[str, int]]:
    """The path and the status of each request in lines of JSON, by its id."""
    records = [json.loads(line) for line in lines]
    return {one["request_id"]: (one["path"], one["status"]) for one in records if one["message"].startswith("POST ")}
