"""The id of a request, by which a client finds the request in the logs: its header `X-Request-Id`, or a new one."""

from __future__ import annotations

import re
import uuid

from starlette.types import ASGIApp, Message, Receive, Scope, Send

_HEADER = b"x-request-id"
_KEY = "fastgen.request_id"  # the key in a request's scope
_VALID = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")  # others could not be told apart in a log


def request_id(scope: Scope) -> str:
    """The id of the request: the client's if it is short and plain, else one that is made at the first call."""
    found: str | None = scope.get(_KEY)
    if found is None:
        given = next((value for name, value in scope.get("headers", ()) if name == _HEADER), b"")
        found = scope[_KEY] = given.decode() if _VALID.fullmatch(given) else uuid.uuid4().hex
    return found


class RequestIds:
    """Puts the id into each request's header, for what runs inside, and into the answer's header."""

    def __init__(self, app: ASGIApp, answers: bool = True) -> None:
        """`answers`: whether the answer gets the header here."""
        self._app, self._answers = app, answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        header = (_HEADER, request_id(scope).encode())
        scope["headers"] = [*(one for one in scope.get("headers", ()) if one[0] != _HEADER), header]

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), header]}
            await send(message)

        await self._app(scope, receive, answer if self._answers else send)
