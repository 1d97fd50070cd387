"""A Ray cluster for as long as a command runs."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator

import ray

from fastgen.pipeline.errors import InputError, first_line

_PATIENCE_SECONDS = 10.0


@contextlib.contextmanager
def connected(address: str) -> Iterator[None]:
    """A cluster: that at `address`; without one that of RAY_ADDRESS, else one of this machine alone."""
    logging.getLogger("ray").setLevel(logging.ERROR)
    before = ray.is_initialized()
    if before and address:
        raise InputError(f"This process is connected to a Ray cluster: leave out the address {address}.")
    if not before:
        address = address or os.environ.get("RAY_ADDRESS") or "local"  # else Ray takes any cluster of this machine
        _check(address)
        # One of our own is for this machine alone: who reaches a cluster's ports may run anything.
        own = {"include_dashboard": False, "_node_ip_address": "127.0.0.1"} if address == "local" else {}
        terminated = signal.getsignal(signal.SIGTERM)
        try:
            ray.init(address, logging_level=logging.ERROR, log_to_driver=False, **own)
        except (ConnectionError, ValueError, RuntimeError, OSError) as error:
            where = "Ray" if address == "local" else f"the Ray cluster at {address}"
            raise InputError(f"Cannot start or reach {where}: {first_line(error)}.") from error
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, terminated)  # Ray puts its own in the place of the command's
    try:
        yield
    finally:
        if not before:
            ray.shutdown()


def _check(address: str) -> None:
    """Somebody listens there: Ray itself would wait for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdecimal():  # such as "auto"
        return
    try:
        socket.create_connection((host, int(port)), _PATIENCE_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise InputError(f"Cannot reach the Ray cluster at {address}: {first_line(error)}.") from error
