"""The service over HTTP: FastAPI, with limits before anything is parsed."""

# No postponed annotations here: FastAPI could not look up a body's class that is made within a function.
import secrets
from typing import Any

from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from fastapi_offline import FastAPIOffline
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import fastgen
from fastgen.serving.options import Answer, Problem, question
from fastgen.serving.service import Refusal, Service

RETRY_AFTER = 1  # seconds


def build(service: Service, token: str | None) -> FastAPI:
    """The application; with `token`, /v1 needs it as a bearer token."""
    app = FastAPIOffline(  # whose page loads nothing from elsewhere
        title="fastgen",
        version=fastgen.__version__,
        description="Text generation in a batch that always runs: each request gets what `generate` gives it alone.",
    )
    bearer = HTTPBearer(auto_error=False)

    def authorised(credentials: HTTPAuthorizationCredentials | None = Depends(bearer)) -> None:  # noqa: B008
        if token is None:
            return
        given = "" if credentials is None else credentials.credentials
        if not secrets.compare_digest(given.encode(), token.encode()):
            raise HTTPException(401, "a valid bearer token is needed", {"WWW-Authenticate": "Bearer"})

    Question = question(service.limits)
    problems: dict[int | str, dict[str, Any]] = {
        code: {"model": Problem, "description": what}
        for code, what in {
            400: "the body is no JSON",
            401: "without the bearer token",
            413: "the body is too long",
            422: "an option or a text that can't be used",
            429: "the queue is full; Retry-After says when to try again",
            500: "the model failed",
            503: "out of memory, or the service is stopping",
            504: "it took longer than it may",
        }.items()
    }

    @app.post("/v1/generate", response_model=Answer, responses=problems, dependencies=[Depends(authorised)])
    async def generate(body: Question) -> Any:  # type: ignore[valid-type]
        """Generate for one text or several. With `stream`, server-sent events: `delta`s, then each input's `text`."""
        asked = body.model_dump(exclude_unset=True)  # type: ignore[attr-defined]
        if asked.get("stream"):
            return StreamingResponse(await service.stream(asked), media_type="text/event-stream")
        return await service.generate(asked)

    @app.get("/health", responses={503: {"model": Problem}})
    async def health() -> dict[str, str]:
        """Whether the service can answer."""
        if not service.engine.is_alive:
            raise HTTPException(503, "the engine has stopped")
        return {"status": "ok"}

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> str:
        """Counters and gauges for Prometheus."""
        return service.metrics()

    @app.exception_handler(Refusal)
    async def refused(request: Request, refusal: Refusal) -> Response:
        headers = {"Retry-After": str(RETRY_AFTER)} if refusal.status in (429, 503) else None
        return JSONResponse({"detail": refusal.message}, refusal.status, headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        # Not the input itself: it may be what JSON can't say.
        errors = error.errors()
        # `text` may be one or several: what is said of the other kind is of no use.
        first = next((one for one in errors if one["type"] not in ("string_type", "list_type")), errors[0])
        place = ".".join([str(part) for part in first["loc"] if part != "body"][:1])
        detail = f"{place}: {first['msg']}" if place else str(first["msg"])
        status = 400 if first["type"] == "json_invalid" else 422
        return JSONResponse({"detail": detail.encode("ascii", "backslashreplace").decode()}, status)

    app.add_middleware(_Limited, most_bytes=service.limits.body_bytes)
    return app


class _Limited:
    """Refuses bodies that are too long, by what they say or by what comes."""

    def __init__(self, app: ASGIApp, most_bytes: int) -> None:
        self._app, self._most = app, most_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        read, detail = 0, f"the body has more than {self._most} bytes"
        said = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        if said.isdigit() and int(said[:20]) > self._most:
            await JSONResponse({"detail": detail}, 413)(scope, receive, send)
            return

        async def counted() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > self._most:
                raise HTTPException(413, detail)  # which FastAPI lets through
            return message

        await self._app(scope, counted, send)
