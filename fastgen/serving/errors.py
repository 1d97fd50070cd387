"""Says what is wrong with a body, in one sentence that names the place."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi.exceptions import RequestValidationError

from fastgen.pipeline.transformers.generation_fields import field_types

# Errors of type, for a value that may have several types.
_KINDS = ("string_type", "list_type", "bool_type", "int_type", "float_type", "literal_error")
_WHAT = re.compile(r"\w+ should")
_INSTEAD = {
    "max_length": "max_new_tokens counts without the prompt",
    "min_length": "min_new_tokens counts without the prompt",
    "max_time": "timeout is a request's time",
}


def of_validation(error: RequestValidationError, content_type: str) -> tuple[int, str]:
    """The HTTP status and the sentence; the input is not quoted, as it may be impossible in JSON."""
    errors = error.errors()
    if errors[0]["type"] == "json_invalid":
        return 400, _no_json(error.body, errors[0]["loc"][-1], errors[0]["ctx"]["error"])
    # If a value may have several types there is an error for each: the one that came furthest is the most useful.
    first = max(errors, key=lambda one: (len(_indices(one)), one["type"] not in _KINDS))
    field = next((str(part) for part in first["loc"] if part != "body"), "")
    if not field:
        return 422, _no_object(first["type"] == "missing", content_type)
    if first["type"] == "extra_forbidden":
        return 422, _not_offered(field)
    place = _plain(field) + "".join(f"[{index}]" for index in _indices(first))
    if first["type"] == "missing":
        return 422, f"{place} is missing: the request needs it."
    if first["type"] in _KINDS:
        depth = len(_indices(first))
        alike = [one for one in errors if field in one["loc"] and len(_indices(one)) == depth]
        kinds = dict.fromkeys(one["msg"].removeprefix("Input should be ") for one in alike)
        return 422, f"{place} should be {' or '.join(kinds)}."
    message = str(first["msg"])
    if _WHAT.match(message):
        return 422, _WHAT.sub(lambda _: f"{place} should", message, count=1) + "."
    return 422, f"{place}: {message}."


def of_unreadable(cause: BaseException | None) -> str:
    """The sentence for a body that json refuses for another reason than a syntax error."""
    if isinstance(cause, UnicodeDecodeError):
        return f"The body is no JSON: byte {cause.start} is no {cause.encoding.upper()}."
    if isinstance(cause, RecursionError):
        return "The body is no JSON that can be read: lists or objects are nested too deep."
    if isinstance(cause, ValueError):
        return "The body is no JSON that can be read: a number has too many digits."
    return "The body is no JSON that can be read."


def _indices(error: Mapping[str, Any]) -> Sequence[int]:
    return [part for part in error["loc"] if isinstance(part, int)]


def _no_object(is_empty: bool, content_type: str) -> str:
    if is_empty:
        return "The body is empty: send an object of JSON with the field `text`."
    if content_type.split(";")[0].strip().lower().endswith("json"):
        return "The body is no object of JSON: send an object with the field `text`."
    return "The body is not said to be JSON: send the header Content-Type: application/json."


def _no_json(body: Any, place: int, what: str) -> str:
    line, column = 1 + str(body).count("\n", 0, place), place - str(body).rfind("\n", 0, place)
    return f"The body is no JSON at character {place} (line {line}, column {column}): {what}."


def _not_offered(field: str) -> str:
    where = "/docs lists the fields that it offers"
    if field not in field_types():
        return f"{_plain(field)} is no field of the service: {where}."
    instead = f" ({_INSTEAD[field]})" if field in _INSTEAD else ""
    return f"{field} is a field of GenerationConfig that the service does not offer{instead}: {where}."


def _plain(field: str) -> str:
    """A name chosen by a client, cut short, and in characters that every log can hold."""
    return json.dumps(field[:80])[1:-1]
