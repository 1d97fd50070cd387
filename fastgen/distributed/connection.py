"""A Ray cluster for as long as a command runs."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator

import ray
from ray.util.client import ray as client

from fastgen.pipeline.errors import InputError, first_line

_PATIENCE_SECONDS = 10.0
_WATCH_SECONDS = 5.0
_SILENCE_SECONDS = 30.0  # of the head; Ray waits for it for a minute


@contextlib.contextmanager
def connected(address: str, say: Callable[[str], None]) -> Iterator[None]:
    """A cluster: that at `address`; without one that of RAY_ADDRESS, else one of this machine alone.

    Args:
        say: is called with a sentence, from a thread, if the cluster's head has gone.
    """
    logging.getLogger("ray").setLevel(logging.ERROR)
    before = ray.is_initialized()
    if before and address:
        raise InputError(f"This process is connected to a Ray cluster: leave out the address {address}.")
    if not before:
        address = address or os.environ.get("RAY_ADDRESS") or "local"  # else Ray takes any cluster of this machine
        _check(address)
        own = {"include_dashboard": False} if address == "local" else {}
        terminated = signal.getsignal(signal.SIGTERM)
        try:
            ray.init(address, logging_level=logging.ERROR, log_to_driver=False, **own)
        except (ConnectionError, ValueError, RuntimeError, OSError) as error:
            where = "Ray" if address == "local" else f"the Ray cluster at {address}"
            raise InputError(f"Cannot start or reach {where}: {first_line(error)}.") from error
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, terminated)  # Ray puts its own in the place of the command's
    ended = threading.Event()
    if not client.is_connected():  # at ray://, where a lost connection is an error
        head = ray.get_runtime_context().gcs_address
        threading.Thread(target=_watch, args=(head, ended, say), name="fastgen-watch", daemon=True).start()
    try:
        yield
    finally:
        ended.set()
        if not before:
            ray.shutdown()


def _watch(head: str, ended: threading.Event, say: Callable[[str], None]) -> None:
    """Say that the head is gone: after a minute Ray ends the process, with code 1 and without a word."""
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
    """Whether this process still has a node; without one Ray does nothing for it, and doesn't end it either."""
    if client.is_connected():
        return True  # its server's node, without which calls fail
    return ray.get_runtime_context().get_node_id() in living_nodes()


def living_nodes() -> set[str]:
    """The identifiers of the cluster's nodes that live."""
    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}


def _check(address: str) -> None:
    """Somebody listens there: Ray itself would wait for minutes."""
    if not address.rpartition(":")[2].isdecimal():  # such as "auto"
        return
    try:
        _reach(address.removeprefix("ray://"))
    except (OSError, OverflowError) as error:
        raise InputError(f"Cannot reach the Ray cluster at {address}: {first_line(error)}.") from error


def _reach(address: str) -> None:
    host, _, port = address.rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), _PATIENCE_SECONDS).close()
