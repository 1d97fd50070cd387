"""Ends a request whose client has gone before the answer began: nobody would read it."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class EndedWithClient:
    """Cancels the application's work for a client that has gone.

    Servers of ASGI only tell that a client has gone to those who go on receiving, and who computes an answer does not.
    A stream that has begun listens by itself.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        after_body: asyncio.Task[Message] | None = None
        has_begun = is_gone = False

        def look(told: asyncio.Task[Message]) -> None:
            nonlocal is_gone
            if told.cancelled() or told.exception() is not None or has_begun:
                return
            if told.result()["type"] == "http.disconnect":
                is_gone = work.cancel()

        async def read() -> Message:
            nonlocal after_body
            if after_body is not None:
                return await asyncio.shield(after_body)
            message = await receive()
            if message["type"] == "http.request" and not message.get("more_body", False):
                after_body = asyncio.ensure_future(_received(receive))
                after_body.add_done_callback(look)
            return message

        async def answer(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        work = asyncio.ensure_future(_run(self._app, scope, read, answer))
        try:
            await work
        except asyncio.CancelledError:
            if not is_gone:  # it is we who are cancelled
                raise
        finally:
            if after_body is not None:
                after_body.cancel()


async def _received(receive: Receive) -> Message:
    return await receive()


async def _run(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    await app(scope, receive, send)
