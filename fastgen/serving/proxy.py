"""Limits connections in the process where Ray Serve listens: idle ones are ended, and their number is bounded.

Ray Serve runs uvicorn there and sets no such limit. Before it listens, it calls the function that an environment
variable names: `prepare`.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

CALLBACK = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
_SETTINGS = "fastgen_proxy"  # the environment variable with seconds and connections
_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\nConnection: close\r\n"
    b"Content-Length: %d\r\n\r\n%s"
)
_SAYS = b'{"detail":"The service has as many connections as it takes: send the request again later."}'


def environment(seconds: float, connections: int) -> dict[str, str]:
    """The environment variables that Ray's processes need for these limits."""
    return {CALLBACK: f"{__name__}.prepare", _SETTINGS: f"{seconds} {connections}"}


def prepare() -> list[Any]:
    """Limit the connections of this process's uvicorn; returns the middlewares for Ray Serve."""
    from starlette.middleware import Middleware
    from uvicorn.protocols.http import auto

    from fastgen.serving.request_ids import RequestIds

    seconds, connections = os.environ[_SETTINGS].split()
    # The protocol that uvicorn's configuration uses by default.
    auto.AutoHTTPProtocol = watched(auto.AutoHTTPProtocol, float(seconds), int(connections))
    # Ray Serve takes any id that a client sends: this gives it those that can be logged, with which it answers.
    return [Middleware(RequestIds, answers=False)]


def watched(protocol: Any, seconds: float, most: int) -> Any:
    """A subclass of uvicorn's protocol that ends a connection on which no request is answered for `seconds`.

    So connections end that have sent no head or only a part of it, that are idle, or that go on sending a refused body.
    """

    class Watched(protocol):
        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            if len(self.connections) > most:
                transport.write(_FULL % (len(_SAYS), _SAYS))
                transport.close()
                return
            self._last, self._since = None, self.loop.time()
            self._look()

        def _look(self) -> None:
            if self.transport.is_closing():
                return
            now = self.loop.time()
            if self.cycle is not self._last or (self.cycle is not None and not self.cycle.response_complete):
                self._last, self._since = self.cycle, now
            elif now - self._since >= seconds:
                self.transport.close()
                return
            self.loop.call_later(seconds / 8, self._look)

    return Watched
