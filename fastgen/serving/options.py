"""The fields of a request: fields of transformers' GenerationConfig, with the types of the command's flags."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, create_model, model_validator
from pydantic_core import PydanticCustomError

from fastgen.pipeline.transformers.generation_fields import field_types
from fastgen.serving.limits import Limits

_TOKEN = Annotated[StrictInt, Field(ge=0, lt=2**31)]
# Of a long list the first error says enough: a million of them would take seconds.
_TOKENS = Annotated[list[_TOKEN], Field(max_length=1000, fail_fast=True)]
_SHARE = Annotated[float, Field(ge=0.0, le=1.0)]
_COUNT = Annotated[StrictInt, Field(ge=0, lt=2**31)]
_BIAS = tuple[Annotated[_TOKENS, Field(min_length=1)], Annotated[float, Field(ge=-1e6, le=1e6)]]

# Other fields would return tensors, need files, other models or code of a repository (as beams in groups do), change
# how the service itself runs, or depend on other prompts in the batch, as lengths that count the prompt do.
_OFFERED: dict[str, Any] = {
    "max_new_tokens": Annotated[StrictInt, Field(ge=1)],
    "min_new_tokens": _COUNT,
    "num_beams": Annotated[StrictInt, Field(ge=1)],
    "num_return_sequences": Annotated[StrictInt, Field(ge=1)],
    "do_sample": StrictBool,
    "early_stopping": StrictBool | Literal["never"],
    "length_penalty": Annotated[float, Field(ge=-100.0, le=100.0)],
    "repetition_penalty": Annotated[float, Field(ge=0.01, le=100.0)],
    "no_repeat_ngram_size": Annotated[StrictInt, Field(ge=0, le=1000)],
    "encoder_repetition_penalty": Annotated[float, Field(ge=0.01, le=100.0)],
    "encoder_no_repeat_ngram_size": Annotated[StrictInt, Field(ge=0, le=1000)],
    "temperature": Annotated[float, Field(ge=0.01, le=100.0)],
    "top_k": _COUNT,
    "top_p": _SHARE,
    "min_p": _SHARE,
    "top_h": Annotated[float, Field(gt=0.0, le=1.0)],
    "typical_p": Annotated[float, Field(gt=0.0, le=1.0)],
    "epsilon_cutoff": Annotated[float, Field(ge=0.0, lt=1.0)],
    "eta_cutoff": Annotated[float, Field(ge=0.0, lt=1.0)],
    "bad_words_ids": Annotated[list[Annotated[_TOKENS, Field(min_length=1)]], Field(max_length=1000, fail_fast=True)],
    "sequence_bias": Annotated[list[_BIAS], Field(min_length=1, max_length=1000, fail_fast=True)],
    "suppress_tokens": _TOKENS,
    "begin_suppress_tokens": _TOKENS,
    "forced_bos_token_id": _TOKEN,
    "forced_eos_token_id": _TOKEN | _TOKENS,
    "exponential_decay_length_penalty": tuple[_COUNT, Annotated[float, Field(ge=0.5, le=1.5)]],
    "renormalize_logits": StrictBool,
    "remove_invalid_values": StrictBool,
}

MOST_FIELDS = 1000
TOO_MANY = "too_many_fields"  # the type of the error


def with_few_fields(value: Any) -> Any:
    """A value as it is; raises before pydantic makes an error of each field, if it is an object with too many."""
    if isinstance(value, dict) and len(value) > MOST_FIELDS:
        raise PydanticCustomError(TOO_MANY, "has too many fields")
    return value


VALIDATORS: dict[str, Any] = {"few_fields": model_validator(mode="before")(with_few_fields)}  # of a whole body


class Hypothesis(BaseModel):
    """One output of an input."""

    text: str
    score: float | None = Field(description="of the search; without beams the sum of the tokens' log-probabilities")


class Answer(BaseModel):
    """What has been generated."""

    outputs: list[list[Hypothesis]] = Field(description="of each input its hypotheses, best first")
    seed: int | None = Field(description="of the samples: the same request with it draws the same ones")


class Problem(BaseModel):
    """Why there is no answer."""

    detail: str


# What a request for a stream is answered with, for the page. The schema of a stream describes each event.
STREAMS: dict[str, Any] = {
    "description": "the answer",
    "content": {
        "text/event-stream": {
            "schema": {
                "type": "object",
                "properties": {"data": {"type": "string", "description": "JSON, or [DONE] at the end"}},
                "required": ["data"],
            }
        }
    },
}


def offered(limits: Limits) -> dict[str, Any]:
    """The fields of GenerationConfig that a request may set, with their types, for this version of transformers."""
    known = field_types()
    bounded = {
        "max_new_tokens": Annotated[StrictInt, Field(ge=1, le=limits.new_tokens)],
        "num_beams": Annotated[StrictInt, Field(ge=1, le=limits.beams)],
        "num_return_sequences": Annotated[StrictInt, Field(ge=1, le=limits.beams)],
    }
    return {name: kind for name, kind in {**_OFFERED, **bounded}.items() if name in known}


def question(limits: Limits) -> type[BaseModel]:
    """The class of a request's body."""
    fields: dict[str, Any] = {name: (kind | None, None) for name, kind in offered(limits).items()}
    text = Annotated[str, Field(min_length=1, max_length=limits.body_bytes)]
    # For the page, where it can be sent as it is; an example made from the types would set every field.
    example: dict[str, Any] = {
        "text": "order 4213",
        "num_beams": min(4, limits.beams),
        "max_new_tokens": min(60, limits.new_tokens),
    }
    return create_model(
        "Question",
        __config__=ConfigDict(extra="forbid", json_schema_extra={"example": example}),
        __validators__=VALIDATORS,
        text=(text | Annotated[list[text], Field(min_length=1, max_length=limits.inputs, fail_fast=True)], ...),
        stream=(StrictBool, Field(False, description="server-sent events; beams stream what is decided")),
        **of_any_search(limits),
        **fields,
    )


def of_any_search(limits: Limits) -> dict[str, Any]:
    """Fields of a request's body that are none of GenerationConfig's: the seed and the time."""
    return {
        "seed": (Annotated[StrictInt, Field(ge=0, lt=2**63)] | None, Field(None, description="of sampling")),
        "timeout": (Annotated[float, Field(gt=0, le=limits.seconds)] | None, Field(None, description="in seconds")),
    }


NOT_GENERATION = ("text", "seed", "stream", "timeout")


def given(body: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of GenerationConfig that a request sets."""
    return {name: value for name, value in body.items() if name not in NOT_GENERATION and value is not None}


def finite(score: float | None) -> float | None:
    """The score, or None if it is infinite, which JSON can't say: an impossible hypothesis has no score."""
    return score if score is not None and math.isfinite(score) else None
