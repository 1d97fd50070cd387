"""Says what is wrong with a body, in one sentence that names the place."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fastapi.exceptions import RequestValidationError

from fastgen.pipeline.transformers.generation_fields import field_types
from fastgen.serving.options import MOST_FIELDS, TOO_MANY

# Errors of type, for a value that may have several types.
_KINDS = ("string_type", "list_type", "bool_type", "int_type", "float_type", "literal_error")
_MOST = 100  # errors that are looked at
_WHAT = re.compile(r"\w+ should")
_INSTEAD = {
    "max_length": "max_new_tokens counts without the prompt",
    "min_length": "min_new_tokens counts without the prompt",
    "max_time": "timeout is a request's time",
}
_INSTEAD_OF_OPENAI = {
    "do_sample": "temperature above 0 samples",
    "max_length": "max_tokens counts without the prompt",
    "max_new_tokens": "max_tokens is the same",
    "max_time": "timeout is a request's time",
    "min_length": "min_tokens counts without the prompt",
    "min_new_tokens": "min_tokens is the same",
    "num_return_sequences": "n is the same",
    "stop_strings": "stop is the same",
}
_NEEDED = {"/v1/completions": "prompt", "/v1/chat/completions": "messages"}  # the field that a request must have


class Invalid(NamedTuple):
    """What is wrong with a body."""

    status: int
    sentence: str
    field: str | None = None  # the innermost one, as in messages[0].content


def of_validation(error: RequestValidationError, content_type: str, path: str) -> Invalid:
    """The HTTP status, the sentence and the place; the input is not quoted, as it may be impossible in JSON.

    Args:
        path: the endpoint's.
    """
    errors = error.errors()[:_MOST]
    if errors[0]["type"] == "json_invalid":
        return Invalid(400, _no_json(error.body, errors[0]["loc"][-1], errors[0]["ctx"]["error"]))
    # If a value may have several types there is an error for each: the one that came furthest is the most useful, and
    # one that is not about the type says more.
    has_type = {one["loc"][1:2] for one in errors if one["type"] not in _KINDS}
    useful = [one for one in errors if one["type"] not in _KINDS or one["loc"][1:2] not in has_type]
    first = max(useful, key=lambda one: (len(_indices(one)), _indices(one)))
    place = _place(first, error.body)
    if first["type"] == TOO_MANY:
        return Invalid(422, _too_many(place), place or None)
    if not place:
        return Invalid(422, _no_object(first["type"] == "missing", content_type, _NEEDED.get(path, "text")))
    alike = [one for one in errors if _place(one, error.body) == place]
    return Invalid(422, _sentence(first, alike, place, path), place)


def _sentence(first: Mapping[str, Any], alike: Sequence[Any], place: str, path: str) -> str:
    """A sentence on the error `first`, for `alike`, all errors at this place."""
    if first["type"] == "extra_forbidden":
        return _not_offered(place, _INSTEAD if path == "/v1/generate" else _INSTEAD_OF_OPENAI)
    if first["type"] == "missing":
        return f"{place} is missing: the request needs it."
    if first["type"] in _KINDS:
        kinds = dict.fromkeys(one["msg"].removeprefix("Input should be ") for one in alike)
        return f"{place} should be {' or '.join(kinds)}."
    message = str(first["msg"])
    if _WHAT.match(message):
        return _WHAT.sub(lambda _: f"{place} should", message, count=1) + "."
    return f"{place}: {message}."


def _place(error: Mapping[str, Any], body: Any) -> str:
    """The place in a body, as in messages[0].content: pydantic names the types of a union, too, which are left out."""
    place, value = "", body
    for part in error["loc"][1:]:
        if isinstance(part, int) and isinstance(value, (list, tuple)):
            place, value = f"{place}[{part}]", value[part] if part < len(value) else None
        elif isinstance(value, dict) and (part in value or (error["type"], part) == ("missing", error["loc"][-1])):
            place, value = f"{place}.{_plain(str(part))}".lstrip("."), value.get(part)
    return place


def of_unreadable(cause: BaseException | None) -> str:
    """The sentence for a body that json refuses for another reason than a syntax error."""
    if isinstance(cause, UnicodeDecodeError):
        return f"The body is no JSON: byte {cause.start} is no {cause.encoding.upper()}."
    if isinstance(cause, RecursionError):
        return "The body is no JSON that can be read: lists or objects are nested too deep."
    if isinstance(cause, ValueError):
        return "The body is no JSON that can be read: a number has too many digits."
    return "The body is no JSON that can be read."


def _too_many(place: str) -> str:
    return f"{place or 'The body'} should have at most {MOST_FIELDS:,} fields."


def _indices(error: Mapping[str, Any]) -> Sequence[int]:
    return [part for part in error["loc"] if isinstance(part, int)]


def _no_object(is_empty: bool, content_type: str, needed: str) -> str:
    if is_empty:
        return f"The body is empty: send an object of JSON with the field `{needed}`."
    if content_type.split(";")[0].strip().lower().endswith("json"):
        return f"The body is no object of JSON: send an object with the field `{needed}`."
    return "The body is not said to be JSON: send the header Content-Type: application/json."


def _no_json(body: Any, place: int, what: str) -> str:
    line, column = 1 + str(body).count("\n", 0, place), place - str(body).rfind("\n", 0, place)
    return f"The body is no JSON at character {place} (line {line}, column {column}): {what}."


def _not_offered(place: str, instead: Mapping[str, str]) -> str:
    where = "/docs lists the fields that it offers"
    if place not in field_types() and place not in instead:
        return f"{place} is no field of the service: {where}."
    hint = f" ({instead[place]})" if place in instead else ""
    return f"{place} is a field of GenerationConfig that the service does not offer{hint}: {where}."


def _plain(field: str) -> str:
    """A name chosen by a client, cut short, and in characters that every log can hold."""
    return json.dumps(field[:80])[1:-1]
