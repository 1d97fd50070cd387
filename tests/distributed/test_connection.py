"""Who may use a Ray that a command begins, and what is said when a cluster's head goes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import listening
import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install -c constraints.txt -e '.[ray]'")

from ray._private import ray_constants

from fastgen.distributed import connection
from fastgen.pipeline.errors import InputError


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
    """Its ports are open to all users of the machine, and to nobody elsewhere."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | {"HOME": str(tmp_path)}
    # Without the variable, Ray looks for a head of this machine at its address on the network.
    other = own | {"HOME": str(tmp_path / "other"), connection._CLUSTERS: "0"}
    command = [sys.executable, "-c", _OWN]
    with subprocess.Popen(command, env=own, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        address = process.stdout.readline().strip()
        file = tmp_path / ".ray" / "auth_token"
        token, mode = file.read_text(), file.stat().st_mode & 0o777
        found = listening.addresses(listening.below(process.pid))
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
    assert mode == 0o600
    assert len(found) > 8 and [one for one in found if not listening.is_loopback(one[0])] == []


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def test_the_token_is_its_users_alone(home: Path) -> None:
    before = os.umask(0)
    try:
        connection._make_token_private()
    finally:
        os.umask(before)
    token = home / ".ray" / "auth_token"
    assert token.stat().st_mode & 0o777 == 0o600 and len(made := token.read_text()) == 64
    token.chmod(0o644)  # as Ray makes it
    connection._make_token_private()
    assert token.stat().st_mode & 0o777 == 0o600 and token.read_text() == made
    assert [file.name for file in token.parent.iterdir()] == ["auth_token"]


@pytest.mark.parametrize("name, value", (("RAY_AUTH_MODE", "disabled"), ("RAY_AUTH_TOKEN", "x")))
def test_no_token_is_made_where_none_is_read(
    home: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    connection._make_token_private()
    assert list(home.iterdir()) == []


def test_a_token_that_cannot_be_made_is_a_sentence(home: Path) -> None:
    (home / ".ray").write_text("")
    with pytest.raises(InputError, match=r"Cannot keep the token of Ray, .*auth_token, from other users: .* mode 600"):
        connection._make_token_private()


def test_variables_of_a_ray_that_begins_here_are_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(connection._CLUSTERS, raising=False)
    monkeypatch.setenv("THEIRS", "kept")
    offered = ray_constants.ENABLE_RAY_CLUSTER
    with connection._alone({"THEIRS": "other", "OURS": "there"}):
        assert (os.environ["THEIRS"], os.environ["OURS"], os.environ[connection._CLUSTERS]) == ("kept", "there", "0")
        assert not ray_constants.ENABLE_RAY_CLUSTER
    assert "OURS" not in os.environ and connection._CLUSTERS not in os.environ
    assert offered == ray_constants.ENABLE_RAY_CLUSTER
