"""Who may use a Ray that a command begins, and what is said when a cluster's head goes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install -c constraints.txt -e '.[ray]'")

from fastgen.distributed import connection


def test_a_head_that_goes_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_WATCH_SECONDS", 0.02)
    monkeypatch.setattr(connection, "_SILENCE_SECONDS", 0.2)
    ended, said = threading.Event(), list[str]()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        head = f"127.0.0.1:{listener.getsockname()[1]}"
        thread = threading.Thread(target=connection._watch, args=(head, ended, said.append))
        thread.start()
        thread.join(1.0)
        assert thread.is_alive() and not said
    thread.join(60.0)
    assert not thread.is_alive()
    assert said == [f"the head of the Ray cluster, {head}, does not answer: Ray ends this command if that lasts."]


def test_nothing_is_said_when_a_command_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The head may go first, while it is being asked."""
    monkeypatch.setattr(connection, "_WATCH_SECONDS", 0.02)
    monkeypatch.setattr(connection, "_SILENCE_SECONDS", 0.0)
    ended, said = threading.Event(), list[str]()

    def gone(head: str) -> None:
        ended.set()
        raise ConnectionRefusedError

    monkeypatch.setattr(connection, "_reach", gone)
    connection._watch("127.0.0.1:1", ended, said.append)
    assert not said


_OWN = """
import sys
import ray
from fastgen.distributed.connection import connected
with connected("", print):
    print(ray.get_runtime_context().gcs_address, flush=True)
    sys.stdin.read()
"""
_RUN = """
import sys
import ray
ray.init(sys.argv[1], log_to_driver=False)
print("ran", ray.get(ray.remote(lambda: 1).remote(), timeout=60))
"""


@pytest.mark.slow
def test_only_who_has_the_token_may_use_a_ray_of_our_own(tmp_path: Path) -> None:
    """Its ports are open at all addresses of the machine."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | {"HOME": str(tmp_path)}
    other = own | {"HOME": str(tmp_path / "other")}
    command = [sys.executable, "-c", _OWN]
    with subprocess.Popen(command, env=own, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        address = process.stdout.readline().strip()
        token = (tmp_path / ".ray" / "auth_token").read_text()
        ends = []
        for environment in (
            other | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token},
            other | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token[::-1]},
            other | {"RAY_AUTH_MODE": "disabled"},
        ):
            run = [sys.executable, "-c", _RUN, address]
            done = subprocess.run(run, env=environment, capture_output=True, text=True, timeout=240)
            ends.append(("ran 1" in done.stdout, done.returncode))
        process.stdin.close()
        assert process.wait(timeout=120) == 0
    assert ends == [(True, 0), (False, 1), (False, 1)]
