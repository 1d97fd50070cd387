"""Who may ask: requests need one of the service's keys as a bearer token."""

from __future__ import annotations

import hmac
from collections.abc import Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from fastgen.serving.limited import HEALTH, refusal


class Guarded:
    """Answers 401 to requests without a key, before a body is read; `/health` needs none."""

    def __init__(self, app: ASGIApp, keys: str | Sequence[str] | None) -> None:
        """`keys`: one of them opens all pages; None: no key is needed."""
        self._app = app
        self._keys = None if keys is None else [key.encode() for key in ([keys] if isinstance(keys, str) else keys)]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in HEALTH or self._is_right(scope):
            await self._app(scope, receive, send)
        else:
            await refusal(401, "The request needs the service's bearer token: send `Authorization: Bearer TOKEN`.")(
                scope, receive, send
            )

    def _is_right(self, scope: Scope) -> bool:
        if self._keys is None:
            return True
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, token = given.partition(b" ")
        # All of them, so that the time does not tell which key was right.
        are_right = [hmac.compare_digest(token.strip(), key) for key in self._keys]
        return any(are_right) and scheme.lower() == b"bearer"
