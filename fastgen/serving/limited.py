"""Refuses requests by the size of the body and the time that the body takes, in the words of all refusals."""

from __future__ import annotations

import asyncio

from fastapi import HTTPException
from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fastgen.pipeline.errors import counted
from fastgen.serving.limits import Limits

RETRY_AFTER = 1  # seconds
HEALTH = ("/health", "/health/live", "/health/ready")  # paths that need no token, as those who ask have none


def refusal(status: int, detail: str) -> JSONResponse:
    """An error response with a reason and, where it helps, the time after which to try again."""
    headers = {}
    if status in (429, 503):
        headers["Retry-After"] = str(RETRY_AFTER)
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if status == 408:
        headers["Connection"] = "close"
    return JSONResponse({"detail": detail}, status, headers)


class Limited:
    """Refuses bodies that are too long (by header or by bytes received), too slow, or too many at a time."""

    def __init__(self, app: ASGIApp, limits: Limits) -> None:
        self._app, self._limits = app, limits
        self._receiving = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        said = headers.get(b"content-length", b"0")
        length = int(said[:20]) if said.isdigit() else 0
        if length > self._limits.body_bytes:
            await refusal(413, self._too_long())(scope, receive, send)
        elif not length and b"transfer-encoding" not in headers:
            await self._app(scope, receive, send)
        elif self._receiving >= self._limits.receiving:
            many = counted(self._receiving, "other body", "other bodies")
            await refusal(503, f"The service is receiving {many}: send the request again later.")(scope, receive, send)
        else:
            body = _Body(receive, self._limits.receive_seconds, self._limits.body_bytes, self._too_long())
            self._receiving += 1
            try:
                await self._app(scope, lambda: self._next(body), send)
            finally:
                self._receiving -= not body.is_whole

    async def _next(self, body: _Body) -> Message:
        was_whole = body.is_whole
        message = await body.receive()
        self._receiving -= body.is_whole and not was_whole
        return message

    def _too_long(self) -> str:
        return f"The body has more than {counted(self._limits.body_bytes, 'byte')}: send less at a time."


class _Body:
    """Receives a body; raises HTTPException, which FastAPI passes on, if it is too long or too late."""

    def __init__(self, receive: Receive, seconds: float, most_bytes: int, too_long: str) -> None:
        self._receive, self._seconds, self._most, self._too_long = receive, seconds, most_bytes, too_long
        self._end = asyncio.get_running_loop().time() + seconds
        self._read = 0
        self.is_whole = False  # also if the client has gone

    async def receive(self) -> Message:
        if self.is_whole:
            return await self._receive()
        try:
            left = self._end - asyncio.get_running_loop().time()
            message = await asyncio.wait_for(self._receive(), max(left, 0.0))
        except asyncio.TimeoutError:
            seconds = counted(round(self._seconds), "second")
            raise HTTPException(408, f"The body took longer than {seconds}: send it faster, or less of it.") from None
        self._read += len(message.get("body", b""))
        if self._read > self._most:
            raise HTTPException(413, self._too_long)
        self.is_whole = message["type"] == "http.disconnect" or not message.get("more_body", False)
        return message
