"""OpenAI's endpoints of speech: what is said in a file, as a text or as subtitles, for clients that speak to OpenAI."""

# No postponed annotations here: FastAPI looks up the classes.
import math
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import PlainTextResponse
from pydantic import BaseModel, ValidationError
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException

from fastgen.pipeline.transcription import subtitles
from fastgen.serving import openai_schema, speech_schema
from fastgen.serving.observed import work_of
from fastgen.serving.openai import PROBLEMS
from fastgen.serving.service import BaseService, Refusal
from fastgen.serving.services import check_model, of_speech
from fastgen.serving.speech import TRANSCRIBE, TRANSLATE, Asked, Transcript

_MOST_FIELDS = 50
_LEAST_TEMPERATURE = 0.01
_FORM = "send multipart/form-data with the field `file`"


def add_endpoints(app: FastAPI, service: BaseService, dependencies: Sequence[Any]) -> None:
    """Add the endpoints to the application; `dependencies`: FastAPI's, of each of them."""
    Fields = speech_schema.fields(service.limits)
    common: dict[str, Any] = {
        "dependencies": dependencies,
        "openapi_extra": speech_schema.form(Fields),
        "response_model": speech_schema.SpeechVerbose | speech_schema.SpeechText,
        "response_model_exclude_unset": True,
        "responses": {200: speech_schema.TEXTS}
        | {code: {"model": openai_schema.ProblemOfOpenAI, "description": what} for code, what in PROBLEMS.items()},
    }

    async def answer(request: Request, task: str) -> Any:
        speech = of_speech(service)
        speech.check_open()
        speech.running += 1
        try:
            data, fields = await _read(request, Fields)
            check_model(speech, fields.model)
            asked = _asked(fields, task)
            work_of(request.scope).inputs = 1
            found = await speech.transcribe(data, asked)
        finally:
            speech.running -= 1
        return _written(found, asked, fields.response_format)

    @app.post("/v1/audio/transcriptions", **common)
    async def transcriptions(request: Request) -> Any:
        """Write down what is said in a file, for Whisper models, as OpenAI's endpoint of this name does."""
        return await answer(request, TRANSCRIBE)

    @app.post("/v1/audio/translations", **common)
    async def translations(request: Request) -> Any:
        """Write down in English what is said in a file, for Whisper models, as OpenAI's endpoint of this name does."""
        return await answer(request, TRANSLATE)


async def _read(request: Request, kind: type[BaseModel]) -> tuple[bytes, Any]:
    """The file of a form, and the other fields; Refusal or RequestValidationError for what cannot be used."""
    said = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if said != "multipart/form-data":
        raise Refusal(400, f"The body is not said to be a form with a file: {_FORM}.")
    try:
        form = await request.form(max_files=1, max_fields=_MOST_FIELDS)
    except HTTPException as error:
        if error.status_code != 400:  # the body is too long, or too late
            raise
        raise Refusal(400, f"The body is no form that can be read ({error.detail.rstrip('.')}): {_FORM}.") from None
    try:
        file = form.get("file")
        if not isinstance(file, UploadFile):
            what = "is missing: the request needs it" if file is None else "is a text: send a file, with a name"
            raise Refusal(400, f"file {what}.", "file")
        values = _values(form)
        try:
            fields = kind.model_validate(values)
        except ValidationError as error:
            errors = [{**one, "loc": ("body", *one["loc"])} for one in error.errors()]
            raise RequestValidationError(errors, body=values) from None
        return await file.read(), fields
    finally:
        await form.close()


def _values(form: FormData) -> dict[str, Any]:
    """The fields of a form but the file; an empty one is as good as none."""
    values: dict[str, Any] = {}
    for key, value in form.multi_items():
        name = key.removesuffix("[]")
        if name == "file" or value == "":
            continue
        if isinstance(value, UploadFile):
            raise Refusal(400, f"{name[:80]!a} is a file: send a text.", name[:80])
        if name in speech_schema.NEUTRAL:
            if value not in speech_schema.NEUTRAL[name]:
                raise Refusal(400, f"{name} is not offered: leave it out.", name)
        elif name in speech_schema.LISTS:
            values.setdefault(name, []).append(value)
        elif key in values:
            raise Refusal(400, f"{key[:80]!a} is there twice: send it once.", key[:80])
        else:
            values[key] = value
    return values


def _asked(fields: Any, task: str) -> Asked:
    """What the fields ask for; Refusal for what cannot be used together."""
    is_verbose, times = fields.response_format == "verbose_json", fields.timestamp_granularities or ["segment"]
    if fields.timestamp_granularities is not None and not is_verbose:
        what = "timestamp_granularities is for a response_format of verbose_json: leave it out."
        raise Refusal(400, what, "timestamp_granularities")
    if 0 < fields.temperature < _LEAST_TEMPERATURE:
        raise Refusal(400, f"temperature should be 0, or at least {_LEAST_TEMPERATURE}.", "temperature")
    return Asked(
        task,
        language=fields.language,
        prompt=fields.prompt or "",
        temperature=fields.temperature,
        beams=fields.num_beams,
        seed=fields.seed,
        seconds=fields.timeout,
        segments="segment" in times,
        words="word" in times,
        names_language=is_verbose and task == TRANSCRIBE,
    )


def _written(found: Transcript, asked: Asked, form: str) -> Any:
    """The answer in a format."""
    text = found.text.strip()
    if form == "text":
        return PlainTextResponse(f"{text}\n")
    if form in ("srt", "vtt"):
        return PlainTextResponse(getattr(subtitles, form)(found.segments))
    answer: dict[str, Any] = {"text": text, "usage": {"type": "duration", "seconds": math.ceil(found.seconds)}}
    if form == "json":
        return answer
    answer |= {
        "task": asked.task,
        "language": found.language if asked.task == TRANSCRIBE else "english",
        "duration": found.seconds,
    }
    if asked.segments:
        answer["segments"] = [
            {
                **speech_schema.SpeechSegment(id=number, temperature=asked.temperature, **one._asdict()).model_dump(),
            }
            for number, one in enumerate(found.segments)
        ]
    if asked.words:
        answer["words"] = [{"word": one.text.strip(), "start": one.start, "end": one.end} for one in found.words]
    return answer
