"""`fastgen-serve` itself: many clients, clients that go away, a replica that is killed, an end without losses."""

from __future__ import annotations

import concurrent.futures
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
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
    raw_request,
    until,
)
from serving_kit import TEXTS, stock

from fastgen.bench.report import image
from fastgen.cli import serve
from fastgen.demo.job import SHIPPED_MODEL
from fastgen.serving.base_engine import EXPIRED

pytest.importorskip("ray.serve", reason="Ray Serve is not installed: pip install -c constraints.txt -e '.[ray]'")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("serve") / "log", "--max-rows", "64", "--receive-timeout", "8")
    yield server
    assert server.stop() == 0, server.log.read_text()


def test_answers_are_those_of_generate(server: Server) -> None:
    chance = random.Random(2)
    jobs = [
        (chance.choice(TEXTS), dict(num_beams=chance.choice([1, 4]), max_new_tokens=chance.choice([8, 24])))
        for _ in range(64)
    ]
    with concurrent.futures.ThreadPoolExecutor(64) as threads:
        answers = list(threads.map(lambda job: server.ask(text=job[0], **job[1]), jobs))
    for (text, options), (status, answer) in zip(jobs, answers, strict=True):
        assert status == 200
        assert answer["outputs"][0][0]["text"] == stock(text, **options)[0][0]
    assert server.metric("rows_total") > 4 * server.metric("steps_total")


def test_openais_client_is_answered(server: Server) -> None:
    asked_by_openais_client(server)


def test_its_page_shows_in_a_browser(server: Server) -> None:
    if (browser := image.browser()) is None:
        pytest.skip(f"needs a browser: none of {', '.join(image.BROWSERS)} is on the path")
    dom = image.headless(browser, f"http://127.0.0.1:{server.port}/docs", "--dump-dom", "--virtual-time-budget=8000")
    for shown in ("/v1/generate", "Generate", "/health", "/metrics", "Question"):
        assert shown in dom


def test_a_client_that_goes_away_frees_its_rows(server: Server) -> None:
    check_a_client_that_goes_away(server)


def test_a_stream_whose_client_goes_away_frees_its_row(server: Server) -> None:
    check_a_stream_whose_client_goes_away(server)


def test_a_request_beyond_its_time_frees_its_rows(server: Server) -> None:
    freed = server.metric("freed_rows_total")
    status, answer = server.ask(text=TEXTS[:8], timeout=0.3, **LONG)
    assert (status, answer["detail"]) == (504, EXPIRED)
    until(lambda: server.metric("freed_rows_total") - freed == 64)


def test_a_slow_client_holds_no_row(server: Server) -> None:
    """One that sends its body byte by byte, and one that does not read its stream."""
    slow = socket.create_connection(("127.0.0.1", server.port))
    slow.sendall(
        b"POST /v1/generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 15\r\n\r\n{"
    )
    deaf = raw_request(server, dict(text=TEXTS[0], stream=True, min_new_tokens=100, max_new_tokens=120))
    until(lambda: server.metric("running") == 0)
    assert server.ask(text=TEXTS[1], num_beams=4, max_new_tokens=20)[0] == 200
    slow.sendall(b'"text": "1 2"}')
    assert b"200 OK" in slow.recv(1000)
    for connection in (slow, deaf):
        connection.close()


def test_who_sends_nothing_or_too_slowly_is_not_waited_for(server: Server) -> None:
    check_who_sends_nothing_or_too_slowly(server)
    assert server.send("GET", "/health/ready")[0] == 200


def test_it_listens_on_the_loopback_alone(server: Server) -> None:
    found = listening.addresses(listening.below(server.process.pid))
    assert server.port in {port for _, port, _ in found} and len(found) > 8
    assert [one for one in found if not listening.is_loopback(one[0])] == []


def test_others_cannot_read_the_token_of_its_ray(server: Server) -> None:
    assert (Path.home() / ".ray" / "auth_token").stat().st_mode & 0o777 == 0o600


def test_requests_are_lines_of_a_replicas_log(server: Server) -> None:
    server.ask(text="sesame", max_new_tokens=3)
    folder = Path(os.environ.get("RAY_TMPDIR", "/tmp")) / "ray"
    (log,) = folder.glob(f"session_*_{server.process.pid}/logs/serve/replica_fastgen_generate_*.log")
    until(lambda: re.search(r"POST /v1/generate 200 \d+ ms, inputs 1, tokens [23]", log.read_text()))
    assert "sesame" not in log.read_text() and "GET /metrics" not in log.read_text()


def test_keys_of_a_file_ids_logs_of_json_and_tls(tmp_path: Path) -> None:
    """On Ray, too: the proxy answers with the id, once, whatever the client sent."""
    cert, key = certificate.made(tmp_path)
    server = Server(tmp_path / "log", "--threads", "1", *flags_of_keys_and_tls(tmp_path, cert, key))
    try:
        statuses = asked_with_keys_over_tls(server, cert)
        (log,) = _replica_logs(server)
        until(lambda: all(f'"{one}"' in log.read_text() for one in statuses))
        assert logged(log.read_text().splitlines()) == statuses
        assert server.stop() == 0
    finally:
        server.process.kill()


def _replica_logs(server: Server) -> set[Path]:
    folder = Path(os.environ.get("RAY_TMPDIR", "/tmp")) / "ray"
    return set(folder.glob(f"session_*_{server.process.pid}/logs/serve/replica_fastgen_generate_*.log"))


def test_a_replica_that_is_killed_costs_no_silence(tmp_path: Path) -> None:
    """Every request is answered, or refused in words; after a while all are answered again."""
    server = Server(tmp_path / "log", "--replicas", "2", "--cpus-per-replica", "0.5")
    try:
        with concurrent.futures.ThreadPoolExecutor(16) as threads:
            jobs = [threads.submit(server.ask, text=TEXTS[i % 40], num_beams=4, max_new_tokens=100) for i in range(120)]
            time.sleep(1.0)
            victims = subprocess.run(["pgrep", "-f", "ray::ServeReplica"], capture_output=True, text=True, check=True)
            own = [int(pid) for pid in victims.stdout.split() if _is_below(int(pid), server.process.pid)]
            old = _replica_logs(server)
            os.kill(own[0], signal.SIGKILL)
            answers = [job.result(timeout=120) for job in jobs]
        assert {status for status, _ in answers} <= {200, 500, 503}
        assert sum(status == 200 for status, _ in answers) > 60
        for (status, answer), i in zip(answers, range(120), strict=True):
            if status == 200:
                assert answer["outputs"][0][0]["text"] == stock(TEXTS[i % 40], num_beams=4, max_new_tokens=100)[0][0]

        def has_a_new_replica_answered() -> bool:
            """One that starts while the service ends would answer until the next look tells it to refuse."""
            answered = server.ask(text="1", max_new_tokens=2)[0] == 200
            return answered and any(" 200 " in log.read_text() for log in _replica_logs(server) - old)

        until(has_a_new_replica_answered)
        _end_lets_those_that_run_finish(server)
    finally:
        server.process.kill()


def test_a_server_whose_node_dies_ends(tmp_path: Path) -> None:
    """With a code and a sentence, and does not wait for ever, answering nothing."""
    server = Server(tmp_path / "log")
    try:
        found = subprocess.run(
            ["pgrep", "-x", "-P", str(server.process.pid), "raylet"], capture_output=True, check=True
        )
        os.kill(int(found.stdout), signal.SIGKILL)
        assert server.process.wait(timeout=240) == 1
    finally:
        server.process.kill()
    assert "fastgen-serve: Ray's node on this machine has died" in server.log.read_text()


def _end_lets_those_that_run_finish(server: Server) -> None:
    """Others are refused by all replicas, and told when to come back; nobody hears 404."""
    options, asked = dict(num_beams=8, min_new_tokens=110, max_new_tokens=112), b'{"text": "1"}'
    with concurrent.futures.ThreadPoolExecutor(6) as threads:
        last = [threads.submit(server.ask, text=TEXTS[:16], **options) for _ in range(6)]
        time.sleep(0.5)
        server.process.send_signal(signal.SIGTERM)
        until(lambda: all(server.refusal("GET", "/health/ready") == (503, "1") for _ in range(6)), 10)
        for _ in range(6):
            assert server.refusal("POST", "/v1/generate", asked) == (503, "1")
            assert server.refusal("GET", "/health/live")[0] == server.refusal("GET", "/health")[0] == 200
        assert not all(one.done() for one in last)
        heard = set()
        while server.process.poll() is None:
            heard.add(server.refusal("POST", "/v1/generate", asked)[0])
            time.sleep(0.01)
    assert heard == {503, 0}  # at the end nobody listens
    wanted = [stock(text, **options)[0][0] for text in TEXTS[:16]]
    for one in last:
        status, answer = one.result()
        assert status == 200 and [outputs[0]["text"] for outputs in answer["outputs"]] == wanted
    assert server.process.wait(timeout=120) == 0


def _is_below(pid: int, ancestor: int) -> bool:
    while pid > 1:
        if pid == ancestor:
            return True
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            return False
    return False


@pytest.mark.parametrize(
    "flags, what",
    (
        (["/no/such/model"], "MODEL /no/such/model: the path does not exist"),
        ([str(SHIPPED_MODEL), "--tokenizer", "{bare}"], "bare has no tokenizer"),
        ([str(SHIPPED_MODEL), "--port", "0"], "--port"),
        ([str(SHIPPED_MODEL), "--no-such-flag"], "Unrecognized arguments"),
        ([str(SHIPPED_MODEL), "--source-lang", "en"], "has no languages"),
        ([str(SHIPPED_MODEL), "--ray", "127.0.0.1:1"], "Cannot reach the Ray cluster"),
    ),
)
def test_bad_arguments_are_a_sentence(
    flags: list[str], what: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(SHIPPED_MODEL, bare, ignore=shutil.ignore_patterns("tokenizer*"))
    assert serve.main([flag.format(bare=bare) for flag in flags]) == 1
    assert what in capfd.readouterr().err


@pytest.fixture
def taken() -> Iterator[int]:
    """A port where somebody listens already."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield int(listener.getsockname()[1])


def test_a_port_in_use_is_a_sentence(taken: int, capfd: pytest.CaptureFixture[str]) -> None:
    assert serve.main([str(SHIPPED_MODEL), "--port", str(taken)]) == 1
    assert f"port {taken}" in capfd.readouterr().err


_ON_A_CLUSTER = """
import os, sys
import ray
from fastgen.cli import serve
ray.init("local", include_dashboard=False, log_to_driver=False)
os.environ["RAY_ADDRESS"] = "auto"  # where it listens may be another machine: only Ray can tell
code = serve.main(sys.argv[1:])
try:
    ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")
except ValueError:
    print("nothing is there")
sys.exit(code)
"""


def test_a_port_in_use_on_a_cluster_is_a_sentence_and_leaves_nothing_there(taken: int) -> None:
    # In a process of its own: Ray once ended that of the tests here, where it had begun twenty times, without a word.
    command = [sys.executable, "-c", _ON_A_CLUSTER, str(SHIPPED_MODEL), "--port", str(taken)]
    environment = os.environ | {"RAY_BACKEND_LOG_LEVEL": "warning"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 1 and done.stdout.splitlines()[-1] == "nothing is there", done.stderr
    (said,) = (line for line in done.stderr.splitlines() if line.startswith("fastgen-serve: "))
    assert said.startswith("fastgen-serve: Cannot start the service: ") and f":{taken}" in said
