"""Requests as they end: a line in the log for each, and a count by status."""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fastgen.serving.limited import HEALTH

LOG = logging.getLogger("fastgen.serving")
GONE = 499  # the status of a request whose client has gone, as nginx has it
_WORK = "fastgen.work"  # in the scope of a request
_QUIET = (*HEALTH, "/metrics")  # asked all the time
_LONGEST_PATH = 200


@dataclass
class Work:
    """What a request has been: inputs, and tokens that were generated for it."""

    inputs: int = 0
    tokens: int = 0


def work_of(scope: Scope) -> Work:
    """The place where whoever answers a request notes its size."""
    found: Work = scope.setdefault(_WORK, Work())
    return found


class Observed:
    """Logs each request without its texts, its query and its headers; counts those to /v1 by their status."""

    def __init__(self, app: ASGIApp, statuses: Counter[int]) -> None:
        self._app, self._statuses = app, statuses

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, work, status = time.monotonic(), work_of(scope), GONE
        is_whole = False

        async def seen(message: Message) -> None:
            nonlocal status, is_whole
            if message["type"] == "http.response.start":
                status = message["status"]
            is_whole = message["type"] == "http.response.body" and not message.get("more_body", False)
            await send(message)

        try:
            await self._app(scope, receive, seen)
        except Exception:
            status = 500
            raise
        finally:
            path = scope["path"]
            if status < 400 and not is_whole:  # a stream that its client has left
                status = GONE
            if path.startswith("/v1/"):
                self._statuses[status] += 1
            if path not in _QUIET or status >= 400:
                LOG.info(
                    "%s %s %d %.0f ms, inputs %d, tokens %d",
                    scope["method"],
                    json.dumps(path[:_LONGEST_PATH])[1:-1],  # on one line, whatever a client calls it
                    status,
                    1000 * (time.monotonic() - began),
                    work.inputs,
                    work.tokens,
                )
