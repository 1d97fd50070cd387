"""In the process where Ray Serve listens: connections that send nothing end, and there are only so many.

Ray Serve runs uvicorn there and sets no such limit. Before it listens, it calls what an environment variable names:
`prepare`.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

CALLBACK = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
_SETTINGS = "fastgen_proxy"  # environment variable: seconds and connections
_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\nConnection: close\r\n"
    b"Content-Length: %d\r\n\r\n%s"
)
_SAYS = b'{"detail":"The service has as many connections as it takes: send the request again later."}'


def environment(seconds: float, connections: int) -> dict[str, str]:
    """The variables that a Ray's processes need for these limits."""
    return {CALLBACK: f"{__name__}.prepare", _SETTINGS: f"{seconds} {connections}"}


def prepare() -> list[Any]:
    """Limit the connections of this process's uvicorn; returns what Ray Serve wants of it: no middlewares."""
    from uvicorn.protocols.http import auto

    seconds, connections = os.environ[_SETTINGS].split()
    # What uvicorn's configuration looks up when it is asked for no other.
    auto.AutoHTTPProtocol = watched(auto.AutoHTTPProtocol, float(seconds), int(connections))
    return []


def watched(protocol: Any, seconds: float, most: int) -> Any:
    """uvicorn's protocol for a connection, which ends one where no request is answered for `seconds`.

    So do those that have sent no head yet, or a part of one, that are idle, or go on sending what was refused.
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
