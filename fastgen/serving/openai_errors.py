"""Errors in the form that clients of OpenAI's endpoints read."""

from __future__ import annotations

import contextlib
import json
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

_NOTE = "fastgen.openai"  # the key in a request's scope
_OTHERS = ("/v1/generate",)  # paths below /v1 that are no endpoints of OpenAI's
_CODES = {401: "invalid_api_key", 429: "rate_limit_exceeded", 504: "timeout"}


def is_openai(path: str) -> bool:
    """Whether errors of this path have the form of OpenAI's."""
    return path.startswith("/v1/") and path not in _OTHERS


def note(scope: Scope, field: str | None, code: str | None = None) -> None:
    """Note the field of the body that an error is about, and the error's code, before the error is answered."""
    scope.setdefault(_NOTE, {}).update(param=field, code=code)


def problem(status: int, message: str, field: str | None = None, code: str | None = None) -> dict[str, Any]:
    """An error with OpenAI's names; `status`: the HTTP status that the client gets."""
    kind = "server_error" if status >= 500 else "rate_limit_error" if status == 429 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": field, "code": code or _CODES.get(status)}}


def status_of(status: int) -> int:
    """The HTTP status for a client of OpenAI's: of values that cannot be used, too, it is 400."""
    return 400 if status == 422 else status


class OpenAIErrors:
    """Writes the errors of OpenAI's endpoints, which the application answers with a `detail`, in OpenAI's form.

    The header `x-should-retry` tells OpenAI's clients, which would send a request again after any 5xx, whether to.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not is_openai(scope["path"]):
            await self._app(scope, receive, send)
            return
        noted = scope.setdefault(_NOTE, {})
        start: Message | None = None
        body = b""

        async def rewritten(message: Message) -> None:
            nonlocal start, body
            if message["type"] == "http.response.start" and message["status"] >= 400:
                start = message
            elif start is None:
                await send(message)
            else:
                body += message.get("body", b"")
                if not message.get("more_body", False):
                    await _send(start, body, noted, send)

        await self._app(scope, receive, rewritten)


async def _send(start: Message, body: bytes, noted: dict[str, Any], send: Send) -> None:
    """Send an error whose whole body is known."""
    status = status_of(start["status"])
    headers = [(name, value) for name, value in start["headers"] if name.lower() != b"content-length"]
    with contextlib.suppress(ValueError, KeyError, TypeError):  # of an answer that is not ours
        body = json.dumps(problem(status, json.loads(body)["detail"], noted.get("param"), noted.get("code"))).encode()
    headers.append((b"content-length", b"%d" % len(body)))
    headers.append((b"x-should-retry", b"true" if status in (429, 503) else b"false"))
    await send({**start, "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
