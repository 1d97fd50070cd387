"""Bodies with very many errors: validation stops at the first of each list, and a sentence says what is wrong."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from fastgen.serving.limits import Limits
from fastgen.serving.openai_schema import chat, completion
from fastgen.serving.options import MOST_FIELDS, question

MANY = 20_000
LIMITS = Limits()
CLASSES = {"/v1/generate": question, "/v1/completions": completion, "/v1/chat/completions": chat}
USER = {"role": "user", "content": "1"}


def fields(count: int) -> dict[str, int]:
    return {f"x{number}": 1 for number in range(count)}


# A path, a body, and what the answer says.
BODIES: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/generate", {"text": [1] * MANY}, "text[0] should be a valid string."),
    ("/v1/generate", {"text": "1", "bad_words_ids": [1] * MANY}, "bad_words_ids[0] should be a valid list."),
    ("/v1/generate", {"text": "1", "bad_words_ids": [["x"] * MANY]}, "bad_words_ids[0][0] should be a valid integer."),
    ("/v1/generate", {"text": "1", "sequence_bias": [1] * MANY}, "sequence_bias[0] should be a valid tuple"),
    ("/v1/generate", {"text": "1", "sequence_bias": [[["x"] * MANY, 1]]}, "sequence_bias[0][0][0] should be a valid"),
    ("/v1/generate", {"text": "1", "suppress_tokens": ["x"] * MANY}, "suppress_tokens[0] should be a valid integer."),
    ("/v1/generate", {"text": "1", "begin_suppress_tokens": [{}] * MANY}, "begin_suppress_tokens[0] should be a valid"),
    ("/v1/generate", {"text": "1", "forced_eos_token_id": ["x"] * MANY}, "forced_eos_token_id[0] should be a valid"),
    ("/v1/generate", {"text": "1"} | fields(MANY), "The body should have at most 1,000 fields."),
    ("/v1/completions", {"prompt": [None] * MANY}, "prompt[0] should be a valid string"),
    ("/v1/completions", {"prompt": [[None] * MANY]}, "prompt[0][0] should be a valid integer."),
    ("/v1/completions", {"prompt": [[None]] * MANY}, "prompt[0][0] should be a valid integer."),
    ("/v1/completions", {"prompt": [1] * MANY + ["x"]}, f"prompt[{MANY}] should be a valid integer."),
    ("/v1/completions", {"prompt": "1", "stop": [""] * MANY}, "stop[0] should have at least 1 character."),
    ("/v1/completions", {"prompt": "1", "logit_bias": fields(MANY)}, "logit_bias should have at most 1,000 fields."),
    ("/v1/completions", {"prompt": "1", "stream_options": fields(MANY)}, "stream_options should have at most 1,000"),
    ("/v1/completions", {"prompt": "1"} | fields(MANY), "The body should have at most 1,000 fields."),
    ("/v1/chat/completions", {"messages": [1] * MANY}, "messages[0] should be"),
    ("/v1/chat/completions", {"messages": [USER | {"content": [1] * MANY}]}, "messages[0].content[0] should be"),
    ("/v1/chat/completions", {"messages": [USER]} | fields(MANY), "The body should have at most 1,000 fields."),
]


def errors(kind: type[BaseModel], body: dict[str, Any]) -> int:
    with pytest.raises(ValidationError) as error:
        kind.model_validate(body)
    return error.value.error_count()


@pytest.mark.parametrize("path, body, what", BODIES, ids=lambda value: str(value)[:50])
def test_few_errors_are_collected(path: str, body: dict[str, Any], what: str) -> None:
    assert errors(CLASSES[path](LIMITS), body) <= 4  # one for each type that the value may have


def test_unknown_fields_are_counted_before_each_is_looked_at() -> None:
    kind = question(LIMITS)
    assert errors(kind, {"text": "1"} | fields(MOST_FIELDS - 1)) == MOST_FIELDS - 1
    assert errors(kind, {"text": "1"} | fields(MOST_FIELDS)) == 1


@pytest.fixture(scope="module")
def patient() -> Any:
    """A client of endpoints that check a body and answer nothing."""
    from fastapi.testclient import TestClient
    from serving_kit import model_settings

    from fastgen.serving.app import build

    class Nothing(SimpleNamespace):
        def __getattr__(self, name: str) -> Any:
            return Nothing()

    service = Nothing(limits=LIMITS, name=model_settings().model, statuses=Counter())
    with TestClient(build(service, None), raise_server_exceptions=False) as client:  # type: ignore[arg-type]
        yield client


@pytest.mark.parametrize("path, body, what", BODIES, ids=lambda value: str(value)[:50])
def test_the_answer_is_a_sentence(patient: Any, path: str, body: dict[str, Any], what: str) -> None:
    answer = patient.post(path, json=body)
    said = answer.json()["detail"] if path == "/v1/generate" else answer.json()["error"]["message"]
    assert answer.status_code == (422 if path == "/v1/generate" else 400)
    assert said.startswith(what)
