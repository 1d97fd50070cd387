"""`fastgen-serve --local`: one replica, served by uvicorn alone, in a process in which Ray cannot be imported."""

from __future__ import annotations

import concurrent.futures
import json
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import certificate
import listening
import pytest
from serve_process import (
    LONG,
    Server,
    asked_by_openais_client,
    asked_with_keys_over_tls,
    check_a_client_that_goes_away,
    check_a_stream_whose_client_goes_away,
    check_who_sends_nothing_or_too_slowly,
    flags_of_keys_and_tls,
    logged,
    until,
)
from serving_kit import TEXTS, stock

from fastgen.cli import serve
from fastgen.demo.job import SHIPPED_MODEL

# Every import of Ray fails, in any thread.
WITHOUT_RAY = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "ray":
            raise ImportError("Ray is blocked here")

sys.meta_path.insert(0, Blocked())
from fastgen.cli import serve

code = serve.main(sys.argv[1:])
assert "ray" not in sys.modules

import json, torch, fastgen
kept = fastgen.status().prefixes
print("ended", json.dumps([fastgen.configure().prefix_cache, torch.get_num_threads(), kept]))
sys.exit(code)
"""
COMMAND = (sys.executable, "-c", WITHOUT_RAY)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = ("--local", "--max-rows", "64", "--receive-timeout", "8")
    server = Server(tmp_path_factory.mktemp("local") / "log", *flags, command=COMMAND)
    yield server
    assert server.stop() == 0, server.log.read_text()


def test_answers_are_those_of_generate(server: Server) -> None:
    jobs = [(TEXTS[i], dict(num_beams=1 + 3 * (i % 2), max_new_tokens=8 + i)) for i in range(24)]
    with concurrent.futures.ThreadPoolExecutor(16) as threads:
        answers = list(threads.map(lambda job: server.ask(text=job[0], **job[1]), jobs))
    for (text, options), (status, answer) in zip(jobs, answers, strict=True):
        assert status == 200
        assert answer["outputs"][0][0]["text"] == stock(text, **options)[0][0]
    assert server.metric("rows_total") > 2 * server.metric("steps_total")  # they did share


def test_openais_client_is_answered(server: Server) -> None:
    asked_by_openais_client(server)


def test_a_client_that_goes_away_frees_its_rows(server: Server) -> None:
    check_a_client_that_goes_away(server)


def test_a_stream_whose_client_goes_away_frees_its_row(server: Server) -> None:
    check_a_stream_whose_client_goes_away(server)


def test_who_sends_nothing_or_too_slowly_is_not_waited_for(server: Server) -> None:
    check_who_sends_nothing_or_too_slowly(server)


def test_requests_are_lines_of_its_output(server: Server) -> None:
    server.ask(text="sesame", max_new_tokens=3)
    until(lambda: "POST /v1/generate 200" in server.log.read_text())
    assert "sesame" not in server.log.read_text() and "GET /metrics" not in server.log.read_text()


def test_metrics_have_histograms(server: Server) -> None:
    before = server.metric("time_per_output_token_seconds_count")
    server.send("POST", "/v1/completions", {"prompt": TEXTS[:2], "max_tokens": 5, "temperature": 0})
    assert server.metric("time_per_output_token_seconds_count") == before + 2


@pytest.mark.parametrize("most", (0, 1_000_000))
def test_keys_ids_logs_of_json_tls_threads_and_kept_prefixes(tmp_path: Path, most: int) -> None:
    cert, key = certificate.made(tmp_path)
    flags = ["--local", "--threads", "1", "--prefix-cache", str(most), *flags_of_keys_and_tls(tmp_path, cert, key)]
    server = Server(tmp_path / "log", *flags, command=COMMAND)
    try:
        statuses = asked_with_keys_over_tls(server, cert)
        until(lambda: all(f'"{one}"' in server.log.read_text() for one in statuses))
        assert server.stop() == 0
        lines = server.log.read_text().splitlines()
        assert logged(line for line in lines if line.startswith("{")) == statuses
        assert [line for line in lines if not line.startswith(("{", "fastgen-serve: ", "ended "))] == []
        limit, threads, kept = json.loads(lines[-1].removeprefix("ended "))
        assert (limit, threads) == (most, 1)
        assert kept["hits"] == kept["calls"] - 1 >= 3 if most else not kept  # the same text each time
    finally:
        server.process.kill()


def test_it_listens_on_the_loopback_alone_at_one_port(server: Server) -> None:
    found = listening.addresses(listening.below(server.process.pid))
    assert [port for _, port, _ in found] == [server.port] and listening.is_loopback(found[0][0])


@pytest.mark.parametrize("number", (signal.SIGINT, signal.SIGTERM))
def test_the_end_lets_those_that_run_finish(tmp_path: Path, number: int) -> None:
    """Others are refused, and told when to come back."""
    server = Server(tmp_path / "log", "--local", command=COMMAND)
    try:
        with concurrent.futures.ThreadPoolExecutor(6) as threads:
            last = [threads.submit(server.ask, text=TEXTS[:16], timeout=120, **LONG) for _ in range(6)]
            until(lambda: server.metric("running") > 0)
            server.process.send_signal(number)
            until(lambda: server.refusal("GET", "/health/ready") == (503, "1"))
            for _ in range(3):
                assert server.refusal("POST", "/v1/generate", b'{"text": "1"}') == (503, "1")
                assert server.refusal("POST", "/v1/completions", b'{"prompt": "1"}') == (503, "1")
                assert server.refusal("GET", "/health/live")[0] == server.refusal("GET", "/health")[0] == 200
            assert not all(one.done() for one in last)
        wanted = [stock(text, **LONG)[0][0] for text in TEXTS[:16]]
        answers = [one.result() for one in last]
        # Those whose body came after the signal are refused.
        assert {status for status, _ in answers} <= {200, 503} and answers.count((200, answers[0][1])) >= 1
        for status, answer in answers:
            assert status == 503 or [outputs[0]["text"] for outputs in answer["outputs"]] == wanted
        assert server.process.wait(timeout=240) == 0, server.log.read_text()
    finally:
        server.process.kill()


@pytest.mark.parametrize(
    "flags, what",
    (
        (["--ray", "auto"], "--local is one copy of the model without Ray: leave out --ray"),
        (["--replicas", "2", "--gpus-per-replica", "1"], "leave out --replicas and --gpus-per-replica"),
        (["--tokenizer", "/no/such"], "--tokenizer /no/such: the path does not exist"),
    ),
)
def test_bad_arguments_are_a_sentence(flags: list[str], what: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert serve.main([str(SHIPPED_MODEL), "--local", *flags]) == 1
    assert what in capfd.readouterr().err


def test_a_port_in_use_is_a_sentence(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert serve.main([str(SHIPPED_MODEL), "--local", "--port", str(port)]) == 1
    assert f"Cannot listen at 127.0.0.1, port {port}" in capfd.readouterr().err
