"""Connects to a Ray cluster, or starts one on this machine, for as long as a command runs."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import ray
from ray._private import ray_constants
from ray.util.client import ray as client

from fastgen.pipeline.errors import InputError, first_line

_PATIENCE_SECONDS = 10.0
_WATCH_SECONDS = 5.0
_SILENCE_SECONDS = 30.0  # of the cluster's head; Ray waits for it for a minute
# Ray's variable for systems without clusters: with 0 all processes listen only on the loopback.
_CLUSTERS = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"


@contextlib.contextmanager
def connected(address: str, say: Callable[[str], None], environment: Mapping[str, str] | None = None) -> Iterator[None]:
    """Inside the block, be connected to the cluster at `address`, by default at RAY_ADDRESS, else to a local one.

    A local cluster listens on the loopback, and only obeys those who can read the user's token.

    Args:
        say: called with a sentence, from a thread, if the cluster's head does not answer.
        environment: variables for the processes of a local cluster; variables that are set already stay.

    Raises:
        InputError: the cluster cannot be reached or started, or others can read the token.
    """
    logging.getLogger("ray").setLevel(logging.ERROR)
    before = ray.is_initialized()
    if before and address:
        raise InputError(f"This process is connected to a Ray cluster: leave out the address {address}.")
    if not before:
        address = address or os.environ.get("RAY_ADDRESS") or "local"  # else Ray takes any cluster on this machine
        _check(address)
        terminated = signal.getsignal(signal.SIGTERM)
        try:
            if address == "local":
                _make_token_private()
                with _alone(environment or {}):
                    ray.init(address, logging_level=logging.ERROR, log_to_driver=False, include_dashboard=False)
            else:
                ray.init(address, logging_level=logging.ERROR, log_to_driver=False)
        except (ConnectionError, ValueError, RuntimeError, OSError) as error:
            where = "Ray" if address == "local" else f"the Ray cluster at {address}"
            raise InputError(f"Cannot start or reach {where}: {first_line(error)}.") from error
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, terminated)  # Ray replaces the command's handler
    ended = threading.Event()
    if not client.is_connected():  # a client at ray:// gets an error when the connection is lost
        head = ray.get_runtime_context().gcs_address
        threading.Thread(target=_watch, args=(head, ended, say), name="fastgen-watch", daemon=True).start()
    try:
        yield
    finally:
        ended.set()
        if not before:
            ray.shutdown()


@contextlib.contextmanager
def _alone(environment: Mapping[str, str]) -> Iterator[None]:
    """Inside the block, a Ray that is started listens on the loopback, and its processes have `environment`."""
    added = {name: value for name, value in {_CLUSTERS: "0", **environment}.items() if name not in os.environ}
    os.environ.update(added)
    offered = getattr(ray_constants, "ENABLE_RAY_CLUSTER", None)  # read when Ray was imported
    if _CLUSTERS in added:
        ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = offered
        for name in added:
            os.environ.pop(name, None)


def _make_token_private() -> None:
    """Make the file of Ray's token private: Ray creates it by the umask, and who reads it can run anything.

    Raises:
        InputError: the file cannot be made, or its mode cannot be changed.
    """
    chosen = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")  # if one of these variables is set, the token is elsewhere
    if os.environ.get("RAY_AUTH_MODE", "token").lower() != "token" or any(os.environ.get(name) for name in chosen):
        return
    path = Path.home() / ".ray" / "auth_token"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.exists():
            whole = path.with_name(f"{path.name}.{secrets.token_hex(8)}")  # else another command might read half of it
            with open(os.open(whole, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(secrets.token_hex(32))
            try:
                with contextlib.suppress(FileExistsError):
                    os.link(whole, path)
            finally:
                whole.unlink()
        if path.stat().st_mode & 0o077:
            path.chmod(0o600)
    except OSError as error:
        what = f"Cannot keep the token of Ray, {path}, from other users: {first_line(error)}"
        raise InputError(f"{what}. Make it yours, with mode 600.") from error


def _watch(head: str, ended: threading.Event, say: Callable[[str], None]) -> None:
    """Say that the head does not answer: after a minute Ray ends the process, with code 1 and without a message."""
    heard = time.monotonic()
    while not ended.wait(_WATCH_SECONDS):
        try:
            _reach(head)
        except OSError:
            if time.monotonic() - heard >= _SILENCE_SECONDS and not ended.is_set():
                say(f"the head of the Ray cluster, {head}, does not answer: Ray ends this command if that lasts.")
                return
        else:
            heard = time.monotonic()


def is_node_alive() -> bool:
    """Whether the node of this process lives; without it Ray does nothing for the process, nor ends it."""
    if client.is_connected():
        return True  # calls fail if the server's node is gone
    return ray.get_runtime_context().get_node_id() in living_nodes()


def living_nodes() -> set[str]:
    """The identifiers of the cluster's living nodes."""
    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}


def _check(address: str) -> None:
    """Raise InputError if nobody listens at `address`: Ray itself would wait for minutes."""
    if not address.rpartition(":")[2].isdecimal():  # such as "auto"
        return
    try:
        _reach(address.removeprefix("ray://"))
    except (OSError, OverflowError) as error:
        raise InputError(f"Cannot reach the Ray cluster at {address}: {first_line(error)}.") from error


def _reach(address: str) -> None:
    host, _, port = address.rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), _PATIENCE_SECONDS).close()
