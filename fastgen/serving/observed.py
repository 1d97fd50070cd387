"""Logs a line for each request when it ends, and counts requests by status."""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fastgen.serving.limited import HEALTH
from fastgen.serving.request_ids import request_id

LOG = logging.getLogger("fastgen.serving")
GONE = 499  # the status of a request whose client has gone, as in nginx
_WORK = "fastgen.work"  # the key in a request's scope
_QUIET = (*HEALTH, "/metrics")  # requested all the time
_LONGEST_PATH = 200
FIELDS = ("request_id", "method", "path", "status", "ms", "inputs", "tokens")  # of a record, beside its message


@dataclass
class Work:
    """The size of a request: inputs, and generated tokens."""

    inputs: int = 0
    tokens: int = 0


def work_of(scope: Scope) -> Work:
    """The object in a request's scope in which the size is noted."""
    found: Work = scope.setdefault(_WORK, Work())
    return found


class Observed:
    """Logs each request, without texts, query and headers; counts requests to /v1 by status."""

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
            if status < 400 and not is_whole:  # a stream whose client has gone
                status = GONE
            if path.startswith("/v1/"):
                self._statuses[status] += 1
            if path not in _QUIET or status >= 400:
                shown = json.dumps(path[:_LONGEST_PATH])[1:-1]  # on one line, whatever the client sends
                ms = round(1000 * (time.monotonic() - began))
                values = (request_id(scope), scope["method"], shown, status, ms, work.inputs, work.tokens)
                LOG.info(
                    "%s %s %d %d ms, inputs %d, tokens %d",
                    *values[1:],
                    extra=dict(zip(FIELDS, values, strict=True)),
                )
