"""What the command says and checks when it starts a service, with Ray or without, and how signals stop one."""

from __future__ import annotations

import contextlib
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from types import FrameType

from fastgen.pipeline.errors import InputError, first_line, tell
from fastgen.serving.settings import ServiceSettings


def say(text: str) -> None:
    tell(f"fastgen-serve: {text}")


def warn_if_open(settings: ServiceSettings) -> None:
    """Say so if others than this machine's users may use the service, without a key."""
    host = settings.host
    if host not in ("127.0.0.1", "localhost", "::1") and settings.token is None:
        say(f"Whoever reaches {host} may use this service: ask for a key with FASTGEN_SERVE_TOKEN or --api-key-file.")


def bound(host: str, port: int) -> socket.socket:
    """A socket at this address, which does not listen yet; InputError if there is none to be had."""
    try:
        found = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        try:
            if sys.platform != "win32":  # where it would let two services share a port
                found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if found.family == socket.AF_INET6:
                found.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            found.bind((host, port))
        except (OSError, OverflowError):
            found.close()
            raise
    except (OSError, OverflowError) as error:
        what = f"Cannot listen at {host}, port {port}: {first_line(error)}"
        raise InputError(f"{what}. Choose others with --host and --port.") from error
    return found


def say_ready(settings: ServiceSettings, path: str) -> None:
    """Say where the service answers; `path`: of the endpoint."""
    scheme = "http" if settings.ssl_certfile is None else "https"
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    say(f"{scheme}://{host}:{settings.port}{path} answers: /docs describes it, Ctrl-C stops it.")


def say_stopping() -> None:
    say("The service is stopping: requests that run are still answered, new ones are refused.")


@contextlib.contextmanager
def stop_signals() -> Iterator[threading.Event]:
    """Inside the block, SIGINT and SIGTERM set the event."""
    stopped = threading.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        stopped.set()

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stopped
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
