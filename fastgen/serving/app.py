"""The HTTP application of the service, in FastAPI, with limits that apply before anything is parsed."""

# No postponed annotations here: FastAPI could not look up the class of a body, which is made within a function.
from collections.abc import Sequence
from typing import Any

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import PlainTextResponse, Response, StreamingResponse
from fastapi.security import HTTPBearer
from fastapi_offline import FastAPIOffline
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

import fastgen
from fastgen.serving import errors, metrics, openai, openai_speech
from fastgen.serving.authorization import Guarded
from fastgen.serving.disconnects import EndedWithClient
from fastgen.serving.limited import Limited, refusal
from fastgen.serving.observed import GONE, Observed, work_of
from fastgen.serving.openai_errors import OpenAIErrors, note
from fastgen.serving.options import STREAMS, Answer, Problem, question
from fastgen.serving.request_ids import RequestIds
from fastgen.serving.service import BaseService, Refusal
from fastgen.serving.services import of_texts

_PROBLEMS = {
    400: "the body is no JSON",
    401: "without the bearer token",
    408: "the body took too long",
    413: "the body is too long",
    422: "an option or a text that can't be used",
    429: "the queue is full; Retry-After says when to try again",
    500: "the model failed",
    503: "out of memory, too many bodies at a time, or the service is stopping; Retry-After says when to try again",
    504: "it took longer than it may",
}


def build(service: BaseService, token: str | Sequence[str] | None, *, behind_ray: bool = False) -> FastAPI:
    """Make the application; with `token`, all pages but /health need it, or one of several, as a bearer token.

    Args:
        behind_ray: Ray Serve's proxy ends requests whose clients have gone, and answers with the requests' ids.
    """
    app = FastAPIOffline(  # a page of documentation that loads nothing from elsewhere
        title="fastgen",
        version=fastgen.__version__,
        description="Text generation in a batch that always runs: each request gets what `generate` gives it alone.",
    )
    Question = question(service.limits)
    problems: dict[int | str, dict[str, Any]] = {
        code: {"model": Problem, "description": what} for code, what in _PROBLEMS.items()
    }
    # Only gives the page a field for the token: `Guarded` checks it, before a body is read.
    bearer = [Depends(HTTPBearer(auto_error=False))]

    @app.post("/v1/generate", response_model=Answer, responses={200: STREAMS, **problems}, dependencies=bearer)
    async def generate(body: Question, request: Request) -> Any:  # type: ignore[valid-type]
        """Generate for one text or several. With `stream`, server-sent events: `delta`s, then each input's `text`."""
        asked, work = body.model_dump(exclude_unset=True), work_of(request.scope)  # type: ignore[attr-defined]
        if asked.get("stream"):
            return StreamingResponse(await of_texts(service).stream(asked, work), media_type="text/event-stream")
        return await of_texts(service).generate(asked, work)

    openai.add_endpoints(app, service, bearer)
    openai_speech.add_endpoints(app, service, bearer)

    @app.get("/health/live", responses={503: {"model": Problem}})
    @app.get("/health", responses={503: {"model": Problem}})
    async def live() -> dict[str, str]:
        """Whether the service lives; one that is stopping does."""
        if not service.engine.is_alive:
            raise HTTPException(503, "The engine has stopped: the replica is being replaced.")
        return {"status": "ok"}

    @app.get("/health/ready", responses={503: {"model": Problem}})
    async def ready() -> dict[str, str]:
        """Whether the service takes requests; one that is stopping does not."""
        service.check_open()
        return await live()

    @app.get("/metrics", response_class=PlainTextResponse, dependencies=bearer)
    async def counters() -> str:
        """Counters, gauges and histograms for Prometheus."""
        return metrics.written(
            service.name, service.engine.counts, service.statuses, service.engine.latencies.histograms
        )

    _handle_errors(app)
    # The last middleware is the outermost.
    if not behind_ray:
        app.add_middleware(EndedWithClient)
    app.add_middleware(Limited, limits=service.limits)
    app.add_middleware(Guarded, keys=token)
    app.add_middleware(OpenAIErrors)
    app.add_middleware(Observed, statuses=service.statuses)
    app.add_middleware(RequestIds, answers=not behind_ray)
    return app


def _handle_errors(app: FastAPI) -> None:
    """Answer every error with a `Problem`, in words that say what to do."""

    @app.exception_handler(Refusal)
    async def refused(request: Request, error: Refusal) -> Response:
        note(request.scope, error.field, error.code)
        return refusal(error.status, error.message)

    @app.exception_handler(ClientDisconnect)
    async def gone(request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=GONE)  # for the log: nobody reads it

    @app.exception_handler(HTTPException)
    async def failed(request: Request, error: HTTPException) -> Response:
        detail = str(error.detail)
        if isinstance(error.__cause__, ClientDisconnect):  # while the body came
            return await gone(request, error.__cause__)
        if error.status_code == 400:  # from FastAPI, about an error of json
            detail = errors.of_unreadable(error.__cause__)
        elif error.status_code == 404:
            detail = "The service has no such page: /docs lists those that it has."
        elif error.status_code == 405:
            detail = f"The service does not take {request.method} here: /docs lists what it takes."
        answer = refusal(error.status_code, detail)
        answer.headers.update(error.headers or {})
        return answer

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        found = errors.of_validation(error, request.headers.get("content-type", ""), request.url.path)
        note(request.scope, found.field)
        return refusal(found.status, found.sentence)
